"""Finding and stopping the processes of a run; the guard that does it when the driver dies."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from crosstrain import guard, processes

SOURCES = str(Path(__file__).parents[1] / "src")

STUBBORN = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(120)
"""
PATIENT = "import time; print('ready', flush=True); time.sleep(120)"


@pytest.fixture
def run_id():
    """A run's id; whatever carries it is killed in the end."""
    name = uuid.uuid4().hex
    yield name
    for pid in processes.processes_of(name):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(run_id):
    """Start `python -c` as a process of the run in a session of its own, and wait for its `ready`."""
    started = []

    def begin(code, *arguments, run_id=run_id, environ=None, ready="ready", **options):
        environ = os.environ | {"PYTHONPATH": SOURCES} | ({processes.RUN_ID_VARIABLE: run_id} if run_id else {}) | (environ or {})
        command = [sys.executable, "-c", code, *map(str, arguments)]
        options = {"start_new_session": True, "stdout": subprocess.PIPE, "text": True, "env": environ} | options
        process = subprocess.Popen(command, **options)
        started.append(process)
        if ready:
            assert process.stdout.readline().strip() == ready
        return process

    yield begin
    for pid in processes.processes_of(run_id, [process.pid for process in started]):  # also those without the environment
        os.kill(pid, signal.SIGKILL)
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def spawn(code, then="time.sleep(120)", **options):
    """Code of a parent: start `code` in a child with these Popen options, print its pid, do `then`."""
    return f"import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', {code!r}], **{options!r})\n{then}"


def children_of(pid):
    return [stat.pid for stat in map(processes.read_stat, processes.all_pids()) if stat and stat.parent == pid]


def alive(pid):
    stat = processes.read_stat(pid)
    return stat is not None and not stat.dead


def wait_until(condition, timeout_s=15.0):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_found_by_the_id_alone(start, run_id):
    ours = start(PATIENT)
    start(PATIENT, run_id=run_id[:-1])
    start(PATIENT, run_id=run_id + "0")
    start(PATIENT, run_id=None, environ={"OTHER": f"CROSSTRAIN_RUN_ID={run_id}"})
    assert processes.processes_of(run_id) == [ours.pid]


def test_found_by_descent_and_session_where_the_environment_was_cleared(start, run_id):
    child = spawn(PATIENT, start_new_session=True, env={})
    orphan_of_the_session = spawn(PATIENT, then="print('ready', flush=True)", env={}, stdout=subprocess.DEVNULL)
    descent = start(child)
    session = start(spawn(orphan_of_the_session, env={}))
    assert wait_until(lambda: len(processes.processes_of(run_id)) == 4)
    assert {descent.pid, session.pid} < set(processes.processes_of(run_id))


def test_the_caller_is_never_among_them(start, run_id):
    code = "import sys; from crosstrain import processes; print(processes.processes_of(sys.argv[1]), flush=True)"
    start(code, run_id, ready="[]")


def test_all_are_stopped_quickly_where_sigterm_is_enough(start, run_id):
    started = [start(PATIENT), start(spawn(PATIENT))]
    begin = time.monotonic()
    assert processes.stop_all(run_id, [process.pid for process in started]) == []
    assert time.monotonic() - begin < 4, "waited for the grace to end"
    assert [process.wait() for process in started] == [-signal.SIGTERM] * 2


def test_a_process_may_clean_up(start, run_id, tmp_path):
    code = """
import signal, sys, time
def end(*_):
    time.sleep(0.5)
    open(sys.argv[1], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(120)
"""
    process = start(code, tmp_path / "cleaned")
    stopped = start(code, tmp_path / "woken")
    stopped.send_signal(signal.SIGSTOP)
    assert processes.stop_all(run_id) == []
    assert process.wait() == 0 and stopped.wait() == 0
    assert (tmp_path / "cleaned").exists() and (tmp_path / "woken").exists()


def test_one_that_ignores_sigterm_is_killed_after_the_grace(start, run_id):
    process = start(spawn(STUBBORN, start_new_session=True))
    begin = time.monotonic()
    assert processes.stop_all(run_id, grace_s=0.5) == []
    assert 0.5 <= time.monotonic() - begin < 10
    process.wait()
    assert processes.processes_of(run_id) == []


def test_processes_that_fork_while_they_are_killed(start, run_id):
    """Each lives for 20 ms and starts its successor, in a new session, just before it ends."""
    code = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
for _ in range(5000):
    time.sleep(0.02)
    if os.fork():
        os._exit(0)
    os.setsid()
"""
    start(code)
    start(code)
    assert processes.stop_all(run_id, grace_s=0.3) == []
    time.sleep(0.3)
    assert processes.processes_of(run_id) == []


def test_a_zombie_is_not_waited_for(start, run_id):
    process = start("import os; print('ready', flush=True); os._exit(0)")
    assert wait_until(lambda: processes.read_stat(process.pid).dead)
    begin = time.monotonic()
    assert processes.stop_all(run_id, [process.pid]) == []
    assert time.monotonic() - begin < 2


def test_the_session_of_a_leader_that_ended_is_stopped(start, run_id):
    """The leader is a zombie of the caller, its child has no environment left."""
    leader = start(spawn(STUBBORN, then="sys.exit(0)", env={}))
    assert wait_until(lambda: processes.read_stat(leader.pid).dead)
    left = processes.processes_of(run_id, [leader.pid])
    assert len(left) == 1
    assert processes.stop_all(run_id, [leader.pid], grace_s=0.2) == []
    assert not alive(left[0])


def test_a_reused_pid_is_not_taken_for_ours(start, run_id):
    """A session leader with a pid that we once had, but which is not our child and does not carry the run's id."""
    middle = start(spawn(PATIENT, start_new_session=True), run_id=None)
    stranger = children_of(middle.pid)[0]
    assert processes.processes_of(run_id, [stranger]) == []
    assert processes.stop_all(run_id, [stranger]) == []
    assert alive(stranger)
    os.kill(stranger, signal.SIGKILL)


def test_a_signal_reaches_only_the_process_that_was_seen(start):
    process = start(PATIENT, run_id=None)
    seen = processes.read_stat(process.pid)
    processes._send(seen._replace(start=seen.start - 1), signal.SIGKILL)
    time.sleep(0.2)
    assert process.poll() is None
    processes._send(seen, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_leader_that_ended_before_its_threads_is_alive(start, run_id):
    code = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    process = start(code)
    assert wait_until(lambda: b") Z " in Path(f"/proc/{process.pid}/stat").read_bytes())
    assert alive(process.pid)
    assert processes.stop_all(run_id, [process.pid], grace_s=0.2) == []
    assert process.wait(timeout=10) < 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_another_users_process_is_reported_and_left_alone(start, run_id):
    root_owned = start(PATIENT)
    code = f"""
import os, sys
from crosstrain import processes
ours = os.getpid()
os.setuid(65534)
processes._carries = lambda pid, marker: pid == {root_owned.pid}  # found, as by descent, but not ours to stop
print(processes.stop_all({run_id!r}, grace_s=0.1, limit_s=0.5), flush=True)
"""
    start(code, run_id=None, ready=f"[{root_owned.pid}]")
    assert alive(root_owned.pid)


# ----------------------------------------------------------------------------------------------------------- the guard

DRIVER = """
import os, subprocess, sys, time
from crosstrain import guard
held = guard.start_guard(sys.argv[1])
if "fork" in sys.argv and os.fork() == 0:  # holds the pipe's other end, too
    time.sleep(120)
run = os.environ | {"CROSSTRAIN_RUN_ID": sys.argv[1]}
worker = subprocess.Popen([sys.executable, "-c", sys.argv[2]], env=run, stdout=subprocess.PIPE, start_new_session=True)
worker.stdout.readline()
print(held.pid, flush=True)
if "release" in sys.argv:
    held.release()
    held.release()
    print("released", flush=True)
time.sleep(120)
"""
# A worker with a grandchild in a session of its own, as mpirun makes them; both ignore SIGTERM.
WORKER = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
time.sleep(120)
"""


def start_driver(start, run_id, *options):
    driver = start(DRIVER, run_id, WORKER, *options, run_id=None, ready=None, stdin=subprocess.DEVNULL)
    guard_pid = int(driver.stdout.readline())
    assert len(processes.processes_of(run_id)) == 2, "the worker and its child, not the guard"
    return driver, guard_pid


@pytest.mark.parametrize("way", ["kill", pytest.param("kill the group", marks=pytest.mark.long), "fork"])
def test_nothing_outlives_a_killed_driver(start, run_id, way):
    driver, guard_pid = start_driver(start, run_id, way)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(guard_pid, number)
    forked = [pid for pid in children_of(driver.pid) if pid != guard_pid and pid not in processes.processes_of(run_id)]
    begin = time.monotonic()
    os.killpg(driver.pid, signal.SIGKILL) if way == "kill the group" else driver.kill()
    driver.wait()
    assert wait_until(lambda: not processes.processes_of(run_id)), "still there after 15 s"
    assert time.monotonic() - begin < 15
    assert wait_until(lambda: not alive(guard_pid), 5), "the guard stays"
    assert len(forked) == (way == "fork")
    for pid in forked:  # does not carry the run's id: a test's own affair
        os.kill(pid, signal.SIGKILL)


def test_a_released_guard_leaves_and_touches_nothing(start, run_id):
    driver, guard_pid = start_driver(start, run_id, "release")
    assert driver.stdout.readline() == "released\n"
    assert not alive(guard_pid)
    time.sleep(0.3)
    assert len(processes.processes_of(run_id)) == 2


def test_the_guard_is_not_a_process_of_the_run(run_id, monkeypatch):
    monkeypatch.setenv(processes.RUN_ID_VARIABLE, run_id)
    with guard.start_guard(run_id) as held:
        assert processes.processes_of(run_id) == [] and alive(held.pid)


def test_a_guard_that_was_killed_does_not_fail_the_run(run_id):
    with guard.start_guard(run_id) as held:
        os.kill(held.pid, signal.SIGKILL)
        time.sleep(0.3)


def test_the_guard_outlives_a_driver_that_dies_at_once(start, run_id):
    """The worker is found even if the driver is gone before the guard has read its first line."""
    code = """
import os, subprocess, sys
from crosstrain import guard
guard.start_guard(sys.argv[1])
run = os.environ | {"CROSSTRAIN_RUN_ID": sys.argv[1]}
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], env=run, start_new_session=True)
os.kill(os.getpid(), 9)
"""
    start(code, run_id, run_id=None, ready=None).wait()
    assert wait_until(lambda: not processes.processes_of(run_id))

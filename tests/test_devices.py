"""GPUs as CUDA_VISIBLE_DEVICES shows them, CPUs, leases between drivers, system samples and who disturbed them.

NVML's answers were recorded on a machine with two H200s (tests/record_nvml.py), with what the CUDA driver itself showed there.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from crosstrain import devices, leases, measured, samples, system_samples
from crosstrain.devices import Gpu, visible_gpus
from crosstrain.errors import OutcomeError
from crosstrain.system_samples import SystemSampler
from crosstrain_worker import record

DATA = Path(__file__).parent / "data"
SOURCES = str(Path(__file__).parents[1] / "src")
DISCOVERY = json.loads((DATA / "nvml_discovery.json").read_text())
SAMPLING = json.loads((DATA / "nvml_sampling.json").read_text())
A, B = DISCOVERY["forms"][0]["cuda"]["uuids"]


class Replay:
    """Stands for pynvml and gives recorded answers, in order, the last one for ever; `changes` replaces or adds answers."""

    class NVMLError(Exception):
        pass

    def __init__(self, recording, changes=None, pids=None):
        self.answers = {key: list(values) for key, values in (recording["answers"] | (changes or {})).items()}
        self.constants = recording["constants"]
        self.pids = pids or {}
        self.asked = []

    def __getattr__(self, name):
        if name in self.constants:
            return self.constants[name]

        def call(*arguments):
            key = json.dumps([name, *arguments])
            self.asked.append(key)
            values = self.answers[key]
            answer = values.pop(0) if len(values) > 1 else values[0]
            if isinstance(answer, dict) and "error" in answer:
                raise self.NVMLError(answer["text"])
            return self._objects(answer)

        return call

    def _objects(self, answer):
        if isinstance(answer, list):
            return [self._objects(item) for item in answer]
        if isinstance(answer, dict) and "struct" in answer:
            fields = dict(answer["struct"])
            if "pid" in fields:
                fields["pid"] = self.pids[fields["pid"]]
            return SimpleNamespace(**fields)
        return answer


@pytest.fixture
def children():
    """Start `python -c` processes that are killed at the end of the test."""
    started = []

    def start(code, *arguments, **options):
        environ = os.environ | {"PYTHONPATH": SOURCES} | options.pop("env", {})
        process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=environ, text=True, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


# ---------------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, [A, B]),
        ("1", [B]),
        ("1,0", [B, A]),
        (" 1,0 ", [B, A]),
        (A, [A]),
        (f"{B},{A}", [B, A]),
        (A[:5], [A]),
        ("GPU-" + A[4:].upper(), [A]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", [A]),
        ("-1,0", []),
        ("0,", [A]),
        ("0,,1", [A]),
        ("0,NoDevFiles", [A]),
    ],
)
def test_cuda_visible_devices(value, shown):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [gpu.uuid for gpu in visible_gpus(environ, Replay(DISCOVERY))] == shown


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("0,7", ["7 is not on this machine", A, B, "NVIDIA H200"]),
        ("7", ["7 is not on this machine"]),
        ("GPU-00000000-0000-0000-0000-000000000000", ["GPU-00000000", "is not on this machine"]),
        ("MIG-00000000-0000-0000-0000-000000000000", ["MIG-00000000", "is not on this machine"]),
        ("GPU-", ["GPU-", "more than one"]),
        ("gpu0", ["gpu0 is not"]),
        ("0;1", ["0;1 is not"]),
        ("0,0", ["GPU 0", "twice"]),
        (f"{A},{A[:6]}", ["GPU 0", "twice"]),
        (f"{A},1", ["mixes indices and UUIDs"]),
    ],
)
def test_cuda_visible_devices_refused(value, says):
    with pytest.raises(OutcomeError) as caught:
        visible_gpus({"CUDA_VISIBLE_DEVICES": value}, Replay(DISCOVERY))
    assert caught.value.outcome == "unsupported" and caught.value.hint
    for part in [f"CUDA_VISIBLE_DEVICES={value}", *says]:
        assert part in caught.value.message


@pytest.mark.parametrize("form", DISCOVERY["forms"], ids=lambda form: str(form["value"])[:20])
def test_never_another_answer_than_the_cuda_driver(form):
    environ = {} if form["value"] is None else {"CUDA_VISIBLE_DEVICES": form["value"]}
    try:
        ours = [gpu.uuid for gpu in visible_gpus(environ, Replay(DISCOVERY))]
    except OutcomeError:
        return  # which ones may be refused is the test above
    assert ours == form["cuda"]["uuids"]


def test_a_gpu_is_described():
    gpu = visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, Replay(DISCOVERY))[0]
    assert gpu == Gpu(index=1, uuid=B, name="NVIDIA H200", memory_mb=150755, compute_capability=(9, 0))
    assert not gpu.mig and gpu.label == "1"


def mig_machine():
    """The recorded machine, GPU 0 in MIG mode with instances 0 and 2. Composed after NVML's documentation: none was at hand."""
    first, second, absent = {"handle": "m0"}, {"handle": "m2"}, [{"error": 6, "text": "Not Found"}]
    changes = {
        '["nvmlDeviceGetMigMode", {"handle": 0}]': [[1, 1]],
        '["nvmlDeviceGetMaxMigDeviceCount", {"handle": 0}]': [3],
        '["nvmlDeviceGetMigDeviceHandleByIndex", {"handle": 0}, 0]': [first],
        '["nvmlDeviceGetMigDeviceHandleByIndex", {"handle": 0}, 1]': absent,
        '["nvmlDeviceGetMigDeviceHandleByIndex", {"handle": 0}, 2]': [second],
    }
    for handle, uuid in ((first, "MIG-aaaa-1"), (second, "MIG-aabb-2")):
        key = json.dumps(handle)
        changes[f'["nvmlDeviceGetUUID", {key}]'] = [uuid]
        changes[f'["nvmlDeviceGetName", {key}]'] = ["NVIDIA H200 MIG 3g.71gb"]
        changes[f'["nvmlDeviceGetMemoryInfo", {key}]'] = [{"struct": {"total": 71_000_000_000, "used": 0}}]
    return changes


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ["MIG-aaaa-1", "MIG-aabb-2", B]),
        ("MIG-aabb-2,MIG-aaaa-1", ["MIG-aabb-2", "MIG-aaaa-1"]),
        ("MIG-aab", ["MIG-aabb-2"]),
        ("0", ["MIG-aaaa-1"]),  # CUDA: the first MIG device of that GPU
        (A, ["MIG-aaaa-1"]),
        ("1", [B]),
    ],
)
def test_mig(value, shown):
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | ({} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    gpus = visible_gpus(environ, Replay(DISCOVERY, mig_machine()))
    assert [gpu.uuid for gpu in gpus] == shown
    assert [gpu.mig for gpu in gpus] == [uuid.startswith("MIG") for uuid in shown]
    assert {gpu.label for gpu in gpus} <= {"0_mig_0", "0_mig_2", "1"}


def test_mig_mode_without_an_instance_has_no_device():
    changes = mig_machine() | {'["nvmlDeviceGetMaxMigDeviceCount", {"handle": 0}]': [0]}
    assert [gpu.uuid for gpu in visible_gpus({}, Replay(DISCOVERY, changes))] == [B]
    with pytest.raises(OutcomeError, match="MIG mode"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, Replay(DISCOVERY, changes))


def test_an_ambiguous_mig_prefix_is_refused():
    with pytest.raises(OutcomeError, match="MIG-aa fits more than one"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-aa"}, Replay(DISCOVERY, mig_machine()))


def test_an_index_among_different_models_needs_the_pci_order():
    changes = {'["nvmlDeviceGetName", {"handle": 1}]': ["NVIDIA L4"]}
    with pytest.raises(OutcomeError) as caught:
        visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, Replay(DISCOVERY, changes))
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in caught.value.hint
    ordered = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_gpus(ordered, Replay(DISCOVERY, changes))[0].name == "NVIDIA L4"
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": B}, Replay(DISCOVERY, changes))[0].name == "NVIDIA L4"


def test_a_gpu_that_fell_off_the_bus_is_left_out():
    changes = {'["nvmlDeviceGetHandleByIndex", 0]': [{"error": 15, "text": "GPU is lost"}]}
    gpus = visible_gpus({}, Replay(DISCOVERY, changes))
    assert [(gpu.index, gpu.uuid) for gpu in gpus] == [(1, B)]


@pytest.mark.skipif(devices.open_nvml()[0] is not None, reason="this machine has an NVIDIA driver")
def test_no_driver_no_gpu():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == []
    assert "NVML" in devices.open_nvml()[1]


def test_the_machine_is_described():
    about = devices.describe_machine(Replay(DISCOVERY))
    assert json.loads(json.dumps(about)) == about
    assert about["nvidia_driver"] == "580.159.04" and about["cuda"] == "13.0"
    assert [gpu["uuid"] for gpu in about["gpus"]] == [A, B]
    assert about["gpus"][0]["sm_clock_max_mhz"] == 1980 and about["gpus"][0]["power_limit_w"] == 700
    assert about["cpu"] and about["cpu_cores"] >= 1 and about["memory_mb"] > 100
    assert None not in about.values()


# ---------------------------------------------------------------------------------------------------------------- CPUs


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text) + "\n")


def machine_with_hyperthreads(root):
    """Two packages of two cores of two threads; the siblings are cpu n and cpu n+4, core ids repeat in each package."""
    for cpu in range(8):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(topology / "core_id", cpu % 2)
        write(topology / "physical_package_id", cpu % 4 // 2)


def test_one_cpu_per_core_first(tmp_path, monkeypatch):
    machine_with_hyperthreads(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 6, 5, 3, 2, 1, 0})
    assert devices.logical_cpus(tmp_path) == [0, 1, 2, 3, 5, 6, 7]
    assert devices.physical_cores(tmp_path) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 0, 1, 5})
    assert devices.logical_cpus(tmp_path) == [0, 1, 4, 5]
    assert devices.physical_cores(tmp_path) == 2


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "150000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 9"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "400000 100000", "sys/fs/cgroup/a/b/cpu.max": "5 2"}, 2.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/"}, None),
        ({}, None),
        # A container on cgroup v1: the host's path in /proc, the container's own group at the mount.
        (
            {
                "proc/self/cgroup": "9:memory:/m\n4:cpu,cpuacct:/docker/7f",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpuset:/\n1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_cpu_quota(tmp_path, files, quota):
    for name, text in files.items():
        write(tmp_path / name, text)
    assert devices.cpu_quota(tmp_path) == quota


def test_the_quota_limits_the_cpus(tmp_path, monkeypatch):
    machine_with_hyperthreads(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "210000 100000")
    assert devices.logical_cpus(tmp_path) == [0, 1, 2]
    assert devices.physical_cores(tmp_path) == 3
    write(tmp_path / "sys/fs/cgroup/cpu.max", "10000 100000")
    assert devices.logical_cpus(tmp_path) == [0]


def test_the_affinity_mask_counts(children):
    last = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{last}]); from crosstrain import devices; print(devices.logical_cpus())"
    assert children(code, stdout=subprocess.PIPE).communicate()[0].strip() == f"[{last}]"


# -------------------------------------------------------------------------------------------------------------- leases

GPUS = [Gpu(i, f"GPU-{i:08d}", "test", 1000, (9, 0)) for i in range(4)]

HOLDER = """
import subprocess, sys
from crosstrain import leases
from test_devices import GPUS
with leases.lease_gpus(GPUS, int(sys.argv[1]), lambda text: print(text, flush=True)) as gpus:
    if "child" in sys.argv:
        nothing = subprocess.DEVNULL
        print(subprocess.Popen(["sleep", "60"], close_fds=False, stdin=nothing, stdout=nothing).pid, flush=True)
    print(*[gpu.index for gpu in gpus], flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def driver(children, tmp_path, monkeypatch):
    monkeypatch.setenv("CROSSTRAIN_CACHE", str(tmp_path))
    environ = {"PYTHONPATH": os.pathsep.join([SOURCES, str(Path(__file__).parent)])}

    def start(*arguments, code=HOLDER):
        return children(code, *arguments, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    return start


def fail_if_waiting(text):
    raise AssertionError(text)


def test_drivers_get_different_gpus(driver):
    other = driver(2)
    assert other.stdout.readline() == "0 1\n"
    with leases.lease_gpus(GPUS, 2, fail_if_waiting) as gpus:
        assert gpus == GPUS[2:]


def test_the_order_is_the_callers(driver):
    with leases.lease_gpus([GPUS[3], GPUS[1]], 1, fail_if_waiting) as gpus:
        assert gpus == [GPUS[3]]


def test_waiting_is_said_once_and_names_the_holder(driver):
    holder = driver(2)
    holder.stdout.readline()
    waiter = driver(3)
    said = waiter.stdout.readline()
    assert said.startswith("waiting for 3 GPUs: leased by ") and said.count(f"pid {holder.pid} (") == 1
    time.sleep(0.7)  # three more looks
    # All or nothing: what it can not use yet is free for others.
    with leases.lease_gpus(GPUS, 2, fail_if_waiting) as gpus:
        assert gpus == GPUS[2:]
    holder.communicate("end\n")
    assert waiter.stdout.readline() == "0 1 2\n"


def test_a_dead_driver_frees_its_devices_at_once_though_its_child_lives(driver):
    holder = driver(4, "child")
    child = int(holder.stdout.readline())
    try:
        holder.stdout.readline()
        holder.kill()
        holder.wait()
        with leases.lease_gpus(GPUS, 4, fail_if_waiting) as gpus:
            assert len(gpus) == 4
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_does_not_keep_the_lease(driver):
    with leases.lease_gpus(GPUS, 4, fail_if_waiting):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with leases.lease_gpus(GPUS, 4, fail_if_waiting):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_failing_run_frees_its_devices(driver):
    with pytest.raises(RuntimeError), leases.lease_gpus(GPUS, 4, fail_if_waiting):
        raise RuntimeError
    with leases.lease_gpus(GPUS, 4, fail_if_waiting):
        pass


def test_drivers_that_need_several_never_block_each_other(driver, tmp_path):
    code = """
import os, sys
from crosstrain import leases
from test_devices import GPUS
order = GPUS if sys.argv[1] == "up" else GPUS[::-1]
for _ in range(3):
    with leases.lease_gpus(order, 3, lambda text: None):
        os.close(os.open(sys.argv[2], os.O_CREAT | os.O_EXCL))  # fails if another one holds them, too
        os.unlink(sys.argv[2])
"""
    drivers = [driver(way, tmp_path / "inside", code=code) for way in ("up", "down", "up")]
    assert [process.wait(timeout=60) for process in drivers] == [0, 0, 0]


def test_waiting_can_be_interrupted(driver):
    holder = driver(4)
    holder.stdout.readline()
    waiter = driver(1)
    waiter.stdout.readline()
    waiter.send_signal(signal.SIGINT)
    assert waiter.wait(timeout=10) != 0


def test_cpus_are_leased(driver):
    everything = devices.logical_cpus()
    with leases.lease_cpus(len(everything), fail_if_waiting) as cpus:
        assert cpus == everything
        with pytest.raises(AssertionError, match=rf"^waiting for 1 CPU: leased by pid {os.getpid()} \("):
            leases.lease_cpus(1, fail_if_waiting).__enter__()
    with leases.lease_cpus(1, fail_if_waiting) as cpus:
        assert cpus == everything[:1]


def test_more_than_there_are_is_refused(driver):
    with pytest.raises(ValueError, match="5 GPUs asked for, but there are 4"), leases.lease_gpus(GPUS, 5, fail_if_waiting):
        pass
    with pytest.raises(ValueError, match="CPUs"), leases.lease_cpus(100_000, fail_if_waiting):
        pass


# ------------------------------------------------------------------------------------------------------ system samples

BURN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
end = time.time() + float(sys.argv[2])
while time.time() < end:
    pass
"""

# A second of CPU time, however long that takes here just now.
WORK = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
while time.process_time() < 1:
    pass
"""

# Short-lived children that come and go between two samples.
FAMILY = """
import os, subprocess, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
burn = "import time; end = time.process_time() + 0.25\\nwhile time.process_time() < end: pass"
for _ in range(4):
    subprocess.run([sys.executable, "-S", "-c", burn])
"""


def idle_s(cpu):
    times = psutil.cpu_times(percpu=True)[cpu]
    return times.idle + times.iowait


def sample_until(sampler, end):
    while time.time() < end:
        time.sleep(0.25)
        sampler.sample()


def test_a_stranger_on_the_leased_cpu_is_seen(children):
    cpu = devices.logical_cpus()[0]
    children(BURN, cpu, 10)
    time.sleep(0.3)
    sampler = SystemSampler([], [cpu], [])
    start = time.time()
    sample_until(sampler, start + 2)
    assert sampler.others_cpu_fraction(start, time.time()) > 0.5
    text = sampler.contamination(start, time.time())
    assert text.startswith("others used ") and text.endswith(" % of the leased CPUs")
    assert sampler.contamination(start, start + 0.5) is None, "too short to tell"


def test_without_leased_cpus_there_is_no_verdict(children):
    children(BURN, devices.logical_cpus()[0], 10)
    sampler = SystemSampler([], None, [])
    start = time.time()
    sample_until(sampler, start + 1.5)
    assert sampler.contamination(start, time.time()) is None


@pytest.mark.parametrize("kind", ["one process", "dead children", "not sampled meanwhile", "the driver"])
def test_our_own_work_is_not_counted_as_others(children, kind):
    """What others used = wall time - idle time - our time, whoever else uses this machine just now."""
    cpu = devices.logical_cpus()[-1]
    sampler = SystemSampler([], [cpu], [])
    start, idle, driver_s = time.time(), idle_s(cpu), time.process_time()
    ours = 0.0
    if kind == "the driver":
        mask = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {cpu})
        try:
            while time.process_time() < driver_s + 0.7:
                pass
        finally:
            os.sched_setaffinity(0, mask)
    else:
        root = children(WORK if kind == "one process" else FAMILY, cpu)
        sampler.watch([root.pid])
        ended = 0
        while not ended:
            if kind != "not sampled meanwhile":
                sampler.sample()
            time.sleep(0.1)
            ended, _, usage = os.wait4(root.pid, os.WNOHANG)
        root.returncode = 0
        ours = usage.ru_utime + usage.ru_stime
    time.sleep(0.5)
    sampler.sample()
    end = time.time()
    sampler.sample()
    window = end - start
    expected = window - (idle_s(cpu) - idle) - ours - (time.process_time() - driver_s)
    assert ours + time.process_time() - driver_s >= 0.7, "the test did not work"
    assert sampler.others_cpu_fraction(start, end) * window == pytest.approx(max(0, expected), abs=0.15)


@pytest.mark.parametrize("parent_s", [0, 0.5], ids=["never seen with its parent", "seen with its parent"])
def test_the_tree_counts_an_orphan_and_keeps_its_time(children, tmp_path, parent_s):
    code = """
import os, subprocess, sys, time
work = "import os, sys, time\\nopen(sys.argv[1], 'w').write(str(os.getpid()))\\n"
work += "while time.process_time() < 0.5: pass\\ntime.sleep(60)"
sys.stdin.readline()
subprocess.Popen([sys.executable, "-S", "-c", work, sys.argv[1]], stdin=subprocess.DEVNULL)
time.sleep(float(sys.argv[2]))
"""
    root = children(code, tmp_path / "pid", parent_s, start_new_session=True, stdin=subprocess.PIPE)
    tree = system_samples.ProcessTree()
    tree.watch([root.pid])
    root.stdin.write("go\n")
    root.stdin.flush()
    end = time.time() + 30
    if not parent_s:
        root.wait()
    while (not (tmp_path / "pid").exists() or tree.cpu_s() < 0.5 or root.poll() is None) and time.time() < end:
        time.sleep(0.1)
        tree.update()
    before = tree.cpu_s()
    assert before >= 0.5 and tree.memory_mb() > 1
    orphan = int((tmp_path / "pid").read_text())
    os.kill(orphan, signal.SIGKILL)
    while os.path.exists(f"/proc/{orphan}") and time.time() < end:
        time.sleep(0.05)
    tree.update()
    assert tree.cpu_s() >= before and tree.memory_mb() == 0.0


def test_the_tree_counts_children_that_came_and_went(children):
    root = children(FAMILY + "print('done', flush=True); time.sleep(60)", devices.logical_cpus()[0], stdout=subprocess.PIPE)
    tree = system_samples.ProcessTree()
    tree.watch([root.pid])
    root.stdout.readline()
    tree.update()
    assert tree.cpu_s() >= 0.9


def test_memory_and_mlflows_keys(children):
    code = "import time; block = b'x' * 200_000_000; print(len(block), flush=True); time.sleep(60)"
    root = children(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])", stdout=subprocess.PIPE)
    root.stdout.readline()
    sampler = SystemSampler([root.pid], None, [])
    for _ in range(3):
        time.sleep(0.1)
        sampler.sample()
    series = sampler.series()
    assert set(series) == {
        "system/cpu_utilization_percentage",
        "system/system_memory_usage_megabytes",
        "system/system_memory_usage_percentage",
        "system/worker_cpu_percentage",
        "system/worker_memory_megabytes",
    }
    for times, values in series.values():
        assert len(times) == len(values) >= 3 and times == sorted(times)
        assert abs(times[-1] / 1000 - time.time()) < 60, "milliseconds"
    assert 200 < sampler.peak_memory_mb < 400
    assert all(0 <= value <= 100 for value in series["system/cpu_utilization_percentage"][1])
    os.kill(psutil.Process(root.pid).children()[0].pid, signal.SIGKILL)


def test_a_kernel_whose_idle_time_goes_back(monkeypatch):
    """What Linux did on a virtual machine between two samples: (idle, total) in s."""
    readings = iter([(100.0, 200.0), (99.9, 200.1), (100.5, 200.2), (100.55, 200.3)])
    monkeypatch.setattr(system_samples, "read_cpu_times", lambda: {"cpu": next(readings)})
    sampler = SystemSampler([], None, [])
    for _ in range(3):
        sampler.sample()
    assert sampler.series()["system/cpu_utilization_percentage"][1] == pytest.approx([100, 0, 50])


def test_a_sample_is_cheap(children):
    code = "import subprocess, time\nfor _ in range(5): subprocess.Popen(['sleep', '30'])\ntime.sleep(30)"
    root = children(code, start_new_session=True)
    time.sleep(0.5)
    sampler = SystemSampler([root.pid], devices.logical_cpus(), [])
    costs = []
    for _ in range(8):
        before = time.process_time()
        sampler.sample()
        costs.append(time.process_time() - before)
    os.killpg(root.pid, signal.SIGKILL)
    assert min(costs) <= 0.010


@pytest.fixture
def replayed(children, monkeypatch):
    """A sampler that got the recorded answers, a sample each 0.5 s; process 1 is ours, process 2 a stranger on the same GPU."""
    monkeypatch.setattr(time, "time", lambda: replayed_time[0])
    replayed_time = [1000.0]

    def replay(changes=None, samples=32, pids=None, gpus=None):
        ours, stranger = (children("import time; time.sleep(60)") for _ in range(2))
        nvml = Replay(SAMPLING, changes, pids or {SAMPLING["our_pid"]: ours.pid, SAMPLING["stranger_pid"]: stranger.pid})
        sampler = SystemSampler([], None, gpus or [Gpu(1, SAMPLING["gpu"][1], "NVIDIA H200", 150755, (9, 0))], nvml)
        sampler.watch([ours.pid])
        for _ in range(samples):
            replayed_time[0] += 0.5
            sampler.sample()
        return sampler, nvml, stranger

    return replay


def recorded(function):
    return next(values for key, values in SAMPLING["answers"].items() if key.startswith(f'["{function}"'))


def test_only_the_leased_gpu_is_asked_and_has_series(replayed):
    sampler, nvml, _ = replayed()
    assert {key for key in nvml.asked if "ByUUID" in key} == {f'["nvmlDeviceGetHandleByUUID", "{B}"]'}
    gpu_keys = {key for key in sampler.series() if "gpu" in key}
    assert gpu_keys == {
        f"system/gpu_1_{name}"
        for name in (
            "utilization_percentage",
            "memory_usage_megabytes",
            "memory_usage_percentage",
            "power_usage_watts",
            "sm_clock_megahertz",
            "temperature_celsius",
            "throttled",
        )
    }
    times, watts = sampler.series()["system/gpu_1_power_usage_watts"]
    assert watts == [milliwatts / 1000 for milliwatts in recorded("nvmlDeviceGetPowerUsage")]
    assert times[:3] == [1000000, 1000500, 1001000]


def test_a_stranger_on_the_gpu_is_seen_in_its_window_only(replayed):
    sampler, _, stranger = replayed()
    first = next(i for i, p in enumerate(recorded("nvmlDeviceGetComputeRunningProcesses")) if len(p) > 1)
    comes = 1000 + first * 0.5
    others = f"others used GPU 1 (pid {stranger.pid}, {psutil.Process(stranger.pid).name()})"
    assert sampler.contamination(1000, comes - 0.1) is None
    assert sampler.contamination(1000, comes) == others
    between_two_samples = comes + 0.1, comes + 0.2
    assert sampler.contamination(*between_two_samples) == others
    assert sampler.contamination(5000, 6000) is None, "it had gone"


def test_pids_of_another_namespace_are_not_blamed(replayed, monkeypatch):
    """In a container NVML may give the host's pids: only what was there before our workers came is a stranger then."""
    key = '["nvmlDeviceGetComputeRunningProcesses", {"handle": 0}]'
    process = {"struct": {"pid": SAMPLING["our_pid"], "usedGpuMemory": 1}}
    monkeypatch.setattr(system_samples, "_INITIAL_PID_NAMESPACE", "pid:[1]")
    nowhere = 2**22 + 1  # above the kernel's largest pid
    sampler, _, _ = replayed({key: [[], [process]]}, pids={SAMPLING["our_pid"]: nowhere})
    assert sampler.contamination(1000, 1016) is None
    sampler, _, _ = replayed({key: [[process]]}, pids={SAMPLING["our_pid"]: nowhere})
    assert sampler.contamination(1000, 2000) == f"others used GPU 1 (pid {nowhere})"


def test_many_gpus_take_turns(replayed):
    gpus = [Gpu(i, f"GPU-{i}", "NVIDIA H200", 150755, (9, 0)) for i in range(6)]
    changes = {f'["nvmlDeviceGetHandleByUUID", "GPU-{i}"]': [{"handle": 0}] for i in range(6)}
    sampler, nvml, _ = replayed(changes, samples=20, gpus=gpus)
    asked = sum("nvmlDeviceGetPowerUsage" in key for key in nvml.asked)
    assert asked == 6 + 20 * 3, "all at first, then half of them each time"
    for i in range(6):
        assert len(sampler.series()[f"system/gpu_{i}_power_usage_watts"][0]) == 11
    assert sampler.energy_j(1000, 1009.5) is None
    assert sampler.throttled_pct() == 0
    assert sampler.device_memory_delta_mb > 1000


def test_energy_comes_from_the_counter(replayed):
    sampler, _, _ = replayed()
    millijoules = recorded("nvmlDeviceGetTotalEnergyConsumption")
    assert sampler.energy_j(1000, 1012) == pytest.approx((millijoules[24] - millijoules[0]) / 1000)
    half_way = (millijoules[0] + millijoules[1]) / 2
    assert sampler.energy_j(1000.25, 1012) == pytest.approx((millijoules[24] - half_way) / 1000)
    assert sampler.energy_j(1000, 1009.9) is None, "under 10 s"
    assert sampler.energy_j(1000, 1017) is None, "not sampled that far"


def test_energy_is_shared_by_all_samples_of_its_window(replayed):
    """First iterations with a sync each, half as fast as the blocks behind them; warm-up before and training after do not count."""
    rows = np.zeros(24, samples.ROW)
    rows["phase"] = [record.FIRST_STEP] + [record.ITERATION] * 12 + [record.BLOCK] * 10 + [record.TRAIN]
    rows["size"] = [1] * 13 + [20] * 10 + [1]
    rows["duration"] = [9] + [0.5] * 12 + [0.6] * 10 + [9]
    rows["start"] = np.concatenate([[0], 10 + np.arange(12) * 0.5, 16 + np.arange(10) * 0.6, [30]])
    sampler, _, _ = replayed()
    millijoules = recorded("nvmlDeviceGetTotalEnergyConsumption")
    joules = (millijoules[26] - millijoules[2]) / 1000  # 1001 s to 1013 s
    assert measured.energy_per_sample(sampler, rows, 991, 64) == pytest.approx(joules / (64 * (12 + 10 * 20)))
    assert measured.energy_per_sample(sampler, rows[8:], 991, 64) is None, "under 10 s"


def test_device_memory_above_the_first_sample(replayed):
    sampler, _, _ = replayed(samples=10)
    used = [answer["struct"]["used"] for answer in recorded("nvmlDeviceGetMemoryInfo")]
    assert sampler.device_memory_delta_mb == pytest.approx((used[5] - used[0]) / 1e6)


def test_throttling(replayed):
    key = '["nvmlDeviceGetCurrentClocksThrottleReasons", {"handle": 0}]'
    sampler, _, _ = replayed({key: [0x1, 0x2, 0x4, 0x44] + [0] * 16}, samples=19)
    assert sampler.throttled_pct() == pytest.approx(10)
    assert sampler.throttle_reasons() == {"power cap": pytest.approx(10), "hardware thermal": pytest.approx(5)}
    assert sampler.throttled_pct(1001, 1001.5) == 100
    assert sampler.throttled_pct(1005, 1008) == 0


def test_the_mean_clock_is_of_the_window(replayed):
    key = next(key for key in SAMPLING["answers"] if "nvmlDeviceGetClockInfo" in key)
    sampler, _, _ = replayed({key: [1980, 1980, 1900, 1800, 1700, *[1980] * 28]})
    assert sampler.sm_clock_mhz(1001, 1002) == 1800
    assert sampler.sm_clock_mhz(1001.1, 1001.2) is None


def test_what_the_device_does_not_tell_is_absent(replayed):
    """As on a MIG device: no utilisation, power, energy, clocks."""
    told = ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses")
    error = [{"error": 3, "text": "Not Supported"}]
    sampler, _, _ = replayed({key: error for key in SAMPLING["answers"] if json.loads(key)[0] not in told})
    gpu_keys = {key for key in sampler.series() if "gpu" in key}
    assert gpu_keys == {"system/gpu_1_memory_usage_megabytes", "system/gpu_1_memory_usage_percentage"}
    assert sampler.energy_j(1000, 1012) is None and sampler.throttled_pct() is None
    assert sampler.sm_clock_mhz(1000, 1012) is None
    assert sampler.device_memory_delta_mb > 1000


def test_without_gpus_nothing_is_claimed():
    sampler = SystemSampler([], None, [])
    assert sampler.throttled_pct() is None and sampler.device_memory_delta_mb is None
    assert sampler.energy_j(0, math.inf) is None and sampler.peak_memory_mb is None

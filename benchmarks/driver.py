"""What the driver costs: CPU time beside a run that is being timed, the time of one small run in all, of each further one.

Targets: at most 3 % of one core while a run is timed; a run with 0.1 s of (pretended) training at most 6 s from the command to
the prompt, environment and store there; each further run of a sweep at most 1.0 s beyond its worker's own time.

Usage: python benchmarks/driver.py [--seconds 20] [--repeats 3] [--runs 5]. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import running

CPU_PERCENT = 3.0
SINGLE_S = 6.0
FURTHER_S = 1.0
FAKE = ["framework=fake", "framework.step_ms=5", "network=lenet", "data=synthetic", "device=cpu", "threads=1", "epochs=0"]
#: 0.1 s of training: the iteration pass and one block
SMALL = [*FAKE, "measure=smoke", "measure.iterations=10", "measure.block_s=0.05", "measure.max_s=0.1"]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of one process in seconds, in steps of 10 ms (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def cpu_percent(folder: Path, seconds: float) -> float:
    """CPU time of the driver from the first to the last timed iteration of one run, in percent of the time between."""
    overrides = [*FAKE, f"measure.min_s={seconds:g}", f"measure.max_s={seconds:g}"]
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}  # with the live line, which costs most
    driver = subprocess.Popen(running.command(*overrides), cwd=folder, env=running.environment() | terminal, stdout=subprocess.DEVNULL)
    seen: dict[str, tuple[float, float]] = {}
    while driver.poll() is None and "done" not in seen:
        time.sleep(0.02)
        folders = running.run_folders(folder)
        for event in running.events(folders[-1]) if folders else []:
            name = event.get("name")
            if event["event"] == "phase" and name in ("iteration", "done") and name not in seen:
                seen[name] = time.monotonic(), cpu_s(driver.pid)
    if driver.wait() or "done" not in seen:
        sys.exit("the run failed")
    (begin, cpu_begin), (end, cpu_end) = seen["iteration"], seen["done"]
    return 100 * (cpu_end - cpu_begin) / (end - begin)


def single_s(folder: Path) -> float:
    """Seconds of one small run, from the command to its end."""
    begin = time.perf_counter()
    running.train(folder, *SMALL)
    return time.perf_counter() - begin


def further_s(folder: Path, runs: int) -> list[float]:
    """Seconds between the ends of consecutive runs of a sweep, without what each worker took by itself."""
    overrides = ["-m", *SMALL, f"repeat={','.join(str(n + 1) for n in range(runs))}"]
    sweep = subprocess.Popen(running.command(*overrides), cwd=folder, env=running.environment(), stdout=subprocess.DEVNULL)
    ends: list[float] = []
    while sweep.poll() is None:
        time.sleep(0.005)
        for path in folder.glob("outputs/*/*-sweep-*/outcomes.jsonl"):
            ends += [time.time()] * (path.read_bytes().count(b"\n") - len(ends))
    if sweep.returncode or len(ends) != runs:
        sys.exit("the sweep failed")
    own = [worker_s(run) for run in running.run_folders(folder)[-runs:]]
    start = worker_start_s(running.run_folders(folder)[-1])
    print(f"  a worker by itself: {running.spread(own)} s, and {start:.2f} s until its first event")
    return [end - before - own_s - start for before, end, own_s in zip(ends[:-1], ends[1:], own[1:], strict=True)]


def worker_s(run_folder: Path) -> float:
    """From the first to the last event of a worker."""
    times = [event["t"] for event in running.events(run_folder)]
    return times[-1] - times[0]


def worker_start_s(run_folder: Path) -> float:
    """From the start of a worker process to its first event: interpreter and numpy. Median of 3."""
    from crosstrain import paths

    found = []
    for _ in range(3):
        begin = time.time()
        with running.once_more(run_folder, [sys.executable, "-B", "-u", str(paths.worker_dir()), "FOLDER", "0"]) as (folder, _):
            found.append(running.events(folder)[0]["t"] - begin)
    return statistics.median(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="how long the run beside which CPU time is counted is timed")
    parser.add_argument("--repeats", type=int, default=3, help="small runs by themselves; their median counts")
    parser.add_argument("--runs", type=int, default=5, help="runs of the sweep")
    arguments = parser.parse_args()
    print(running.load())
    verdict = running.Verdict()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        running.train(folder, *SMALL)  # makes the store, the data and the weights
        singles = [single_s(folder) for _ in range(arguments.repeats)]
        print(f"one small run: {running.spread(singles)} s")
        further = further_s(folder, arguments.runs)
        print(f"each further run of a sweep: {running.spread(further)} s")
        apart = folder / "timed"
        apart.mkdir()
        percent = cpu_percent(apart, arguments.seconds)
    verdict.check("one small run in all", statistics.median(singles), SINGLE_S, "s")
    verdict.check("each further run of a sweep beyond its worker's own time", statistics.median(further), FURTHER_S, "s")
    verdict.check("CPU time of the driver while a run is timed", percent, CPU_PERCENT, "% of one core")
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())

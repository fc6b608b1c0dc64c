"""How long the tracking of one run takes. Usage: python benchmarks/tracking.py [--server | --uri URI]

Bounds: 200 iterations × 3 series, 40 params and 12 artifacts in at most 1 s on an existing local SQLite store and 2 s on a local
server (--server starts one); 20,000 iterations × 4 series with all raw samples as an artifact in at most 10 s on SQLite
(mlflow/mlflow#4299: 1,000 points took 90 s). The median of three; exit code 1 when a bound is broken. CPU time: of this process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from crosstrain.tracking import RunRecord, Series, Tracker

#: (iterations, series): bounds in s on SQLite, on a server (None: no bound)
RUNS = {(200, 3): (1.0, 2.0), (20_000, 4): (10.0, None)}
ROUNDS = 3


def track(tracker: Tracker, folder: Path, iterations: int, number: int) -> tuple[float, float]:
    """Seconds, and seconds of CPU time, from the start of the run to its final status, the journal included."""
    now = int(time.time() * 1000)
    steps = np.arange(iterations)
    draw = np.random.default_rng(0)
    names = ["iter/ms", "iter/samples_per_s", "iter/loss", "iter/accuracy"][:number]
    series = {name: Series(steps, draw.lognormal(size=iterations), now + steps) for name in names}
    samples = folder / f"samples.{iterations}.csv"
    table = np.column_stack([steps, *(series[name].values for name in names)])
    np.savetxt(samples, table, delimiter=",", header=",".join(["iteration", *names]), comments="")
    artifacts = [(samples, "samples")]
    for index in range(11):
        path = folder / f"log.{index}"
        path.write_text("a line of a log\n" * 200)
        artifacts.append((path, "logs"))

    begin, cpu = time.perf_counter(), time.process_time()
    params = {f"param_{index}": str(index) for index in range(40)}
    run_id = tracker.start(f"{iterations}x{number}", params, {"kind": "benchmark"}, now)
    metrics = {f"metric_{index}": float(index) for index in range(35)}
    record = RunRecord("x", params, {"outcome": "ok"}, metrics, series, "FINISHED", now, now + 1000, artifacts)
    record.save(folder)
    tracker.finish(run_id, record)
    return time.perf_counter() - begin, time.process_time() - cpu


@contextlib.contextmanager
def local_server(folder: Path) -> Iterator[str]:
    """`mlflow server` on SQLite, with artifacts through the server. Gives its URI."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/server.db", "--workers", "1"]
    command += ["--artifacts-destination", f"{folder}/artifacts", "--port", str(port)]
    # without the eight processes for its language-model jobs, whose start would be measured
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="store_true", help="into a local mlflow server, started for it")
    parser.add_argument("--uri", help="another store; runs go to the experiment crosstrain-benchmark")
    given = parser.parse_args()
    too_slow = False
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        uri = stack.enter_context(local_server(folder)) if given.server else given.uri
        tracker = Tracker(uri or f"sqlite:///{folder}/mlflow.db", "crosstrain-benchmark", folder)
        for label in ("import MLflow and open the store", "open it again"):
            begin, cpu = time.perf_counter(), time.process_time()
            tracker.preflight()
            print(f"{label}: {time.perf_counter() - begin:.2f} s, {time.process_time() - cpu:.2f} s of CPU time")
        for (iterations, number), bounds in RUNS.items():
            rounds = [track(tracker, folder, iterations, number) for _ in range(ROUNDS)]
            seconds, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
            bound = bounds[1] if tracker.is_server else bounds[0]
            limit = f" (at most {bound:g} s)" if bound else ""
            print(f"{iterations} iterations x {number} series: {seconds:.2f} s, {cpu:.2f} s of CPU time{limit}")
            too_slow |= bound is not None and seconds > bound
    return int(too_slow)


if __name__ == "__main__":
    sys.exit(main())

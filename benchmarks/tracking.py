"""How long the tracking of one run takes. Usage: python benchmarks/tracking.py [--uri URI]

Bound, on an existing local SQLite store: 20,000 iterations × 4 series with all raw samples as an artifact in at most 10 s
(mlflow/mlflow#4299: 1,000 points took 90 s). Exit code 1 when it is broken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from crosstrain.tracking import RunRecord, Series, Tracker

BOUND_S = 10.0
RUNS = ((200, 3), (20_000, 4))  # iterations, series


def track(tracker: Tracker, folder: Path, iterations: int, number: int) -> float:
    """Seconds from the start of the run to its final status."""
    now = int(time.time() * 1000)
    steps = np.arange(iterations)
    draw = np.random.default_rng(0)
    names = ["iter/ms", "iter/samples_per_s", "iter/loss", "iter/accuracy"][:number]
    series = {name: Series(steps, draw.lognormal(size=iterations), now + steps) for name in names}
    samples = folder / f"samples.{iterations}.csv"
    table = np.column_stack([steps, *(series[name].values for name in names)])
    np.savetxt(samples, table, delimiter=",", header=",".join(["iteration", *names]), comments="")

    begin = time.perf_counter()
    params = {f"param_{index}": str(index) for index in range(30)}
    run_id = tracker.start(f"{iterations}x{number}", params, {"kind": "benchmark"}, now)
    metrics = {f"metric_{index}": float(index) for index in range(35)}
    record = RunRecord("x", params, {"outcome": "ok"}, metrics, series, "FINISHED", now, now + 1000, [(samples, "samples")])
    tracker.finish(run_id, record)
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uri", help="another store than a temporary SQLite file; runs go to the experiment crosstrain-benchmark")
    uri = parser.parse_args().uri
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tracker = Tracker(uri or f"sqlite:///{folder}/mlflow.db", "crosstrain-benchmark", folder)
        for label in ("import MLflow and open the store", "open it again"):
            begin = time.perf_counter()
            tracker.preflight()
            print(f"{label}: {time.perf_counter() - begin:.2f} s")
        seconds = 0.0
        for iterations, number in RUNS:
            seconds = track(tracker, folder, iterations, number)
            print(f"{iterations} iterations x {number} series: {seconds:.2f} s")
    if uri is None and seconds > BOUND_S:
        print(f"too slow: {seconds:.1f} s, the bound is {BOUND_S:g} s")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

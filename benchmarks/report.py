"""How long `crosstrain report` takes over many runs. Usage: python benchmarks/report.py [--runs 1000]

The runs are 8 frameworks × 5 networks × 5 batches × 5 repeats, then once more × 25 batches (every run a cell of its own), each with the
params, tags and metrics of a real run, put into a new local SQLite store (which takes a minute and is not counted). Bound: 20 s for
1,000 runs, the start of the command included; exit code 1 when it is broken. CPU time: of the command.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from crosstrain.tracking import Tracker

BOUND_S = 20.0
FRAMEWORKS = ["caffe", "cntk", "jax", "mxnet", "paddle", "tensorflow", "theano", "torch"]
NETWORKS = ["alexnet_r", "fcn_r", "lenet", "lstm_imdb", "resnet50"]
COMMON = {
    "framework_version": "1.0.0", "data": "synthetic", "data_placement": "device", "task": "training", "device": "cpu",
    "device_name": "some CPU", "gpus": "0", "replicas": "1", "parallelism": "native", "scaling": "strong", "precision": "fp32",
    "compile": "off", "memory_format": "contiguous", "threads": "1", "optimizer": "sgd", "learning_rate": "0.1", "momentum": "0.9",
    "weight_decay": "0.0", "epochs": "0", "seed": "1", "measure": "standard", "study": "", "effort": "full", "parameters": "431080",
    "model_gflops": "0.01",
}  # fmt: skip


def fill(tracker: Tracker, number: int, repeats: int) -> None:
    """Put the runs into the store, each by one call of MLflow's."""
    from mlflow.entities import Metric, Param, RunStatus, RunTag

    draw = np.random.default_rng(0)
    choices = itertools.product(range(1, repeats + 1), NETWORKS, range(16, 16 * (25 // repeats + 1), 16), FRAMEWORKS)
    now = int(time.time() * 1000)
    for index, (repeat, network, batch, framework) in enumerate(itertools.islice(choices, number)):
        params = {**COMMON, "framework": framework, "network": network, "repeat": str(repeat)}
        params |= {"batch_global": str(batch), "batch_per_replica": str(batch)}
        tags = {"kind": "run", "sweep": "big", "study": "", "outcome": "ok", "outcome_reason": "", "host": "here", "parity": "proven"}
        step_ms = batch / 10 * float(draw.uniform(0.9, 1.1))
        metrics = {"step_ms": step_ms, "samples_per_s": 1000 * batch / step_ms, "device_memory_mb": 100.0}
        spread = {"low": 0.99, "high": 1.01, "p5": 0.9, "p95": 1.2, "p99": 2}
        metrics |= {f"step_ms_{name}": step_ms * factor for name, factor in spread.items()}
        metrics |= {f"metric_{i}": float(i) for i in range(15)}
        run = tracker.client.create_run(tracker.experiment_id, now + index, {}, f"{network}-{framework}-cpu")
        tracker.client.log_batch(
            run.info.run_id,
            [Metric(key, value, now, 0) for key, value in metrics.items()],
            [Param(key, value) for key, value in params.items()],
            [RunTag(key, value) for key, value in tags.items()],
        )
        tracker.client.set_terminated(run.info.run_id, RunStatus.to_string(RunStatus.FINISHED))


def measure(number: int, repeats: int) -> bool:
    """Whether the report of the runs stays within the bound; says what it took."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tracker = Tracker(f"sqlite:///{folder}/mlflow.db", None, folder)
        tracker.preflight()
        fill(tracker, number, repeats)
        command = [sys.executable, "-c", "import sys; from crosstrain import cli; sys.exit(cli.main())", "report", "big"]
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "--uri", tracker.uri, "--to", "report"], cwd=folder, check=True, env={**os.environ, "MPLBACKEND": "agg"})
        seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    print(f"report of {number} runs, {repeats} a cell: {seconds:.1f} s, {cpu:.1f} s of CPU time (at most {BOUND_S:g} s)")
    return seconds <= BOUND_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="default: %(default)s, which is also the most")
    number = parser.parse_args().runs
    kept = [measure(number, repeats) for repeats in (5, 1)]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())

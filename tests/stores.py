"""Runs put into a store without being run: what reports and comparisons read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.tracking import RunRecord, Series, Tracker

PARAMS = {
    "framework": "torch", "framework_version": "2.13.0", "network": "lenet", "data": "digits", "data_placement": "host", "task": "training",
    "device": "cpu", "device_name": "some CPU", "gpus": "0", "replicas": "1", "parallelism": "native", "scaling": "strong",
    "batch_global": "64", "batch_per_replica": "64", "precision": "fp32", "compile": "off", "memory_format": "contiguous",
    "framework_settings": "", "threads": "1",
    "optimizer": "sgd", "learning_rate": "0.1", "momentum": "0.9", "weight_decay": "0.0", "epochs": "0", "target_accuracy": "",
    "seed": "0", "repeat": "1",
    "measure": "smoke", "study": "", "effort": "full", "parameters": "431080", "model_gflops": "0.01",
}  # fmt: skip
_clock = itertools.count(1_700_000_000_000, 1000)


def new_store(folder: Path) -> Tracker:
    tracker = Tracker(f"sqlite:///{folder}/mlruns/mlflow.db", None, folder)
    tracker.preflight()
    return tracker


def put(tracker: Tracker, sweep: str, step_ms: float | None, outcome: str = "ok", reason: str = "", **params: Any) -> str:
    """One run; `accuracies` among the params: a test accuracy for each epoch, 2 s of training each."""
    accuracies, more = params.pop("accuracies", []), params.pop("metrics", {})
    values = {**PARAMS, **{key: str(value) for key, value in params.items()}}
    tags = {"kind": "run", "sweep": sweep, "study": values["study"], "outcome": outcome, "outcome_reason": reason,
            "parity": "proven: levels 1-8", "host": "here", "crosstrain_commit": "abc"}  # fmt: skip
    metrics: dict[str, float] = dict(more)
    if step_ms is not None:
        metrics |= {"step_ms": step_ms, "samples_per_s": 1000 * int(values["batch_global"]) / step_ms, "step_sync_ms": step_ms}
        metrics |= {"step_ms_p5": 0.9 * step_ms, "step_ms_p95": 1.2 * step_ms, "step_ms_p99": 2 * step_ms, "device_memory_mb": 100.0}
    series = {}
    if accuracies:
        steps = np.arange(1, len(accuracies) + 1)
        times = 1_700_000_000_000 + 1000 * steps
        series = {"epoch/accuracy": Series(steps, np.array(accuracies), times), "epoch/train_s": Series(steps, 2.0 * steps, times)}
        metrics["accuracy"] = accuracies[-1]
    name, start = f"{values['network']}-{values['framework']}", next(_clock)
    run_id = tracker.start(name, values, tags, start)
    status = "FINISHED" if step_ms is not None else "FAILED"
    tracker.finish(run_id, RunRecord(name, values, tags, metrics, series, status, start, start + 500))
    return run_id

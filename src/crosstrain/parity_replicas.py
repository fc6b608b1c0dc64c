"""Level 9 of the parity ladder: N replicas at global batch B train as one replica at B does.

A second run of the worker, with two replicas: after some steps, with clipping and without, the mean of their losses and the parameters
of every replica must be those of the reference, which knows no replicas. So gradients that are added instead of averaged, not reduced
at all, or clipped before the reduction are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain import parity, prepare
from crosstrain.certificates import Level
from crosstrain.networks import initial_weights
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import Spec
from crosstrain_worker.ladder import REPLICA_STEPS

Array = np.ndarray[Any, Any]

LEVEL = "9"
TITLE = "replicas train as one"
TOLERANCE = 1e-4
REPLICAS = 2


def run_json(run: Mapping[str, Any], folder: Path, gpus: Sequence[str] = ()) -> dict[str, Any]:
    """The run.json of level 9 in `folder`, made of that of the ladder (`parity.ladder_run_json`): the same weights and batches."""
    return {
        **run,
        "folder": str(folder),
        "gpus": list(gpus),
        "cpus": None,
        "threads": max(1, run["threads"] // REPLICAS),
        "replicas": REPLICAS,
        "world_size": prepare.world_size(run["framework"], REPLICAS, run["parallelism"]),
        "batch_per_replica": run["batch_global"] // REPLICAS,
    }


def not_applicable(words: str) -> Level:
    return Level(LEVEL, TITLE, "not applicable", words=words)


def why_not(spec: Spec, device: str, gpus: int) -> str:
    """Why there is nothing to compare for this network and device; "" when there is."""
    if spec.has("batch_norm"):
        return "batch norm: each replica normalises its own part of the batch"
    if device == "gpu" and gpus < REPLICAS:
        return f"{gpus} GPU"
    return ""


def read(folder: Path, run: Mapping[str, Any]) -> list[dict[str, Array]]:
    """What the ranks of a level 9 run wrote (crosstrain_worker/ladder.py). Raises OSError where a rank wrote nothing."""
    ranks = []
    for rank in range(run["world_size"]):
        with np.load(folder / f"replicas.{rank}.npz") as arrays:
            ranks.append(dict(arrays))
    return ranks


def judge(spec: Spec, run: Mapping[str, Any], ranks: Sequence[Mapping[str, Array]]) -> Level:
    """The verdict on what the ranks measured. `run`: either run.json, the ladder's or level 9's."""
    verdict = not_applicable("")
    for clipping, norm in (("clipped", run["optimizer"]["clip_norm"]), ("unclipped", None)):
        expected = _expect(spec, run, {**run["optimizer"], "clip_norm": norm})
        verdict = _judge(expected, ranks, clipping)
        if verdict.state == "failed":
            break
    return verdict


@dataclass
class _Expected:
    trace: Array
    before: dict[str, Array]
    after: dict[str, Array]


def _expect(spec: Spec, run: Mapping[str, Any], optimizer: Mapping[str, Any]) -> _Expected:
    """Losses and parameters of the reference, with the whole global batches."""
    network = spec.with_attributes("dropout", rate=0.0)
    stored, size = run["data"]["train"], run["batch_global"]
    inputs = np.load(stored["inputs"])
    targets = np.load(stored["targets"]) if stored["targets"] else None
    cuts = [slice(at, at + size) for at in range(0, len(inputs) - size + 1, size)]
    batches = [(inputs[cut], None if targets is None else targets[cut]) for cut in cuts]
    weights = initial_weights.split(network, np.load(run["weights"]))
    reference = Reference(network, weights, optimizer)
    trace = [reference.step(*batches[i % len(batches)]) for i in range(REPLICA_STEPS)]
    return _Expected(np.array(trace), weights, dict(reference.parameters))


def _judge(expected: _Expected, ranks: Sequence[Mapping[str, Array]], clipping: str) -> Level:
    trace = np.mean([rank[f"{clipping}/trace"] for rank in ranks], axis=0)
    errors = {f"the loss, {clipping},": parity.error_of(trace, expected.trace)}
    updates = {}
    per_rank = REPLICAS // len(ranks)
    for number in range(REPLICAS):
        rank, index = divmod(number, per_rank)
        for name, value in expected.after.items():
            found = np.asarray(ranks[rank].get(f"{clipping}/{index}/{name}", np.empty(0)), np.float64)
            where = f"{name} of replica {number}, {clipping},"
            errors[where] = parity.error_of(found, value)
            updates[f"the update of {where}"] = parity.update_error(found, value, expected.before[name], REPLICA_STEPS)
    level = _level(errors, TOLERANCE)
    return level if level.state == "failed" else _level(updates, parity.UPDATE_TOLERANCE)


def _level(errors: Mapping[str, float], tolerance: float) -> Level:
    worst = max(errors, key=lambda name: errors[name])
    error = errors[worst] if np.isfinite(errors[worst]) else None
    state = "passed" if errors[worst] <= tolerance else "failed"
    off = f"off by {error:.1e}" if error is not None else "missing, of another shape or not finite"
    return Level(LEVEL, TITLE, state, error, tolerance, f"{worst} is {off}")

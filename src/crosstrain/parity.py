"""The parity ladder: is the network that a framework trains the one that was written down?

A worker (mode `parity`, crosstrain_worker/ladder.py) measures, `compare` judges by the numpy float64 reference, and the answer
is a `Certificate`. The levels themselves are in `parity_levels`, level 9 in `parity_replicas`.

A network too large for the reference climbs as a reduced variant (`ladder` in its yaml). Names, shapes and the parameter count are
then also those of the full network as the framework builds it (mode `shapes`, `of_full`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain import parity_levels
from crosstrain.certificates import Certificate, choices, code_hash
from crosstrain.networks import initial_weights
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import Spec, Variable
from crosstrain.parity_levels import TITLES, UPDATE_TOLERANCE, Array, Expected, error_of, update_error
from crosstrain_worker.ladder import STATE_STEPS, TRACE_STEPS

__all__ = ["TITLES", "UPDATE_TOLERANCE", "compare", "error_of", "ladder_run_json", "of_full", "shapes_run_json", "update_error"]

#: samples in a batch, and different batches, of the ladder
BATCH = 8
BATCHES = 4
#: how far a parameter or state that starts as a constant lies around it on the ladder, where 0 and 1 would hide mistakes
SPREAD = 0.25
#: part of the loss that the ladder's first step takes away, and the largest learning rate it uses for that
LOSS_STEP = 0.05
MOST_LEARNING_RATE = 0.05


#: what the run.json of every run of the ladder says, unless it is told otherwise
USUAL: dict[str, Any] = {
    "schema": 1,
    "run_id": "0" * 32,
    "task": "training",
    "precision": "fp32",
    "device": "cpu",
    "gpus": [],
    "cpus": None,
    "threads": 1,
    "replicas": 1,
    "world_size": 1,
    "parallelism": "native",
    "batch_global": BATCH,
    "batch_per_replica": BATCH,
    "optimizer": {"name": "sgd", "learning_rate": MOST_LEARNING_RATE, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None},
    "seed": 1,
    "epochs": 0,
    "target_accuracy": None,
    "weights": None,
    "data": None,
    "measure": None,
}


def ladder_run_json(spec: Spec, framework: Mapping[str, Any], folder: Path, **given: Any) -> dict[str, Any]:
    """The run.json of a ladder run in `folder`, whose batches are written there. Dropout is off, precision fp32, one replica.

    `framework`: run.json's key (name, version, compile, memory_format, autotune, deterministic); `given`: other keys of run.json
    (run_id, device, gpus, cpus, threads, seed).
    """
    network = spec.with_attributes("dropout", rate=0.0)
    run = {**USUAL, **given, "mode": "parity", "folder": str(folder), "framework": dict(framework), "network": network.to_json()}
    run["weights"] = str(initial_weights.make(spread(network), run["seed"]))
    run["data"] = write_batches(network, folder, run["seed"], run["batch_per_replica"])
    return {**run, "optimizer": _optimizer(network, run)}


def shapes_run_json(spec: Spec, framework: Mapping[str, Any], folder: Path, **given: Any) -> dict[str, Any]:
    """The run.json of a worker that builds the network, writes down names and shapes (`shapes.json`) and trains nothing."""
    return {**USUAL, **given, "mode": "shapes", "folder": str(folder), "framework": dict(framework), "network": spec.to_json()}


def spread(spec: Spec) -> Spec:
    """The network with no constant among its initial values: biases of 0 can be swapped, decayed or forgotten unseen."""

    def around(variable: Variable) -> Variable:
        if variable.init["kind"] != "constant":
            return variable
        return replace(variable, init={"kind": "uniform", "bound": SPREAD, "centre": variable.init["value"]})

    parameters, states = (tuple(around(v) for v in variables) for variables in (spec.parameters, spec.states))
    return replace(spec, parameters=parameters, states=states)


def write_batches(spec: Spec, folder: Path, seed: int, batch: int) -> dict[str, Any]:
    """Write the ladder's batches into `folder`; returns run.json's `data`.

    Images, vectors and float targets are standard normal, classes and tokens uniform; a network with a masked_mean gets sequences
    padded with 0 at the end.
    """
    random = np.random.RandomState(seed)
    count = BATCHES * batch
    shape = (count, *spec.input["shape"])
    if spec.input["kind"] == "tokens":
        vocabulary = min(op.attributes["vocabulary"] for op in spec.ops if "input" in op.inputs)
        inputs = random.randint(1, vocabulary, shape).astype(np.int32)
        if spec.has("masked_mean"):
            lengths = random.randint(1, shape[1] + 1, count)
            inputs[np.arange(shape[1]) >= lengths[:, None]] = 0
    else:
        inputs = random.normal(size=shape).astype(np.float32)
    targets = None
    if spec.target["kind"] == "class":
        targets = random.randint(0, spec.target["classes"], (count, *spec.output_shape[:-1])).astype(np.int64)
    elif spec.target["kind"] == "values":
        targets = random.normal(size=(count, *spec.output_shape)).astype(np.float32)
    np.save(folder / "inputs.npy", inputs)
    if targets is not None:
        np.save(folder / "targets.npy", targets)
    train = {"inputs": str(folder / "inputs.npy"), "targets": None if targets is None else str(folder / "targets.npy")}
    return {"name": "ladder", "placement": "device", "train": train, "test": None, "scale": [1.0], "offset": [0.0]}


def compare(spec: Spec, run: Mapping[str, Any], arrays: Mapping[str, Array], version: str) -> Certificate:
    """Judge what a worker measured (the arrays of ladder.npz). `spec` and `run` (of `ladder_run_json`) are what was asked for.

    `version`: the framework's own answer.
    """
    network = spec.with_attributes("dropout", rate=0.0)
    deviations: dict[str, str] = json.loads(str(arrays["deviations"]))
    expected = _expect(_as_declared(network, deviations), run)
    settings = run["framework"]
    return Certificate(
        framework=settings["name"],
        version=version,
        network=spec.name,
        spec_key=spec.key(),
        precision=run["precision"],
        device=run["device"],
        compile=settings.get("compile", "off"),
        memory_format=settings.get("memory_format", "contiguous"),
        code=code_hash(settings["name"]),
        levels=parity_levels.judge(network, expected, arrays, run["batch_per_replica"]),
        deviations=deviations,
        parallelism=run["parallelism"],
        choices=choices(settings),
    )


def of_full(certificate: Certificate, full: Spec, built: Mapping[str, Any]) -> Certificate:
    """The certificate of the full network, from that of its reduced variant and what the framework built of the full one.

    `built`: the worker's `shapes.json`. Levels 1 and 2 hold for both networks, the others for the variant.
    """
    shapes = {name: tuple(shape) for name, shape in built["shapes"].items()}
    judged = {"1": parity_levels.names_and_shapes(full, shapes), "2": parity_levels.parameter_count(full, shapes)}
    levels = tuple(level if level.state == "failed" else judged.get(level.level, level) for level in certificate.levels)
    return replace(
        certificate,
        network=full.name,
        spec_key=full.key(),
        variant=certificate.spec_key,
        levels=levels,
        deviations=built["deviations"],
    )


def _optimizer(spec: Spec, run: Mapping[str, Any]) -> dict[str, Any]:
    """Every part of the SGD form at work: decay strong enough to be seen, and clipping that halves the first gradient."""
    reference, batches = _reference(spec, run, None)
    loss, gradients = reference.gradients(*batches[0])[:2]
    norm = float(np.sqrt(sum(float(np.vdot(g, g)) for g in gradients.values())))
    # To first order the clipped first step takes LOSS_STEP of the loss away. With larger ones some networks diverge and then die
    # (no active ReLU left): float32 follows the way there only by luck, and the loss says nothing any more.
    learning_rate = min(MOST_LEARNING_RATE, LOSS_STEP * loss / (0.5 * norm**2))
    return {"name": "sgd", "learning_rate": learning_rate, "momentum": 0.9, "weight_decay": 1e-2, "clip_norm": 0.5 * norm}


def _reference(
    spec: Spec, run: Mapping[str, Any], optimizer: Mapping[str, Any] | None
) -> tuple[Reference, list[tuple[Array, Array | None]]]:
    """The reference with the run's weights, and the run's batches."""
    inputs = np.load(run["data"]["train"]["inputs"])
    stored = run["data"]["train"]["targets"]
    targets = np.load(stored) if stored else None
    size = run["batch_per_replica"]
    cuts = [slice(at, at + size) for at in range(0, len(inputs) - size + 1, size)]
    weights = initial_weights.split(spec, np.load(run["weights"]))
    return Reference(spec, weights, optimizer), [(inputs[c], None if targets is None else targets[c]) for c in cuts]


def _as_declared(spec: Spec, deviations: Mapping[str, str]) -> Spec:
    """The network as the adapter declares that it differs: held to what it says, not to what the spec wants.

    The declaration of a batch_norm begins with `running variance is biased` or `running variance is unbiased`; a max_pool may declare
    that `the gradient goes to every maximum` of a window, which no spec can ask for, so the reference alone knows the attribute.
    """
    data = spec.to_json()
    for op in data["ops"]:
        words = deviations.get(op["name"], "").split()
        if op["op"] == "batch_norm" and words[:3] == ["running", "variance", "is"]:
            op["variance"] = words[3].strip(",;:.")
    declared = Spec.from_json(data)
    every = {name for name, words in deviations.items() if words.startswith("the gradient goes to every maximum")}
    ops = [replace(op, attributes={**op.attributes, "every_maximum": True}) if op.name in every else op for op in declared.ops]
    return replace(declared, ops=tuple(ops))


def _expect(spec: Spec, run: Mapping[str, Any]) -> Expected:
    reference, batches = _reference(spec, run, run["optimizer"])
    weights = _copied({**reference.parameters, **reference.states})
    output = reference.output(batches[0][0], training=True)
    loss, gradients = reference.gradients(*batches[0])
    trace: list[float] = []
    step1: dict[str, Array] = {}
    state10: dict[str, Array] = {}
    output10 = output
    for i in range(TRACE_STEPS):
        trace.append(reference.step(*batches[i % len(batches)]))
        if i + 1 == 1:
            step1 = _copied(reference.parameters)
        if i + 1 == STATE_STEPS:
            state10 = _copied(reference.states)
            output10 = reference.output(batches[0][0], training=False)
    return Expected(weights, output, loss, gradients, step1, state10, output10, np.array(trace))


def _copied(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The reference steps in place."""
    return {name: array.copy() for name, array in arrays.items()}

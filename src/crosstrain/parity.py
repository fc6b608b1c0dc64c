"""The parity ladder: is the network that a framework trains the one that was written down?

A worker (mode `parity`, crosstrain_worker/ladder.py) measures, `compare` judges by the numpy float64 reference, and the answer
is a `Certificate`. An error is max|a−b| / max|b|, b the reference's; that of many arrays is the worst array's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crosstrain.certificates import Certificate, Level, code_hash
from crosstrain.networks import initial_weights
from crosstrain.networks.reference import Reference
from crosstrain.networks.spec import Spec, Variable
from crosstrain_worker.ladder import STATE_STEPS, TRACE_STEPS

Array = np.ndarray[Any, Any]

#: samples in a batch, and different batches, of the ladder
BATCH = 8
BATCHES = 4
#: names of the levels, in the order in which they are judged
TITLES = {
    "1": "names and shapes",
    "2": "parameter count",
    "3": "weights read back bit-equal",
    "4": "output in training mode",
    "5": "loss",
    "gradient": "gradients, none of them zero",
    "6": "parameters after one step",
    "7": "batch norm after 10 steps",
    "8": "loss over 20 steps",
}
TOLERANCES = {"4": 1e-4, "5": 1e-4, "gradient": 1e-4, "6": 1e-4, "7": 1e-3, "8": 1e-3}
#: of the update in level 6: a clipping norm summed in float32 over 10⁷ gradients is alone off by 5e-5
UPDATE_TOLERANCE = 1e-3
#: how far a parameter or state that starts as a constant lies around it on the ladder, where 0 and 1 would hide mistakes
SPREAD = 0.25
#: part of the loss that the ladder's first step takes away, and the largest learning rate it uses for that
LOSS_STEP = 0.05
MOST_LEARNING_RATE = 0.05


def ladder_run_json(
    spec: Spec,
    framework: Mapping[str, Any],
    folder: Path,
    *,
    run_id: str = "0" * 32,
    device: str = "cpu",
    gpus: list[str] | None = None,
    cpus: list[int] | None = None,
    threads: int = 1,
    seed: int = 1,
    batch: int = BATCH,
) -> dict[str, Any]:
    """The run.json of a ladder run in `folder`, whose batches are written there. Dropout is off, precision fp32, one replica.

    `framework`: run.json's key (name, version, compile, memory_format, autotune, deterministic).
    """
    network = spec.with_attributes("dropout", rate=0.0)
    weights = initial_weights.make(spread(network), seed)
    data = write_batches(network, folder, seed, batch)
    run = {
        "schema": 1,
        "mode": "parity",
        "run_id": run_id,
        "folder": str(folder),
        "framework": dict(framework),
        "network": network.to_json(),
        "task": "training",
        "precision": "fp32",
        "device": device,
        "gpus": gpus or [],
        "cpus": cpus,
        "threads": threads,
        "replicas": 1,
        "world_size": 1,
        "parallelism": "native",
        "batch_global": batch,
        "batch_per_replica": batch,
        "seed": seed,
        "epochs": 0,
        "target_accuracy": None,
        "weights": str(weights),
        "data": data,
        "measure": None,
    }
    return {**run, "optimizer": _optimizer(network, run)}


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
    judge = _Judge(network, expected, arrays)
    levels = tuple(getattr(judge, f"level_{name}")() for name in TITLES)
    name = run["framework"]["name"]
    return Certificate(name, version, spec.name, spec.key(), run["precision"], run["device"], code_hash(name), levels, deviations)


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
    """The network with the running variance that the adapter declares: held to what it says, not to what the spec wants.

    The declaration of a batch_norm begins with `running variance is biased` or `running variance is unbiased`.
    """
    data = spec.to_json()
    for op in data["ops"]:
        words = deviations.get(op["name"], "").split()
        if op["op"] == "batch_norm" and words[:3] == ["running", "variance", "is"]:
            op["variance"] = words[3].strip(",;:.")
    return Spec.from_json(data)


@dataclass
class _Expected:
    """What the reference makes of the run."""

    weights: dict[str, Array]
    output: Array
    loss: float
    gradients: dict[str, Array]
    step1: dict[str, Array]
    state10: dict[str, Array]
    output10: Array
    trace: Array


def _expect(spec: Spec, run: Mapping[str, Any]) -> _Expected:
    reference, batches = _reference(spec, run, run["optimizer"])
    weights = {**reference.parameters, **reference.states}
    output = reference.output(batches[0][0], training=True)
    loss, gradients = reference.gradients(*batches[0])
    trace: list[float] = []
    step1: dict[str, Array] = {}
    state10: dict[str, Array] = {}
    output10 = output
    for i in range(TRACE_STEPS):
        trace.append(reference.step(*batches[i % len(batches)]))
        if i + 1 == 1:
            step1 = dict(reference.parameters)
        if i + 1 == STATE_STEPS:
            state10 = {**reference.parameters, **reference.states}
            output10 = reference.output(batches[0][0], training=False)
    return _Expected(weights, output, loss, gradients, step1, state10, output10, np.array(trace))


def error_of(a: Array, b: Array) -> float:
    """max|a−b| / max|b|; inf where the shapes differ or a is not finite."""
    if a.shape != b.shape or not np.all(np.isfinite(a)):
        return float("inf")
    return _relative(float(np.max(np.abs(a - b))), float(np.max(np.abs(b))))


def update_error(a: Array, b: Array, before: Array) -> float:
    """Error of an update: max|a−b| / max|b−before|, less what rounding the result to float32 can make (2⁻²³·max|b|).

    The error of the parameters themselves hides a wrong update behind large weights.
    """
    if a.shape != b.shape or not np.all(np.isfinite(a)):
        return float("inf")
    difference = max(0.0, float(np.max(np.abs(a - b))) - 2.0**-23 * float(np.max(np.abs(b))))
    return _relative(difference, float(np.max(np.abs(b - before))))


def _relative(difference: float, scale: float) -> float:
    if scale > 0:
        return difference / scale
    return 0.0 if difference == 0 else float("inf")


class _Judge:
    """One level after the other, for one network and what a worker measured of it."""

    def __init__(self, spec: Spec, expected: _Expected, arrays: Mapping[str, Array]) -> None:
        self.spec, self.expected, self.arrays = spec, expected, arrays

    @functools.cached_property
    def read(self) -> dict[str, Array]:
        return {key.split("/", 1)[1]: value for key, value in self.arrays.items() if key.startswith("read/")}

    def level_1(self) -> Level:
        wanted = {v.name: v.shape for v in self.spec.parameters + self.spec.states}
        found = {name: value.shape for name, value in self.read.items()}
        wrong = [
            f"{name} is {found.get(name, 'missing')}, should be {wanted.get(name, 'absent')}"
            for name in [*wanted, *(n for n in found if n not in wanted)]
            if found.get(name) != wanted.get(name)
        ]
        return self.said("1", wrong)

    def level_2(self) -> Level:
        states = {s.name for s in self.spec.states}
        count = sum(value.size for name, value in self.read.items() if name not in states)
        wanted = self.spec.parameter_count
        return self.said("2", [] if count == wanted else [f"{count:,} parameters, should be {wanted:,}"])

    def level_3(self) -> Level:
        wrong = [
            f"{name} differs"
            for name, value in self.expected.weights.items()
            if name not in self.read or not np.array_equal(self.read[name], value.astype(np.float32))
        ]
        return self.said("3", wrong)

    def level_4(self) -> Level:
        return self.measured("4", {"the output": error_of(self.array("output"), self.expected.output)})

    def level_5(self) -> Level:
        return self.measured("5", {"the loss": error_of(self.array("loss"), np.array(self.expected.loss))})

    def level_gradient(self) -> Level:
        expected = self.expected.gradients
        # 1e-12: what float64 leaves of a sum that is 0
        least = 1e-12 * max(float(np.max(np.abs(g))) for g in expected.values())
        idle = [name for name, g in expected.items() if np.max(np.abs(g)) < least]
        wrong = [f"{name} does not change the loss (a bias before a batch norm?)" for name in idle]
        wrong += [f"{name} gets no gradient" for name in expected if not np.any(self.array("gradient/" + name))]
        if wrong:
            return self.said("gradient", wrong)
        return self.measured("gradient", {n: error_of(self.array("gradient/" + n), g) for n, g in expected.items()})

    def level_6(self) -> Level:
        values = {n: error_of(self.array("step1/" + n), v) for n, v in self.expected.step1.items()}
        updates = {
            f"the update of {n}": update_error(self.array("step1/" + n), v, self.expected.weights[n])
            for n, v in self.expected.step1.items()
        }
        verdict = self.measured("6", values)
        return verdict if verdict.state == "failed" else self.measured("6", updates, UPDATE_TOLERANCE)

    def level_7(self) -> Level:
        if not self.spec.has("batch_norm"):
            return Level("7", TITLES["7"], "not applicable", words="no batch norm")
        names = [s.name for s in self.spec.states]
        errors = {n: error_of(self.array("state10/" + n), self.expected.state10[n]) for n in names}
        errors["the output in evaluation mode"] = error_of(self.array("output10"), self.expected.output10)
        return self.measured("7", errors)

    def level_8(self) -> Level:
        return self.measured("8", {"the loss": error_of(self.array("trace"), self.expected.trace)})

    def array(self, key: str) -> Array:
        """A measured array as float64; an empty one, which equals nothing, where the worker has none."""
        value = self.arrays.get(key)
        return np.empty((0,)) if value is None else np.asarray(value, np.float64)

    def said(self, level: str, wrong: list[str]) -> Level:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Level(level, TITLES[level], "failed" if wrong else "passed", words=wrong[0] + more if wrong else "")

    def measured(self, level: str, errors: Mapping[str, float], tolerance: float | None = None) -> Level:
        """Passed when the worst error is within the tolerance (None: the level's)."""
        worst = max(errors, key=lambda name: errors[name])
        error, tolerance = errors[worst], tolerance or TOLERANCES[level]
        finite = error if np.isfinite(error) else None
        state = "passed" if error <= tolerance else "failed"
        off = f"off by {error:.1e}" if finite is not None else "missing, of another shape or not finite"
        return Level(level, TITLES[level], state, finite, tolerance, f"{worst} is {off}")

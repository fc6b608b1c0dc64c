"""The levels of the parity ladder: what a worker measured against what the reference gives, judged one after the other.

An error is max|a−b| / max|b|, b the reference's; that of many arrays is the worst array's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from crosstrain.certificates import Level
from crosstrain.networks.spec import Spec

Array = np.ndarray[Any, Any]

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
    "flops": "executed FLOPs",
    "9": "replicas train as one",
}
TOLERANCES = {"4": 1e-4, "5": 1e-4, "gradient": 1e-4, "6": 1e-4, "7": 1e-3, "8": 1e-3}
#: of the update in level 6: a clipping norm summed in float32 over 10⁷ gradients is alone off by 5e-5
UPDATE_TOLERANCE = 1e-3


@dataclass
class Expected:
    """What the reference makes of the run; see `crosstrain_worker.ladder` for the names."""

    weights: dict[str, Array]
    output: Array
    loss: float
    gradients: dict[str, Array]
    step1: dict[str, Array]
    state10: dict[str, Array]
    output10: Array
    trace: Array


def error_of(a: Array, b: Array) -> float:
    """max|a−b| / max|b|; inf where the shapes differ or a is not finite."""
    if a.shape != b.shape or not np.all(np.isfinite(a)):
        return float("inf")
    return _relative(float(np.max(np.abs(a - b))), float(np.max(np.abs(b))))


def update_error(a: Array, b: Array, before: Array, steps: int = 1) -> float:
    """Error of an update: max|a−b| / max|b−before|, less what rounding to float32 after each step can make (2⁻²³·max|b|).

    The error of the parameters themselves hides a wrong update behind large weights.
    """
    if a.shape != b.shape or not np.all(np.isfinite(a)):
        return float("inf")
    difference = max(0.0, float(np.max(np.abs(a - b))) - steps * 2.0**-23 * float(np.max(np.abs(b))))
    return _relative(difference, float(np.max(np.abs(b - before))))


def _relative(difference: float, scale: float) -> float:
    if scale > 0:
        return difference / scale
    return 0.0 if difference == 0 else float("inf")


def judge(spec: Spec, expected: Expected, arrays: Mapping[str, Array], batch: int) -> tuple[Level, ...]:
    """The verdict on every level but 9. `arrays`: those of ladder.npz; `batch`: samples in each of the ladder's batches."""
    judge = _Judge(spec, expected, arrays, batch)
    return tuple(getattr(judge, f"level_{name}")() for name in TITLES if name != "9")


def names_and_shapes(spec: Spec, found: Mapping[str, tuple[int, ...]]) -> Level:
    """Level 1. `found`: shapes of parameters and states by name."""
    wanted = {v.name: v.shape for v in spec.parameters + spec.states}
    wrong = [
        f"{name} is {found.get(name, 'missing')}, should be {wanted.get(name, 'absent')}"
        for name in [*wanted, *(n for n in found if n not in wanted)]
        if found.get(name) != wanted.get(name)
    ]
    return _said("1", wrong)


def parameter_count(spec: Spec, found: Mapping[str, tuple[int, ...]]) -> Level:
    """Level 2. `found` as for level 1."""
    states = {s.name for s in spec.states}
    count, wanted = sum(prod(shape) for name, shape in found.items() if name not in states), spec.parameter_count
    return _said("2", [] if count == wanted else [f"{count:,} parameters, should be {wanted:,}"])


def _said(level: str, wrong: list[str]) -> Level:
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return Level(level, TITLES[level], "failed" if wrong else "passed", words=wrong[0] + more if wrong else "")


def _needless_flops(spec: Spec) -> int:
    """FLOPs per sample that a fused LSTM kernel executes for nothing: the gradient of an input that nothing before it needs.

    The backward functions of cuDNN and oneDNN give it always.
    """
    trained = {p.name.split(".")[0] for p in spec.trained}
    needs: set[str] = set()
    needless = 0
    for op in spec.ops:
        inputs_need = bool(needs & set(op.inputs))
        if inputs_need or op.name in trained or op.attributes.get("tied") in trained:
            needs.add(op.name)
        if op.op == "lstm" and not inputs_need:
            needless += op.input_flops
    return needless


class _Judge:
    """One level after the other, for one network and what a worker measured of it."""

    def __init__(self, spec: Spec, expected: Expected, arrays: Mapping[str, Array], batch: int) -> None:
        self.spec, self.expected, self.arrays, self.batch = spec, expected, arrays, batch

    @functools.cached_property
    def read(self) -> dict[str, Array]:
        return {key.split("/", 1)[1]: value for key, value in self.arrays.items() if key.startswith("read/")}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: value.shape for name, value in self.read.items()}

    def level_1(self) -> Level:
        return names_and_shapes(self.spec, self.shapes)

    def level_2(self) -> Level:
        return parameter_count(self.spec, self.shapes)

    def level_3(self) -> Level:
        wrong = [
            f"{name} differs"
            for name, value in self.expected.weights.items()
            if name not in self.read or not np.array_equal(self.read[name], value.astype(np.float32))
        ]
        return _said("3", wrong)

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
            return _said("gradient", wrong)
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

    def level_flops(self) -> Level:
        """What the framework's own counter saw in one training iteration must be the spec's, exactly."""
        if "flops" not in self.arrays:
            return Level("flops", TITLES["flops"], "not applicable", words="the framework counts none")
        counted: dict[str, int] = json.loads(str(self.arrays["flops"]))
        executed, wanted = sum(counted.values()), self.batch * self.spec.training_flops
        if executed in (wanted, wanted + self.batch * _needless_flops(self.spec)):
            return Level("flops", TITLES["flops"], "passed", words=f"{executed:,} in a batch of {self.batch}")
        kernels = ", ".join(f"{name} {count:,}" for name, count in sorted(counted.items()))
        words = f"{executed:,} in a batch of {self.batch}, should be {wanted:,} (counted: {kernels or 'nothing'})"
        return Level("flops", TITLES["flops"], "failed", words=words)

    def array(self, key: str) -> Array:
        """A measured array as float64; an empty one, which equals nothing, where the worker has none."""
        value = self.arrays.get(key)
        return np.empty((0,)) if value is None else np.asarray(value, np.float64)

    def measured(self, level: str, errors: Mapping[str, float], tolerance: float | None = None) -> Level:
        """Passed when the worst error is within the tolerance (None: the level's)."""
        worst = max(errors, key=lambda name: errors[name])
        error, tolerance = errors[worst], tolerance or TOLERANCES[level]
        finite = error if np.isfinite(error) else None
        state = "passed" if error <= tolerance else "failed"
        off = f"off by {error:.1e}" if finite is not None else "missing, of another shape or not finite"
        return Level(level, TITLES[level], state, finite, tolerance, f"{worst} is {off}")

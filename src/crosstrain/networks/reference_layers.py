"""The reference's forward functions of dense layers, activations and norms. Each returns (output, backward function).

The backward function takes the gradient of the output and gives (gradients of the inputs, {parameter suffix: gradient}).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import erf, expit

from crosstrain.networks.spec import Op

Array = np.ndarray[Any, Any]
Back = Callable[[Array], tuple[list[Array], dict[str, Array]]]


@dataclass
class Call:
    """One op at work on one batch. `tied`: the weight of the op it is tied to; `tokens`: the network's own input."""

    op: Op
    inputs: list[Array]
    parameters: dict[str, Array]
    states: dict[str, Array]
    tied: Array | None
    tokens: Array
    training: bool
    #: states after this batch, where the op has any and the batch is a training one
    new_states: dict[str, Array] = field(default_factory=dict)

    @property
    def x(self) -> Array:
        return self.inputs[0]

    def attribute(self, name: str) -> Any:
        return self.op.attributes[name]


Result = tuple[Array, Back]
Forward = Callable[[Call], Result]


def affine(x: Array, weight: Array, bias: Array | None) -> Result:
    """y = x·weightᵀ + bias over the last axis; the gradients are named weight and bias."""
    y = x @ weight.T
    if bias is not None:
        y = y + bias

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        rows = dy.reshape(-1, dy.shape[-1])
        gradients = {"weight": rows.T @ x.reshape(-1, x.shape[-1])}
        if bias is not None:
            gradients["bias"] = rows.sum(axis=0)
        return [dy @ weight], gradients

    return y, back


def _linear(call: Call) -> Result:
    return affine(call.x, call.parameters["weight"], call.parameters.get("bias"))


def _tied_linear(call: Call) -> Result:
    assert call.tied is not None
    transpose = call.attribute("transpose")
    y, affine_back = affine(call.x, call.tied.T if transpose else call.tied, call.parameters.get("bias"))

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        d_inputs, gradients = affine_back(dy)
        d_tied = gradients.pop("weight")
        return d_inputs, {**gradients, "tied": d_tied.T if transpose else d_tied}

    return y, back


def _elementwise(y: Array, slope: Array) -> Result:
    return y, lambda dy: ([dy * slope], {})


def _relu(call: Call) -> Result:
    return _elementwise(np.maximum(call.x, 0.0), (call.x > 0).astype(np.float64))


def _tanh(call: Call) -> Result:
    y = np.tanh(call.x)
    return _elementwise(y, 1.0 - y * y)


def _sigmoid(call: Call) -> Result:
    y = expit(call.x)
    return _elementwise(y, y * (1.0 - y))


def _gelu(call: Call) -> Result:
    """x·Φ(x), or its tanh form ½x(1 + tanh(√(2/π)(x + 0.044715x³))) (Hendrycks & Gimpel 2016)."""
    x = call.x
    if call.attribute("approximate") == "none":
        cumulative = 0.5 * (1.0 + erf(x / np.sqrt(2.0)))
        return _elementwise(x * cumulative, cumulative + x * np.exp(-0.5 * x * x) / np.sqrt(2.0 * np.pi))
    scale = np.sqrt(2.0 / np.pi)
    t = np.tanh(scale * (x + 0.044715 * x**3))
    slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * scale * (1.0 + 3 * 0.044715 * x * x)
    return _elementwise(0.5 * x * (1.0 + t), slope)


def softmax_last(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_back(y: Array, dy: Array) -> Array:
    """Gradient of softmax_last's input from its output and the output's gradient."""
    return y * (dy - (dy * y).sum(axis=-1, keepdims=True))


def _softmax(call: Call) -> Result:
    y = softmax_last(call.x)
    return y, lambda dy: ([softmax_back(y, dy)], {})


def _dropout(call: Call) -> Result:
    """The identity in evaluation and at rate 0; otherwise random, which nobody can be compared with."""
    if call.training and call.attribute("rate") > 0:
        raise ValueError(f"dropout {call.op.name}: set its rate to 0, the reference has no random numbers")
    return call.x, lambda dy: ([dy], {})


def _add(call: Call) -> Result:
    return sum(call.inputs[1:], start=call.x), lambda dy: ([dy] * len(call.inputs), {})


def _concat(call: Call) -> Result:
    ends = np.cumsum([x.shape[1] for x in call.inputs])[:-1]
    return np.concatenate(call.inputs, axis=1), lambda dy: (np.split(dy, ends, axis=1), {})


def _flatten(call: Call) -> Result:
    return call.x.reshape(len(call.x), -1), lambda dy: ([dy.reshape(call.x.shape)], {})


def _normalised(x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Callable[[Array], Array], Array, Array]:
    """x with mean 0 and (biased) variance 1 over `axes`: (result, backward, mean, variance)."""
    mean, variance = x.mean(axis=axes, keepdims=True), x.var(axis=axes, keepdims=True)
    root = np.sqrt(variance + epsilon)
    y = (x - mean) / root

    def back(dy: Array) -> Array:
        centred = dy - dy.mean(axis=axes, keepdims=True) - y * (dy * y).mean(axis=axes, keepdims=True)
        return centred / root

    return y, back, mean, variance


def _batch_norm(call: Call) -> Result:
    """Ioffe & Szegedy 2015; in training by the batch's biased variance, while `variance` names the one that the state follows."""
    x, p, s = call.x, call.parameters, call.states
    axes = (0, 2, 3)[: x.ndim - 1]

    def along(values: Array) -> Array:
        return values.reshape(1, -1, *[1] * (x.ndim - 2))

    if not call.training:
        slope = along(p["weight"] / np.sqrt(s["running_var"] + call.attribute("epsilon")))
        y = (x - along(s["running_mean"])) * slope + along(p["bias"])
        return y, lambda dy: ([dy * slope], {})
    z, z_back, mean, variance = _normalised(x, axes, call.attribute("epsilon"))
    count = x.size // x.shape[1]
    if call.attribute("variance") == "unbiased":
        variance = variance * count / (count - 1)
    decay = call.attribute("decay")
    call.new_states["running_mean"] = decay * s["running_mean"] + (1 - decay) * mean.ravel()
    call.new_states["running_var"] = decay * s["running_var"] + (1 - decay) * variance.ravel()

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        gradients = {"weight": (dy * z).sum(axis=axes), "bias": dy.sum(axis=axes)}
        return [z_back(dy * along(p["weight"]))], gradients

    return z * along(p["weight"]) + along(p["bias"]), back


def _layer_norm(call: Call) -> Result:
    """Over the last axis (Ba et al. 2016)."""
    z, z_back, _, _ = _normalised(call.x, (-1,), call.attribute("epsilon"))
    weight = call.parameters["weight"]

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        before = tuple(range(dy.ndim - 1))
        return [z_back(dy * weight)], {"weight": (dy * z).sum(axis=before), "bias": dy.sum(axis=before)}

    return z * weight + call.parameters["bias"], back


FORWARD: dict[str, Forward] = {
    "linear": _linear,
    "tied_linear": _tied_linear,
    "relu": _relu,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "gelu": _gelu,
    "softmax": _softmax,
    "dropout": _dropout,
    "add": _add,
    "concat": _concat,
    "flatten": _flatten,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
}

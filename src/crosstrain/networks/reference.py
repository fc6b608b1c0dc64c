"""The numpy float64 reference of a network: what every framework is compared with (see crosstrain.parity).

Written for clarity and independence, not speed: forward pass, loss, gradients of every parameter, the one SGD form of
docs/design.md, and batch norm's running statistics. Nothing here is shared with a framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from crosstrain.errors import ConfigError
from crosstrain.networks import reference_images, reference_layers, reference_sequences
from crosstrain.networks.reference_layers import Array, Back, Call, Forward
from crosstrain.networks.spec import Op, Spec

FORWARD: dict[str, Forward] = {**reference_layers.FORWARD, **reference_images.FORWARD, **reference_sequences.FORWARD}


class Reference:
    """A network with its parameters and states ({name: float64 array}) and the optimiser's velocities.

    Inputs are what the network takes: images (n, C, H, W), vectors (n, D) or token ids (n, T); targets are class indices
    (n,) or (n, T), floats of the output's shape, or None where the network's own input or op is the target.
    """

    def __init__(self, spec: Spec, arrays: Mapping[str, Array], optimizer: Mapping[str, Any] | None = None) -> None:
        """`arrays`: every parameter and state by name; `optimizer`: run.json's key (only `step` needs it)."""
        for op in spec.ops:
            if op.op not in FORWARD:
                raise ConfigError(f"op {op.name} ({op.op}): the reference does not know it yet")
        self.spec = spec
        self.optimizer = optimizer
        self.parameters = {p.name: np.array(arrays[p.name], np.float64) for p in spec.parameters}
        self.states = {s.name: np.array(arrays[s.name], np.float64) for s in spec.states}
        self.velocity: dict[str, Array] = {}

    def output(self, inputs: Array, training: bool = False) -> Array:
        """The output (logits) of one batch; no state changes."""
        return self._forward(inputs, training)[0]

    def loss(self, inputs: Array, targets: Array | None, training: bool = True) -> float:
        """The loss of one batch; no state changes."""
        output, values, _, _ = self._forward(inputs, training)
        return _loss(self.spec.loss, output, self._target(values, inputs, targets))[0]

    def gradients(self, inputs: Array, targets: Array | None) -> tuple[float, dict[str, Array]]:
        """(loss, {name of a trained parameter: gradient}) of one batch in training mode, before clipping and decay; no state changes."""
        loss, gradients, _ = self._backward(inputs, targets)
        return loss, gradients

    def step(self, inputs: Array, targets: Array | None) -> float:
        """One SGD step; returns the loss before it. `v = m·v + (g·clip + decay·w)`, `w −= rate·v`; the states move too."""
        if self.optimizer is None:
            raise ValueError("Reference.step needs the optimizer")
        loss, gradients, states = self._backward(inputs, targets)
        self.states.update(states)
        rule, scale = self.optimizer, 1.0
        if rule["clip_norm"] is not None:
            norm = float(np.sqrt(sum(float(np.vdot(g, g)) for g in gradients.values())))
            scale = min(1.0, rule["clip_norm"] / norm) if norm > 0 else 1.0
        for p in self.spec.trained:
            # In place: with 10⁷ parameters the time goes into making arrays.
            step, parameter = gradients[p.name], self.parameters[p.name]
            step *= scale
            if p.decay:
                step += rule["weight_decay"] * parameter
            velocity = self.velocity.setdefault(p.name, np.zeros_like(step))
            velocity *= rule["momentum"]
            velocity += step
            parameter -= np.multiply(velocity, rule["learning_rate"], out=step)
        return loss

    # -- one pass ------------------------------------------------------------------------------------------------------

    def _call(self, op: Op, values: Mapping[str, Array], tokens: Array, training: bool) -> Call:
        tied = op.attributes.get("tied")
        return Call(
            op=op,
            inputs=[values[name] for name in op.inputs],
            parameters=_own(op.name, self.parameters),
            states=_own(op.name, self.states),
            tied=self.parameters[f"{tied}.weight"] if tied else None,
            tokens=tokens,
            training=training,
        )

    def _target(self, values: Mapping[str, Array], inputs: Array, targets: Array | None) -> Array:
        """What the output is compared with: the targets, the input itself, or what an op of the network gives."""
        if self.spec.target["kind"] == "op":
            return values[self.spec.target["name"]]
        if targets is None and self.spec.target["kind"] != "input":
            raise ValueError(f"{self.spec.loss} needs targets")
        return inputs if targets is None else targets

    def _forward(
        self, inputs: Array, training: bool
    ) -> tuple[Array, dict[str, Array], list[tuple[Op, Back]], dict[str, Array]]:
        """(output, every op's output by name, each op with its backward function, states after this batch)."""
        is_tokens = self.spec.input["kind"] == "tokens"
        values: dict[str, Array] = {"input": inputs if is_tokens else np.asarray(inputs, np.float64)}
        backs: list[tuple[Op, Back]] = []
        states: dict[str, Array] = {}
        for op in self.spec.ops:
            call = self._call(op, values, inputs, training)
            values[op.name], back = FORWARD[op.op](call)
            backs.append((op, back))
            states.update({f"{op.name}.{suffix}": value for suffix, value in call.new_states.items()})
        return values[self.spec.output], values, backs, states

    def _backward(self, inputs: Array, targets: Array | None) -> tuple[float, dict[str, Array], dict[str, Array]]:
        """(loss, gradients, states after this batch), by going through the ops backwards."""
        output, values, backs, states = self._forward(inputs, training=True)
        loss, d_output = _loss(self.spec.loss, output, self._target(values, inputs, targets))
        flowing: dict[str, Array] = {self.spec.output: d_output}
        gradients: dict[str, Array] = {}
        for op, back in reversed(backs):
            d_inputs, d_parameters = back(flowing.pop(op.name))
            for name, value in zip(op.inputs, d_inputs, strict=True):
                if name != "input":
                    flowing[name] = flowing[name] + value if name in flowing else value
            for suffix, value in d_parameters.items():
                owner = f"{op.attributes['tied']}.weight" if suffix == "tied" else f"{op.name}.{suffix}"
                gradients[owner] = gradients[owner] + value if owner in gradients else value
        gradients = {p.name: gradients[p.name] for p in self.spec.trained}
        return loss, gradients, states


def _own(name: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    prefix = name + "."
    return {key[len(prefix) :]: value for key, value in arrays.items() if key.startswith(prefix)}


def _loss(kind: str, output: Array, target: Array) -> tuple[float, Array]:
    """(mean loss, its gradient for the output): softmax cross-entropy from logits, or the squared error of a constant target."""
    if kind == "softmax_cross_entropy":
        shifted = output - output.max(axis=-1, keepdims=True)
        log_probability = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        chosen = np.asarray(target, np.int64)[..., None]
        picked = np.take_along_axis(log_probability, chosen, axis=-1)
        gradient = np.exp(log_probability)
        np.put_along_axis(gradient, chosen, np.take_along_axis(gradient, chosen, axis=-1) - 1.0, axis=-1)
        return float(-picked.mean()), gradient / picked.size
    difference = output - np.asarray(target, np.float64)
    return float((difference**2).mean()), 2.0 * difference / difference.size

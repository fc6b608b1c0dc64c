"""A network, written once: `Network` builds it op by op, `Spec` is the finished, immutable result (the JSON of docs/design.md).

    net = Network("lenet", image(1, 28, 28), classes(10))
    net.add("conv2d", "conv1", out_channels=20, kernel=5)
    ...
    spec = net.finish()
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any

from hydra.utils import get_method
from omegaconf import OmegaConf

from crosstrain.errors import ConfigError
from crosstrain.networks.attributes import read_attributes
from crosstrain.networks.ops import RULES, Derived, Init, Shape, Site, Weight, named_init

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
#: keys of a conf/network entry that are not arguments of its function
_NOT_ARGUMENTS = ("_target_", "name", "recommended", "ladder")


def image(channels: int, height: int, width: int) -> dict[str, Any]:
    """Input: an image (C, H, W)."""
    return {"kind": "image", "shape": [channels, height, width]}


def vector(size: int) -> dict[str, Any]:
    """Input: a vector (D,)."""
    return {"kind": "vector", "shape": [size]}


def tokens(length: int) -> dict[str, Any]:
    """Input: token ids (T,); 0 is padding where the network has a masked_mean."""
    return {"kind": "tokens", "shape": [length]}


def classes(count: int) -> dict[str, Any]:
    """Target: a class index for each sample, or for each token where the output is (T, classes)."""
    return {"kind": "class", "classes": count}


def values(*shape: int) -> dict[str, Any]:
    """Target: floats of the output's shape (squared error)."""
    return {"kind": "values", "shape": list(shape)}


def itself() -> dict[str, Any]:
    """Target: the input (an autoencoder; squared error)."""
    return {"kind": "input"}


def output_of(op: str) -> dict[str, Any]:
    """Target: what this op of the network itself gives, taken as a constant (an autoencoder of a deeper layer; squared error)."""
    return {"kind": "op", "name": op}


@dataclass(frozen=True)
class Op:
    """One op; `attributes` as in docs/design.md, `shape` of its output, FLOPs as in `ops.Derived`."""

    op: str
    name: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    shape: Shape
    input_flops: int
    inner_flops: int


@dataclass(frozen=True)
class Variable:
    """A parameter or a state. `decay`: weight decay applies (weights of two or more axes, not biases or norms; never a state).

    `trained`: false for a parameter that is used as it is loaded: no gradient, no update.
    """

    name: str
    shape: Shape
    init: Init
    decay: bool = False
    trained: bool = True

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Spec:
    """A finished network. Compare, hash and store it by `key()`."""

    name: str
    input: Mapping[str, Any]
    target: Mapping[str, Any]
    ops: tuple[Op, ...]
    output: str
    loss: str
    parameters: tuple[Variable, ...]
    states: tuple[Variable, ...]

    @property
    def parameter_count(self) -> int:
        """Of all parameters, those that are not trained included."""
        return sum(p.size for p in self.parameters)

    @property
    def trained(self) -> tuple[Variable, ...]:
        """The parameters that are trained."""
        return tuple(p for p in self.parameters if p.trained)

    @property
    def output_shape(self) -> Shape:
        return next(op.shape for op in self.ops if op.name == self.output)

    @property
    def answers_each_token(self) -> bool:
        """Whether it is a language model: a class for each token, output (T, classes)."""
        return self.loss == "softmax_cross_entropy" and len(self.output_shape) == 2

    def has(self, op: str) -> bool:
        """Whether an op of this kind is in the network."""
        return any(o.op == op for o in self.ops)

    def flops(self) -> dict[str, int]:
        """Forward FLOPs per sample of each op (2 × multiply-adds; see `ops`)."""
        return {op.name: op.input_flops + op.inner_flops for op in self.ops}

    @property
    def forward_flops(self) -> int:
        """FLOPs per sample of the forward pass."""
        return sum(self.flops().values())

    @property
    def training_flops(self) -> int:
        """FLOPs per sample of forward + weight gradients + input gradients, without the gradients nobody needs."""
        trained = {p.name.split(".")[0] for p in self.trained}
        needs_gradient: set[str] = set()
        total = 0
        for op in self.ops:
            inputs_need = any(name in needs_gradient for name in op.inputs)
            weight_trains = op.attributes.get("tied", op.name) in trained
            if inputs_need or weight_trains or op.name in trained:
                needs_gradient.add(op.name)
            total += (1 + inputs_need + weight_trains) * op.input_flops
            total += (3 if inputs_need or weight_trains else 1) * op.inner_flops
        return total

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, as docs/design.md shows it."""
        return {
            "name": self.name,
            "input": _thawed(self.input),
            "target": _thawed(self.target),
            "ops": [
                {"op": o.op, "name": o.name, "inputs": list(o.inputs), **_thawed(o.attributes), "shape": list(o.shape)}
                for o in self.ops
            ],
            "output": self.output,
            "loss": {"op": self.loss},
            "parameters": [
                {"name": p.name, "shape": list(p.shape), "init": dict(p.init), "decay": p.decay, "trained": p.trained}
                for p in self.parameters
            ],
            "states": [{"name": s.name, "shape": list(s.shape), "init": dict(s.init)} for s in self.states],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Spec:
        """The spec of `to_json`, derived again and checked; `shape`, `parameters` and `states` may be left out.

        Raises ConfigError where what is written is not what follows from the ops.
        """
        net = Network(data["name"], data["input"], data["target"])
        for op in data["ops"]:
            attributes = {k: v for k, v in op.items() if k not in ("op", "name", "inputs", "shape")}
            net.add(op["op"], op["name"], inputs=op["inputs"], **attributes)
            if "shape" in op and tuple(op["shape"]) != net.ops[-1].shape:
                follows = list(net.ops[-1].shape)
                raise ConfigError(f"op {op['name']} ({op['op']}): shape {op['shape']} is written, {follows} follows")
        spec = net.finish(output=data["output"], loss=data["loss"]["op"])
        return replace(
            spec,
            parameters=_declared("parameters", spec.parameters, data.get("parameters")),
            states=_declared("states", spec.states, data.get("states")),
        )

    def with_attributes(self, op: str, **attributes: Any) -> Spec:
        """The same network with these attributes set on every op of this kind (dropout rate 0, for instance)."""
        data = self.to_json()
        for entry in data["ops"]:
            if entry["op"] == op:
                entry.update(attributes)
        return Spec.from_json(data)

    def key(self) -> str:
        """SHA-256 (hex) of the canonical JSON without the name: two networks with one key are the same network."""
        facts = {key: value for key, value in self.to_json().items() if key != "name"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Network:
    """Builds a `Spec`, checking every op as it is added."""

    def __init__(self, name: str, input: Mapping[str, Any], target: Mapping[str, Any]) -> None:
        self.name = name
        self.input = _checked_input(input)
        self.target = dict(target)
        self.ops: list[Op] = []
        self._shapes: dict[str, Shape] = {"input": tuple(self.input["shape"])}
        self._parameters: list[Variable] = []
        self._states: list[Variable] = []

    def add(
        self,
        op: str,
        name: str,
        inputs: str | Iterable[str] | None = None,
        init: str | Init | None = None,
        trained: bool = True,
        **attributes: Any,
    ) -> str:
        """Append an op and return its name. `inputs`: names of earlier ops or `input`; None = the op before.

        `init` replaces the default of the op's weights (two or more axes): a name of `ops.named_init`, or {kind, …}.
        `trained`: false freezes the op's parameters. Raises ConfigError (one line: op, shapes, what is wrong).
        """
        if not _NAME.fullmatch(name) or name in self._shapes:
            raise ConfigError(f"op {name!r} ({op}): a name is letters, digits and _, and used once")
        canonical = read_attributes(op, name, attributes)
        if inputs is None:
            inputs = self.ops[-1].name if self.ops else "input"
        sources = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        derived = RULES[op](self._site(op, name, canonical, sources))
        self._shapes[name] = derived.shape
        self.ops.append(Op(op, name, sources, _frozen(canonical), derived.shape, derived.input_flops, derived.inner_flops))
        self._register(name, derived, init, trained)
        return name

    def finish(self, output: str | None = None, loss: str = "softmax_cross_entropy") -> Spec:
        """The immutable spec; `output` defaults to the last op. Every op must lead to it, and it must fit target and loss."""
        if not self.ops:
            raise ConfigError(f"network {self.name}: it has no ops")
        output = output or self.ops[-1].name
        if output not in self._shapes or output == "input":
            raise ConfigError(f"network {self.name}: output {output!r} is no op of it")
        self._check_used(output)
        self._check_target(output, loss)
        return Spec(
            self.name,
            _frozen(self.input),
            _frozen(self.target),
            tuple(self.ops),
            output,
            loss,
            tuple(self._parameters),
            tuple(self._states),
        )

    def _site(self, op: str, name: str, attributes: Mapping[str, Any], sources: tuple[str, ...]) -> Site:
        for source in sources:
            if source not in self._shapes:
                raise ConfigError(f"op {name} ({op}): its input {source!r} is no earlier op")
        reads_tokens = self.input["kind"] == "tokens" and "input" in sources
        weights = {p.name: p.shape for p in self._parameters}
        site = Site(op, name, attributes, tuple(self._shapes[s] for s in sources), weights, reads_tokens)
        if len(sources) != 1 and op not in ("add", "concat"):
            raise site.fail("wants one input")
        if len(sources) < 2 and op in ("add", "concat"):
            raise site.fail("wants two or more inputs")
        if reads_tokens and op != "embedding":
            raise site.fail("token ids go through an embedding first")
        if op == "masked_mean" and (self.input["kind"] != "tokens" or site.shapes[0][:1] != self._shapes["input"]):
            raise site.fail(f"wants (T, width) with the T of a tokens input, here {self.input['kind']} {self._shapes['input']}")
        return site

    def _register(self, name: str, derived: Derived, init: str | Init | None, trained: bool) -> None:
        def start(weight: Weight) -> Init:
            if init is None or len(weight.shape) < 2:
                return weight.init
            return named_init(init, weight.shape) if isinstance(init, str) else init

        for weight in derived.parameters:
            decay = trained and len(weight.shape) >= 2
            self._parameters.append(Variable(f"{name}.{weight.suffix}", weight.shape, _frozen(start(weight)), decay, trained))
        for state in derived.states:
            self._states.append(Variable(f"{name}.{state.suffix}", state.shape, _frozen(state.init)))

    def _check_used(self, output: str) -> None:
        """A forgotten branch would silently make the network smaller: one of the published comparisons has such a network."""
        used = {output}
        for op in reversed(self.ops):
            if op.name not in used:
                raise ConfigError(f"network {self.name}: op {op.name} ({op.op}) does not lead to the output {output}")
            used.update(op.inputs)

    def _check_target(self, output: str, loss: str) -> None:
        shape, kind = self._shapes[output], self.target.get("kind")
        if loss == "softmax_cross_entropy":
            wanted = kind == "class" and len(shape) <= 2 and shape[-1] == self.target["classes"]
        elif loss == "mean_squared_error":
            wanted = (
                (kind == "input" and shape == self._shapes["input"] and self.input["kind"] != "tokens")
                or (kind == "values" and shape == tuple(self.target["shape"]))
                or (kind == "op" and shape == self._shapes.get(self.target["name"]))
            )
        else:
            raise ConfigError(f"network {self.name}: loss {loss!r} is not softmax_cross_entropy or mean_squared_error")
        if not wanted:
            raise ConfigError(f"network {self.name}: output {output} {shape} does not fit loss {loss} with target {self.target}")


def build(config: Mapping[str, Any]) -> Spec:
    """The spec of a conf/network entry: calls `_target_` with the entry's other keys (but for name, recommended and ladder).

    The spec takes the entry's `name`. Raises ConfigError (one line) for a bad `_target_` or argument, or what the function raises.
    """
    entry = _plain(config)
    target, arguments = entry.get("_target_"), {k: v for k, v in entry.items() if k not in _NOT_ARGUMENTS}
    where = f"network {entry.get('name', '?')}: _target_={target}"
    if not isinstance(target, str):
        raise ConfigError(f"{where} must be the dotted path of a function that returns a Spec")
    try:
        function = get_method(target)
    except Exception as error:
        raise ConfigError(f"{where} can not be loaded: {_one_line(error)}") from error
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}; its arguments are {inspect.signature(function)}") from None
    try:
        spec = function(**arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} with {arguments} raised {type(error).__name__}: {_one_line(error)}") from error
    if not isinstance(spec, Spec):
        raise ConfigError(f"{where} returned {type(spec).__name__}, not a Spec")
    return replace(spec, name=str(entry.get("name", spec.name)))


def ladder_variant(config: Mapping[str, Any]) -> Spec:
    """The network that stands for a conf/network entry on the parity ladder: the same function with the arguments of `ladder`.

    Without `ladder` it is the entry's own network. Raises ConfigError as `build` does, and for a bad `ladder`.
    """
    entry = _plain(config)
    changes = entry.get("ladder") or {}
    if not isinstance(changes, dict) or set(changes) & set(_NOT_ARGUMENTS):
        raise ConfigError(f"network {entry.get('name', '?')}: ladder={changes} must be {{argument of _target_: value, …}}")
    return build({**entry, **changes})


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config)  # type: ignore[arg-type]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _checked_input(given: Mapping[str, Any]) -> dict[str, Any]:
    ranks = {"image": 3, "vector": 1, "tokens": 1}
    kind, shape = given.get("kind"), list(given.get("shape", ()))
    if kind not in ranks or len(shape) != ranks[kind] or not all(isinstance(n, int) and n >= 1 for n in shape):
        raise ConfigError(f"input {dict(given)} must be image [C, H, W], vector [D] or tokens [T], sizes ≥ 1")
    return {"kind": kind, "shape": shape}


def _declared(what: str, derived: tuple[Variable, ...], written: list[dict[str, Any]] | None) -> tuple[Variable, ...]:
    """The written variables (their init, decay and trained count), if names and shapes are the derived ones."""
    if written is None:
        return derived
    found = tuple(
        Variable(w["name"], tuple(w["shape"]), _frozen(w["init"]), bool(w.get("decay", False)), bool(w.get("trained", True)))
        for w in written
    )
    if [(v.name, v.shape) for v in found] != [(v.name, v.shape) for v in derived]:
        raise ConfigError(f"{what} written {[(v.name, v.shape) for v in found]}, derived {[(v.name, v.shape) for v in derived]}")
    return found


def _frozen(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType({k: tuple(v) if isinstance(v, list) else v for k, v in mapping.items()})


def _thawed(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in mapping.items()}

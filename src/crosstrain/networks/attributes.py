"""The attributes of each op of a spec: how each is read, and its default (the table in docs/design.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from crosstrain.errors import ConfigError

REQUIRED = object()
Reader = Callable[[Any], Any]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(value: Any) -> int:
    if not _is_int(value) or value < 1:
        raise ValueError("a whole number ≥ 1")
    return int(value)


def _index(value: Any) -> int:
    if not _is_int(value):
        raise ValueError("a whole number")
    return int(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _pair(value: Any) -> list[int]:
    """[vertical, horizontal] from one number or two."""
    values = [value] * 2 if _is_int(value) else list(value) if isinstance(value, list | tuple) else []
    if len(values) != 2 or not all(_is_int(v) and v >= 1 for v in values):
        raise ValueError("one or two whole numbers ≥ 1")
    return values


def _sides(value: Any) -> list[int]:
    """[top, bottom, left, right] from one number (all four) or four."""
    values = [value] * 4 if _is_int(value) else list(value) if isinstance(value, list | tuple) else []
    if len(values) != 4 or not all(_is_int(v) and v >= 0 for v in values):
        raise ValueError("one or four (top, bottom, left, right) whole numbers ≥ 0")
    return values


def _number(low: float, high: float = float("inf")) -> Reader:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < high:
            raise ValueError(f"a number in [{low:g}, {high:g})")
        return float(value)

    return read


def _choice(*allowed: str) -> Reader:
    def read(value: Any) -> str:
        if value not in allowed:
            raise ValueError(" or ".join(allowed))
        return str(value)

    return read


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("the name of an op")
    return value


_POOL: dict[str, tuple[Reader, Any]] = {
    "kernel": (_pair, REQUIRED),
    "stride": (_pair, REQUIRED),
    "padding": (_sides, 0),
    "ceil": (_flag, False),
}

ATTRIBUTES: dict[str, dict[str, tuple[Reader, Any]]] = {
    "linear": {"out": (_count, REQUIRED), "bias": (_flag, True)},
    "tied_linear": {"tied": (_text, REQUIRED), "transpose": (_flag, REQUIRED), "bias": (_flag, True)},
    "conv2d": {
        "out_channels": (_count, REQUIRED),
        "kernel": (_pair, REQUIRED),
        "stride": (_pair, 1),
        "padding": (_sides, 0),
        "dilation": (_pair, 1),
        "groups": (_count, 1),
        "bias": (_flag, True),
    },
    "max_pool": _POOL,
    "avg_pool": {**_POOL, "count_include_pad": (_flag, True)},
    "global_avg_pool": {},
    "batch_norm": {
        "epsilon": (_number(0), 1e-5),
        "decay": (_number(0, 1), 0.9),
        "variance": (_choice("unbiased", "biased"), "unbiased"),
    },
    "layer_norm": {"epsilon": (_number(0), 1e-5)},
    "lrn": {
        "size": (_count, REQUIRED),
        "alpha": (_number(0), REQUIRED),
        "beta": (_number(0), REQUIRED),
        "k": (_number(0), REQUIRED),
    },
    "relu": {},
    "tanh": {},
    "sigmoid": {},
    "softmax": {},
    "gelu": {"approximate": (_choice("none", "tanh"), "none")},
    "dropout": {"rate": (_number(0, 1), REQUIRED)},
    "add": {},
    "concat": {},
    "channel_pad_shortcut": {"out_channels": (_count, REQUIRED), "stride": (_count, 1)},
    "flatten": {},
    "embedding": {"vocabulary": (_count, REQUIRED), "width": (_count, REQUIRED)},
    "position_embedding": {},
    "class_token": {},
    "patches_to_tokens": {},
    "select_token": {"index": (_index, REQUIRED)},
    "lstm": {"hidden": (_count, REQUIRED)},
    "attention": {"heads": (_count, REQUIRED), "causal": (_flag, REQUIRED)},
    "masked_mean": {},
}


def read_attributes(op: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All attributes of an op in their canonical form (kernel [h, w], padding [top, bottom, left, right], …), defaults filled in.

    Raises ConfigError for an unknown op, an unknown or missing attribute, or a bad value.
    """
    if op not in ATTRIBUTES:
        raise ConfigError(f"op {name}: unknown op {op!r}, known are {', '.join(ATTRIBUTES)}")
    known = ATTRIBUTES[op]
    for key in given:
        if key not in known:
            raise ConfigError(f"op {name} ({op}): unknown attribute {key!r}, known are {', '.join(known) or 'none'}")
    attributes = {}
    for key, (reader, default) in known.items():
        value = given.get(key, default)
        if value is REQUIRED:
            raise ConfigError(f"op {name} ({op}): attribute {key} is missing")
        try:
            attributes[key] = reader(value)
        except ValueError as error:
            raise ConfigError(f"op {name} ({op}): {key}={value!r} must be {error}") from None
    return attributes

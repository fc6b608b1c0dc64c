"""The ops of a network spec: attributes, shapes, parameters, initial values and FLOPs.

One rule for each row of the table in docs/design.md. Shapes never hold the batch: an image is (C, H, W), a vector (D,),
a sequence (T, width). FLOPs are 2 × multiply-adds of one sample's forward pass; biases, activations, pooling and
normalisation count 0, as in the published counts: they are bound by memory, not by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod, sqrt
from typing import Any, NamedTuple

from crosstrain.errors import ConfigError

Shape = tuple[int, ...]
Init = Mapping[str, Any]

ZERO: Init = {"kind": "constant", "value": 0.0}
ONE: Init = {"kind": "constant", "value": 1.0}


def uniform(bound: float) -> Init:
    """Uniform in [−bound, bound)."""
    return {"kind": "uniform", "bound": float(bound)}


def normal(std: float) -> Init:
    """Normal with mean 0 and this standard deviation."""
    return {"kind": "normal", "std": float(std)}


def named_init(name: str, shape: Shape) -> Init:
    """A rule by its name, for a weight (out, in, …): fan_in = in·kernel, fan_out = out·kernel.

    glorot: U(±√(6/(fan_in+fan_out))), Glorot & Bengio 2010; glorot_sigmoid: four times that, for the logistic sigmoid,
    whose slope at 0 is ¼ (that of tanh is 1); he: U(±√(6/fan_in)), He et al. 2015, for ReLU; lecun: U(±√(3/fan_in)),
    LeCun et al. 1998.
    """
    fan_in, fan_out = prod(shape[1:]), shape[0] * prod(shape[2:])
    bounds = {
        "glorot": sqrt(6 / (fan_in + fan_out)),
        "glorot_sigmoid": 4 * sqrt(6 / (fan_in + fan_out)),
        "he": sqrt(6 / fan_in),
        "lecun": sqrt(3 / fan_in),
    }
    if name not in bounds:
        raise ConfigError(f"init {name!r} is not one of {', '.join(bounds)}")
    return uniform(bounds[name])


class Weight(NamedTuple):
    """A parameter or state of one op, named `<op name>.<suffix>`."""

    suffix: str
    shape: Shape
    init: Init


class Derived(NamedTuple):
    """What follows from an op, its attributes and the shapes it gets.

    `input_flops` multiply the op's own input by a weight: training costs them three times (forward, weight gradient, input
    gradient), the last left out where nothing before has parameters. `inner_flops` are the rest (always three times).
    """

    shape: Shape
    parameters: tuple[Weight, ...] = ()
    states: tuple[Weight, ...] = ()
    input_flops: int = 0
    inner_flops: int = 0


@dataclass(frozen=True)
class Site:
    """One op where it stands: `shapes` of its inputs, `weights`: shapes of all parameters so far, `tokens`: it gets token ids."""

    op: str
    name: str
    attributes: Mapping[str, Any]
    shapes: tuple[Shape, ...]
    weights: Mapping[str, Shape]
    tokens: bool

    def fail(self, wanted: str) -> ConfigError:
        got = ", ".join(str(s) for s in self.shapes)
        return ConfigError(f"op {self.name} ({self.op}): {wanted}, got {got}{' of token ids' if self.tokens else ''}")

    def only(self, rank: int, form: str) -> Shape:
        """The one input's shape, which must have this rank."""
        if len(self.shapes[0]) != rank:
            raise self.fail(f"wants one input {form}")
        return self.shapes[0]


def _biased(site: Site, width: int) -> tuple[Weight, ...]:
    return (Weight("bias", (width,), ZERO),) if site.attributes["bias"] else ()


def _linear(site: Site) -> Derived:
    """y = x·Wᵀ + b over the last axis of (D,) or (T, D)."""
    *before, width = site.shapes[0]
    if len(before) > 1:
        raise site.fail("wants one input (D,) or (T, D)")
    shape = (site.attributes["out"], width)
    weight = Weight("weight", shape, named_init("glorot", shape))
    return Derived((*before, shape[0]), (weight, *_biased(site, shape[0])), input_flops=2 * prod(before) * prod(shape))


def _tied_linear(site: Site) -> Derived:
    """The weight W of another op: transpose=false: y = x·Wᵀ + b, true: y = x·W + b."""
    *before, width = site.shapes[0]
    weight = site.weights.get(site.attributes["tied"] + ".weight")
    if weight is None or len(weight) != 2:
        raise site.fail(f"tied={site.attributes['tied']} must name an earlier linear or embedding op")
    out, inner = weight[::-1] if site.attributes["transpose"] else weight
    if width != inner or len(before) > 1:
        raise site.fail(f"tied to {site.attributes['tied']}.weight {weight} wants ({inner},) or (T, {inner})")
    return Derived((*before, out), _biased(site, out), input_flops=2 * prod(before) * prod(weight))


def _conv2d(site: Site) -> Derived:
    channels, height, width = site.only(3, "(C, H, W)")
    a = site.attributes
    groups, out = a["groups"], a["out_channels"]
    if channels % groups or out % groups:
        raise site.fail(f"groups={groups} must divide the {channels} input and {out} output channels")
    top, bottom, left, right = a["padding"]
    reach = [(k - 1) * d + 1 for k, d in zip(a["kernel"], a["dilation"], strict=True)]
    rows = (height + top + bottom - reach[0]) // a["stride"][0] + 1
    columns = (width + left + right - reach[1]) // a["stride"][1] + 1
    if rows < 1 or columns < 1:
        raise site.fail(f"kernel {a['kernel']} with dilation {a['dilation']} and padding {a['padding']} is larger than its input")
    shape = (out, channels // groups, *a["kernel"])
    weight = Weight("weight", shape, named_init("glorot", shape))
    return Derived((out, rows, columns), (weight, *_biased(site, out)), input_flops=2 * rows * columns * prod(shape))


def pooled(size: int, kernel: int, stride: int, before: int, after: int, up: bool) -> int:
    """Number of pooling windows along one axis. Rounding up, the last one must start inside the input or the padding before."""
    span = size + before + after - kernel
    if span < 0:
        return 0
    if not up:
        return span // stride + 1
    windows = ceil(span / stride) + 1
    return windows - 1 if (windows - 1) * stride >= size + before else windows


def _pool(site: Site) -> Derived:
    channels, height, width = site.only(3, "(C, H, W)")
    a = site.attributes
    (kh, kw), (sh, sw), (top, bottom, left, right) = a["kernel"], a["stride"], a["padding"]
    if max(top, bottom) >= kh or max(left, right) >= kw:
        raise site.fail(f"padding {a['padding']} must be smaller than kernel {a['kernel']}")
    rows, columns = pooled(height, kh, sh, top, bottom, a["ceil"]), pooled(width, kw, sw, left, right, a["ceil"])
    if rows < 1 or columns < 1:
        raise site.fail(f"kernel {a['kernel']} with padding {a['padding']} is larger than its input")
    return Derived((channels, rows, columns))


def _batch_norm(site: Site) -> Derived:
    if len(site.shapes[0]) not in (1, 3):
        raise site.fail("wants one input (C, H, W) or (C,)")
    shape = site.shapes[0][:1]
    return Derived(
        site.shapes[0],
        (Weight("weight", shape, ONE), Weight("bias", shape, ZERO)),
        (Weight("running_mean", shape, ZERO), Weight("running_var", shape, ONE)),
    )


def _layer_norm(site: Site) -> Derived:
    shape = site.shapes[0][-1:]
    return Derived(site.shapes[0], (Weight("weight", shape, ONE), Weight("bias", shape, ZERO)))


def _lrn(site: Site) -> Derived:
    if site.attributes["size"] % 2 == 0:
        raise site.fail(f"size={site.attributes['size']} must be odd, so that the window is centred")
    return Derived(site.only(3, "(C, H, W)"))


def _softmax(site: Site) -> Derived:
    """Over the last axis of (D,) or (T, D)."""
    if len(site.shapes[0]) > 2:
        raise site.fail("wants one input (D,) or (T, D)")
    return Derived(site.shapes[0])


def _add(site: Site) -> Derived:
    if len(set(site.shapes)) != 1:
        raise site.fail("wants inputs of one shape")
    return Derived(site.shapes[0])


def _concat(site: Site) -> Derived:
    """Along the first axis (channels of images)."""
    if len({shape[1:] for shape in site.shapes}) != 1:
        raise site.fail("wants inputs equal but for the first axis")
    return Derived((sum(shape[0] for shape in site.shapes), *site.shapes[0][1:]))


def _channel_pad_shortcut(site: Site) -> Derived:
    channels, height, width = site.only(3, "(C, H, W)")
    out, stride = site.attributes["out_channels"], site.attributes["stride"]
    if out < channels:
        raise site.fail(f"out_channels={out} must not be below the input's {channels}")
    return Derived((out, -(-height // stride), -(-width // stride)))


def _embedding(site: Site) -> Derived:
    if not site.tokens:
        raise site.fail("wants the network's input, of kind tokens")
    shape = (site.attributes["vocabulary"], site.attributes["width"])
    return Derived((*site.shapes[0], shape[1]), (Weight("weight", shape, normal(0.1)),))


def _position_embedding(site: Site) -> Derived:
    shape = site.only(2, "(T, width)")
    return Derived(shape, (Weight("weight", shape, normal(0.02)),))


def _class_token(site: Site) -> Derived:
    length, width = site.only(2, "(T, width)")
    return Derived((length + 1, width), (Weight("weight", (1, width), normal(0.02)),))


def _patches_to_tokens(site: Site) -> Derived:
    channels, height, width = site.only(3, "(C, H, W)")
    return Derived((height * width, channels))


def _select_token(site: Site) -> Derived:
    length, width = site.only(2, "(T, width)")
    if not -length <= site.attributes["index"] < length:
        raise site.fail(f"index={site.attributes['index']} is outside the sequence")
    return Derived((width,))


def _lstm(site: Site) -> Derived:
    length, width = site.only(2, "(T, width)")
    hidden = site.attributes["hidden"]
    init = uniform(1 / sqrt(hidden))
    parameters = (
        Weight("weight_ih", (4 * hidden, width), init),
        Weight("weight_hh", (4 * hidden, hidden), init),
        Weight("bias", (4 * hidden,), ZERO),
    )
    return Derived((length, hidden), parameters, (), 8 * length * hidden * width, 8 * length * hidden * hidden)


def _attention(site: Site) -> Derived:
    """qkv_weight's rows: d for q, d for k, d for v, each head's rows together. A causal mask does not lower the FLOPs counted."""
    length, width = site.only(2, "(T, width)")
    if width % site.attributes["heads"]:
        raise site.fail(f"heads={site.attributes['heads']} must divide the width {width}")
    parameters = (
        Weight("qkv_weight", (3 * width, width), named_init("glorot", (width, width))),
        Weight("qkv_bias", (3 * width,), ZERO),
        Weight("out_weight", (width, width), named_init("glorot", (width, width))),
        Weight("out_bias", (width,), ZERO),
    )
    inner = 4 * length * length * width + 2 * length * width * width
    return Derived((length, width), parameters, (), 6 * length * width * width, inner)


def _masked_mean(site: Site) -> Derived:
    return Derived(site.only(2, "(T, width)")[1:])


def _same(site: Site) -> Derived:
    return Derived(site.shapes[0])


RULES: dict[str, Callable[[Site], Derived]] = {
    "linear": _linear,
    "tied_linear": _tied_linear,
    "conv2d": _conv2d,
    "max_pool": _pool,
    "avg_pool": _pool,
    "global_avg_pool": lambda site: Derived(site.only(3, "(C, H, W)")[:1]),
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "lrn": _lrn,
    "relu": _same,
    "tanh": _same,
    "sigmoid": _same,
    "softmax": _softmax,
    "gelu": _same,
    "dropout": _same,
    "add": _add,
    "concat": _concat,
    "channel_pad_shortcut": _channel_pad_shortcut,
    "flatten": lambda site: Derived((prod(site.shapes[0]),)),
    "embedding": _embedding,
    "position_embedding": _position_embedding,
    "class_token": _class_token,
    "patches_to_tokens": _patches_to_tokens,
    "select_token": _select_token,
    "lstm": _lstm,
    "attention": _attention,
    "masked_mean": _masked_mean,
}

"""The ops of the spec as Flax layers and JAX functions. Images are NHWC inside, as XLA's convolutions want them on CPUs and GPUs."""

import jax
import numpy
import optax
from flax import linen as nn
from jax import lax
from jax import numpy as jnp

from . import jax_lstm, jax_pooling, jax_space_to_depth
from .base import Unsupported

#: where a parameter or state is in Flax's variables: (op kind, the spec's suffix) → (collection, names below the op's, axes).
#: `axes` turn the canonical layout into Flax's; None where they are the same.
PLACES = {
    ("linear", "weight"): ("params", ("kernel",), (1, 0)),
    ("linear", "bias"): ("params", ("bias",), None),
    ("tied_linear", "bias"): ("params", ("bias",), None),
    ("conv2d", "weight"): ("params", ("kernel",), (2, 3, 1, 0)),
    ("conv2d", "bias"): ("params", ("bias",), None),
    ("batch_norm", "weight"): ("params", ("scale",), None),
    ("batch_norm", "bias"): ("params", ("bias",), None),
    ("batch_norm", "running_mean"): ("batch_stats", ("mean",), None),
    ("batch_norm", "running_var"): ("batch_stats", ("var",), None),
    ("layer_norm", "weight"): ("params", ("scale",), None),
    ("layer_norm", "bias"): ("params", ("bias",), None),
    ("embedding", "weight"): ("params", ("embedding",), None),
    ("position_embedding", "weight"): ("params", ("weight",), None),
    ("class_token", "weight"): ("params", ("weight",), None),
    ("lstm", "weight_ih"): ("params", ("weight_ih",), (1, 0)),
    ("lstm", "weight_hh"): ("params", ("weight_hh",), (1, 0)),
    ("lstm", "bias"): ("params", ("bias",), None),
    ("attention", "qkv_weight"): ("params", ("qkv", "kernel"), (1, 0)),
    ("attention", "qkv_bias"): ("params", ("qkv", "bias"), None),
    ("attention", "out_weight"): ("params", ("out", "kernel"), (1, 0)),
    ("attention", "out_bias"): ("params", ("out", "bias"), None),
}

ZEROS = nn.initializers.zeros


# -- layers that Flax does not have as one class ----------------------------------------------------------------------
class TiedLinear(nn.Module):
    """x·weight + b, `weight` being another layer's."""

    bias: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, weight):
        y = jnp.dot(x, weight.astype(self.dtype))
        return y + self.param("bias", ZEROS, weight.shape[1:]).astype(self.dtype) if self.bias else y


class PositionEmbedding(nn.Module):
    """(N, T, width) + a learnt (T, width)."""

    @nn.compact
    def __call__(self, x):
        return x + self.param("weight", ZEROS, x.shape[1:]).astype(x.dtype)


class ClassToken(nn.Module):
    """(N, T, width) → (N, T+1, width): a learnt token first."""

    @nn.compact
    def __call__(self, x):
        token = self.param("weight", ZEROS, (1, x.shape[2])).astype(x.dtype)
        return jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, x.shape[2])), x], axis=1)


class Attention(nn.Module):
    """Multi-head self-attention; the columns of `qkv`'s kernel are all queries, all keys, all values."""

    heads: int
    causal: bool
    dtype: jnp.dtype
    flash: bool

    @nn.compact
    def __call__(self, x):
        batch, time, width = x.shape
        size = width // self.heads
        qkv = nn.Dense(3 * width, dtype=self.dtype, name="qkv")(x).reshape(batch, time, 3, self.heads, size)
        # what cuDNN's kernels can do when JAX 0.11 asks for them: it raises otherwise (ViT's 197 tokens)
        flash = self.flash and size <= 128 and size % 8 == 0 and time % 2 == 0
        mixed = jax.nn.dot_product_attention(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=self.causal, implementation="cudnn" if flash else "xla"
        )
        return nn.Dense(width, dtype=self.dtype, name="out")(mixed.reshape(batch, time, width))


# -- the network ------------------------------------------------------------------------------------------------------
class Network(nn.Module):
    """(N, …input shape) → (output, target): of the op `spec["output"]`, and of the op that is the target (None where none is).

    `flash`: attention by cuDNN's fused kernels; `cudnn_lstm`: LSTMs by cuDNN's; `space_to_depth`: names of convolutions on blocks.
    """

    ops: tuple
    output: str
    target: str
    dtype: jnp.dtype
    flash: bool
    cudnn_lstm: bool
    space_to_depth: frozenset

    @nn.compact
    def __call__(self, x, training):
        values = {"input": x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(self.dtype)}
        layers = {}
        for op in self.ops:
            inputs = [values[name] for name in op["inputs"]]
            if op["op"] == "tied_linear":
                inputs.append(tied_weight(layers[op["tied"]], op["transpose"]))
            elif op["op"] == "masked_mean":
                inputs.append(values["input"])
            layers[op["name"]] = layer = LAYERS[op["op"]](self, op, training)
            values[op["name"]] = layer(*inputs)
        return values[self.output], None if self.target is None else values[self.target]


def network_of(spec, dtype, flash, cudnn_lstm, space_to_depth):
    """Raises Unsupported where `space_to_depth` can not be."""
    blocks = jax_space_to_depth.convolutions(spec) if space_to_depth else frozenset()
    target = spec["target"]["name"] if spec["target"]["kind"] == "op" else None
    return Network(tuple(spec["ops"]), spec["output"], target, dtype, flash, cudnn_lstm, blocks)


def initialized(network, example):
    """(what Flax would initialise, as shapes; the classes of the layers that this calls) for an input of this shape."""
    kinds = set()

    def called(function, arguments, keywords, context):
        kinds.add(type(context.module))
        return function(*arguments, **keywords)

    with nn.intercept_methods(called):
        made = jax.eval_shape(lambda x: network.init(jax.random.key(0), x, False), example)
    return dict(made), kinds


def places_of(spec):
    """{parameter or state of the spec: (collection, path, axes)}, as in PLACES, the path with the op's name."""
    kinds = {op["name"]: op["op"] for op in spec["ops"]}
    found = {}
    for entry in spec["parameters"] + spec["states"]:
        name, suffix = entry["name"].rsplit(".", 1)
        collection, path, axes = PLACES[kinds[name], suffix]
        found[entry["name"]] = (collection, (name,) + path, axes)
    return found


def nested(places, arrays):
    """Flax's variables from {the spec's name: array in Flax's layout}."""
    variables = {}
    for name, array in arrays.items():
        collection, path, _ = places[name]
        inner = variables.setdefault(collection, {})
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = array
    return variables


def flat(places, variables, names):
    """The opposite of `nested`, for these names."""
    found = {}
    for name in names:
        collection, path, _ = places[name]
        found[name] = variables[collection]
        for key in path:
            found[name] = found[name][key]
    return found


def canonical(array, axes):
    """A float32 copy of an array in Flax's layout, in the spec's."""
    array = numpy.asarray(array)
    return numpy.array(array if axes is None else array.transpose(numpy.argsort(axes)), numpy.float32, order="C")


def from_nhwc(array):
    return array.transpose(0, 3, 1, 2) if array.ndim == 4 else array


def to_nhwc(array):
    return array.transpose(0, 2, 3, 1) if array.ndim == 4 else array


# Each entry gives the layer of an op: what maps its input arrays to its output.
def linear(network, op, training):
    return nn.Dense(op["out"], use_bias=op["bias"], dtype=network.dtype, name=op["name"])


def tied_linear(network, op, training):
    return TiedLinear(op["bias"], network.dtype, name=op["name"])


def tied_weight(layer, transpose):
    """The weight of a linear layer (Flax: (in, out)) or an embedding (vocabulary, width), so that x·(it) is what is asked for."""
    variables = layer.variables["params"]
    if "kernel" in variables:
        return variables["kernel"].T if transpose else variables["kernel"]
    return variables["embedding"] if transpose else variables["embedding"].T


def conv2d(network, op, training):
    if op["name"] in network.space_to_depth:
        return jax_space_to_depth.conv2d(op, network.dtype)
    top, bottom, left, right = op["padding"]
    return nn.Conv(
        op["out_channels"],
        tuple(op["kernel"]),
        strides=tuple(op["stride"]),
        padding=((top, bottom), (left, right)),
        kernel_dilation=tuple(op["dilation"]),
        feature_group_count=op["groups"],
        use_bias=op["bias"],
        dtype=network.dtype,
        name=op["name"],
    )


def batch_norm(network, op, training):
    return nn.BatchNorm(
        use_running_average=not training,
        momentum=op["decay"],
        epsilon=op["epsilon"],
        dtype=network.dtype,
        name=op["name"],
    )


def layer_norm(network, op, training):
    return nn.LayerNorm(epsilon=op["epsilon"], dtype=network.dtype, name=op["name"])


def lrn(network, op, training):
    size, alpha, beta, k = op["size"], op["alpha"], op["beta"], op["k"]

    def layer(x):
        beside = ((0, 0), (0, 0), (0, 0), (size // 2, size // 2))
        squares = jnp.square(x.astype(jnp.float32))
        around = lax.reduce_window(squares, 0.0, lax.add, (1, 1, 1, size), (1, 1, 1, 1), beside)
        return (x * (k + alpha / size * around) ** -beta).astype(x.dtype)

    return layer


def dropout(network, op, training):
    return nn.Dropout(op["rate"], deterministic=not training, name=op["name"])


def add(*inputs):
    total = inputs[0]
    for other in inputs[1:]:
        total = total + other
    return total


def concat(*inputs):
    return jnp.concatenate(inputs, axis=3 if inputs[0].ndim == 4 else 1)


def channel_pad_shortcut(network, op, training):
    stride = op["stride"]

    def layer(x):
        width = (0, op["out_channels"] - x.shape[3])
        return jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), width))

    return layer


def flatten(x):
    return from_nhwc(x).reshape(x.shape[0], -1)


def softmax(x):
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def embedding(network, op, training):
    layer = nn.Embed(op["vocabulary"], op["width"], name=op["name"])
    if network.dtype == jnp.float32:
        return layer
    # not nn.Embed's own dtype: that would cast the whole table
    return Cast(layer, network.dtype)


class Cast(object):
    """A layer, its output in another type."""

    def __init__(self, layer, dtype):
        self.layer = layer
        self.dtype = dtype

    def __call__(self, x):
        return self.layer(x).astype(self.dtype)

    @property
    def variables(self):
        return self.layer.variables


def lstm(network, op, training):
    return jax_lstm.LSTM(op["hidden"], network.dtype, network.cudnn_lstm, name=op["name"])


def attention(network, op, training):
    return Attention(op["heads"], op["causal"], network.dtype, network.flash, name=op["name"])


def masked_mean(x, tokens):
    """(N, T, width) and tokens (N, T) → (N, width): the mean over the tokens that are not 0 (0 where there is none)."""
    mask = tokens != 0
    count = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
    return jnp.where(mask[:, :, None], x, 0).sum(axis=1) / count.astype(x.dtype)


def function(call):
    """The entry of an op without attributes and parameters."""
    return lambda network, op, training: call


LAYERS = {
    "linear": linear,
    "tied_linear": tied_linear,
    "conv2d": conv2d,
    "max_pool": lambda network, op, training: lambda x: jax_pooling.max_pool(op, x),
    "avg_pool": lambda network, op, training: lambda x: jax_pooling.avg_pool(op, x),
    "global_avg_pool": function(lambda x: x.mean(axis=(1, 2))),
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "lrn": lrn,
    "relu": function(nn.relu),
    "tanh": function(nn.tanh),
    "sigmoid": function(nn.sigmoid),
    "softmax": function(softmax),
    "gelu": lambda network, op, training: lambda x: nn.gelu(x, approximate=op["approximate"] == "tanh"),
    "dropout": dropout,
    "add": function(add),
    "concat": function(concat),
    "channel_pad_shortcut": channel_pad_shortcut,
    "flatten": function(flatten),
    "embedding": embedding,
    "position_embedding": lambda network, op, training: PositionEmbedding(name=op["name"]),
    "class_token": lambda network, op, training: ClassToken(name=op["name"]),
    "patches_to_tokens": function(lambda x: x.reshape(x.shape[0], -1, x.shape[3])),
    "select_token": lambda network, op, training: lambda x: x[:, op["index"]],
    "lstm": lstm,
    "attention": attention,
    "masked_mean": function(masked_mean),
}


# -- losses -----------------------------------------------------------------------------------------------------------
def cross_entropy(output, targets):
    """Mean over the batch, and over time where the logits are (N, T, classes)."""
    return optax.softmax_cross_entropy_with_integer_labels(output.astype(jnp.float32), targets).mean()


def squared_error(output, targets):
    return jnp.square(output.astype(jnp.float32) - targets.astype(jnp.float32)).mean()


LOSSES = {"softmax_cross_entropy": cross_entropy, "mean_squared_error": squared_error}


def loss_of(spec):
    """The function (output, targets) → mean loss of a spec."""
    if spec["loss"]["op"] not in LOSSES:
        raise Unsupported("jax has no mapping for loss %s" % spec["loss"]["op"])
    return LOSSES[spec["loss"]["op"]]

"""The ops of the spec as MXNet's own Gluon layers, in hybrid blocks that run with and without hybridize()."""

import math

import numpy
from mxnet import gluon
from mxnet.gluon import nn

from .base import Unsupported

#: outside every float32 activation, still a number that survives being written into a symbol as text
LOWEST = -3.0e38


# -- layers that gluon.nn does not have as one class ------------------------------------------------------------------
class TiedLinear(gluon.HybridBlock):
    """A linear layer with another layer's weight: y = x·Wᵀ + b, or x·W + b when `transpose`."""

    def __init__(self, weight, transpose, bias):
        gluon.HybridBlock.__init__(self)
        self.transpose = transpose
        self.units = weight.shape[1 if transpose else 0]
        with self.name_scope():
            self.weight = weight
            if bias:
                self.bias = self.params.get("bias", shape=(self.units,), init="zeros")

    def hybrid_forward(self, F, x, weight, bias=None):
        if self.transpose:
            weight = F.transpose(weight)
        if bias is None:
            return F.FullyConnected(x, weight, no_bias=True, num_hidden=self.units, flatten=False)
        return F.FullyConnected(x, weight, bias, num_hidden=self.units, flatten=False)


class PositionEmbedding(gluon.HybridBlock):
    """(N, T, width) + a learnt (T, width)."""

    def __init__(self, shape):
        gluon.HybridBlock.__init__(self)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=shape)

    def hybrid_forward(self, F, x, weight):
        return F.broadcast_add(x, F.expand_dims(weight, axis=0))


class ClassToken(gluon.HybridBlock):
    """(N, T, width) → (N, T+1, width): a learnt token first."""

    def __init__(self, width):
        gluon.HybridBlock.__init__(self)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(1, width))

    def hybrid_forward(self, F, x, weight):
        token = F.broadcast_like(F.expand_dims(weight, axis=0), x, lhs_axes=(0,), rhs_axes=(0,))
        return F.concat(token, x, dim=1)


class Attention(gluon.HybridBlock):
    """Multi-head self-attention; the rows of `qkv.weight` are all queries, all keys, all values."""

    def __init__(self, time, width, heads, causal):
        gluon.HybridBlock.__init__(self)
        self.heads = heads
        self.width = width
        with self.name_scope():
            self.qkv = nn.Dense(3 * width, in_units=width, flatten=False)
            self.out = nn.Dense(width, in_units=width, flatten=False)
            if causal:
                mask = numpy.triu(numpy.full((1, time, time), LOWEST, "float32"), 1)
                self.mask = self.params.get_constant("mask", mask)

    def hybrid_forward(self, F, x, mask=None):
        each = self.width // self.heads
        parts = F.transpose(F.reshape(self.qkv(x), (0, 0, 3, self.heads, each)), (2, 0, 3, 1, 4))
        q, k, v = (F.reshape(part, (-3, 0, 0)) for part in F.split(parts, num_outputs=3, axis=0, squeeze_axis=True))
        scores = F.batch_dot(q * (1 / math.sqrt(each)), k, transpose_b=True)
        if mask is not None:
            scores = F.broadcast_add(scores, mask)
        mixed = F.reshape(F.batch_dot(F.softmax(scores, axis=-1), v), (-4, -1, self.heads, 0, 0))
        return self.out(F.reshape(F.transpose(mixed, (0, 2, 1, 3)), (0, 0, -3)))


def masked_mean(F, x, tokens):
    """(N, T, width) and tokens (N, T) → (N, width): the mean over the tokens that are not 0 (0 where there is none)."""
    mask = F.cast(tokens != 0, dtype="float32")
    count = F.broadcast_maximum(F.sum(mask, axis=1, keepdims=True), F.ones((1, 1)))
    return F.broadcast_div(F.squeeze(F.batch_dot(F.expand_dims(mask, axis=1), x), axis=1), count)


def gelu_tanh(F, x):
    """Hendrycks & Gimpel (2016), the approximation by tanh."""
    return 0.5 * x * (1 + F.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def add(F, *inputs):
    total = inputs[0]
    for other in inputs[1:]:
        total = total + other
    return total


def pad(left, right, top, bottom, value):
    """A layer that pads the two image axes."""
    width = (0, 0, 0, 0, top, bottom, left, right)
    return nn.HybridLambda(lambda F, x: F.pad(x, mode="constant", pad_width=width, constant_value=value))


# -- the network ------------------------------------------------------------------------------------------------------
class Network(gluon.HybridBlock):
    """(N, …input shape) → the output of the op `spec["output"]`.

    `slots` maps the spec's parameter and state names to Gluon's Parameters. Values are known by position in the forward pass:
    without hybridize() it runs in Python at every step.
    """

    def __init__(self, spec):
        gluon.HybridBlock.__init__(self)
        self.shapes = {"input": tuple(spec["input"]["shape"])}
        self.slots = {}
        self.positions = {"input": 0}
        self.plan = []
        with self.name_scope():
            for op in spec["ops"]:
                self.shapes[op["name"]] = tuple(op["shape"])
                inputs = [self.positions[name] for name in op["inputs"]]
                if op["op"] == "masked_mean":
                    inputs = [inputs[0], 0]
                for layer in BUILDERS[op["op"]](self, op):
                    self.register_child(layer)
                    self.plan.append((layer, inputs))
                    inputs = [len(self.plan)]
                self.positions[op["name"]] = inputs[0]
        self.last = self.positions[spec["output"]]
        self.target = self.positions[spec["target"]["name"]] if spec["target"]["kind"] == "op" else None

    def hybrid_forward(self, F, x):
        return self.values(x)[self.last]

    def values(self, x):
        """What every layer gives, the input first."""
        values = [x]
        for layer, inputs in self.plan:
            values.append(layer(*[values[i] for i in inputs]))
        return values

    def keep(self, op, **parameters):
        """Gluon Parameters by the spec's suffixes. Those that are None are left out."""
        for suffix, parameter in parameters.items():
            if parameter is not None:
                self.slots["%s.%s" % (op["name"], suffix)] = parameter

    def input_shape(self, op):
        return self.shapes[op["inputs"][0]]


# A builder gives the layers of an op, one after the other.
def linear(network, op):
    shape = network.input_shape(op)
    layer = nn.Dense(op["out"], use_bias=op["bias"], flatten=len(shape) == 1, in_units=shape[-1])
    network.keep(op, weight=layer.weight, bias=layer.bias)
    return [layer]


def tied_linear(network, op):
    layer = TiedLinear(network.slots[op["tied"] + ".weight"], op["transpose"], op["bias"])
    network.keep(op, bias=getattr(layer, "bias", None))
    return [layer]


def conv2d(network, op):
    top, bottom, left, right = op["padding"]
    symmetric = top == bottom and left == right
    layer = nn.Conv2D(
        op["out_channels"],
        tuple(op["kernel"]),
        strides=tuple(op["stride"]),
        padding=(top, left) if symmetric else (0, 0),
        dilation=tuple(op["dilation"]),
        groups=op["groups"],
        use_bias=op["bias"],
        in_channels=network.input_shape(op)[0],
    )
    network.keep(op, weight=layer.weight, bias=layer.bias)
    return [layer] if symmetric else [pad(left, right, top, bottom, 0.0), layer]


def native_pooling(network, op):
    """True when MXNet's pooling takes this padding and gives the spec's shape.

    Rounding up, it keeps a last window that lies in the padding alone: the spec has no such window.
    """
    top, bottom, left, right = op["padding"]
    out = []
    for size, kernel, stride, before in zip(network.input_shape(op)[1:], op["kernel"], op["stride"], (top, left)):
        span = size + 2 * before - kernel
        out.append((-(-span // stride) if op["ceil"] else span // stride) + 1)
    small = top < op["kernel"][0] and left < op["kernel"][1]
    return top == bottom and left == right and small and out == list(op["shape"][1:])


def explicit_padding(network, op):
    """(left, right, top, bottom) after which pooling without padding, rounding down, gives the spec's shape."""
    top, bottom, left, right = op["padding"]
    height, width = network.input_shape(op)[1:]
    (kh, kw), (sh, sw), (oh, ow) = op["kernel"], op["stride"], op["shape"][1:]
    # rounding up means windows that hang over the end
    bottom = max(bottom, (oh - 1) * sh + kh - height - top)
    right = max(right, (ow - 1) * sw + kw - width - left)
    return left, right, top, bottom


def max_pool(network, op):
    kernel, stride = tuple(op["kernel"]), tuple(op["stride"])
    if native_pooling(network, op):
        return [nn.MaxPool2D(kernel, stride, (op["padding"][0], op["padding"][2]), ceil_mode=op["ceil"])]
    return [pad(*explicit_padding(network, op), value=LOWEST), nn.MaxPool2D(kernel, stride)]


def avg_pool(network, op):
    kernel, stride, padding = tuple(op["kernel"]), tuple(op["stride"]), op["padding"]
    counted = op["count_include_pad"]
    if native_pooling(network, op):
        window = (padding[0], padding[2])
        return [nn.AvgPool2D(kernel, stride, window, ceil_mode=op["ceil"], count_include_pad=counted)]
    explicit = explicit_padding(network, op)
    top, bottom, left, right = padding
    if not counted or explicit != (left, right, top, bottom):
        raise Unsupported(
            "mxnet: avg_pool %s can not have padding %s with ceil=%s, count_include_pad=%s"
            % (op["name"], padding, op["ceil"], counted)
        )
    return [pad(*explicit, value=0.0), nn.AvgPool2D(kernel, stride)]


def batch_norm(network, op):
    layer = nn.BatchNorm(axis=1, momentum=op["decay"], epsilon=op["epsilon"], in_channels=network.input_shape(op)[0])
    network.keep(op, weight=layer.gamma, bias=layer.beta, running_mean=layer.running_mean, running_var=layer.running_var)
    return [layer]


def layer_norm(network, op):
    layer = nn.LayerNorm(axis=-1, epsilon=op["epsilon"], in_channels=network.input_shape(op)[-1])
    network.keep(op, weight=layer.gamma, bias=layer.beta)
    return [layer]


def lrn(network, op):
    size, alpha, beta, k = op["size"], op["alpha"], op["beta"], op["k"]
    if size % 2 == 0:
        raise Unsupported("mxnet: lrn %s has size %d, only odd sizes are possible" % (op["name"], size))

    def normalised(F, x):
        x = F.LRN(x, alpha=alpha, beta=beta, knorm=k, nsize=size)
        # Found by experiment (1.9.1, oneDNN, a multiple of 8 channels): the input gradient is wrong where the gradient that comes
        # back has oneDNN's blocked layout, as that of a convolution or a pool has. These two ops only know the plain layout.
        return F.squeeze(F.expand_dims(x, axis=0), axis=0)

    return [nn.HybridLambda(normalised)]


def channel_pad_shortcut(network, op):
    stride = op["stride"]
    width = (0, 0, 0, 0, 0, op["out_channels"] - network.input_shape(op)[0], 0, 0, 0, 0)

    def shortcut(F, x):
        # every stride-th pixel, zero channels behind; F.pad takes channels as the depth of a volume only
        x = F.slice(x, begin=(None, None, None, None), end=(None, None, None, None), step=(1, 1, stride, stride))
        return F.squeeze(F.pad(F.expand_dims(x, axis=1), mode="constant", pad_width=width, constant_value=0.0), axis=1)

    return [nn.HybridLambda(shortcut)]


def embedding(network, op):
    layer = nn.Embedding(op["vocabulary"], op["width"])
    network.keep(op, weight=layer.weight)
    return [layer]


def position_embedding(network, op):
    layer = PositionEmbedding(network.input_shape(op))
    network.keep(op, weight=layer.weight)
    return [layer]


def class_token(network, op):
    layer = ClassToken(network.input_shape(op)[-1])
    network.keep(op, weight=layer.weight)
    return [layer]


def select_token(network, op):
    begin = op["index"]
    end = begin + 1 if begin != -1 else None
    return [nn.HybridLambda(lambda F, x: F.squeeze(F.slice_axis(x, axis=1, begin=begin, end=end), axis=1))]


def lstm(network, op):
    layer = gluon.rnn.LSTM(op["hidden"], layout="NTC", input_size=network.input_shape(op)[-1])
    layer.l0_h2h_bias.grad_req = "null"
    network.keep(op, weight_ih=layer.l0_i2h_weight, weight_hh=layer.l0_h2h_weight, bias=layer.l0_i2h_bias)
    return [layer]


def attention(network, op):
    time, width = network.input_shape(op)
    layer = Attention(time, width, op["heads"], op["causal"])
    network.keep(op, qkv_weight=layer.qkv.weight, qkv_bias=layer.qkv.bias, out_weight=layer.out.weight, out_bias=layer.out.bias)
    return [layer]


def function(call):
    """A builder for an op without attributes: `call(F, *inputs)`."""
    return lambda network, op: [nn.HybridLambda(call)]


BUILDERS = {
    "linear": linear,
    "tied_linear": tied_linear,
    "conv2d": conv2d,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "global_avg_pool": lambda network, op: [nn.GlobalAvgPool2D(), nn.Flatten()],
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "lrn": lrn,
    "relu": lambda network, op: [nn.Activation("relu")],
    "tanh": lambda network, op: [nn.Activation("tanh")],
    "sigmoid": lambda network, op: [nn.Activation("sigmoid")],
    "softmax": function(lambda F, x: F.softmax(x, axis=-1)),
    "gelu": lambda network, op: [nn.GELU() if op["approximate"] == "none" else nn.HybridLambda(gelu_tanh)],
    "dropout": lambda network, op: [nn.Dropout(op["rate"])],
    "add": function(add),
    "concat": function(lambda F, *inputs: F.concat(*inputs, dim=1)),
    "channel_pad_shortcut": channel_pad_shortcut,
    "flatten": lambda network, op: [nn.Flatten()],
    "embedding": embedding,
    "position_embedding": position_embedding,
    "class_token": class_token,
    "patches_to_tokens": function(lambda F, x: F.transpose(F.reshape(x, (0, 0, -1)), (0, 2, 1))),
    "select_token": select_token,
    "lstm": lstm,
    "attention": attention,
    "masked_mean": function(masked_mean),
}


# -- losses -----------------------------------------------------------------------------------------------------------
class Trained(gluon.HybridBlock):
    """Network and loss in one graph: the mean loss, and with `counting` also the number of correct answers.

    Where an op of the network is the target there are no other targets; what it gives is a constant then.
    """

    def __init__(self, network, loss, counting=False):
        gluon.HybridBlock.__init__(self)
        self.counting = counting
        self.classes = loss["op"] == "softmax_cross_entropy"
        if loss["op"] not in ("softmax_cross_entropy", "mean_squared_error"):
            raise Unsupported("mxnet has no mapping for loss %s" % loss["op"])
        self.network = network
        with self.name_scope():
            # L2Loss halves what it is given
            self.loss = gluon.loss.SoftmaxCrossEntropyLoss() if self.classes else gluon.loss.L2Loss(weight=2.0)

    def hybrid_forward(self, F, inputs, targets=None):
        if self.network.target is None:
            output = self.network(inputs)
        else:
            values = self.network.values(inputs)
            output, targets = values[self.network.last], F.BlockGrad(values[self.network.target])
        loss = F.mean(self.loss(output, targets))
        if not self.counting:
            return loss
        if not self.classes:
            return loss, F.zeros((1,))
        return loss, F.sum(F.argmax(output, axis=-1) == targets)

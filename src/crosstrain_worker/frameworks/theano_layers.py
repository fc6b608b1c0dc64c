"""The ops of the spec as Theano expressions: theano.tensor, theano.tensor.nnet and theano.scan.

Theano has no layer objects: a layer is an expression over shared variables, which here keep the spec's own layouts (a transposed
matrix costs its BLAS nothing). The number of samples stays symbolic, so one compiled function takes batches of any size.
"""

import math

import numpy
import theano
from theano import tensor
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor import nnet
from theano.tensor.nnet.bn import batch_normalization_test, batch_normalization_train
from theano.tensor.signal.pool import pool_2d

from .base import Unsupported

#: outside every float32 activation
LOWEST = numpy.float32(-3.0e38)
#: Theano's batch norm refuses less (cuDNN's limit), and 1e-5 itself, which as a float32 is a little less than 1e-5
LEAST_EPSILON = 1e-5
#: seeds of MRG31k3p lie in 1 … M2 - 1
MRG_M2 = 2147462579


class Network(object):
    """The expressions of one network.

    `slots`: the spec's parameter and state names → shared variables. `values(x, training)`: every op's expression by its name.
    """

    def __init__(self, spec):
        self.spec = spec
        self.shapes = {"input": tuple(spec["input"]["shape"])}
        self.slots = {}
        for entry in spec["parameters"] + spec["states"]:
            zeros = numpy.zeros(entry["shape"], "float32")
            self.slots[entry["name"]] = theano.shared(zeros, entry["name"], borrow=True)
        for op in spec["ops"]:
            self.shapes[op["name"]] = tuple(op["shape"])
        self.random = MRG_RandomStreams(1)

    def seed(self, seed):
        """The same dropout masks again."""
        self.random.seed(1 + seed % (MRG_M2 - 1))

    def values(self, x, training):
        """({name: expression}, updates of the states) for the symbolic batch x."""
        self.training = training
        self.tokens = x
        self.updates = []
        values = {"input": x}
        for op in self.spec["ops"]:
            values[op["name"]] = BUILDERS[op["op"]](self, op, *[values[name] for name in op["inputs"]])
        return values, self.updates

    def of(self, op, suffix):
        """The shared variable of this op, None where it has none."""
        return self.slots.get("%s.%s" % (op["name"], suffix))

    def input_shape(self, op):
        return self.shapes[op["inputs"][0]]


# -- matrices ---------------------------------------------------------------------------------------------------------
def affine(x, weight, bias):
    """x·weight + bias along the last axis, as one matrix product: (N, D) or (N, T, D)."""
    rows = x if x.ndim == 2 else x.reshape((x.shape[0] * x.shape[1], x.shape[2]))
    y = tensor.dot(rows, weight)
    if bias is not None:
        y = y + bias
    return y if x.ndim == 2 else y.reshape((x.shape[0], x.shape[1], weight.shape[1]))


def linear(network, op, x):
    return affine(x, network.of(op, "weight").T, network.of(op, "bias"))


def tied_linear(network, op, x):
    weight = network.slots[op["tied"] + ".weight"]
    return affine(x, weight if op["transpose"] else weight.T, network.of(op, "bias"))


# -- images -----------------------------------------------------------------------------------------------------------
def conv2d(network, op, x):
    top, bottom, left, right = op["padding"]
    weight, bias = network.of(op, "weight"), network.of(op, "bias")
    y = nnet.conv2d(
        x,
        weight,
        input_shape=(None,) + network.input_shape(op),
        filter_shape=weight.get_value(borrow=True).shape,
        border_mode=((top, bottom), (left, right)),
        subsample=tuple(op["stride"]),
        filter_flip=False,
        filter_dilation=tuple(op["dilation"]),
        num_groups=op["groups"],
    )
    return y if bias is None else y + bias.dimshuffle("x", 0, "x", "x")


def framed(x, before, after, fill):
    """x (N, C, H, W) with so many rows and columns of `fill` before and after; negative: that many are cut off at the end."""
    (top, left), (bottom, right) = before, after
    if bottom < 0 or right < 0:
        x = x[:, :, : min(bottom, 0) or None, : min(right, 0) or None]
    bottom, right = max(bottom, 0), max(right, 0)
    if not (top or bottom or left or right):
        return x
    n, channels, height, width = (x.shape[i] for i in range(4))
    frame = tensor.alloc(numpy.float32(fill), n, channels, height + (top + bottom), width + (left + right))
    return tensor.set_subtensor(frame[:, :, top : top + height, left : left + width], x)


class Window(object):
    """How pool_2d gives the spec's pooling.

    `native`: with its own padding (the same on both sides). Otherwise the input is framed by `before` and `after`; where the last
    window hangs over the end (`partial`), pool_2d takes what is there of it (ignore_border=False, for which it has no padding).
    """

    def __init__(self, network, op):
        self.kernel, self.stride = tuple(op["kernel"]), tuple(op["stride"])
        top, bottom, left, right = op["padding"]
        self.size = network.input_shape(op)[1:]
        self.out = tuple(op["shape"][1:])
        self.before, wanted = (top, left), (bottom, right)
        axes = range(2)
        full = [(self.out[i] - 1) * self.stride[i] + self.kernel[i] for i in axes]
        floor = [(self.size[i] + 2 * self.before[i] - self.kernel[i]) // self.stride[i] + 1 for i in axes]
        small = all(self.before[i] < self.kernel[i] for i in axes)
        self.native = self.before == wanted and small and tuple(floor) == self.out
        # what the windows reach at most, and no more: pool_2d shall not find room for another one
        extent = [min(self.before[i] + self.size[i] + wanted[i], full[i]) for i in axes]
        self.after = tuple(extent[i] - self.before[i] - self.size[i] for i in axes)
        self.partial = any(extent[i] < full[i] for i in axes)

    def pool(self, x, mode, fill):
        """pool_2d of x; `fill` is what the frame holds."""
        if self.native:
            return pool_2d(x, self.kernel, True, self.stride, self.before, mode=mode)
        return pool_2d(framed(x, self.before, self.after, fill), self.kernel, not self.partial, self.stride, mode=mode)

    def counts(self):
        """(1, 1, rows, columns): how many elements of the input each window holds."""
        held = []
        for i in range(2):
            start = numpy.arange(self.out[i]) * self.stride[i] - self.before[i]
            held.append(numpy.minimum(start + self.kernel[i], self.size[i]) - numpy.maximum(start, 0))
        return tensor.constant(numpy.outer(held[0], held[1]).astype("float32")[None, None])


def max_pool(network, op, x):
    return Window(network, op).pool(x, "max", LOWEST)


def avg_pool(network, op, x):
    window = Window(network, op)
    if not any(op["padding"]) or (op["count_include_pad"] and not window.native):
        # pool_2d counts what there is of a window: also the frame, which is part of its input, but not what hangs over the end
        return window.pool(x, "average_exc_pad", 0.0)
    if op["count_include_pad"]:
        return window.pool(x, "average_inc_pad", 0.0)
    # average_exc_pad has no gradient with a padding
    return window.pool(x, "sum", 0.0) / window.counts()


def batch_norm(network, op, x):
    epsilon, kept, new = op["epsilon"], numpy.float32(op["decay"]), numpy.float32(1 - op["decay"])
    if epsilon < LEAST_EPSILON:
        raise Unsupported("theano: batch_norm %s has epsilon %g, Theano's takes at least 1e-5" % (op["name"], epsilon))
    epsilon = max(epsilon, float(numpy.nextafter(numpy.float32(LEAST_EPSILON), numpy.float32(1))))
    scale, offset = network.of(op, "weight"), network.of(op, "bias")
    mean, variance = network.of(op, "running_mean"), network.of(op, "running_var")
    axes = "spatial" if x.ndim == 4 else "per-activation"
    if not network.training:
        return batch_normalization_test(x, scale, offset, mean, variance, axes, epsilon)
    if op["variance"] == "unbiased":
        y, _, _, new_mean, new_variance = batch_normalization_train(x, scale, offset, axes, epsilon, 1 - op["decay"], mean, variance)
    else:
        # Theano's own running averages take m / (m - 1) times the batch's variance
        y, batch_mean, inverse = batch_normalization_train(x, scale, offset, axes, epsilon)
        new_mean = kept * mean + new * batch_mean
        new_variance = kept * variance + new * (1 / tensor.sqr(inverse) - numpy.float32(epsilon))
    network.updates += [(mean, new_mean), (variance, new_variance)]
    return y


def lrn(network, op, x):
    """Theano has no such op: the sum over the channels around as one of shifted slices, as its users always wrote it.

    Three times as fast, with its gradient, as a pooling along the channels.
    """
    size, share = op["size"], numpy.float32(op["alpha"] / op["size"])
    channels, before = network.input_shape(op)[0], op["size"] // 2
    zeros = tensor.alloc(numpy.float32(0), x.shape[0], channels + size - 1, x.shape[2], x.shape[3])
    squares = tensor.set_subtensor(zeros[:, before : before + channels], tensor.sqr(x))
    total = sum(squares[:, i : i + channels] for i in range(size))
    return x * (numpy.float32(op["k"]) + share * total) ** numpy.float32(-op["beta"])


def channel_pad_shortcut(network, op, x):
    """Every stride-th pixel, zero channels behind."""
    stride, channels = op["stride"], network.input_shape(op)[0]
    kept = x[:, :, ::stride, ::stride]
    zeros = tensor.alloc(numpy.float32(0), kept.shape[0], op["out_channels"], kept.shape[2], kept.shape[3])
    return tensor.set_subtensor(zeros[:, :channels], kept)


# -- elementwise ------------------------------------------------------------------------------------------------------
def softmax(x):
    """Over the last axis; Theano's takes matrices."""
    if x.ndim == 2:
        return nnet.softmax(x)
    return nnet.softmax(x.reshape((-1, x.shape[x.ndim - 1]))).reshape(x.shape, ndim=x.ndim)


def gelu(network, op, x):
    half, one = numpy.float32(0.5), numpy.float32(1)
    if op["approximate"] == "none":
        return half * x * (one + tensor.erf(x * numpy.float32(math.sqrt(0.5))))
    # Hendrycks & Gimpel (2016), the approximation by tanh
    inside = numpy.float32(math.sqrt(2 / math.pi)) * (x + numpy.float32(0.044715) * x * x * x)
    return half * x * (one + tensor.tanh(inside))


def dropout(network, op, x):
    if not network.training or op["rate"] == 0:
        return x
    keep = 1 - op["rate"]
    return x * network.random.binomial(size=x.shape, p=keep, dtype="float32") * numpy.float32(1 / keep)


def layer_norm(network, op, x):
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = tensor.sqr(centred).mean(axis=-1, keepdims=True)
    return centred / tensor.sqrt(variance + numpy.float32(op["epsilon"])) * network.of(op, "weight") + network.of(op, "bias")


def add(network, op, *inputs):
    return tensor.add(*inputs)


# -- sequences --------------------------------------------------------------------------------------------------------
def embedding(network, op, x):
    return network.of(op, "weight")[x.flatten()].reshape((x.shape[0], x.shape[1], op["width"]))


def position_embedding(network, op, x):
    return x + network.of(op, "weight").dimshuffle("x", 0, 1)


def class_token(network, op, x):
    token = tensor.alloc(network.of(op, "weight"), x.shape[0], 1, x.shape[2])
    return tensor.concatenate([token, x], axis=1)


def masked_mean(network, op, x):
    """The mean over the tokens that are not 0 (0 where there is none)."""
    mask = tensor.cast(tensor.neq(network.tokens, 0), "float32")
    count = tensor.maximum(mask.sum(axis=1, keepdims=True), numpy.float32(1))
    return (x * mask.dimshuffle(0, 1, "x")).sum(axis=1) / tensor.addbroadcast(count, 1)


def lstm(network, op, x):
    """theano.scan over time; the product of all inputs with their weights is hoisted out of it."""
    hidden, time = op["hidden"], network.input_shape(op)[0]
    recurrent = network.of(op, "weight_hh").T
    projected = affine(x.dimshuffle(1, 0, 2), network.of(op, "weight_ih").T, network.of(op, "bias"))

    def cell(z, h, c, weight):
        z = z + tensor.dot(h, weight)
        i, f, g, o = (z[:, k * hidden : (k + 1) * hidden] for k in range(4))
        c = nnet.sigmoid(f) * c + nnet.sigmoid(i) * tensor.tanh(g)
        return nnet.sigmoid(o) * tensor.tanh(c), c

    zeros = tensor.unbroadcast(tensor.alloc(numpy.float32(0), x.shape[0], hidden), 0, 1)
    (outputs, _), _ = theano.scan(cell, projected, [zeros, zeros], [recurrent], n_steps=time, strict=True)
    return outputs.dimshuffle(1, 0, 2)


def attention(network, op, x):
    """Multi-head self-attention; the rows of qkv_weight are all queries, all keys, all values."""
    (time, width), heads = network.input_shape(op), op["heads"]
    each = width // heads
    samples = x.shape[0]
    qkv = affine(x, network.of(op, "qkv_weight").T, network.of(op, "qkv_bias"))
    parts = qkv.reshape((samples, time, 3, heads, each)).dimshuffle(2, 0, 3, 1, 4)
    q, k, v = (parts[i].reshape((samples * heads, time, each)) for i in range(3))
    scores = tensor.batched_dot(q * numpy.float32(1 / math.sqrt(each)), k.dimshuffle(0, 2, 1))
    if op["causal"]:
        scores = scores + tensor.constant(numpy.triu(numpy.full((time, time), LOWEST, "float32"), 1)).dimshuffle("x", 0, 1)
    mixed = tensor.batched_dot(softmax(scores), v).reshape((samples, heads, time, each)).dimshuffle(0, 2, 1, 3)
    return affine(mixed.reshape((samples, time, width)), network.of(op, "out_weight").T, network.of(op, "out_bias"))


# A builder gives the expression of an op: (network, op, *inputs).
BUILDERS = {
    "linear": linear,
    "tied_linear": tied_linear,
    "conv2d": conv2d,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "global_avg_pool": lambda network, op, x: x.mean(axis=(2, 3)),
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "lrn": lrn,
    "relu": lambda network, op, x: nnet.relu(x),
    "tanh": lambda network, op, x: tensor.tanh(x),
    "sigmoid": lambda network, op, x: nnet.sigmoid(x),
    "softmax": lambda network, op, x: softmax(x),
    "gelu": gelu,
    "dropout": dropout,
    "add": add,
    "concat": lambda network, op, *inputs: tensor.concatenate(inputs, axis=1),
    "channel_pad_shortcut": channel_pad_shortcut,
    "flatten": lambda network, op, x: x.flatten(2),
    "embedding": embedding,
    "position_embedding": position_embedding,
    "class_token": class_token,
    "patches_to_tokens": lambda network, op, x: x.flatten(3).dimshuffle(0, 2, 1),
    "select_token": lambda network, op, x: x[:, op["index"]],
    "lstm": lstm,
    "attention": attention,
    "masked_mean": masked_mean,
}


# -- loss -------------------------------------------------------------------------------------------------------------
def symbols(spec):
    """(input, targets): symbolic inputs of the compiled functions; targets None where the network is its own target."""
    kinds = {"tokens": tensor.imatrix, "vector": tensor.fmatrix, "image": tensor.ftensor4}
    x = kinds[spec["input"]["kind"]]("inputs")
    if spec["target"]["kind"] in ("input", "op"):
        return x, None
    dimensions = 1 + len(next(op["shape"] for op in spec["ops"] if op["name"] == spec["output"]))
    if spec["loss"]["op"] == "softmax_cross_entropy":
        return x, tensor.TensorType("int64", (False,) * (dimensions - 1))("targets")
    return x, tensor.TensorType("float32", (False,) * dimensions)("targets")


def loss_of(spec, values, targets):
    """(mean loss, number of correct answers) as expressions. Raises Unsupported for a loss that is not mapped."""
    output, kind = values[spec["output"]], spec["loss"]["op"]
    if kind == "softmax_cross_entropy":
        if output.ndim == 3:
            output = output.reshape((output.shape[0] * output.shape[1], output.shape[2]))
            targets = targets.flatten()
        # Theano makes one stable op of the two, with the bias of the layer before it
        losses = nnet.categorical_crossentropy(nnet.softmax(output), targets)
        return losses.mean(), tensor.eq(tensor.argmax(output, axis=1), targets).sum()
    if kind != "mean_squared_error":
        raise Unsupported("theano has no mapping for loss %s" % kind)
    if spec["target"]["kind"] == "input":
        targets = values["input"]
    elif spec["target"]["kind"] == "op":
        targets = theano.gradient.disconnected_grad(values[spec["target"]["name"]])
    return tensor.sqr(output - targets).mean(), tensor.constant(numpy.int64(0))

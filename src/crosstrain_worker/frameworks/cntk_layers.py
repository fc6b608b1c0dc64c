"""The ops of the spec with CNTK's own ops and layers, in one graph for training and inference.

Python's shapes are rows first: an image is (C, H, W), as in the spec. A network with an LSTM takes its tokens along CNTK's dynamic
sequence axis, which is how `cntk.layers.Recurrence` goes through time; what needs the times as an axis of the sample (`STATIC`) gets
them unpacked. Every other network has static axes and a batch axis only.
"""

import math

import cntk as C
import numpy

from .base import Unsupported

#: outside every float32 activation, and survives being added
LOWEST = -3.0e38


def is_sequence(variable):
    return len(variable.dynamic_axes) > 1


class Slot(object):
    """Where a parameter or state of the spec lives: a CNTK Parameter, or a Constant where it is frozen or no parameter.

    `to_cntk` turns an array of the spec's layout into CNTK's, `from_cntk` back. `shape` is the spec's.
    """

    def __init__(self, variable, shape, to_cntk=None, from_cntk=None):
        self.variable = variable
        self.shape = shape
        self.to_cntk = to_cntk or (lambda array: array.reshape(variable.shape))
        self.from_cntk = from_cntk or (lambda array: array.reshape(shape))

    def read(self):
        return self.in_spec_layout(self.variable.value)

    def in_spec_layout(self, array):
        return numpy.ascontiguousarray(self.from_cntk(array), dtype="float32")

    def load(self, array):
        self.variable.value = numpy.ascontiguousarray(self.to_cntk(array), dtype="float32")


class Network(object):
    """The graph of a spec. `slots`: {the spec's parameter and state names: Slot}; `dropouts`: the dropout functions.

    `input` is the input variable, `output` the variable of the spec's output, `target` that of the op which is the target (or None).
    """

    def __init__(self, spec, batch, seed, gpu):
        """`batch`: samples of a training batch on one device (batch norm's decay depends on it)."""
        self.batch = batch
        self.seed = seed
        self.gpu = gpu
        self.slots = {}
        self.dropouts = []
        self.trained = {entry["name"]: entry.get("trained", True) for entry in spec["parameters"]}
        self.declared = {entry["name"]: tuple(entry["shape"]) for entry in spec["parameters"] + spec["states"]}
        self.shapes = {"input": tuple(spec["input"]["shape"])}
        recurrent = any(op["op"] == "lstm" for op in spec["ops"])
        if spec["input"]["kind"] == "tokens" and recurrent:
            self.input = C.sequence.input_variable((1,), name="input")
        else:
            self.input = C.input_variable(self.shapes["input"], name="input")
        self.values = {"input": self.input}
        self.unpacked = {}
        for op in spec["ops"]:
            self.shapes[op["name"]] = tuple(op["shape"])
            self.values[op["name"]] = self.apply(op)
        self.output = self.usable(spec["output"])
        self.target = self.static(spec["target"]["name"]) if spec["target"]["kind"] == "op" else None

    def apply(self, op):
        names = op["inputs"]
        inputs = [self.values[name] for name in names]
        mixed = len({variable.dynamic_axes for variable in inputs}) > 1
        if op["op"] in STATIC or mixed:
            inputs = [self.static(name) for name in names]
        return BUILDERS[op["op"]](self, op, *inputs)

    def static(self, name):
        """The variable with the times as the first axis of the sample."""
        if not is_sequence(self.values[name]):
            return self.values[name]
        if name not in self.unpacked:
            # every sequence has all times, so nothing is masked
            unpacked = C.sequence.unpack(self.values[name], 0, no_mask_output=True)
            self.unpacked[name] = C.reshape(unpacked, self.shapes[name])
        return self.unpacked[name]

    def usable(self, name):
        """The variable itself, but static where it has another sequence axis than the input: the targets could not follow it."""
        variable = self.values[name]
        return variable if variable.dynamic_axes == self.input.dynamic_axes else self.static(name)

    def weight(self, op, suffix, shape, to_cntk=None, from_cntk=None):
        """A new Parameter of CNTK's `shape` (Constant where it is frozen) for the spec's `<op>.<suffix>`."""
        name = "%s.%s" % (op["name"], suffix)
        # a Constant's gradient is not computed
        variable = C.Parameter(shape, init=0) if self.trained[name] else C.Constant(0, shape=shape)
        self.slots[name] = Slot(variable, self.declared[name], to_cntk, from_cntk)
        return variable

    def state(self, op, suffix, shape):
        name = "%s.%s" % (op["name"], suffix)
        variable = C.Constant(0, shape=shape)
        self.slots[name] = Slot(variable, self.declared[name])
        return variable

    def input_shape(self, op):
        return self.shapes[op["inputs"][0]]

    def restart_dropout(self):
        """The same masks again, from the first on."""
        for index, dropout in enumerate(self.dropouts):
            dropout.set_attribute("rngSeed", self.seed + index)


def transposed(array):
    return array.T


# -- a builder gives the variable of an op ------------------------------------------------------------------------------
def linear(network, op, x):
    weight = network.weight(op, "weight", (network.input_shape(op)[-1], op["out"]), transposed, transposed)
    y = C.times(x, weight)
    return y + network.weight(op, "bias", (op["out"],)) if op["bias"] else y


def tied_linear(network, op, x):
    slot = network.slots[op["tied"] + ".weight"]
    # a linear layer's weight is kept as (in, out), an embedding's as (vocabulary, width)
    multiply = C.times if op["transpose"] != (slot.from_cntk is transposed) else C.times_transpose
    y = multiply(x, slot.variable)
    return y + network.weight(op, "bias", network.declared[op["name"] + ".bias"]) if op["bias"] else y


def explicit_padding(network, op):
    """(top, bottom, left, right) after which a window without padding, rounding down, gives the spec's shape."""
    top, bottom, left, right = op["padding"]
    height, width = network.input_shape(op)[1:]
    (kh, kw), (sh, sw), (oh, ow) = op["kernel"], op["stride"], op["shape"][1:]
    dh, dw = op.get("dilation", (1, 1))
    # rounding up means windows that hang over the end
    bottom = max(bottom, (oh - 1) * sh + (kh - 1) * dh + 1 - height - top)
    right = max(right, (ow - 1) * sw + (kw - 1) * dw + 1 - width - left)
    return top, bottom, left, right


def auto_padding(network, op, ceil=False):
    """[pad vertically, pad horizontally] by which CNTK's own padding gives the spec's windows, or None where it can not.

    Padded, it centres the windows on the image and leaves out what hangs over (ConvolveGeometry.h of CNTK 2.7).
    """
    flags = []
    for axis in (0, 1):
        size, kernel, stride = network.input_shape(op)[1 + axis], op["kernel"][axis], op["stride"][axis]
        before, out = op["padding"][2 * axis], op["shape"][1 + axis]
        if kernel > size or op.get("dilation", (1, 1))[axis] != 1:
            return None
        span = size - kernel
        if before == 0 and out == (-(-span // stride) if ceil else span // stride) + 1:
            flags.append(False)
            continue
        extra = size - (out - 1) * stride - 1
        steps = -(-(size - 1) // stride) if ceil else (size - 1) // stride
        if out != steps + 1 or extra < 0 or before != (kernel - 1) // 2 - extra // 2:
            return None
        flags.append(True)
    return flags


def pad(x, padding, value):
    top, bottom, left, right = padding
    return C.pad(x, [(0, 0), (top, bottom), (left, right)], mode=C.ops.CONSTANT_PAD, constant_value=value)


def conv2d(network, op, x):
    channels, groups = network.input_shape(op)[0], op["groups"]
    if op["dilation"] != [1, 1] and not network.gpu:
        raise Unsupported("cntk: conv2d %s has dilation %s, which CNTK can not do on the CPU" % (op["name"], op["dilation"]))
    weight = network.weight(op, "weight", (op["out_channels"], channels // groups) + tuple(op["kernel"]))
    flags = auto_padding(network, op)
    if flags is None:
        flags = [False, False]
        if any(op["padding"]):
            x = pad(x, op["padding"], 0)
    how = {"strides": (1,) + tuple(op["stride"]), "auto_padding": [False] + flags, "dilation": (1,) + tuple(op["dilation"])}
    # Found by experiment: MKL's own grouped convolution (2018, AVX2, several threads) writes behind its buffers when a group's channels
    # are 8 and 12, or 12 and 12; it does not with multiples of 16.
    if groups == 1 or network.gpu or (channels // groups % 16 == 0 and op["out_channels"] // groups % 16 == 0):
        y = C.convolution(weight, x, groups=groups, **how)
    else:
        y = C.splice(*[C.convolution(w, part, **how) for w, part in zip(parts(weight, groups), parts(x, groups))], axis=0)
    return y + network.weight(op, "bias", (op["out_channels"], 1, 1)) if op["bias"] else y


def parts(x, count):
    """`count` equal parts of x along its first axis."""
    each = x.shape[0] // count
    return [C.slice(x, 0, i * each, (i + 1) * each) for i in range(count)]


def pooling(network, op, x, kind, counted=False):
    """CNTK's own pooling where its padding gives the spec's windows, else None. `counted`: an average counts all that hangs over."""
    for ceil in (False, True):
        flags = auto_padding(network, op, ceil)
        if flags is not None:
            window, stride = tuple(op["kernel"]), tuple(op["stride"])
            return C.pooling(x, kind, window, stride, [False] + flags, ceil_out_dim=ceil, include_pad=counted)
    return None


def max_pool(network, op, x):
    y = pooling(network, op, x, C.MAX_POOLING)
    if y is not None:
        return y
    return C.pooling(pad(x, explicit_padding(network, op), LOWEST), C.MAX_POOLING, tuple(op["kernel"]), tuple(op["stride"]))


def avg_pool(network, op, x):
    counted, padding = op["count_include_pad"] and any(op["padding"]), explicit_padding(network, op)
    overhang = list(padding) != op["padding"]
    y = None if counted and overhang else pooling(network, op, x, C.AVG_POOLING, counted)
    if y is not None:
        return y
    if not counted or overhang:
        raise Unsupported(
            "cntk: avg_pool %s can not have padding %s with ceil=%s, count_include_pad=%s"
            % (op["name"], op["padding"], op["ceil"], op["count_include_pad"])
        )
    return C.pooling(pad(x, padding, 0), C.AVG_POOLING, tuple(op["kernel"]), tuple(op["stride"]))


def batch_norm(network, op, x):
    shape = network.input_shape(op)
    if is_sequence(x) or len(shape) not in (1, 3):
        raise Unsupported("cntk: batch_norm %s takes (C,) or (C, H, W), not %s" % (op["name"], shape))
    channels = (shape[0],)
    # CNTK decays by exp(-samples / constant)
    constant = -network.batch / math.log(op["decay"]) if op["decay"] > 0 else 0
    return C.batch_normalization(
        x,
        network.weight(op, "weight", channels),
        network.weight(op, "bias", channels),
        network.state(op, "running_mean", channels),
        network.state(op, "running_var", channels),
        spatial=len(shape) == 3,
        normalization_time_constant=constant,
        epsilon=op["epsilon"],
        use_cudnn_engine=network.gpu,
        # With a count of 0 the first batch would replace the running statistics.
        running_count=C.constant(1, shape=(1,)),
    )


def layer_norm(network, op, x):
    # cntk.layers.LayerNormalization adds epsilon to the deviation, not to the variance.
    width = network.input_shape(op)[-1:]
    centred = x - C.reduce_mean(x, axis=-1)
    deviation = C.sqrt(C.reduce_mean(C.square(centred), axis=-1) + op["epsilon"])
    return centred / deviation * network.weight(op, "weight", width) + network.weight(op, "bias", width)


def lrn(network, op, x):
    size = op["size"]
    if size % 2 == 0:
        raise Unsupported("cntk: lrn %s has size %d, only odd sizes are possible" % (op["name"], size))
    # Found by experiment: it divides alpha by the size, unlike its documentation's formula.
    return C.local_response_normalization(x, size // 2, op["k"], op["alpha"], op["beta"])


def gelu(network, op, x):
    """Hendrycks & Gimpel (2016), the approximation by tanh."""
    if op["approximate"] != "tanh":
        raise Unsupported("cntk: gelu %s is not approximated: CNTK has no error function" % op["name"])
    return 0.5 * x * (1 + C.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def dropout(network, op, x):
    if not op["rate"]:
        return x
    y = C.dropout(x, op["rate"], seed=network.seed + len(network.dropouts))
    network.dropouts.append(y)
    return y


def add(network, op, *inputs):
    total = inputs[0]
    for other in inputs[1:]:
        total = total + other
    return total


def channel_pad_shortcut(network, op, x):
    channels, height, width = network.input_shape(op)
    stride = op["stride"]
    if stride > 1:
        x = C.slice(x, [1, 2], [0, 0], [height, width], strides=[stride, stride])
    return C.pad(x, [(0, op["out_channels"] - channels), (0, 0), (0, 0)], mode=C.ops.CONSTANT_PAD, constant_value=0)


def embedding(network, op, x):
    weight = network.weight(op, "weight", (op["vocabulary"], op["width"]))
    y = C.gather(weight, x)
    return C.reshape(y, (op["width"],)) if is_sequence(x) else y


def class_token(network, op, x):
    return C.splice(network.weight(op, "weight", (1, network.input_shape(op)[-1])), x, axis=0)


def patches_to_tokens(network, op, x):
    channels, height, width = network.input_shape(op)
    return C.swapaxes(C.reshape(x, (channels, height * width)), 0, 1)


def select_token(network, op, x):
    time, width = network.input_shape(op)
    index = op["index"] % time
    if is_sequence(x):
        return C.sequence.slice(x, index, index + 1)
    return C.reshape(C.slice(x, 0, index, index + 1), (width,))


def lstm(network, op, x):
    if not is_sequence(x):
        x = C.to_sequence(x)
    cell = C.layers.LSTM(op["hidden"])
    y = C.layers.Recurrence(cell)(x)
    names = ["%s.%s" % (op["name"], suffix) for suffix in ("weight_ih", "weight_hh", "bias")]
    variables = (cell.W, cell.H, cell.b)
    if not network.trained[names[0]]:
        y = y.clone(C.CloneMethod.freeze, {x: x})
        frozen = {constant.name: constant for constant in y.constants}
        variables = (frozen["W"], frozen["H"], frozen["b"])
    for name, variable in zip(names, variables):
        network.slots[name] = Slot(variable, network.declared[name], gates_to_cntk, gates_from_cntk)
    return y


def gates_to_cntk(array):
    """(4h, …) with the gates i, f, g, o → (…, 4h) with i, g, f, o."""
    i, f, g, o = numpy.split(array, 4)
    return numpy.concatenate([i, g, f, o]).T


def gates_from_cntk(array):
    i, g, f, o = numpy.split(array.T, 4)
    return numpy.concatenate([i, f, g, o])


def attention(network, op, x):
    """Multi-head self-attention; the rows of qkv_weight are all queries, all keys, all values."""
    time, width = network.input_shape(op)
    each = width // op["heads"]
    qkv = C.times(x, network.weight(op, "qkv_weight", (width, 3 * width), transposed, transposed))
    qkv = qkv + network.weight(op, "qkv_bias", (3 * width,))
    mask = C.Constant(numpy.triu(numpy.full((time, time), -1e30, "float32"), 1)) if op["causal"] else None
    mixed = []
    for head in range(op["heads"]):
        q, k, v = (C.slice(qkv, 1, at, at + each) for at in range(head * each, 3 * width, width))
        scores = C.times(q * (1 / math.sqrt(each)), C.swapaxes(k, 0, 1))
        if mask is not None:
            scores = scores + mask
        mixed.append(C.times(C.softmax(scores, axis=1), v))
    joined = C.splice(*mixed, axis=1) if len(mixed) > 1 else mixed[0]
    out = C.times(joined, network.weight(op, "out_weight", (width, width), transposed, transposed))
    return out + network.weight(op, "out_bias", (width,))


def masked_mean(network, op, x, *_):
    """The mean over the tokens that are not 0 (0 where there is none)."""
    width = network.input_shape(op)[-1]
    if x.dynamic_axes == network.input.dynamic_axes and is_sequence(x):
        mask = C.not_equal(network.input, 0)
        total, count = C.sequence.reduce_sum(x * mask), C.sequence.reduce_sum(mask)
    else:
        x = network.static(op["inputs"][0])
        mask = C.reshape(C.not_equal(network.static("input"), 0), (-1, 1))
        total, count = C.reduce_sum(x * mask, axis=0), C.reduce_sum(mask, axis=0)
    return C.reshape(total / C.element_max(count, 1), (width,))


def softmax(network, op, x):
    return C.softmax(x) if len(x.shape) == 1 else C.softmax(x, axis=-1)


#: ops that need the times as an axis of the sample
STATIC = frozenset(("position_embedding", "class_token", "attention", "flatten", "concat"))

BUILDERS = {
    "linear": linear,
    "tied_linear": tied_linear,
    "conv2d": conv2d,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "global_avg_pool": lambda network, op, x: C.reshape(C.layers.GlobalAveragePooling()(x), network.input_shape(op)[:1]),
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "lrn": lrn,
    "relu": lambda network, op, x: C.relu(x),
    "tanh": lambda network, op, x: C.tanh(x),
    "sigmoid": lambda network, op, x: C.sigmoid(x),
    "softmax": softmax,
    "gelu": gelu,
    "dropout": dropout,
    "add": add,
    "concat": lambda network, op, *inputs: C.splice(*inputs, axis=0),
    "channel_pad_shortcut": channel_pad_shortcut,
    "flatten": lambda network, op, x: C.reshape(x, (-1,)),
    "embedding": embedding,
    "position_embedding": lambda network, op, x: x + network.weight(op, "weight", network.input_shape(op)),
    "class_token": class_token,
    "patches_to_tokens": patches_to_tokens,
    "select_token": select_token,
    "lstm": lstm,
    "attention": attention,
    "masked_mean": masked_mean,
}

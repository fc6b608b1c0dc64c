"""The ops of the spec as TensorFlow's own ones (tf.nn), over tf.Variables in TensorFlow's layouts.

Keras 3 layers add biases and normalise with separate elementwise ops; tf.nn has the fused kernels: BiasAdd, FusedBatchNorm, cuDNN's
LSTM, convolutions with padding on each side. Images are NHWC or NCHW inside; the canonical layouts are made at the boundary:
`Slot` converts parameters, `Network.native` and `Network.canonical` convert images.
"""

import collections

import numpy
import tensorflow as tf

from . import tensorflow_images as images
from .base import Unsupported
from .tensorflow_lstm import lstm_layer

#: how the network is called: `training`, whether running statistics are `updated`, and the integer tensor that dropout starts from
Mode = collections.namedtuple("Mode", "training updated seed")
#: a variable, and what turns a canonical array into its layout and back
Slot = collections.namedtuple("Slot", "variable native canonical")

#: how canonical arrays lie in variables: (to the variable's layout, back)
AS_IS = (lambda a: a, lambda a: a)
TRANSPOSED = (lambda a: a.T, lambda a: a.T)

#: ops that treat every element alike
ELEMENTWISE = ("relu", "tanh", "sigmoid", "gelu", "dropout")


def from_flat_image(shape):
    """Layout of a linear weight (out, C·H·W) whose input is a flattened NHWC image of `shape` (C, H, W)."""
    channels, height, width = shape

    def native(a):
        return a.reshape(-1, channels, height, width).transpose(2, 3, 1, 0).reshape(-1, len(a))

    def canonical(a):
        return a.reshape(height, width, channels, -1).transpose(3, 2, 0, 1).reshape(a.shape[1], -1)

    return native, canonical


class Network(object):
    """A callable (mode, inputs) → what the ops `names` give; and the variables by the spec's names, in `slots`.

    Built under the strategy's scope where there are several replicas. `half`: the dtype that convolutions and products are computed in
    instead of float32, or None; `compile_mode`: how the network will be run, framework.compile.
    """

    def __init__(self, spec, image_format, half, gpu, compile_mode):
        self.spec = spec
        self.image_format = image_format
        self.half = half
        self.gpu = gpu
        self.eager = compile_mode == "off"
        self.xla = compile_mode == "max"
        self.shapes = {"input": tuple(spec["input"]["shape"])}
        self.slots = {}
        self.trained = {p["name"]: p.get("trained", True) for p in spec["parameters"]}
        self.tied = set(op["tied"] for op in spec["ops"] if op["op"] == "tied_linear")
        self.readers = collections.defaultdict(list)
        for op in spec["ops"]:
            for name in op["inputs"]:
                self.readers[name].append(op)
        #: ends of the network: what they give leaves it
        self.ends = [spec["output"]] + ([spec["target"]["name"]] if spec["target"]["kind"] == "op" else [])
        #: values that are flattened NHWC images, and of which shape (C, H, W)
        self.flat_images = {}
        self.plan = []
        for op in spec["ops"]:
            self.add(op)
        self.last_use()

    def add(self, op):
        self.shapes[op["name"]] = tuple(op["shape"])
        source = op["inputs"][0]
        if op["op"] in ELEMENTWISE and source in self.flat_images:
            self.flat_images[op["name"]] = self.flat_images[source]
        inputs = [source, "input"] if op["op"] == "masked_mean" else op["inputs"]
        self.plan.append((op["name"], BUILDERS[op["op"]](self, op), inputs))

    def last_use(self):
        """For each op the values that nothing needs after it."""
        kept, self.dropped = set(self.ends), []
        for _, _, inputs in reversed(self.plan):
            self.dropped.append([name for name in set(inputs) if name not in kept])
            kept.update(inputs)
        self.dropped.reverse()

    def __call__(self, mode, inputs):
        """What the ends give, in float32; images in this network's layout."""
        values = {"input": inputs if self.half is None or not inputs.dtype.is_floating else tf.cast(inputs, self.half)}
        for (name, layer, sources), dropped in zip(self.plan, self.dropped):
            values[name] = layer(mode, *[values[source] for source in sources])
            for source in dropped:
                del values[source]
        return [tf.cast(values[name], tf.float32) for name in self.ends]

    # -- for the builders ------------------------------------------------------------------------------------------------
    def input_shape(self, op):
        return self.shapes[op["inputs"][0]]

    def parameter(self, op, suffix, shape, layout=AS_IS):
        """A trained or frozen variable, zero at first; `shape` is the variable's."""
        name = "%s.%s" % (op["name"], suffix)
        variable = tf.Variable(tf.zeros(shape), trainable=self.trained[name], name=name.replace(".", "_"))
        self.slots[name] = Slot(variable, *layout)
        return variable

    def state(self, op, suffix, size):
        """Of several replicas each has its own."""
        name = "%s.%s" % (op["name"], suffix)
        variable = tf.Variable(
            tf.zeros(size),
            trainable=False,
            name=name.replace(".", "_"),
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        self.slots[name] = Slot(variable, *AS_IS)
        return variable

    def bias(self, op, size):
        return self.parameter(op, "bias", (size,)) if op["bias"] else None

    def lowered(self, variable):
        """A weight as the products take it."""
        return variable if self.half is None else tf.cast(variable, self.half)

    def by_image(self, height, width, others=1):
        """Sizes of the four axes in this network's layout."""
        return [others, height, width, others] if self.image_format == "NHWC" else [others, others, height, width]

    @property
    def channel_axis(self):
        return 3 if self.image_format == "NHWC" else 1

    def native(self, images):
        """A tensor in this network's layout of a numpy array (N, C, H, W)."""
        if self.image_format == "NCHW":
            return tf.convert_to_tensor(images)
        count, channels, height, width = images.shape
        if channels == 1 or height == width == 1:
            return tf.convert_to_tensor(images.reshape((count, height, width, channels)))
        return tf.transpose(tf.convert_to_tensor(images), (0, 2, 3, 1))

    def canonical(self, images):
        """A numpy array (N, C, H, W) of one in this network's layout."""
        return images if self.image_format == "NCHW" else images.transpose(0, 3, 1, 2)

    def only_linear(self, name):
        """True when everything that reads `name`, also through elementwise ops, is a linear op whose weight nobody shares."""
        readers = self.readers[name]
        if name in self.ends or not readers:
            return False
        alone = [op["op"] == "linear" and op["name"] not in self.tied for op in readers]
        return all(ok or (op["op"] in ELEMENTWISE and self.only_linear(op["name"])) for ok, op in zip(alone, readers))


def affine(x, weight, bias, transposed=False):
    """x·weight (or x·weightᵀ) + bias over the last axis; as one product of two matrices also over time."""
    if x.shape.rank == 2:
        y = tf.matmul(x, weight, transpose_b=transposed)
        return y if bias is None else tf.nn.bias_add(y, bias)
    _, time, width = x.shape
    y = affine(tf.reshape(x, (-1, width)), weight, bias, transposed)
    return tf.reshape(y, (-1, time, y.shape[-1]))


# -- builders: each gives the layer of an op, a function (mode, *inputs) → output ---------------------------------------------
def linear(network, op):
    flat = network.flat_images.get(op["inputs"][0])
    layout = TRANSPOSED if flat is None else from_flat_image(flat)
    weight = network.parameter(op, "weight", (network.input_shape(op)[-1], op["out"]), layout)
    bias = network.bias(op, op["out"])
    return lambda mode, x: affine(x, network.lowered(weight), None if bias is None else network.lowered(bias))


def tied_linear(network, op):
    weight = network.slots[op["tied"] + ".weight"].variable
    # a linear op's variable is (in, out), the transpose of the spec's weight; an embedding's is the weight itself
    is_spec = next(other["op"] == "embedding" for other in network.spec["ops"] if other["name"] == op["tied"])
    transposed = is_spec != op["transpose"]
    bias = network.bias(op, op["shape"][-1])
    return lambda mode, x: affine(x, network.lowered(weight), None if bias is None else network.lowered(bias), transposed)


def layer_norm(network, op):
    size, epsilon = network.input_shape(op)[-1], op["epsilon"]
    weight, bias = network.parameter(op, "weight", (size,)), network.parameter(op, "bias", (size,))
    if len(network.input_shape(op)) == 3:
        raise Unsupported("tensorflow: layer_norm %s is over the last axis of an image, only vectors and tokens are possible" % op["name"])

    def layer(mode, x):
        # in float32, as Keras does
        wide = tf.cast(x, tf.float32)
        mean, variance = tf.nn.moments(wide, -1, keepdims=True)
        return tf.cast(tf.nn.batch_normalization(wide, mean, variance, bias, weight, epsilon), x.dtype)

    return layer


def dropout(network, op):
    rate, index = op["rate"], len(network.plan)

    def layer(mode, x):
        if not mode.training or rate == 0:
            return x
        # what tf.nn.dropout does, with numbers that depend on the seed alone; drawn in float32 for any dtype
        kept = tf.random.stateless_uniform(tf.shape(x), tf.stack([mode.seed, index])) >= rate
        return tf.where(kept, x * (1.0 / (1.0 - rate)), tf.zeros((), x.dtype))

    return layer


def concat(network, op):
    axis = network.channel_axis if len(op["shape"]) == 3 else 1
    return lambda mode, *inputs: tf.concat(inputs, axis)


def flatten(network, op):
    shape, size = network.input_shape(op), op["shape"][0]
    ordered = len(shape) < 3 or network.image_format == "NCHW" or shape[0] == 1 or shape[1] == shape[2] == 1
    if not ordered and network.only_linear(op["name"]):
        # the order of NHWC; the linear op behind has its weight in that order, too
        network.flat_images[op["name"]] = shape
        ordered = True
    if ordered:
        return lambda mode, x: tf.reshape(x, (-1, size))
    return lambda mode, x: tf.reshape(tf.transpose(x, (0, 3, 1, 2)), (-1, size))


def embedding(network, op):
    weight = network.parameter(op, "weight", (op["vocabulary"], op["width"]))
    return lambda mode, x: lowered(network, tf.gather(weight, x))


def lowered(network, value):
    return value if network.half is None else tf.cast(value, network.half)


def position_embedding(network, op):
    weight = network.parameter(op, "weight", network.input_shape(op))
    return lambda mode, x: x + network.lowered(weight)


def class_token(network, op):
    width = network.input_shape(op)[-1]
    weight = network.parameter(op, "weight", (1, width))
    return lambda mode, x: tf.concat([tf.broadcast_to(network.lowered(weight), (tf.shape(x)[0], 1, width)), x], 1)


def patches_to_tokens(network, op):
    time, channels = op["shape"]
    if network.image_format == "NHWC":
        return lambda mode, x: tf.reshape(x, (-1, time, channels))
    return lambda mode, x: tf.transpose(tf.reshape(x, (-1, channels, time)), (0, 2, 1))


def attention(network, op):
    """Multi-head self-attention; the rows of qkv_weight are all queries, all keys, all values."""
    time, width = network.input_shape(op)
    heads, each = op["heads"], width // op["heads"]
    qkv_weight = network.parameter(op, "qkv_weight", (width, 3 * width), TRANSPOSED)
    qkv_bias = network.parameter(op, "qkv_bias", (3 * width,))
    out_weight = network.parameter(op, "out_weight", (width, width), TRANSPOSED)
    out_bias = network.parameter(op, "out_bias", (width,))
    lowest = numpy.finfo("float32").min
    mask = numpy.triu(numpy.full((time, time), lowest, "float32"), 1) if op["causal"] else None

    def layer(mode, x):
        qkv = affine(x, network.lowered(qkv_weight), network.lowered(qkv_bias))
        q, k, v = tf.unstack(tf.transpose(tf.reshape(qkv, (-1, time, 3, heads, each)), (2, 0, 3, 1, 4)))
        scores = tf.cast(tf.matmul(q * each**-0.5, k, transpose_b=True), tf.float32)
        shares = tf.cast(tf.nn.softmax(scores if mask is None else scores + mask), x.dtype)
        mixed = tf.reshape(tf.transpose(tf.matmul(shares, v), (0, 2, 1, 3)), (-1, time, width))
        return affine(mixed, network.lowered(out_weight), network.lowered(out_bias))

    return layer


def masked_mean(network, op):
    """The mean over the tokens that are not 0 (0 where there is none)."""

    def layer(mode, x, tokens):
        mask = tf.cast(tokens != 0, x.dtype)
        count = tf.maximum(tf.reduce_sum(mask, 1, keepdims=True), tf.ones((), x.dtype))
        return tf.squeeze(tf.matmul(mask[:, tf.newaxis], x), 1) / count

    return layer


def function(call):
    """A builder for an op without parameters and attributes."""
    return lambda network, op: lambda mode, *inputs: call(*inputs)


def gelu(network, op):
    return lambda mode, x: tf.nn.gelu(x, op["approximate"] == "tanh")


def select_token(network, op):
    return lambda mode, x: x[:, op["index"]]


BUILDERS = {
    "linear": linear,
    "tied_linear": tied_linear,
    "conv2d": images.conv2d,
    "max_pool": images.max_pool,
    "avg_pool": images.avg_pool,
    "global_avg_pool": images.global_avg_pool,
    "batch_norm": images.batch_norm,
    "layer_norm": layer_norm,
    "lrn": images.lrn,
    "relu": function(tf.nn.relu),
    "tanh": function(tf.tanh),
    "sigmoid": function(tf.sigmoid),
    "softmax": function(lambda x: tf.cast(tf.nn.softmax(tf.cast(x, tf.float32)), x.dtype)),
    "gelu": gelu,
    "dropout": dropout,
    "add": function(lambda *inputs: sum(inputs[1:], inputs[0])),
    "concat": concat,
    "channel_pad_shortcut": images.channel_pad_shortcut,
    "flatten": flatten,
    "embedding": embedding,
    "position_embedding": position_embedding,
    "class_token": class_token,
    "patches_to_tokens": patches_to_tokens,
    "select_token": select_token,
    "lstm": lstm_layer,
    "attention": attention,
    "masked_mean": masked_mean,
}


# -- losses -----------------------------------------------------------------------------------------------------------
def build_loss(spec):
    """A function (output, targets) → the losses whose mean is the loss: one for each sample or token, or for each element."""
    if spec["loss"]["op"] == "softmax_cross_entropy":
        return lambda output, targets: tf.nn.sparse_softmax_cross_entropy_with_logits(targets, output)
    if spec["loss"]["op"] == "mean_squared_error":
        return lambda output, targets: tf.math.squared_difference(output, targets)
    raise Unsupported("tensorflow has no mapping for loss %s" % spec["loss"]["op"])

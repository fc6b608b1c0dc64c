"""Builders of the image ops for tensorflow_layers: convolution, pooling, batch norm, local response normalisation, shortcuts.

Each gives the layer of an op: a function (mode, *inputs) → output.
"""

import numpy
import tensorflow as tf

from .base import Unsupported

#: convolution weights: OIHW → TensorFlow's HWIO, and back
HWIO = (lambda a: a.transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1))


def same_padding(size, reach, stride):
    """(before, after) of TensorFlow's padding "SAME"."""
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2


def padding_word(network, op, padding, reach):
    """"VALID" or "SAME" where it means this padding [top, bottom, left, right], else None."""
    if not any(padding):
        return "VALID"
    sizes = network.input_shape(op)[1:]
    same = [side for three in zip(sizes, reach, op["stride"]) for side in same_padding(*three)]
    return "SAME" if same == list(padding) and op["shape"][1:] == [-(-n // s) for n, s in zip(sizes, op["stride"])] else None


def padded(network, padding, value=0.0):
    """A function that pads the two image axes."""
    top, bottom, left, right = padding
    if network.image_format == "NHWC":
        sides = [[0, 0], [top, bottom], [left, right], [0, 0]]
    else:
        sides = [[0, 0], [0, 0], [top, bottom], [left, right]]
    return sides, lambda x: tf.pad(x, sides, constant_values=tf.constant(value, x.dtype))


def conv2d(network, op):
    reach = [(k - 1) * d + 1 for k, d in zip(op["kernel"], op["dilation"])]
    padding = padding_word(network, op, op["padding"], reach)
    prepare = None
    if padding is None:
        padding, prepare = padded(network, op["padding"])
        # On the CPU there is no gradient for explicit padding with a dilation, nor in NCHW.
        if not network.gpu and (op["dilation"] != [1, 1] or network.image_format == "NCHW"):
            padding = "VALID"
        else:
            prepare = None
    shape = op["kernel"] + [network.input_shape(op)[0] // op["groups"], op["out_channels"]]
    weight = network.parameter(op, "weight", shape, HWIO)
    bias = network.bias(op, op["out_channels"])
    strides, dilations = network.by_image(*op["stride"]), network.by_image(*op["dilation"])

    def layer(mode, x):
        x = x if prepare is None else prepare(x)
        y = tf.nn.conv2d(x, network.lowered(weight), strides, padding, network.image_format, dilations)
        return y if bias is None else tf.nn.bias_add(y, network.lowered(bias), network.image_format)

    return layer


def used_padding(network, op):
    """[top, bottom, left, right] that the windows of a pool reach: rounding up, they may go beyond the padding at the end."""
    top, _, left, _ = op["padding"]
    height, width = network.input_shape(op)[1:]
    (kh, kw), (sh, sw), (oh, ow) = op["kernel"], op["stride"], op["shape"][1:]
    return [top, max(0, (oh - 1) * sh + kh - height - top), left, max(0, (ow - 1) * sw + kw - width - left)]


def max_pool(network, op):
    if network.image_format == "NCHW" and network.eager and not network.gpu:
        raise Unsupported(
            "tensorflow: max_pool %s: on the CPU its gradient in NCHW is there in graphs only" % op["name"],
            "framework.memory_format=channels_last or framework.compile=on",
        )
    kernel, strides = network.by_image(*op["kernel"]), network.by_image(*op["stride"])
    pads = used_padding(network, op)
    padding, prepare = padding_word(network, op, pads, op["kernel"]), None
    if padding is None:
        padding, prepare = padded(network, pads, float("-inf"))
        # explicit padding: not in XLA, on the CPU not in NCHW, and only below the kernel's size
        small = max(pads[:2]) < op["kernel"][0] and max(pads[2:]) < op["kernel"][1]
        if network.xla or not small or (network.image_format == "NCHW" and not network.gpu):
            padding = "VALID"
        else:
            prepare = None

    def layer(mode, x):
        x = x if prepare is None else prepare(x)
        return tf.nn.max_pool2d(x, kernel, strides, padding, network.image_format)

    return layer


def counted(size, kernel, stride, out, before, after):
    """How many elements each of `out` windows has between `before` elements in front of the input and `after` behind it."""
    starts = numpy.arange(out) * stride
    return numpy.minimum(starts + kernel, size + before + after) - starts


def avg_pool(network, op):
    kernel, strides = network.by_image(*op["kernel"]), network.by_image(*op["stride"])
    pads = used_padding(network, op)
    padding = padding_word(network, op, pads, op["kernel"])
    inside = not op["count_include_pad"] or not any(op["padding"])
    if padding == "VALID" or (padding == "SAME" and inside):
        # "SAME" divides by the elements of the input
        return lambda mode, x: tf.nn.avg_pool2d(x, kernel, strides, padding, network.image_format)
    prepare, factor = padded(network, pads)[1], None
    counts = window_counts(network, op)
    if (counts != op["kernel"][0] * op["kernel"][1]).any():
        factor = tf.constant((op["kernel"][0] * op["kernel"][1] / counts).reshape(network.by_image(*counts.shape)), tf.float32)

    def layer(mode, x):
        y = tf.nn.avg_pool2d(prepare(x), kernel, strides, "VALID", network.image_format)
        return y if factor is None else y * tf.cast(factor, y.dtype)

    return layer


def window_counts(network, op):
    """(rows, columns): by what the sum of each window is divided."""
    axes = []
    for axis, size in enumerate(network.input_shape(op)[1:]):
        kernel, stride, out = op["kernel"][axis], op["stride"][axis], op["shape"][1 + axis]
        before, after = op["padding"][2 * axis : 2 * axis + 2]
        if op["count_include_pad"]:
            axes.append(counted(size, kernel, stride, out, before, after))
        else:
            starts = numpy.arange(out) * stride - before
            axes.append(numpy.minimum(starts + kernel, size) - numpy.maximum(starts, 0))
    return numpy.outer(*axes)


def global_avg_pool(network, op):
    axes = [1, 2] if network.image_format == "NHWC" else [2, 3]
    return lambda mode, x: tf.reduce_mean(x, axes)


def batch_norm(network, op):
    """FusedBatchNorm: its running variance is the unbiased one; the biased one is made of that."""
    shape, epsilon, decay = network.input_shape(op), op["epsilon"], op["decay"]
    size = shape[0]
    weight, bias = network.parameter(op, "weight", (size,)), network.parameter(op, "bias", (size,))
    mean, variance = network.state(op, "running_mean", (size,)), network.state(op, "running_var", (size,))
    image_format = network.image_format if len(shape) == 3 else "NHWC"
    biased = op["variance"] == "biased"

    def train(mode, x):
        y, batch_mean, batch_variance = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=weight, offset=bias, mean=[], variance=[], epsilon=epsilon, data_format=image_format, is_training=True
        )[:3]
        if mode.updated:
            if biased:
                count = tf.cast(tf.size(x) // size, tf.float32)
                batch_variance *= (count - 1.0) / count
            mean.assign_sub((mean - batch_mean) * (1.0 - decay))
            variance.assign_sub((variance - batch_variance) * (1.0 - decay))
        return y

    def infer(x):
        return tf.raw_ops.FusedBatchNormV3(
            x=x, scale=weight, offset=bias, mean=mean, variance=variance, epsilon=epsilon, data_format=image_format, is_training=False
        )[0]

    def layer(mode, x):
        images = x if len(shape) == 3 else tf.reshape(x, (-1, 1, 1, size))
        y = train(mode, images) if mode.training else infer(images)
        return y if len(shape) == 3 else tf.reshape(y, (-1, size))

    return layer


def lrn(network, op):
    radius, alpha = op["size"] // 2, op["alpha"] / op["size"]
    if op["size"] % 2 == 0:
        raise Unsupported("tensorflow: lrn %s has size %d, only odd sizes are possible" % (op["name"], op["size"]))

    def layer(mode, x):
        # NHWC only
        x = x if network.image_format == "NHWC" else tf.transpose(x, (0, 2, 3, 1))
        y = tf.nn.local_response_normalization(x, radius, op["k"], alpha, op["beta"])
        return y if network.image_format == "NHWC" else tf.transpose(y, (0, 3, 1, 2))

    return layer


def channel_pad_shortcut(network, op):
    stride, more = op["stride"], op["out_channels"] - network.input_shape(op)[0]
    if network.image_format == "NHWC":
        return lambda mode, x: tf.pad(x[:, ::stride, ::stride], [[0, 0], [0, 0], [0, 0], [0, more]])
    return lambda mode, x: tf.pad(x[:, :, ::stride, ::stride], [[0, 0], [0, more], [0, 0], [0, 0]])

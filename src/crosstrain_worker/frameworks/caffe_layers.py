"""The ops of the spec as Caffe's own layers."""

import math

from caffe import params as P
from caffe.proto import caffe_pb2

from .base import Unsupported
from .caffe_net import Description, L, size_of

#: outside every float32 activation, and above −FLT_MAX, from which Caffe's max pooling starts
LOWEST = -3.0e38
#: what may be overwritten in place: the backward pass of these ops does not need their own output
OVERWRITABLE = ("conv2d", "linear", "tied_linear", "batch_norm", "add")


def describe(spec, batch, training):
    """The Description of the spec's net, see there. Raises Unsupported."""
    return Description(spec, batch, training, BUILDERS)


# -- linear layers and convolution ------------------------------------------------------------------------------------
def linear(net, op, x):
    suffixes = ("weight", "bias") if op["bias"] else ("weight",)
    axis = len(net.input_shape(op))
    return L.InnerProduct(
        x, num_output=op["out"], bias_term=op["bias"], axis=axis, param=net.weights(op, op["name"], *suffixes)
    )


def tied_linear(net, op, x):
    """The other layer's weight by its name (shared data and gradient); with `transpose` Caffe takes it as (in, out)."""
    rows, columns = net.parameters[op["tied"] + ".weight"]["shape"]
    entries = [net.entry(op["tied"] + ".weight")]
    if op["bias"]:
        entries.append(net.entry(op["name"] + ".bias"))
        net.slots[op["name"] + ".bias"] = (op["name"], 1)
    return L.InnerProduct(
        x,
        num_output=columns if op["transpose"] else rows,
        bias_term=op["bias"],
        axis=len(net.input_shape(op)),
        transpose=op["transpose"],
        param=entries,
    )


def conv2d(net, op, x):
    top, bottom, left, right = op["padding"]
    symmetric = top == bottom and left == right
    if not symmetric:
        x = net.padded(x, op["name"], (net.batch,) + net.input_shape(op), op["padding"], 0.0)
    return L.Convolution(
        x,
        num_output=op["out_channels"],
        kernel_size=list(op["kernel"]),
        stride=list(op["stride"]),
        pad=[top, left] if symmetric else [0, 0],
        dilation=list(op["dilation"]),
        group=op["groups"],
        bias_term=op["bias"],
        param=net.weights(op, op["name"], *(("weight", "bias") if op["bias"] else ("weight",))),
    )


# -- pooling ----------------------------------------------------------------------------------------------------------
def rounding(op, sizes, padding):
    """Fields with which Caffe's pooling, given these sizes and padding on both sides, gives the spec's shape; None: none does."""
    modes = [(True, {})]  # rounding up is Caffe's own way
    if hasattr(caffe_pb2.PoolingParameter, "FLOOR"):
        modes.append((False, {"round_mode": P.Pooling.FLOOR}))
    for up, fields in modes:
        out = []
        for size, kernel, stride, pad in zip(sizes, op["kernel"], op["stride"], padding):
            span = size + 2 * pad - kernel
            windows = (-(-span // stride) if up else span // stride) + 1
            # with padding the last window has to start inside the input or the padding before it
            out.append(windows - 1 if any(padding) and (windows - 1) * stride >= size + pad else windows)
        if out == list(op["shape"][1:]):
            return fields
    return None


def pooling(op, x, kind, padding, fields):
    (kh, kw), (sh, sw), (ph, pw) = op["kernel"], op["stride"], padding
    return L.Pooling(x, pool=kind, kernel_h=kh, kernel_w=kw, stride_h=sh, stride_w=sw, pad_h=ph, pad_w=pw, **fields)


def native_pooling(net, op):
    """(padding, fields) of Caffe's pooling with its own padding, or None where it can not be the spec's."""
    top, bottom, left, right = op["padding"]
    fields = rounding(op, net.input_shape(op)[1:], (top, left))
    small = top < op["kernel"][0] and left < op["kernel"][1]
    return ((top, left), fields) if top == bottom and left == right and small and fields is not None else None


def impossible(op):
    counted = ", count_include_pad=%s" % op["count_include_pad"] if "count_include_pad" in op else ""
    return Unsupported(
        "caffe: %s %s can not have padding %s with ceil=%s%s" % (op["op"], op["name"], op["padding"], op["ceil"], counted)
    )


def max_pool(net, op, x):
    native = native_pooling(net, op)
    if native:
        return pooling(op, x, P.Pooling.MAX, *native)
    top, bottom, left, right = op["padding"]
    height, width = net.input_shape(op)[1:]
    (kh, kw), (sh, sw), (rows, columns) = op["kernel"], op["stride"], op["shape"][1:]
    # rounding up means windows that hang over the end
    bottom = max(bottom, (rows - 1) * sh + kh - height - top)
    right = max(right, (columns - 1) * sw + kw - width - left)
    fields = rounding(op, (height + top + bottom, width + left + right), (0, 0))
    if fields is None:
        raise impossible(op)
    x = net.padded(x, op["name"], (net.batch,) + net.input_shape(op), (top, bottom, left, right), LOWEST)
    return pooling(op, x, P.Pooling.MAX, (0, 0), fields)


def avg_pool(net, op, x):
    """Caffe's pool counts the padding, and nothing beyond it."""
    averages = average(net, op, x, op["name"], net.batch, net.input_shape(op)[0])
    if op["count_include_pad"] or not any(op["padding"]):
        return averages
    # The same of an image of ones is the share of each window that lies in the input.
    name, (height, width) = op["name"], net.input_shape(op)[1:]
    ones = net.constant(name + "/ones", (1, 1, height, width), 1.0)
    share = net.put(name + "/share", average(net, op, ones, name + "/ones", 1, 1))
    inverse = net.put(name + "/inverse", L.Power(share, power=-1.0))
    factor = net.put(name + "/factor", L.Reshape(inverse, shape=dict(dim=list(op["shape"][1:]))))
    return L.Scale(net.put(name + "/average", averages), factor, axis=2)


def average(net, op, x, name, samples, channels):
    native = native_pooling(net, op)
    if native:
        return pooling(op, x, P.Pooling.AVE, *native)
    top, bottom, left, right = op["padding"]
    height, width = net.input_shape(op)[1:]
    fields = rounding(op, (height + top + bottom, width + left + right), (0, 0))
    if fields is None:
        raise impossible(op)
    x = net.padded(x, name, (samples, channels, height, width), op["padding"], 0.0)
    return pooling(op, x, P.Pooling.AVE, (0, 0), fields)


def global_avg_pool(net, op, x):
    x = net.put(op["name"] + "/mean", L.Pooling(x, pool=P.Pooling.AVE, global_pooling=True))
    return L.Flatten(x)


def channel_pad_shortcut(net, op, x):
    """Every stride-th pixel (windows of one pixel), zero channels behind."""
    channels = net.input_shape(op)[0]
    out, rows, columns = op["shape"]
    if op["stride"] > 1:
        window = dict(op, kernel=[1, 1], stride=[op["stride"]] * 2)
        fields = rounding(window, net.input_shape(op)[1:], (0, 0))
        if fields is None:
            raise Unsupported("caffe: channel_pad_shortcut %s can not have stride %d here" % (op["name"], op["stride"]))
        x = net.put(op["name"] + "/subsampled", pooling(window, x, P.Pooling.AVE, (0, 0), fields))
    if out == channels:
        return L.Split(x)
    return L.Concat(x, net.constant(op["name"] + "/zeros", (net.batch, out - channels, rows, columns), 0.0), axis=1)


# -- normalisation ----------------------------------------------------------------------------------------------------
def batch_norm(net, op, x):
    """(x − mean)·(weight / √(variance + epsilon)) + bias, of Reduction, Bias, Power and Scale: the gradient is Caffe's own.

    Not with the layer BatchNorm: that of the build on the package index never computes a batch's statistics (found by experiment;
    the lines are missing in its sources), it can only infer. What the running statistics become is computed here, too; the
    adapter carries it over after a step (`carried`).
    """
    shape, name = net.input_shape(op), op["name"]
    if len(shape) not in (1, 3):
        raise Unsupported("caffe: batch_norm %s takes (C,) or (C, H, W), not %s" % (name, shape))
    running = [net.parameter(op, suffix, shape[:1]) for suffix in ("running_mean", "running_var")]
    if net.training:
        count = net.batch * size_of(shape[1:])
        kept = count / (count - 1.0) if op["variance"] == "unbiased" and count > 1 else 1.0
        mean = over_batch(net, name + "/batch_mean", x, len(shape), P.Reduction.MEAN, 1.0)
        centred = centre(net, name, x, mean)
        variance = over_batch(net, name + "/batch_var", centred, len(shape), P.Reduction.SUMSQ, 1.0 / count)
        carry(net, name + "/running_mean", running[0], mean, op["decay"], 1 - op["decay"])
        carry(net, name + "/running_var", running[1], variance, op["decay"], (1 - op["decay"]) * kept)
    else:
        centred, variance = centre(net, name, x, running[0]), running[1]
    inverse = net.put(name + "/inverse", L.Power(variance, power=-0.5, shift=op["epsilon"]))
    factor = net.put(name + "/factor", L.Scale(inverse, axis=0, param=net.weights(op, name + "/factor", "weight")))
    return L.Scale(centred, factor, axis=1, bias_term=True, param=net.weights(op, name, "bias"))


def over_batch(net, name, x, rank, operation, coefficient):
    """(N, C) or (N, C, H, W) → (C,): mean or sum of squares, times the coefficient. Reduction takes the last axes."""
    if rank == 3:
        x = net.put(name + "_each", L.Reduction(x, operation=operation, axis=2))
        operation = operation if operation == P.Reduction.MEAN else P.Reduction.SUM
    x = net.put(name + "_channels", L.Permute(x, order=[1, 0]))
    return net.put(name, L.Reduction(x, operation=operation, axis=1, coeff=coefficient))


def centre(net, name, x, mean):
    negative = net.put(name + "/negative_mean", L.Power(mean, scale=-1.0))
    return net.put(name + "/centred", L.Bias(x, negative, axis=1))


def carry(net, layer, before, now, decay, share):
    """The running statistic in this layer becomes decay·before + share·now."""
    net.put(layer + "_next", L.Eltwise(before, now, operation=P.Eltwise.SUM, coeff=[decay, share]))
    net.carried.append((layer, layer + "_next"))


def layer_norm(net, op, x):
    """MVN adds its epsilon to the deviation, the spec's belongs to the variance: so with Reduction, Bias and Scale."""
    name, axis, width = op["name"], len(net.input_shape(op)), net.input_shape(op)[-1]
    mean = net.put(name + "/mean", L.Reduction(x, operation=P.Reduction.MEAN, axis=axis, coeff=-1.0))
    centred = net.put(name + "/centred", L.Bias(x, mean, axis=0))
    variance = net.put(name + "/variance", L.Reduction(centred, operation=P.Reduction.SUMSQ, axis=axis, coeff=1.0 / width))
    inverse = net.put(name + "/inverse", L.Power(variance, power=-0.5, shift=op["epsilon"]))
    normalised = net.put(name + "/normalised", L.Scale(centred, inverse, axis=0))
    return L.Scale(normalised, axis=axis, bias_term=True, param=net.weights(op, name, "weight", "bias"))


def lrn(net, op, x):
    if op["size"] % 2 == 0:
        raise Unsupported("caffe: lrn %s has size %d, only odd sizes are possible" % (op["name"], op["size"]))
    return L.LRN(x, local_size=op["size"], alpha=op["alpha"], beta=op["beta"], k=op["k"])


# -- activations ------------------------------------------------------------------------------------------------------
def relu(net, op, x):
    return L.ReLU(x, in_place=net.alone(op) and net.made_by(op, OVERWRITABLE))


def gelu(net, op, x):
    """x·(1 + tanh(z)) / 2 = x·sigmoid(2z), z = √(2/π)·(x + 0.044715·x³) (Hendrycks & Gimpel 2016)."""
    if op["approximate"] != "tanh":
        raise Unsupported("caffe: gelu %s has approximate=%s, Caffe has no error function" % (op["name"], op["approximate"]))
    name, factor = op["name"], 2 * math.sqrt(2 / math.pi)
    square = net.put(name + "/square", L.Power(x, power=2.0))
    inner = net.put(name + "/inner", L.Power(square, scale=0.044715 * factor, shift=factor))
    z = net.put(name + "/z", L.Eltwise(x, inner, operation=P.Eltwise.PROD))
    return L.Eltwise(x, net.put(name + "/share", L.Sigmoid(z)), operation=P.Eltwise.PROD)


def dropout(net, op, x):
    return L.Dropout(x, dropout_ratio=op["rate"], in_place=net.alone(op) and net.made_by(op, OVERWRITABLE + ("relu",)))


# -- sequences --------------------------------------------------------------------------------------------------------
def embedding(net, op, x):
    return L.Embed(
        x, input_dim=op["vocabulary"], num_output=op["width"], bias_term=False, param=net.weights(op, op["name"], "weight")
    )


def position_embedding(net, op, x):
    return L.Bias(x, axis=1, num_axes=2, param=net.weights(op, op["name"], "weight"))


def class_token(net, op, x):
    token = net.parameter(op, "weight", (1, 1, op["shape"][1]))
    return L.Concat(net.put(op["name"] + "/tokens", L.Tile(token, axis=0, tiles=net.batch)), x, axis=1)


def patches_to_tokens(net, op, x):
    """(N, C, H, W) → (N, H·W, C)."""
    columns = net.put(op["name"] + "/columns", L.Flatten(x, axis=2, end_axis=-1))
    return L.Permute(columns, order=[0, 2, 1])


def select_token(net, op, x):
    time, width = net.input_shape(op)
    like = net.constant(op["name"] + "/like", (net.batch, 1, width), 0.0)
    one = L.Crop(x, like, axis=1, offset=[op["index"] % time, 0])
    return L.Flatten(net.put(op["name"] + "/one", one))


def lstm(net, op, x):
    """x is (T, N, in). Caffe's gates are i, f, o, g; the state starts from zero where the indicator is 0: at the first step."""
    name, time = op["name"], op["shape"][0]
    follows = net.put(name + "/follows", L.ContinuationIndicator(time_step=time, batch_size=net.batch))
    entries = net.weights(op, name, "weight_ih", "bias", "weight_hh")
    suffixes = ("weight_ih", "bias", "weight_hh")
    net.gates.update("%s.%s" % (name, suffix) for suffix in suffixes)
    net.unasked += [(name, index) for index, entry in enumerate(entries) if not entry["lr_mult"]]
    return L.LSTM(x, follows, recurrent_param=dict(num_output=op["hidden"]), param=entries)


def masked_mean(net, op, x, *_):
    """(N, T, width) → (N, width): Σ mask·x / max(1, Σ mask), mask = 1 where the token is above 0."""
    name, tokens = op["name"], net.value("input", False)
    mask = net.put(name + "/mask", L.Threshold(tokens, threshold=0.0))
    masked = net.put(name + "/masked", L.Scale(x, mask, axis=0))
    columns = net.put(name + "/columns", L.Permute(masked, order=[0, 2, 1]))
    total = net.put(name + "/total", L.Reduction(columns, operation=P.Reduction.SUM, axis=2))
    counted = net.put(name + "/counted", L.Reduction(mask, operation=P.Reduction.SUM, axis=1))
    count = L.Eltwise(counted, net.constant(name + "/one", (net.batch,), 1.0), operation=P.Eltwise.MAX)
    inverse = net.put(name + "/inverse", L.Power(net.put(name + "/count", count), power=-1.0))
    return L.Scale(total, inverse, axis=0)


def attention(net, op, *_):
    raise Unsupported("caffe: attention %s: Caffe has no layer that multiplies two activations as matrices" % op["name"])


BUILDERS = {
    "linear": linear,
    "tied_linear": tied_linear,
    "conv2d": conv2d,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "global_avg_pool": global_avg_pool,
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "lrn": lrn,
    "relu": relu,
    "tanh": lambda net, op, x: L.TanH(x),
    "sigmoid": lambda net, op, x: L.Sigmoid(x),
    "softmax": lambda net, op, x: L.Softmax(x, axis=-1),
    "gelu": gelu,
    "dropout": dropout,
    "add": lambda net, op, *inputs: L.Eltwise(*inputs, operation=P.Eltwise.SUM),
    "concat": lambda net, op, *inputs: L.Concat(*inputs, axis=1),
    "channel_pad_shortcut": channel_pad_shortcut,
    "flatten": lambda net, op, x: L.Flatten(x),
    "embedding": embedding,
    "position_embedding": position_embedding,
    "class_token": class_token,
    "patches_to_tokens": patches_to_tokens,
    "select_token": select_token,
    "lstm": lstm,
    "attention": attention,
    "masked_mean": masked_mean,
}

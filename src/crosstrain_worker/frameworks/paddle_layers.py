"""The ops of the spec as Paddle's own layers.

Paddle keeps the weight of a linear layer as (in, out), the spec as (out, in): a slot says which of a layer's parameters a spec's
parameter is, and whether it is transposed there.
"""

import paddle
from paddle import nn
from paddle.jit.dy2static.program_translator import StaticFunction
from paddle.nn import functional

from .base import Unsupported


class Slot(object):
    """Where the spec's parameter or state is: a Paddle tensor, and whether it is the transposed of the spec's."""

    def __init__(self, tensor, transposed=False):
        self.tensor = tensor
        self.transposed = transposed

    def read(self):
        """float32 array in the spec's layout. Waits for the device."""
        return self.canonical(self.tensor.numpy()).astype("float32")

    def canonical(self, array):
        """An array in Paddle's layout in the spec's, or the other way round."""
        return array.T.copy() if self.transposed else array


# -- layers that paddle.nn does not have as one class -----------------------------------------------------------------
class TiedLinear(nn.Layer):
    """A linear layer with another layer's weight; `flip`: with the transposed of what is stored there."""

    def __init__(self, weight, flip, bias):
        nn.Layer.__init__(self)
        self.weight = weight
        self.flip = flip
        self.bias = self.create_parameter([weight.shape[0 if flip else 1]], is_bias=True) if bias else None

    def forward(self, x):
        y = paddle.matmul(x, self.weight, transpose_y=self.flip)
        return y if self.bias is None else y + self.bias


class AvgPoolOfPadded(nn.Layer):
    """Average pooling with other padding on each side, or with windows that hang over the end of the padded input.

    Divided by what a window holds of the padded input, zeros included.
    """

    def __init__(self, kernel, stride, padding, overhang):
        nn.Layer.__init__(self)
        top, bottom, left, right = padding
        self.pad = nn.Pad2D([left, right, top, bottom])
        self.pool = nn.AvgPool2D(kernel, stride, overhang, exclusive=True)

    def forward(self, x):
        return self.pool(self.pad(x))


class GlobalAvgPool(nn.Layer):
    """(N, C, H, W) → (N, C)."""

    def __init__(self):
        nn.Layer.__init__(self)
        self.pool = nn.AdaptiveAvgPool2D(1)

    def forward(self, x):
        return paddle.flatten(self.pool(x), 1)


class Add(nn.Layer):
    def forward(self, *inputs):
        total = inputs[0]
        for other in inputs[1:]:
            total = total + other
        return total


class Concat(nn.Layer):
    def forward(self, *inputs):
        return paddle.concat(list(inputs), axis=1)


class ChannelPadShortcut(nn.Layer):
    """He et al. (2015), option A: every stride-th pixel, zero channels behind."""

    def __init__(self, stride, channels):
        nn.Layer.__init__(self)
        self.stride = stride
        self.padding = [0, 0, 0, channels, 0, 0, 0, 0]  # from the first axis on

    def forward(self, x):
        return functional.pad(x[:, :, :: self.stride, :: self.stride], self.padding)


class PositionEmbedding(nn.Layer):
    """(N, T, width) + a learnt (T, width)."""

    def __init__(self, shape):
        nn.Layer.__init__(self)
        self.weight = self.create_parameter(list(shape))

    def forward(self, x):
        return x + self.weight


class ClassToken(nn.Layer):
    """(N, T, width) → (N, T+1, width): a learnt token first."""

    def __init__(self, width):
        nn.Layer.__init__(self)
        self.weight = self.create_parameter([1, width])

    def forward(self, x):
        return paddle.concat([paddle.expand(self.weight, [x.shape[0], 1, x.shape[2]]), x], axis=1)


class PatchesToTokens(nn.Layer):
    """(N, C, H, W) → (N, H·W, C)."""

    def forward(self, x):
        return paddle.transpose(paddle.flatten(x, 2), [0, 2, 1])


class SelectToken(nn.Layer):
    """(N, T, width) → (N, width)."""

    def __init__(self, index):
        nn.Layer.__init__(self)
        self.index = index

    def forward(self, x):
        return x[:, self.index]


class LSTMOutputs(nn.LSTM):
    """nn.LSTM that returns the hidden states of all time steps only."""

    def forward(self, x):
        return nn.LSTM.forward(self, x)[0]


class Attention(nn.Layer):
    """Multi-head self-attention; the columns of `qkv.weight` are all queries, all keys, all values."""

    def __init__(self, width, heads, causal):
        nn.Layer.__init__(self)
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, time, width = x.shape
        parts = paddle.reshape(self.qkv(x), [batch, time, 3, self.heads, width // self.heads])
        q, k, v = paddle.unbind(parts, axis=2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(paddle.reshape(mixed, [batch, time, width]))


class MaskedMean(nn.Layer):
    """(N, T, width) and tokens (N, T) → (N, width): the mean over the tokens that are not 0 (0 where there is none)."""

    def forward(self, x, tokens):
        mask = paddle.cast(tokens != 0, x.dtype)
        count = paddle.clip(paddle.sum(mask, axis=1, keepdim=True), min=1.0)
        return paddle.squeeze(paddle.bmm(paddle.unsqueeze(mask, 1), x), 1) / count


# -- the network ------------------------------------------------------------------------------------------------------
class Network(nn.Layer):
    """(N, …input shape) → the output of the op `spec["output"]`; where an op is the target, (that, the target's output).

    `slots` maps the spec's parameter and state names to Slots. `derived` are the tensors that get a gradient even where they are not
    trained: the backward pass of Paddle's fused LSTM fails when it has not to give them all. The plan holds, for each op, its layer,
    the places of its inputs among the values, and the places nobody needs after it: they are freed, as a hand-written forward does.
    """

    def __init__(self, spec):
        nn.Layer.__init__(self)
        self.slots = {}
        self.derived = []
        self.shapes = {"input": tuple(spec["input"]["shape"])}
        places, calls = {"input": 0}, []
        for op in spec["ops"]:
            layer = BUILDERS[op["op"]](self, op)
            self.add_sublayer("op%d" % len(calls), layer)
            inputs = [places[name] for name in op["inputs"]]
            calls.append((layer, [inputs[0], 0] if op["op"] == "masked_mean" else inputs))
            places[op["name"]] = len(calls)
            self.shapes[op["name"]] = tuple(op["shape"])
        self.last = places[spec["output"]]
        self.target = places[spec["target"]["name"]] if spec["target"]["kind"] == "op" else None
        last_use = {place: index for index, (_, inputs) in enumerate(calls) for place in inputs}
        kept = (self.last, self.target)
        self.plan = []
        for index, (layer, inputs) in enumerate(calls):
            over = [place for place in sorted(set(inputs)) if last_use[place] == index and place not in kept]
            self.plan.append((layer, inputs, over))

    def forward(self, x):
        values = [x]
        for layer, inputs, over in self.plan:
            values.append(layer(*[values[i] for i in inputs]))
            for place in over:
                values[place] = None
        return values[self.last] if self.target is None else (values[self.last], values[self.target])

    def keep(self, op, **tensors):
        """Paddle's tensors by the spec's suffixes. Those that are None are left out."""
        for suffix, tensor in tensors.items():
            if tensor is not None:
                # of the weights that are matrices, only a linear layer's are turned round
                self.slots["%s.%s" % (op["name"], suffix)] = Slot(tensor, op["op"] == "linear" and suffix == "weight")

    def input_shape(self, op):
        return self.shapes[op["inputs"][0]]


# A builder gives the layer of an op.
def linear(network, op):
    layer = nn.Linear(network.input_shape(op)[-1], op["out"], bias_attr=None if op["bias"] else False)
    network.keep(op, weight=layer.weight, bias=layer.bias)
    return layer


def tied_linear(network, op):
    slot = network.slots[op["tied"] + ".weight"]
    # `transpose: false` is x·Wᵀ
    layer = TiedLinear(slot.tensor, op["transpose"] == slot.transposed, op["bias"])
    network.keep(op, bias=layer.bias)
    return layer


def conv2d(network, op):
    top, bottom, left, right = op["padding"]
    layer = nn.Conv2D(
        network.input_shape(op)[0],
        op["out_channels"],
        op["kernel"],
        stride=op["stride"],
        padding=[top, left] if top == bottom and left == right else [top, bottom, left, right],
        dilation=op["dilation"],
        groups=op["groups"],
        bias_attr=None if op["bias"] else False,
    )
    network.keep(op, weight=layer.weight, bias=layer.bias)
    return layer


def reached(network, op):
    """(bottom, right): the padding behind the input with which pooling that rounds down gives the spec's shape.

    Rounding up means windows that hang over the end; Paddle's own rounding up keeps a last window that lies in the padding alone.
    """
    top, _, left, _ = op["padding"]
    height, width = network.input_shape(op)[1:]
    (kh, kw), (sh, sw), (oh, ow) = op["kernel"], op["stride"], op["shape"][1:]
    return max(0, (oh - 1) * sh + kh - height - top), max(0, (ow - 1) * sw + kw - width - left)


def max_pool(network, op):
    # the padding is never the largest
    top, _, left, _ = op["padding"]
    bottom, right = reached(network, op)
    return nn.MaxPool2D(op["kernel"], op["stride"], [top, bottom, left, right])


def avg_pool(network, op):
    top, bottom, left, right = op["padding"]
    below, beside = reached(network, op)
    if not op["count_include_pad"] or not any(op["padding"]):
        return nn.AvgPool2D(op["kernel"], op["stride"], [top, below, left, beside], exclusive=True)
    if top == bottom and left == right and below <= bottom and beside <= right:
        return nn.AvgPool2D(op["kernel"], op["stride"], [top, left], exclusive=False)
    # counting it, Paddle takes the padding before the input for that behind it
    overhang = [0, max(0, below - bottom), 0, max(0, beside - right)]
    return AvgPoolOfPadded(op["kernel"], op["stride"], op["padding"], overhang)


def batch_norm(network, op):
    shape = network.input_shape(op)
    kinds = {1: nn.BatchNorm1D, 3: nn.BatchNorm2D}
    if len(shape) not in kinds:
        raise Unsupported("paddle: batch_norm %s takes (C,) or (C, H, W), not %s" % (op["name"], shape))
    layer = kinds[len(shape)](shape[0], momentum=op["decay"], epsilon=op["epsilon"])
    network.keep(op, weight=layer.weight, bias=layer.bias, running_mean=layer._mean, running_var=layer._variance)
    return layer


def layer_norm(network, op):
    layer = nn.LayerNorm(network.input_shape(op)[-1], epsilon=op["epsilon"])
    network.keep(op, weight=layer.weight, bias=layer.bias)
    return layer


def embedding(network, op):
    layer = nn.Embedding(op["vocabulary"], op["width"])
    network.keep(op, weight=layer.weight)
    return layer


def position_embedding(network, op):
    layer = PositionEmbedding(network.input_shape(op))
    network.keep(op, weight=layer.weight)
    return layer


def class_token(network, op):
    layer = ClassToken(network.input_shape(op)[-1])
    network.keep(op, weight=layer.weight)
    return layer


def lstm(network, op):
    # without the second bias Paddle leaves its fused kernel and goes step by step in Python
    layer = LSTMOutputs(network.input_shape(op)[-1], op["hidden"])
    layer.bias_hh_l0.set_value(paddle.zeros_like(layer.bias_hh_l0))
    network.keep(op, weight_ih=layer.weight_ih_l0, weight_hh=layer.weight_hh_l0, bias=layer.bias_ih_l0)
    network.derived.extend([layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0])
    return layer


def attention(network, op):
    layer = Attention(network.input_shape(op)[-1], op["heads"], op["causal"])
    network.keep(op, qkv_bias=layer.qkv.bias, out_bias=layer.out.bias)
    network.slots[op["name"] + ".qkv_weight"] = Slot(layer.qkv.weight, transposed=True)
    network.slots[op["name"] + ".out_weight"] = Slot(layer.out.weight, transposed=True)
    return layer


def without_parameters(make):
    """A builder for an op whose layer is `make(op)`."""
    return lambda network, op: make(op)


BUILDERS = {
    "linear": linear,
    "tied_linear": tied_linear,
    "conv2d": conv2d,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "global_avg_pool": without_parameters(lambda op: GlobalAvgPool()),
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "lrn": without_parameters(lambda op: nn.LocalResponseNorm(op["size"], alpha=op["alpha"], beta=op["beta"], k=op["k"])),
    "relu": without_parameters(lambda op: nn.ReLU()),
    "tanh": without_parameters(lambda op: nn.Tanh()),
    "sigmoid": without_parameters(lambda op: nn.Sigmoid()),
    "softmax": without_parameters(lambda op: nn.Softmax(axis=-1)),
    "gelu": without_parameters(lambda op: nn.GELU(approximate=op["approximate"] == "tanh")),
    "dropout": without_parameters(lambda op: nn.Dropout(op["rate"])),
    "add": without_parameters(lambda op: Add()),
    "concat": without_parameters(lambda op: Concat()),
    "channel_pad_shortcut": lambda network, op: ChannelPadShortcut(
        op["stride"], op["out_channels"] - network.input_shape(op)[0]
    ),
    "flatten": without_parameters(lambda op: nn.Flatten()),
    "embedding": embedding,
    "position_embedding": position_embedding,
    "class_token": class_token,
    "patches_to_tokens": without_parameters(lambda op: PatchesToTokens()),
    "select_token": without_parameters(lambda op: SelectToken(op["index"])),
    "lstm": lstm,
    "attention": attention,
    "masked_mean": without_parameters(lambda op: MaskedMean()),
}


# -- losses -----------------------------------------------------------------------------------------------------------
class Trained(nn.Layer):
    """Network and loss in one layer, so that to_static sees both. Returns (loss, output).

    Where an op of the network is the target, what it gives counts as a constant.
    """

    def __init__(self, network, loss):
        nn.Layer.__init__(self)
        self.network = network
        if loss["op"] not in LOSSES:
            raise Unsupported("paddle has no mapping for loss %s" % loss["op"])
        self.loss = LOSSES[loss["op"]]()

    def forward(self, inputs, targets):
        if self.network.target is None:
            output = self.network(inputs)
        else:
            output, targets = self.network(inputs)
            targets = targets.detach()
        return self.loss(output, targets), output


class Inference(nn.Layer):
    """The network's output alone, as a layer of its own for to_static, which changes the layer it is given."""

    def __init__(self, network):
        nn.Layer.__init__(self)
        self.network = network

    def forward(self, inputs):
        return self.network(inputs) if self.network.target is None else self.network(inputs)[0]


def is_static(layer):
    """True when calling the layer runs a graph of to_static."""
    return isinstance(layer.forward, StaticFunction)


#: the mean over the batch, and over time where the logits are (N, T, classes); or over all elements
LOSSES = {"softmax_cross_entropy": nn.CrossEntropyLoss, "mean_squared_error": nn.MSELoss}

"""The ops of the spec as PyTorch's own layers.

`build` turns the op list into a `torch.fx.GraphModule`: its forward is generated straight-line code
(`conv1 = self.conv1(input)`), so a step costs what a hand-written module costs, for a chain as for a network with
branches, and intermediate values are freed at their last use.
"""

import keyword
import operator

import torch
from torch import fx, nn
from torch.nn import functional

from .base import Unsupported

#: what may be overwritten by an in-place ReLU: the backward pass of these ops does not need their own output
OVERWRITABLE = ("conv2d", "linear", "batch_norm", "add")


# -- layers that torch.nn does not have as one class ------------------------------------------------------------------
class TiedLinear(nn.Module):
    """A linear layer with another layer's weight: y = x·Wᵀ + b, or x·W + b when `transpose`."""

    def __init__(self, weight, transpose, bias):
        nn.Module.__init__(self)
        self.weight = weight
        self.transpose = transpose
        self.bias = nn.Parameter(torch.zeros(weight.shape[1 if transpose else 0])) if bias else None

    def forward(self, x):
        return functional.linear(x, self.weight.t() if self.transpose else self.weight, self.bias)


class ChannelPadShortcut(nn.Module):
    """He et al. (2015), option A: every stride-th pixel, zero channels behind."""

    def __init__(self, stride, channels):
        nn.Module.__init__(self)
        self.stride = stride
        self.channels = channels

    def forward(self, x):
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.channels))


class PositionEmbedding(nn.Module):
    """(N, T, width) + a learnt (T, width)."""

    def __init__(self, shape):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        return x + self.weight


class ClassToken(nn.Module):
    """(N, T, width) → (N, T+1, width): a learnt token first."""

    def __init__(self, width):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(1, width))

    def forward(self, x):
        return torch.cat([self.weight.expand(x.shape[0], 1, -1), x], dim=1)


class PatchesToTokens(nn.Module):
    """(N, C, H, W) → (N, H·W, C)."""

    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


class SelectToken(nn.Module):
    """(N, T, width) → (N, width)."""

    def __init__(self, index):
        nn.Module.__init__(self)
        self.index = index

    def forward(self, x):
        return x[:, self.index]


REFUSAL = "torch: framework.space_to_depth=true takes a first convolution of stride 2 over at most 4 channels, not %s"


class SpaceToDepthConv2d(nn.Conv2d):
    """A convolution of stride 2 as one of stride 1 over blocks of 2×2 pixels: the same function of the same parameters.

    As MLPerf's submissions for ResNet-50 compute its first layer: tensor cores get 16 channels in place of 3. Zeros fill kernel and
    channels up (of 7×7×3 to 8×8×4), so it does more operations than the spec counts. `padding`: (left, right, top, bottom), after which
    the size is even.
    """

    def __init__(self, inputs, outputs, kernel, padding, bias):
        nn.Conv2d.__init__(self, inputs, outputs, kernel, stride=2, bias=bias)
        channels = -inputs % 4
        self.fill_input = tuple(padding) + (0, channels)
        self.fill_weight = (0, kernel[1] % 2, 0, kernel[0] % 2, 0, channels)

    def forward(self, x):
        blocks, weight = functional.pad(x, self.fill_input), functional.pad(self.weight, self.fill_weight)
        blocks, weight = functional.pixel_unshuffle(blocks, 2), functional.pixel_unshuffle(weight, 2)
        if not self.weight.is_contiguous():  # channels last
            blocks, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (blocks, weight))
        return functional.conv2d(blocks, weight, self.bias)


class LSTMOutputs(nn.LSTM):
    """nn.LSTM that returns the hidden states of all time steps only."""

    def forward(self, x):
        return nn.LSTM.forward(self, x)[0]


class Attention(nn.Module):
    """Multi-head self-attention; the rows of `qkv.weight` are all queries, all keys, all values."""

    def __init__(self, width, heads, causal):
        nn.Module.__init__(self)
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class MaskedMean(nn.Module):
    """(N, T, width) and tokens (N, T) → (N, width): the mean over the tokens that are not 0 (0 where there is none)."""

    def forward(self, x, tokens):
        mask = (tokens != 0).to(x.dtype)
        return torch.bmm(mask.unsqueeze(1), x).squeeze(1) / mask.sum(1, keepdim=True).clamp(min=1)


# -- the graph --------------------------------------------------------------------------------------------------------
class Network(object):
    """The graph while it grows. `slots` maps the spec's parameter and state names to (module, attribute)."""

    def __init__(self, spec, space_to_depth):
        self.spec = spec
        self.space_to_depth = space_to_depth
        self.ops = {op["name"]: op for op in spec["ops"]}
        self.shapes = {"input": tuple(spec["input"]["shape"])}
        self.uses = {}
        for op in spec["ops"]:
            self.shapes[op["name"]] = tuple(op["shape"])
            for name in op["inputs"]:
                self.uses[name] = self.uses.get(name, 0) + 1
        self.graph = fx.Graph()
        self.nodes = {"input": self.graph.placeholder("input")}
        self.modules = {}
        self.slots = {}

    def layer(self, name, module, *inputs):
        """A node that calls `module`; its attribute has the op's name, made unique."""
        key = name
        while key in self.modules or hasattr(fx.GraphModule, key) or keyword.iskeyword(key):
            key += "_"
        self.modules[key] = module
        return self.graph.call_module(key, inputs)

    def keep(self, op, module, *suffixes):
        """Parameters of `module` whose names are the spec's: `<op>.<suffix>`. Those that are None are left out."""
        for suffix in suffixes:
            if getattr(module, suffix) is not None:
                self.slots["%s.%s" % (op["name"], suffix)] = (module, suffix)

    def finish(self):
        """(network, with_target, slots): GraphModules of the same layers. See `build`."""
        output, with_target = self.nodes[self.spec["output"]], None
        if self.spec["target"]["kind"] == "op":
            graph, copies = fx.Graph(), {}
            graph.graph_copy(self.graph, copies)
            graph.output((copies[output], copies[self.nodes[self.spec["target"]["name"]]]))
            with_target = fx.GraphModule(self.modules, graph, "NetworkWithTarget")
        self.graph.output(output)
        self.graph.lint()
        return fx.GraphModule(self.modules, self.graph, "Network"), with_target, self.slots


def build(spec, space_to_depth=False):
    """(network, with_target, slots) of a spec: the network maps (N, …input shape) to the output of the op `spec["output"]`.

    `with_target` maps it to that and the output of the op that is the target; None where the target is no op.
    `space_to_depth`: the first convolution is a SpaceToDepthConv2d. Raises Unsupported where it can not be.
    """
    network = Network(spec, space_to_depth)
    if space_to_depth and not any(op["op"] == "conv2d" and op["inputs"] == ["input"] for op in spec["ops"]):
        raise Unsupported(REFUSAL % "a network without a convolution of its input")
    for op in spec["ops"]:
        inputs = [network.nodes[name] for name in op["inputs"]]
        network.nodes[op["name"]] = BUILDERS[op["op"]](network, op, *inputs)
    return network.finish()


def linear(network, op, x):
    module = nn.Linear(network.shapes[op["inputs"][0]][-1], op["out"], bias=op["bias"])
    network.keep(op, module, "weight", "bias")
    return network.layer(op["name"], module, x)


def tied_linear(network, op, x):
    owner, attribute = network.slots[op["tied"] + ".weight"]
    module = TiedLinear(getattr(owner, attribute), op["transpose"], op["bias"])
    network.keep(op, module, "bias")
    return network.layer(op["name"], module, x)


def conv2d(network, op, x):
    if network.space_to_depth and op["inputs"] == ["input"]:
        return space_to_depth_conv2d(network, op, x)
    top, bottom, left, right = op["padding"]
    padding = (top, left)
    if top != bottom or left != right:
        x = network.layer(op["name"] + "_pad", nn.ZeroPad2d((left, right, top, bottom)), x)
        padding = 0
    module = nn.Conv2d(
        network.shapes[op["inputs"][0]][0],
        op["out_channels"],
        tuple(op["kernel"]),
        stride=tuple(op["stride"]),
        padding=padding,
        dilation=tuple(op["dilation"]),
        groups=op["groups"],
        bias=op["bias"],
    )
    network.keep(op, module, "weight", "bias")
    return network.layer(op["name"], module, x)


def space_to_depth_conv2d(network, op, x):
    channels, height, width = network.shapes["input"]
    if channels > 4 or op["groups"] != 1 or op["stride"] != [2, 2] or op["dilation"] != [1, 1]:
        raise Unsupported(REFUSAL % op["name"])
    (kh, kw), (oh, ow), (top, _, left, _) = op["kernel"], op["shape"][1:], op["padding"]
    bottom, right = 2 * (oh - 1) + kh + kh % 2 - height - top, 2 * (ow - 1) + kw + kw % 2 - width - left
    module = SpaceToDepthConv2d(channels, op["out_channels"], (kh, kw), (left, right, top, bottom), op["bias"])
    network.keep(op, module, "weight", "bias")
    return network.layer(op["name"], module, x)


def pooled_size(size, kernel, stride, before, after, ceil):
    """Output size of PyTorch's pooling; with ceil, a window must start inside the input or the padding before it."""
    span = size + before + after - kernel
    out = (-(-span // stride) if ceil else span // stride) + 1
    return out - 1 if ceil and (out - 1) * stride >= size + before else out


def native_pooling(network, op):
    """True when PyTorch's pooling takes this padding and gives the spec's shape."""
    top, bottom, left, right = op["padding"]
    sizes = network.shapes[op["inputs"][0]][1:]
    out = tuple(
        pooled_size(size, kernel, stride, pad, pad, op["ceil"])
        for size, kernel, stride, pad in zip(sizes, op["kernel"], op["stride"], (top, left))
    )
    small = 2 * top <= op["kernel"][0] and 2 * left <= op["kernel"][1]
    return top == bottom and left == right and small and out == tuple(op["shape"][1:])


def explicit_padding(network, op):
    """(left, right, top, bottom) after which pooling without padding, rounding down, gives the spec's shape."""
    top, bottom, left, right = op["padding"]
    height, width = network.shapes[op["inputs"][0]][1:]
    (kh, kw), (sh, sw), (oh, ow) = op["kernel"], op["stride"], op["shape"][1:]
    # rounding up means windows that hang over the end
    bottom = max(bottom, (oh - 1) * sh + kh - height - top)
    right = max(right, (ow - 1) * sw + kw - width - left)
    return left, right, top, bottom


def max_pool(network, op, x):
    kernel, stride, padding = tuple(op["kernel"]), tuple(op["stride"]), op["padding"]
    if native_pooling(network, op):
        module = nn.MaxPool2d(kernel, stride, (padding[0], padding[2]), ceil_mode=op["ceil"])
        return network.layer(op["name"], module, x)
    pad = nn.ConstantPad2d(explicit_padding(network, op), -float("inf"))
    return network.layer(op["name"], nn.MaxPool2d(kernel, stride), network.layer(op["name"] + "_pad", pad, x))


def avg_pool(network, op, x):
    kernel, stride, padding = tuple(op["kernel"]), tuple(op["stride"]), op["padding"]
    counted = op["count_include_pad"]
    if native_pooling(network, op):
        module = nn.AvgPool2d(kernel, stride, (padding[0], padding[2]), ceil_mode=op["ceil"], count_include_pad=counted)
        return network.layer(op["name"], module, x)
    pad = explicit_padding(network, op)
    top, bottom, left, right = padding
    if not counted or pad != (left, right, top, bottom):
        raise Unsupported(
            "torch: avg_pool %s can not have padding %s with ceil=%s, count_include_pad=%s"
            % (op["name"], padding, op["ceil"], counted)
        )
    return network.layer(op["name"], nn.AvgPool2d(kernel, stride), network.layer(op["name"] + "_pad", nn.ZeroPad2d(pad), x))


def global_avg_pool(network, op, x):
    x = network.layer(op["name"], nn.AdaptiveAvgPool2d(1), x)
    return network.layer(op["name"] + "_flat", nn.Flatten(), x)


def batch_norm(network, op, x):
    shape = network.shapes[op["inputs"][0]]
    kinds = {1: nn.BatchNorm1d, 3: nn.BatchNorm2d}
    if len(shape) not in kinds:
        raise Unsupported("torch: batch_norm %s takes (C,) or (C, H, W), not %s" % (op["name"], shape))
    module = kinds[len(shape)](shape[0], eps=op["epsilon"], momentum=1 - op["decay"])
    network.keep(op, module, "weight", "bias", "running_mean", "running_var")
    return network.layer(op["name"], module, x)


def layer_norm(network, op, x):
    module = nn.LayerNorm(network.shapes[op["inputs"][0]][-1], eps=op["epsilon"])
    network.keep(op, module, "weight", "bias")
    return network.layer(op["name"], module, x)


def relu(network, op, x):
    # In place, as torchvision's models do, where nothing else reads the input.
    source = op["inputs"][0]
    alone = network.uses[source] == 1 and source != network.spec["output"]
    inplace = alone and source in network.ops and network.ops[source]["op"] in OVERWRITABLE
    return network.layer(op["name"], nn.ReLU(inplace=inplace), x)


def add(network, op, *inputs):
    total = inputs[0]
    for other in inputs[1:]:
        total = network.graph.call_function(operator.add, (total, other))
    return total


def position_embedding(network, op, x):
    module = PositionEmbedding(network.shapes[op["inputs"][0]])
    network.keep(op, module, "weight")
    return network.layer(op["name"], module, x)


def class_token(network, op, x):
    module = ClassToken(network.shapes[op["inputs"][0]][-1])
    network.keep(op, module, "weight")
    return network.layer(op["name"], module, x)


def embedding(network, op, x):
    module = nn.Embedding(op["vocabulary"], op["width"])
    network.keep(op, module, "weight")
    return network.layer(op["name"], module, x)


def lstm(network, op, x):
    module = LSTMOutputs(network.shapes[op["inputs"][0]][-1], op["hidden"], batch_first=True)
    module.bias_hh_l0.requires_grad_(False).zero_()
    for suffix, attribute in (("weight_ih", "weight_ih_l0"), ("weight_hh", "weight_hh_l0"), ("bias", "bias_ih_l0")):
        network.slots["%s.%s" % (op["name"], suffix)] = (module, attribute)
    return network.layer(op["name"], module, x)


def attention(network, op, x):
    module = Attention(network.shapes[op["inputs"][0]][-1], op["heads"], op["causal"])
    for suffix in ("qkv_weight", "qkv_bias", "out_weight", "out_bias"):
        part, attribute = suffix.split("_")
        network.slots["%s.%s" % (op["name"], suffix)] = (getattr(module, part), attribute)
    return network.layer(op["name"], module, x)


def without_parameters(make):
    """A builder for an op whose module is `make(op, input shape)`."""

    def builder(network, op, x):
        return network.layer(op["name"], make(op, network.shapes[op["inputs"][0]]), x)

    return builder


BUILDERS = {
    "linear": linear,
    "tied_linear": tied_linear,
    "conv2d": conv2d,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "global_avg_pool": global_avg_pool,
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "lrn": without_parameters(lambda op, _: nn.LocalResponseNorm(op["size"], alpha=op["alpha"], beta=op["beta"], k=op["k"])),
    "relu": relu,
    "tanh": without_parameters(lambda op, _: nn.Tanh()),
    "sigmoid": without_parameters(lambda op, _: nn.Sigmoid()),
    "softmax": without_parameters(lambda op, _: nn.Softmax(dim=-1)),
    "gelu": without_parameters(lambda op, _: nn.GELU(approximate=op["approximate"])),
    "dropout": without_parameters(lambda op, _: nn.Dropout(op["rate"])),
    "add": add,
    "concat": lambda network, op, *inputs: network.graph.call_function(torch.cat, (list(inputs),), {"dim": 1}),
    "channel_pad_shortcut": without_parameters(lambda op, shape: ChannelPadShortcut(op["stride"], op["out_channels"] - shape[0])),
    "flatten": without_parameters(lambda op, _: nn.Flatten()),
    "embedding": embedding,
    "position_embedding": position_embedding,
    "class_token": class_token,
    "patches_to_tokens": without_parameters(lambda op, _: PatchesToTokens()),
    "select_token": without_parameters(lambda op, _: SelectToken(op["index"])),
    "lstm": lstm,
    "attention": attention,
    "masked_mean": lambda network, op, x, *_: network.layer(op["name"], MaskedMean(), x, network.nodes["input"]),
}


# -- losses -----------------------------------------------------------------------------------------------------------
class CrossEntropy(nn.CrossEntropyLoss):
    """Mean over the batch, and over time where the logits are (N, T, classes)."""

    def forward(self, output, targets):
        return nn.CrossEntropyLoss.forward(self, output.flatten(0, -2), targets.flatten())


class Trained(nn.Module):
    """Network and loss in one module, so that torch.compile sees both. Returns (loss, output without gradient).

    `with_target` (see `build`): the targets then are what an op of the network gives, as a constant.
    """

    def __init__(self, network, loss, with_target=None):
        nn.Module.__init__(self)
        self.network = network
        self.loss = loss
        self.with_target = with_target

    def forward(self, inputs, targets):
        if self.with_target is None:
            output = self.network(inputs)
        else:
            output, targets = self.with_target(inputs)
        # detached: to an output that could have a gradient, a compiled backward pass adds one of zeros
        return self.loss(output, targets.detach()), output.detach()


def build_loss(spec):
    """The loss module of a spec."""
    if spec["loss"]["op"] == "softmax_cross_entropy":
        # (N, classes) needs no reshaping
        return nn.CrossEntropyLoss() if len(output_shape(spec)) == 1 else CrossEntropy()
    if spec["loss"]["op"] == "mean_squared_error":
        return nn.MSELoss()
    raise Unsupported("torch has no mapping for loss %s" % spec["loss"]["op"])


def output_shape(spec):
    """Shape of the output of one sample."""
    return next(tuple(op["shape"]) for op in spec["ops"] if op["name"] == spec["output"])

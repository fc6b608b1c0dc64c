"""Transformers: GPT-2 small (Radford et al. 2019; 124,439,808 parameters) and ViT-B/16 (Dosovitskiy et al. 2021; 86,567,656)."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from types import MappingProxyType

from crosstrain.networks.ops import normal
from crosstrain.networks.spec import Network, Spec, classes, image, tokens

#: standard deviation of the initial weights of both (GPT-2's initializer_range)
STD = 0.02


def gpt2(
    steps: int = 1024,
    vocabulary: int = 50257,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    embedding_dropout: float = 0.0,
    residual_dropout: float = 0.0,
) -> Spec:
    """A causal language model; its head is the token embedding (tied), `steps` positions, a sample is one sequence.

    `embedding_dropout` and `residual_dropout` (0.1 in the original's training) act behind the embeddings and behind each
    attention and feed-forward part; dropout within the attention is left out. What ends in the residual stream starts smaller by
    √(2·layers), as in the original.
    """
    net = Network("gpt2", tokens(steps), classes(vocabulary))
    net.add("embedding", "token", vocabulary=vocabulary, width=width, init=normal(STD))
    net.add("position_embedding", "position", init=normal(STD))
    stream = _dropped(net, "dropout", embedding_dropout)
    for k in range(1, layers + 1):
        stream = _block(net, k, stream, width, heads, causal=True, epsilon=1e-5, approximate="tanh", dropout=residual_dropout)
    net.add("layer_norm", "norm", inputs=stream, epsilon=1e-5)
    net.add("tied_linear", "head", tied="token", transpose=False, bias=False)
    return _smaller_residuals(net.finish(), STD / sqrt(2 * layers))


def vit(
    image_size: int = 224,
    patch: int = 16,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    dropout: float = 0.0,
    num_classes: int = 1000,
) -> Spec:
    """Patches of patch×patch pixels and a class token, whose last state is classified.

    `dropout` (0.1 in the original's training on ImageNet) acts behind the position embedding and behind each attention and
    feed-forward part.
    """
    net = Network("vit", image(3, image_size, image_size), classes(num_classes))
    net.add("conv2d", "patches", out_channels=width, kernel=patch, stride=patch, init="lecun")
    net.add("patches_to_tokens", "tokens")
    net.add("class_token", "class_token")
    net.add("position_embedding", "position", init=normal(STD))
    stream = _dropped(net, "dropout", dropout)
    for k in range(1, layers + 1):
        stream = _block(net, k, stream, width, heads, causal=False, epsilon=1e-6, approximate="none", dropout=dropout)
    net.add("layer_norm", "norm", inputs=stream, epsilon=1e-6)
    net.add("select_token", "first", index=0)
    net.add("linear", "head", out=num_classes, init=normal(STD))
    return net.finish()


def _block(
    net: Network, k: int, stream: str, width: int, heads: int, *, causal: bool, epsilon: float, approximate: str, dropout: float
) -> str:
    """x + attention(norm(x)), then x + feed-forward(norm(x)), four times as wide inside. Returns the last op's name."""
    net.add("layer_norm", f"block{k}_norm1", inputs=stream, epsilon=epsilon)
    net.add("attention", f"block{k}_attention", heads=heads, causal=causal, init=normal(STD))
    branch = _dropped(net, f"block{k}_dropout1", dropout)
    stream = net.add("add", f"block{k}_add1", inputs=[stream, branch])
    net.add("layer_norm", f"block{k}_norm2", epsilon=epsilon)
    net.add("linear", f"block{k}_fc1", out=4 * width, init=normal(STD))
    net.add("gelu", f"block{k}_gelu", approximate=approximate)
    net.add("linear", f"block{k}_fc2", out=width, init=normal(STD))
    branch = _dropped(net, f"block{k}_dropout2", dropout)
    return net.add("add", f"block{k}_add2", inputs=[stream, branch])


def _dropped(net: Network, name: str, rate: float) -> str:
    """The name of the op before, or of a dropout behind it."""
    return net.add("dropout", name, rate=rate) if rate else net.ops[-1].name


def _smaller_residuals(spec: Spec, std: float) -> Spec:
    """With the initial weights of each block's two last layers at this standard deviation."""
    ends = ("_attention.out_weight", "_fc2.weight")
    init = MappingProxyType(dict(normal(std)))
    return replace(spec, parameters=tuple(replace(p, init=init) if p.name.endswith(ends) else p for p in spec.parameters))

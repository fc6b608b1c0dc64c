"""Pieces that several image networks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crosstrain.errors import ConfigError
from crosstrain.networks.spec import Network


def widths(width_multiplier: float) -> Callable[[int], int]:
    """A function from a layer's published width to width · width_multiplier. Raises ConfigError where that is no whole number ≥ 1."""

    def scaled(width: int) -> int:
        product = width * width_multiplier
        if product < 1 or product != int(product):
            raise ConfigError(
                f"width_multiplier={width_multiplier:g}: a layer of {width} would get {product:g}, must be a whole number ≥ 1"
            )
        return int(product)

    return scaled


def stages(argument: str, counts: Sequence[int], channels: Sequence[int]) -> list[tuple[int, int]]:
    """(channels, number of blocks) of each stage. Raises ConfigError naming `argument` where there are none or too many stages."""
    if not 1 <= len(counts) <= len(channels) or not all(isinstance(count, int) and count >= 1 for count in counts):
        raise ConfigError(f"{argument}={list(counts)} must be 1 to {len(channels)} whole numbers ≥ 1, one for each stage")
    return list(zip(channels, counts, strict=False))


def conv_relu(net: Network, name: str, out_channels: int, kernel: int, **attributes: Any) -> str:
    """Convolution `name` and ReLU `name`_relu; returns the ReLU's name.

    Glorot's initial weights, here and in `classifier`: max pools raise the activations, and with He's the large networks start with a
    loss of 10 to 40 and diverge at the studies' learning rate of 0.01; with these it starts at ln(classes) and falls.
    """
    net.add("conv2d", name, out_channels=out_channels, kernel=kernel, **attributes)
    return net.add("relu", f"{name}_relu")


def conv_norm(
    net: Network, name: str, out_channels: int, kernel: int, stride: int = 1, inputs: str | None = None, relu: bool = True
) -> str:
    """Convolution `name` without bias (padding kernel // 2), batch norm `name`_bn and, unless relu=false, ReLU `name`_relu."""
    net.add("conv2d", name, inputs, "he", out_channels=out_channels, kernel=kernel, stride=stride, padding=kernel // 2, bias=False)
    last = net.add("batch_norm", f"{name}_bn")
    return net.add("relu", f"{name}_relu") if relu else last


def classifier(net: Network, first: int, hidden: Sequence[int], num_classes: int, dropout: float = 0.0) -> None:
    """Flatten; `hidden` fully connected layers with ReLU (and dropout, when above 0); num_classes logits.

    The layers are named fc<first>, fc<first + 1>, ….
    """
    net.add("flatten", "flat")
    for i, width in enumerate(hidden, first):
        net.add("linear", f"fc{i}", out=width)
        net.add("relu", f"fc{i}_relu")
        if dropout > 0:
            net.add("dropout", f"fc{i}_dropout", rate=dropout)
    net.add("linear", f"fc{first + len(hidden)}", out=num_classes)

"""GoogLeNet (Szegedy et al. 2015) as in convnet-benchmarks: 6,998,552 parameters."""

from __future__ import annotations

from collections.abc import Sequence

from crosstrain.errors import ConfigError
from crosstrain.networks.blocks import conv_relu, widths
from crosstrain.networks.spec import Network, Spec, classes, image

#: Widths of the inception modules: 1×1; 3×3 reduce, 3×3; 5×5 reduce, 5×5; 1×1 behind the pool.
INCEPTIONS: dict[str, Sequence[int]] = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def googlenet(modules: Sequence[str] = tuple(INCEPTIONS), num_classes: int = 1000, size: int = 224, width_multiplier: float = 1.0) -> Spec:
    """conv 64-7/2 p3, max, conv 64-1, conv 192-3 p1, max, inception modules, mean over the map, fc; input (3, size, size).

    `modules`: names of INCEPTIONS in this order, all nine in GoogLeNet; where the number in the name changes, a max stands before.
    No LRN, dropout or auxiliary heads, and no ReLU on the logits (convnet-benchmarks has one). max is 3/2 p1, so that 224 → 112 → 56
    → 28 → 14 → 7.
    """
    width = widths(width_multiplier)
    net = Network("googlenet", image(3, size, size), classes(num_classes))
    conv_relu(net, "conv1", width(64), 7, stride=2, padding=3)
    net.add("max_pool", "pool1", kernel=3, stride=2, padding=1)
    conv_relu(net, "conv2", width(64), 1)
    conv_relu(net, "conv3", width(192), 3, padding=1)
    last = net.add("max_pool", "pool3", kernel=3, stride=2, padding=1)
    for before, name in zip(("3", *modules), modules, strict=False):
        if name not in INCEPTIONS:
            raise ConfigError(f"modules={list(modules)}: {name!r} is not one of {', '.join(INCEPTIONS)}")
        if name[0] != before[0]:
            last = net.add("max_pool", f"pool{name[0]}", kernel=3, stride=2, padding=1)
        last = _inception(net, f"inception_{name}", [width(count) for count in INCEPTIONS[name]], last)
    net.add("global_avg_pool", "mean")
    net.add("linear", "fc", out=num_classes)
    return net.finish()


def _inception(net: Network, name: str, channels: Sequence[int], source: str) -> str:
    one, three_reduce, three, five_reduce, five, pool = channels
    branches = [conv_relu(net, f"{name}_1x1", one, 1, inputs=source)]
    conv_relu(net, f"{name}_3x3_reduce", three_reduce, 1, inputs=source)
    branches.append(conv_relu(net, f"{name}_3x3", three, 3, padding=1))
    conv_relu(net, f"{name}_5x5_reduce", five_reduce, 1, inputs=source)
    branches.append(conv_relu(net, f"{name}_5x5", five, 5, padding=2))
    net.add("max_pool", f"{name}_pool", inputs=source, kernel=3, stride=1, padding=1)
    branches.append(conv_relu(net, f"{name}_pool_1x1", pool, 1))
    return net.add("concat", name, inputs=branches)

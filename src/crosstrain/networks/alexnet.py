"""AlexNet in its published forms.

alexnet_r (85,098 parameters) and alexnet_s (62,378,344): Shi et al.; alexnet_owt (61,100,840): "One weird trick" (Krizhevsky
2014) as in convnet-benchmarks; alexnet_lrn (60,965,224): Krizhevsky et al. 2012 as in Bahrampour et al.

On 224×224 all three large ones pad the first convolution by 2, so that pools that round down give 55 → 27 → 13 → 6: unpadded
(Caffe) 6×6 is reached only with pools that round up, and with TensorFlow's SAME padding the map is 7×7 and AlexNet-S has
76,009,832 parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from crosstrain.networks.blocks import classifier, conv_relu, widths
from crosstrain.networks.spec import Network, Spec, classes, image


def alexnet_r(num_classes: int = 10) -> Spec:
    """conv 32-5 p2, max 3/2, ReLU, conv 32-5 p2, ReLU, max 3/2, conv 64-5 p2, ReLU, avg 3/2, fc; input (3, 32, 32).

    Pools round down (32 → 15 → 7 → 3) and there is no ReLU on the logits: some published versions differ in both.
    """
    net = Network("alexnet_r", image(3, 32, 32), classes(num_classes))
    net.add("conv2d", "conv1", out_channels=32, kernel=5, padding=2, init="he")
    net.add("max_pool", "pool1", kernel=3, stride=2)
    net.add("relu", "relu1")
    net.add("conv2d", "conv2", out_channels=32, kernel=5, padding=2, init="he")
    net.add("relu", "relu2")
    net.add("max_pool", "pool2", kernel=3, stride=2)
    net.add("conv2d", "conv3", out_channels=64, kernel=5, padding=2, init="he")
    net.add("relu", "relu3")
    net.add("avg_pool", "pool3", kernel=3, stride=2)
    net.add("flatten", "flat")
    net.add("linear", "fc1", out=num_classes)
    return net.finish()


def alexnet_s(num_classes: int = 1000, size: int = 224, width_multiplier: float = 1.0) -> Spec:
    """Filters 96, 256, 384, 384, 256, one tower, no LRN, no dropout; input (3, size, size)."""
    return _large("alexnet_s", (96, 256, 384, 384, 256), num_classes, size, width_multiplier)


def alexnet_owt(num_classes: int = 1000, size: int = 224, width_multiplier: float = 1.0) -> Spec:
    """Filters 64, 192, 384, 256, 256, one tower, no LRN, no dropout; input (3, size, size)."""
    return _large("alexnet_owt", (64, 192, 384, 256, 256), num_classes, size, width_multiplier)


def alexnet_lrn(
    num_classes: int = 1000,
    size: int = 224,
    width_multiplier: float = 1.0,
    groups: int = 2,
    lrn: bool = True,
    lrn_alpha: float = 1e-4,
    dropout: float = 0.5,
) -> Spec:
    """Filters 96, 256, 384, 384, 256; conv 2, 4, 5 in `groups`, LRN (5, lrn_alpha, 0.75) after the first two, dropout.

    Ungrouped (groups=1) it has 62,378,344 parameters, as AlexNet-S. LRN has Caffe's form: k = 1, lrn_alpha divided by the window's 5.
    """
    filters = (96, 256, 384, 384, 256)
    return _large("alexnet_lrn", filters, num_classes, size, width_multiplier, groups, lrn_alpha if lrn else None, dropout)


def _large(
    name: str,
    filters: Sequence[int],
    num_classes: int,
    size: int,
    width_multiplier: float,
    groups: int = 1,
    lrn_alpha: float | None = None,
    dropout: float = 0.0,
) -> Spec:
    """conv 11/4 p2, max 3/2, conv 5 p2, max 3/2, three conv 3 p1, max 3/2, fc 4096-4096; ReLU after all but the last.

    `lrn_alpha`: None = no LRN.
    """
    width = widths(width_multiplier)
    net = Network(name, image(3, size, size), classes(num_classes))

    def reduce(number: int) -> None:
        if lrn_alpha is not None and number < 5:
            net.add("lrn", f"norm{number}", size=5, alpha=lrn_alpha, beta=0.75, k=1.0)
        net.add("max_pool", f"pool{number}", kernel=3, stride=2)

    one, two, three, four, five = (width(count) for count in filters)
    conv_relu(net, "conv1", one, 11, stride=4, padding=2)
    reduce(1)
    conv_relu(net, "conv2", two, 5, padding=2, groups=groups)
    reduce(2)
    conv_relu(net, "conv3", three, 3, padding=1)
    conv_relu(net, "conv4", four, 3, padding=1, groups=groups)
    conv_relu(net, "conv5", five, 3, padding=1, groups=groups)
    reduce(5)
    classifier(net, 6, [width(4096)] * 2, num_classes, dropout)
    return net.finish()

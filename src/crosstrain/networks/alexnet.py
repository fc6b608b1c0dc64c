"""AlexNet-R of Shi et al. for CIFAR-10 (cuda-convnet's layers-18pct without LRN): 85,098 parameters."""

from __future__ import annotations

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

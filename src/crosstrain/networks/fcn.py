"""Fully connected networks with sigmoid hidden layers, as in Shi et al. (FCN-R has 14,205,962 parameters)."""

from __future__ import annotations

from collections.abc import Sequence

from crosstrain.networks.spec import Network, Spec, classes, vector


def fcn(inputs: int, hidden: Sequence[int], num_classes: int) -> Spec:
    """inputs → hidden… (sigmoid each) → num_classes logits.

    The initial weights are Glorot's for the sigmoid (four times the usual): with the usual ones three sigmoid layers hardly train.
    """
    net = Network("fcn", vector(inputs), classes(num_classes))
    for i, width in enumerate(hidden, 1):
        net.add("linear", f"fc{i}", out=width, init="glorot_sigmoid")
        net.add("sigmoid", f"sigmoid{i}")
    net.add("linear", f"fc{len(hidden) + 1}", out=num_classes)
    return net.finish()

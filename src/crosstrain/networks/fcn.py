"""Fully connected networks with sigmoid hidden layers, as in Shi et al.

fcn_r has 14,205,962 parameters; fcn_s (the paper's four hidden layers) 122,194,048, fcn_s_code (the three of the released code)
117,997,696, fcn_8 (six) 130,586,752. The "≈ 55 M" in the paper's text fits none of them.
"""

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

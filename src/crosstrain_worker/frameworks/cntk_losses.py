"""The losses of the spec with CNTK's own ops, and the share of wrong answers."""

import cntk as C
import numpy

from . import cntk_layers as layers
from .base import Unsupported


class Criterion(object):
    """`loss` and `wrong` (share of wrong answers, None without classes) of a network: of each sample, or of each token of a sequence.

    `targets` is the variable that takes the targets, None where the network or its input gives them. `losses` and `answers`: how many
    of each a sample has.
    """

    def __init__(self, network, spec):
        output = network.output
        self.targets, self.wrong = None, None
        shape = next(tuple(op["shape"]) for op in spec["ops"] if op["name"] == spec["output"])
        self.answers = int(numpy.prod(shape[:-1]))
        self.losses = 1
        if spec["loss"]["op"] == "softmax_cross_entropy":
            self.cross_entropy(output)
        elif spec["loss"]["op"] == "mean_squared_error":
            self.squared_error(network, spec, network.static(spec["output"]))
        else:
            raise Unsupported("cntk has no mapping for loss %s" % spec["loss"]["op"])

    def cross_entropy(self, output):
        """From logits; class indices travel as numbers and become sparse one-hot vectors on the device."""
        classes = output.shape[-1]
        if layers.is_sequence(output):
            self.targets, self.losses = C.sequence.input_variable((), name="targets"), self.answers
        else:
            self.targets = C.input_variable(output.shape[:-1], name="targets")
        if len(output.shape) == 1:
            wanted = C.one_hot(self.targets, classes, sparse_output=True)
            self.loss = C.cross_entropy_with_softmax(output, wanted)
            self.wrong = C.classification_error(output, wanted)
            return
        wanted = C.one_hot(self.targets, classes)
        self.loss = C.reduce_mean(C.reduce_log_sum_exp(output, axis=-1) - C.reduce_sum(output * wanted, axis=-1))
        chosen = C.reshape(C.argmax(output, axis=-1), output.shape[:-1])
        self.wrong = C.reduce_mean(C.not_equal(chosen, self.targets))

    def squared_error(self, network, spec, output):
        kind = spec["target"]["kind"]
        if kind == "op":
            wanted = C.stop_gradient(network.target)
        elif kind == "input":
            wanted = network.input
        else:
            wanted = self.targets = C.input_variable(output.shape, name="targets")
        self.loss = C.squared_error(output, wanted) / float(numpy.prod(output.shape))

"""The functions of JAX that an iteration is made of. Their arguments are all they read: nothing of theirs changes but by their results.

Arrays go by the spec's names, in Flax's layouts: `trained`, `frozen` and `states` are dicts of them. `key` is the random key of dropout,
None in evaluation and where the network has none. `targets` is None where the input or an op of the network is the target.
"""

import functools

import jax
import optax
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from . import jax_layers as layers

#: whether replicas have all of an array, or each its own part along the first axis
WHOLE, PART = PartitionSpec(), PartitionSpec("replicas")


class Functions(object):
    """The functions of one network, optimiser (of Optax) and number of replicas.

    With several replicas they are mapped over the mesh axis `replicas`: each sees its part of the batch, and its own states, which
    then have a first axis of replicas.
    """

    def __init__(self, spec, network, places, optimizer, replicas):
        self.network = network
        self.places = places
        self.optimizer = optimizer
        self.loss = layers.loss_of(spec)
        self.several = replicas > 1
        self.classes = spec["loss"]["op"] == "softmax_cross_entropy"
        self.random = any(op["op"] == "dropout" and op["rate"] > 0 for op in spec["ops"])

    # -- ready to be called -----------------------------------------------------------------------------------------------
    def train(self, mesh, compiled, counting):
        """(trained, momentum, states, key, frozen, inputs, targets) → (the first four anew, loss, correct answers or None).

        The memory of the first four is given to the new ones.
        """
        given = (WHOLE, WHOLE, PART, WHOLE, WHOLE, PART, PART)
        gives = (WHOLE, WHOLE, PART, WHOLE, WHOLE, WHOLE)
        return self.ready(functools.partial(self.train_step, counting), mesh, compiled, given, gives, donated=(0, 1, 2, 3))

    def gradients(self, mesh, compiled):
        """(trained, frozen, states, key, inputs, targets) → (mean loss, gradients, new states)."""
        given = (WHOLE, WHOLE, PART, WHOLE, PART, PART)
        return self.ready(self.gradient_step, mesh, compiled, given, (WHOLE, WHOLE, PART))

    def outputs(self, mesh, compiled, training):
        """(trained, frozen, states, key, inputs) → the network's output."""
        given = (WHOLE, WHOLE, PART, WHOLE, PART)
        return self.ready(functools.partial(self.output, training), mesh, compiled, given, PART)

    def ready(self, function, mesh, compiled, given, gives, donated=()):
        if self.several:
            function = jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=gives, check_vma=False)
        return jax.jit(function, donate_argnums=donated) if compiled else function

    # -- forward and backward ---------------------------------------------------------------------------------------------
    def apply(self, training, trained, frozen, states, key, inputs):
        """(output, target, new states); target is None where no op of the network is one."""
        arrays = dict(trained)
        arrays.update(frozen)
        arrays.update(states)
        (output, target), changed = self.network.apply(
            layers.nested(self.places, arrays),
            inputs,
            training,
            rngs={"dropout": key} if training and self.random else None,
            mutable=["batch_stats"] if training else [],
        )
        return output, target, layers.flat(self.places, changed, states) if training else states

    def loss_and_output(self, training, trained, frozen, states, key, inputs, targets):
        """(mean loss, (output, targets, new states))."""
        output, target, states = self.apply(training, trained, frozen, states, key, inputs)
        if target is not None:
            targets = lax.stop_gradient(target)
        elif targets is None:
            targets = inputs
        return self.loss(output, targets), (output, targets, states)

    def loss_and_gradients(self, trained, frozen, states, key, inputs, targets):
        """(mean loss, gradients, (output, targets), new states), the first two of the global batch."""
        run = jax.value_and_grad(lambda weights, *others: self.loss_and_output(True, weights, *others), has_aux=True)
        (loss, (output, targets, states)), gradients = run(trained, frozen, self.own(states), self.own_key(key), inputs, targets)
        if self.several:
            loss, gradients = jax.tree.map(lambda array: lax.pmean(array, "replicas"), (loss, gradients))
        return loss, gradients, (output, targets), self.not_own(states)

    def gradient_step(self, *arguments):
        loss, gradients, _, states = self.loss_and_gradients(*arguments)
        return loss, gradients, states

    def train_step(self, counting, trained, momentum, states, key, frozen, inputs, targets):
        now = key
        if self.random:
            key, now = jax.random.split(key)
        loss, gradients, answers, states = self.loss_and_gradients(trained, frozen, states, now, inputs, targets)
        updates, momentum = self.optimizer.update(gradients, momentum, trained)
        correct = None
        if counting:
            correct = self.correct(*answers)
            correct = lax.psum(correct, "replicas") if self.several else correct
        return optax.apply_updates(trained, updates), momentum, states, key, loss, correct

    def output(self, training, trained, frozen, states, key, inputs):
        return self.apply(training, trained, frozen, self.own(states), self.own_key(key), inputs)[0]

    def judged(self, trained, frozen, states, inputs, targets):
        """(mean loss, correct answers) in evaluation mode, with the first replica's states. Not to be mapped over the replicas."""
        loss, (output, targets, _) = self.loss_and_output(False, trained, frozen, self.own(states), None, inputs, targets)
        return loss, self.correct(output, targets)

    def correct(self, output, targets):
        """Number of correct answers."""
        return (output.argmax(-1) == targets).sum() if self.classes else jnp.zeros((), "int32")

    # -- several replicas -------------------------------------------------------------------------------------------------
    def own(self, states):
        """Without their axis of replicas: of the one that computes, or of the first."""
        return {name: array[0] for name, array in states.items()} if self.several else states

    def not_own(self, states):
        return {name: array[None] for name, array in states.items()} if self.several else states

    def own_key(self, key):
        """Other dropout masks in each replica."""
        return jax.random.fold_in(key, lax.axis_index("replicas")) if self.several and key is not None else key


def first_element(array):
    return array[(0,) * array.ndim]

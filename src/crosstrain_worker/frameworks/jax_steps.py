"""The functions of JAX that an iteration is made of. Their arguments are all they read: nothing of theirs changes but by their results.

Arrays go by the spec's names, in Flax's layouts: `trained`, `frozen` and `states` are dicts of them. `key` is the random key of dropout,
None in evaluation and where the network has none. `scale` is the state of the loss scaling (Flax's DynamicScale), None without it.
`targets` is None where the input or an op of the network is the target.
"""

import functools

import jax
import optax
from flax.training.dynamic_scale import DynamicScale
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
    def start(self, scaling, trained):
        """(momentum, scale) before the first step. The scale's arrays have their final types, or the second step would compile anew."""
        scale = DynamicScale(fin_steps=jnp.zeros((), "int32"), scale=jnp.full((), DynamicScale.scale, "float32"))
        return self.optimizer.init(trained), scale if scaling else None

    def train(self, mesh, compiled, counting):
        """((trained, momentum, scale, states, key), frozen, inputs, targets) → (the first five anew, loss, correct answers or None).

        The memory of the first five is given to the new ones.
        """
        carried = (WHOLE, WHOLE, WHOLE, PART, WHOLE)
        function = functools.partial(self.train_step, counting)
        return self.ready(function, mesh, compiled, (carried, WHOLE, PART, PART), (carried, WHOLE, WHOLE), donated=0)

    def gradients(self, mesh, compiled):
        """(trained, scale, frozen, states, key, inputs, targets) → (mean loss, gradients, new states)."""
        given = (WHOLE, WHOLE, WHOLE, PART, WHOLE, PART, PART)
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

    def loss_and_gradients(self, trained, scale, frozen, states, key, inputs, targets):
        """(mean loss, gradients, (output, targets), new states, new scale, whether all gradients are finite).

        Loss and gradients are those of the global batch, without the scale. Without loss scaling nobody asks whether they are finite:
        True.
        """

        def forward(weights, *others):
            return self.loss_and_output(True, weights, *others)

        arguments = (trained, frozen, self.own(states), self.own_key(key), inputs, targets)
        if scale is None:
            finite = True
            (loss, (output, targets, states)), gradients = jax.value_and_grad(forward, has_aux=True)(*arguments)
            gradients = self.mean(gradients)
        else:
            # over the replicas before it looks whether they are finite: all decide alike
            run = scale.value_and_grad(forward, has_aux=True, axis_name="replicas" if self.several else None)
            scale, finite, (loss, (output, targets, states)), gradients = run(*arguments)
        return self.mean(loss), gradients, (output, targets), self.not_own(states), scale, finite

    def gradient_step(self, *arguments):
        loss, gradients, _, states, _, _ = self.loss_and_gradients(*arguments)
        return loss, gradients, states

    def train_step(self, counting, carried, frozen, inputs, targets):
        trained, momentum, scale, states, key = carried
        now = key
        if self.random:
            key, now = jax.random.split(key)
        scaling = scale is not None
        loss, gradients, answers, states, scale, finite = self.loss_and_gradients(trained, scale, frozen, states, now, inputs, targets)
        updates, after = self.optimizer.update(gradients, momentum, trained)
        after = (optax.apply_updates(trained, updates), after)
        if scaling:
            # no update from gradients that overflowed; running statistics change all the same, as in PyTorch
            after = jax.tree.map(functools.partial(jnp.where, finite), after, (trained, momentum))
        correct = None
        if counting:
            correct = self.correct(*answers)
            correct = lax.psum(correct, "replicas") if self.several else correct
        return after + (scale, states, key), loss, correct

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

    def mean(self, values):
        """Over the replicas."""
        return jax.tree.map(lambda array: lax.pmean(array, "replicas"), values) if self.several else values

    def own_key(self, key):
        """Other dropout masks in each replica."""
        return jax.random.fold_in(key, lax.axis_index("replicas")) if self.several and key is not None else key


def first_element(array):
    return array[(0,) * array.ndim]

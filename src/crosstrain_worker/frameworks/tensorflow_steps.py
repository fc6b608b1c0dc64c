"""What one replica does with one batch: forward, backward, reduction, update, evaluation. `on_tensorflow` compiles these."""

import tensorflow as tf

from .base import Unsupported
from .tensorflow_layers import Mode, build_loss

#: fp16: Keras's LossScaleOptimizer starts with this scale and doubles it after so many good steps
FIRST_SCALE, GROWTH_STEPS = 2.0**15, 2000


class Steps(object):
    """The steps of `network`, with the optimiser of `run` and its state.

    Built under the strategy's scope, where there is one. `trained`: the spec's entries of the trained parameters; `hvd`: Horovod's
    module, where it is what reduces.
    """

    def __init__(self, run, network, trained, strategy, hvd):
        self.network = network
        self.strategy = strategy
        self.hvd = hvd
        self.replicas = run["replicas"]
        self.seed = run["seed"]
        spec = run["network"]
        self.losses = build_loss(spec)
        self.classes = spec["loss"]["op"] == "softmax_cross_entropy"
        self.own_target = spec["target"]["kind"] == "op"
        self.trained = [network.slots[parameter["name"]].variable for parameter in trained]
        wanted = run["optimizer"]
        if wanted["name"] != "sgd":
            raise Unsupported("tensorflow: this adapter has no mapping for optimizer %s" % wanted["name"])
        self.rate, self.momentum, self.clip_norm = wanted["learning_rate"], wanted["momentum"], wanted["clip_norm"]
        self.decays = [wanted["weight_decay"] if parameter["decay"] else 0.0 for parameter in trained]
        self.velocities = [self.hidden(tf.zeros_like(variable)) if self.momentum else None for variable in self.trained]
        #: dropout's random numbers start from this: the seed, then the steps since `forget`
        self.count = self.hidden(tf.zeros((), tf.int64))
        self.scaled = run["precision"] == "fp16"
        if self.scaled:
            self.scale, self.good_steps = self.hidden(FIRST_SCALE), self.hidden(0)

    def hidden(self, value):
        return tf.Variable(value, trainable=False)

    def forget(self):
        """As before the first step."""
        for velocity in self.velocities if self.momentum else ():
            velocity.assign(tf.zeros_like(velocity))
        self.count.assign(self.seed % 2**31 * 2**32)
        if self.scaled:
            self.scale.assign(FIRST_SCALE)
            self.good_steps.assign(0)

    # -- training ----------------------------------------------------------------------------------------------------------
    def train(self, inputs, targets, counting):
        """One training step. (loss, number of correct answers or None)."""
        loss, correct, gradients = self.backward(inputs, targets, True, counting)
        gradients = self.reduced(gradients)
        if self.scaled:
            self.update_scaled(gradients)
        else:
            self.update(gradients)
        self.count.assign_add(1)
        return loss, correct

    def gradient(self, inputs, targets, counting):
        """`train` without the update: (loss, correct or None, gradients). What is not returned would not be computed."""
        loss, correct, gradients = self.backward(inputs, targets, True, counting)
        return loss, correct, self.reduced(gradients)

    def gradients(self, inputs, targets):
        """The gradients alone; running statistics stay."""
        return self.reduced(self.backward(inputs, targets, False, False)[2])

    def backward(self, inputs, targets, updated, counting):
        """(loss, correct answers or None, gradients of the trained variables): this replica's, of its mean loss."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.trained)
            losses, output, targets = self.answers(Mode(True, updated, self.start()), inputs, targets)
            loss = tf.reduce_mean(losses)
            scaled = loss * self.scale if self.scaled else loss
        gradients = tape.gradient(scaled, self.trained, unconnected_gradients="zero")
        # An embedding's gradient is a sparse one. Densely, as everywhere, momentum and decay go on for words not in the batch.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if self.scaled:
            gradients = [gradient / self.scale for gradient in gradients]
        return loss, self.correct(output, targets) if counting else None, gradients

    def start(self):
        """Differs for each step and replica."""
        if self.hvd is not None:
            return self.count * self.replicas + self.hvd.rank()
        if self.strategy is not None:
            return self.count * self.replicas + tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
        return self.count.read_value()

    def answers(self, mode, inputs, targets):
        """(losses, output, targets); where an op of the network is the target, what it gives is a constant."""
        values = self.network(mode, inputs)
        if self.own_target:
            targets = tf.stop_gradient(values[1])
        return self.losses(values[0], targets), values[0], targets

    def correct(self, output, targets):
        """Number of correct answers, on the device."""
        if not self.classes:
            return tf.zeros((), tf.int64)
        return tf.reduce_sum(tf.cast(tf.argmax(output, -1) == tf.cast(targets, tf.int64), tf.int64))

    def reduced(self, gradients):
        """The means over the replicas."""
        if self.hvd is not None:
            # one by one, as DistributedGradientTape does: each starts when it is there, and Horovod puts small ones together
            return [self.hvd.allreduce(gradient, op=self.hvd.Average) for gradient in gradients]
        if self.strategy is None:
            return gradients
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients)

    def update(self, gradients):
        """Clip by the global norm, decay, momentum: in place, by TensorFlow's own kernel of `v = momentum·v + g; w -= rate·v`.

        Keras's SGD has another form: its weight decay bypasses the momentum.
        """
        if self.clip_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self.clip_norm)
        for variable, velocity, decay, gradient in zip(self.trained, self.velocities, self.decays, gradients):
            if decay:
                gradient += decay * variable
            if velocity is None:
                tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=self.rate, delta=gradient)
            else:
                tf.raw_ops.ResourceApplyMomentum(
                    var=variable.handle, accum=velocity.handle, lr=self.rate, grad=gradient, momentum=self.momentum
                )

    def update_scaled(self, gradients):
        """fp16: no update where a gradient overflowed, and the scale of the next loss."""
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])

        def apply():
            self.update(gradients)
            return tf.constant(True)

        tf.cond(finite, apply, lambda: tf.constant(False))
        good = tf.where(finite, self.good_steps + 1, 0)
        grown = tf.where(good >= GROWTH_STEPS, self.scale * 2.0, self.scale)
        self.scale.assign(tf.where(finite, grown, tf.maximum(self.scale / 2.0, 1.0)))
        self.good_steps.assign(good % GROWTH_STEPS)

    # -- without training ----------------------------------------------------------------------------------------------------
    def infer(self, inputs):
        return self.network(Mode(False, False, None), inputs)[0]

    def output(self, inputs):
        """In training mode, without any update."""
        return self.network(Mode(True, False, self.start()), inputs)[0]

    def sums(self, inputs, targets):
        """Evaluation: (sum of the losses, their number, correct answers)."""
        losses, output, targets = self.answers(Mode(False, False, None), inputs, targets)
        return tf.reduce_sum(losses), tf.size(losses), self.correct(output, targets)

"""A training loop on a GPU as one writes it by hand in JAX and Flax, without crosstrain: what gpu_step.py compares the measured step with.

Usage: <a Python with JAX> gpu_loop_jax.py NETWORK PRECISION BATCH SECONDS. Prints a JSON object: the median over blocks of at least 0.5 s
(`step_ms`), in milliseconds per iteration.
"""

import functools
import itertools
import json
import os
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import optax
from flax import linen as nn
from flax.training.dynamic_scale import DynamicScale
from jax import numpy as jnp

BLOCK_S = 0.5
TYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
MATMUL = {"fp32": "highest", "tf32": "tensorfloat32"}


class Bottleneck(nn.Module):
    width: int
    stride: int
    stride_in_3x3: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        first, second = (1, self.stride) if self.stride_in_3x3 else (self.stride, 1)
        y = nn.relu(norm()(conv(self.width, (1, 1), first)(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), second, padding=1)(y)))
        y = norm()(conv(4 * self.width, (1, 1))(y))
        if self.stride > 1 or x.shape[3] != 4 * self.width:
            x = norm()(conv(4 * self.width, (1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """As published, or (v1.5) with the stride in the 3x3 convolution."""

    stride_in_3x3: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(64, (7, 7), 2, padding=3, use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage, count in enumerate((3, 4, 6, 3)):
            for block in range(count):
                x = Bottleneck(64 * 2**stage, 2 if stage and not block else 1, self.stride_in_3x3, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


class FCNS(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        # what crosstrain starts from: sigmoids that saturate draw more power than those that stay at 0.5, and power limits the clock
        init = nn.initializers.variance_scaling(16, "fan_avg", "uniform")
        for _ in range(4):
            x = nn.sigmoid(nn.Dense(2048, kernel_init=init, dtype=self.dtype)(x))
        return nn.Dense(26752, kernel_init=init, dtype=self.dtype)(x)


#: network: (model of this type, shape of an input, classes, momentum)
NETWORKS = {
    "resnet50": (functools.partial(ResNet50, False), (224, 224, 3), 1000, 0.9),
    "resnet50_v1.5": (functools.partial(ResNet50, True), (224, 224, 3), 1000, 0.9),
    "fcn_s": (FCNS, (26752,), 26752, None),
}


def loop(network, precision, batch):
    """(one iteration, wait): a function that starts an iteration, and one that waits for all that was started."""
    make, shape, classes, momentum = NETWORKS[network]
    jax.config.update("jax_default_matmul_precision", MATMUL.get(precision))
    model = make(dtype=TYPES.get(precision, jnp.float32))
    optimizer = optax.sgd(0.01, momentum=momentum)
    variables = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, *shape)))
    params, stats = variables["params"], variables.get("batch_stats", {})

    def loss_of(params, stats, inputs, targets):
        logits, changed = model.apply({"params": params, "batch_stats": stats}, inputs, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()
        return loss, changed.get("batch_stats", {})

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
    def step(params, stats, momenta, scale, inputs, targets):
        if scale is None:
            (loss, stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, stats, inputs, targets)
            finite = True
        else:
            scale, finite, (loss, stats), gradients = scale.value_and_grad(loss_of, has_aux=True)(params, stats, inputs, targets)
        updates, new_momenta = optimizer.update(gradients, momenta, params)
        new = optax.apply_updates(params, updates), new_momenta
        if scale is not None:
            new = jax.tree.map(functools.partial(jnp.where, finite), new, (params, momenta))
        return new[0], stats, new[1], scale, loss

    draw = [jax.random.key(number) for number in range(2)]
    ring = itertools.cycle([(jax.random.normal(key, (batch, *shape)), jax.random.randint(key, (batch,), 0, classes)) for key in draw])
    carried = [params, stats, jax.jit(optimizer.init)(params), DynamicScale() if precision == "fp16" else None]

    def iteration():
        *carried[:], loss = step(*carried, *next(ring))
        return loss

    return iteration, lambda: jax.block_until_ready(carried)


def measure(iteration, wait, seconds):
    """{"step_ms", "first_s" (the first iteration, with compiling)}."""

    def block(iterations):
        wait()
        start = time.perf_counter()
        for _ in range(iterations):
            iteration()
        wait()
        return time.perf_counter() - start

    first = block(1)
    block(20)
    size = max(1, int(BLOCK_S / block(5) * 5) + 1)
    end = time.perf_counter() + seconds
    blocks = []
    while len(blocks) < 3 or time.perf_counter() < end:
        blocks.append(1000 * block(size) / size)
    return {"step_ms": statistics.median(blocks), "first_s": first}


if __name__ == "__main__":
    network, precision, batch, seconds = sys.argv[1:]
    print(json.dumps(measure(*loop(network, precision, int(batch)), float(seconds))))

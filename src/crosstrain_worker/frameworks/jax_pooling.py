"""Pooling of NHWC images: Flax's forward passes, and gradients of our own.

JAX derives a select-and-scatter from a maximum over windows and a dilated sum over windows from an average. On CPUs (XLA of JAX 0.12)
these take 4 to 12 times as long as a sum of strided views, which XLA makes a few plain loops of.
"""

import functools

import jax
import numpy
from flax import linen as nn
from jax import lax
from jax import numpy as jnp


def window_padding(op, height, width):
    """((top, bottom), (left, right)) with which pooling gives the spec's shape; windows that hang over the end count as padding."""
    pairs = []
    for axis, size in enumerate((height, width)):
        reach = (op["shape"][1 + axis] - 1) * op["stride"][axis] + op["kernel"][axis]
        before = op["padding"][2 * axis]
        pairs.append((before, max(0, reach - size - before)))
    return tuple(pairs)


def max_pool(op, x):
    return maximum(x, tuple(op["kernel"]), tuple(op["stride"]), window_padding(op, x.shape[1], x.shape[2]))


def avg_pool(op, x):
    height, width = x.shape[1:3]
    summed = window_sum(x, tuple(op["kernel"]), tuple(op["stride"]), window_padding(op, height, width))
    share = 1 / numpy.outer(counts(op, height, 0), counts(op, width, 1))
    return summed * jnp.asarray(share[:, :, None], x.dtype)


def counts(op, size, axis):
    """How many elements of the input (or of input and padding) each window holds along one axis."""
    before, after = op["padding"][2 * axis : 2 * axis + 2]
    starts = numpy.arange(op["shape"][1 + axis]) * op["stride"][axis] - before
    low, high = (-before, size + after) if op["count_include_pad"] else (0, size)
    return numpy.minimum(starts + op["kernel"][axis], high) - numpy.maximum(starts, low)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def maximum(x, kernel, stride, padding):
    """The largest element of each window."""
    return nn.max_pool(x, kernel, stride, padding)


def maximum_forward(x, kernel, stride, padding):
    y = maximum(x, kernel, stride, padding)
    return y, (x, y)


def maximum_backward(kernel, stride, padding, kept, dy):
    """The first maximum of a window, in row order, gets its gradient."""
    x, y = kept
    padded = jnp.pad(x, ((0, 0),) + padding + ((0, 0),), constant_values=-jnp.inf)
    found = jnp.zeros(y.shape, bool)
    total = 0
    for row, column in numpy.ndindex(*kernel):
        ends = [start + (n - 1) * s + 1 for start, n, s in zip((row, column), y.shape[1:3], stride)]
        here = padded[:, row : ends[0] : stride[0], column : ends[1] : stride[1]] == y
        total += put_back(jnp.where(here & ~found, dy, 0), x.shape, (row, column), stride, padding)
        found = found | here
    return (total,)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def window_sum(x, kernel, stride, padding):
    """The sum of each window."""
    return nn.pooling.pool(x, 0.0, lax.add, kernel, stride, padding)


def window_sum_forward(x, kernel, stride, padding):
    return window_sum(x, kernel, stride, padding), x


def window_sum_backward(kernel, stride, padding, x, dy):
    return (sum(put_back(dy, x.shape, offset, stride, padding) for offset in numpy.ndindex(*kernel)),)


def put_back(values, shape, offset, stride, padding):
    """An array of `shape`, 0 but for the element at this (row, column) of each window: there are its `values`."""
    edges = []
    for axis in (0, 1):
        low = offset[axis] - padding[axis][0]
        covered = (values.shape[1 + axis] - 1) * stride[axis] + 1
        # below 0 where the element lies in the padding: cut off
        edges.append((low, shape[1 + axis] - low - covered, stride[axis] - 1))
    return lax.pad(values, jnp.zeros((), values.dtype), ((0, 0, 0), edges[0], edges[1], (0, 0, 0)))


maximum.defvjp(maximum_forward, maximum_backward)
window_sum.defvjp(window_sum_forward, window_sum_backward)

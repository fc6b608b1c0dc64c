"""The LSTM in JAX: cuDNN's kernel, or the input's product once for all time steps and a scan over them."""

import jax
from flax import linen as nn
from jax import lax
from jax import numpy as jnp
from jax.experimental import rnn

ZEROS = nn.initializers.zeros


def uses_cudnn(asked, gpu, precision):
    """Whether LSTMs are cuDNN's, for the value of framework.lstm (auto, scan, cudnn); ValueError with the reason where they can not be.

    jax.experimental.rnn has cuDNN's LSTM in float32 only.
    """
    reason = None
    if not gpu:
        reason = "cuDNN's LSTM needs a GPU"
    elif precision not in ("fp32", "tf32"):
        reason = "JAX has cuDNN's LSTM for fp32 and tf32 only, not for precision=%s" % precision
    if asked == "cudnn" and reason:
        raise ValueError("framework.lstm=cudnn: %s" % reason)
    return asked != "scan" and reason is None


class LSTM(nn.Module):
    """(N, T, in) → (N, T, hidden), gates in the order i, f, g, o, from a zero state."""

    hidden: int
    dtype: jnp.dtype
    cudnn: bool

    @nn.compact
    def __call__(self, x):
        width = 4 * self.hidden
        weight_ih = self.param("weight_ih", ZEROS, (x.shape[2], width)).astype(self.dtype)
        weight_hh = self.param("weight_hh", ZEROS, (self.hidden, width)).astype(self.dtype)
        bias = self.param("bias", ZEROS, (width,)).astype(self.dtype)
        return (by_cudnn if self.cudnn else scanned)(x, weight_ih, weight_hh, bias)


def scanned(x, weight_ih, weight_hh, bias):
    """x (N, T, in), weights (in, 4h) and (h, 4h), bias (4h,) → (N, T, h).

    Not nn.RNN of an OptimizedLSTMCell: that projects the input inside the loop, here it is one product for all time steps.
    """

    def step(carry, projected):
        h, c = carry
        i, f, g, o = jnp.split(projected + jnp.dot(h, weight_hh), 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((x.shape[0], weight_hh.shape[0]), x.dtype)
    _, outputs = lax.scan(step, (start, start), jnp.dot(x.swapaxes(0, 1), weight_ih) + bias)
    return outputs.swapaxes(0, 1)


def packed(weight_ih, weight_hh, bias):
    """All weights in cuDNN's one row: those of the input, of the state, then two biases, the second of which stays 0 here."""
    return jnp.concatenate([weight_ih.T.ravel(), weight_hh.T.ravel(), bias, jnp.zeros_like(bias)])


def by_cudnn(x, weight_ih, weight_hh, bias):
    """As `scanned`, float32 only. TensorFloat-32 as jax_default_matmul_precision says: `highest` is without."""
    batch, time, width = x.shape
    hidden = weight_hh.shape[0]
    start = jnp.zeros((1, batch, hidden), x.dtype)
    lengths = jnp.full((batch,), time, "int32")
    outputs, _, _ = rnn.lstm(x, start, start, packed(weight_ih, weight_hh, bias), lengths, width, hidden, 1, 0.0, False)
    return outputs

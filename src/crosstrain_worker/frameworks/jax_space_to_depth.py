"""A first convolution of stride 2 as one of stride 1 over blocks of 2×2 pixels: the same function of the same parameters.

As MLPerf's submissions for ResNet-50 compute its first layer: tensor cores get 16 channels in place of 3. Zeros fill kernel and
channels up (of 7×7×3 to 8×8×4), so it does more operations than the spec counts.
"""

import jax
from flax import linen as nn
from jax import numpy as jnp

from .base import Unsupported

REFUSAL = "jax: framework.space_to_depth=true takes a first convolution of stride 2 over at most 4 channels, not %s"


def convolutions(spec):
    """The names of the convolutions of a network's input. Raises Unsupported where there is none, or one can not be over blocks."""
    first = [op for op in spec["ops"] if op["op"] == "conv2d" and op["inputs"] == ["input"]]
    if not first:
        raise Unsupported(REFUSAL % "a network without a convolution of its input")
    for op in first:
        if spec["input"]["shape"][0] > 4 or op["groups"] != 1 or op["stride"] != [2, 2] or op["dilation"] != [1, 1]:
            raise Unsupported(REFUSAL % op["name"])
    return frozenset(op["name"] for op in first)


class SpaceToDepthConv(nn.Module):
    """(N, H, W, C) → (N, H', W', out_channels), as the spec's op conv2d; the parameters are those of nn.Conv."""

    out_channels: int
    kernel: tuple
    padding: tuple  # (top, bottom, left, right)
    shape: tuple  # (H', W')
    bias: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        sizes, channels = x.shape[1:3], x.shape[3]
        weight = self.param("kernel", nn.initializers.lecun_normal(), self.kernel + (channels, self.out_channels))
        missing = -channels % 4
        fill_input, fill_weight = [(0, 0)], []
        for axis in range(2):
            odd, before = self.kernel[axis] % 2, self.padding[2 * axis]
            reach = 2 * (self.shape[axis] - 1) + self.kernel[axis] + odd
            # a negative number cuts off what no window reaches
            fill_input.append((before, reach - sizes[axis] - before))
            fill_weight.append((0, odd))
        blocks = jax.lax.pad(x.astype(self.dtype), jnp.zeros((), self.dtype), [pair + (0,) for pair in fill_input + [(0, missing)]])
        weight = jnp.pad(weight.astype(self.dtype), fill_weight + [(0, missing), (0, 0)])
        places = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(to_blocks(blocks), to_blocks(weight[None])[0], (1, 1), "VALID", dimension_numbers=places)
        return y + self.param("bias", nn.initializers.zeros, (self.out_channels,)).astype(self.dtype) if self.bias else y


def conv2d(op, dtype):
    """The layer of an op that `convolutions` names."""
    return SpaceToDepthConv(
        op["out_channels"], tuple(op["kernel"]), tuple(op["padding"]), tuple(op["shape"][1:]), op["bias"], dtype, name=op["name"]
    )


def to_blocks(x):
    """(N, H, W, C, …) → (N, H/2, W/2, 4·C, …)."""
    n, height, width, channels = x.shape[:4]
    x = x.reshape((n, height // 2, 2, width // 2, 2, channels) + x.shape[4:])
    return x.swapaxes(2, 3).reshape((n, height // 2, width // 2, 4 * channels) + x.shape[6:])

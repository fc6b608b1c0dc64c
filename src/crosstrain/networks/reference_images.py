"""The reference's forward functions of image ops (n, C, H, W): convolution, pooling, local response normalisation, shortcuts."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from crosstrain.networks.reference_layers import Array, Call, Forward, Result


def _windows(x: Array, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], out: tuple[int, int]) -> Array:
    """A view (n, C, kH, kW, rows, columns): element [.., i, j, r, c] is x[.., r·stride + i·dilation, c·stride + j·dilation]."""
    n, c, h, w = x.strides
    shape = (*x.shape[:2], *kernel, *out)
    return as_strided(x, shape, (n, c, h * dilation[0], w * dilation[1], h * stride[0], w * stride[1]), writeable=False)


def _scatter(windows: Array, shape: tuple[int, ...], stride: tuple[int, int], dilation: tuple[int, int]) -> Array:
    """The opposite of `_windows`: sums each window's elements (n, C, kH, kW, rows, columns) into an array of `shape`."""
    x = np.zeros(shape)
    kh, kw, rows, columns = windows.shape[2:]
    for i in range(kh):
        for j in range(kw):
            top, left = i * dilation[0], j * dilation[1]
            x[:, :, top : top + rows * stride[0] : stride[0], left : left + columns * stride[1] : stride[1]] += windows[:, :, i, j]
    return x


def _conv2d(call: Call) -> Result:
    """Cross-correlation, OIHW weights; output channel o of group g sees the group's input channels only."""
    x, weight, bias = call.x, call.parameters["weight"], call.parameters.get("bias")
    kernel, stride, dilation = call.attribute("kernel"), call.attribute("stride"), call.attribute("dilation")
    top, bottom, left, right = call.attribute("padding")
    out_channels, rows, columns = call.op.shape
    groups = call.attribute("groups")
    # + stride: the last strided slice of _scatter may reach beyond the padded input
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom + stride[0]), (left, right + stride[1])))
    windows = _windows(padded, kernel, stride, dilation, (rows, columns))
    width_in, width_out = x.shape[1] // groups, out_channels // groups
    inside = [slice(g * width_in, (g + 1) * width_in) for g in range(groups)]
    outside = [slice(g * width_out, (g + 1) * width_out) for g in range(groups)]
    y = np.empty((len(x), out_channels, rows, columns))
    for i, o in zip(inside, outside, strict=True):
        y[:, o] = np.tensordot(windows[:, i], weight[o], axes=([1, 2, 3], [1, 2, 3])).transpose(0, 3, 1, 2)
    if bias is not None:
        y += bias[:, None, None]

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        d_weight = np.empty_like(weight)
        d_windows = np.empty(windows.shape)
        for i, o in zip(inside, outside, strict=True):
            d_weight[o] = np.tensordot(dy[:, o], windows[:, i], axes=([0, 2, 3], [0, 4, 5]))
            d_windows[:, i] = np.tensordot(dy[:, o], weight[o], axes=([1], [0])).transpose(0, 3, 4, 5, 1, 2)
        dx = _scatter(d_windows, padded.shape, stride, dilation)[:, :, top : top + x.shape[2], left : left + x.shape[3]]
        return [dx], {"weight": d_weight} if bias is None else {"weight": d_weight, "bias": dy.sum(axis=(0, 2, 3))}

    return y, back


def _pool_windows(call: Call, x: Array, fill: float) -> Array:
    """The pooling windows of x (n, C, H, W), padded with `fill` (also beyond the padding, where rounding up needs it)."""
    (kh, kw), (sh, sw), (top, _, left, _) = call.attribute("kernel"), call.attribute("stride"), call.attribute("padding")
    rows, columns = call.op.shape[1:]
    below = max(0, rows * sh + kh - x.shape[2] - top)
    beside = max(0, columns * sw + kw - x.shape[3] - left)
    padded = np.pad(x, ((0, 0), (0, 0), (top, below), (left, beside)), constant_values=fill)
    return _windows(padded, (kh, kw), (sh, sw), (1, 1), (rows, columns))


def _pool_back(call: Call, d_windows: Array) -> Array:
    (kh, kw), stride, (top, _, left, _) = call.attribute("kernel"), call.attribute("stride"), call.attribute("padding")
    n, c, h, w = call.x.shape
    rows, columns = call.op.shape[1:]
    shape = (n, c, max(rows * stride[0] + kh, top + h), max(columns * stride[1] + kw, left + w))
    return _scatter(d_windows, shape, stride, (1, 1))[:, :, top : top + h, left : left + w]


def _max_pool(call: Call) -> Result:
    """The gradient goes to the first maximum of a window, in row order; to every one where parity set the attribute `every_maximum`."""
    windows = _pool_windows(call, call.x, -np.inf)
    n, c, kh, kw, rows, columns = windows.shape
    flat = windows.reshape(n, c, kh * kw, rows, columns)
    winner = flat.argmax(axis=2)[:, :, None]
    y = np.take_along_axis(flat, winner, axis=2)[:, :, 0]

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        d_flat = np.zeros(flat.shape)
        if call.op.attributes.get("every_maximum"):
            d_flat += np.where(flat == y[:, :, None], dy[:, :, None], 0.0)
        else:
            np.put_along_axis(d_flat, winner, dy[:, :, None], axis=2)
        return [_pool_back(call, d_flat.reshape(windows.shape))], {}

    return y, back


def _avg_pool(call: Call) -> Result:
    """Divided by the window's elements within the input, or (count_include_pad) within input and padding."""
    h, w = call.x.shape[2:]
    top, bottom, left, right = call.attribute("padding")
    if call.attribute("count_include_pad"):
        (kh, kw), (sh, sw) = call.attribute("kernel"), call.attribute("stride")
        rows, columns = call.op.shape[1:]
        high = np.minimum(np.arange(rows) * sh + kh, h + top + bottom) - np.arange(rows) * sh
        wide = np.minimum(np.arange(columns) * sw + kw, w + left + right) - np.arange(columns) * sw
        count = np.outer(high, wide)
    else:
        count = _pool_windows(call, np.ones((1, 1, h, w)), 0.0).sum(axis=(2, 3))[0, 0]
    windows = _pool_windows(call, call.x, 0.0)

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        share = (dy / count)[:, :, None, None]
        return [_pool_back(call, np.broadcast_to(share, windows.shape))], {}

    return windows.sum(axis=(2, 3)) / count, back


def _global_avg_pool(call: Call) -> Result:
    shape = call.x.shape
    area = shape[2] * shape[3]
    return call.x.mean(axis=(2, 3)), lambda dy: ([np.broadcast_to(dy[:, :, None, None] / area, shape)], {})


def _lrn(call: Call) -> Result:
    """x / (k + alpha/size · Σ x²)^beta, Σ over the `size` channels around (Krizhevsky et al. 2012, alpha divided by size)."""
    x, size, beta = call.x, call.attribute("size"), call.attribute("beta")
    share = call.attribute("alpha") / size

    def around(values: Array) -> Array:
        half = size // 2
        padded = np.pad(values, ((0, 0), (half, half), (0, 0), (0, 0)))
        return sum((padded[:, i : i + values.shape[1]] for i in range(size)), start=np.zeros_like(values))

    base = call.attribute("k") + share * around(x * x)
    y = x * base**-beta

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        return [dy * base**-beta - 2 * beta * share * x * around(dy * y / base)], {}

    return y, back


def _channel_pad_shortcut(call: Call) -> Result:
    """He et al. 2016, option A: every stride-th pixel, zero channels behind."""
    stride, channels = call.attribute("stride"), call.x.shape[1]
    kept = call.x[:, :, ::stride, ::stride]
    extra = call.attribute("out_channels") - channels

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        dx = np.zeros_like(call.x)
        dx[:, :, ::stride, ::stride] = dy[:, :channels]
        return [dx], {}

    return np.pad(kept, ((0, 0), (0, extra), (0, 0), (0, 0))), back


FORWARD: dict[str, Forward] = {
    "conv2d": _conv2d,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "global_avg_pool": _global_avg_pool,
    "lrn": _lrn,
    "channel_pad_shortcut": _channel_pad_shortcut,
}

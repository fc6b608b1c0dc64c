"""The reference's forward functions of sequence ops (n, T, width): embeddings, tokens of images, LSTM, attention."""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from crosstrain.networks.reference_layers import Array, Call, Forward, Result, affine, softmax_back, softmax_last


def _embedding(call: Call) -> Result:
    tokens, weight = call.x.astype(np.int64), call.parameters["weight"]

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        gradient = np.zeros_like(weight)
        np.add.at(gradient, tokens, dy)
        return [np.zeros(tokens.shape)], {"weight": gradient}

    return weight[tokens], back


def _position_embedding(call: Call) -> Result:
    return call.x + call.parameters["weight"], lambda dy: ([dy], {"weight": dy.sum(axis=0)})


def _class_token(call: Call) -> Result:
    token = np.broadcast_to(call.parameters["weight"], (len(call.x), 1, call.x.shape[2]))
    return np.concatenate([token, call.x], axis=1), lambda dy: ([dy[:, 1:]], {"weight": dy[:, :1].sum(axis=0)})


def _patches_to_tokens(call: Call) -> Result:
    n, channels, height, width = call.x.shape
    y = call.x.reshape(n, channels, height * width).transpose(0, 2, 1)
    return y, lambda dy: ([dy.transpose(0, 2, 1).reshape(call.x.shape)], {})


def _select_token(call: Call) -> Result:
    index = call.attribute("index")

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        dx = np.zeros_like(call.x)
        dx[:, index] = dy
        return [dx], {}

    return call.x[:, index], back


def _masked_mean(call: Call) -> Result:
    """Over the positions whose token is not 0; a sample of padding alone gives 0."""
    mask = (call.tokens != 0).astype(np.float64)
    share = (mask / np.maximum(mask.sum(axis=1, keepdims=True), 1.0))[:, :, None]
    return (call.x * share).sum(axis=1), lambda dy: ([dy[:, None, :] * share], {})


def _lstm(call: Call) -> Result:
    """Hochreiter & Schmidhuber's cell with a forget gate; gates in the order i, f, g, o; starts from zeros."""
    x, p = call.x, call.parameters
    hidden, length = call.attribute("hidden"), x.shape[1]
    h = c = np.zeros((len(x), hidden))
    states: list[tuple[Array, Array]] = [(h, c)]
    gates: list[tuple[Array, Array, Array, Array]] = []
    for t in range(length):
        z = x[:, t] @ p["weight_ih"].T + h @ p["weight_hh"].T + p["bias"]
        i, f, g, o = np.split(z, 4, axis=1)
        i, f, g, o = expit(i), expit(f), np.tanh(g), expit(o)
        c = f * c + i * g
        h = o * np.tanh(c)
        gates.append((i, f, g, o))
        states.append((h, c))
    y = np.stack([h for h, _ in states[1:]], axis=1)

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        gradients = {name: np.zeros_like(value) for name, value in p.items()}
        dx = np.empty_like(x)
        dh = dc = np.zeros((len(x), hidden))
        for t in reversed(range(length)):
            (i, f, g, o), (h_before, c_before) = gates[t], states[t]
            root = np.tanh(states[t + 1][1])
            dh = dh + dy[:, t]
            dc = dc + dh * o * (1 - root * root)
            d_gates = [dc * g * i * (1 - i), dc * c_before * f * (1 - f), dc * i * (1 - g * g), dh * root * o * (1 - o)]
            dz = np.concatenate(d_gates, axis=1)
            gradients["weight_ih"] += dz.T @ x[:, t]
            gradients["weight_hh"] += dz.T @ h_before
            gradients["bias"] += dz.sum(axis=0)
            dx[:, t] = dz @ p["weight_ih"]
            dh, dc = dz @ p["weight_hh"], dc * f
        return [dx], gradients

    return y, back


def _attention(call: Call) -> Result:
    """Scaled dot-product attention of several heads (Vaswani et al. 2017); causal: position t sees positions ≤ t."""
    x, p, heads = call.x, call.parameters, call.attribute("heads")
    n, length, width = x.shape
    size = width // heads

    def split(values: Array) -> Array:
        return values.reshape(n, length, heads, size).transpose(0, 2, 1, 3)

    def joined(values: Array) -> Array:
        return values.transpose(0, 2, 1, 3).reshape(n, length, width)

    qkv, qkv_back = affine(x, p["qkv_weight"], p["qkv_bias"])
    q, k, v = (split(part) for part in np.split(qkv, 3, axis=2))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(size)
    if call.attribute("causal"):
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    weights = softmax_last(scores)
    y, out_back = affine(joined(weights @ v), p["out_weight"], p["out_bias"])

    def back(dy: Array) -> tuple[list[Array], dict[str, Array]]:
        (d_mixed,), out = out_back(dy)
        d_mixed = split(d_mixed)
        d_scores = softmax_back(weights, d_mixed @ v.swapaxes(2, 3)) / np.sqrt(size)
        parts = (d_scores @ k, d_scores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ d_mixed)
        dx, qkv_gradients = qkv_back(np.concatenate([joined(part) for part in parts], axis=2))
        return dx, {
            "qkv_weight": qkv_gradients["weight"],
            "qkv_bias": qkv_gradients["bias"],
            "out_weight": out["weight"],
            "out_bias": out["bias"],
        }

    return y, back


FORWARD: dict[str, Forward] = {
    "embedding": _embedding,
    "position_embedding": _position_embedding,
    "class_token": _class_token,
    "patches_to_tokens": _patches_to_tokens,
    "select_token": _select_token,
    "masked_mean": _masked_mean,
    "lstm": _lstm,
    "attention": _attention,
}

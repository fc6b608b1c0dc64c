"""Seeded random data for any network: a ring of a few batches, which the worker cycles through."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from crosstrain.data.cache import drop_old_rings
from crosstrain.data.recipe import Arrays, Recipe, Request, Stream, Target
from crosstrain.errors import OutcomeError

RING_BATCHES = 4  # no framework can cache one batch's result, and the ring still fits on the device
RING_BYTES = 512_000_000  # of inputs: larger batches get fewer of them, but never fewer than 2, and no file is larger
PART_BYTES = 16_000_000


def synthetic(request: Request) -> Recipe:
    """Normal float32 images and vectors, uniform int32 tokens, uniform int64 classes, normal float32 values.

    The content depends on the network's input and target, the seed and the ring's size, not on the network's name. Of two batches
    above `RING_BYTES` only the first samples are made, which the feed takes again and again. Rings that no run has used for a day are
    removed from the cache.
    """
    network = request.network
    kind, shape = network["input"]["kind"], tuple(network["input"]["shape"])
    target = Target.of(network)
    sample_bytes = math.prod(shape) * 4
    ring = ring_samples(request.batch_global, sample_bytes, request.samples)
    count = ring if request.samples else distinct_samples(request.batch_global, sample_bytes, ring)
    tokens = _token_range(network) if kind == "tokens" else None

    def load() -> Arrays:
        drop_old_rings(request.config["name"])
        random = np.random.RandomState(request.seed % 2**32)
        arrays: Arrays = {}
        if target.kind == "class":
            arrays["train_targets"] = random.randint(0, target.classes, (count, *target.shape), dtype=np.int64)
        elif target.kind == "values":
            arrays["train_targets"] = random.standard_normal((count, *target.shape)).astype(np.float32)
        dtype = np.float32 if tokens is None else np.int32
        arrays["train_inputs"] = Stream((count, *shape), dtype, _inputs(random, count, shape, tokens))
        return arrays

    return Recipe(
        kind=kind,
        shape=shape,
        classes=target.classes,
        version=f"1 {kind} {shape} {tokens} {target} seed {request.seed}",
        scale=[] if tokens else [1.0] * (shape[0] if kind == "image" else 1),
        offset=[] if tokens else [0.0] * (shape[0] if kind == "image" else 1),
        load=load,
        target_shape=target.shape,
        ring=count,
        count=ring,
    )


def ring_samples(batch: int, sample_bytes: int, samples: int | None) -> int:
    """Samples in a ring of global batches of `batch`, each of `sample_bytes`: whole batches, at least 2; `samples` is data.samples."""
    batches = max(2, min(RING_BATCHES, RING_BYTES // (batch * sample_bytes))) if samples is None else samples // batch
    if batches < 2:
        raise OutcomeError(
            "unsupported",
            f"data.samples={samples}: synthetic data is a ring of at least 2 global batches, here 2 × {batch} samples",
            f"data.samples={2 * batch} or more, or null",
        )
    return batches * batch


def distinct_samples(batch: int, sample_bytes: int, ring: int) -> int:
    """Samples that are written for a ring of `ring` samples: all, or about `RING_BYTES` of them.

    Never a number that divides the batch: each batch would begin where the one before did, and all would be the same.
    """
    count = max(2, RING_BYTES // sample_bytes)
    if count >= ring:
        return ring
    while batch % count == 0:
        count += 1
    return count


def _token_range(network: Mapping[str, Any]) -> tuple[int, int]:
    """[low, high) of the tokens: the embedding's vocabulary, without the padding token 0 where the network masks it."""
    low = 1 if any(op["op"] == "masked_mean" for op in network["ops"]) else 0
    return low, next(op["vocabulary"] for op in network["ops"] if op["op"] == "embedding")


def _inputs(
    random: np.random.RandomState, count: int, shape: tuple[int, ...], tokens: tuple[int, int] | None
) -> Iterator[np.ndarray]:
    step = max(1, PART_BYTES // (math.prod(shape) * 8))
    for start in range(0, count, step):
        size = (min(step, count - start), *shape)
        if tokens is None:
            yield random.standard_normal(size).astype(np.float32)
        else:
            yield random.randint(*tokens, size, dtype=np.int32)

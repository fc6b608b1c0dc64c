"""Synthetic data for batches above the limit of its file: few samples are written, the batches are as many and as large as ever."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import QUICK
from crosstrain.data import synthetic
from crosstrain.data.synthetic import RING_BYTES, distinct_samples, ring_samples
from crosstrain_worker.feed import Feed
from test_config import Front
from test_config import front as front

IMAGE = 3 * 224 * 224 * 4


@pytest.mark.parametrize("batch", [425, 426, 512, 850, 851, 1024, 1700, 16384, 2**20])
def test_the_file_of_large_images_is_bounded(batch: int) -> None:
    ring = ring_samples(batch, IMAGE, None)
    count = distinct_samples(batch, IMAGE, ring)
    assert ring == 2 * batch
    assert count * IMAGE <= RING_BYTES * 1.01
    assert count >= min(ring, RING_BYTES // IMAGE)


@pytest.mark.parametrize("limit", [1, 2, 3, 12, 60, 100])
def test_batches_never_begin_at_the_same_sample(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(synthetic, "RING_BYTES", 4 * limit)
    for batch in [*range(1, 130), 5040, 720720]:
        ring = ring_samples(batch, 4, None)
        count = distinct_samples(batch, 4, ring)
        assert 2 <= count <= ring
        assert count == ring or batch % count, (batch, count)
        assert count >= min(limit, ring) and (ring > limit or count == ring)


def test_what_fits_is_written_whole() -> None:
    for batch in (1, 8, 64, 212):
        ring = ring_samples(batch, IMAGE, None)
        assert ring == batch * min(4, RING_BYTES // (batch * IMAGE))
        assert distinct_samples(batch, IMAGE, ring) == ring


@pytest.mark.parametrize(("given", "stored"), [([], 50), (["data.placement=host"], 50), (["replicas=2"], 50), (["data.samples=130"], 128)])
def test_a_run_with_a_batch_above_the_limit(
    front: Front, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], stored: int
) -> None:
    """The limit of 512 MB is set to 50 images of LeNet here."""
    monkeypatch.setattr(synthetic, "RING_BYTES", 50 * 28 * 28 * 4)
    cell = ["framework=fake", "framework.step_ms=1", "network=lenet", "data=synthetic", "batch_size=64", "device=cpu", "threads=1"]
    code, out, err = front(*cell, *QUICK, "epochs=1", "device.oversubscribe=true", *given)
    assert code == 0, out + err
    (written,) = cache.glob("data/synthetic-*/train_inputs.npy")
    assert np.load(written).shape == (stored, 1, 28, 28) and len(np.load(written.with_name("train_targets.npy"))) == stored
    (path,) = tmp_path.glob("outputs/*/*/run.json")
    run = json.loads(path.read_text())
    assert run["data"]["train"]["samples"] == 128
    result = json.loads((path.parent / "result.0.json").read_text())
    assert result["status"] == "ok"
    first, second = Feed(run, 0).ring()
    assert len(first[0]) == run["batch_global"] // run["world_size"] and not np.array_equal(first[0], second[0])

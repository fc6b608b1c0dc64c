"""The worker's batches: the same samples in the same order for every framework and every number of ranks."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from crosstrain_worker import feed as feed_module
from crosstrain_worker.feed import Feed, Prefetch


@pytest.fixture
def run_of(tmp_path):
    """run.json (the keys a feed reads) over arrays written to .npy files."""

    def make(inputs, targets=None, test=None, *, kind="vector", shape=None, batch=4, ranks=1, seed=5, scale=(), offset=()):
        def save(stem, array):
            np.save(tmp_path / f"{stem}.npy", array)
            return str(tmp_path / f"{stem}.npy")

        data = {
            "name": "toy",
            "placement": "host",
            "train": {"inputs": save("i", inputs), "targets": None if targets is None else save("t", targets)},
            "test": None if test is None else {"inputs": save("ti", test[0]), "targets": save("tt", test[1])},
            "scale": list(scale),
            "offset": list(offset),
        }
        network = {"input": {"kind": kind, "shape": list(shape or inputs.shape[1:])}}
        return {"seed": seed, "batch_global": batch, "world_size": ranks, "network": network, "data": data}

    return make


def numbered(count, width=3):
    """Sample i is (i, i, …) with target i."""
    return np.repeat(np.arange(count, dtype=np.float32)[:, None], width, axis=1), np.arange(count)


def feeding_threads():
    return [thread for thread in threading.enumerate() if thread.name == "crosstrain-feed"]


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    deadline = time.monotonic() + 5
    while feeding_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not feeding_threads()


# -- order ---------------------------------------------------------------------------------------------------------------------


def test_an_epoch_is_the_seeded_permutation_without_its_last_partial_batch(run_of):
    feed = Feed(run_of(*numbered(11), batch=4, seed=5), 0)
    assert feed.batches_per_epoch == 2
    for epoch in (0, 1, 7):
        batches = list(feed.epoch(epoch))
        seen = np.concatenate([targets for _, targets in batches])
        assert seen.tolist() == np.random.RandomState(5 + epoch).permutation(11)[:8].tolist()
        assert np.array_equal(np.concatenate([inputs for inputs, _ in batches])[:, 0], seen)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_slices_in_order_are_the_global_batch(run_of, ranks):
    run = run_of(*numbered(50), batch=8)
    whole = [targets for _, targets in Feed(run, 0).epoch(2)]
    run["world_size"] = ranks
    slices = [[targets for _, targets in Feed(run, rank).epoch(2)] for rank in range(ranks)]
    assert Feed(run, 0).batch == 8 // ranks
    for index, batch in enumerate(whole):
        assert np.concatenate([slices[rank][index] for rank in range(ranks)]).tolist() == batch.tolist()


def test_endless_goes_on_over_the_epochs(run_of):
    feed = Feed(run_of(*numbered(9), batch=4), 0)
    endless = feed.endless()
    seen = [targets.tolist() for _, targets in itertools.islice(endless, 6)]
    assert seen == [targets.tolist() for epoch in range(3) for _, targets in feed.epoch(epoch)]
    feed.close()


def test_another_seed_is_another_order_and_large_seeds_work(run_of):
    run = run_of(*numbered(40))
    orders = []
    for seed in (0, 1, 2**32 - 1):
        run["seed"] = seed
        orders.append(np.concatenate([targets for _, targets in Feed(run, 0).epoch(1)]).tolist())
    assert orders[0] != orders[1]
    assert orders[2] == np.random.RandomState(0).permutation(40).tolist()  # 2³² wraps to 0


# -- content -------------------------------------------------------------------------------------------------------------------


def test_images_are_scaled_per_channel(run_of):
    images = np.random.RandomState(0).randint(0, 256, (6, 3, 4, 5)).astype(np.uint8)
    scale, offset = [1 / 63.0, 1 / 62.1, 0.5], [-2.0, -1.9, 0.0]
    run = run_of(images, np.arange(6), kind="image", batch=6, scale=scale, offset=offset)
    inputs, targets = next(Feed(run, 0).epoch(0))
    wanted = images[targets].astype(np.float32) * np.float32(scale).reshape(3, 1, 1) + np.float32(offset).reshape(3, 1, 1)
    assert inputs.dtype == np.float32 and inputs.flags.c_contiguous and type(inputs) is np.ndarray
    assert np.array_equal(inputs, wanted)
    assert targets.dtype == np.int64 and type(targets) is np.ndarray


@pytest.mark.parametrize(("scale", "offset"), [([0.0], [1.0]), ([1.0], [0.0]), ([1.0], [-3.0]), ([0.5], [0.0])])
def test_one_value_scales_a_vector(run_of, scale, offset):
    values, targets = numbered(4)
    inputs, order = next(Feed(run_of(values, targets, scale=scale, offset=offset), 0).epoch(0))
    assert np.array_equal(inputs, values[order] * np.float32(scale[0]) + np.float32(offset[0]))
    assert np.array_equal(np.load(run_of(values)["data"]["train"]["inputs"]), values)  # the file is as before


def test_images_are_flattened_for_a_vector_network_after_scaling(run_of):
    images = np.random.RandomState(0).randint(0, 256, (4, 2, 3, 3)).astype(np.uint8)
    run = run_of(images, np.arange(4), shape=(18,), scale=[2.0, 3.0], offset=[0.0, 1.0])
    inputs, targets = next(Feed(run, 0).epoch(0))
    wanted = images[targets].astype(np.float32)
    wanted[:, 0] *= 2
    wanted[:, 1] = wanted[:, 1] * 3 + 1
    assert np.array_equal(inputs, wanted.reshape(4, 18))


def test_tokens_stay_int32_and_targets_keep_their_shape(run_of):
    tokens = np.arange(40, dtype=np.int32).reshape(8, 5)
    inputs, targets = next(Feed(run_of(tokens, tokens.astype(np.int64) + 1, kind="tokens"), 0).epoch(0))
    assert (inputs.dtype, targets.dtype) == (np.int32, np.int64)
    assert np.array_equal(inputs + 1, targets) and inputs.shape == (4, 5)


def test_float_targets_and_the_autoencoder(run_of):
    values, _ = numbered(4)
    inputs, targets = next(Feed(run_of(values, values[:, :2].copy()), 0).epoch(0))
    assert targets.dtype == np.float32 and np.array_equal(targets, inputs[:, :2])
    inputs, targets = next(Feed(run_of(values, None, scale=[0.5], offset=[0.0]), 0).epoch(0))
    assert np.array_equal(inputs, targets) and sorted(inputs[:, 0].tolist()) == [0, 0.5, 1, 1.5]


def test_the_test_set_comes_whole_and_in_order(run_of):
    values, targets = numbered(10)
    run = run_of(*numbered(8), (values, targets), batch=4, ranks=2, scale=[2.0], offset=[0.0])
    for rank in range(2):
        batches = list(Feed(run, rank).test_batches(4))
        assert [len(inputs) for inputs, _ in batches] == [4, 4, 2]
        assert np.concatenate([t for _, t in batches]).tolist() == list(range(10))
        assert np.array_equal(np.concatenate([i for i, _ in batches]), values * 2)
    assert [len(inputs) for inputs, _ in Feed(run, 0).test_batches()] == [2] * 5
    run["data"]["test"] = None
    with pytest.raises(ValueError, match="data toy has no test set"):
        Feed(run, 0).test_batches()


# -- the ring ------------------------------------------------------------------------------------------------------------------


def test_the_ring_is_the_first_batches_and_never_fewer_than_two(run_of, monkeypatch):
    feed = Feed(run_of(*numbered(20), batch=4), 0)
    first = [targets.tolist() for _, targets in feed.epoch(0)]
    assert [targets.tolist() for _, targets in feed.ring()] == first
    assert [targets.tolist() for _, targets in feed.ring(3)] == first[:3]
    assert len(feed.ring(1)) == 2
    assert len(feed.ring(7)) == 7
    monkeypatch.setattr(feed_module, "RING_BYTES", 4 * 3 * 4 * 3)  # three batches
    assert len(feed.ring()) == 3
    one = Feed(run_of(*numbered(4), batch=4), 0)
    ring = one.ring()
    assert len(ring) == 2 and ring[0][1].tolist() != ring[1][1].tolist()


def of_few(run, samples):
    """The same data, counted as so many training samples."""
    run["data"]["train"]["samples"] = samples
    return run


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("stored", [3, 7, 13, 19])
def test_batches_wrap_around_where_the_files_hold_too_few(run_of, stored, ranks):
    run = of_few(run_of(*numbered(stored), batch=10, seed=5, ranks=ranks), 20)
    feeds = [Feed(run, rank) for rank in range(ranks)]
    assert {feed.batches_per_epoch for feed in feeds} == {2}
    for epoch in (0, 3):
        order = np.random.RandomState(5 + epoch).permutation(stored)
        parts = [list(feed.epoch(epoch)) for feed in feeds]
        whole = [np.concatenate([part[index][1] for part in parts]) for index in range(2)]
        assert np.concatenate(whole).tolist() == [order[position % stored] for position in range(20)]
        assert np.array_equal(np.concatenate([part[1][0] for part in parts])[:, 0], whole[1])
    for feed in feeds:
        ring = feed.ring()
        assert len(ring) == 2 and ring[0][1].tolist() != ring[1][1].tolist()
        endless = feed.endless()
        assert [next(endless)[1].tolist() for _ in range(2)] == [targets.tolist() for _, targets in ring]
        feed.close()


def test_a_ring_that_wraps_has_as_many_batches_as_one_that_does_not(run_of, monkeypatch):
    monkeypatch.setattr(feed_module, "RING_BYTES", 4 * 3 * 4 * 3)  # three batches
    assert [len(Feed(of_few(run_of(*numbered(7), batch=4), samples), 0).ring()) for samples in (8, 12, 16)] == [2, 3, 3]


# -- what does not fit ---------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_one_line(run_of):
    with pytest.raises(ValueError, match=r"^batch_size: a global batch of 12 is larger than data toy \(11 training samples\)$"):
        Feed(run_of(*numbered(11), batch=12), 0)
    with pytest.raises(ValueError, match=r"^batch_size: a global batch of 4 can not be split evenly over 3 ranks$"):
        Feed(run_of(*numbered(11), ranks=3), 0)
    with pytest.raises(ValueError, match=r"^data toy has samples of shape \[3\], the network takes \[4\]$"):
        Feed(run_of(*numbered(11), shape=(4,)), 0)
    with pytest.raises(ValueError, match=r"^data toy has samples of shape \[3\], the network takes \[1, 1, 3\]$"):
        Feed(run_of(*numbered(11), shape=(1, 1, 3), kind="image"), 0)
    values, targets = numbered(11)
    with pytest.raises(ValueError, match="data toy has 11 inputs and 10 targets"):
        Feed(run_of(values, targets[:10]), 0)


# -- the thread ----------------------------------------------------------------------------------------------------------------


def counted(made):
    for number in itertools.count():
        made.append(number)
        yield number


def test_batches_are_made_ahead_but_not_far():
    made = []
    prefetch = Prefetch(counted(made))
    deadline = time.monotonic() + 5
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2]  # two in the queue, one in the hand
    assert [next(prefetch) for _ in range(5)] == [0, 1, 2, 3, 4]
    prefetch.close()
    assert not feeding_threads()
    with pytest.raises(StopIteration):
        next(prefetch)


def test_an_error_in_the_thread_comes_out_of_next_in_its_place():
    def batches():
        yield 1
        raise ZeroDivisionError("in the thread")

    prefetch = Prefetch(batches())
    assert next(prefetch) == 1
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        next(prefetch)
    with pytest.raises(StopIteration):
        next(prefetch)


def test_a_forgotten_iterator_ends_its_thread(run_of):
    feed = Feed(run_of(*numbered(400)), 0)
    for inputs, _ in feed.endless():
        assert len(inputs) == 4
        break  # no_thread_left looks


def test_close_ends_every_iterator_of_the_feed(run_of):
    feed = Feed(run_of(*numbered(400)), 0)
    iterators = [feed.endless(), feed.epoch(0), feed.epoch(1)]
    for iterator in iterators:
        next(iterator)
    assert len(feeding_threads()) == 3
    feed.close()
    assert not feeding_threads()
    assert [list(iterator) for iterator in iterators] == [[], [], []]


def test_a_full_queue_does_not_keep_the_process(tmp_path):
    program = textwrap.dedent("""
        import itertools, sys, time
        from crosstrain_worker.feed import Prefetch
        kept = Prefetch(itertools.count())
        next(kept)
        sys.modules["kept"] = kept
        print("end")
    """)
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, timeout=30, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"end\n", b"")

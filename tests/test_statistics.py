"""The published numbers, from rows whose right answer is known."""

import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from crosstrain import samples, statistics
from crosstrain.statistics import achieved, clock_sanity, compare, readback_sanity, summarise
from crosstrain_worker import loop
from crosstrain_worker.record import BLOCK, FIRST_STEP, ITERATION, TRAIN
from crosstrain_worker.steady import find_steady, median_interval
from test_steady import SMOKE

SCHEMA = {
    "step_ms", "step_ms_low", "step_ms_high", "samples_per_s", "samples_per_s_total", "step_sync_ms", "step_ms_p5",
    "step_ms_p95", "step_ms_p99", "step_ms_max", "outliers", "sync_ratio", "data_wait_pct",
}  # fmt: skip


def rows_of(phase: int, durations, size: int = 1, wait: float = 0.0, begin: float = 0.0, gap: float = 0.0) -> np.ndarray:
    """Consecutive rows of one phase: seconds per row, `size` iterations each, `wait` of each row's time spent on data."""
    durations = np.asarray(durations, float)
    rows = np.zeros(len(durations), samples.ROW)
    rows["phase"], rows["size"], rows["duration"] = phase, size, durations
    rows["iteration"] = size * np.arange(len(rows))
    rows["start"] = begin + np.concatenate([[0.0], np.cumsum(durations + gap)[:-1]]) if len(rows) else []
    rows["data_wait"] = wait * durations
    rows["loss"] = rows["accuracy"] = np.nan
    return rows


def jitter(n: int, seed: int, sigma: float = 0.01) -> np.ndarray:
    return np.exp(np.random.RandomState(seed).normal(0, sigma, n))


# -- the summary ------------------------------------------------------------------------------------------------------------


def test_case_15_total_and_headline_are_not_the_mean_of_rates():
    for phase in (BLOCK, ITERATION):
        metrics = summarise(rows_of(phase, [0.010] * 9 + [0.110]), 10, steady_start=0)
        assert metrics["samples_per_s_total"] == pytest.approx(500, rel=1e-12)
        assert metrics["samples_per_s"] == pytest.approx(1000, rel=1e-12)
        assert metrics["step_ms"] == pytest.approx(10, rel=1e-12)
    assert metrics["outliers"] == 1 and metrics["step_ms_max"] == pytest.approx(110)


@pytest.mark.parametrize(("replicas", "right"), [(1, 3200), (2, 6400), (4, 12800)])
@pytest.mark.parametrize("seed", range(3))
def test_case_1_throughput_is_the_whole_runs(replicas, right, seed):
    ranks = []
    for rank in range(replicas):
        factor = jitter(220, 10 * seed + rank, 0.003)
        ranks.append(
            np.concatenate([rows_of(ITERATION, 0.010 * factor[:200]), rows_of(BLOCK, 0.5 * factor[200:], size=50, begin=3)])
        )
    merged, note = samples.merge(ranks)
    start = find_steady(merged["duration"][merged["phase"] == ITERATION]).start
    metrics = summarise(merged, 32 * replicas, start)
    assert note == ""
    assert metrics["samples_per_s"] == pytest.approx(right, rel=0.02)
    assert metrics["samples_per_s_total"] == pytest.approx(right, rel=0.02)
    assert metrics["step_ms"] == pytest.approx(10, rel=0.02)


def test_the_slowest_rank_decides():
    merged, _ = samples.merge([rows_of(BLOCK, [0.5] * 8, 50), rows_of(BLOCK, [0.75] * 8, 50)])
    assert summarise(merged, 64)["step_ms"] == pytest.approx(15)


def test_case_3_the_warm_up_is_not_in_the_numbers():
    i = np.arange(400)
    series = 0.010 * (1 + 0.5 * np.exp(-i / 7.5) + 20 * (i < 2)) * jitter(400, 0, 0.005)
    rows = np.concatenate([rows_of(FIRST_STEP, [9.0]), rows_of(ITERATION, series), rows_of(TRAIN, [7.0] * 50)])
    metrics = summarise(rows, 32, find_steady(series).start)
    assert metrics["step_sync_ms"] == pytest.approx(10, rel=0.005)
    assert metrics["step_ms_max"] < 11.0
    assert summarise(rows, 32, 0)["step_ms_max"] > 200


def test_exact_arithmetic_of_both_passes():
    steady_ms = [8.0, 9, 10, 11, 13, 10, 10, 10, 100]
    rows = np.concatenate(
        [
            rows_of(ITERATION, [0.5, 0.5] + [ms / 1000 for ms in steady_ms], wait=0.25),
            rows_of(BLOCK, [0.5, 0.45, 0.55, 0.5, 0.5, 0.5, 0.9], size=100, wait=0.75),
        ]
    )
    metrics = summarise(rows, 64, steady_start=2)
    assert set(metrics) == SCHEMA
    assert metrics["step_ms"] == pytest.approx(5)
    assert metrics["samples_per_s"] == pytest.approx(12800)
    assert metrics["samples_per_s_total"] == pytest.approx(700 * 64 / 3.9)
    assert metrics["step_sync_ms"] == pytest.approx(10)
    assert metrics["sync_ratio"] == pytest.approx(2)
    assert metrics["step_ms_max"] == pytest.approx(100)
    assert metrics["outliers"] == 1  # Q1 = 10, Q3 = 11: the fence is 14
    assert metrics["step_ms_p5"] == pytest.approx(np.percentile(steady_ms, 5))
    assert metrics["step_ms_p95"] == pytest.approx(np.percentile(steady_ms, 95))
    assert metrics["step_ms_p99"] == pytest.approx(np.percentile(steady_ms, 99))
    assert metrics["data_wait_pct"] == pytest.approx(25)
    low, _, high = median_interval(1000 * rows["duration"][-7:] / 100, resamples=2000)
    assert (metrics["step_ms_low"], metrics["step_ms_high"]) == (low, high)
    assert low <= 5 <= high


@pytest.mark.parametrize("seed", range(20))
def test_step_times_throughput_is_the_batch(seed):
    random = np.random.RandomState(seed)
    batch = int(random.randint(1, 4096))
    blocks = rows_of(BLOCK, random.uniform(0.5, 3, 12), size=int(random.randint(1, 99)))
    rows = np.concatenate([rows_of(ITERATION, random.uniform(0.001, 2, 40)), blocks])
    metrics = summarise(rows, batch, steady_start=10)
    assert metrics["step_ms"] * metrics["samples_per_s"] == pytest.approx(1000 * batch, rel=1e-14)
    assert metrics["step_ms_low"] <= metrics["step_ms"] <= metrics["step_ms_high"]
    ordered = [metrics[name] for name in ("step_ms_p5", "step_sync_ms", "step_ms_p95", "step_ms_p99", "step_ms_max")]
    assert ordered == sorted(ordered)
    assert all(math.isfinite(value) for value in metrics.values())
    longer = rows.copy()
    longer["duration"] *= 2
    assert summarise(longer, batch, steady_start=10)["step_ms"] == pytest.approx(2 * metrics["step_ms"])


def test_smoke_runs_with_one_pass_only():
    one_block = summarise(rows_of(BLOCK, [0.5], size=50, wait=0.1), 32)
    assert one_block == pytest.approx({"step_ms": 10, "samples_per_s": 3200, "samples_per_s_total": 3200, "data_wait_pct": 10})
    iterations = summarise(rows_of(ITERATION, [0.01] * 20), 32, steady_start=0)
    assert set(iterations) == SCHEMA - {"sync_ratio"}
    assert iterations["step_ms"] == iterations["step_sync_ms"] == pytest.approx(10)
    one_iteration = summarise(rows_of(ITERATION, [0.01]), 32)
    assert one_iteration["samples_per_s"] == pytest.approx(3200) and "step_ms_low" not in one_iteration
    assert summarise(rows_of(TRAIN, [1.0]), 32) == {}
    assert summarise(rows_of(ITERATION, []), 32) == {}


def test_without_a_steady_start_the_last_half_counts():
    rows = rows_of(ITERATION, [0.02] * 10 + [0.01] * 10)
    assert summarise(rows, 1, None)["step_sync_ms"] == pytest.approx(10)
    assert summarise(rows, 1, None)["step_ms_max"] == pytest.approx(10)


def test_a_start_behind_the_last_row_leaves_no_distribution():
    assert summarise(rows_of(ITERATION, [0.01] * 5), 1, 9) == {}


def test_achieved():
    assert achieved(24e9, 1000) == {"tflops": pytest.approx(24)}
    assert achieved(24e9, 1000, peak_tflops=96) == {"tflops": pytest.approx(24), "utilization_pct": pytest.approx(25)}


# -- can the clock be trusted? ----------------------------------------------------------------------------------------------


def test_clock_that_adds_up():
    rows = rows_of(ITERATION, [0.01] * 100, begin=5.0, gap=0.002)
    wall = 100 * 0.01 + 99 * 0.002
    for factor in (1.0, 1.019, 0.981):
        assert clock_sanity(rows, wall * factor) is None
    for factor in (1.03, 0.97, 60.0):
        message = clock_sanity(rows, wall * factor)
        assert message is not None and "1.198 s" in message and "\n" not in message


def test_clock_sees_overlapping_missing_and_impossible_rows():
    rows = rows_of(ITERATION, [0.01] * 100)
    overlapping = rows.copy()
    overlapping["duration"] *= 1.5
    assert clock_sanity(overlapping, 1.0) is not None
    assert clock_sanity(rows[:90], 1.0) is not None
    for bad in (0.0, -0.01, math.nan, math.inf):
        broken = rows.copy()
        broken["duration"][50] = bad
        assert "duration" in (clock_sanity(broken, 1.0) or "")


def test_clock_looks_at_the_iteration_pass_only():
    rows = np.concatenate([rows_of(FIRST_STEP, [30.0]), rows_of(ITERATION, [0.01] * 100, begin=31), rows_of(BLOCK, [9.0] * 5)])
    assert clock_sanity(rows, 1.0) is None


@pytest.mark.parametrize("factor", [1, 0.9, 1.1])
def test_an_interruption_around_the_pass_is_not_the_clock_s(monkeypatch, factor):
    """On a busy machine the worker loses its CPU for some ms, perhaps while it reads its clocks; a clock that is 10 % off is seen."""
    lost = iter([0.005, 0.003])  # behind the first readings of the other clock

    def monotonic() -> float:
        read = factor * time.monotonic()
        time.sleep(next(lost, 0))
        return read

    rows: list[tuple] = []
    measure = {**SMOKE, "iterations": 12, "warmup": 2, "steady_required": False}
    framework = SimpleNamespace(
        step=lambda batch: (None, None), sync=lambda: time.sleep(0.002), value=lambda handle: 1.0, meet=lambda: None,
        to_device=lambda inputs, targets: None,
    )  # fmt: skip
    session = SimpleNamespace(
        run={"measure": measure, "task": "training", "data": {"placement": "device"}},
        framework=framework,
        recorder=SimpleNamespace(add=lambda *row: rows.append(row)),
        enter=lambda phase, **fields: None,
        agree=lambda what, decide, *arguments: [decide(*arguments), time.sleep(0.004)][0],
        result={"phases": {}},
    )
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=monotonic))
    loop.Measuring(session, SimpleNamespace(ring=lambda: [(0, 0)])).iteration_pass()
    problem = clock_sanity(np.array(rows, samples.ROW), session.result["wall_s"])
    assert len(rows) == 12 and (problem is None) == (factor == 1), problem


def test_clock_with_little_to_look_at():
    none = rows_of(ITERATION, [])
    assert clock_sanity(none, None) is None and clock_sanity(none, 0.0) is None
    assert "no rows" in (clock_sanity(none, 3.0) or "")
    assert "not known" in (clock_sanity(rows_of(ITERATION, [0.01]), None) or "")
    assert clock_sanity(rows_of(ITERATION, [0.01]), 0.0109) is None  # 0.9 ms: the loop's own lines
    assert clock_sanity(rows_of(ITERATION, [0.01]), 0.0111) is not None


def test_readback_of_a_sync_that_waits():
    assert readback_sanity([0.001, 0.0005, 0.0199]) is None
    assert readback_sanity([0.0199]) is None
    assert readback_sanity([0.001] * 6 + [0.4] * 3) is None  # pre-empted now and then
    assert readback_sanity([]) is None


def test_case_2_readback_of_a_sync_that_does_nothing():
    for fractions in ([0.02], [60.0] * 5, [0.03] * 5 + [0.001] * 4, [0.5, 0.7]):
        message = readback_sanity(fractions)
        assert message is not None and "below 2 %" in message and "\n" not in message
    assert readback_sanity([math.nan]) is not None and readback_sanity([-0.1]) is not None


def test_readback_of_tiny_blocks_has_a_floor():
    assert readback_sanity([0.05] * 3, [0.010] * 3) is None  # 0.5 ms
    assert readback_sanity([0.05] * 3, [0.5] * 3) is not None  # 25 ms
    assert readback_sanity([0.9] * 3, [0.002] * 3) is not None  # 1.8 ms


# -- A is faster than B -----------------------------------------------------------------------------------------------------


def test_five_repeats_that_differ():
    a, b = [10.0, 10.1, 9.9, 10.05, 9.95], [12.0, 12.1, 11.9, 12.05, 11.95]
    result = compare(a, b, "torch", "jax")
    assert result.ratio == pytest.approx(1.2) and result.low < 1.2 < result.high and result.low > 1.17
    assert result.p == pytest.approx(2 / 252)
    assert result.faster == "a" and result.verdict.startswith("torch is faster than jax (p = 0.0079, 20 %)")
    turned = compare(b, a, "jax", "torch")
    assert turned.faster == "b" and turned.verdict.startswith("torch is faster than jax")
    assert turned.ratio == pytest.approx(1 / 1.2)


def test_ties_within_a_side_do_not_hide_a_difference():
    assert compare([10.0, 10.0, 10.1, 9.9, 10.2], [12.0, 12.1, 11.9, 12.3, 12.4]).faster == "a"
    assert compare([10.0] * 5, [12.0] * 5).faster == "a"


def test_four_repeats_are_not_tested():
    result = compare([10.0, 10.1, 9.9, 10.05], [12.0] * 9)
    assert result.verdict == "not tested (needs repeat=1,…,5)"
    assert result.p is None and result.faster is None
    assert result.ratio == pytest.approx(12 / 10.025) and result.low is not None and result.low <= result.ratio <= result.high
    single = compare([10.0], [12.0])
    assert (single.ratio, single.low, single.high) == (1.2, None, None)


def test_a_small_effect_is_no_difference_however_sure():
    a = 10 * jitter(20, 0, 0.0005)
    result = compare(a, 1.015 * a)
    assert result.p < 0.01 and result.faster is None and result.verdict.startswith("no difference shown between A and B")
    assert compare(a, 1.025 * a).faster == "a"


def test_a_large_effect_that_may_be_chance_is_no_difference():
    result = compare([10, 11, 12, 13, 14.5], [10.5, 11.5, 12.9, 14, 15])
    assert result.p > 0.01 and result.ratio > 1.02 and result.faster is None


def test_equal_sides_are_rarely_told_apart():
    found = sum(compare(jitter(5, seed, 0.05), jitter(5, 1000 + seed, 0.05)).faster is not None for seed in range(200))
    assert found <= 6  # p < 0.01


@pytest.mark.parametrize("bad", [[], [0.0], [-1.0], [math.inf], [math.nan]])
def test_compare_refuses_what_is_no_step_time(bad):
    for sides in ((bad, [1.0]), ([1.0], bad)):
        with pytest.raises(ValueError, match="positive and finite"):
            compare(*sides)


def test_the_headline_interval_uses_at_least_2000_resamples():
    assert statistics.RESAMPLES >= 2000

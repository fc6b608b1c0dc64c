"""The steady state: found where there is one, refused where there is none, at several noise levels, lengths and seeds."""

import math

import numpy as np
import pytest

from crosstrain_worker import steady
from crosstrain_worker.steady import blocks, enough, find_steady, half_width, median_interval

STANDARD = {"min_s": 5.0, "max_s": 60.0, "window": 20, "min_iterations": 40, "interval_required": True, "ci_target": 0.01}
SMOKE = {"min_s": 0.0, "max_s": 10.0, "window": 20, "min_iterations": 20, "interval_required": False, "ci_target": 0.01}


def noisy(shape, sigma: float, seed: int, outliers: float = 0.01, scale: float = 0.01) -> np.ndarray:
    """A series around `shape` (relative): lognormal noise of `sigma`, and a fraction of outliers 1.5 to 10 times as long."""
    random = np.random.RandomState(seed)
    values = scale * np.asarray(shape, float) * np.exp(random.normal(0, sigma, len(shape)))
    values[random.random_sample(len(shape)) < outliers] *= random.uniform(1.5, 10)
    return values


def warming_up(n: int) -> np.ndarray:
    """Two spikes, a decay that falls below 2 % at iteration 24, then flat."""
    i = np.arange(n)
    return 1 + 0.5 * np.exp(-i / 7.5) + 8.0 * (i < 2)


# -- the start --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [60, 200, 1000])
@pytest.mark.parametrize("sigma", [0.002, 0.02, 0.05])
def test_a_flat_series_is_steady(n, sigma):
    found = [find_steady(noisy(np.ones(n), sigma, seed)) for seed in range(200)]
    assert sum(result.start is not None for result in found) >= 190, {result.reason for result in found}
    assert np.median([result.start for result in found if result.start is not None]) <= 10


@pytest.mark.parametrize("sigma", [0.0, 0.005, 0.02, 0.04])
@pytest.mark.parametrize("n", [200, 1000, 20000])
@pytest.mark.parametrize("seed", range(5))
def test_spike_decay_flat_starts_behind_the_decay(sigma, n, seed):
    start, reason = find_steady(noisy(warming_up(n), sigma, seed))
    assert start is not None, reason
    assert 8 <= start <= 60  # the median of window [15, 35) is within 2 %; noise moves it by a few steps of 5
    if n <= 1000:  # beyond, windows are tried in longer steps
        assert start <= 40
    assert str(start) in reason


def test_without_noise_the_start_is_exact():
    series = np.r_[np.full(50, 0.013), np.full(150, 0.010)]
    assert find_steady(series).start == 50
    assert find_steady(np.full(200, 0.010)).start == 0


def test_slow_iterations_at_the_very_start_are_warm_up():
    series = noisy(np.r_[30, 8, 2, 1.3, np.ones(196)], 0.01, 1, outliers=0)
    assert find_steady(series).start == 4
    late = noisy(np.r_[np.ones(3), 8, np.ones(196)], 0.01, 1, outliers=0)
    assert find_steady(late).start == 0  # an outlier inside stays in


# -- no steady state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.0, 0.01, 0.02])
@pytest.mark.parametrize("n", [200, 1000, 5000])
@pytest.mark.parametrize("period", [2, 3, 5, 7, 10, 16, 20, 33, 50, 64, 100])
def test_a_saw_tooth_is_not_steady(period, n, sigma):
    i = np.arange(n)
    for seed in range(3):
        series = noisy(1 + 0.3 * (i % period) / period, sigma, seed)
        assert find_steady(series).start is None
    if sigma == 0 and n == 1000 and period >= 3:
        assert "repeats every" in find_steady(series).reason


def test_the_period_of_a_cycle_is_named():
    for period, n in ((10, 1000), (4, 200), (64, 6000)):
        reason = find_steady(noisy(1 + 0.3 * (np.arange(n) % period) / period, 0.01, 0)).reason
        assert reason.startswith(f"repeats every {period} iterations"), reason


def test_a_long_cycle_below_the_noise_is_found():
    n, period = 30000, 3000
    start, reason = find_steady(noisy(1 + 0.3 * (np.arange(n) % period) / period, 0.15, 0))
    assert start is None and reason.startswith("repeats every ")
    assert int(reason.split()[2]) == pytest.approx(period, rel=0.06)  # to the grid of the reduced series


@pytest.mark.parametrize("sigma", [0.0, 0.005, 0.01, 0.02])
@pytest.mark.parametrize("n", [100, 200, 1000, 20000])
@pytest.mark.parametrize("sign", [1, -1])
def test_ten_percent_drift_is_not_steady(n, sigma, sign):
    for seed in range(10):
        assert find_steady(noisy(1 + sign * 0.1 * np.arange(n) / n, sigma, seed)).start is None


def test_the_drift_test_itself():
    """A drift that starts where every window up to the middle agrees: only the slope over the steady part can tell."""
    rising = 0.01 * (1 + 0.036 * np.arange(400) / 400)
    start, reason = find_steady(noisy(rising, 0.005, 1, scale=1))
    assert start is None and reason.startswith("drifts by +2.")
    slight = 0.01 * (1 + 0.012 * np.arange(400) / 400)
    assert find_steady(noisy(slight, 0.005, 1, scale=1)).start is not None


def test_a_level_that_changes_in_the_last_half_is_not_steady():
    for level in (0.8, 1.2):
        assert find_steady(noisy(np.r_[np.ones(120), np.full(80, level)], 0.01, 3)).start is None


def test_a_wandering_level_is_not_steady():
    for seed in range(10):
        walk = np.zeros(2000)
        for i, step in enumerate(np.random.RandomState(seed).normal(0, 0.05 * math.sqrt(1 - 0.95**2), 1999)):
            walk[i + 1] = 0.95 * walk[i] + step
        assert find_steady(0.01 * np.exp(walk)).start is None
        assert find_steady(0.01 * np.exp(walk / 10)).start is not None  # 0.5 %: of no importance


def test_noise_that_grows_is_not_steady():
    random = np.random.RandomState(0)
    series = 0.01 * np.exp(random.normal(0, 1, 400) * np.where(np.arange(400) < 200, 0.005, 0.05))
    assert find_steady(series).start is None or find_steady(series).start > 150


# -- what must not fail -----------------------------------------------------------------------------------------------------


def test_very_regular_series_are_steady():
    for seed in range(50):
        random = np.random.RandomState(seed)
        series = 0.01 + np.r_[np.zeros(100), random.uniform(0, 4e-5, 100)]  # the last half is "rougher", all below 0.5 %
        assert find_steady(series).start == 0
    assert find_steady([0.01] * 40).start == 0


def test_microseconds_are_steady():
    for seed in range(50):
        series = 2e-6 + 1e-7 * np.random.RandomState(seed).randint(0, 8, 400)
        assert find_steady(series).start is not None
    assert find_steady(np.r_[np.full(20, 2.0e-6), np.full(380, 2.5e-6)]).start == 0  # half a microsecond is nothing


def test_every_tenth_iteration_slower_is_steady():
    found = 0
    for seed in range(100):
        series = noisy(np.where(np.arange(200) % 10 == 9, 11, 1), 0.02, seed)
        found += find_steady(series).start is not None
    assert found >= 95


def test_slow_iterations_need_windows_of_five():
    steps = np.r_[5.0, 2.2 + 0.01 * np.array([0, 1, 2, 1, 0, 2, 1, 0, 1, 2, 1])]
    assert find_steady(steps).start == 1
    assert find_steady(steps / 4).start is None  # 0.5 s: windows of 20
    assert "at least 10 are needed" in find_steady(steps[:9]).reason


@pytest.mark.parametrize("series", [[], [0.01] * 39, [0.01] * 100 + [float("nan")], [0.01] * 100 + [float("inf")]])
def test_nothing_to_find(series):
    start, reason = find_steady(series)
    assert start is None and reason and "\n" not in reason


# -- the interval -----------------------------------------------------------------------------------------------------------


def test_median_interval():
    values = np.random.RandomState(3).normal(10, 1, 101)
    low, median, high = median_interval(values)
    assert median == np.median(values) and low < median < high
    assert median_interval(values) == (low, median, high) != median_interval(values, seed=1)
    wide = median_interval(values, confidence=0.99)
    assert wide[0] < low and wide[2] > high
    scaled = median_interval(1000 * values)
    assert scaled == pytest.approx((1000 * low, 1000 * median, 1000 * high))
    assert median_interval([2.0] * 6) == (2.0, 2.0, 2.0)


def test_few_values_have_no_interval():
    low, median, high = median_interval([3.0, 1.0, 2.0, 9.0, 4.0])
    assert math.isnan(low) and math.isnan(high) and median == 3.0
    assert all(math.isnan(value) for value in median_interval([]))
    assert math.isnan(half_width([1.0] * 5))


@pytest.mark.parametrize(("n", "least", "most"), [(10, 0.80, 1.0), (30, 0.85, 0.99), (200, 0.90, 0.99)])
def test_the_interval_covers_the_true_median(n, least, most):
    covered = 0
    for seed in range(200):
        low, _, high = median_interval(np.random.RandomState(seed).normal(10, 1, n))
        covered += low <= 10 <= high
    assert least <= covered / 200 <= most


def test_dependent_values_have_a_wider_interval():
    """Blocks keep the neighbours' dependence: resampling single values would ignore it."""
    wider = []
    for seed in range(20):
        series = np.repeat(np.random.RandomState(seed).normal(10, 1, 100), 8)
        shuffled = np.random.RandomState(seed).permutation(series)
        wider.append(half_width_exact(series) / half_width_exact(shuffled))
    assert np.median(wider) > 1.5


def half_width_exact(values):
    low, _, high = median_interval(values)
    return high - low


def test_half_width_of_a_long_series_is_that_of_all_values():
    """For normal values: 1.96 * 1.2533 * sigma / sqrt(n)."""
    values = np.random.RandomState(0).normal(1.0, 0.1, 20000)
    assert half_width(values) == pytest.approx(1.96 * 1.2533 * 0.1 / math.sqrt(20000), rel=0.25)


# -- when to stop -----------------------------------------------------------------------------------------------------------


def test_enough_when_steady_and_narrow_but_not_before_the_minima():
    series = noisy(np.ones(400), 0.01, 0)
    assert enough(series, 4.0, STANDARD) is True
    assert enough(list(series), 4.0, STANDARD) is True
    assert enough(series, 2.4, STANDARD) is False  # half of min_s
    assert enough(series, 2.6, STANDARD) is True
    assert enough(series[:39], 4.0, STANDARD) is False
    assert enough(series, 4.0, {**STANDARD, "min_iterations": 401}) is False
    assert enough([], 100.0, STANDARD) is False


def test_not_enough_while_wide_or_unsteady_until_the_budget_is_spent():
    wide, unsteady = noisy(np.ones(60), 0.10, 0), noisy(1 + 0.1 * np.arange(400) / 400, 0.005, 0)
    assert find_steady(wide).start is not None and half_width(wide) > 0.01
    for series in (wide, unsteady):
        assert enough(series, 29.9, STANDARD) is False
        assert enough(series, 30.0, STANDARD) is True  # half of max_s
    assert enough(wide, 10.0, {**STANDARD, "ci_target": 0.2}) is True


def test_slow_iterations_get_ten_also_beyond_the_budget():
    assert enough([7.0] * 9, 63.0, STANDARD) is False
    assert enough([7.0] * 10, 70.0, STANDARD) is True
    assert enough([2.0] * 10, 20.0, STANDARD) is True  # not min_iterations = 40


def test_smoke_needs_one_window_and_no_interval():
    wild = noisy(1 + np.arange(20), 0.5, 0)
    assert enough(wild[:19], 0.2, SMOKE) is False
    assert enough(wild, 0.2, SMOKE) is True
    assert enough([9.0], 9.0, SMOKE) is True  # the budget ends it
    assert enough([1.1] * 4, 4.4, SMOKE) is False
    assert enough([1.1] * 5, 4.9, SMOKE) is True


@pytest.mark.parametrize("seed", range(3))
def test_the_online_loop_ends_behind_the_warm_up(seed):
    series = noisy(warming_up(6000), 0.02, seed)
    elapsed = np.cumsum(series)
    checks = [n for n in range(100, 6000, 100) if enough(series[:n], elapsed[n - 1], STANDARD)]
    assert 2.5 <= elapsed[checks[0] - 1] <= 6
    assert 8 <= find_steady(series[: checks[0]]).start <= 50


# -- blocks -----------------------------------------------------------------------------------------------------------------


def test_blocks_last_at_least_half_a_second():
    assert blocks(0.01, 5.0) == (50, 10)
    assert blocks(0.1, 5.0) == (5, 10)
    assert blocks(0.3, 6.0) == (2, 10)
    assert blocks(2.0, 20.0) == (1, 10)
    assert blocks(0.01, 5.0, block_s=1.0) == (100, 5)
    assert blocks(3.0, 1.0) == (1, 1)
    size, count = blocks(0.0, 5.0)
    assert size >= 1 and count >= 1
    for step_s in (0.0007, 0.0123, 0.0499999, 0.25, 0.4999, 0.5, 0.51):
        size, _ = blocks(step_s, 30.0)
        assert size * step_s >= 0.5 * (1 - 1e-9) and (size - 1) * step_s < 0.5


def test_reduced_series_keep_level_and_ignore_single_outliers():
    values = np.ones(1000)
    values[::10] = 50
    reduced, size = steady._reduce(values, 200)
    assert size == 5 and len(reduced) == 200 and (reduced == 1).all()
    same, one = steady._reduce(values[:200], 200)
    assert one == 1 and same.tolist() == values[:200].tolist()

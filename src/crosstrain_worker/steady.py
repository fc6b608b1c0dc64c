"""When a series of iteration times is steady, and when enough of it was measured. Pure arithmetic, for worker and driver.

The rule: windows of 20 iterations; the steady part begins at the first window whose median lies within 2 % of the last half's and
whose interquartile range (IQR) is between half and twice the last half's, no later than the middle of the series; and that part
must not drift by more than 2 % (Theil-Sen). Iterations over 1 s: windows of 5.

Our additions, each because the rule alone gets a series wrong that occurs:
- IQRs below 0.5 % of the median count as equal, differences below 1 us as none: very regular series would fail on timer noise.
- A drift must also be larger than chance (Mann-Kendall, p < 0.01): with 5 % noise and 60 iterations the slope alone exceeds 2 %
  in more than a third of perfectly flat series.
- A series whose order explains at least half of its spread, and that spreads over more than 2 %, is not steady: every window of a
  saw-tooth looks like its last half.
- Iterations at the very start of the first good window that lie above the last half's Q3 + 3 IQR belong to the warm-up: the median
  of 20 hides up to 9 slow ones, the IQR 4.
"""

from collections import namedtuple

import numpy as np

TOLERANCE = 0.02  # of the median: distance of a window, drift, spread of a cycle
IQR_RATIO = 2.0
REGULAR = 0.005  # IQRs below this fraction of the median count as equal
TIMER_S = 1e-6  # what perf_counter and the call around it can not tell apart
SLOW_S = 1.0  # iterations longer than this use SLOW_WINDOW
SLOW_WINDOW = 5
CHANCE_Z = 2.576  # two-sided p = 0.01
POINTS = 200  # long series are reduced to about this many medians for the drift test (19,900 slopes, under 1 ms)
CYCLE_POINTS = 4096  # newest iterations searched for a cycle
INTERVAL_POINTS = 500  # long series are reduced to this many medians for the interval of the online decision
MIN_INTERVAL = 6  # fewer values give no interval
PASS_SHARE = 0.5  # of the budget, for each of the two passes

#: start: index of the first steady iteration, or None; reason: one line
Steady = namedtuple("Steady", "start reason")


def find_steady(durations, window=20):
    """Where the steady part of a series begins.

    durations: (n,) seconds of consecutive iterations. Returns Steady(start, reason); start is None when there is no steady state.
    """
    values = np.asarray(durations, dtype=np.float64).ravel()
    if not np.isfinite(values).all():
        return Steady(None, "a duration is not a finite number")
    n = len(values)
    window = window_of(values, window)
    if n < 2 * window:
        return Steady(None, "%d iterations, at least %d are needed (two windows)" % (n, 2 * window))
    start = _first_window(values, window)
    if start is None:
        return Steady(None, "none of the windows of %d iterations in the first half agrees with the last half" % window)
    part = values[start:]
    drift, z = _drift(part)
    median = np.median(part)
    if abs(drift) > _tolerance(median) and abs(z) > CHANCE_Z:
        return Steady(None, "drifts by %+.1f %% over the %d iterations from %d" % (100 * drift / median, len(part), start))
    for series, step in ((part[-CYCLE_POINTS:], 1), _reduce(part, POINTS)):  # short periods, then long ones
        lag = _cycle(series)
        if lag is not None:
            what = "repeats every %d iterations" % (lag * step) if lag > 1 else "wanders"
            return Steady(None, "%s, by more than %g %% of the median" % (what, 100 * TOLERANCE))
    return Steady(start, "steady from iteration %d of %d" % (start, n))


def window_of(values, window=20):
    """The window for these durations (seconds): `window`, or 5 when the median iteration takes more than 1 s."""
    return min(window, SLOW_WINDOW) if len(values) and np.median(values) > SLOW_S else window


def _tolerance(median):
    return max(TOLERANCE * median, TIMER_S)


def _first_window(values, window):
    """Start of the first window that agrees with the last half (windows overlap; at most about 2000), or None."""
    n = len(values)
    half = values[n // 2 :]
    q1, median, q3 = np.percentile(half, [25, 50, 75])
    floor = max(REGULAR * median, TIMER_S)
    half_iqr = max(q3 - q1, floor)
    starts = np.arange(0, n // 2 + 1, max(1, window // 4, n // 4000))
    starts = starts[starts + window <= n]
    low, middle, high = np.percentile(values[starts[:, None] + np.arange(window)], [25, 50, 75], axis=1)
    ratio = np.maximum(high - low, floor) / half_iqr
    good = (np.abs(middle - median) <= _tolerance(median)) & (ratio <= IQR_RATIO) & (ratio >= 1 / IQR_RATIO)
    if not good.any():
        return None
    start = int(starts[np.argmax(good)])
    fence = q3 + 3 * half_iqr
    while start < n // 2 and values[start] > fence:
        start += 1
    return start


def _reduce(values, points):
    """(medians of consecutive groups, group size): at most `points` of them. Odd groups, so that one outlier leaves no trace."""
    size = -(-len(values) // points)
    if size <= 1:
        return values, 1
    size += 1 - size % 2
    groups = len(values) // size
    return np.median(values[len(values) - groups * size :].reshape(groups, size), axis=1), size


def _drift(values):
    """(drift in seconds over the whole series, Mann-Kendall z).

    Drift = Theil-Sen slope (the median of all pairwise slopes; Sen 1968, J. Am. Stat. Assoc. 63) times the length. z is the
    Mann-Kendall statistic of the same pairs, about standard normal when there is no trend.
    """
    series, size = _reduce(values, POINTS)
    m = len(series)
    first, second = np.triu_indices(m, 1)
    rise = series[second] - series[first]
    slope = np.median(rise / (second - first)) / size
    z = np.sign(rise).sum() / np.sqrt(m * (m - 1) * (2 * m + 5) / 18.0)
    return slope * len(values), z


def _cycle(values):
    """The lag at which a series resembles itself most, when that explains its spread; None when the order looks like chance.

    Autocorrelation of the ranks (outliers count no more than any other value) at lags up to a third of the length. At least 0.5:
    half of the variance is structure; and above 3.5 standard errors, so that short series are not accused.
    """
    n = len(values)
    q1, median, q3 = np.percentile(values, [25, 50, 75])
    lags = np.arange(1, n // 3 + 1)
    if not len(lags) or q3 - q1 <= _tolerance(median):
        return None
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]  # ties share their mean rank
    ranks -= ranks.mean()
    power = np.abs(np.fft.rfft(ranks, 2 * n)) ** 2
    covariance = np.fft.irfft(power, 2 * n)[: len(lags) + 1]
    correlation = covariance[1:] / covariance[0] * n / (n - lags)
    found = correlation > np.maximum(0.5, 3.5 / np.sqrt(n - lags))
    if not found.any():
        return None
    return int(lags[np.argmax(correlation > correlation[found].max() - 0.02)])  # the period itself, not twice it


def median_interval(values, confidence=0.95, seed=0, resamples=500):
    """(low, median, high) of a series: moving-block bootstrap percentile interval of the median.

    Blocks of floor(n^(1/3)) consecutive values keep the dependence of neighbours (Kuensch 1989, Ann. Statist. 17(3); the rate
    after Hall, Horowitz & Jing 1995, Biometrika 82). Fewer than 6 values give (nan, median, nan). The same seed gives the same
    interval. With few values it is too narrow: a 95 % interval of independent values covers about 87 % of the time at n = 10,
    91 % at 30, 95 % from 100 on.
    """
    values = np.asarray(values, dtype=np.float64).ravel()
    n = len(values)
    nan = float("nan")
    if not n:
        return nan, nan, nan
    median = float(np.median(values))
    if n < MIN_INTERVAL:
        return nan, median, nan
    length = int(n ** (1 / 3.0) + 1e-9)
    starts = np.random.RandomState(seed).randint(0, n - length + 1, size=(resamples, -(-n // length), 1))
    picks = (starts + np.arange(length)).reshape(resamples, -1)[:, :n]
    medians = np.median(values[picks], axis=1)
    low, high = np.percentile(medians, [50 * (1 - confidence), 50 * (1 + confidence)])
    return float(low), median, float(high)


def half_width(values):
    """Half the 95 % interval of the median, as a fraction of the median; NaN for fewer than 6 values. Long series are reduced."""
    low, median, high = median_interval(_reduce(np.asarray(values, dtype=np.float64), INTERVAL_POINTS)[0])
    return (high - low) / 2 / median if median > 0 else float("nan")


def enough(durations, elapsed_s, measure):
    """True when the iteration pass may stop. Costs about 10 ms: call it between iterations, every 0.25 s or so.

    durations: seconds of all iterations so far; elapsed_s: since the pass began; measure: run.json's `measure` (min_s, max_s,
    window, min_iterations, interval_required, ci_target). min_s and max_s are for both passes, so each has half of them. The pass
    stops when the series is steady and the interval of its median narrow, not before min_s and min_iterations (10 when iterations
    take over 1 s); or when max_s is spent, though not before there are enough iterations to tell a steady state. Where no interval
    is required (smoke) one window is enough, and max_s ends the pass after any number of iterations.
    """
    n = len(durations)
    spent = n > 0 and elapsed_s >= PASS_SHARE * measure["max_s"]
    early = elapsed_s < PASS_SHARE * measure["min_s"]
    windows = 2 if measure["interval_required"] else 1
    if not spent and (early or n < windows * SLOW_WINDOW):
        return False
    values = np.asarray(durations, dtype=np.float64)
    needed = windows * window_of(values, measure["window"])
    if np.median(values) <= SLOW_S:
        needed = max(needed, measure["min_iterations"])
    if not measure["interval_required"]:
        return spent or n >= needed
    if spent or n < needed:
        return n >= needed
    start = find_steady(values, measure["window"]).start
    return start is not None and bool(half_width(values[start:]) <= measure["ci_target"])


def blocks(step_s, budget_s, block_s=0.5):
    """(iterations per block, number of blocks): a block lasts at least block_s, all together about budget_s; both at least 1.

    step_s: seconds per iteration. Best taken from a first block: iterations with a sync each are longer, and the blocks too short.
    """
    step_s = max(step_s, TIMER_S)
    size = max(1, int(np.ceil(block_s / step_s - 1e-9)))
    return size, max(1, int(budget_s / (size * step_s) + 1e-9))

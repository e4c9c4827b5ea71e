"""Confidence intervals by resampling whole windows, and paired comparison of answers.

Tokens of a window share their context, so their scores correlate and an interval over tokens would be too narrow. The
bootstrap here draws windows with replacement; every figure of a text comes from the same draws, candidate and
reference together, so that a ratio's interval is that of the ratio and not of two independent perplexities.

Sources: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13 (percentile interval); McNemar,
"Note on the sampling error of the difference between correlated proportions" (1947), in its exact binomial form;
Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
"""

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from blockscale.errors import UsageError
from blockscale.evaluation.result import NAN, Interval

Array = NDArray[np.float64]
CONFIDENCE = 0.95
NUM_RESAMPLES = 4000
CHUNK_DRAWS = 2**22  # counts held at once: 32 MiB


def bootstrap_means(sums: Array, sizes: Array, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Array:
    """Resampled means per token. `sums` [S, W]: S statistics summed over each of W windows; `sizes` [W] -> [S, R]."""
    num_windows = len(sizes)
    rng = np.random.default_rng(seed)
    even = np.full(num_windows, 1 / num_windows)
    means = []
    step = max(1, CHUNK_DRAWS // num_windows)
    for begin in range(0, num_resamples, step):
        # how often each window is drawn: [r, W]
        counts = rng.multinomial(num_windows, even, size=min(step, num_resamples - begin)).astype(np.float64)
        with np.errstate(invalid="ignore"):  # 0 * inf, where a window's score is infinite
            means.append((sums @ counts.T) / (counts @ sizes))
    return np.concatenate(means, axis=1)


def percentile_interval(value: float, replicates: Array) -> Interval:
    """The middle 95 % of `replicates` [R] around `value`; NaN limits where the replicates are not all numbers."""
    if len(replicates) == 0 or np.isnan(replicates).any():
        return Interval(value)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(replicates, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def mean_intervals(sums: Array, sizes: Array, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> list[Interval]:
    """Mean per token and interval of each of S statistics, `sums` [S, W], paired. One window has no interval."""
    values = sums.sum(1) / sizes.sum()
    if len(sizes) < 2:
        return [Interval(float(value)) for value in values]
    replicates = bootstrap_means(sums, sizes, num_resamples, seed)
    return [percentile_interval(float(value), row) for value, row in zip(values, replicates, strict=True)]


def exp_interval(interval: Interval) -> Interval:
    """exp of a figure and its limits (percentiles go along with a monotone map); overflow gives inf."""
    with np.errstate(over="ignore"):
        value, low, high = (float(np.exp(x)) for x in (interval.value, interval.low, interval.high))
    return Interval(value, low, high)


def accuracy_interval(num_right: int, num_samples: int) -> Interval:
    """Fraction right, with Wilson's score interval, which behaves near 0 and 1."""
    if num_samples == 0:
        return Interval(NAN)
    limits = stats.binomtest(num_right, num_samples).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(num_right / num_samples, float(limits.low), float(limits.high))


def score_interval(scores: Array, seed: int = 0) -> Interval:
    """Mean of sample scores [N]: Wilson's interval for right and wrong, the bootstrap's for other scores."""
    if np.isin(scores, (0.0, 1.0)).all():
        return accuracy_interval(int(scores.sum()), len(scores))
    return mean_intervals(scores[None], np.ones(len(scores)), seed=seed)[0]


def paired_difference(candidate: Array, reference: Array, seed: int = 0) -> Interval:
    """mean(candidate - reference) over the same samples, [N] each, with its bootstrap interval."""
    if len(candidate) != len(reference) or len(candidate) == 0:
        raise UsageError(f"cannot pair {len(candidate)} scores with {len(reference)}")
    return mean_intervals((candidate - reference)[None], np.ones(len(candidate)), seed=seed)[0]


def mcnemar(candidate: NDArray[np.bool_], reference: NDArray[np.bool_]) -> tuple[int, int, float]:
    """(gained, lost, p): answers only the candidate, only the reference has right; exact two-sided p of equal odds."""
    gained = int((candidate & ~reference).sum())
    lost = int((reference & ~candidate).sum())
    if gained + lost == 0:
        return 0, 0, 1.0
    return gained, lost, float(stats.binomtest(gained, gained + lost, 0.5).pvalue)

import math

import numpy as np
import pytest

from blockscale.errors import UsageError
from blockscale.evaluation.result import Interval
from blockscale.evaluation.statistics import (
    accuracy_interval,
    bootstrap_means,
    exp_interval,
    mcnemar,
    mean_intervals,
    paired_difference,
    percentile_interval,
    score_interval,
)


def test_the_same_seed_gives_the_same_interval_and_another_another() -> None:
    rng = np.random.default_rng(0)
    sums, sizes = rng.normal(size=(1, 30)), np.full(30, 511.0)
    assert mean_intervals(sums, sizes, seed=3) == mean_intervals(sums, sizes, seed=3)
    assert mean_intervals(sums, sizes, seed=3) != mean_intervals(sums, sizes, seed=4)


def test_every_replicate_is_a_mean_per_token() -> None:
    """With each window's sum a constant times its size, every resample gives that constant."""
    sizes = np.array([3.0, 500.0, 511.0, 17.0])
    replicates = bootstrap_means(np.stack((2 * sizes, 5 * sizes)), sizes, num_resamples=100)
    assert replicates.shape == (2, 100)
    np.testing.assert_allclose(replicates[0], 2.0, rtol=1e-12)
    np.testing.assert_allclose(replicates[1], 5.0, rtol=1e-12)


def test_statistics_are_resampled_together() -> None:
    rng = np.random.default_rng(1)
    nll = rng.normal(3, 1, size=200)
    replicates = bootstrap_means(np.stack((nll, nll + 0.01)), np.ones(200), num_resamples=200)
    np.testing.assert_allclose(replicates[1] - replicates[0], 0.01, rtol=1e-9)


def test_spread_matches_the_central_limit() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=400)
    replicates = bootstrap_means(x[None], np.ones(400), num_resamples=4000)[0]
    assert replicates.std() == pytest.approx(x.std() / 20, rel=0.05)
    assert replicates.mean() == pytest.approx(x.mean(), abs=4 * x.std() / 20 / math.sqrt(4000))


def test_coverage_of_correlated_tokens() -> None:
    """Tokens that share their window's mood: about 95 of 100 intervals over windows hold the true mean."""
    rng = np.random.default_rng(3)
    hits = 0
    for seed in range(200):
        moods = 2 + 0.3 * rng.normal(size=60)
        sums = (moods + 0.1 * rng.normal(size=60)) * 100
        (interval,) = mean_intervals(sums[None], np.full(60, 100.0), num_resamples=500, seed=seed)
        hits += interval.low <= 2 <= interval.high
    assert 180 <= hits <= 198  # 190 expected; binomial, 3 standard deviations


def test_chunks_hold_all_resamples(monkeypatch) -> None:
    from blockscale.evaluation import statistics

    monkeypatch.setattr(statistics, "CHUNK_DRAWS", 100)
    replicates = bootstrap_means(np.arange(30.0)[None], np.ones(30), num_resamples=50)
    assert replicates.shape == (1, 50)
    assert len(np.unique(replicates)) > 10


def test_one_window_has_no_interval() -> None:
    (interval,) = mean_intervals(np.array([[5.0]]), np.array([10.0]))
    assert interval.value == 0.5
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_no_numbers_have_no_interval(bad) -> None:
    (interval,) = mean_intervals(np.array([[1.0, bad, 2.0]]), np.ones(3))
    assert not math.isfinite(interval.value)
    assert math.isnan(interval.low)


def test_percentiles() -> None:
    interval = percentile_interval(50.0, np.arange(101.0))
    assert (interval.low, interval.high) == pytest.approx((2.5, 97.5))


def test_exp_keeps_order_and_survives_overflow() -> None:
    assert exp_interval(Interval(0.0, -1.0, 1.0)) == Interval(1.0, pytest.approx(1 / math.e), pytest.approx(math.e))
    assert exp_interval(Interval(1e4, 1e3, 1e5)).value == math.inf
    assert math.isnan(exp_interval(Interval(math.nan)).value)


def test_wilson_near_the_ends() -> None:
    nothing = accuracy_interval(0, 20)
    assert nothing.value == 0
    assert nothing.low == pytest.approx(0, abs=1e-12)
    assert nothing.high == pytest.approx(1.959964**2 / (20 + 1.959964**2), rel=1e-5)  # closed form for 0 of n
    assert accuracy_interval(20, 20).high == pytest.approx(1)
    assert math.isnan(accuracy_interval(0, 0).value)


def test_scores_other_than_right_and_wrong_are_bootstrapped() -> None:
    interval = score_interval(np.array([0.2, 0.4, 0.9, 0.5]))
    assert interval.value == pytest.approx(0.5)
    assert 0.2 <= interval.low < 0.5 < interval.high <= 0.9
    assert score_interval(np.array([1.0, 0.0])) == accuracy_interval(1, 2)


def test_mcnemar_is_the_binomial_tail() -> None:
    candidate = np.array([True] * 10 + [False] * 6 + [True] * 1)
    reference = np.array([True] * 10 + [True] * 6 + [False] * 1)
    gained, lost, p = mcnemar(candidate, reference)
    assert (gained, lost) == (1, 6)
    assert p == pytest.approx(2 * (1 + 7) / 2**7)


def test_mcnemar_of_equal_answers() -> None:
    assert mcnemar(np.array([True, False]), np.array([True, False])) == (0, 0, 1.0)


def test_paired_difference() -> None:
    ours, theirs = np.array([1.0, 0, 1, 1] * 25), np.array([1.0, 1, 1, 1] * 25)
    interval = paired_difference(ours, theirs)
    assert interval.value == -0.25
    assert -0.4 < interval.low < -0.25 < interval.high < -0.1
    assert paired_difference(ours, ours) == Interval(0.0, 0.0, 0.0)
    with pytest.raises(UsageError):
        paired_difference(ours, theirs[:-1])
    with pytest.raises(UsageError):
        paired_difference(ours[:0], theirs[:0])

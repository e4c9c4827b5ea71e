import math

import pytest

from blockscale.errors import CheckFailed, UsageError
from blockscale.evaluation.gate import check_gates
from blockscale.evaluation.result import Interval, Report, TextResult


def report(*texts: tuple[str, float, float]) -> Report:
    return Report(
        "m",
        "r",
        texts=tuple(
            TextResult(
                name,
                100,
                4,
                Interval(9.0),
                Interval(8.0),
                perplexity_ratio=Interval(ratio, ratio - 0.01, ratio + 0.01),
                kl_mean=Interval(kl),
            )
            for name, kl, ratio in texts
        ),
    )


def test_limits_that_hold() -> None:
    check_gates(report(("en", 0.1, 1.05), ("pt", 0.2, 1.1)), max_kl=0.2, max_perplexity_ratio=1.1)
    check_gates(report(("en", 0.1, 1.05)))
    check_gates(Report("m"))


def test_a_failure_names_text_value_and_limit() -> None:
    with pytest.raises(CheckFailed) as failure:
        check_gates(report(("en", 0.1, 1.05), ("pt", 0.25, 1.3)), max_kl=0.2, max_perplexity_ratio=1.1)
    message = str(failure.value)
    assert failure.value.exit_code == 1
    assert "mean KL (nats) on pt is 0.25, limit 0.2" in message
    assert "perplexity ratio on pt is 1.3 (95 % interval 1.29 to 1.31), limit 1.1" in message
    assert "on en" not in message


def test_one_bad_text_does_not_hide_in_the_mean() -> None:
    texts = report(("en", 0.0, 1.0), ("pt", 0.3, 1.0))
    assert texts.kl_mean < 0.2
    with pytest.raises(CheckFailed, match="pt"):
        check_gates(texts, max_kl=0.2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_fails(bad) -> None:
    with pytest.raises(CheckFailed):
        check_gates(report(("en", bad, 1.0)), max_kl=1e9)
    with pytest.raises(CheckFailed):
        check_gates(report(("en", 0.0, bad)), max_perplexity_ratio=1e9)


def test_nothing_to_check_against() -> None:
    alone = Report("m", texts=(TextResult("t", 5, 1, Interval(3.0)),))
    with pytest.raises(UsageError, match="reference"):
        check_gates(alone, max_kl=0.1)
    with pytest.raises(UsageError, match="no text"):
        check_gates(Report("m"), max_kl=0.1)


@pytest.mark.parametrize("limit", [math.nan, -0.1])
def test_limits_that_make_no_sense(limit) -> None:
    with pytest.raises(UsageError, match="limit"):
        check_gates(report(("en", 0.1, 1.0)), max_kl=limit)

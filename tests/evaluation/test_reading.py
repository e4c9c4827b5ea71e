import math

from blockscale.evaluation.reading import percent, reading
from blockscale.evaluation.result import Interval, LayerError, Report, TaskComparison, TextResult


def text(name: str, ratio: Interval, kl: float = 0.1, agreement: float = 0.9) -> TextResult:
    return TextResult(
        name, 100, 4, Interval(10 * ratio.value), Interval(10.0), ratio, Interval(kl), 2.0, Interval(agreement)
    )


def test_a_loss_beyond_chance() -> None:
    found = " ".join(reading(Report("m", "r", (text("en", Interval(1.05, 1.03, 1.07)),))))
    assert "5.0 % higher than the reference's (10.5 against 10)" in found
    assert "On en the difference is larger than chance explains" in found
    assert "9.5 % less likely" in found  # 1 - exp(-0.1)
    assert "more than 2 nats" in found
    assert "On 90.0 % of the tokens" in found
    assert "one greedy token in 10 differs" in found


def test_an_interval_that_includes_one_is_not_called_a_loss() -> None:
    texts = (text("en", Interval(1.05, 1.03, 1.07)), text("pt", Interval(1.01, 0.99, 1.03)))
    found = " ".join(reading(Report("m", "r", texts)))
    assert "On en the difference" in found
    assert "On pt the interval of the ratio includes 1" in found


def test_equal_models() -> None:
    found = " ".join(reading(Report("m", "r", (text("en", Interval(1.0, 1.0, 1.0), 0.0, 1.0),))))
    assert "exactly the reference's" in found
    assert "first choice." in found


def test_without_reference_or_texts_or_with_a_broken_model() -> None:
    assert "says nothing about what was lost" in reading(Report("m", texts=(TextResult("t", 5, 1, Interval(3.0)),)))[0]
    assert reading(Report("m")) == []
    broken = Report("m", texts=(TextResult("t", 5, 1, Interval(math.nan)),))
    assert "broken" in reading(broken)[0]


def test_tasks_and_layers() -> None:
    comparisons = (
        TaskComparison("a", "acc", 0.5, 0.6, Interval(-0.1), 1, 11, 0.006),
        TaskComparison("b", "acc", 0.5, 0.5, Interval(0.0), 0, 0, 1.0),
        TaskComparison("c", "f1", 0.5, 0.5, Interval(0.0), 0, 0, None),
    )
    layers = (LayerError("up", "nvfp4", 20.0, 4.5, 300), LayerError("down", "nvfp4", 16.0, 4.5, 100))
    found = reading(Report("m", task_comparisons=comparisons, layers=layers))
    assert "more than chance explains (p = 0.006)" in found[0]
    assert "no more than chance explains (p = 1)" in found[1]
    assert found[2].endswith("for the reference.")
    assert "19.0 dB above" in found[3]
    assert "16.0 dB, is down" in found[3]


def test_percent() -> None:
    assert [percent(x) for x in (0.5, 0.012, 0.0012, 0.00012)] == ["50.0 %", "1.2 %", "0.12 %", "0.012 %"]

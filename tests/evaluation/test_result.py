import json
import math

import pytest

from blockscale.evaluation.result import Interval, LayerError, Report, TaskResult, TextResult


def text(name: str, n: int, perplexity: float, reference: float, kl: float, agreement: float) -> TextResult:
    return TextResult(
        name,
        num_tokens=n,
        num_windows=3,
        perplexity=Interval(perplexity, perplexity - 1, perplexity + 1),
        reference_perplexity=Interval(reference),
        perplexity_ratio=Interval(perplexity / reference, 1.0, 2.0),
        kl_mean=Interval(kl, 0.0, 2 * kl),
        kl_p99=5 * kl,
        top1_agreement=Interval(agreement, 0.5, 1.0),
    )


REPORT = Report(
    model="m-nvfp4",
    reference="m",
    texts=(text("en", 300, 10.0, 9.0, 0.1, 0.9), text("pt", 100, 20.0, 15.0, 0.3, 0.8)),
    layers=(LayerError("model.layers.0.mlp.up_proj", "nvfp4", math.inf, 4.5, 64),),
    tasks=(TaskResult("t", "acc", Interval(0.5), 2, {"acc": 0.5}, (1.0, 0.0), ("a", "b")),),
    versions={"blockscale": "0"},
    bytes=10,
)


def test_totals_are_weighted_by_tokens() -> None:
    assert REPORT.perplexity == pytest.approx(math.exp(0.75 * math.log(10) + 0.25 * math.log(20)))
    assert REPORT.reference_perplexity == pytest.approx(math.exp(0.75 * math.log(9) + 0.25 * math.log(15)))
    assert REPORT.perplexity_ratio == pytest.approx(REPORT.perplexity / REPORT.reference_perplexity)
    assert REPORT.kl_mean == pytest.approx(0.15)
    assert REPORT.top1_agreement == pytest.approx(0.875)


def test_json() -> None:
    found = json.loads(json.dumps(REPORT.to_dict(), allow_nan=False))
    assert {"perplexity", "reference_perplexity", "kl_mean", "top1_agreement", "texts"} <= found.keys()
    assert found["perplexity"] == REPORT.perplexity
    assert found["num_tokens"] == 400
    assert found["texts"][0]["name"] == "en"
    assert found["texts"][0]["perplexity"] == 10.0
    assert found["texts"][0]["perplexity_interval"] == [9.0, 11.0]
    assert found["texts"][0]["reference_perplexity_interval"] == [None, None]
    assert found["texts"][1]["kl_p99"] == 1.5
    assert found["layers"][0]["sqnr_db"] is None
    assert "scores" not in found["tasks"][0]


def test_without_reference_or_texts() -> None:
    alone = Report("m", texts=(TextResult("t", 5, 1, Interval(3.0)),))
    assert alone.perplexity == pytest.approx(3.0)
    assert (alone.reference_perplexity, alone.kl_mean, alone.top1_agreement) == (None, None, None)
    assert Report("m").perplexity is None
    assert Report("m").to_dict()["texts"] == []


@pytest.mark.parametrize(("value", "expected"), [(math.inf, math.inf), (1e308, 1e308), (math.nan, math.nan)])
def test_extreme_perplexities(value, expected) -> None:
    found = Report("m", texts=(TextResult("t", 5, 1, Interval(value)),)).perplexity
    assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)

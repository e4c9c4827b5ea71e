"""Finding what meets targets. Needs nothing."""

import re

import pytest

from blockscale.errors import CheckFailed, UsageError
from blockscale.planning.answer.plan import Targets
from blockscale.planning.answer.result import SearchResult
from blockscale.planning.answer.search import Space, candidates, search
from blockscale.planning.hardware.catalogue import find_gpu
from blockscale.planning.models.model import Model, find_model
from blockscale.planning.money.assumptions import load_assumptions
from blockscale.planning.planner import plan
from blockscale.planning.speed.native import is_native
from blockscale.planning.speed.predict import Workload, default_priors


def found(model: Model, workload: Workload, targets: Targets, objective: str) -> SearchResult:
    """Over the whole catalogue, with the package's own priors and assumptions."""
    return search(
        model, workload, targets, Space(), lambda _: default_priors(), load_assumptions(), objective=objective
    )


def test_everything_found_meets_the_targets() -> None:
    result = plan("llama-3.1-8b", ttft_ms=500, itl_ms=20, rate=20)
    assert result.search is not None
    assert result.meets_targets
    assert len(result.search.found) > 20
    for found in result.search.found:
        assert found.itl_ms.value <= 20
        assert found.ttft_ms.value <= 500
        assert found.is_sure == (found.itl_ms.high <= 20 and found.ttft_ms.high <= 500)
    assert result.choice == result.search.found[0].choice


def test_one_configuration_alone_agrees_with_the_search() -> None:
    """What the search says of a configuration is what `plan` says of it."""
    result = plan("llama-3.1-70b", gpu="b200", ttft_ms=800, itl_ms=30, rate=10)
    assert result.search is not None
    best = result.search.found[0]
    choice = best.choice
    alone = plan(
        "llama-3.1-70b", gpu="b200", format=choice.format, kv_cache=choice.cache, layout=choice.layout.name, rate=10
    )
    assert alone.itl_ms == best.itl_ms
    assert alone.ttft_ms == best.ttft_ms


def test_one_replica_fewer_is_not_enough() -> None:
    result = plan("llama-3.1-70b", gpu="h100", format="fp8", ttft_ms=2000, itl_ms=40, rate=20, objective="gpus")
    layout = result.choice.layout
    assert layout.replicas > 1
    fewer = f"tp{layout.tensor}pp{layout.pipeline}dp{layout.replicas - 1}"
    less = plan("llama-3.1-70b", gpu="h100", format="fp8", layout=fewer, ttft_ms=2000, itl_ms=40, rate=20)
    assert not less.meets_targets


def test_it_is_deterministic_and_sorted() -> None:
    model, workload = find_model("llama-3.1-8b"), Workload(512, 256, rate=50)
    results = [found(model, workload, Targets(itl_ms=15), "gpus") for _ in range(2)]
    assert results[0] == results[1]
    counts = [found.num_gpus for found in results[0].found]
    assert counts == sorted(counts)


@pytest.mark.parametrize("objective", ["cost", "energy", "gpus"])
def test_none_is_better_than_the_marked(objective: str) -> None:
    model = find_model("llama-3.1-8b")
    rows = found(model, Workload(512, 256, 100), Targets(itl_ms=20), objective).found
    figures = [(f.figure(objective), f.itl_ms.value, f.is_best) for f in rows if f.figure(objective) is not None]
    assert figures
    for cost, itl, is_best in figures:
        is_beaten = any(c <= cost and i <= itl and (c, i) != (cost, itl) for c, i, _ in figures)
        assert is_best == (not is_beaten)
    assert rows[0].figure(objective) == min(cost for cost, _, _ in figures)


def test_roadmap_only_if_named() -> None:
    model = find_model("llama-3.1-8b")
    assert not [choice for choice in candidates(model, Space()) if choice.gpu.is_roadmap]
    rubin = Space(gpus=(find_gpu("rubin"),))
    assert {choice.gpu.key for choice in candidates(model, rubin)} == {"rubin"}


def test_choices_of_the_user_narrow_it() -> None:
    result = plan("llama-3.1-70b", gpu="h200", gpus=8, format="fp8", itl_ms=30, concurrency=64)
    assert result.search is not None
    for found in result.search.found:
        assert (found.choice.gpu.key, found.num_gpus, found.choice.format) == ("h200", 8, "fp8")


def test_the_largest_batch_without_a_load() -> None:
    result = plan("llama-3.1-70b", gpu="b200", format="nvfp4", itl_ms=25, objective="gpus")
    assert result.search is not None
    best = result.search.found[0]
    beyond = plan(
        "llama-3.1-70b", gpu="b200", format="nvfp4", layout=best.choice.layout.name, concurrency=round(best.batch) + 2
    )
    assert beyond.itl_ms is not None
    assert best.itl_ms.value <= 25 < beyond.itl_ms.value


def test_nothing_is_quick_enough() -> None:
    with pytest.raises(CheckFailed, match="meets the targets") as caught:
        plan("llama-3.1-70b", itl_ms=0.01)
    assert "misses by a factor of" in caught.value.hint
    with pytest.raises(CheckFailed) as caught:
        plan("llama-3.1-405b", gpu="rtx-4090", format="bf16", itl_ms=100)
    assert "no configuration holds the model" in caught.value.hint


def test_too_few_gpus_for_the_rate_says_how_many_would_do() -> None:
    """That the model does not fit would be untrue."""
    options = {"gpu": "b200", "format": "nvfp4", "itl_ms": 30, "ttft_ms": 1000, "rate": 60}
    with pytest.raises(CheckFailed) as caught:
        plan("llama-3.1-70b", gpus=2, **options)
    said = re.search(r"2 GPUs are too few for this load; the fewest that are enough: (\d+) x B200", caught.value.hint)
    assert said is not None
    enough = plan("llama-3.1-70b", objective="gpus", **options)
    assert enough.num_gpus == int(said[1]) > 2
    with pytest.raises(CheckFailed, match="none of"):
        plan("llama-3.1-70b", gpus=enough.num_gpus - 1, **options)


def test_sure_targets_are_sized_for_the_unfavourable_end() -> None:
    options = {"gpu": "b200", "itl_ms": 12, "ttft_ms": 600, "rate": 20}
    likely, sure = (plan("llama-3.1-70b", sure=is_sure, **options) for is_sure in (False, True))
    assert likely.search is not None
    assert sure.search is not None
    assert not all(found.is_sure for found in likely.search.found)
    assert all(found.is_sure for found in sure.search.found)
    assert all(target.is_sure for target in sure.targets)
    assert sure.cost_per_million_tokens is not None
    assert likely.cost_per_million_tokens is not None
    assert sure.cost_per_million_tokens.value > likely.cost_per_million_tokens.value
    with pytest.raises(UsageError, match="--sure without a target"):
        plan("llama-3.1-70b", gpu="b200", sure=True)


def test_gpus_without_a_price_are_named_and_not_ranked() -> None:
    result = plan("llama-3.1-8b", itl_ms=20, rate=20)
    assert result.search is not None
    assert "MI300X" in result.search.unranked
    assert all(found.cost_per_million_tokens is not None for found in result.search.found)
    said = next(text for text in result.to_dict()["notices"] if "without a price are not ranked" in text)
    assert said.startswith(f"{len(result.search.unranked)} GPUs")
    by_count = plan("llama-3.1-8b", itl_ms=20, rate=20, objective="gpus").search
    assert by_count is not None
    assert by_count.unranked == ()


def test_the_cache_of_a_search_is_fp8_where_it_is_native() -> None:
    found = plan("llama-3.1-8b", itl_ms=20, rate=20, objective="gpus")
    assert found.search is not None
    for one in found.search.found:
        assert one.choice.cache == ("fp8" if is_native(one.choice.gpu, "fp8") else "bf16")
    assert {one.choice.cache for one in found.search.found} == {"fp8", "bf16"}
    own = plan("llama-3.1-8b", gpu="h200", itl_ms=20, rate=20)
    assert "notice.cache" in [notice.key for notice in own.notices]
    asked = plan("llama-3.1-8b", gpu="h200", itl_ms=20, rate=20, kv_cache="bf16")
    assert asked.choice.cache == "bf16"
    assert "notice.cache" not in [notice.key for notice in asked.notices]


def test_no_search_for_a_model_without_tokens() -> None:
    with pytest.raises(UsageError, match="no tokens"):
        plan("flux.1-dev", itl_ms=10)

"""Scores from measurements, on a made-up model whose losses are known. Needs nothing."""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blockscale.quantization.search import sensitivity
from blockscale.quantization.search.choice_linear import Switch
from blockscale.quantization.search.groups import KEPT, KV_GROUP, Group, Option
from blockscale.quantization.search.sensitivity import Sensitivity, find_sensitivity

NUM_LAYERS = 6
OPTIONS = ("nvfp4", "fp8")
GROUPS = tuple(
    Group(f"model.layers.{i}.{kind}", (f"model.layers.{i}.{kind}",), 64, tuple(Option(o, 0) for o in (*OPTIONS, KEPT)))
    for i in range(NUM_LAYERS)
    for kind in ("o_proj", "down_proj")
)
CACHE = Group(KV_GROUP, (), 0, (Option("fp8", 0), Option(KEPT, 0)))
# what gradients are off by, which differs between kinds; and what they say
FACTOR = {"o_proj": 3.0, "down_proj": 0.5}
GRADIENT = {(g.name, o): (1 + i) * {"nvfp4": 1e-3, "fp8": 1e-5}[o] for i, g in enumerate(GROUPS) for o in OPTIONS}
WINDOWS = torch.zeros(2, 5, dtype=torch.int64)


def true_score(name: str, option: str) -> float:
    return 0.02 if name == KV_GROUP else GRADIENT[name, option] * FACTOR[name.rpartition(".")[2]]


class Losses:
    """KL = S / (1 + cS) of the true scores' sum."""

    num_tokens = 100

    def __init__(self, saturation: float) -> None:
        self.saturation, self.asked = saturation, list[dict[str, str]]()

    def kl(self, chosen: Mapping[str, str]) -> float:
        self.asked.append(dict(chosen))
        score = math.fsum(true_score(name, option) for name, option in chosen.items())
        return score / (1 + self.saturation * score)


@pytest.fixture(autouse=True)
def _gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "gradient_scores", lambda *_: dict(GRADIENT))


def found(losses: Losses, method: str = "calibrated", groups: tuple[Group, ...] = GROUPS) -> Sensitivity:
    subject: Any = SimpleNamespace(switch=Switch())
    return find_sensitivity(subject, groups, WINDOWS, losses, method)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["calibrated", "kl"])
def test_losses_that_add_up_are_found(method: str) -> None:
    result = found(Losses(0.0), method)
    assert result.saturation == pytest.approx(0, abs=1e-6)
    for name, option in GRADIENT:
        assert result.scores[name][option] == pytest.approx(true_score(name, option), rel=1e-9)
    assert all(by[KEPT] == 0 for by in result.scores.values())


@pytest.mark.parametrize("method", ["calibrated", "kl"])
@pytest.mark.parametrize("saturation", [-3.0, 2.0, 20.0])
def test_the_whole_model_is_predicted_as_measured(method: str, saturation: float) -> None:
    losses = Losses(saturation)
    result = found(losses, method)
    for option in OPTIONS:
        score = math.fsum(result.scores[group.name][option] for group in GROUPS)
        assert result.predicted(score) == pytest.approx(losses.kl({g.name: option for g in GROUPS}), rel=1e-9)


def test_a_part_is_predicted_too() -> None:
    """Where scores scaled to the whole would be 20 % off; single measurements saturate a little themselves."""
    losses = Losses(3.0)
    result = found(losses)
    chosen = {group.name: "nvfp4" for group in GROUPS[::3]}
    score = math.fsum(result.scores[name][option] for name, option in chosen.items())
    assert result.predicted(score) == pytest.approx(losses.kl(chosen), rel=0.05)


def test_a_few_groups_of_each_kind_are_measured() -> None:
    losses = Losses(1.0)
    result = found(losses)
    alone = [next(iter(chosen.items())) for chosen in losses.asked if len(chosen) == 1]
    for option in OPTIONS:
        for kind in FACTOR:
            assert sum(name.endswith(kind) and o == option for name, o in alone) == 3
    assert len(losses.asked) == len(alone) + len(OPTIONS)
    assert {(name, o) for name, by in result.singles.items() for o in by} == set(alone)


def test_gradients_alone_are_taken_as_they_are() -> None:
    result = found(Losses(5.0), "gradient")
    assert result.saturation == 0
    assert all(result.scores[name][option] == GRADIENT[name, option] for name, option in GRADIENT)


def test_the_cache_is_measured_alone() -> None:
    losses = Losses(2.0)
    result = found(losses, groups=(*GROUPS, CACHE))
    assert result.scores[KV_GROUP][KEPT] == 0
    assert result.predicted(result.scores[KV_GROUP]["fp8"]) == pytest.approx(losses.kl({KV_GROUP: "fp8"}))


@pytest.mark.parametrize("saturation", [0.0, 3.0])
def test_scores_and_divergences_are_inverse(saturation: float) -> None:
    result = found(Losses(saturation))
    for kl in (1e-6, 0.01, 0.2):
        assert result.predicted(result.score_of(kl)) == pytest.approx(kl)
    assert (result.score_of(1e6) == math.inf) == (saturation > 0)


def test_groups_that_no_token_reached_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = GROUPS[0].name
    gradient = {key: score for key, score in GRADIENT.items() if key[0] != silent}
    monkeypatch.setattr(sensitivity, "gradient_scores", lambda *_: gradient)
    result = found(Losses(0.0))
    assert result.scores[silent] == {"nvfp4": 0.0, "fp8": 0.0, KEPT: 0.0}

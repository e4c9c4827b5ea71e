"""From a model to a mixed checkpoint: budgets kept to the byte, what was predicted, what engines load. Tiny models."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoint.loader_rules import ENGINES

from blockscale import api
from blockscale.algorithms.divergence import score_tokens
from blockscale.checkpoint.source import open_source
from blockscale.errors import OutputError, UsageError
from blockscale.host.model import load_model, load_tokenizer
from blockscale.quantization.calibration_data import read_calibration
from blockscale.quantization.plan import make_plan
from blockscale.quantization.recipe import Recipe, Rule, load_recipe, recipe_from_dict
from blockscale.quantization.search import search as search_module
from blockscale.quantization.search import sensitivity, subject
from blockscale.quantization.search.budget import Budget
from blockscale.quantization.search.deployment import find_site
from blockscale.quantization.search.groups import KEPT, KV_GROUP, cache_group, find_groups
from blockscale.quantization.search.mixture import Mixture
from blockscale.quantization.search.search import split_windows

Find = Callable[[str], Path]
TOKENS = 2048  # four windows: three for gradients, one held back
CT = "compressed-tensors"


@pytest.fixture(scope="module")
def search(
    tiny_model: Find, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Mixture]:
    """(budget, family="llama", **options) -> what is found; scores of one job are found once."""
    folder = tmp_path_factory.mktemp("scores")

    def run(budget: Budget, family: str = "llama", **options: Any) -> Mixture:
        name = "-".join([family, str(budget.context), *(f"{k}_{v}" for k, v in options.items())])
        options.setdefault("scores", folder / f"{abs(hash(name))}.json")
        texts = [calibration_text]
        return api.search_recipe(
            tiny_model(family), budget=budget, calibration=texts, max_calibration_tokens=TOKENS, **options
        )

    return run


@pytest.fixture
def write(tiny_model: Find, calibration_text: Path, tmp_path: Path) -> Callable[..., Path]:
    """(mixture, family="llama") -> the checkpoint it makes."""

    def run(mixture: Mixture, family: str = "llama") -> Path:
        out = tmp_path / mixture.recipe.name
        texts = [calibration_text]
        summary = api.quantize(tiny_model(family), out, mixture, calibration=texts, max_calibration_tokens=TOKENS)
        assert summary.num_bytes == file_bytes(out)
        return out

    return run


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("family", "dialect"),
    [("llama", "modelopt"), ("llama", CT), ("qwen3_moe", "modelopt"), ("qwen3_moe", CT), ("deepseek_v3", "modelopt")],
)
def test_what_is_written_loads_and_is_sound(
    family: str, dialect: str, search: Callable[..., Mixture], write: Callable[..., Path], tiny_model: Find
) -> None:
    mixture = search(Budget(bits=6.5), family, dialect=dialect)
    assert len(set(mixture.formats.values())) > 1
    assert 4.5 < mixture.bits <= 6.5
    out = write(mixture, family)
    assert file_bytes(out) == mixture.num_bytes
    report = api.lint(out, source=tiny_model(family))
    assert [f for f in report.findings if f.severity in ("error", "warning")] == []
    eight = {"modelopt": "FP8", CT: "CT_FP8"}[dialect]
    four = {"modelopt": "NVFP4", CT: "CT_NVFP4"}[dialect]
    names = {"nvfp4": four, "fp8": eight, "fp8-channel": eight, KEPT: "NONE"}
    for engine, load in ENGINES.items():
        methods = load(out, tiny_model(family))  # raises where a fused layer or a set of experts is in two formats
        found = {layer: method for layer, method in methods.items() if "layers" in layer and not layer.endswith("gate")}
        assert {names[option] for option in mixture.formats.values()} <= set(found.values()), engine
    record = json.loads((out / "blockscale.json").read_text())
    assert record["search"]["formats"] == mixture.formats
    assert record["search"]["budget"]["bits"] == 6.5
    assert record["search"]["measured_kl"] == mixture.measured_kl
    assert recipe_from_dict(yaml.safe_load(record["recipe"])) == mixture.recipe


def held_back_kl(out: Path, model: Path, text: Path) -> float:
    """Of the checkpoint as it is loaded, on the windows that the search held back."""
    base, quantized = load_model(model), load_model(out)
    data = read_calibration([text], load_tokenizer(model), base.checkpoint.folder.config, TOKENS)
    _, held = split_windows(data.windows)
    logits = (m.logits(held)[:, :-1].flatten(0, 1) for m in (quantized, base))
    candidate, reference = logits
    kl = score_tokens(candidate, held[:, 1:].flatten(), reference).kl
    assert kl is not None
    return kl.mean().item()


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-w4a16"])
def test_the_measured_divergence_is_the_checkpoints(
    recipe: str, search: Callable[..., Mixture], write: Callable[..., Path], tiny_model: Find, calibration_text: Path
) -> None:
    mixture = search(Budget(num_bytes=100_000, context=64), recipe=recipe)
    out = write(mixture)
    found = held_back_kl(out, tiny_model("llama"), calibration_text)
    assert found == pytest.approx(mixture.measured_kl, rel=1e-4)
    assert mixture.predicted_kl == pytest.approx(mixture.measured_kl, rel=1.0)  # the tiny model is no linear one


def test_uniform_mixtures_are_predicted_as_measured(search: Callable[..., Mixture]) -> None:
    """Scores are scaled to what the whole model loses in each option."""
    mixture = search(Budget(bits=4.5))
    assert set(mixture.formats.values()) == {"nvfp4"}
    assert mixture.predicted_kl == pytest.approx(mixture.measured_kl, rel=1e-6)
    scores = mixture.sensitivity.scores
    assert all(by["nvfp4"] > by["fp8"] > by[KEPT] == 0 for by in scores.values())


def test_bytes_are_kept_to_the_byte(search: Callable[..., Mixture], write: Callable[..., Path]) -> None:
    mixture = search(Budget(num_bytes=90_000))
    out = write(mixture)
    size = file_bytes(out)
    assert size == mixture.num_bytes <= 90_000
    assert search(Budget(num_bytes=size)).formats == mixture.formats
    smaller = search(Budget(num_bytes=size - 1))
    assert smaller.num_bytes < size
    assert smaller.predicted_kl > mixture.predicted_kl


def test_the_cache_is_part_of_the_bytes(search: Callable[..., Mixture], write: Callable[..., Path]) -> None:
    """2 layers, 2 heads of 16, keys and values: 256 bytes a token in 16 bits."""
    whole = search(Budget(num_bytes=400_000 - 1, context=1000))
    assert whole.formats[KV_GROUP] == KEPT
    tight = search(Budget(num_bytes=230_000, context=1000))
    assert tight.formats[KV_GROUP] in ("fp8", "nvfp4")
    elements = 128 * 1000
    per_element = {"fp8": 1.0, "nvfp4": 4.5 / 8}[tight.formats[KV_GROUP]]
    assert file_bytes(write(tight)) + elements * per_element == tight.num_bytes <= 230_000
    assert tight.recipe.kv_cache == tight.formats[KV_GROUP]


def test_a_divergence_is_met_in_the_fewest_bytes(search: Callable[..., Mixture]) -> None:
    found = [search(Budget(max_kl=limit)) for limit in (0.03, 0.01, 0.003)]
    for limit, mixture in zip((0.03, 0.01, 0.003), found, strict=True):
        assert mixture.measured_kl <= limit
        assert mixture.figure == mixture.measured_kl
    assert [m.num_bytes for m in found] == sorted(m.num_bytes for m in found)
    assert found[0].num_bytes < found[2].num_bytes


@pytest.mark.parametrize("name", ["itl_ms", "joules"])
def test_predictions_are_the_planners(
    name: str, search: Callable[..., Mixture], write: Callable[..., Path], tiny_model: Find
) -> None:
    """A tiny model's weights are read in no time, so the range is narrow: its middle is asked for."""
    load: dict[str, Any] = {"gpu": "h200", "concurrency": 2, "context": 16}
    source, recipe = open_source(tiny_model("llama")), load_recipe("nvfp4")
    plan, cache_options = make_plan(source, recipe), cache_group(source, recipe, 16)
    assert cache_options is not None
    groups = (*find_groups(source, recipe, plan), cache_options)
    site = find_site(source, plan, groups, Budget(**{name: 1.0}, **load))
    figures = [site.figure(groups, [pick(range(len(g.options))) for g in groups]) for pick in (min, max)]
    assert figures[0] < figures[1]
    limit = (2 * figures[0] + figures[1]) / 3
    mixture = search(Budget(**{name: limit}, **load))
    assert mixture.figure <= limit
    assert mixture.predicted_kl > 0
    cache = {KEPT: "bf16"}.get(mixture.formats[KV_GROUP], mixture.formats[KV_GROUP])
    planned = api.plan(write(mixture), "h200", input=8, output=8, concurrency=2, kv_cache=cache, layout="tp1")
    estimate = planned.itl_ms if name == "itl_ms" else planned.bill.joules_per_output_token
    assert estimate is not None
    assert estimate.value == pytest.approx(mixture.figure, rel=1e-6)


def test_stays_within_what_the_recipe_says(search: Callable[..., Mixture]) -> None:
    rules = (Rule("*.o_proj", "fp8", "fp8"),)
    recipe = Recipe("mine", "nvfp4", "nvfp4", keep=("model.layers.0.mlp",), rules=rules)
    mixture = search(Budget(bits=6.0), recipe=recipe)
    assert mixture.recipe.keep == recipe.keep
    assert mixture.recipe.rules[0] == rules[0]
    assert {f for name, f in mixture.formats.items() if name.endswith("o_proj")} == {"fp8"}
    assert not any("layers.0.mlp" in name for name in mixture.formats)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(bits=4.49), "the least is 4.5 bits"),
        (Budget(num_bytes=50_000), "the least is"),
        (Budget(max_kl=1e-12), "no linear could be quantized"),
        (Budget(bits=16.0), "nothing to quantize"),
        (Budget(itl_ms=1e-3, gpu="h200", context=4096), "no mixture has"),
    ],
)
def test_budgets_that_make_no_sense(budget: Budget, message: str, search: Callable[..., Mixture]) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        search(budget)
    assert caught.value.hint


def test_what_it_needs(
    search: Callable[..., Mixture], tiny_model: Find, tmp_path: Path, calibration_text: Path
) -> None:
    budget, texts = Budget(bits=5.0), [calibration_text]
    with pytest.raises(UsageError, match="needs calibration text"):
        api.search_recipe(tiny_model("llama"), budget=budget, calibration=[])
    with pytest.raises(UsageError, match="one window"):
        api.search_recipe(tiny_model("llama"), budget=budget, calibration=texts, max_calibration_tokens=512)
    with pytest.raises(UsageError, match="unknown sensitivity"):
        search(budget, sensitivity="guess")
    with pytest.raises(UsageError, match="not available"):
        search(budget, device="tpu")
    with pytest.raises(UsageError, match=r"neither \.svg nor \.html"):
        search(budget, pareto=tmp_path / "front.pdf")
    with pytest.raises(UsageError, match=r"a recipe is a \.yaml file"):
        search(budget, save_recipe=tmp_path / "recipe.json")
    with pytest.raises(OutputError):
        search(budget, out=calibration_text)


def test_one_layer_at_a_time_is_the_same(search: Callable[..., Mixture], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(Budget(bits=6.0), scores=None)
    monkeypatch.setattr(subject, "_fits", lambda checkpoint, device: False)
    streamed = search(Budget(bits=6.0), scores=None)
    assert streamed.sensitivity == whole.sensitivity
    assert streamed.recipe == whole.recipe


def test_scores_are_kept(search: Callable[..., Mixture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "scores.json"
    first = search(Budget(bits=6.0), scores=file)

    def never(*_: object) -> None:
        raise AssertionError("scored again")

    monkeypatch.setattr(sensitivity, "gradient_scores", never)
    again = search(Budget(bits=6.0), scores=file)
    assert replace(again, sensitivity=first.sensitivity) == first
    assert again.sensitivity.scores == first.sensitivity.scores
    with pytest.raises(UsageError, match="of another model, recipe"):
        search(Budget(bits=6.0), scores=file, recipe="nvfp4-sweep")
    for content in ("{", "[]", "{}", '{"digest": 1}'):
        file.write_text(content)
        with pytest.raises(UsageError, match="scores"):
            search(Budget(bits=6.0), scores=file)


@pytest.mark.parametrize("method", ["gradient", "kl"])
def test_other_ways_to_score(method: str, search: Callable[..., Mixture]) -> None:
    """A measurement of each group alone, and gradients alone, rank groups much alike."""
    found = search(Budget(bits=6.0), sensitivity=method).sensitivity
    usual = search(Budget(bits=6.0)).sensitivity
    names = list(found.scores)
    assert len(found.singles) == (0 if method == "gradient" else len(names))
    own, other = (torch.tensor([s.scores[n]["nvfp4"] for n in names]) for s in (found, usual))
    correlation = torch.corrcoef(torch.stack([own.log(), other.log()]))[0, 1]
    assert correlation > 0.8


def test_a_recipe_that_was_kept_makes_the_same_weights(
    search: Callable[..., Mixture], write: Callable[..., Path], tiny_model: Find, calibration_text: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mixed.yaml"
    mixture = search(Budget(bits=6.0), save_recipe=file)
    assert load_recipe(file) == mixture.recipe
    first = write(mixture)
    texts = [calibration_text]
    api.quantize(tiny_model("llama"), tmp_path / "again", file, calibration=texts, max_calibration_tokens=TOKENS)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, tmp_path / "again")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("ending", ["svg", "html"])
def test_the_front(ending: str, search: Callable[..., Mixture], tmp_path: Path) -> None:
    file = tmp_path / f"front.{ending}"
    mixture = search(Budget(num_bytes=120_000, context=256), pareto=file)
    sizes, losses = ([getattr(p, name) for p in mixture.front] for name in ("num_bytes", "kl"))
    assert sizes == sorted(sizes)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0
    assert sum(point.is_answer for point in mixture.front) == 1
    assert len(mixture.front) > 10
    assert all(sum(point.shares.values()) == pytest.approx(1) for point in mixture.front)
    page = file.read_text()
    assert page.count("<circle") == sum(point.kl > 0 for point in mixture.front)
    assert ("<table>" in page) == (ending == "html")


def test_what_a_method_adds_is_said_to_be_counted_in_no_budget():
    beside = search_module._method_notice(load_recipe("nvfp4-best-arc"))
    assert any("'best-arc' puts beside weights" in notice for notice in beside)
    assert not any("beside" in notice for notice in search_module._method_notice(load_recipe("nvfp4-best")))
    assert search_module._method_notice(load_recipe("nvfp4")) == ()

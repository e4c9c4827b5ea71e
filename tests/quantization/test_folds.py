"""Folds applied: the model answers as before, through what would be stored."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from host.dequantized import transformers_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.quantization.fold_search import find_folds
from blockscale.quantization.folds import (
    AppliedFold,
    Fold,
    FoldKind,
    apply_fold,
    effective_scale,
    scale_columns,
)
from blockscale.quantization.sites import Site, find_sites

from .hosted_layers import HostedLayer, hosted_layers, token_ids

Find = Callable[[str], Path]
FILE = "model.safetensors"
WITHOUT_BIAS = (
    *("llama", "smollm2", "qwen3", "gemma2", "gemma3", "olmo2", "phi3", "cohere", "mixtral", "qwen3_moe"),
    *("llama4_text", "deepseek_v3", "qwen3_next", "nemotron_h4", "bamba", "falcon_h1", "minimax", "gemma4_text"),
)
WITHOUT_NORMS = ("olmo2", "minimax")  # that anything could be folded into
WITH_BIAS = ("qwen2", "gpt_oss", "starcoder2", "gpt_neox", "opt")


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def random_scale(count: int, seed: int) -> Tensor:
    return 2.0 ** (torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 6 - 3)


def exact_scale(fold: Fold, seed: int) -> Tensor:
    """By powers of two, after the root that a squared activation asks for, and equal where it must be."""
    exponents = random_scale(fold.index.numel(), seed).log2().round()
    return 2.0 ** (exponents * fold.degree)[fold.index]


def sites_and_folds(hosted: HostedLayer) -> list[tuple[Site, Fold]]:
    sites = find_sites(hosted.layer, hosted.path, hosted.linears, hosted.call, hosted.hidden)
    found = find_folds(hosted.layer, sites, hosted.call, hosted.hidden)
    return [(site, fold) for site in sites if isinstance(fold := found[site.name], Fold)]


def apply(hosted: HostedLayer, site: Site, fold: Fold, scale: Tensor) -> AppliedFold:
    applied = apply_fold(hosted.layer, fold, scale, path=hosted.path, weights=hosted.weights)
    scale_columns(hosted.layer, site, applied.scale)
    return applied


def apply_all(layers: list[HostedLayer], *, powers_of_two: bool = False) -> dict[str, Tensor]:
    """Every fold of every layer with a scale of its own; the stored tensors that it changes."""
    changed: dict[str, Tensor] = {}
    for hosted in layers:
        for number, (site, fold) in enumerate(sites_and_folds(hosted)):
            scale = exact_scale(fold, number) if powers_of_two else random_scale(site.in_features, number)
            applied = apply(hosted, site, fold, scale)
            changed |= applied.tensors
    return changed


@pytest.mark.parametrize("family", WITHOUT_BIAS)
def test_folds_change_nothing(family: str, tiny_model: Find) -> None:
    """Scales of any value, norms rounded to bf16: fp32's rounding is all that is left."""
    layers = hosted_layers(tiny_model(family))
    before = layers[0].logits()
    changed = apply_all(layers)
    assert bool(changed) == (family not in WITHOUT_NORMS)
    assert all(tensor.dtype == torch.bfloat16 for tensor in changed.values())
    assert relative(layers[0].logits(), before) < 1e-5


@pytest.mark.parametrize("family", WITH_BIAS)
def test_biases_are_divided_too(family: str, tiny_model: Find) -> None:
    """By powers of two, which bf16 holds, nothing changes."""
    layers = hosted_layers(tiny_model(family))
    before = layers[0].logits()
    changed = apply_all(layers, powers_of_two=True)
    assert any(name.endswith(".bias") for name in changed)
    assert relative(layers[0].logits(), before) < 1e-5


@pytest.mark.parametrize("family", [*WITH_BIAS, "nemotron"])
def test_biases_round_as_they_are_stored(family: str, tiny_model: Find) -> None:
    """By other scales no more changes than a bias' last bit. Nemotron's norms multiply by 1 + weight, which makes
    other scales of all."""
    layers = hosted_layers(tiny_model(family))
    before = layers[0].logits()
    apply_all(layers)
    assert 1e-5 < relative(layers[0].logits(), before) < 2.0**-8


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3", "mixtral", "cohere"])
def test_what_is_stored_is_the_same_model(family: str, tiny_model: Find, tmp_path: Path) -> None:
    """transformers on the returned tensors and the scaled masters, in fp32, under their stored names."""
    source, target = tiny_model(family), tmp_path / "folded"
    before = transformers_logits(source, token_ids())
    layers = hosted_layers(source)
    changed = apply_all(layers, powers_of_two=True)  # for the biases
    tensors = {name: tensor.float() for name, tensor in load_file(source / FILE).items()}
    masters = {f"{m.name}.weight": m.weight for h in layers for m in h.layer.modules() if hasattr(m, "observer")}
    scaled = {name for name, weight in masters.items() if not torch.equal(weight.float(), tensors[name])}
    assert {name.rpartition(".")[0] for name in scaled} >= {m for h in layers for m in h.linears if ".o_proj" in m}
    shutil.copytree(source, target)
    save_file({**tensors, **masters, **{n: t.float() for n, t in changed.items()}}, target / FILE, {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    assert relative(transformers_logits(target, token_ids()), before) < 1e-5
    save_file({**tensors, **{n: t.float() for n, t in changed.items()}}, target / FILE, {"format": "pt"})
    assert relative(transformers_logits(target, token_ids()), before) > 0.01, "the norms alone are another model"


def of(hosted: HostedLayer, leaf: str) -> tuple[Site, Fold]:
    return next((site, fold) for site, fold in sites_and_folds(hosted) if site.hosted[0].endswith(leaf))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_effective_scale_is_known_beforehand(family: str, tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model(family))[0]
    for site, fold in sites_and_folds(hosted):
        scale = random_scale(site.in_features, 5)
        expected = effective_scale(hosted.layer, fold, scale, path=hosted.path, weights=hosted.weights)
        assert torch.equal(apply(hosted, site, fold, scale).scale, expected)
        assert torch.allclose(expected, fold.shared(scale), rtol=0.05)
        if fold.kind is FoldKind.NORM:
            assert not torch.equal(expected, scale), "bf16 holds no random quotient"


@pytest.mark.parametrize(("family", "unit"), [("llama", 0.0), ("gemma3", -1.0)])
def test_channels_without_gain_are_left(family: str, unit: float, tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model(family))[0]
    site, fold = of(hosted, "q_proj")
    hosted.layer.input_layernorm.weight[7] = unit
    before = hosted.logits()
    applied = apply(hosted, site, fold, torch.full((64,), 3.0))
    assert applied.scale[7] == 1
    assert (applied.scale - 3).abs().max() == 2  # channel 7's; the others' are near 3
    assert hosted.layer.input_layernorm.weight[7] == unit
    assert relative(hosted.logits(), before) < 1e-5


def test_a_gain_that_would_round_to_zero_is_left(tiny_model: Find) -> None:
    """1 + w with w in bf16: nothing lies between a gain of 2^-8 and 0."""
    hosted = hosted_layers(tiny_model("gemma3"))[0]
    site, fold = of(hosted, "q_proj")
    before = hosted.logits()
    applied = apply(hosted, site, fold, torch.full((64,), 1e4))
    assert torch.equal(applied.scale, torch.ones(64))
    assert torch.equal(hosted.logits(), before)


@pytest.fixture(scope="module")
def hosted(tiny_model: Find) -> HostedLayer:
    return hosted_layers(tiny_model("llama"))[0]


@settings(max_examples=50, deadline=None)
@given(
    gains=st.lists(st.floats(-4, 4, width=16), min_size=8, max_size=8),
    exponents=st.lists(st.floats(-6, 6), min_size=8, max_size=8),
    offset=st.sampled_from([0.0, 1.0]),
)
def test_a_norm_and_its_scale_cancel(hosted: HostedLayer, gains: list[float], exponents: list[float], offset: float):
    fold = Fold(FoldKind.NORM, "input_layernorm", torch.arange(64), offset=offset)
    weight = hosted.layer.input_layernorm.weight
    weight.copy_(torch.tensor(gains * 8).bfloat16().float())
    old = weight + offset
    applied = apply_fold(
        hosted.layer, fold, 2.0 ** torch.tensor(exponents * 8), path=hosted.path, weights=hosted.weights
    )
    new = hosted.layer.input_layernorm.weight + offset
    assert (applied.scale > 0).all()
    assert torch.allclose(new * applied.scale, old, rtol=2.0**-22, atol=0)
    assert torch.equal(applied.tensors["model.layers.0.input_layernorm.weight"].float() + offset, new)


def test_a_scale_that_heads_cannot_have_becomes_one(tiny_model: Find) -> None:
    """The geometric mean over the query heads of a value head."""
    hosted = hosted_layers(tiny_model("llama"))[0]
    site, fold = of(hosted, "o_proj")
    before = hosted.logits()
    scale = torch.ones(64)
    scale[0], scale[16] = 8.0, 2.0  # channel 0 of the two query heads of the first value head
    applied = apply(hosted, site, fold, scale)
    assert torch.allclose(applied.scale[[0, 16, 32]], torch.tensor([4.0, 4.0, 1.0]))
    assert relative(hosted.logits(), before) < 1e-5


def test_a_linear_becomes_a_master_copy(tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model("llama"))[0]
    site, fold = of(hosted, "down_proj")
    old = hosted.layer.mlp.up_proj.weight
    applied = apply(hosted, site, fold, torch.full((96,), 3.0))
    assert applied.tensors == {}
    assert old.dtype == torch.bfloat16
    assert torch.equal(hosted.layer.mlp.up_proj.weight, old.float() / 3)
    assert hosted.layer.mlp.down_proj.weight.dtype == torch.float32


def test_a_stored_scale(tiny_model: Find) -> None:
    """Changes no tensor; the columns are multiplied by the inverse of what the dtype holds."""
    hosted = hosted_layers(tiny_model("llama"))[0]
    fold = Fold(FoldKind.PRE_QUANT_SCALE, "", torch.arange(64))
    before = hosted.logits()
    scale = random_scale(64, 1)
    applied = apply_fold(hosted.layer, fold, scale, path=hosted.path, weights=hosted.weights)
    assert applied.pre_quant_scale is not None
    assert torch.equal(applied.pre_quant_scale, (1 / scale).bfloat16())
    assert torch.allclose(applied.scale * applied.pre_quant_scale.float(), torch.ones(64), rtol=2.0**-22, atol=0)
    assert applied.tensors == {}
    assert torch.equal(hosted.logits(), before)


@pytest.mark.parametrize("scale", [torch.ones(63), torch.zeros(64), -torch.ones(64), torch.full((64,), float("nan"))])
def test_what_is_no_scale_is_refused(scale: Tensor, tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model("llama"))[0]
    _, fold = of(hosted, "q_proj")
    before = hosted.logits()
    with pytest.raises(FormatError, match="smoothing scale"):
        apply_fold(hosted.layer, fold, scale, path=hosted.path, weights=hosted.weights)
    assert torch.equal(hosted.logits(), before)

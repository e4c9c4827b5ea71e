"""Input scales: a smoothed layer computes what it did, and what cannot be smoothed is counted with its reason."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.linear import W8A8_DYNAMIC
from blockscale.host.linear import KeptLinear
from blockscale.quantization.fold_search import find_folds
from blockscale.quantization.folds import Fold
from blockscale.quantization.layer_probe import run_probe
from blockscale.quantization.layerwise.smoothing import FAMILIES, Smoothed, smooth_site
from blockscale.quantization.recipe import recipe_from_dict
from blockscale.quantization.sites import Site, find_sites

from ..hosted_layers import HostedLayer, hosted_layers, token_ids
from .jobs import planned
from .running import quantize, stored_linears

Find = Callable[[str], Path]


def last_layer(path: Path) -> HostedLayer:
    return hosted_layers(path, token_ids(4, 24))[-1]


def smooth(hosted: HostedLayer, site: Site, fold: Fold, x: Tensor, families: tuple[str, ...] = ("rms",)) -> Smoothed:
    where = {"path": hosted.path, "weights": hosted.weights}
    scale = ActivationScale.FOUR_OVER_SIX
    return smooth_site(hosted.layer, site, fold, x, families, hosted.linears, scale, **where)


def sites_and_folds(hosted: HostedLayer) -> tuple[tuple[Site, ...], dict[str, Fold]]:
    sites = find_sites(hosted.layer, hosted.path, hosted.linears, hosted.call, hosted.hidden)
    folds = find_folds(hosted.layer, sites, hosted.call, hosted.hidden)
    return sites, {name: fold for name, fold in folds.items() if isinstance(fold, Fold)}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "qwen3_moe"])
def test_a_smoothed_layer_computes_what_it_did(family: str, tiny_model: Find) -> None:
    """Every site that has a fold, from the last to the first, up to fp32's own rounding: what a norm in 16 bits makes
    of a scale is what the columns are multiplied by."""
    hosted = last_layer(tiny_model(family))
    before, given = run_probe(
        hosted.layer, hosted.call, hosted.hidden, watch=[n for n, _ in hosted.layer.named_modules()]
    )
    sites, folds = sites_and_folds(hosted)
    gains = {}
    for site in reversed(sites):
        if site.name in folds and site.hosted[0] in given:
            x = torch.cat([x.flatten(0, -2) for x in given[site.hosted[0]]])
            found = smooth(hosted, site, folds[site.name], x, tuple(FAMILIES))
            gains[site.name] = found.gain
            if found.scale is not None:
                assert found.scale.shape == (site.in_features,)
                assert 0 < found.gain < 1
                assert found.scale.max() > found.scale.min()
    after = hosted.call(hosted.hidden)
    change = before - hosted.hidden
    assert len(gains) >= 3
    assert max(gains.values()) > 0.05, "something was smoothed"
    assert (after - before).abs().max() < 2e-5 * change.abs().max()


def test_a_norm_is_stored_as_it_was_used(tiny_model: Find) -> None:
    hosted = last_layer(tiny_model("gemma3_text"))
    sites, folds = sites_and_folds(hosted)
    site = sites[0]
    x = hosted.layer.input_layernorm(hosted.hidden).flatten(0, 1)
    x[:, :4] *= 10
    found = smooth(hosted, site, folds[site.name], x)
    (name, stored), *_ = found.tensors.items()
    assert name.endswith("layers.1.input_layernorm.weight")
    assert stored.dtype == torch.bfloat16
    assert torch.equal(hosted.layer.input_layernorm.weight, stored.float())
    gain = 1 + hosted.weights.kept[name].read().float()
    torch.testing.assert_close((1 + stored.float()) * found.scale, gain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("what", ["inputs", "weights"])
def test_zeros_are_left_alone(what: str, tiny_model: Find) -> None:
    hosted = last_layer(tiny_model("llama"))
    sites, folds = sites_and_folds(hosted)
    x = torch.zeros(40, 64)
    if what == "weights":
        x.normal_()
        for name in sites[0].hosted:
            linear = hosted.layer.get_submodule(name)
            assert isinstance(linear, KeptLinear)
            linear.weight.zero_()
    found = smooth(hosted, sites[0], folds[sites[0].name], x, tuple(FAMILIES))
    assert found == Smoothed(None, "none", 0.0, {})


def test_a_scale_is_searched_for_the_linears_in_4_bits(tiny_model: Find) -> None:
    """One in FP8 beside them has its columns scaled, and no say."""
    scales = []
    for is_huge in (False, True):
        hosted = last_layer(tiny_model("cohere"))  # attention and MLP read one norm
        site, folds = (found := sites_and_folds(hosted))[0][0], found[1]
        gate = next(m for m in site.members if m.endswith("gate_proj"))
        linears = {**hosted.linears, gate: planned(gate, (96, 64), W8A8_DYNAMIC)}
        module = hosted.layer.get_submodule(site.hosted[site.members.index(gate)])
        assert isinstance(module, KeptLinear)
        if is_huge:
            module.weight[:, :32] *= 64
        before = module.weight.float().clone()
        x = hosted.layer.input_layernorm(hosted.hidden).flatten(0, 1)
        x[:, :4] *= 10
        where = {"path": hosted.path, "weights": hosted.weights}
        amax = ActivationScale.AMAX
        found = smooth_site(hosted.layer, site, folds[site.name], x, ("rms",), linears, amax, **where)
        assert found.scale is not None
        assert torch.equal(module.weight, before * found.scale)
        scales.append(found.scale)
    assert torch.equal(*scales)


def test_what_cannot_be_smoothed_is_counted(tiny_model: Find, tmp_path: Path) -> None:
    found = quantize(tiny_model("qwen3_moe"), tmp_path / "moe")
    assert found.notices == (
        "8 of 20 inputs are not smoothed: a router gives it its tokens, which no norm makes for it alone (8)",
    )
    found = quantize(tiny_model("olmo2"), tmp_path / "olmo")
    assert found.notices == (
        "4 of 8 inputs are not smoothed: it reads the hidden states themselves, no norm comes before (2); "
        "no norm, and no quantized linear beside it, gives its input up to a factor a channel (2)",
    )
    assert quantize(tiny_model("olmo2"), tmp_path / "gptq", "nvfp4-gptq").notices == (), "nobody asked"


def test_a_norm_that_a_kept_linear_reads_too(tiny_model: Find, tmp_path: Path) -> None:
    """Folding would change what it gives."""
    found = quantize(tiny_model("llama"), tmp_path / "out", keep=["*.layers.1.mlp.*"])
    assert found.notices == ()
    assert found.layers["model.layers.1.self_attn.q_proj"].smoothing not in (None, "none")
    kept = {f"model.layers.1.mlp.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")}
    assert not kept & set(found.layers)
    found = quantize(tiny_model("cohere"), tmp_path / "parallel", keep=["*.layers.1.mlp.*"])
    (notice,) = found.notices
    assert notice.startswith("1 of 5 inputs are not smoothed: input_layernorm feeds mlp.")
    layers = found.layers
    assert layers["model.layers.1.self_attn.q_proj"].smoothing is None
    assert layers["model.layers.0.self_attn.q_proj"].smoothing not in (None, "none")


def test_sites_without_4_bits_are_no_concern(tiny_model: Find, tmp_path: Path) -> None:
    rules = [{"match": "*.mlp.*", "weight": "fp8-channel", "activation": "fp8-token"}]
    recipe = {"name": "mixed", "weight": "nvfp4", "activation": "nvfp4", "method": "awq", "rules": rules}
    found = quantize(tiny_model("olmo2"), tmp_path / "out", recipe_from_dict(recipe), dialect="compressed-tensors")
    (notice,) = found.notices
    assert notice.startswith("2 of 4 inputs are not smoothed: it reads the hidden states themselves")
    assert {n: layer.smoothing for n, layer in found.layers.items() if ".mlp." in n} == dict.fromkeys(
        [n for n in found.layers if ".mlp." in n]
    )
    assert stored_linears(tmp_path / "out")["model.layers.0.mlp.up_proj"].scheme == W8A8_DYNAMIC

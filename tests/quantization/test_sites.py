"""Sites against what each linear is given on real tokens, and layers that are unlike others."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale.checkpoint.groups import fused_groups
from blockscale.checkpoint.linear import W4A16, QuantizedLinear
from blockscale.errors import ModelError
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import encode
from blockscale.host.linear import KeptLinear, PackedLinear
from blockscale.quantization.plan import PlannedLinear
from blockscale.quantization.recipe import Recipe
from blockscale.quantization.sites import Site, find_sites

from .hosted_layers import HostedLayer, hosted_layers, token_ids
from .toy_layers import HIDDEN, Layer

Find = Callable[[str], Path]
QKV, DENSE = "self_attn.q_proj+k_proj+v_proj", ("mlp.gate_proj+up_proj", "mlp.down_proj")
LLAMA = (QKV, "self_attn.o_proj", *DENSE)
NAMES = {  # of the last layer's sites, below the layer
    "llama": LLAMA,
    "gemma2": LLAMA,
    "olmo2": LLAMA,
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    "cohere": ("self_attn.q_proj+k_proj+v_proj+mlp.gate_proj+up_proj", "self_attn.o_proj", "mlp.down_proj"),
    "starcoder2": (QKV, "self_attn.o_proj", "mlp.c_fc", "mlp.c_proj"),
    "gpt_neox": ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "gpt_oss": (QKV, "self_attn.o_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "falcon_h1": (
        *("mamba.in_proj+self_attn.q_proj+k_proj+v_proj", "mamba.out_proj", "self_attn.o_proj"),
        *("feed_forward.gate_proj+up_proj", "feed_forward.down_proj"),
    ),
    "qwen3_moe": (
        *(QKV, "self_attn.o_proj"),
        *(f"mlp.experts.{e}.{leaves}" for e in range(4) for leaves in ("gate_proj+up_proj", "down_proj")),
    ),
    "mixtral": (
        *(QKV, "self_attn.o_proj"),
        *(f"block_sparse_moe.experts.{e}.{leaves}" for e in range(4) for leaves in ("w1+w3", "w2")),
    ),
    "deepseek_v3": (
        *("self_attn.q_a_proj+kv_a_proj_with_mqa", "self_attn.q_b_proj", "self_attn.o_proj"),
        *(f"mlp.experts.{e}.{leaves}" for e in range(8) for leaves in ("gate_proj+up_proj", "down_proj")),
        *("mlp.shared_experts.gate_proj+up_proj", "mlp.shared_experts.down_proj"),
    ),
    "llama4_text": (
        *(QKV, "self_attn.o_proj", "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        *("feed_forward.shared_expert.gate_proj+up_proj", "feed_forward.shared_expert.down_proj"),
    ),
}
OTHERS = ("qwen3_next", "nemotron_h4", "jamba", "gemma3", "minimax", "glm4_moe", "opt", "gemma4_text", "qwen3_vl")


def sites_of(hosted: HostedLayer) -> tuple[Site, ...]:
    return find_sites(hosted.layer, hosted.path, hosted.linears, hosted.call, hosted.hidden)


@pytest.mark.parametrize("family", NAMES)
def test_names_in_forward_order(family: str, tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model(family))[-1]
    sites = sites_of(hosted)
    prefix = sites[0].members[0].partition(".1.")[0] + ".1."
    assert tuple(site.name.removeprefix(prefix) for site in sites) == NAMES[family]


@pytest.mark.parametrize("family", [*NAMES, *OTHERS])
def test_a_site_is_one_input(family: str, tiny_model: Find) -> None:
    """On real tokens, which the probe does not see; and each planned linear has one place."""
    for hosted in hosted_layers(tiny_model(family)):
        given = observed(hosted)
        sites = sites_of(hosted)
        placed = [member for site in sites for member in site.members]
        assert sorted(placed) == sorted(given)
        for site in sites:
            inputs = [given[member] for member in site.members]
            assert all(torch.equal(x, inputs[0]) for x in inputs)
            assert site.in_features == inputs[0].shape[-1]
            assert site.is_expert == (".experts." in site.name)
            modules = [hosted.layer.get_submodule(name) for name in site.hosted]
            assert [module.name for module in modules] == list(site.members)
        single = [given[site.members[0]] for site in sites if not site.is_expert]
        assert not any(same(a, b) for i, a in enumerate(single) for b in single[:i])
        for members in fused_groups(placed).values():
            assert sum(not set(members).isdisjoint(site.members) for site in sites) == 1


def observed(hosted: HostedLayer) -> dict[str, Tensor]:
    """Stored name -> all that the layer's linears are given, those that are not planned left out."""
    given: dict[str, list[Tensor]] = {}
    linears = [m for m in hosted.layer.modules() if isinstance(m, KeptLinear) and m.name in hosted.linears]
    for module in linears:
        module.observer = lambda name, x: given.setdefault(name, []).append(x.reshape(-1, x.shape[-1]).clone())
    hosted.call(hosted.hidden)
    for module in linears:
        module.observer = None
    return {m.name: torch.cat(given[m.name]) for m in linears}


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "jamba", "nemotron_h4"])
def test_experts_without_tokens_have_their_siblings_sites(family: str, tiny_model: Find) -> None:
    """One token reaches two experts, which are given the same, and stay two."""
    few = hosted_layers(tiny_model(family), token_ids(1, 1))
    for one, many in zip(few, hosted_layers(tiny_model(family)), strict=True):
        assert sites_of(one) == sites_of(many)


def test_the_layer_is_left_as_it_was(tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model("mixtral"))[0]
    before = hosted.logits()
    sites_of(hosted)
    assert torch.equal(hosted.logits(), before)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in hosted.layer.modules())


def test_kept_linears_are_in_no_site(tiny_model: Find) -> None:
    recipe = Recipe("kept", "nvfp4", keep=("*o_proj",))
    hosted = hosted_layers(tiny_model("llama"), recipe=recipe)[0]
    assert [site.name.partition(".0.")[2] for site in sites_of(hosted)] == [QKV, *DENSE]


def test_packed_linears_have_sites(tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model("llama"))[0]
    expected = sites_of(hosted)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = encode(getattr(hosted.layer.self_attn, name).weight.float(), NVFP4)
        packed = PackedLinear(QuantizedLinear(W4A16, weight, None), None, is_emulating=False)
        setattr(hosted.layer.self_attn, name, packed)
    assert sites_of(hosted) == expected


def side_by_side(layer: Layer, x: Tensor) -> Tensor:
    normed = layer.norm(x)
    return layer.q_proj(normed) + layer.k_proj(normed.clone()) + layer.v_proj(normed.reshape(-1, 32)).view_as(x)


def test_copies_and_views_are_one_input() -> None:
    layer = Layer(side_by_side, "q_proj", "k_proj", "v_proj")
    assert [site.hosted for site in layer.sites()] == [("q_proj", "k_proj", "v_proj")]


def test_an_input_changed_in_place_is_another() -> None:
    def compute(layer: Layer, x: Tensor) -> Tensor:
        normed = layer.norm(x)
        first = layer.one(normed)
        return first + layer.two(normed.mul_(2))

    assert [site.hosted for site in Layer(compute, "one", "two").sites()] == [("one",), ("two",)]


def test_a_fused_group_with_two_inputs_is_refused() -> None:
    def compute(layer: Layer, x: Tensor) -> Tensor:
        return layer.gate_proj(layer.norm(x)) * layer.up_proj(x)

    with pytest.raises(ModelError, match=r"layers\.0\.gate_proj\+up_proj: .* different inputs"):
        Layer(compute, "gate_proj", "up_proj").sites()


def test_what_is_not_run_follows_its_group_or_is_left_out() -> None:
    layer = Layer(lambda layer, x: layer.q_proj(layer.norm(x)), "q_proj", "k_proj", "o_proj")
    assert [site.hosted for site in layer.sites()] == [("q_proj", "k_proj")]


def test_a_linear_called_twice_is_given_both() -> None:
    """Equal in one of two calls is not equal."""

    def compute(layer: Layer, x: Tensor) -> Tensor:
        normed = layer.norm(x)
        return layer.one(normed) + layer.two(normed) + layer.two(x)

    assert [site.hosted for site in Layer(compute, "one", "two").sites()] == [("one",), ("two",)]


def test_nan_is_refused_by_a_named_error() -> None:
    layer = Layer(lambda layer, x: layer.one(x) * float("nan"), "one")
    with pytest.raises(ModelError, match="NaN or Inf"):
        layer.sites()


def test_hooks_go_when_the_layer_fails() -> None:
    def fail(layer: Layer, x: Tensor) -> Tensor:
        raise ZeroDivisionError

    layer = Layer(fail, "one")
    with pytest.raises(ZeroDivisionError):
        layer.sites()
    assert not layer.one._forward_pre_hooks


def test_unplanned_linears_are_ignored() -> None:
    layer = Layer(lambda layer, x: layer.one(x) + layer.two(x), "one", "two")
    planned: dict[str, PlannedLinear] = {"layers.0.two": layer.linears()["layers.0.two"]}
    sites = find_sites(layer, "layers.0", planned, layer, HIDDEN)
    assert [site.hosted for site in sites] == [("two",)]

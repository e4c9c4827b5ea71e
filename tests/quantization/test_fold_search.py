"""What each family's sites can be folded into, and layers where a fold would be wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockscale.checkpoint.linear import W4A16, QuantizedLinear
from blockscale.errors import ModelError
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import encode
from blockscale.host.linear import PackedLinear
from blockscale.quantization.fold_search import find_folds
from blockscale.quantization.folds import Fold, FoldKind, NoFold
from blockscale.quantization.recipe import Recipe
from blockscale.quantization.sites import find_sites

from .hosted_layers import HostedLayer, hosted_layers, token_ids
from .toy_layers import HIDDEN, Layer, Norm

Find = Callable[[str], Path]
Found = dict[str, Fold | NoFold]
VALUES, UP = "rows self_attn.v_proj", "rows mlp.up_proj"
ATTENTION = {"q_proj": "norm input_layernorm", "o_proj": VALUES}
LLAMA = {**ATTENTION, "gate_proj": "norm post_attention_layernorm", "down_proj": UP}
GEMMA = {**ATTENTION, "gate_proj": "norm pre_feedforward_layernorm + 1", "down_proj": UP}
GEMMA["q_proj"] += " + 1"
NO_CHANNELS = "no norm, and no quantized linear beside it"
ROUTED = "a router gives it its tokens"
OLMO = {"q_proj": "it reads the hidden states themselves", "o_proj": VALUES, "gate_proj": NO_CHANNELS, "down_proj": UP}
# Of the last layer's sites, by their first linear: kind and source, a gain of 1 + weight, a degree; or the reason.
FOLDS = {
    "llama": LLAMA,
    "smollm2": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "olmo2": OLMO,
    "phi3": {
        "qkv_proj": "norm input_layernorm",
        "o_proj": "rows self_attn.qkv_proj",
        "gate_up_proj": "norm post_attention_layernorm",
        "down_proj": "rows mlp.gate_up_proj",
    },
    "cohere": {**ATTENTION, "down_proj": UP},
    "starcoder2": {**ATTENTION, "c_fc": "norm post_attention_layernorm", "c_proj": NO_CHANNELS},
    "gpt_neox": {
        "query_key_value": "norm input_layernorm",
        "dense": "rows attention.query_key_value",
        "dense_h_to_4h": "norm post_attention_layernorm",
        "dense_4h_to_h": NO_CHANNELS,
    },
    "opt": {
        "k_proj": "norm self_attn_layer_norm",
        "out_proj": VALUES,
        "fc1": "norm final_layer_norm",
        "fc2": "rows fc1",
    },
    "nemotron": {
        "q_proj": "norm input_layernorm + 1",
        "o_proj": VALUES,
        "up_proj": "norm post_attention_layernorm + 1",
        "down_proj": UP + " ^2",
    },
    "mixtral": {**ATTENTION, "w1": ROUTED, "w2": "rows mlp.experts.0.w3"},
    "qwen3_moe": {**ATTENTION, "gate_proj": ROUTED, "down_proj": "rows mlp.experts.0.up_proj"},
    "gpt_oss": {**ATTENTION, "gate_up_proj": ROUTED, "down_proj": NO_CHANNELS},
    "llama4_text": {
        **ATTENTION,
        "gate_up_proj": ROUTED,
        "down_proj": "rows feed_forward.experts.gate_up_proj",
        "gate_proj": "post_attention_layernorm feeds feed_forward.router as well",
    },
    "deepseek_v3": {
        "q_a_proj": "norm input_layernorm",
        "q_b_proj": "norm self_attn.q_a_layernorm",
        "o_proj": NO_CHANNELS,
        "gate_proj": ROUTED,
        "down_proj": "rows mlp.experts.0.up_proj",
    },
    "minimax": {"q_proj": "the layer uses what input_layernorm gives elsewhere too", "o_proj": VALUES},
    "gemma4_text": {
        "q_proj": "norm input_layernorm",
        "o_proj": NO_CHANNELS,
        "gate_proj": "norm pre_feedforward_layernorm",
        "down_proj": UP,
    },
}


def folds_of(hosted: HostedLayer, **options: bool) -> Found:
    sites = find_sites(hosted.layer, hosted.path, hosted.linears, hosted.call, hosted.hidden)
    return find_folds(hosted.layer, sites, hosted.call, hosted.hidden, **options)


def describe(outcome: Fold | NoFold) -> str:
    if isinstance(outcome, NoFold):
        return outcome.reason
    ends = (" + 1" if outcome.offset else "") + (f" ^{outcome.degree}" if outcome.degree > 1 else "")
    return f"{outcome.kind} {outcome.source}{ends}"


def by_first_linear(layer: nn.Module, hosted: HostedLayer, found: Found) -> dict[str, str]:
    """The first site of each kind."""
    result: dict[str, str] = {}
    for site in find_sites(layer, hosted.path, hosted.linears, hosted.call, hosted.hidden):
        result.setdefault(site.hosted[0].rpartition(".")[2], describe(found[site.name]))
    return result


@pytest.mark.parametrize("family", FOLDS)
def test_folds_of_families(family: str, tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model(family))[-1]
    found = by_first_linear(hosted.layer, hosted, folds_of(hosted))
    assert set(FOLDS[family]) <= set(found)
    for name, expected in FOLDS[family].items():
        is_fold = expected.startswith(("norm ", "rows "))
        assert found[name] == expected if is_fold else found[name].startswith(expected), name


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "mixtral", "starcoder2"])
def test_16_bits_show_the_same(family: str, tiny_model: Find) -> None:
    wide, narrow = (hosted_layers(tiny_model(family), dtype=dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    expected = {name: describe(outcome) for name, outcome in folds_of(wide).items()}
    assert {name: describe(outcome) for name, outcome in folds_of(narrow).items()} == expected


@pytest.mark.parametrize("family", ["mixtral", "nemotron_h4"])
def test_experts_without_tokens_have_folds_of_their_own(family: str, tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model(family), token_ids(1, 1))[2 if family == "nemotron_h4" else 0]
    found = folds_of(hosted)
    last = {"mixtral": ("w2", "w3"), "nemotron_h4": ("down_proj", "up_proj")}[family]
    for name, outcome in found.items():
        if ".experts." in name and name.endswith(last[0]):
            number = name.rpartition(".experts.")[2].partition(".")[0]
            assert isinstance(outcome, Fold)
            assert outcome.source.endswith(f".experts.{number}.{last[1]}")


def test_grouped_queries_share_a_scale(tiny_model: Find) -> None:
    """4 query heads of 16 channels read 2 value heads: each pair takes the geometric mean."""
    found = folds_of(hosted_layers(tiny_model("llama"))[0])
    fold = found["model.layers.0.self_attn.o_proj"]
    assert isinstance(fold, Fold)
    heads = torch.arange(64) // 16
    assert torch.equal(fold.index, heads // 2 * 16 + torch.arange(64) % 16)
    scale = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.5
    first, second = scale.view(2, 2, 16).unbind(1)
    mean = (first * second).sqrt().unsqueeze(1).expand(2, 2, 16).flatten()
    assert torch.allclose(fold.shared(scale), mean, rtol=1e-6)


def test_joined_projections(tiny_model: Find) -> None:
    """Phi-3's values are behind queries and keys; GPT-NeoX's are the last third of each head."""
    phi = folds_of(hosted_layers(tiny_model("phi3"))[0])["model.layers.0.self_attn.o_proj"]
    neox = folds_of(hosted_layers(tiny_model("gpt_neox"))[0])["gpt_neox.layers.0.attention.dense"]
    assert isinstance(phi, Fold)
    assert isinstance(neox, Fold)
    assert torch.equal(phi.rows, torch.arange(96, 128))
    assert torch.equal(neox.rows, torch.arange(192).view(4, 3, 16)[:, 2].flatten())


def test_heads_share_a_norm(tiny_model: Find) -> None:
    """Qwen3-Next's linear attention has one norm of 16 channels for 4 heads."""
    fold = folds_of(hosted_layers(tiny_model("qwen3_next"))[0])["model.layers.0.linear_attn.out_proj"]
    assert isinstance(fold, Fold)
    assert fold.kind is FoldKind.NORM
    assert torch.equal(fold.index, torch.arange(64) % 16)


def test_the_layer_is_left_as_it_was(tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model("mixtral"))[0]
    before = hosted.logits()
    folds_of(hosted)
    assert torch.equal(hosted.logits(), before)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in hosted.layer.modules())


def test_a_kept_linear_that_reads_the_norm_forbids_it(tiny_model: Find) -> None:
    recipe = Recipe("kept", "nvfp4", keep=("*gate_proj", "*up_proj", "*v_proj", "*q_proj", "*k_proj"))
    hosted = hosted_layers(tiny_model("cohere"), recipe=recipe)[0]
    assert set(folds_of(hosted)) == {"model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"}
    only_up = Recipe("kept", "nvfp4", keep=("*mlp*",))
    found = folds_of(hosted_layers(tiny_model("cohere"), recipe=only_up)[0])
    outcome = found["model.layers.0.self_attn.q_proj+k_proj+v_proj"]
    assert describe(outcome) == "input_layernorm feeds mlp.gate_proj as well"


def test_a_kept_linear_is_no_source(tiny_model: Find) -> None:
    """Its rows would round one by one."""
    recipe = Recipe("kept", "nvfp4", keep=("*q_proj", "*k_proj", "*v_proj"))
    found = folds_of(hosted_layers(tiny_model("llama"), recipe=recipe)[0])
    assert describe(found["model.layers.0.self_attn.o_proj"]).startswith(NO_CHANNELS)


def test_stored_scales_only_when_asked_and_where_loaders_take_them(tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model("deepseek_v3"))[1]
    for name, outcome in folds_of(hosted).items():
        if isinstance(outcome, NoFold):
            assert outcome.has_room_for_scale == name.endswith("o_proj")
    asked = folds_of(hosted, use_pre_quant_scale=True)
    stored = [n for n, outcome in asked.items() if isinstance(outcome, Fold) and outcome.kind == "pre_quant_scale"]
    assert stored == ["model.layers.1.self_attn.o_proj"]


def test_packed_linears_have_no_fold(tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model("llama"))[0]
    for name in ("gate_proj", "up_proj"):
        weight = encode(getattr(hosted.layer.mlp, name).weight.float(), NVFP4)
        setattr(hosted.layer.mlp, name, PackedLinear(QuantizedLinear(W4A16, weight, None), None, is_emulating=False))
    found = folds_of(hosted)
    assert describe(found["model.layers.0.mlp.gate_proj+up_proj"]) == "its weights are packed already"
    assert describe(found["model.layers.0.mlp.down_proj"]).startswith(NO_CHANNELS)
    assert describe(found["model.layers.0.self_attn.o_proj"]) == VALUES


def test_values_that_later_layers_read_stay(tiny_model: Find) -> None:
    hosted = hosted_layers(tiny_model("llama"))[0]
    hosted.layer.self_attn.store_full_length_kv = True
    outcome = folds_of(hosted)["model.layers.0.self_attn.o_proj"]
    assert describe(outcome) == "later layers read what self_attn.v_proj gives as well"


def toy(layer: Layer) -> dict[str, str]:
    found = find_folds(layer, layer.sites(), layer, HIDDEN)
    return {name.removeprefix("layers.0."): describe(outcome) for name, outcome in found.items()}


def one(layer: Layer, x: Tensor) -> Tensor:
    return layer.one(layer.norm(x))


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (lambda w: w, "norm norm"),
        (lambda w: 1 + w, "norm norm + 1"),
        (lambda w: 2 + w, "norm does not multiply by its weight, or by 1 + its weight, last"),
        (torch.exp, "norm does not multiply by its weight, or by 1 + its weight, last"),
        (torch.square, "norm does not multiply by its weight, or by 1 + its weight, last"),
    ],
)
def test_how_a_norm_uses_its_weight(gain: Callable[[Tensor], Tensor], expected: str) -> None:
    assert toy(Layer(one, "one", norm=Norm(gain))) == {"one": expected}


@pytest.mark.parametrize(
    ("compute", "names", "expected"),
    [
        # read again, by no module
        (lambda y, x: (z := y.norm(x)) + y.one(z), ["one"], {"one": "the layer uses what norm gives elsewhere too"}),
        (
            lambda y, x: y.one(z := y.norm(x)) * (1 + 1e-3 * z.mean(-1, keepdim=True).sigmoid()),
            ["one"],
            {"one": "the layer uses what norm gives elsewhere too"},
        ),
        (lambda y, x: y.one(y.norm(x)) + y.norm(2 * x), ["one"], {"one": "norm is used more than once"}),
        # a function between
        (lambda y, x: y.two(y.one(x).tanh()), ["one", "two"], {"two": NO_CHANNELS}),
        (lambda y, x: y.two(y.one(x).relu()), ["one", "two"], {"two": "rows one"}),
        (lambda y, x: y.two(y.one(x).relu().square()), ["one", "two"], {"two": "rows one ^2"}),
        (lambda y, x: y.two(y.one(x).clamp(-6, 6)), ["one", "two"], {"two": NO_CHANNELS}),
        (lambda y, x: y.two(y.one(x) + 1), ["one", "two"], {"two": NO_CHANNELS}),
        (lambda y, x: y.two(y.one(x).roll(1, -1)), ["one", "two"], {"two": NO_CHANNELS}),
        (lambda y, x: y.two(y.one(x).roll(1, 1)), ["one", "two"], {"two": "rows one"}),
        # read again
        (
            lambda y, x: y.two(z := y.one(x)) + 1e-3 * z.abs(),
            ["one", "two"],
            {"two": "the layer uses what one gives elsewhere too"},
        ),
        (
            lambda y, x: y.two(z := y.one(x)) + y.three(2 * z),
            ["one", "two", "three"],
            {"two": "the layer uses what one gives elsewhere too"},
        ),
    ],
)
def test_toy_layers(compute: Callable[[Layer, Tensor], Tensor], names: list[str], expected: dict[str, str]) -> None:
    found = toy(Layer(compute, *names))
    for name, outcome in expected.items():
        assert found[name].startswith(outcome)


def test_nan_is_refused() -> None:
    layer = Layer(one, "one")
    sites = layer.sites()
    layer.norm.weight.mul_(float("nan"))
    with pytest.raises(ModelError, match="NaN or Inf"):
        find_folds(layer, sites, layer, HIDDEN)

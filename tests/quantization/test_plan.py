"""What is stored as what: decided from names, shapes and the config, and never silently."""

import math

import pytest
import torch

from blockscale.checkpoint.source import Source
from blockscale.checkpoint.structure import module_name
from blockscale.errors import RecipeError
from blockscale.formats.spec import FP8_CHANNEL, NVFP4
from blockscale.quantization.plan import Plan, kept_modules, make_plan
from blockscale.quantization.recipe import KEEP, RECIPES, Recipe, Rule

from .sources import H, attention, ends, llama, mlp, moe, source, weights

W4A16 = RECIPES["nvfp4-w4a16"]


def plan_of(tensors: Source | dict, recipe: Recipe = W4A16, **options) -> Plan:
    return make_plan(tensors if isinstance(tensors, Source) else source(tensors), recipe, **options)


def with_rules(*rules: Rule, keep: tuple[str, ...] = (), weight: str = "nvfp4") -> Recipe:
    return Recipe("mine", weight, keep=keep, rules=rules)


def check_whole(model: Source, plan: Plan) -> None:
    """Every source tensor is either quantized or copied, once."""
    quantized = [linear.tensor.name for linear in plan.linears.values()]
    copied = [tensor.name for tensor in plan.copied]
    assert sorted(quantized + copied) == sorted(model.tensors)
    assert set(plan.kept) == {module_name(name) for name in copied}
    assert sorted(m for members in plan.groups.values() for m in members) == sorted(plan.linears)


def test_a_dense_model() -> None:
    model = source(llama(2))
    plan = plan_of(model)
    check_whole(model, plan)
    assert sorted(plan.linears) == sorted(
        name.removesuffix(".weight") for layer in range(2) for name in (*attention(layer), *mlp(layer))
    )
    assert plan.kept["lm_head"] == "output head"
    assert plan.kept["model.embed_tokens"] == "embedding"
    assert plan.groups["model.layers.1.mlp.gate_proj+up_proj"] == (
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
    )
    assert sum(math.prod(linear.shape) for linear in plan.linears.values()) == 14 * H * H
    assert plan.notices == ()


# names that the usual exceptions must catch, in the spellings of many families
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("transformer.wte.weight", "embedding"),
        ("transformer.wpe.weight", "embedding"),
        ("model.embed_tokens.weight", "embedding"),
        ("encoder.embeddings.word_embeddings.weight", "embedding"),
        ("shared.weight", "embedding"),
        ("language_model.lm_head.weight", "output head"),
        ("output.weight", "output head"),
        ("score.weight", "output head"),
        ("embed_out.weight", "output head"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.block_sparse_moe.gate.weight", "router"),
        ("model.layers.0.mlp.router.weight", "router"),
        ("model.layers.0.feed_forward.router.layer.weight", "router"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "router"),
        ("model.layers.0.mlp.gate.wg.weight", "router"),
        ("visual.blocks.0.attn.qkv.weight", "vision or audio tower"),
        ("visual.blocks.0.attn.qkv.linear.weight", "vision or audio tower"),
        ("model.visual.blocks.0.mlp.fc1.weight", "vision or audio tower"),
        ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", "vision or audio tower"),
        ("model.vision_tower.encoder.layers.30.mlp.fc2.weight", "vision or audio tower"),
        ("multi_modal_projector.linear_1.weight", "vision or audio tower"),
        ("model.mm_projector.0.weight", "vision or audio tower"),
        ("mlp1.1.weight", "vision or audio tower"),
        ("vpm.encoder.layers.0.self_attn.q_proj.weight", "vision or audio tower"),
        ("resampler.kv_proj.weight", "vision or audio tower"),
        ("audio_tower.layers.0.fc1.weight", "vision or audio tower"),
        ("model.layers.0.conv.in_proj.weight", "convolution"),
        ("model.layers.0.mamba.dt_proj.weight", "state-space parameter"),
        ("model.layers.0.mamba.x_proj.weight", "state-space parameter"),
        ("mtp.layers.0.mlp.up_proj.weight", "draft layer"),
        ("mtp.fc.weight", "draft layer"),
        ("model.mtp.layers.0.self_attn.q_proj.weight", "draft layer"),
        ("model.mtp_layers.0.self_attn.q_proj.weight", "draft layer"),
        ("model.layers.2.mlp.up_proj.weight", "draft layer"),
        ("model.layers.2.eh_proj.weight", "draft layer"),
        ("language_model.model.layers.10.mlp.up_proj.weight", "draft layer"),
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("model.layers.0.self_attn.sinks", "not a linear weight"),
        ("model.layers.0.mixer.A_log", "not a linear weight"),
    ],
)
def test_kept_by_name(name: str, reason: str) -> None:
    model = source(llama(2) | {name: (H, H)}, num_hidden_layers=2)
    plan = plan_of(model)
    assert plan.kept[module_name(name)] == reason
    assert len(plan.linears) == 14
    check_whole(model, plan)


@pytest.mark.parametrize(
    "name",
    [
        "backbone.layers.0.mixer.up_proj.weight",
        "backbone.layers.0.mixer.down_proj.weight",
        "transformer.h.0.attn.c_attn.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.mlp.shared_expert.down_proj.weight",
        "model.layers.0.linear_attn.out_proj.weight",
        "layers.0.feed_forward.w2.weight",
        "model.layers.0.self_attn.gate_attn.weight",
    ],
)
def test_quantized_by_name(name: str) -> None:
    plan = plan_of(source({**ends(), name: (H, H)}, num_hidden_layers=2))
    assert list(plan.linears) == [module_name(name)]


@pytest.mark.parametrize("router", ["mlp.gate", "mlp.router", "mlp.switch", "mlp.gating_network"])
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_routers_by_structure(router: str, key: str) -> None:
    """Whatever its name, the matrix with a row an expert beside the experts is the router."""
    model = source(moe(8, router), **{key: 8})
    plan = plan_of(model)
    assert plan.kept[f"model.layers.0.{router}"] == "router"
    assert len(plan.linears) == 4 + 8 * 3
    check_whole(model, plan)


def test_a_projection_with_as_many_rows_as_experts_is_no_router() -> None:
    model = source(moe(H), num_experts=H)
    plan = plan_of(model)
    assert plan.kept["model.layers.0.mlp.gate"] == "router"
    assert {"model.layers.0.self_attn.k_proj", "model.layers.0.mlp.experts.9.down_proj"} <= set(plan.linears)


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_language_models_config_may_be_nested(key: str) -> None:
    inner = {"num_hidden_layers": 1, "num_experts": 8}
    tensors = moe(8, "mlp.switch") | attention(1)
    plan = plan_of(source(tensors, **{key: inner}))
    assert plan.kept["model.layers.0.mlp.switch"] == "router"
    assert plan.kept["model.layers.1.self_attn.q_proj"] == "draft layer"
    nested = plan_of(source(tensors, thinker_config={key: inner}))
    assert nested.kept == plan.kept


def test_a_draft_layer_is_a_wildcard() -> None:
    """Loaders build the drafter from the config. Its modules' own names would not do: SGLang takes one that ends with
    `q_a_proj` for the q_a_proj of every layer."""
    extra = attention(2) | {"model.layers.2.eh_proj.weight": (H, 2 * H), "model.layers.2.enorm.weight": (H,)}
    extra |= weights("model.layers.2.mlp.experts.0", "gate_proj", "up_proj", "down_proj")
    extra |= weights("mtp.layers.0.mlp", "gate_proj", "up_proj", "down_proj")
    model = source(llama(2) | extra, num_hidden_layers=2)
    assert kept_modules(plan_of(model)) == ["lm_head", "model.embed_tokens", "model.layers.2*", "mtp*"]
    # in a model of three layers they are ordinary
    assert len(plan_of(source(llama(3), num_hidden_layers=3)).linears) == 21


def test_a_draft_layer_that_is_quantized_in_part_is_listed_by_name() -> None:
    extra = weights("model.layers.2.mlp", "gate_proj", "up_proj", "down_proj") | {
        "model.layers.2.eh_proj.weight": (H, H)
    }
    rule = Rule("model.layers.2.mlp.down_proj", "nvfp4")
    plan = plan_of(source(llama(2) | extra, num_hidden_layers=2), with_rules(rule))
    assert "model.layers.2.mlp.down_proj" in plan.linears
    assert kept_modules(plan)[-3:] == [f"model.layers.2.{m}" for m in ("mlp.gate_proj", "mlp.up_proj", "eh_proj")]


def test_kept_modules_list_every_weight_matrix() -> None:
    tensors = moe(4) | {
        "model.visual.blocks.0.attn.qkv.weight": (H, H),
        "model.visual.merger.mlp.0.weight": (H, H),
        "model.layers.0.self_attn.q_proj.bias": (H,),
    }
    plan = plan_of(source(tensors, num_experts=4), with_rules(keep=("*.o_proj",)))
    assert kept_modules(plan) == [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate",
        "*visual*",
    ]


def test_kept_experts_are_a_wildcard() -> None:
    """Engines ask for the layer's experts as one module."""
    plan = plan_of(source(moe(4)), with_rules(keep=("*.experts.*",)))
    assert len(plan.linears) == 4
    assert "model.layers.0.mlp.experts*" in kept_modules(plan)
    assert not any(".experts." in name for name in kept_modules(plan))


def test_a_tied_head_is_listed_though_it_has_no_tensor() -> None:
    tensors = llama(1)
    del tensors["lm_head.weight"]
    assert kept_modules(plan_of(tensors))[0] == "lm_head"


def test_an_explicit_rule_quantizes_the_head() -> None:
    model = source(llama(1))
    plan = plan_of(model, with_rules(Rule("lm_head", "fp8-channel", "fp8-token")))
    assert plan.linears["lm_head"].scheme.weight is FP8_CHANNEL
    assert "lm_head" not in kept_modules(plan), "a list that contradicts the tensors stops loaders"
    check_whole(model, plan)


@pytest.mark.parametrize("pattern", ["*", "*head*", "*.gate", "model", "model.layers.0"])
def test_a_broad_rule_leaves_the_usual_exceptions(pattern: str) -> None:
    plan = plan_of(source(moe(4), num_experts=4), with_rules(Rule(pattern, "fp8-channel")))
    assert not {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"} & set(plan.linears)


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.norm", "model.layers.0.input_layernorm"])
def test_a_rule_for_what_is_no_linear(name: str) -> None:
    with pytest.raises(RecipeError, match=f"'{name}' asks for nvfp4, but this is no linear layer"):
        plan_of(llama(1), with_rules(Rule(name, "nvfp4")))
    plan_of(llama(1), with_rules(Rule(name, KEEP)))


def test_the_first_rule_wins_and_keep_beats_rules() -> None:
    rules = (Rule("*.o_proj", "fp8-channel"), Rule("*_proj", "mxfp4"), Rule("*.mlp.*", KEEP))
    plan = plan_of(llama(1), with_rules(*rules, keep=("*.down_proj",)))
    formats = {m.rpartition(".")[2]: linear.scheme.weight.name for m, linear in plan.linears.items()}
    expected = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "mxfp4")
    assert formats == {**expected, "o_proj": "fp8-channel"}
    assert plan.kept["model.layers.0.mlp.down_proj"] == "the recipe keeps it"


def test_keeping_all_but_what_a_rule_names() -> None:
    plan = plan_of(llama(2), with_rules(Rule("*.down_proj", "nvfp4"), weight=KEEP))
    assert [linear.scheme.weight for linear in plan.linears.values()] == [NVFP4, NVFP4]


@pytest.mark.parametrize("pattern", ["*mlp.up", "model.layers.7", "layers.0", "visual.*.linear", "*.Q_PROJ"])
def test_a_pattern_that_matches_nothing(pattern: str) -> None:
    for recipe in (with_rules(keep=(pattern,)), with_rules(Rule(pattern, "fp8"))):
        with pytest.raises(RecipeError, match="matches no module") as error:
            plan_of(llama(1), recipe)
        assert "layers.0" in error.value.hint


@pytest.mark.parametrize("recipe", [with_rules(keep=("*",)), with_rules(weight=KEEP), with_rules(Rule("*_proj", KEEP))])
def test_a_recipe_that_matches_nothing(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match="mine matches no weight"):
        plan_of(llama(1), recipe)
    with pytest.raises(RecipeError, match="matches no weight"):
        plan_of(ends())
    with pytest.raises(RecipeError, match="no weight"):
        plan_of({})
    with pytest.raises(RecipeError, match="matches no module"):
        plan_of({}, with_rules(keep=("a",)))


def test_a_rule_without_effect_is_noticed() -> None:
    vision = {"visual.blocks.0.mlp.fc1.weight": (H, H)}
    plan = plan_of(llama(1) | vision, with_rules(Rule("visual.*", "fp8-channel")))
    assert plan.notices == ("rule 'visual.*' stores nothing: what it covers is kept, or another rule's",)
    shadowed = plan_of(llama(1), with_rules(Rule("*", "nvfp4"), Rule("*.o_proj", "fp8-channel")))
    assert "'*.o_proj' stores nothing" in shadowed.notices[0]


def test_k_that_is_no_multiple_of_16() -> None:
    tensors = llama(1) | {"model.layers.0.mlp.down_proj.weight": (H, 60)}
    model = source(tensors)
    plan = plan_of(model)
    assert "model.layers.0.mlp.down_proj" not in plan.linears
    assert plan.notices == ("model.layers.0.mlp.down_proj stays in 16 bits: K = 60 is not a multiple of 16",)
    assert "model.layers.0.mlp.down_proj" in kept_modules(plan)
    check_whole(model, plan)
    with pytest.raises(RecipeError, match=r"down_proj: K = 60 is not a multiple of 16") as error:
        plan_of(model, strict=True)
    assert "keep" in error.value.hint
    plan_of(model, with_rules(keep=("*.down_proj",)), strict=True)
    # rows need not be a multiple of anything
    assert len(plan_of(llama(1) | {"model.layers.0.mlp.down_proj.weight": (4304 - 1, H)}).linears) == 7


def test_a_fused_group_in_part_stays_whole() -> None:
    model = source(llama(2))
    plan = plan_of(model, with_rules(keep=("model.layers.0.self_attn.v_proj",)))
    gone = {f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv"}
    assert gone <= set(plan.kept)
    assert plan.kept["model.layers.0.self_attn.q_proj"] == "fused with model.layers.0.self_attn.v_proj"
    assert len(plan.linears) == 11
    assert plan.notices == (
        "model.layers.0.self_attn.q_proj+k_proj+v_proj stays in 16 bits as a whole: engines fuse it, and "
        "model.layers.0.self_attn.v_proj is kept",
    )
    assert gone <= set(kept_modules(plan))
    check_whole(model, plan)


def test_a_bias_does_not_break_its_group() -> None:
    biases = {f"model.layers.0.self_attn.{leaf}_proj.bias": (H,) for leaf in "qkv"}
    assert len(plan_of(llama(1) | biases).linears) == 7


def test_mla_is_fused() -> None:
    tensors = ends() | weights(
        "model.layers.0.self_attn", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
    )
    plan = plan_of(tensors, with_rules(keep=("*.q_a_proj",)))
    assert [m.rpartition(".")[2] for m in plan.linears] == ["q_b_proj", "o_proj"]
    assert plan.kept["model.layers.0.self_attn.kv_b_proj"] == "absorbed into attention"


@pytest.mark.parametrize(
    "rule",
    [
        Rule("*.v_proj", "fp8-channel", "fp8-token"),
        Rule("*.v_proj", "nvfp4", "nvfp4"),
        Rule("*.up_proj", "nvfp4", None, "sweep"),
    ],
)
def test_contradictory_rules_in_a_fused_group(rule: Rule) -> None:
    with pytest.raises(RecipeError, match="in different ways") as error:
        plan_of(llama(1), with_rules(rule))
    assert "one rule" in error.value.hint


def test_experts_of_one_layer_stay_together() -> None:
    """Engines run them in one kernel: an expert in 16 bits beside quantized ones cannot be loaded."""
    model = source(moe(4))
    plan = plan_of(model, with_rules(keep=("*.experts.2.*",)))
    assert not any(".experts." in m for m in plan.linears)
    assert "model.layers.0.mlp.experts stays in 16 bits as a whole" in plan.notices[-1]
    check_whole(model, plan)
    with pytest.raises(RecipeError, match=r"mlp\.experts in different ways"):
        plan_of(moe(4), with_rules(Rule("*.experts.*.down_proj", "fp8-channel", "fp8-token")))
    # but their scales may be found by different methods
    assert len(plan_of(moe(4), with_rules(Rule("*.experts.*.down_proj", "nvfp4", None, "sweep"))).linears) == 16


def test_experts_with_an_odd_k_stay_whole() -> None:
    tensors = moe(2)
    tensors |= {f"model.layers.0.mlp.experts.{e}.down_proj.weight": (H, 24) for e in range(2)}
    plan = plan_of(tensors)
    assert len(plan.linears) == 4
    assert any("K = 24" in notice for notice in plan.notices)


def stacked(model_type: str) -> Source:
    stacks = {
        "model.layers.0.mlp.experts.gate_up_proj": (4, H, 96),
        "model.layers.0.mlp.experts.gate_up_proj_bias": (4, 96),
        "model.layers.0.mlp.experts.down_proj": (4, 48, H),
    }
    return source(ends() | attention(0) | stacks, model_type=model_type, num_local_experts=4)


def test_stacks_of_experts() -> None:
    model = stacked("gpt_oss")
    plan = plan_of(model)
    linear = plan.linears["model.layers.0.mlp.experts.gate_up_proj"]
    assert (linear.shape, linear.is_transposed) == ((4, 96, H), True)
    assert plan.linears["model.layers.0.mlp.experts.down_proj"].shape == (4, H, 48)
    assert plan.kept["model.layers.0.mlp.experts.gate_up_proj_bias"] == "not a linear weight"
    assert not any("experts" in name for name in kept_modules(plan))
    check_whole(model, plan)


def test_kept_stacks_are_listed() -> None:
    plan = plan_of(stacked("gpt_oss"), with_rules(keep=("*.experts.*",)))
    assert "model.layers.0.mlp.experts*" in kept_modules(plan)
    assert plan.notices == ()


def test_half_a_stack_stays_whole() -> None:
    plan = plan_of(stacked("gpt_oss"), with_rules(keep=("*.experts.down_proj",)))
    assert not any("experts" in m for m in plan.linears)
    assert "stays in 16 bits as a whole" in plan.notices[0]


def test_stacks_of_an_unknown_layout_are_not_left_out_in_silence() -> None:
    plan = plan_of(stacked("brand_new_moe"))
    assert len(plan.linears) == 4
    assert len(plan.notices) == 2
    assert "experts.gate_up_proj stays in 16 bits: a stack of experts whose layout is not known" in plan.notices[0]
    assert "model.layers.0.mlp.experts*" in kept_modules(plan)
    assert plan_of(stacked("brand_new_moe"), with_rules(keep=("*.experts.*",))).notices == ()


def test_rows_formats_do_not_hold_stacks() -> None:
    plan = plan_of(stacked("gpt_oss"), Recipe("x", "fp8-channel", "fp8-token"))
    assert not any("experts" in m for m in plan.linears)
    assert "fp8-channel is not stored for stacks of experts" in plan.notices[0]


def test_weights_that_are_stored_input_first() -> None:
    """GPT-2 keeps [K, N]: blocks along its last dimension would be blocks along N."""
    tensors = {"transformer.wte.weight": (128, H)} | weights("transformer.h.0.attn", "c_attn", "c_proj")
    with pytest.raises(RecipeError, match="matches no weight") as error:
        plan_of(source(tensors, model_type="gpt2"))
    assert "input dimension first" in error.value.hint
    assert len(plan_of(source(tensors, model_type="gpt_bigcode")).linears) == 2


def test_a_weight_of_another_type_is_kept_and_noticed() -> None:
    good = source(llama(1))
    odd = source(weights("model.layers.0.mlp", "extra_proj"), dtype=torch.float64)
    model = Source(good.path, good.config, {**good.tensors, **odd.tensors}, ())
    plan = plan_of(model)
    assert "torch.float64" in plan.kept["model.layers.0.mlp.extra_proj"]
    assert len(plan.notices) == 1

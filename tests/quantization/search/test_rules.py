"""Groups, and recipes made of picks. Needs names and shapes only."""

import random

import pytest
import yaml

from blockscale.errors import CheckpointError, RecipeError, UsageError
from blockscale.quantization.plan import make_plan
from blockscale.quantization.recipe import RECIPES, Recipe, Rule, recipe_from_dict
from blockscale.quantization.search.budget import Budget
from blockscale.quantization.search.groups import KEPT, KV_GROUP, cache_group, find_groups
from blockscale.quantization.search.problem import make_problem
from blockscale.quantization.search.rules import check_recipe, mixed_recipe

from ..sources import H, llama, moe, source

CONFIG = {
    "model_type": "llama",
    "hidden_size": H,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": H,
    "vocab_size": 128,
}
CT = Recipe("nvfp4", "nvfp4", "nvfp4", dialect="compressed-tensors")


def options(recipe: Recipe, shapes: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    model = source(shapes, **CONFIG)
    return {g.name: [o.name for o in g.options] for g in find_groups(model, recipe, make_plan(model, recipe))}


def test_fused_layers_and_expert_sets_are_one_group_each() -> None:
    found = options(RECIPES["nvfp4"], moe(experts=3))
    assert found == {
        "model.layers.0.self_attn.q_proj+k_proj+v_proj": ["nvfp4", "fp8", KEPT],
        "model.layers.0.self_attn.o_proj": ["nvfp4", "fp8", KEPT],
        "model.layers.0.mlp.experts": ["nvfp4", "fp8", KEPT],
    }


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (CT, ["nvfp4", "fp8-channel", KEPT]),
        (RECIPES["nvfp4-w4a16"], ["nvfp4", "fp8", KEPT]),
        (RECIPES["fp8"], ["fp8-channel", KEPT]),
        (RECIPES["mxfp4"], ["mxfp4", "fp8-channel", KEPT]),
        (Recipe("m", "mxfp4", "mxfp4"), ["mxfp4", KEPT]),  # engines have no such mixture in Model Optimizer's dialect
    ],
)
def test_options_follow_recipe_and_dialect(recipe: Recipe, names: list[str]) -> None:
    assert set(map(tuple, options(recipe, llama(1)).values())) == {tuple(names)}


def test_a_stack_of_experts_has_no_place_for_fp8() -> None:
    shapes = llama(1) | {"model.layers.0.mlp.experts.gate_up_proj": (4, H, 2 * H)}
    model = source(shapes, model_type="gpt_oss", num_hidden_layers=1)
    groups = find_groups(model, RECIPES["nvfp4"], make_plan(model, RECIPES["nvfp4"]))
    stack = next(group for group in groups if group.name.endswith("experts"))
    assert [option.name for option in stack.options] == ["nvfp4", KEPT]


def test_what_the_recipe_names_is_not_decided_about() -> None:
    rules = (Rule("*.o_proj", "fp8", "fp8"), Rule("model.layers.1.mlp.down_proj", "keep"))
    recipe = Recipe("mine", "nvfp4", "nvfp4", keep=("model.layers.0.mlp",), rules=rules)
    found = options(recipe, llama(2))
    assert found["model.layers.0.self_attn.o_proj"] == ["fp8"]
    assert not any(name.startswith(("model.layers.0.mlp", "model.layers.1.mlp.down_proj")) for name in found)
    assert len(found) == 2 * 2 + 1


def test_nothing_to_mix() -> None:
    recipe = Recipe("mine", "keep", rules=(Rule("*.o_proj", "nvfp4"),))
    with pytest.raises(RecipeError, match="nothing to mix"):
        options(recipe, llama(1))


@pytest.mark.parametrize("recipe", [RECIPES["nvfp4"], CT, RECIPES["nvfp4-w4a16"]])
@pytest.mark.parametrize("shapes", [llama(12), moe(experts=3)], ids=["dense", "experts"])
def test_any_picks_become_a_recipe_that_stores_them(recipe: Recipe, shapes: dict[str, tuple[int, ...]]) -> None:
    model = source(shapes, **CONFIG)
    groups = find_groups(model, recipe, make_plan(model, recipe))
    draw = random.Random(0)
    for share in (0.0, 0.1, 0.5, 1.0):
        for _ in range(5):
            picks = [draw.randrange(1, len(g.options)) if draw.random() < share else 0 for g in groups]
            if all(g.options[p].name == KEPT for g, p in zip(groups, picks, strict=True)):
                continue
            mixed = mixed_recipe(model, recipe, groups, picks, "mixed-5.00")
            check_recipe(model, mixed, groups, picks)
            assert recipe_from_dict(yaml.safe_load(mixed.to_yaml())) == mixed


def test_layers_that_are_all_alike_have_one_rule() -> None:
    recipe = RECIPES["nvfp4"]
    model = source(llama(12), **CONFIG)
    groups = find_groups(model, recipe, make_plan(model, recipe))
    picks = [2 if g.name.endswith("o_proj") else 1 if "gate_proj" in g.name else 0 for g in groups]
    mixed = mixed_recipe(model, recipe, groups, picks, "m")
    assert {rule.match: rule.weight for rule in mixed.rules} == {
        "model.layers.*.self_attn.o_proj": "keep",
        "model.layers.*.mlp.gate_proj": "fp8",
        "model.layers.*.mlp.up_proj": "fp8",
    }


def test_a_glob_does_not_reach_what_stayed_for_its_shape() -> None:
    """K = 24 fits no block of 16, but FP8 would take it."""
    shapes = llama(3) | {"model.layers.1.self_attn.o_proj.weight": (H, 24)}
    recipe = RECIPES["nvfp4"]
    model = source(shapes, **CONFIG)
    groups = find_groups(model, recipe, make_plan(model, recipe))
    picks = [1 if g.name.endswith("o_proj") else 0 for g in groups]
    mixed = mixed_recipe(model, recipe, groups, picks, "m")
    assert [rule.match for rule in mixed.rules] == [f"model.layers.{i}.self_attn.o_proj" for i in (0, 2)]
    check_recipe(model, mixed, groups, picks)


def test_the_cache_is_a_choice_where_a_context_is_given() -> None:
    model = source(llama(12), **CONFIG)
    assert cache_group(model, RECIPES["nvfp4"], None) is None
    cache = cache_group(model, RECIPES["nvfp4"], 1000)
    assert cache is not None
    elements = 12 * 2 * 2 * (H // 4) * 1000
    assert {o.name: o.num_bytes for o in cache.options} == {
        "fp8": elements,
        "nvfp4": elements * 9 // 16,
        KEPT: 2 * elements,
    }
    other = cache_group(model, CT, 1000)
    assert other is not None
    assert [o.name for o in other.options] == ["fp8", KEPT]
    fixed = cache_group(model, Recipe("r", "nvfp4", kv_cache="nvfp4"), None)
    assert fixed is not None
    assert [o.name for o in fixed.options] == ["nvfp4"]
    recipe = RECIPES["nvfp4"]
    groups = (*find_groups(model, recipe, make_plan(model, recipe)), cache)
    picks = [0] * (len(groups) - 1)
    assert mixed_recipe(model, recipe, groups, [*picks, 0], "m").kv_cache == "fp8"
    assert mixed_recipe(model, recipe, groups, [*picks, 2], "m").kv_cache is None
    assert groups[-1].name == KV_GROUP


def test_a_model_without_a_cache_to_scale() -> None:
    shapes = {name: shape for name, shape in llama(1).items() if "k_proj" not in name}
    with pytest.raises(RecipeError, match="no k_proj"):
        cache_group(source(shapes, **CONFIG), RECIPES["nvfp4"], 1000)


@pytest.mark.parametrize(
    ("budget", "message", "hint"),
    [
        (Budget(bits=4.4), "the least is 4.5 bits", "up to 16 bits"),
        (Budget(num_bytes=1000), "the least is", "--bytes from"),
        (Budget(itl_ms=1e-6, gpu="h200"), "the least is", "--itl-ms from"),
        (Budget(joules=1e-9, gpu="h200"), "the least is", "--joules from"),
    ],
)
def test_a_budget_that_nothing_meets(budget: Budget, message: str, hint: str) -> None:
    recipe = RECIPES["nvfp4"]
    model = source(llama(12), **CONFIG)
    plan = make_plan(model, recipe)
    with pytest.raises(UsageError, match=message) as caught:
        make_problem(model, recipe, plan, find_groups(model, recipe, plan), budget)
    assert hint in caught.value.hint


def test_a_dialect_without_room_for_the_recipe() -> None:
    recipe = Recipe("m", "mxfp8", "mxfp8", dialect="compressed-tensors")
    model = source(llama(1), **CONFIG)
    with pytest.raises(CheckpointError, match="cannot hold"):
        find_groups(model, recipe, make_plan(model, recipe))

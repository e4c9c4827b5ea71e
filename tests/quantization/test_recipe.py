"""Recipes as YAML and as data; every mistake a user can make in one is named."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from blockscale.checkpoint.structure import matches
from blockscale.errors import RecipeError
from blockscale.formats.spec import FORMATS, FP8_CHANNEL, FP8_TOKEN, MXFP4, NVFP4
from blockscale.quantization.recipe import (
    KEEP,
    RECIPES,
    Recipe,
    Rule,
    load_recipe,
    names_exactly,
    recipe_from_dict,
    rule_scheme,
    with_options,
    without_static_activations,
)

TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)  # "null", "1", "*", quotes, accents ...
FORMAT = st.sampled_from([*FORMATS])
ACTIVATION = st.sampled_from([None, "nvfp4", "mxfp4", "fp8", "fp8-token"])
SCALED = st.tuples(FORMAT, st.just("amax")) | st.tuples(
    st.sampled_from(["nvfp4", "nvfp4-block32"]), st.sampled_from(["sweep", "four_over_six"])
)
RULE = st.builds(lambda match, ws, a: Rule(match, ws[0], a, ws[1]), TEXT, SCALED, ACTIVATION) | st.builds(
    Rule, TEXT, st.just(KEEP)
)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    weight, scale = draw(SCALED)
    return Recipe(
        name=draw(TEXT),
        weight=weight,
        activation=draw(ACTIVATION),
        scale=scale,
        kv_cache=draw(st.sampled_from([None, "fp8", "nvfp4"])),
        keep=tuple(draw(st.lists(TEXT, max_size=3))),
        rules=tuple(draw(st.lists(RULE, max_size=3))),
        dialect=draw(st.sampled_from(["modelopt", "compressed-tensors"])),
    )


@given(recipes())
def test_yaml_round_trip(recipe: Recipe) -> None:
    assert recipe_from_dict(yaml.safe_load(recipe.to_yaml())) == recipe


@pytest.mark.parametrize("name", RECIPES)
def test_own_recipes(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    path = tmp_path / "r.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(path) == recipe


def test_a_file_as_the_documentation_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text(
        """
        name: mine
        weight: nvfp4            # a format
        activation: nvfp4
        scale: sweep
        kv_cache: fp8
        keep: ["*.layers.0.*"]
        rules:
          - {match: "*.down_proj", weight: fp8-channel, activation: fp8-token}
          - {match: "*.o_proj", weight: keep}
        """
    )
    assert load_recipe(str(path)) == Recipe(
        "mine",
        "nvfp4",
        "nvfp4",
        "sweep",
        "fp8",
        ("*.layers.0.*",),
        (Rule("*.down_proj", "fp8-channel", "fp8-token"), Rule("*.o_proj", "keep")),
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["nvfp4"], "expected a table"),
        (None, "expected a table"),
        ({"name": "x"}, "weight"),
        ({"weight": "nvfp4"}, "name"),
        ({"name": "x", "weight": "nvfp5"}, "unknown format 'nvfp5'"),
        ({"name": "x", "weight": 4}, "weight is 4, not a name"),
        ({"name": "x", "weight": ["nvfp4"]}, "weight is"),
        ({"name": "x", "weight": "nvfp4", "activation": "int3"}, "unknown format 'int3'"),
        ({"name": "x", "weight": "nvfp4", "scale": "mse"}, "mse"),
        ({"name": "x", "weight": "mxfp4", "scale": "sweep"}, "'sweep' is for NVFP4, not mxfp4"),
        ({"name": "x", "weight": "nvfp4", "kv_cache": "int8"}, "unknown kv_cache 'int8'"),
        ({"name": "x", "weight": "nvfp4", "kv_cache": True}, "kv_cache is True"),
        ({"name": "x", "weight": "nvfp4", "dialect": "awq"}, "unknown dialect 'awq'"),
        ({"name": "x", "weight": "nvfp4", "wieght": "fp8"}, "unknown setting 'wieght'"),
        # a bare string would be taken apart into one-letter patterns, and `*` covers the whole model
        ({"name": "x", "weight": "nvfp4", "keep": "*.down_proj"}, "keep is '\\*.down_proj', not a list"),
        ({"name": "x", "weight": "nvfp4", "keep": [3]}, "keep holds"),
        ({"name": "x", "weight": "nvfp4", "rules": {"match": "*", "weight": "fp8"}}, "rules is"),
        ({"name": "x", "weight": "nvfp4", "rules": ["*.down_proj"]}, "expected a table"),
        ({"name": "x", "weight": "nvfp4", "rules": [{"match": "*"}]}, "weight"),
        ({"name": "x", "weight": "nvfp4", "rules": [{"weight": "fp8"}]}, "match"),
        ({"name": "x", "weight": "nvfp4", "rules": [{"match": "*", "weight": "fp9"}]}, "unknown format 'fp9'"),
        ({"name": "x", "weight": "nvfp4", "rules": [{"match": "*", "weight": "fp8", "keep": 1}]}, "unknown setting"),
    ],
)
def test_what_makes_no_sense(data: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_from_dict(data)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="unknown recipe 'nvfp4-magic'") as error:
        load_recipe("nvfp4-magic")
    assert "nvfp4-w4a16" in error.value.hint
    with pytest.raises(RecipeError, match="cannot be read: No such file"):
        load_recipe(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(broken)
    broken.write_text("")
    with pytest.raises(RecipeError, match="expected a table"):
        load_recipe(broken)


def test_a_recipe_object_is_checked_too() -> None:
    with pytest.raises(RecipeError, match="unknown format"):
        load_recipe(Recipe("x", "nvfp5"))


def test_options_of_the_command_line() -> None:
    base = Recipe("x", "nvfp4", keep=("a",), kv_cache="fp8")
    assert with_options(base, (), None, None) == base
    changed = with_options(base, ("b",), "nvfp4", "compressed-tensors")
    assert (changed.keep, changed.kv_cache, changed.dialect) == (("a", "b"), "nvfp4", "compressed-tensors")
    with pytest.raises(RecipeError, match="unknown dialect"):
        with_options(base, (), None, "awq")
    with pytest.raises(RecipeError, match="unknown kv_cache"):
        with_options(base, (), "int4", None)


def test_what_needs_calibration() -> None:
    assert RECIPES["nvfp4"].needs_calibration
    assert not RECIPES["nvfp4-w4a16"].needs_calibration
    assert not RECIPES["mxfp4"].needs_calibration, "block scales follow the values when the model runs"
    assert not RECIPES["fp8"].needs_calibration
    assert Recipe("x", "nvfp4", kv_cache="fp8").needs_calibration
    assert Recipe("x", "fp8", "fp8").needs_calibration
    assert Recipe("x", "nvfp4", rules=(Rule("*.o_proj", "nvfp4", "nvfp4"),)).needs_calibration
    assert not Recipe("x", KEEP, rules=(Rule("*.o_proj", "nvfp4"), Rule("*", KEEP, "nvfp4"))).needs_calibration


def test_without_static_activations() -> None:
    rules = (Rule("a", "nvfp4", "nvfp4"), Rule("b", KEEP), Rule("c", "fp8-channel", "fp8-token"))
    recipe = without_static_activations(Recipe("x", "nvfp4", "nvfp4", rules=rules))
    assert recipe.activation is None
    assert [rule.activation for rule in recipe.rules] == [None, None, "fp8-token"]
    assert not recipe.needs_calibration
    dynamic = Recipe("x", "mxfp4", "mxfp4")
    assert without_static_activations(dynamic) == dynamic
    with pytest.raises(RecipeError, match="fp8 activations need calibration text"):
        without_static_activations(Recipe("x", "nvfp4", rules=(Rule("a", "fp8", "fp8"),)))


def test_schemes() -> None:
    assert rule_scheme(RECIPES["nvfp4"].default_rule).weight is NVFP4
    assert rule_scheme(RECIPES["nvfp4"].default_rule).activation is NVFP4
    assert rule_scheme(RECIPES["mxfp4"].default_rule).activation is MXFP4
    scheme = rule_scheme(RECIPES["fp8"].default_rule)
    assert (scheme.weight, scheme.activation) == (FP8_CHANNEL, FP8_TOKEN)


def test_patterns() -> None:
    module = "model.layers.1.mlp.down_proj"
    for pattern in (
        module,
        module + ".weight",
        "*.down_proj",
        "*.down_proj.weight",
        "model.layers.1",
        "model",
        "*.layers.[01].*",
        "model.layers.?.mlp.*",
    ):
        assert matches(pattern, module), pattern
    # module boundaries: 1 is not 10, and a leaf is not its own suffix
    for pattern in ("model.layers.1", "layers.1", "down_proj", "model.layers.10.mlp.down", "*.DOWN_PROJ", ""):
        assert not matches(pattern, "model.layers.10.mlp.down_proj"), pattern
    assert names_exactly("lm_head", "lm_head")
    assert names_exactly("lm_head.weight", "lm_head")
    assert not names_exactly("*lm_head", "lm_head")
    assert not names_exactly("model", "model.embed_tokens")

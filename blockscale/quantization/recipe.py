"""Recipes: what to store in which format. Frozen, and the same thing as YAML.

    name: mine
    weight: nvfp4            # a format of blockscale.formats.spec
    activation: nvfp4        # or null: activations stay in 16 bits
    scale: sweep             # amax | sweep | four_over_six
    method: best             # gptq | awq | smoothquant | svdquant | best | best-arc | learned; looks at text
    activation_scale: amax   # four_over_six | sweep: block scales of activations, as only blockscale runs them
    kv_cache: fp8            # or nvfp4, or null
    keep: ["*.layers.0.*"]   # stays in 16 bits, beside what always does
    rules:                   # first match wins; `weight: keep` keeps
      - {match: "*.down_proj", weight: fp8, activation: fp8}

A pattern is a shell glob on the whole module name (`*` crosses dots); one without a wildcard also covers every module
below that name.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.linear import Scheme
from blockscale.checkpoint.reader import DIALECTS
from blockscale.errors import FormatError, RecipeError
from blockscale.formats.spec import get_format
from blockscale.quantization.layerwise.method import METHODS
from blockscale.quantization.weight import ScaleMethod

KEEP = "keep"
KV_FORMATS = ("fp8", "nvfp4")


@dataclass(frozen=True)
class Rule:
    """What the modules that match `match` are stored as. `activation` is a format or None (16 bits)."""

    match: str
    weight: str
    activation: str | None = None
    scale: str = "amax"


@dataclass(frozen=True)
class Recipe:
    """The default for every linear, the rules that differ, and what stays in 16 bits beside the usual."""

    name: str
    weight: str
    activation: str | None = None
    scale: str = "amax"
    kv_cache: str | None = None
    keep: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    dialect: str = "modelopt"
    method: str | None = None
    activation_scale: str = "amax"

    @property
    def default_rule(self) -> Rule:
        return Rule("*", self.weight, self.activation, self.scale)

    @property
    def needs_calibration(self) -> bool:
        """Whether something can only be found by running the model."""
        if self.method is not None or self.kv_cache is not None:
            return True
        rules = [r for r in (*self.rules, self.default_rule) if r.weight != KEEP]
        return any(rule_scheme(r).needs_input_scale for r in rules)

    def to_yaml(self) -> str:
        data = {k: v for k, v in asdict(self).items() if v not in (None, ())}
        data["keep"], data["rules"] = list(self.keep), [asdict(r) for r in self.rules]
        return yaml.safe_dump(data, sort_keys=False)


# NVFP4 is written in Model Optimizer's dialect, which vLLM, SGLang and TensorRT-LLM read. In it vLLM refuses MXFP4 and
# SGLang per-channel FP8, so these two are written in compressed-tensors.
RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe("nvfp4", "nvfp4", "nvfp4"),
        Recipe("nvfp4-sweep", "nvfp4", "nvfp4", scale="sweep"),
        Recipe("nvfp4-w4a16", "nvfp4"),
        Recipe("nvfp4-w4a16-sweep", "nvfp4", scale="sweep"),
        *(
            Recipe(f"nvfp4-{n}", "nvfp4", "nvfp4", scale="sweep", method=n, activation_scale=m.activation_scale)
            for n, m in METHODS.items()
        ),
        *(Recipe(f"nvfp4-w4a16-{name}", "nvfp4", scale="sweep", method=name) for name in METHODS if name != "best-arc"),
        Recipe("mxfp4", "mxfp4", "mxfp4", dialect="compressed-tensors"),
        Recipe("fp8", "fp8-channel", "fp8-token", dialect="compressed-tensors"),
    )
}


def rule_scheme(rule: Rule) -> Scheme:
    """The scheme a rule stands for."""
    return Scheme(get_format(rule.weight), get_format(rule.activation) if rule.activation else None)


def load_recipe(recipe: "str | Path | Recipe") -> Recipe:
    """A recipe by name, from a YAML file, or as it is. RecipeError for what makes no sense."""
    if isinstance(recipe, Recipe):
        return _checked(recipe)
    if str(recipe) in RECIPES:
        return RECIPES[str(recipe)]
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"unknown recipe '{recipe}'", hint=f"recipes: {', '.join(RECIPES)}; or a .yaml file")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise RecipeError(f"recipe {path} cannot be read: {e.strerror}", hint="check the path") from e
    except UnicodeDecodeError as e:
        raise RecipeError(f"recipe {path} is not UTF-8", hint="convert it with iconv") from e
    except yaml.YAMLError as e:
        raise RecipeError(f"recipe {path} is not valid YAML: {e}") from e
    return recipe_from_dict(data, str(path))


def recipe_from_dict(data: object, where: str = "recipe") -> Recipe:
    """RecipeError for an unknown key, format or scale."""
    if not isinstance(data, Mapping):
        raise RecipeError(f"{where}: expected a table of settings, got {type(data).__name__}")
    keep, rules = _listed(data, "keep", where), _listed(data, "rules", where)
    if not all(isinstance(pattern, str) for pattern in keep):
        raise RecipeError(f"{where}: keep holds something that is no pattern", hint='keep: ["*.layers.0.*"]')
    made = tuple(_from_table(Rule, rule, f"{where}, rules") for rule in rules)
    return _checked(_from_table(Recipe, {**data, "rules": made, "keep": tuple(keep)}, where))


def _listed(data: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = data.get(key) or []
    if not isinstance(value, list):
        raise RecipeError(f"{where}: {key} is {value!r}, not a list", hint=f"{key}: [...]")
    return value


def _from_table(kind: type, table: object, where: str) -> Any:
    if not isinstance(table, Mapping):
        raise RecipeError(f"{where}: expected a table of settings, got {table!r}")
    known = {f.name for f in fields(kind)}
    unknown = [key for key in table if key not in known]
    if unknown:
        raise RecipeError(f"{where}: unknown setting '{unknown[0]}'", hint="settings: " + ", ".join(sorted(known)))
    for key, value in table.items():
        if key not in ("keep", "rules") and not isinstance(value, str | None):
            raise RecipeError(f"{where}: {key} is {value!r}, not a name")
    try:
        return kind(**table)
    except TypeError as e:
        raise RecipeError(f"{where}: {e}") from e


def _checked(recipe: Recipe) -> Recipe:
    for rule in (*recipe.rules, recipe.default_rule):
        if rule.weight != KEEP:
            try:
                rule_scheme(rule)
                method = ScaleMethod(rule.scale)
            except (FormatError, ValueError) as e:
                raise RecipeError(f"recipe {recipe.name}: {e}", hint=getattr(e, "hint", "")) from e
            if method is not ScaleMethod.AMAX and not get_format(rule.weight).has_global_scale:
                raise RecipeError(f"recipe {recipe.name}: scale '{rule.scale}' is for NVFP4, not {rule.weight}")
    if recipe.dialect not in DIALECTS:
        raise RecipeError(f"recipe {recipe.name}: unknown dialect '{recipe.dialect}'", hint=", ".join(DIALECTS))
    if recipe.method is not None and recipe.method not in METHODS:
        raise RecipeError(f"recipe {recipe.name}: unknown method '{recipe.method}'", hint=", ".join(METHODS))
    scales = [scale.value for scale in ActivationScale]
    if recipe.activation_scale not in scales:
        hint = ", ".join(scales)
        raise RecipeError(f"recipe {recipe.name}: unknown activation_scale '{recipe.activation_scale}'", hint=hint)
    if recipe.kv_cache not in (None, *KV_FORMATS):
        raise RecipeError(f"recipe {recipe.name}: unknown kv_cache '{recipe.kv_cache}'", hint="fp8, nvfp4 or null")
    return recipe


def with_options(recipe: Recipe, keep: tuple[str, ...], kv_cache: str | None, dialect: str | None) -> Recipe:
    """The recipe with what was given on the command line."""
    return _checked(
        replace(
            recipe,
            keep=recipe.keep + keep,
            kv_cache=kv_cache or recipe.kv_cache,
            dialect=dialect or recipe.dialect,
        )
    )


def without_calibration(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe as far as it goes without text, for one without a method, and what its user is told."""
    if recipe.kv_cache is not None:
        raise RecipeError("KV-cache scales need calibration text", hint="add --calibration FILE, or --calibration self")
    notice = "no calibration text: activations stay in 16 bits (W4A16); give --calibration FILE for W4A4"
    return without_static_activations(recipe), (notice,)


def without_static_activations(recipe: Recipe) -> Recipe:
    """Activations left in 16 bits where their scale would have to be calibrated; RecipeError where the format means
    nothing without (FP8 weights with one scale)."""
    for rule in (*recipe.rules, recipe.default_rule):
        if rule.weight == "fp8" and rule.activation == "fp8":
            raise RecipeError(
                f"recipe {recipe.name}: fp8 activations need calibration text", hint="add --calibration FILE"
            )

    def weight_only(rule: Rule) -> Rule:
        is_static = rule.weight != KEEP and rule_scheme(rule).needs_input_scale
        return replace(rule, activation=None) if is_static else rule

    activation = weight_only(recipe.default_rule).activation
    return replace(recipe, activation=activation, rules=tuple(weight_only(r) for r in recipe.rules))


def names_exactly(pattern: str, module: str) -> bool:
    """Whether a pattern is the module's own name, and not one that happens to cover it."""
    return pattern.removesuffix(".weight") == module

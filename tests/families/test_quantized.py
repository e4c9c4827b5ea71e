"""Every family, quantized: what is packed and what is kept, what lint says of it, and what the packed model answers."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from host.dequantized import dequantized_copy, transformers_logits

from blockscale import api
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.host.model import load_model

from .conftest import W4A4, W4A16, Make, Source
from .logits import relative, token_ids
from .published import with_mxfp4_experts
from .table import FAMILIES, KEPT, KEPT_BELOW, Family

RECIPES = (W4A16, W4A4)
families = pytest.mark.parametrize("family", FAMILIES, ids=str)


@families
def test_what_is_quantized(family: Family, quantized: Make) -> None:
    checkpoint = open_checkpoint(quantized(family, W4A16))
    assert checkpoint.quantized is not None
    linears = checkpoint.quantized.linears
    assert Counter(name.rpartition(".")[2] for name in linears) == family.linears
    matrices = [n.removesuffix(".weight") for n, t in checkpoint.kept.items() if len(t.shape) > 1]
    matrices = [n for n in matrices if not any(part in n for part in KEPT_BELOW) and not n.endswith("_bias")]
    assert {n.rpartition(".")[2] for n in matrices} <= KEPT


@families
def test_the_16bit_model_is_the_one_of_transformers(family: Family, source: Source, converted: Make) -> None:
    path = source(family)
    found = load_model(path).logits(token_ids())
    plain = converted(path, "bf16") if family.publish is with_mxfp4_experts else path
    assert found.std() > 0.1
    assert torch.equal(found, transformers_logits(plain, token_ids()))


@families
@pytest.mark.parametrize("recipe", RECIPES)
def test_lint_finds_nothing(recipe: str, family: Family, quantized: Make, source: Source) -> None:
    report = api.lint(quantized(family, recipe), source=source(family))
    assert [f"{f.rule} {f.layer}: {f.message}" for f in report.findings] == []


@families
@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_weights_are_what_they_stand_for(
    recipe: str, family: Family, quantized: Make, logits, tmp_path: Path
) -> None:
    """Against transformers on the decoded weights."""
    path = quantized(family, recipe)
    found = logits(path, emulate_activations=False)
    expected = transformers_logits(dequantized_copy(path, tmp_path / "plain"), token_ids())
    assert relative(found, expected) < 1e-5


@families
def test_activations_and_cache_are_rounded(family: Family, quantized: Make, logits, source: Source) -> None:
    path = quantized(family, W4A4)
    scales = open_checkpoint(path).quantized
    assert scales is not None
    assert all("input_global_scale" in linear.tensors for linear in scales.linears.values())
    assert bool(scales.kv_tensors) == ("k_proj" in family.linears)
    reference = load_model(source(family)).logits(token_ids())
    weights_only = logits(path, emulate_activations=False)
    found = logits(path)
    assert relative(weights_only, found) > 0.01
    assert relative(found, reference) < 2.5 * relative(weights_only, reference)

"""Every family from one dialect to the other and back, and to 16 bits: the same codes, the same answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from host.dequantized import dequantized_copy, transformers_logits
from safetensors.torch import load_file
from torch import Tensor

from blockscale import api
from blockscale.errors import CheckpointError
from blockscale.host.model import load_model

from .conftest import W4A4, W4A16, Make
from .logits import EPSILON, relative, token_ids
from .table import FAMILIES, Family

RECIPES = pytest.mark.parametrize("recipe", [W4A16, W4A4])
STACKED = [family for family in FAMILIES if family.has_stacks]
SEPARATE = pytest.mark.parametrize("family", [f for f in FAMILIES if not f.has_stacks], ids=str)
GLOBAL_SCALES = ("weight_scale_2", "input_scale", "k_scale", "v_scale")


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same_bytes(found: Tensor, expected: Tensor) -> bool:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(found.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))


@SEPARATE
@RECIPES
def test_there_and_back(recipe: str, family: Family, quantized: Make, converted: Make) -> None:
    """Everything is byte for byte what it was; a global scale that was stored as its reciprocal, to one unit in the
    last place."""
    first = quantized(family, recipe)
    back = converted(converted(first, "compressed-tensors"), "modelopt")
    before, after = tensors(first), tensors(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name.endswith(GLOBAL_SCALES):
            units = tensor.view(torch.int32).long() - after[name].view(torch.int32).long()
            assert abs(int(units)) <= 1, name
        else:
            assert same_bytes(after[name], tensor), name
    assert config(first) == config(back)


@SEPARATE
def test_a_conversion_is_what_quantizing_into_that_dialect_gives(
    family: Family, quantized: Make, converted: Make
) -> None:
    direct = quantized(family, W4A16, "compressed-tensors")
    made = converted(quantized(family, W4A16), "compressed-tensors")
    before, after = tensors(direct), tensors(made)
    assert before.keys() == after.keys()
    assert [n for n in before if not same_bytes(after[n], before[n])] == []
    assert config(direct) == config(made)


@SEPARATE
@RECIPES
def test_lint_finds_nothing_in_conversions(recipe: str, family: Family, quantized: Make, converted: Make) -> None:
    other = converted(quantized(family, recipe), "compressed-tensors")
    for folder in (other, converted(other, "modelopt")):
        assert [f"{f.rule} {f.layer}: {f.message}" for f in api.lint(folder).findings] == []


@SEPARATE
@RECIPES
def test_both_dialects_answer_alike(recipe: str, family: Family, quantized: Make, converted: Make, logits) -> None:
    first = quantized(family, recipe)
    other = converted(first, "compressed-tensors")
    # the folder that was made from the reciprocals holds exactly the numbers that those stand for
    assert torch.equal(logits(converted(other, "modelopt")), logits(other))
    # the last place of the scales, added up through the layers
    found = relative(logits(other, emulate_activations=False), logits(first, emulate_activations=False))
    assert found < 64 * EPSILON


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@RECIPES
def test_in_16_bits(recipe: str, family: Family, quantized: Make, converted: Make, tmp_path: Path) -> None:
    """Weights are rounded once; it is a model that transformers loads by itself, and answers as it does."""
    path = quantized(family, recipe)
    plain = converted(path, "bf16")
    found, exact = tensors(plain), tensors(dequantized_copy(path, tmp_path / "exact"))
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(found[name].float(), tensor.to(found[name].dtype).float()), name
    assert torch.equal(load_model(plain).logits(token_ids()), transformers_logits(plain, token_ids()))


@pytest.mark.parametrize("family", [f for f in STACKED if f.model == "gpt_oss"], ids=str)
def test_stacks_that_have_no_other_names_are_refused(family: Family, quantized: Make, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"experts\.down_proj: compressed-tensors .* stack") as error:
        api.convert(quantized(family, W4A16), tmp_path / "out", "compressed-tensors")
    assert error.value.hint
    assert not (tmp_path / "out").exists()


@RECIPES
def test_llama_4_is_taken_apart(recipe: str, quantized: Make, converted: Make, logits) -> None:
    """Its stacks become one linear an expert, as llm-compressor stores them, and answer as before."""
    family = next(f for f in STACKED if f.model == "llama4")
    first = quantized(family, recipe)
    other = converted(first, "compressed-tensors")
    names = {n for n in tensors(other) if ".experts." in n and n.endswith("weight_packed")}
    experts = "language_model.model.layers.1.feed_forward.experts"
    assert names == {
        f"{experts}.{i}.{leaf}.weight_packed" for i in range(4) for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    assert api.lint(other).findings == ()
    assert relative(logits(other), logits(first)) < (64 * EPSILON if recipe == W4A16 else 0.01)
    assert torch.equal(logits(converted(other, "modelopt")), logits(other))  # they stay apart
    plain, stacked = converted(other, "bf16"), converted(first, "bf16")
    assert relative(logits(plain), logits(stacked)) < 0.01

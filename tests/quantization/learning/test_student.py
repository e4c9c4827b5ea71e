"""A student computes what evaluation does, bit for bit, and its gradients are the loss's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.algorithms.divergence_loss import mean_divergence
from blockscale.errors import CheckpointError
from blockscale.formats.nvfp4 import decode_unscaled
from blockscale.formats.packing import pack_nibbles
from blockscale.host.model import load_model
from blockscale.quantization.learning.student import Student, open_student, run_logits

from .models import quantized

Find = Callable[[str], Path]
FAMILIES = ("llama", "smollm2", "gemma3_text", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmo2", "opt")


def token_ids() -> Tensor:
    return torch.randint(32, 126, (2, 24), generator=torch.Generator().manual_seed(1))


def stored_values(student: Student, *, requires_grad: bool = False) -> dict[str, Tensor]:
    """What the student is given at the start."""
    values = {name: decode_unscaled(pack_nibbles(codes), scale) for name, (codes, scale) in student.stored().items()}
    values |= {name: gain.float() for name, gain in student.gain_values().items()}
    return {name: value.requires_grad_(requires_grad) for name, value in values.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-w4a16"])
def test_it_computes_what_evaluation_does(
    family: str, recipe: str, tiny_model: Find, calibration_text: Path, tmp_path: Path
) -> None:
    path = quantized(tiny_model(family), tmp_path, calibration_text, recipe)
    expected = load_model(path).logits(token_ids())
    student = open_student(path, "cpu")
    assert student.linears
    for requires_grad in (False, True):
        found = student.logits(token_ids(), stored_values(student, requires_grad=requires_grad))
        assert found.requires_grad == requires_grad
        assert torch.equal(found, expected.flatten(0, 1))


@pytest.mark.parametrize("kv_cache", ["fp8", "nvfp4"])
def test_it_rounds_the_cache(kv_cache: str, tiny_model: Find, calibration_text: Path, tmp_path: Path) -> None:
    path = quantized(tiny_model("llama"), tmp_path, calibration_text, "nvfp4", kv_cache=kv_cache)
    student = open_student(path, "cpu")
    values = stored_values(student, requires_grad=True)
    found = student.logits(token_ids(), values)
    assert torch.equal(found, load_model(path).logits(token_ids()).flatten(0, 1))
    found.square().sum().backward()
    for name in ("k_proj", "v_proj"):
        gradient = values[f"model.layers.0.self_attn.{name}"].grad
        assert gradient is not None
        assert gradient.any(), "gradients pass through the cache's rounding"


def test_every_linear_and_every_norm_learns(tiny_model: Find, calibration_text: Path, tmp_path: Path) -> None:
    path = quantized(tiny_model("qwen3"), tmp_path, calibration_text, "nvfp4")
    student = open_student(path, "cpu")
    values = stored_values(student, requires_grad=True)
    student.logits(token_ids(), values).square().sum().backward()
    assert {name.rpartition(".layers.")[2].partition(".")[2] for name in student.gains} == {
        "norm.weight",
        *("input_layernorm.weight", "post_attention_layernorm.weight"),
        *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    }
    assert len(student.linears) == 2 * 7
    for name, value in values.items():
        assert value.grad is not None, name
        assert torch.isfinite(value.grad).all()
        assert value.grad.any(), name


def test_gradients_are_differences_of_the_loss(tiny_model: Find, tmp_path: Path) -> None:
    """With activations in 16 bits the loss is smooth in the weights, so small steps tell its slope."""
    source = tiny_model("llama")
    bs.quantize(source, tmp_path / "q", "nvfp4-w4a16")
    student = open_student(tmp_path / "q", "cpu")
    wanted = load_model(source).logits(token_ids()).flatten(0, 1).double()
    student.hosted.model.double()
    values = stored_values(student, requires_grad=True)
    loss = mean_divergence(student.logits(token_ids(), values), wanted)
    loss.backward()
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj", "model.norm.weight"):
        gradient = values[name].grad
        assert gradient is not None
        step = 0.01 * gradient / gradient.norm() * values[name].detach().norm()
        around = []
        for sign in (1, -1):
            moved = {n: v.detach() for n, v in values.items()} | {name: values[name].detach() + sign * step}
            around.append(mean_divergence(student.logits(token_ids(), moved), wanted).item())
        slope = (gradient * step).sum().item()
        # the third derivative's part is a ten-thousandth of the first's or so, fp32's rounding of the loss another
        assert (around[0] - around[1]) / 2 == pytest.approx(slope, rel=0.01)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_recomputed_layers_give_the_same(family: str, tiny_model: Find, calibration_text: Path, tmp_path: Path) -> None:
    path = quantized(tiny_model(family), tmp_path, calibration_text, "nvfp4")
    found = []
    for is_recomputing in (False, True):
        student = open_student(path, "cpu")
        if is_recomputing:
            student.recompute_layers()
        values = stored_values(student, requires_grad=True)
        logits = student.logits(token_ids(), values)
        logits.square().sum().backward()
        found.append((logits.detach(), {name: value.grad for name, value in values.items()}))
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        other = found[1][1][name]
        assert (gradient is None) == (other is None)
        assert gradient is None or other is None or torch.equal(gradient, other)


def test_recomputing_holds_less(tiny_model: Find, calibration_text: Path, tmp_path: Path) -> None:
    path = quantized(tiny_model("llama"), tmp_path, calibration_text, "nvfp4")
    held = []
    for is_recomputing in (False, True):
        student = open_student(path, "cpu")
        if is_recomputing:
            student.recompute_layers()
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            student.logits(token_ids(), stored_values(student, requires_grad=True))
        held.append(total)
    assert held[1] < held[0] / 4


def test_a_checkpoint_without_nvfp4_is_refused(tiny_model: Find, tmp_path: Path) -> None:
    bs.quantize(tiny_model("llama"), tmp_path / "q", "fp8")
    with pytest.raises(CheckpointError, match="no NVFP4 linear"):
        open_student(tmp_path / "q", "cpu")
    with pytest.raises(CheckpointError, match="no NVFP4 linear"):
        open_student(tiny_model("llama"), "cpu")


def test_logits_of_a_16_bit_model(tiny_model: Find) -> None:
    hosted = load_model(tiny_model("llama"))
    assert torch.equal(run_logits(hosted, token_ids()), hosted.logits(token_ids()).flatten(0, 1))

"""transformers, through compressed-tensors, runs the folders of dense families: the same weights, the same answers.

It decodes weights to bf16, where blockscale keeps them exact. Experts in NVFP4 it leaves unscaled, so that models that
have some are no comparison.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from host.dequantized import dequantized_copy, transformers_logits
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blockscale.algorithms.fake_quantize import round_activation
from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.host.model import load_model

from .conftest import W4A4, W4A16, Make
from .logits import relative, token_ids
from .table import BY_NAME, Family

pytest.importorskip("compressed_tensors")

DENSE = ("Llama 3", "SmolLM2", "Qwen2.5", "Qwen3", "Mistral", "Gemma 3 text", "Gemma 3", "Phi-4", "GLM-4", "Qwen2.5-VL")
dense = pytest.mark.parametrize("family", [BY_NAME[name] for name in DENSE], ids=str)


def run_by_transformers(path: Path, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """The model, its weights decoded by compressed-tensors, and its logits in fp32."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    model = getattr(transformers, config.architectures[0]).from_pretrained(path, dtype=dtype)
    with torch.no_grad():
        model(input_ids=token_ids()[:1, :2], use_cache=False)  # the first call decodes
        nn.Module.float(model)  # transformers has no such way for quantized models
        return model, model(input_ids=token_ids(), use_cache=False).logits


def quantized_linears(peer: Any) -> dict[str, Any]:
    return {
        name: module
        for name, module in peer.named_modules()
        if getattr(module, "quantization_scheme", None) is not None and isinstance(module, nn.Linear)
    }


def rounded_copy(path: Path, target: Path) -> Path:
    """Decoded, then rounded to bf16."""
    dequantized_copy(path, target)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(target / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def rounding(scale: Tensor | None, activation: Format) -> Callable[..., Any]:
    """A hook that rounds a linear's input by blockscale's arithmetic."""

    def rounded(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values, factor = round_activation(args[0], activation, scale)
        return (values.float() * factor,)

    return rounded


@dense
@pytest.mark.parametrize(("recipe", "activation"), [(W4A16, None), (W4A4, NVFP4), ("mxfp4", MXFP4)])
def test_four_bits(recipe: str, activation: Format | None, family: Family, quantized: Make, tmp_path: Path) -> None:
    path = quantized(family, recipe, "compressed-tensors")
    peer, answer = run_by_transformers(path, torch.bfloat16)
    linears = quantized_linears(peer)
    assert len(linears) == sum(family.linears.values())

    def prepare(model: nn.Module) -> None:
        for name, theirs in linears.items():
            ours = model.get_submodule(name)
            # a number halfway between two of bf16 may go to either, by the last place of the scale
            difference = (theirs.weight - ours.weight).abs()
            assert (difference <= 2.0**-7 * ours.weight.abs()).all()
            assert (difference == 0).float().mean() > 0.9
            ours.weight.data.copy_(theirs.weight)
            if activation is not None:
                scale = theirs.input_global_scale.reciprocal().reshape(()) if activation is NVFP4 else None
                ours.register_forward_pre_hook(rounding(scale, activation))

    expected = transformers_logits(rounded_copy(path, tmp_path / "rounded"), token_ids(), prepare)
    # an input that lies between two codes may go to either
    assert relative(answer, expected) < (0.01 if activation else 1e-6)


@dense
def test_eight_bits(family: Family, quantized: Make) -> None:
    """Here it decodes in fp32, so that the packed model can be compared as a whole."""
    path = quantized(family, "fp8", "compressed-tensors")
    peer, answer = run_by_transformers(path, torch.float32)
    assert len(quantized_linears(peer)) == sum(family.linears.values())
    # an input that lies between two codes may go to either
    assert relative(load_model(path).logits(token_ids()), answer) < 0.01

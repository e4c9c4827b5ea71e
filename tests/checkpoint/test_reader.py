"""Which way a checkpoint is opened, by its config."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from blockscale.checkpoint.folder import open_folder
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import CheckpointError

from .files import GOLDEN, changed, model_folder, same, tensors


def folder(path: Path, config: dict[str, Any]) -> Path:
    model_folder(path, {"model.safetensors": {"norm.weight": torch.ones(4)}})
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        (None, None),
        ({}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "gptq"}, "gptq"),
    ],
)
def test_which_method(quantization: dict[str, Any] | None, method: str | None, tmp_path: Path) -> None:
    opened = open_folder(folder(tmp_path, {"quantization_config": quantization}))
    assert opened.method == method


def test_a_sixteen_bit_model(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(GOLDEN / "base_llama")
    stored = tensors(GOLDEN / "base_llama")
    assert checkpoint.quantized is None
    assert checkpoint.kept.keys() == stored.keys()
    assert all(same(t.read(), stored[n]) for n, t in checkpoint.kept.items())


def test_a_method_that_nobody_reads(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"already quantized \(hqq\)"):
        open_checkpoint(folder(tmp_path, {"quantization_config": {"quant_method": "hqq"}}))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, torch.bfloat16),
        ({"text_config": {"dtype": "float16"}}, torch.float16),
        ({"text_config": {"torch_dtype": "float16"}}, torch.float16),
        ({"dtype": None, "text_config": None}, torch.bfloat16),
    ],
)
def test_the_models_own_dtype(config: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    assert open_checkpoint(folder(tmp_path, config)).dtype == dtype


def test_what_a_quantized_model_keeps_is_not_read_twice(tmp_path: Path) -> None:
    """Each stored tensor is part of one linear, a cache's scale, or kept."""
    for name in ("modelopt_llama_nvfp4_fp8kv", "ct_llama_nvfp4_fp8kv", "modelopt_llama_nvfp4_awq_lite"):
        checkpoint = open_checkpoint(GOLDEN / name)
        quantized = checkpoint.quantized
        assert quantized is not None
        parts = [info.name for linear in quantized.linears.values() for info in linear.tensors.values()]
        parts += [info.name for pair in quantized.kv_tensors.values() for info in pair]
        parts += list(checkpoint.kept)
        assert sorted(parts) == sorted(tensors(GOLDEN / name))


def test_a_mask_of_bytes_is_no_weight(tmp_path: Path) -> None:
    """One-dimensional bytes are a buffer of the model, not codes that lost their scales."""
    path = changed(
        "modelopt_llama_nvfp4", tmp_path, tensors=lambda s: s.update({"mask": torch.ones(4, dtype=torch.uint8)})
    )
    assert "mask" in open_checkpoint(path).kept

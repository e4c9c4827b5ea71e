"""Checkpoints in every stored format, of both dialects, against transformers' classes over the same stored weights."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockscale import api
from blockscale.checkpoint.linear import KVScales
from blockscale.checkpoint.load import load_kv_scales
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import CheckpointError, UsageError
from blockscale.host.attention import kv_rounding
from blockscale.kernels.paged_cache import KVFormat
from blockscale.models.layers import BranchedProduct, DecodedProduct, JoinedProduct, PackedProduct, RoundedProduct
from blockscale.models.load import load_decoder

from .running import PIECES, relative, run, tokens, transformers_logits

GOLDEN = (
    "ct_llama_fp8_dynamic",
    "ct_llama_mxfp4",
    "ct_llama_nvfp4",
    "ct_llama_nvfp4a16",
    "modelopt_llama_fp8",
    "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv",
    "modelopt_llama_nvfp4",
    "modelopt_llama_nvfp4_awq_lite",
    "modelopt_llama_nvfp4_four_over_six",
    "modelopt_llama_w4a16_nvfp4",
    "modelopt_llama_w4a8_nvfp4_fp8",
    "modelopt_qwen3moe_nvfp4",
)
KNIFE_EDGE = 0.02  # rounded inputs: sums in another order move a few of them to the next code, a step of half of it
WEIGHTS_ONLY = 1e-3  # a key or value between two bfloat16 may fall to either side
Golden = Callable[[str], Path]


@pytest.mark.parametrize("name", GOLDEN)
def test_weights_only(name: str, golden_checkpoint: Golden) -> None:
    path = golden_checkpoint(name)
    decoder = load_decoder(path, kv_format=KVFormat.BITS16)
    ids = tokens(decoder.vocab_size)
    expected = transformers_logits(path, ids)
    for pieces in PIECES[::2]:
        assert relative(run(decoder, ids, pieces), expected) < WEIGHTS_ONLY


@pytest.mark.parametrize("name", [n for n in GOLDEN if "a16" not in n])
def test_rounded_inputs(name: str, golden_checkpoint: Golden) -> None:
    path = golden_checkpoint(name)
    decoder = load_decoder(path, kv_format=KVFormat.BITS16, emulate_activations=True)
    ids = tokens(decoder.vocab_size)
    expected = transformers_logits(path, ids, is_emulating=True)
    found = run(decoder, ids)
    plain = run(load_decoder(path, kv_format=KVFormat.BITS16), ids)
    distance = relative(plain, expected)
    assert distance > WEIGHTS_ONLY, "inputs are not rounded"
    assert relative(found, expected) < min(KNIFE_EDGE, distance / 2)


@pytest.mark.parametrize("method", ["nvfp4-svdquant", "nvfp4-best-arc"])
def test_branches(method: str, tiny_model: Callable[[str], Path], calibration_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"
    api.quantize(tiny_model("llama"), out, method, calibration=[calibration_text], max_calibration_tokens=512)
    roles = {r for stored in open_checkpoint(out).quantized.linears.values() for r in stored.tensors}  # type: ignore[union-attr]
    assert len(roles) > 4, "nothing lies beside the weights"
    ids = tokens()
    for is_emulating, bound in ((False, WEIGHTS_ONLY), (True, KNIFE_EDGE)):
        decoder = load_decoder(out, emulate_activations=is_emulating)
        expected = transformers_logits(out, ids, is_emulating=is_emulating)
        assert relative(run(decoder, ids), expected) < bound


def test_which_product_serves_what(golden_checkpoint: Golden) -> None:
    def first(name: str, **options: Any) -> tuple[type, type]:
        layer: Any = load_decoder(golden_checkpoint(name), **options).layers[0]
        return type(layer.attention.qkv), type(layer.feed_forward.down)

    assert first("modelopt_llama_nvfp4") == (PackedProduct, PackedProduct)
    assert first("modelopt_llama_nvfp4", emulate_activations=True) == (RoundedProduct, RoundedProduct)
    awq: Any = load_decoder(golden_checkpoint("modelopt_llama_nvfp4_awq_lite"))
    assert isinstance(awq.layers[0].attention.o, BranchedProduct)
    assert first("modelopt_llama_w4a8_nvfp4_fp8") == (JoinedProduct, DecodedProduct)
    assert first("modelopt_llama_fp8") == (JoinedProduct, DecodedProduct)
    assert first("ct_llama_mxfp4") == (PackedProduct, PackedProduct)


@pytest.mark.parametrize("fmt", [KVFormat.FP8, KVFormat.NVFP4])
@pytest.mark.parametrize("has_scales", [True, False])
def test_small_caches(
    fmt: KVFormat, has_scales: bool, tiny_model: Callable[[str], Path], calibration_text: Path, tmp_path: Path
) -> None:
    source = tiny_model("llama")
    path = source
    if has_scales:
        path = tmp_path / "q"
        options: dict[str, Any] = {"calibration": [calibration_text], "max_calibration_tokens": 512}
        api.quantize(source, path, "nvfp4-w4a16", kv_cache=fmt.value, **options)
    decoder = load_decoder(path) if has_scales else load_decoder(path, kv_format=fmt)
    assert decoder.kv_format is fmt
    assert len(decoder.kv_scales) == (2 if has_scales else 0)
    ids = tokens()
    whole, *others = (run(decoder, ids, pieces) for pieces in PIECES)
    exact = run(load_decoder(path, kv_format=KVFormat.BITS16), ids)
    assert relative(whole, exact) > WEIGHTS_ONLY, "nothing was rounded"
    for found in others:
        assert relative(found, whole) < KNIFE_EDGE
    quantized = open_checkpoint(path).quantized
    stored = quantized.kv_tensors if quantized is not None else {}
    one = KVScales(torch.ones(()), torch.ones(()))
    scales = [load_kv_scales(stored[n]) if has_scales else one for n in (f"model.layers.{i}.self_attn" for i in (0, 1))]
    expected = transformers_logits(path, ids, kv=lambda layer: kv_rounding(scales[layer], fmt.value))
    assert relative(whole, expected) < min(KNIFE_EDGE, relative(whole, exact) / 2)


def test_a_scale_of_one_side_is_refused(golden_checkpoint: Golden, tmp_path: Path) -> None:
    """Engines take 1 for the other; the file says that it was not meant so."""
    path = shutil.copytree(golden_checkpoint("modelopt_llama_nvfp4_fp8kv"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    name = next(n for n in tensors if n.endswith("v_proj.v_scale"))
    del tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="a key scale without a value scale"):
        load_decoder(path)


def test_types_that_cannot_be_computed_in(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"cannot compute in torch\.float64 on cpu"):
        load_decoder(tiny_model("llama"), dtype=torch.float64)

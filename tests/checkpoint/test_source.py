"""A model to quantize, seen as 16-bit tensors, whatever its weights are stored in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.source import Source, open_source
from blockscale.errors import CheckpointError

from .files import GOLDEN, model_folder, names, same, tensors

VECTORS = Path(__file__).parents[1] / "golden" / "vectors" / "layouts.safetensors"


def folder(path: Path, stored: dict[str, Tensor], quantization: dict[str, Any] | None) -> Path:
    model_folder(path, {"model.safetensors": stored})
    (path / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": quantization}))
    return path


def check_accounts_for_everything(source: Source, stored: dict[str, Tensor]) -> None:
    """Every stored tensor stands in exactly one tensor of the view, whose shape and dtype are as announced."""
    used = [info.name for tensor in source.tensors.values() for info in tensor.stored]
    assert sorted(used) == sorted(stored)
    for tensor in source.tensors.values():
        read = tensor.read()
        assert (read.dtype, tuple(read.shape)) == (tensor.dtype, tensor.shape)
        assert tensor.num_bytes == read.numel() * read.element_size()


# ---------------------------------------------------------------- plain


@pytest.mark.parametrize("name", names("base"))
def test_a_plain_model_is_itself(name: str) -> None:
    source, stored = open_source(GOLDEN / name), tensors(GOLDEN / name)
    assert source.tensors.keys() == stored.keys()
    assert all(t.is_plain and same(t.read(), stored[n]) for n, t in source.tensors.items())
    check_accounts_for_everything(source, stored)
    assert source.num_bytes == sum(t.numel() * t.element_size() for t in stored.values())
    assert source.config == json.loads((GOLDEN / name / "config.json").read_text())
    assert [path.name for path in source.companions] == ["generation_config.json"]


def test_any_plain_dtype_is_kept(tmp_path: Path) -> None:
    stored = {f"a{i}.weight": torch.ones(2, dtype=d) for i, d in enumerate((torch.float16, torch.float32, torch.int64))}
    source = open_source(folder(tmp_path, {**stored, "mask": torch.ones(4, dtype=torch.bool)}, None))
    assert source.tensors["a0.weight"].dtype == torch.float16
    assert source.tensors["mask"].read().dtype == torch.bool


@pytest.mark.parametrize("name", names("modelopt") + names("ct"))
def test_a_quantized_model_is_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is already quantized") as caught:
        open_source(GOLDEN / name)
    assert "16-bit model that it was made from" in caught.value.hint


def test_what_cannot_be_brought_back_is_not_promised(tmp_path: Path) -> None:
    stored = {"a.weight": torch.ones(8, 1, dtype=torch.uint8)}
    path = folder(tmp_path, stored, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(CheckpointError, match=r"already quantized \(bitsandbytes\)") as caught:
        open_source(path)
    assert "convert" not in caught.value.hint


@pytest.mark.parametrize(
    "stored",
    [
        {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)},
        {"a.weight": torch.ones(4, 4).to(torch.float8_e5m2)},
        {"a.weight": torch.ones(4, 4, dtype=torch.uint8)},
        {"a.weight_packed": torch.ones(4, 4, dtype=torch.uint8)},
        {"e.gate_up_proj_blocks": torch.ones(1, 2, 1, 16, dtype=torch.uint8)},
        {"a.weight_scale": torch.ones(4).to(torch.float8_e8m0fnu)},
    ],
    ids=lambda stored: next(iter(stored)),
)
def test_low_precision_weights_without_a_word_in_the_config(stored: dict[str, Tensor], tmp_path: Path) -> None:
    name = next(iter(stored))
    with pytest.raises(CheckpointError, match=f"'{name}' is .*config.json names no quantization") as caught:
        open_source(folder(tmp_path, {**stored, "norm.weight": torch.ones(4)}, None))
    assert "quantization_config" in caught.value.hint


# ---------------------------------------------------------------- FP8 in tiles of 128x128

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def fp8_tensors(scale_dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor]:
    """A weight whose last tiles are smaller, its scales, and its value computed element by element in float64."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(200, 130, generator=generator).to(torch.float8_e4m3fn)
    scale = (2.0 ** torch.randint(-9, 3, (2, 2), generator=generator)).to(scale_dtype)
    value = torch.empty(200, 130, dtype=torch.float64)
    for row in range(200):
        for col in range(130):
            value[row, col] = weight[row, col].double() * scale[row // 128, col // 128].double()
    stored = {
        "model.a.weight": weight,
        "model.a.weight_scale_inv": scale,
        "model.norm.weight": torch.ones(130).bfloat16(),
    }
    return stored, value


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_tiles(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    stored, value = fp8_tensors(scale_dtype)
    source = open_source(folder(tmp_path, stored, FP8))
    assert source.tensors.keys() == {"model.a.weight", "model.norm.weight"}
    check_accounts_for_everything(source, stored)
    weight = source.tensors["model.a.weight"]
    assert not weight.is_plain
    assert source.tensors["model.norm.weight"].is_plain
    assert same(weight.read(), value.bfloat16())  # powers of two: exact, so one rounding whatever the order
    assert "quantization_config" not in source.config
    assert open_checkpoint(tmp_path).quantized is None


def test_fp8_scales_of_any_value_cost_one_rounding(tmp_path: Path) -> None:
    stored, _ = fp8_tensors()
    stored["model.a.weight_scale_inv"] = torch.tensor([[0.123, 4.567], [1e-3, 3.0]])
    expanded = stored["model.a.weight_scale_inv"].repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
    value = stored["model.a.weight"].double() * expanded.double()
    read = open_source(folder(tmp_path, stored, FP8)).tensors["model.a.weight"].read()
    # half a unit in the last place of bf16 (8 significant bits), and of fp32 before it
    assert ((read.double() - value).abs() <= value.abs() * (2.0**-8 + 2.0**-24)).all()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model.a.weight_scale_inv": None}, "FP8 weight 'model.a.weight'.* has no model.a.weight_scale_inv"),
        ({"model.a.weight": None}, "'model.a.weight_scale_inv' is a scale without an FP8 weight"),
        ({"model.a.weight": torch.ones(200, 130)}, "'model.a.weight_scale_inv' is a scale without an FP8 weight"),
        ({"model.a.weight_scale_inv": torch.ones(2, 1)}, r"'model.a.weight_scale_inv' is \[2, 1\], expected \[2, 2\]"),
        ({"model.a.weight_scale_inv": torch.ones(())}, r"'model.a.weight_scale_inv' is \[\], expected \[2, 2\]"),
        ({"model.b.weight": torch.ones(4).to(torch.float8_e5m2)}, "FP8 weight 'model.b.weight'"),
    ],
)
def test_fp8_tiles_that_do_not_fit(change: dict[str, Tensor | None], match: str, tmp_path: Path) -> None:
    stored, _ = fp8_tensors()
    stored = {name: tensor for name, tensor in {**stored, **change}.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=match):
        open_source(folder(tmp_path, stored, FP8))


@pytest.mark.parametrize("block", [None, [64, 128], [1, 128], 128])
def test_fp8_in_other_tiles_is_refused(block: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="weight_block_size"):
        open_source(folder(tmp_path, fp8_tensors()[0], {**FP8, "weight_block_size": block}))


# ---------------------------------------------------------------- MXFP4 experts of gpt-oss

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
EXPERTS = "model.layers.0.mlp.experts"


def mxfp4_tensors() -> tuple[dict[str, Tensor], Tensor]:
    """Blocks and scales, and what transformers' own code decoded them to."""
    vectors = load_file(VECTORS)
    stored = {f"{EXPERTS}.{n}": vectors[f"gpt_oss/{n}"] for n in ("gate_up_proj_blocks", "gate_up_proj_scales")}
    stored[f"{EXPERTS}.gate_up_proj_bias"] = torch.zeros(2, 8, dtype=torch.bfloat16)
    return stored, vectors["gpt_oss/dequant_bf16_transformers"]


def test_mxfp4_experts_are_what_transformers_decodes(tmp_path: Path) -> None:
    stored, value = mxfp4_tensors()
    source = open_source(folder(tmp_path, stored, MXFP4))
    assert source.tensors.keys() == {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.gate_up_proj_bias"}
    check_accounts_for_everything(source, stored)
    assert same(source.tensors[f"{EXPERTS}.gate_up_proj"].read(), value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"gate_up_proj_scales": None}, "gate_up_proj_blocks'.* has no matching"),
        ({"gate_up_proj_blocks": None}, "gate_up_proj_scales' is a scale without blocks"),
        ({"gate_up_proj_scales": torch.ones(2, 8, 2, dtype=torch.uint8)}, "has no matching"),
        ({"gate_up_proj_blocks": torch.ones(2, 8, 3, 8, dtype=torch.uint8)}, "has no matching"),
        ({"gate_up_proj_blocks": torch.ones(8, 3, 16, dtype=torch.uint8)}, "has no matching"),
        ({"gate_up_proj_scales": torch.ones(2, 8, 3)}, "are not MXFP4"),
        ({"gate_up_proj": torch.ones(2, 96, 8)}, "are not MXFP4"),
    ],
)
def test_mxfp4_experts_that_do_not_fit(change: dict[str, Tensor | None], match: str, tmp_path: Path) -> None:
    stored = {**mxfp4_tensors()[0], **{f"{EXPERTS}.{name}": tensor for name, tensor in change.items()}}
    with pytest.raises(CheckpointError, match=match):
        open_source(folder(tmp_path, {n: t for n, t in stored.items() if t is not None}, MXFP4))

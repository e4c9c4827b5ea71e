"""A model to quantize, seen as 16-bit tensors, whatever its weights are stored in.

Plain bf16, fp16 and fp32 tensors are themselves. FP8-block weights (DeepSeek, Qwen3: `weight` float8 with
`weight_scale_inv` per 128x128 tile) and MXFP4 experts (gpt-oss: `_blocks`, `_scales`) appear as the bf16 tensors
that they stand for, AWQ's and GPTQ's integers (`int4_source`) in the dtype of their scales. Each stored tensor belongs
to exactly one tensor of the view.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.checkpoint.folder import Folder, open_folder
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.int4_source import IntegerWeight, awq_weights, gptq_weights
from blockscale.checkpoint.tensors import read_tensor, torch_dtype
from blockscale.errors import CheckpointError
from blockscale.formats import fp8, mx
from blockscale.formats.packing import unpack_nibbles
from blockscale.formats.spec import E2M1, FP8_BLOCK128


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the 16-bit view. `stored`: what it is made of; one plain entry can be copied byte for byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: tuple[TensorInfo, ...]
    decode: Callable[..., Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        return self.decode is None

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def read(self) -> Tensor:
        parts = [read_tensor(info) for info in self.stored]
        return parts[0] if self.decode is None else self.decode(*parts)


@dataclass(frozen=True)
class Source:
    """`config` is the model's config without the source's own quantization."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    companions: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensors.values())


def open_source(path: Path) -> Source:
    """Reads headers only. CheckpointError for a source that is already quantized in a way this cannot undo."""
    return view_as_16bit(open_folder(path))


def view_as_16bit(folder: Folder) -> Source:
    """The 16-bit view of a folder whose weights are plain, FP8-block, MXFP4, or AWQ's or GPTQ's integers."""
    method = folder.method
    views: dict[str | None, Callable[[Folder], dict[str, SourceTensor]]] = {
        None: _plain,
        "fp8": _fp8_block,
        "mxfp4": _mxfp4,
        "awq": lambda folder: _integers(folder, awq_weights(folder)),
        "gptq": lambda folder: _integers(folder, gptq_weights(folder)),
    }
    if method not in views:
        raise CheckpointError(
            f"{folder.path} is already quantized ({method})",
            hint="quantize from the 16-bit model that it was made from",
        )
    tensors = views[method](folder)
    _check_plain(folder, [tensor.stored[0] for tensor in tensors.values() if tensor.is_plain])
    used = [info.name for t in tensors.values() for info in t.stored]
    assert sorted(used) == sorted(folder.tensors), "a stored tensor is missing from the view"
    config = {k: v for k, v in folder.config.items() if k != "quantization_config"}
    return Source(folder.path, config, tensors, folder.companions)


def as_itself(info: TensorInfo) -> SourceTensor:
    return SourceTensor(info.name, torch_dtype(info), info.shape, (info,))


_FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
_PACKED_NAMES = (".weight", "_packed", "_blocks")


def _check_plain(folder: Folder, infos: Sequence[TensorInfo]) -> None:
    """CheckpointError for codes among what should be numbers."""
    for info in infos:
        is_packed = info.dtype == "U8" and info.name.endswith(_PACKED_NAMES)
        is_integer = info.dtype == "I32" and info.name.endswith(".qweight")
        if info.dtype in _FLOAT8 or is_packed or is_integer:
            said = "no quantization" if folder.method is None else f"the quantization {folder.method}, which has none"
            raise CheckpointError(
                f"{folder.path}: '{info.name}' is {info.dtype}, but config.json names {said}",
                hint="without its scales' meaning it cannot be read; restore quantization_config in config.json",
            )


def _plain(folder: Folder) -> dict[str, SourceTensor]:
    return {name: as_itself(info) for name, info in folder.tensors.items()}


def _decode_fp8_block(weight: Tensor, scale: Tensor) -> Tensor:
    """[N, K] float8 and fp32 tiles -> bf16, a row of tiles at a time."""
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    for tile_row, (rows, into) in enumerate(zip(weight.split(128), result.split(128), strict=True)):
        into.copy_(fp8.decode_values(rows, scale[tile_row : tile_row + 1], FP8_BLOCK128))
    return result


def _fp8_block(folder: Folder) -> dict[str, SourceTensor]:
    block = folder.config["quantization_config"].get("weight_block_size")
    if block != [128, 128]:
        raise CheckpointError(f"{folder.path}: FP8 weights with weight_block_size {block}; only [128, 128] is read")
    tensors = {}
    for name, info in folder.tensors.items():
        if name.endswith("_scale_inv"):
            weight = folder.tensors.get(name.removesuffix("_scale_inv"))
            if weight is None or weight.dtype not in _FLOAT8:
                raise CheckpointError(f"{folder.path}: '{name}' is a scale without an FP8 weight")
        elif info.dtype in _FLOAT8:
            scale = folder.tensors.get(f"{name}_scale_inv")
            if scale is None or len(info.shape) != 2:
                raise CheckpointError(f"{folder.path}: FP8 weight '{name}' {list(info.shape)} has no {name}_scale_inv")
            tiles = tuple(-(-n // 128) for n in info.shape)
            if scale.shape != tiles:
                raise CheckpointError(f"{folder.path}: '{scale.name}' is {list(scale.shape)}, expected {list(tiles)}")
            tensors[name] = SourceTensor(name, torch.bfloat16, info.shape, (info, scale), _decode_fp8_block)
        else:
            tensors[name] = as_itself(info)
    return tensors


def _decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[E, R, K/32, 16] blocks and [E, R, K/32] E8M0 -> bf16 [E, K, R], the layout of the model's parameter."""
    experts, rows, num_blocks, _ = blocks.shape
    result = torch.empty(experts, num_blocks * 32, rows, dtype=torch.bfloat16)
    for expert in range(experts):  # one at a time: the values pass through fp32
        values = mx.decode_codes(unpack_nibbles(blocks[expert]).flatten(-2), scales[expert], E2M1)
        result[expert].copy_(values.t())
    return result


def _mxfp4(folder: Folder) -> dict[str, SourceTensor]:
    tensors = {}
    for name, info in folder.tensors.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            scales = folder.tensors.get(f"{stem}_scales")
            if scales is None or scales.shape != info.shape[:-1] or len(info.shape) != 4 or info.shape[-1] != 16:
                raise CheckpointError(f"{folder.path}: '{name}' {list(info.shape)} has no matching {stem}_scales")
            if (info.dtype, scales.dtype) != ("U8", "U8") or stem in folder.tensors:
                raise CheckpointError(f"{folder.path}: '{name}' and '{scales.name}' are not MXFP4 as uint8 pairs")
            experts, rows, num_blocks, half = info.shape
            shape = (experts, num_blocks * half * 2, rows)
            tensors[stem] = SourceTensor(stem, torch.bfloat16, shape, (info, scales), _decode_mxfp4)
        elif name.endswith("_scales"):
            if f"{name.removesuffix('_scales')}_blocks" not in folder.tensors:
                raise CheckpointError(f"{folder.path}: '{name}' is a scale without blocks")
        else:
            tensors[name] = as_itself(info)
    return tensors


def _integers(folder: Folder, weights: Sequence[IntegerWeight]) -> dict[str, SourceTensor]:
    by_codes = {weight.stored[0].name: weight for weight in weights}
    parts = {info.name for weight in weights for info in weight.stored}
    tensors = {}
    for name, info in folder.tensors.items():
        if name in by_codes:
            weight = by_codes[name]
            tensors[weight.name] = SourceTensor(weight.name, weight.dtype, weight.shape, weight.stored, weight.decode)
        elif name not in parts:
            tensors[name] = as_itself(info)
    return tensors

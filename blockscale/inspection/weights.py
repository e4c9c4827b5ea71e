"""Every linear weight of a checkpoint as it is stored, whoever stored it.

The dialects, FP8 in blocks (DeepSeek), MXFP4 (gpt-oss), integers (AWQ, GPTQ) and 16 bits; from headers and configs
alone.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.folder import Folder
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.structure import kept_reason, module_name
from blockscale.formats.spec import FP8_BLOCK128, MXFP4, Granularity
from blockscale.inspection.reading import Reading

# Plain tensors, by safetensors' names; others keep those.
_PLAIN = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
_CODES = ("U8", "I8", "I32", "U32", "F8_E4M3", "F8_E5M2", "F8_E8M0")
_WORD_BITS = 32
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class Weight:
    """One linear weight.

    name         its module; of a bare parameter, such as a stack of experts, the parameter
    format       of its elements and block scales
    activation   what its input is rounded to; None: it stays in 16 bits
    shape        [N, K], or [E, N, K] of a stack
    tensors      codes, every scale, and what lies beside them
    block_scale  one byte a block, where there are such
    rank         of a low-rank branch beside it; 0 without one
    num_residual_channels   0 without any
    """

    name: str
    format: str
    activation: str | None
    shape: tuple[int, ...]
    tensors: tuple[TensorInfo, ...]
    block_scale: TensorInfo | None = None
    rank: int = 0
    num_residual_channels: int = 0


def plain_format(info: TensorInfo) -> str:
    return _PLAIN.get(info.dtype, info.dtype.lower().replace("_", "-"))


def stored_weights(reading: Reading) -> tuple[list[Weight], dict[str, str]]:
    """The linear weights, and for every tensor that belongs to none of them why it stays as it is.

    A model of 16 bits is nothing but such weights and what would be kept if it were quantized. In a quantized one,
    16-bit weights count as kept.
    """
    folder = reading.folder
    if reading.model is not None:
        weights = [_from_dialect(linear) for linear in reading.model.linears.values()]
    else:
        weights = list(_SOURCES[folder.method](folder)) if folder.method in _SOURCES else []
    taken = {info.name for weight in weights for info in weight.tensors}
    reason_of = _reasons(folder.config)
    kept = {}
    for name, info in reading.kept.items():
        if name in taken:
            continue
        reason = reason_of(info)
        if reason is not None:
            kept[name] = reason
        elif folder.method is None and reading.model is None:
            weights.append(Weight(module_name(name), plain_format(info), None, info.shape, (info,)))
        else:
            kept[name] = "left as it was"
    return weights, kept


def _reasons(config: Mapping[str, Any]) -> Callable[[TensorInfo], str | None]:
    """`kept_reason`, asked once for all experts of a layer."""
    known: dict[tuple[str, tuple[int, ...]], str | None] = {}

    def reason_of(info: TensorInfo) -> str | None:
        if info.dtype in _CODES and len(info.shape) > 1:
            return "codes or scales of a format that is not known"
        key = (_EXPERT.sub(".experts.0.", info.name), info.shape)
        if key not in known:
            known[key] = kept_reason(key[0], info.shape, config)
        return known[key]

    return reason_of


def _from_dialect(linear: StoredLinear) -> Weight:
    weight, activation = linear.scheme.weight, linear.scheme.activation
    return Weight(
        linear.name,
        weight.name,
        None if activation is None else activation.name,
        linear.shape,
        tuple(linear.tensors.values()),
        linear.tensors.get("block_scale") if weight.granularity is Granularity.BLOCK else None,
        branches.rank(linear.tensors),
        branches.num_residual_channels(linear.tensors),
    )


# ---------------------------------------------------------------- what others store


def _fp8(folder: Folder) -> Iterator[Weight]:
    """`weight` float8 [N, K] with `weight_scale_inv` a tile, or one for all."""
    config = folder.config["quantization_config"]
    block = config.get("weight_block_size")
    activation = f"fp8, {config['activation_scheme']}" if isinstance(config.get("activation_scheme"), str) else None
    for name, info in folder.tensors.items():
        scale = folder.tensors.get(f"{name}_scale_inv")
        if scale is None or not name.endswith(".weight") or len(info.shape) < 2:
            continue
        if len(scale.shape) < 2:
            fmt = "fp8"
        else:
            fmt = FP8_BLOCK128.name if block == [128, 128] else f"fp8 in blocks of {block}"
        yield Weight(module_name(name), fmt, activation, info.shape, (info, scale))


def _mxfp4(folder: Folder) -> Iterator[Weight]:
    """`_blocks` uint8 [E, N, K/32, 16] with `_scales` E8M0 [E, N, K/32]."""
    for name, info in folder.tensors.items():
        stem = name.removesuffix("_blocks")
        scale = folder.tensors.get(f"{stem}_scales")
        if stem == name or scale is None or len(info.shape) < 3:
            continue
        *lead, num_blocks, half = info.shape
        yield Weight(stem, MXFP4.name, None, (*lead, num_blocks * half * 2), (info, scale), block_scale=scale)


def _awq(folder: Folder) -> Iterator[Weight]:
    """`qweight` int32 [K, N/8]."""
    for stem, info, parts in _integers(folder):
        k, words = info.shape
        n = parts[".scales"].shape[1]
        yield _integer_weight(stem, _WORD_BITS * words // n if n else 0, (n, k), parts)


def _gptq(folder: Folder) -> Iterator[Weight]:
    """`qweight` int32 [K / (32/bits), N], `g_idx` [K]."""
    config_bits = folder.config["quantization_config"].get("bits")
    for stem, info, parts in _integers(folder):
        rows, n = info.shape
        zeros = parts.get(".qzeros")
        bits = _WORD_BITS * zeros.shape[1] // n if zeros is not None and len(zeros.shape) == 2 and n else config_bits
        bits = bits if isinstance(bits, int) else 0
        yield _integer_weight(stem, bits, (n, rows * _WORD_BITS // bits if bits else rows), parts)


_INTEGER_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")


def _integers(folder: Folder) -> Iterator[tuple[str, TensorInfo, dict[str, TensorInfo]]]:
    for name, info in folder.tensors.items():
        stem = name.removesuffix(".qweight")
        if stem == name or len(info.shape) != 2:
            continue
        parts = {part: folder.tensors[stem + part] for part in _INTEGER_PARTS if stem + part in folder.tensors}
        if ".scales" in parts and len(parts[".scales"].shape) == 2:
            yield stem, info, parts


def _integer_weight(stem: str, bits: int, shape: tuple[int, int], parts: Mapping[str, TensorInfo]) -> Weight:
    num_groups = parts[".scales"].shape[0]
    group = f"-g{shape[1] // num_groups}" if num_groups else ""
    return Weight(stem, f"int{bits}{group}", None, shape, tuple(parts.values()))


_SOURCES = {"fp8": _fp8, "mxfp4": _mxfp4, "awq": _awq, "gptq": _gptq}

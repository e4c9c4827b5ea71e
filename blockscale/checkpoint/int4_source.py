"""Linears that AWQ and GPTQ stored as small integers, and the float weights that they stand for.

    W[n, k] = (code[k, n] - zero[g, n]) * scale[g, n],   g = group of k

Codes and zero points are unsigned fields of int32 words, K is stored first, a group is a run of K. Of one linear `X`:

    AWQ (gemm)   X.qweight [K, N/8]     X.qzeros [G, N/8]     X.scales [G, N]; a word holds N in the order _AWQ_ORDER
    GPTQ         X.qweight [K/pack, N]  X.qzeros [G, N/pack]  X.scales [G, N]  X.g_idx [K]: the group of each k
                 pack = 32/bits, the first in the lowest bits. `gptq` (v1) stores zero points less one, `gptq_v2` as
                 they are.

A weight has its scales' dtype. Both methods' own code multiplies in it, and an integer of 9 bits times a 16-bit scale
is exact in fp32, so the only rounding is the last: the same bits as theirs.
Source: AutoAWQ's WQLinear_GEMM, AutoGPTQ's and GPTQModel's QuantLinear.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from blockscale.checkpoint.folder import Folder
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.tensors import torch_dtype
from blockscale.errors import CheckpointError

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds, lowest nibble first
_WORD_BITS = 32
_GPTQ_BITS = (2, 4, 8)  # fields that do not cross words
_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
_SCALE_DTYPES = ("F16", "BF16", "F32")
# Models whose own weights are [K, N]: what is read here as [N, K] would not be theirs.
_INPUT_FIRST = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_SLICE_VALUES = 1 << 18  # what is unpacked at once; the few copies of it that are alive stay in the cache
_USE_SOURCE = "quantize from the 16-bit model that it was made from"
_INCOMPLETE = "download it again, or make it again from the 16-bit model"
Word = TypeVar("Word", int, Tensor)


@dataclass(frozen=True)
class IntegerWeight:
    """The weight of one linear, [N, K] of `dtype`, and how to compute it from what is stored.

    stored        qweight, qzeros, scales and, where there is one, g_idx
    shifts        where in a word its fields lie, in their order along N or K
    packs_inputs  whether a word of qweight holds neighbours along K (GPTQ) or along N (AWQ)
    zero_offset   what the format adds to a stored zero point
    is_symmetric  the config promises that every zero point is half the range
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, int]
    stored: tuple[TensorInfo, ...]
    bits: int
    group_size: int
    shifts: tuple[int, ...] = field(repr=False)
    packs_inputs: bool
    zero_offset: int
    is_symmetric: bool

    def decode(self, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None) -> Tensor:
        """The stored parts -> [N, K], some rows at a time. CheckpointError for scales that are not finite and groups
        that do not exist."""
        if not torch.isfinite(scales).all():
            raise CheckpointError(f"{self._where(2)} holds NaN or Inf", hint=_INCOMPLETE)
        outputs, inputs = self.shape
        groups = self._groups(g_idx, scales.shape[0])
        words = self._offset_words(qzeros)
        result = torch.empty(self.shape, dtype=self.dtype)
        pack = len(self.shifts)
        step = max(1, _SLICE_VALUES // (inputs * pack)) * pack  # whole words of zero points
        for first in range(0, outputs, step):
            rows = slice(first, first + step)
            row_words = slice(first // pack, (first + step) // pack)
            zeros = self._unpack(words[:, row_words], dim=1)  # [G, n]
            if self.packs_inputs:
                codes = self._unpack(qweight[:, rows], dim=0)  # [K, n]
            else:
                codes = self._unpack(qweight[:, row_words], dim=1)
            values = (codes - zeros[groups]).float().mul_(scales[:, rows].float()[groups])
            result[rows] = values.t()
        return result

    def _unpack(self, words: Tensor, dim: int) -> Tensor:
        """int32 [A, B] -> int32 [A * pack, B] (dim 0) or [A, B * pack] (dim 1)."""
        shifts = torch.tensor(self.shifts, dtype=torch.int32).view((-1, 1) if dim == 0 else (-1,))
        fields = (words.unsqueeze(dim + 1) >> shifts) & ((1 << self.bits) - 1)  # the mask drops copies of the sign
        return fields.flatten(dim, dim + 1)

    def _groups(self, g_idx: Tensor | None, num_groups: int) -> Tensor:
        """int64 [K]. Writers without activation order may leave all of g_idx at 0: such groups follow one another."""
        if g_idx is None or not g_idx.any():
            return torch.arange(self.shape[1]) // self.group_size
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= num_groups:
            found = f"{int(g_idx.min())} to {int(g_idx.max())}"
            raise CheckpointError(f"{self._where(3)} names groups {found}, there are {num_groups}", hint=_INCOMPLETE)
        return g_idx.long()

    def _offset_words(self, qzeros: Tensor) -> Tensor:
        """int32 words of true zero points.

        v1 writers subtract 1 from every field by one subtraction a word, so that a zero point of 0 borrows from its
        neighbour: adding a word of ones gives all of them back. Some symmetric files have the zero points of the other
        version than their config says; engines do not read them there, and half the range is what they mean.
        """
        ones = sum(1 << shift for shift in self.shifts)
        offset = self.zero_offset
        if self.is_symmetric:
            half = 1 << (self.bits - 1)
            fits = [o for o in (0, 1) if (qzeros == _as_int32((half - o) * ones)).all()]
            offset = fits[0] if fits else offset
        return _as_int32(qzeros.long() + offset * ones).int()

    def _where(self, part: int) -> str:
        return f"{self.stored[part].path}: '{self.stored[part].name}'"


def awq_weights(folder: Folder) -> list[IntegerWeight]:
    """Every linear of an AWQ folder, from headers and config. CheckpointError for other layouts than `gemm`, and for
    parts that are missing or do not fit."""
    config = _quantization(folder)
    layouts = {str(config[key]).lower() for key in ("version", "format", "checkpoint_format") if config.get(key)}
    if layouts - {"gemm"}:
        raise _unreadable(folder, f"AWQ in the layout {_listed(layouts - {'gemm'})}; only gemm is read")
    bits = _integer(folder, config, "bits", "w_bit")
    if bits != 4:
        raise _unreadable(folder, f"AWQ of {bits} bits; only 4 are read")
    group_size = _integer(folder, config, "group_size", "q_group_size")
    shifts = tuple(bits * _AWQ_ORDER.index(column) for column in range(8))
    weights = []
    for stem, parts in _linears(folder):
        qweight, qzeros, scales = _parts(folder, stem, parts)
        _check_matrices(folder, qweight, scales)
        inputs, outputs = qweight.shape[0], scales.shape[1]
        if ".g_idx" in parts:
            raise CheckpointError(f"{folder.path}: '{stem}.g_idx' has no place in AWQ", hint=_USE_SOURCE)
        size = _group_size(folder, stem, group_size, inputs)
        _check(folder, qweight, ("I32",), (inputs, outputs // 8))
        _check(folder, qzeros, ("I32",), (inputs // size, outputs // 8))
        _check(folder, scales, _SCALE_DTYPES, (inputs // size, outputs // 8 * 8))
        weights.append(
            IntegerWeight(
                f"{stem}.weight",
                torch_dtype(scales),
                (outputs, inputs),
                (qweight, qzeros, scales),
                bits,
                size,
                shifts,
                packs_inputs=False,
                zero_offset=0,
                is_symmetric=False,
            )
        )
    return weights


def gptq_weights(folder: Folder) -> list[IntegerWeight]:
    """Every linear of a GPTQ folder, from headers and config. CheckpointError for layouts other than `gptq` and
    `gptq_v2`, fields that cross words, and parts that are missing or do not fit."""
    config = _quantization(folder)
    layouts = {str(config[key]).lower() for key in ("checkpoint_format", "format") if config.get(key)} or {"gptq"}
    layouts |= {"marlin"} if config.get("is_marlin_format") else set()
    if len(layouts) > 1 or layouts - {"gptq", "gptq_v2"}:
        raise _unreadable(folder, f"GPTQ in the layout {_listed(layouts)}; only gptq and gptq_v2 are read")
    if config.get("rotation"):
        raise _unreadable(folder, f"GPTQ of rotated weights ({config['rotation']}): the model has to rotate its inputs")
    config_bits = _integer(folder, config, "bits")
    if config_bits not in _GPTQ_BITS:
        raise _unreadable(folder, f"GPTQ of {config_bits} bits; {_listed(map(str, _GPTQ_BITS))} are read")
    config_group_size = _integer(folder, config, "group_size")
    weights = []
    for stem, parts in _linears(folder):
        qweight, qzeros, scales = _parts(folder, stem, parts)
        _check_matrices(folder, qweight, qzeros, scales)
        groups, outputs = scales.shape
        bits = config_bits
        if config.get("dynamic"):  # overrides bits and groups by module: the shapes tell which
            bits = _WORD_BITS * qzeros.shape[1] // outputs
            if bits not in _GPTQ_BITS:
                raise _unreadable(folder, f"'{stem}' in GPTQ of {bits} bits; {_listed(map(str, _GPTQ_BITS))} are read")
        pack = _WORD_BITS // bits
        inputs = qweight.shape[0] * pack
        size = inputs // groups if config.get("dynamic") else config_group_size
        size = _group_size(folder, stem, size, inputs)
        _check(folder, qweight, ("I32",), (inputs // pack, outputs))
        _check(folder, qzeros, ("I32",), (inputs // size, outputs // pack))
        _check(folder, scales, _SCALE_DTYPES, (inputs // size, outputs // pack * pack))
        stored: tuple[TensorInfo, ...] = (qweight, qzeros, scales)
        if ".g_idx" in parts:
            _check(folder, parts[".g_idx"], ("I32", "I64"), (inputs,))
            stored = (*stored, parts[".g_idx"])
        elif config.get("desc_act") is not False:
            raise CheckpointError(
                f"{folder.path}: '{stem}' has no {stem}.g_idx, which desc_act needs", hint=_INCOMPLETE
            )
        weights.append(
            IntegerWeight(
                f"{stem}.weight",
                torch_dtype(scales),
                (outputs, inputs),
                stored,
                bits,
                size,
                tuple(range(0, _WORD_BITS, bits)),
                packs_inputs=True,
                zero_offset=0 if layouts == {"gptq_v2"} else 1,
                is_symmetric=config.get("sym") is True,
            )
        )
    return weights


def _quantization(folder: Folder) -> Mapping[str, Any]:
    sections = (folder.config, folder.config.get("text_config") or {})
    for model_type in (section.get("model_type") for section in sections):
        if model_type in _INPUT_FIRST:
            raise _unreadable(folder, f"integer weights of {model_type}, which stores its input dimension first")
    config: Mapping[str, Any] = folder.config["quantization_config"]
    return config


def _integer(folder: Folder, config: Mapping[str, Any], *keys: str) -> int:
    value = next((config[key] for key in keys if config.get(key) is not None), None)
    if type(value) is not int:
        raise CheckpointError(
            f"{folder.path}: quantization_config has {keys[0]} {value!r}, expected an integer",
            hint="restore quantization_config in config.json",
        )
    return value


def _linears(folder: Folder) -> Iterator[tuple[str, dict[str, TensorInfo]]]:
    """Every module with a part, in storage order, and its parts by suffix."""
    parts: dict[str, dict[str, TensorInfo]] = {}
    for name, info in folder.tensors.items():
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is not None:
            parts.setdefault(name.removesuffix(suffix), {})[suffix] = info
    yield from parts.items()


def _parts(folder: Folder, stem: str, parts: Mapping[str, TensorInfo]) -> tuple[TensorInfo, TensorInfo, TensorInfo]:
    """qweight, qzeros and scales."""
    if ".qweight" not in parts:
        first = next(iter(parts.values())).name
        raise CheckpointError(
            f"{folder.path}: '{first}' has no {stem}.qweight",
            hint=f"a file is missing, or it scales activations, which cannot be undone: {_USE_SOURCE}",
        )
    missing = [f"{stem}{suffix}" for suffix in _SUFFIXES[:3] if suffix not in parts]
    if missing:
        raise CheckpointError(f"{folder.path}: '{stem}.qweight' has no {missing[0]}", hint=_INCOMPLETE)
    if f"{stem}.weight" in folder.tensors:
        raise CheckpointError(f"{folder.path}: '{stem}' has both a qweight and a weight", hint="remove one of them")
    return parts[".qweight"], parts[".qzeros"], parts[".scales"]


def _check_matrices(folder: Folder, *infos: TensorInfo) -> None:
    for info in infos:
        if len(info.shape) != 2 or 0 in info.shape:
            raise CheckpointError(f"{folder.path}: '{info.name}' is {list(info.shape)}, no matrix", hint=_INCOMPLETE)


def _group_size(folder: Folder, stem: str, group_size: int, inputs: int) -> int:
    size = inputs if group_size == -1 else group_size
    if size <= 0 or inputs % size:
        raise CheckpointError(
            f"{folder.path}: '{stem}' has K = {inputs}, no multiple of the group size {group_size}", hint=_INCOMPLETE
        )
    return size


def _check(folder: Folder, info: TensorInfo, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if info.dtype not in dtypes or info.shape != shape:
        raise CheckpointError(
            f"{folder.path}: '{info.name}' is {info.dtype} {list(info.shape)}, expected {dtypes[0]} {list(shape)}",
            hint=f"bits or group_size in config.json belong to another file, or it is damaged: {_INCOMPLETE}",
        )


def _unreadable(folder: Folder, what: str) -> CheckpointError:
    return CheckpointError(f"{folder.path}: {what}", hint=_USE_SOURCE)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))


def _as_int32(word: Word) -> Word:
    """The low 32 bits as a signed number."""
    return (word + 2**31) % 2**32 - 2**31

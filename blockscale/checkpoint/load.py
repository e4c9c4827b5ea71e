"""A stored linear's tensors in memory, under this program's names and directions."""

from collections.abc import Mapping

import torch
from torch import Tensor

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.linear import KVScales, LowRank, QuantizedLinear, Residual
from blockscale.checkpoint.tensors import read_tensor
from blockscale.errors import CheckpointError
from blockscale.formats.spec import NVFP4, Granularity, ScaleType
from blockscale.formats.tensor import QuantizedTensor, decode


def load_linear(linear: StoredLinear, dtype: torch.dtype) -> QuantizedLinear:
    """Reads one linear. CheckpointError for scales that no engine could use (NaN, Inf, zero or negative), and for
    branches that hold NaN or name channels that are not there."""
    return assemble(linear, {role: read_tensor(info) for role, info in linear.tensors.items()}, dtype)


def assemble(linear: StoredLinear, data: Mapping[str, Tensor], dtype: torch.dtype) -> QuantizedLinear:
    """The same from tensors by role, as they are stored."""
    packed = data["packed"].transpose(-1, -2).contiguous() if linear.is_transposed else data["packed"]
    block_scale, global_scale, input_global_scale = _scales(linear, data)
    return QuantizedLinear(
        linear.scheme,
        QuantizedTensor(linear.scheme.weight, packed, block_scale, global_scale, linear.shape, dtype),
        input_global_scale,
        data.get("pre_quant_scale"),
        _low_rank(linear, data),
        _residual(linear, data, global_scale, dtype),
    )


def check_scales(linear: StoredLinear) -> None:
    """What `load_linear` checks, without reading the codes."""
    data = {role: read_tensor(info) for role, info in linear.tensors.items() if role != "packed"}
    _, global_scale, _ = _scales(linear, data)
    _low_rank(linear, data)
    _residual(linear, data, global_scale, torch.float32)


def plain_values(linear: QuantizedLinear) -> Tensor:
    """fp32: the weight that the linear stands for, branch and pre_quant_scale included. Residual channels are not in
    it: they correct inputs."""
    values = decode(linear.weight)
    if linear.low_rank is not None:
        values += linear.low_rank.up.float() @ linear.low_rank.down.float()
    return values if linear.pre_quant_scale is None else values.mul_(linear.pre_quant_scale.float())


def _low_rank(linear: StoredLinear, data: Mapping[str, Tensor]) -> LowRank | None:
    if branches.DOWN not in data:
        return None
    for role in branches.LOW_RANK_ROLES:
        is_bad = ~torch.isfinite(data[role])
        if is_bad.any():
            position = is_bad.nonzero()[0].tolist()
            raise _bad_branch(linear, role, f"{data[role][tuple(position)].item()} at {position}")
    return LowRank(data[branches.UP], data[branches.DOWN])


def _residual(
    linear: StoredLinear, data: Mapping[str, Tensor], global_scale: Tensor | None, dtype: torch.dtype
) -> Residual | None:
    if branches.CHANNELS not in data:
        return None
    channels, block_scale = data[branches.CHANNELS], data[branches.BLOCK_SCALE]
    n, k = linear.shape
    if ((channels < 0) | (channels >= k)).any() or len(channels.unique()) != len(channels):
        what = f"channels from {channels.min().item()} to {channels.max().item()}, {len(channels.unique())} of"
        raise _bad_branch(linear, branches.CHANNELS, f"{what} {len(channels)} different, where inputs have {k}")
    _check_block_scale(linear, block_scale, branches.BLOCK_SCALE)
    shape = (n, len(channels))
    weight = QuantizedTensor(NVFP4, data[branches.PACKED], block_scale, global_scale, shape, dtype)
    return Residual(channels, weight)


def _bad_branch(linear: StoredLinear, role: str, what: str) -> CheckpointError:
    return CheckpointError(f"{linear.tensors[role].name}: {what}", hint="the file is damaged: download it again")


def _scales(linear: StoredLinear, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of blocks, of the whole weight and of the input: checked, and in this program's directions."""
    fmt, block_scale = linear.scheme.weight, data["block_scale"]
    if linear.is_transposed:
        block_scale = block_scale.transpose(-1, -2).contiguous()
    if fmt.scale is ScaleType.E8M0:
        block_scale = block_scale.view(torch.uint8)
    elif fmt.granularity is Granularity.CHANNEL:
        block_scale = block_scale.reshape(-1, 1)  # bf16 or fp32, as stored
    elif fmt.granularity is Granularity.TENSOR:
        block_scale = block_scale.float().reshape(())
    _check_block_scale(linear, block_scale)
    activation = linear.scheme.activation
    is_divisor = linear.has_divisors and activation is not None and activation.has_global_scale
    return (
        block_scale,
        _multiplier(linear, "global_scale", data, is_divisor=linear.has_divisors),
        _multiplier(linear, "input_global_scale", data, is_divisor=is_divisor),
    )


def load_kv_scales(infos: tuple[TensorInfo, TensorInfo]) -> KVScales:
    """CheckpointError for a scale that no engine could use (NaN, Inf, zero or negative)."""
    key, value = (
        _checked_scale(info, stored, stored.float().reshape(())) for info in infos for stored in [read_tensor(info)]
    )
    return KVScales(key, value)


def _multiplier(linear: StoredLinear, role: str, data: Mapping[str, Tensor], *, is_divisor: bool) -> Tensor | None:
    """A second-level scale as a multiplier, from whichever direction is stored."""
    if role not in data:
        return None
    scale = data[role].float().reshape(())
    return _checked_scale(linear.tensors[role], data[role], scale.reciprocal() if is_divisor else scale)


def _checked_scale(info: TensorInfo, stored: Tensor, scale: Tensor) -> Tensor:
    if not (torch.isfinite(scale) and scale > 0):
        raise CheckpointError(
            f"{info.name}: {stored.item()} makes a scale of {scale.item()}, not a positive finite number",
            hint="the layer was exported without calibration or is damaged; quantize it again",
        )
    return scale


def _check_block_scale(linear: StoredLinear, scale: Tensor, role: str = "block_scale") -> None:
    values = scale.float()
    is_bad = scale == 255 if scale.dtype == torch.uint8 else ~torch.isfinite(values) | (values < 0)
    if is_bad.any():
        position = is_bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{linear.tensors[role].name}: NaN, infinite or negative scale at {position} ({int(is_bad.sum())} in all)",
            hint="engines answer NaN or '!!!!' to this; quantize the layer again",
        )

"""What may lie beside a quantized weight: a low-rank branch (SVDQuant), residual channels (ARC).

| role | dtype and shape of a weight [N, K] |
|---|---|
| low_rank_down | 16 bits [r, K] |
| low_rank_up | 16 bits [N, r] |
| residual_channels | int32 [S], S a multiple of 16 |
| residual_packed | uint8 [N, S/2], the codes of these channels once more |
| residual_block_scale | E4M3 [N, S/16], under the weight's own global scale |

Beside NVFP4 only, and never beside a stack of experts. Residual channels correct what NVFP4 inputs lost, so weights
whose inputs stay in 16 bits have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.linear import W4A4, QuantizedLinear, Scheme
from blockscale.errors import CheckpointError
from blockscale.formats.spec import NVFP4

if TYPE_CHECKING:
    from torch import Tensor

DOWN, UP = "low_rank_down", "low_rank_up"
CHANNELS, PACKED, BLOCK_SCALE = "residual_channels", "residual_packed", "residual_block_scale"
LOW_RANK_ROLES = (DOWN, UP)
RESIDUAL_ROLES = (CHANNELS, PACKED, BLOCK_SCALE)
RULE = "bad-branch"

Roles = Mapping[str, TensorInfo]
_FACTORS = ("BF16", "F16", "F32")
_AGAIN = "quantize the model again"


def has_low_rank(tensors: Roles) -> bool:
    return DOWN in tensors or UP in tensors


def has_residual(tensors: Roles) -> bool:
    return any(role in tensors for role in RESIDUAL_ROLES)


def rank(tensors: Roles) -> int:
    """Of the low-rank branch; 0 without one."""
    info = tensors.get(DOWN)
    return info.shape[0] if info is not None and info.shape else 0


def num_residual_channels(tensors: Roles) -> int:
    info = tensors.get(CHANNELS)
    return info.shape[0] if info is not None and info.shape else 0


def branch_faults(name: str, scheme: Scheme, shape: Sequence[int], tensors: Roles) -> Iterator[Fault]:
    """Parts that are missing, and those with another dtype or shape than beside a weight of this `shape`."""
    if len(shape) != 2:  # codes that are no matrix are another rule's
        return
    if has_low_rank(tensors):
        yield from _low_rank_faults(name, scheme, shape, tensors)
    if has_residual(tensors):
        yield from _residual_faults(name, scheme, shape, tensors)


def _low_rank_faults(name: str, scheme: Scheme, shape: Sequence[int], tensors: Roles) -> Iterator[Fault]:
    for role, other in ((DOWN, UP), (UP, DOWN)):
        if role not in tensors:
            what = f"{name}: of its low-rank branch {tensors[other].name} is there, and the other factor is missing"
            yield _fault(name, what)
            return
    if scheme.weight is not NVFP4:
        yield _fault(name, f"{name}: a low-rank branch beside {scheme.weight.name} is not read, only beside nvfp4")
    n, k = shape
    size = rank(tensors)
    for role, wanted in ((DOWN, (size, k)), (UP, (n, size))):
        info = tensors[role]
        if info.shape != wanted or not size or info.dtype not in _FACTORS:
            what = f"{info.name}: {info.dtype} {list(info.shape)} is no factor of a branch beside {list(shape)}"
            yield _fault(name, what)


def _residual_faults(name: str, scheme: Scheme, shape: Sequence[int], tensors: Roles) -> Iterator[Fault]:
    missing = [role for role in RESIDUAL_ROLES if role not in tensors]
    if missing:
        found = next(tensors[role].name for role in RESIDUAL_ROLES if role in tensors)
        parts = " and ".join(role.removeprefix("residual_").replace("_", " ") for role in missing)
        yield _fault(name, f"{name}: of its residual channels {found} is there, and the {parts} missing")
        return
    if scheme != W4A4:
        what = f"{name}: residual channels correct NVFP4 inputs of an NVFP4 weight, and this is {scheme.name}"
        yield _fault(name, what)
    (n, k), count = shape, num_residual_channels(tensors)
    if not 0 < count <= k or count % NVFP4.block_size:
        what = f"{tensors[CHANNELS].name}: {count} channels of {k} are no whole blocks of {NVFP4.block_size}"
        yield _fault(name, what)
        return
    wanted = {
        CHANNELS: ("I32", (count,)),
        PACKED: ("U8", (n, count // 2)),
        BLOCK_SCALE: ("F8_E4M3", (n, count // NVFP4.block_size)),
    }
    for role, (dtype, size) in wanted.items():
        info = tensors[role]
        if (info.dtype, info.shape) != (dtype, size):
            what = f"{info.name}: {info.dtype} {list(info.shape)}, where {count} channels have {dtype} {list(size)}"
            yield _fault(name, what)


def _fault(name: str, what: str) -> Fault:
    return Fault(RULE, name, what, _AGAIN)


# ---------------------------------------------------------------- writing


def branch_tensors(name: str, linear: QuantizedLinear) -> dict[str, Tensor]:
    """By role; works on meta tensors. CheckpointError for a branch beside a weight that can have none."""
    low_rank, residual, weight = linear.low_rank, linear.residual, linear.weight
    stored: dict[str, Tensor] = {}
    if low_rank is not None and low_rank.rank:
        if linear.scheme.weight is not NVFP4 or len(weight.shape) != 2:
            raise _no_place(name, linear, "a low-rank branch")
        stored |= {DOWN: low_rank.down, UP: low_rank.up}
    if residual is not None:
        if linear.scheme != W4A4 or len(weight.shape) != 2:
            raise _no_place(name, linear, "residual channels")
        shared, own = weight.global_scale, residual.weight.global_scale
        if shared is not None and own is not None and not shared.is_meta and shared.item() != own.item():
            raise CheckpointError(
                f"{name}: its residual channels have the global scale {own.item()}, the weight {shared.item()}",
                hint="both lie in one product and share one scale",
            )
        stored |= {CHANNELS: residual.channels, PACKED: residual.weight.packed}
        stored[BLOCK_SCALE] = residual.weight.block_scale
    return stored


def _no_place(name: str, linear: QuantizedLinear, what: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: there is no place for {what} beside {linear.scheme.name} {list(linear.weight.shape)}",
        hint="matrices in NVFP4 have one; residual channels also want NVFP4 inputs",
    )

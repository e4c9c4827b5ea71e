"""What a repair does to the stored tensors of linears: a fused group at a time, read, mended and written again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.output import Layout
from blockscale.checkpoint.tensors import read_tensor, torch_dtype
from blockscale.conversion.repair import fixes
from blockscale.conversion.repair.rescale import Rescaled, ScaledWeight, fill_range, share_global_scale
from blockscale.conversion.rewrite import Job, Made, copy_linear
from blockscale.formats.spec import Granularity

Stored = dict[str, Tensor]  # by role
_TRANSPOSED = ("packed", "block_scale")


@dataclass(frozen=True)
class Treatment:
    """Of one linear, in this order.

    is_swizzled, is_padded   block scales lie in the tensor core's order, or in rows of a padded weight
    has_swapped_nibbles      the odd element lies in the low nibble
    is_zero_as_nan           a weight of zeros, exported as NaN
    has_signed_blocks        block scales with a sign bit
    has_signed_global        a weight's scale below zero
    has_reversed_global      a weight's scale that is its own reciprocal
    fills_range              block scales may go up by a power of two
    input_scale              the input scale to be stored, under `input_name`; None: as it is
    has_wrong_shapes         scalars have another number of dimensions than the dialect's
    """

    is_swizzled: bool = False
    is_padded: bool = False
    has_swapped_nibbles: bool = False
    is_zero_as_nan: bool = False
    has_signed_blocks: bool = False
    has_signed_global: bool = False
    has_reversed_global: bool = False
    fills_range: bool = False
    input_scale: Tensor | None = None
    input_name: str = ""
    has_wrong_shapes: bool = False

    @property
    def moves_global(self) -> bool:
        """Whether the weight's global scale may become another than its siblings'."""
        return self.is_zero_as_nan or self.has_reversed_global or self.fills_range or self.has_signed_global


NONE = Treatment()
Treatments = Mapping[str, Treatment]


def scale_role(linear: StoredLinear) -> str | None:
    """The role of the one scale that a whole weight has: NVFP4's global scale, FP8's only one."""
    if linear.scheme.weight.has_global_scale:
        return "global_scale"
    return "block_scale" if linear.scheme.weight.granularity is Granularity.TENSOR else None


def treat_group(name: str, linears: Sequence[StoredLinear], treatments: Treatments, *, shares: bool) -> list[Job]:
    """Jobs for the linears of one fused group: copies of what stays as it is, and one that mends the rest.

    shares   NVFP4 weights of the group get one global scale
    """
    mended = [linear for linear in linears if shares or linear.name in treatments]
    jobs = [copy_linear(linear) for linear in linears if linear not in mended]
    if not mended:
        return jobs
    common = _common_dtypes(mended) if shares else {}
    layouts = {
        linear.name: _layout(linear, treatments.get(linear.name, NONE), common.get(linear.name)) for linear in mended
    }
    stored = tuple(info for linear in mended for info in linear.tensors.values())

    def make() -> Made:
        data = {linear.name: _mended(linear, treatments.get(linear.name, NONE)) for linear in mended}
        errors = _share(mended, data) if shares else {}
        tensors: dict[str, Tensor] = {}
        for linear in mended:
            names = _names(linear, treatments.get(linear.name, NONE))
            for role, tensor in _as_stored(linear, data.pop(linear.name)).items():
                dtype, shape = layouts[linear.name][names[role]]
                tensors[names[role]] = (tensor if tensor.dtype == dtype else tensor.to(dtype)).reshape(shape)
        return Made(tensors, errors)

    mending = Job(
        name,
        stored,
        layout={tensor: what for layout in layouts.values() for tensor, what in layout.items()},
        make=make,
        linears={linear.name: (linear.scheme, linear.shape) for linear in mended},
        held_bytes=3 * sum(info.num_bytes for info in stored),
    )
    return [*jobs, mending]


# ---------------------------------------------------------------- names, dtypes, shapes


def _names(linear: StoredLinear, treatment: Treatment) -> dict[str, str]:
    names = {role: info.name for role, info in linear.tensors.items()}
    return {**names, "input_global_scale": treatment.input_name} if treatment.input_name else names


def _layout(linear: StoredLinear, treatment: Treatment, global_dtype: torch.dtype | None) -> Layout:
    """What the linear's tensors will be."""
    layout = {role: (torch_dtype(info), info.shape) for role, info in linear.tensors.items()}
    if treatment.is_swizzled or treatment.is_padded:
        layout["block_scale"] = (layout["block_scale"][0], scale_shape(linear))
    if treatment.has_wrong_shapes:
        layout |= {role: (dtype, scalar_shape(linear)) for role, (dtype, _) in layout.items() if _is_one(linear, role)}
    if global_dtype is not None:
        layout["global_scale"] = (global_dtype, layout["global_scale"][1])
    if treatment.input_scale is not None:
        layout["input_global_scale"] = (treatment.input_scale.dtype, tuple(treatment.input_scale.shape))
    names = _names(linear, treatment)
    return {names[role]: what for role, what in layout.items()}


def scale_shape(linear: StoredLinear) -> tuple[int, ...]:
    """Of the block scales of a weight of this size, as they should be stored."""
    *lead, n, k = linear.shape
    blocks = k // linear.scheme.weight.block_size
    return (*lead, blocks, n) if linear.is_transposed else (*lead, n, blocks)


def scalar_shape(linear: StoredLinear) -> tuple[int, ...]:
    """How the dialect stores a single scale."""
    return (1,) if linear.has_divisors else ()


def _is_one(linear: StoredLinear, role: str) -> bool:
    return role in ("global_scale", "input_global_scale") or (role == "block_scale" and scale_role(linear) == role)


def _common_dtypes(linears: Sequence[StoredLinear]) -> Mapping[str, torch.dtype]:
    """Linear -> dtype that holds the global scale of any member of its kind."""
    dtypes: dict[str, torch.dtype] = {}
    for alike in _alike(linears):
        members = [torch_dtype(linear.tensors["global_scale"]) for linear in alike]
        dtypes |= dict.fromkeys((linear.name for linear in alike), reduce(torch.promote_types, members))
    return dtypes


def _alike(linears: Sequence[StoredLinear]) -> list[list[StoredLinear]]:
    """Those with a global scale, by format."""
    by_format: dict[str, list[StoredLinear]] = {}
    for linear in linears:
        if linear.scheme.weight.has_global_scale:
            by_format.setdefault(linear.scheme.weight.name, []).append(linear)
    return list(by_format.values())


# ---------------------------------------------------------------- values


def _mended(linear: StoredLinear, treatment: Treatment) -> Stored:
    """The linear's tensors after its own treatment, stacks as [E, N, K]."""
    data = {role: read_tensor(info) for role, info in linear.tensors.items()}
    if linear.is_transposed:
        data |= {role: data[role].transpose(-1, -2).contiguous() for role in _TRANSPOSED}
    n, k = linear.shape[-2:]
    if treatment.is_swizzled or treatment.is_padded:
        put_right = fixes.unswizzle_scales if treatment.is_swizzled else fixes.crop_scales
        data["block_scale"] = put_right(data["block_scale"], n, k // linear.scheme.weight.block_size)
    if treatment.has_swapped_nibbles:
        data["packed"] = fixes.swap_nibbles(data["packed"])
    if treatment.is_zero_as_nan:
        roles = ("packed", "block_scale", "global_scale")
        data |= zip(roles, fixes.zero_weight(*(data[role] for role in roles)), strict=True)
    if treatment.has_signed_blocks:
        data["packed"], data["block_scale"] = fixes.unsign_block_scales(data["packed"], data["block_scale"])
    only = scale_role(linear)
    if only is not None and treatment.has_signed_global:
        data["packed"], data[only] = fixes.unsign_global_scale(data["packed"], data[only])
    if only is not None and treatment.has_reversed_global:
        data[only] = fixes.reverse(data[only])
    if treatment.fills_range:
        filled = fill_range(_scaled(linear, data))
        data |= {"block_scale": filled.block_scale, "global_scale": filled.global_scale}
    if treatment.input_scale is not None:
        data["input_global_scale"] = treatment.input_scale
    return data


def _share(linears: Sequence[StoredLinear], data: Mapping[str, Stored]) -> dict[str, float]:
    """Gives the members one global scale; returns the relative error of those that it changed."""
    errors = {}
    for alike in _alike(linears):
        results: list[Rescaled] = share_global_scale([_scaled(linear, data[linear.name]) for linear in alike])
        for linear, result in zip(alike, results, strict=True):
            weight = result.weight
            data[linear.name].update(
                packed=weight.packed, block_scale=weight.block_scale, global_scale=weight.global_scale
            )
            if result.relative_error:
                errors[linear.name] = result.relative_error
    return errors


def _scaled(linear: StoredLinear, data: Stored) -> ScaledWeight:
    return ScaledWeight(data["packed"], data["block_scale"], data["global_scale"], linear.has_divisors)


def _as_stored(linear: StoredLinear, data: Stored) -> Stored:
    if not linear.is_transposed:
        return data
    return {r: t.transpose(-1, -2).contiguous() if r in _TRANSPOSED else t for r, t in data.items()}


def with_input_scale(treatment: Treatment, scale: Tensor, linear: StoredLinear, name: str) -> Treatment:
    """`name`: of the tensor, which the linear may not have yet."""
    return replace(treatment, input_scale=scale.reshape(scalar_shape(linear)).clone(), input_name=name)

"""What a dialect finds in a folder: which stored tensor plays which role of which linear, and what does not fit."""

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from blockscale.checkpoint.dialects.branches import branch_faults
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.linear import MXFP4_W4A16, W4A4, W4A8, W4A16, W8A8, W8A8_DYNAMIC, Scheme
from blockscale.formats.spec import FP8, FP8_CHANNEL, MXFP4, NVFP4, NVFP4_BLOCK32, Format, Granularity, ScaleType

FLOAT8 = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F32", "BF16", "F16", "F64", *FLOAT8)
_INCOMPLETE = "the checkpoint is incomplete; engines would read uninitialised memory here"
_OTHER_FORMAT = "the config names another format than the tensors have"


@dataclass(frozen=True)
class StoredLinear:
    """Roles are packed, block_scale, global_scale, input_global_scale, pre_quant_scale, and those of `branches`.

    has_divisors    scales of NVFP4's second level are stored as 1 / multiplier (compressed-tensors)
    is_transposed   a stack of experts stored [E, K, N] (Model Optimizer, Llama 4 and gpt-oss)
    """

    name: str
    scheme: Scheme
    tensors: Mapping[str, TensorInfo]
    has_divisors: bool = False
    is_transposed: bool = False

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the weight it stands for: [N, K] or [E, N, K]; fewer dimensions for codes that are no matrix."""
        *lead, last = self.tensors["packed"].shape or (1,)
        per_byte = 2 if self.scheme.weight.element.bits == 4 else 1
        if self.is_transposed and lead:
            return (*lead[:-1], last, lead[-1] * per_byte)
        return (*lead, last * per_byte)

    @property
    def num_bytes(self) -> int:
        """Of codes, every scale and what lies beside them."""
        return sum(info.num_bytes for info in self.tensors.values())


@dataclass(frozen=True)
class Claim:
    """What one config file says.

    algorithm   as it is written there
    excluded    modules or patterns left in 16 bits, as they are written there
    layers      of a mixed checkpoint: module -> algorithm as it is written; None where one algorithm holds for all
    """

    file: str
    algorithm: str | None
    excluded: tuple[str, ...]
    kv_format: str | None
    layers: Mapping[str, str] | None = None


@dataclass(frozen=True)
class StoredModel:
    """The quantized side of a folder. Every tensor not named here is kept as it is.

    faults   what config and tensors contradict each other in; where a linear is not what the config says, `linears`
             goes by its tensors
    """

    dialect: str
    linears: Mapping[str, StoredLinear]
    kv_tensors: Mapping[str, tuple[TensorInfo, TensorInfo]] = field(default_factory=dict)
    kv_format: str | None = None  # "fp8" or "nvfp4"
    claims: tuple[Claim, ...] = ()
    faults: tuple[Fault, ...] = ()


def settle(
    linear: StoredLinear, claimed: Scheme | None, sound: set[Hashable]
) -> tuple[StoredLinear | None, list[Fault]]:
    """The linear under the scheme that its tensors fit - the claimed one if it can be - and its faults.

    `linear.scheme` is not looked at. None for a scale without codes, and for tensors that are no known format.

    sound   dtypes and shapes that were found to fit, which the caller keeps from linear to linear: experts are alike
    """
    alike = (claimed, linear.is_transposed, *((r, i.dtype, i.shape) for r, i in linear.tensors.items()))
    if claimed is not None and alike in sound:
        return _with_scheme(linear, claimed), []
    if "packed" not in linear.tensors:
        scale = linear.tensors["block_scale"]
        what = f"{linear.name}: {scale.name} is there, but its codes are missing"
        return None, [Fault("loose-scale", linear.name, what, _INCOMPLETE)]
    under_claim = None if claimed is None else _with_scheme(linear, claimed)
    faults = [] if under_claim is None else list(role_faults(under_claim))
    if not faults:
        sound.add(alike)
    if under_claim is not None and not any(fault.rule == "format-mismatch" for fault in faults):
        return under_claim, faults
    fitting = guess_scheme(linear)
    return (under_claim if fitting is None else _with_scheme(linear, fitting)), faults


def _with_scheme(linear: StoredLinear, scheme: Scheme) -> StoredLinear:
    return StoredLinear(linear.name, scheme, linear.tensors, linear.has_divisors, linear.is_transposed)


def guess_scheme(linear: StoredLinear) -> Scheme | None:
    """What the dtypes and shapes of the tensors mean by themselves; None for nothing that is known."""
    packed, scale = linear.tensors["packed"], linear.tensors.get("block_scale")
    if scale is None or len(packed.shape) < 2:
        return None
    has_input = "input_global_scale" in linear.tensors
    candidates = {
        ("U8", "F8_E4M3"): ((NVFP4, W4A4 if has_input else W4A16), (NVFP4_BLOCK32, W4A8)),
        ("U8", "U8"): ((MXFP4, MXFP4_W4A16),),
        ("U8", "F8_E8M0"): ((MXFP4, MXFP4_W4A16),),
    }.get((packed.dtype, scale.dtype), ())
    if packed.dtype == "F8_E4M3" and scale.dtype in _FLOATS:
        candidates = ((FP8, W8A8 if has_input else Scheme(FP8)), (FP8_CHANNEL, W8A8_DYNAMIC))
    for fmt, scheme in candidates:
        trial = _with_scheme(linear, scheme)
        if not any(fault.rule == "format-mismatch" for fault in _weight_faults(trial, fmt)):
            return scheme
    return None


def role_faults(linear: StoredLinear) -> Iterator[Fault]:
    """Tensors that the scheme needs and are not there, and those with another dtype or shape than it means."""
    fmt = linear.scheme.weight
    required = ["block_scale"]
    required += ["global_scale"] if fmt.has_global_scale else []
    required += ["input_global_scale"] if linear.scheme.needs_input_scale else []
    for role in required:
        if role not in linear.tensors:
            rule = {"input_global_scale": "missing-input-scale"}.get(role, f"missing-{role.replace('_', '-')}")
            what = f"{linear.name}: quantized as {linear.scheme.name}, but its {_own_name(linear, role)} is missing"
            yield Fault(rule, linear.name, what, _INCOMPLETE)
    if "block_scale" in linear.tensors:
        yield from _weight_faults(linear, fmt)
    for role in ("global_scale", "input_global_scale"):
        yield from _size_faults(linear, role, 1)
    yield from _size_faults(linear, "pre_quant_scale", linear.shape[-1])
    yield from branch_faults(linear.name, linear.scheme, linear.shape, linear.tensors)


def _own_name(linear: StoredLinear, role: str) -> str:
    """The last part of the name that a tensor has in the linear's dialect."""
    if not linear.has_divisors:
        return {"block_scale": "weight_scale", "global_scale": "weight_scale_2"}.get(role, "input_scale")
    of_input = "input_global_scale" if linear.scheme.activation is NVFP4 else "input_scale"
    return {"block_scale": "weight_scale", "global_scale": "weight_global_scale"}.get(role, of_input)


def _weight_faults(linear: StoredLinear, fmt: Format) -> Iterator[Fault]:
    """Codes and block scales of another dtype or shape than the format's."""

    def mismatch(message: str) -> Fault:
        return Fault("format-mismatch", linear.name, message, _OTHER_FORMAT)

    packed, scale = linear.tensors["packed"], linear.tensors["block_scale"]
    if len(packed.shape) != (3 if linear.is_transposed else 2):
        yield mismatch(f"{packed.name}: {list(packed.shape)} is no weight matrix")
        return
    want_packed = "U8" if fmt.element.bits < 8 else "F8_E4M3"
    if packed.dtype != want_packed:
        yield mismatch(f"{packed.name}: {fmt.name} is stored as {want_packed}, found {packed.dtype}")
        return
    want_scale = {ScaleType.E4M3: ("F8_E4M3",), ScaleType.E8M0: ("U8", "F8_E8M0")}.get(
        fmt.scale, ("F32", "BF16", "F16")
    )
    if scale.dtype not in want_scale:
        yield mismatch(f"{scale.name}: {fmt.name} has scales of {want_scale[0]}, found {scale.dtype}")
        return
    if fmt.granularity is Granularity.BLOCK:
        *lead, k = linear.shape
        want = (*lead, k // fmt.block_size)
        if linear.is_transposed:
            want = (*want[:-2], want[-1], want[-2])
        if scale.shape != want or k % fmt.block_size:
            yield mismatch(
                f"{scale.name}: {list(scale.shape)} does not match the weight {list(linear.shape)} in "
                f"blocks of {fmt.block_size} (expected {list(want)})"
            )
    elif fmt.granularity is Granularity.TENSOR:
        yield from _size_faults(linear, "block_scale", 1)
    elif fmt.granularity is Granularity.CHANNEL:
        yield from _size_faults(linear, "block_scale", linear.shape[-2])


def _size_faults(linear: StoredLinear, role: str, size: int) -> Iterator[Fault]:
    info = linear.tensors.get(role)
    if info is not None and linear.is_transposed and size == 1 and len(info.shape) == 1 and info.shape[0] > 1:
        what = f"{info.name}: {list(info.shape)}, but one scale a stack of experts is read"
        hint = "store one for all experts, the largest, and divide their block scales accordingly"
        yield Fault("format-mismatch", linear.name, what, hint)
    elif info is not None and (math.prod(info.shape) != size or info.dtype not in _FLOATS):
        what = f"{info.name}: {info.dtype} {list(info.shape)}, but {linear.scheme.name} has {size} scales here"
        yield Fault("format-mismatch", linear.name, what, _OTHER_FORMAT)


def loose_faults(
    linears: Mapping[str, StoredLinear], tensors: Mapping[str, TensorInfo], endings: tuple[str, ...]
) -> Iterator[Fault]:
    """Codes without scales, and scales (by the `endings` of their names) without codes."""
    taken = {info.name for linear in linears.values() for info in linear.tensors.values()}
    loose = [info for name, info in tensors.items() if name not in taken]
    for info in loose:
        if info.dtype in FLOAT8 or (info.dtype == "U8" and len(info.shape) > 1):
            if info.name.endswith(("weight_scale", "residual_weight")):
                continue  # of a linear that settled on no format
            module = info.name.removesuffix(".weight").removesuffix(".weight_packed")
            yield Fault("missing-block-scale", module, f"{info.name} has no weight_scale", _INCOMPLETE)
    for info in loose:
        if info.name.endswith(endings):
            module = info.name.rpartition(".")[0]
            yield Fault("loose-scale", module, f"{info.name} belongs to no quantized weight", _INCOMPLETE)


def pair_kv_scales(
    tensors: Mapping[str, TensorInfo], key_ending: str, value_ending: str
) -> tuple[dict[str, tuple[TensorInfo, TensorInfo]], list[Fault]]:
    """Key and value scale by attention module, and the faults: one without the other, or one that is no scalar."""
    keys, values = (
        {name.removesuffix(ending): info for name, info in tensors.items() if name.endswith(ending)}
        for ending in (key_ending, value_ending)
    )
    faults = []
    for attention in dict.fromkeys([*keys, *values]):
        if attention not in keys or attention not in values:
            has, lacks = ("key", "value") if attention in keys else ("value", "key")
            what = f"{attention}: a {has} scale without a {lacks} scale"
            faults.append(Fault("one-sided-kv-scale", attention, what, "engines take 1.0 for the one that is missing"))
            continue
        for info in (keys[attention], values[attention]):
            if math.prod(info.shape) != 1 or info.dtype not in _FLOATS:
                what = f"{info.name}: {info.dtype} {list(info.shape)}; only one scale a cache is read"
                faults.append(Fault("kv-config-mismatch", attention, what))
    wrong = {fault.where for fault in faults}
    return {a: (keys[a], values[a]) for a in keys if a in values and a not in wrong}, faults

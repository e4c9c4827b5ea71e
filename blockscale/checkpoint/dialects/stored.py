"""What a dialect finds in a folder: which stored tensor plays which role of which linear."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockscale.checkpoint.header import TensorInfo, read_tensor
from blockscale.checkpoint.linear import KVScales, QuantizedLinear, Scheme
from blockscale.errors import CheckpointError
from blockscale.formats.spec import Granularity, ScaleType
from blockscale.formats.tensor import QuantizedTensor

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class StoredLinear:
    """Roles are packed, block_scale, global_scale, input_global_scale, pre_quant_scale.

    has_divisors    scales of NVFP4's second level are stored as 1 / multiplier (compressed-tensors)
    is_transposed   a stack of experts stored [E, K, N] (Model Optimizer, Llama 4 and gpt-oss)
    """

    name: str
    scheme: Scheme
    tensors: Mapping[str, TensorInfo]
    has_divisors: bool = False
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight it stands for: [N, K] or [E, N, K]."""
        *lead, last = self.tensors["packed"].shape
        bits = 8 * self.tensors["packed"].dtype.itemsize // (2 if self.scheme.weight.element.bits == 4 else 1)
        per_byte = 8 // bits
        if self.is_transposed:
            return (*lead[:-1], last, lead[-1] * per_byte)
        return (*lead, last * per_byte)


@dataclass(frozen=True)
class StoredModel:
    """The quantized side of a folder. Every tensor not named here is kept as it is."""

    dialect: str
    linears: Mapping[str, StoredLinear]
    kv_tensors: Mapping[str, tuple[TensorInfo, TensorInfo]] = field(default_factory=dict)
    kv_format: str | None = None  # "fp8" or "nvfp4"


def check_roles(linear: StoredLinear) -> StoredLinear:
    """CheckpointError unless the tensors are there, with the dtypes and shapes that the scheme means."""
    fmt = linear.scheme.weight
    required = ["packed", "block_scale"]
    required += ["global_scale"] if fmt.has_global_scale else []
    required += ["input_global_scale"] if linear.scheme.needs_input_scale else []
    for role in required:
        if role not in linear.tensors:
            raise CheckpointError(
                f"{linear.name}: quantized as {linear.scheme.name}, but its {role} is missing",
                hint="the checkpoint is incomplete; engines would read uninitialised memory here",
            )
    packed, scale = linear.tensors["packed"], linear.tensors["block_scale"]
    if len(packed.shape) != (3 if linear.is_transposed else 2):
        raise CheckpointError(f"{packed.name}: {list(packed.shape)} is no weight matrix")
    want_packed = torch.uint8 if fmt.element.bits < 8 else torch.float8_e4m3fn
    if packed.dtype != want_packed:
        raise CheckpointError(f"{packed.name}: {fmt.name} is stored as {want_packed}, found {packed.dtype}")
    want_scale = {ScaleType.E4M3: (torch.float8_e4m3fn,), ScaleType.E8M0: (torch.uint8, torch.float8_e8m0fnu)}.get(
        fmt.scale, (torch.float32, torch.bfloat16, torch.float16)
    )
    if scale.dtype not in want_scale:
        raise CheckpointError(f"{scale.name}: {fmt.name} has scales of {want_scale[0]}, found {scale.dtype}")
    if fmt.granularity is Granularity.BLOCK:
        *lead, k = linear.shape
        want = (*lead, k // fmt.block_size)
        if linear.is_transposed:
            want = (*want[:-2], want[-1], want[-2])
        if scale.shape != want or k % fmt.block_size:
            raise CheckpointError(
                f"{scale.name}: {list(scale.shape)} does not match the weight {list(linear.shape)} in "
                f"blocks of {fmt.block_size} (expected {list(want)})",
                hint="the config names another format than the tensors have",
            )
    rows, k = linear.shape[-2:]
    sizes = {Granularity.CHANNEL: {"block_scale": rows}, Granularity.TENSOR: {"block_scale": 1}}.get(
        fmt.granularity, {}
    )
    for role, size in {**sizes, "global_scale": 1, "input_global_scale": 1, "pre_quant_scale": k}.items():
        info = linear.tensors.get(role)
        if info is not None and (math.prod(info.shape) != size or not info.dtype.is_floating_point):
            raise CheckpointError(
                f"{info.name}: {info.dtype} {list(info.shape)}, but {linear.scheme.name} has {size} scales here",
                hint="the config names another format than the tensors have",
            )
    return linear


def check_no_loose_parts(
    linears: Mapping[str, StoredLinear], tensors: Mapping[str, TensorInfo], endings: tuple[str, ...]
) -> None:
    """CheckpointError for codes without scales, or a scale (by the `endings` of their names) without codes."""
    hint = "the checkpoint is incomplete; engines would read uninitialised memory here"
    taken = {info.name for linear in linears.values() for info in linear.tensors.values()}
    loose = [info for name, info in tensors.items() if name not in taken]
    for info in loose:
        if info.dtype in _FLOAT8 or (info.dtype == torch.uint8 and len(info.shape) > 1):
            raise CheckpointError(f"{info.name} has no weight_scale", hint=hint)
    for info in loose:
        if info.name.endswith(endings):
            raise CheckpointError(f"{info.name} belongs to no quantized weight", hint=hint)


def pair_kv_scales(
    tensors: Mapping[str, TensorInfo], key_ending: str, value_ending: str
) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """Key and value scale by attention module. CheckpointError for one without the other, or one that is no scalar."""
    keys, values = (
        {name.removesuffix(ending): info for name, info in tensors.items() if name.endswith(ending)}
        for ending in (key_ending, value_ending)
    )
    for attention in [*keys, *values]:
        if attention not in keys or attention not in values:
            has, lacks = ("key", "value") if attention in keys else ("value", "key")
            raise CheckpointError(f"{attention}: a {has} scale without a {lacks} scale")
        for info in (keys[attention], values[attention]):
            if math.prod(info.shape) != 1 or not info.dtype.is_floating_point:
                raise CheckpointError(f"{info.name}: {info.dtype} {list(info.shape)}; only one scale a cache is read")
    return {attention: (keys[attention], values[attention]) for attention in keys}


def load_linear(linear: StoredLinear, dtype: torch.dtype) -> QuantizedLinear:
    """Reads one linear. CheckpointError for scales that no engine could use (NaN, Inf, zero or negative)."""
    data = {role: read_tensor(info) for role, info in linear.tensors.items()}
    fmt = linear.scheme.weight
    packed, block_scale = data["packed"], data["block_scale"]
    if linear.is_transposed:
        packed, block_scale = packed.transpose(-1, -2).contiguous(), block_scale.transpose(-1, -2).contiguous()
    if fmt.scale is ScaleType.E8M0:
        block_scale = block_scale.view(torch.uint8)
    elif fmt.granularity is Granularity.CHANNEL:
        block_scale = block_scale.reshape(-1, 1)  # bf16 or fp32, as stored
    elif fmt.granularity is Granularity.TENSOR:
        block_scale = block_scale.float().reshape(())
    _check_block_scale(linear, block_scale)
    global_scale = _multiplier(linear, "global_scale", data, is_divisor=linear.has_divisors)
    activation = linear.scheme.activation
    is_divisor = linear.has_divisors and activation is not None and activation.has_global_scale
    return QuantizedLinear(
        linear.scheme,
        QuantizedTensor(fmt, packed, block_scale, global_scale, linear.shape, dtype),
        _multiplier(linear, "input_global_scale", data, is_divisor=is_divisor),
        data.get("pre_quant_scale"),
    )


def load_kv_scales(infos: tuple[TensorInfo, TensorInfo]) -> KVScales:
    """CheckpointError for a scale that no engine could use (NaN, Inf, zero or negative)."""
    key, value = (_checked_scale(info, read_tensor(info).float().reshape(())) for info in infos)
    return KVScales(key, value)


def _multiplier(linear: StoredLinear, role: str, data: Mapping[str, Tensor], *, is_divisor: bool) -> Tensor | None:
    """A second-level scale as a multiplier, from whichever direction is stored."""
    if role not in data:
        return None
    scale = data[role].float().reshape(())
    return _checked_scale(linear.tensors[role], scale.reciprocal() if is_divisor else scale)


def _checked_scale(info: TensorInfo, scale: Tensor) -> Tensor:
    if not (torch.isfinite(scale) and scale > 0):
        raise CheckpointError(
            f"{info.name}: {read_tensor(info).item()} makes a scale of {scale.item()}, not a positive finite number",
            hint="the layer was exported without calibration or is damaged; quantize it again",
        )
    return scale


def _check_block_scale(linear: StoredLinear, scale: Tensor) -> None:
    values = scale.float()
    is_bad = scale == 255 if scale.dtype == torch.uint8 else ~torch.isfinite(values) | (values < 0)
    if is_bad.any():
        position = is_bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{linear.tensors['block_scale'].name}: NaN, infinite or negative scale at {position} "
            f"({int(is_bad.sum())} in all)",
            hint="engines answer NaN or '!!!!' to this; quantize the layer again",
        )

"""What a dialect finds in a folder: which stored tensor plays which role of which linear."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockscale.checkpoint.header import TensorInfo, read_tensor
from blockscale.checkpoint.linear import KVScales, QuantizedLinear, Scheme
from blockscale.errors import CheckpointError
from blockscale.formats.spec import Granularity, ScaleType
from blockscale.formats.tensor import QuantizedTensor


@dataclass(frozen=True)
class StoredLinear:
    """Roles are packed, block_scale, global_scale, input_global_scale, pre_quant_scale.

    has_divisors    global scales are stored as 1 / multiplier (compressed-tensors)
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
    return linear


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
        block_scale = block_scale.float().reshape(-1, 1)
    elif fmt.granularity is Granularity.TENSOR:
        block_scale = _scalar(linear, block_scale)
    _check_block_scale(linear, block_scale)
    global_scale = _direction(linear, data.get("global_scale"))
    return QuantizedLinear(
        linear.scheme,
        QuantizedTensor(fmt, packed, block_scale, global_scale, linear.shape, dtype),
        _direction(linear, data.get("input_global_scale")),
        data.get("pre_quant_scale"),
    )


def load_kv_scales(infos: tuple[TensorInfo, TensorInfo]) -> KVScales:
    key, value = (read_tensor(info).float().reshape(()) for info in infos)
    return KVScales(key, value)


def _scalar(linear: StoredLinear, scale: Tensor) -> Tensor:
    if scale.numel() != 1:
        raise CheckpointError(f"{linear.name}: expected one scale for the tensor, found {list(scale.shape)}")
    return scale.float().reshape(())


def _direction(linear: StoredLinear, stored: Tensor | None) -> Tensor | None:
    """The multiplier, from whichever direction is stored."""
    if stored is None:
        return None
    scale = _scalar(linear, stored)
    scale = scale.reciprocal() if linear.has_divisors else scale
    if not (torch.isfinite(scale) and scale > 0):
        raise CheckpointError(
            f"{linear.name}: a global scale is {stored.item()}: not a positive finite number",
            hint="the layer was exported without calibration or is damaged; quantize it again",
        )
    return scale


def _check_block_scale(linear: StoredLinear, scale: Tensor) -> None:
    is_bad = scale == 255 if scale.dtype == torch.uint8 else ~torch.isfinite(scale.float())
    if is_bad.any():
        position = is_bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{linear.tensors['block_scale'].name}: NaN scale at {position} ({int(is_bad.sum())} in all)",
            hint="engines answer NaN or '!!!!' to this; quantize the layer again",
        )

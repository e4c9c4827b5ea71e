"""What decoders are put together from: linears over weights as they are stored, norms and rotary positions.

A linear is a frozen dataclass called with x [T, K] that gives [T, N] in the dtype of x. Biases are fp32 on the CPU and
of the model's dtype on GPUs. Which class serves a stored weight is chosen in `make_linear`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.algorithms.fake_quantize import round_activation
from blockscale.algorithms.residual_channels import augment_input
from blockscale.checkpoint.linear import QuantizedLinear
from blockscale.formats.nvfp4 import decode_unscaled
from blockscale.formats.spec import NVFP4, Format, Granularity
from blockscale.formats.tensor import QuantizedTensor, decode
from blockscale.kernels import linears
from blockscale.kernels.cpu import decode as cpu_decode
from blockscale.kernels.cpu import dense
from blockscale.kernels.cpu import linear as cpu_linear
from blockscale.kernels.ops.between import add_rms_norm as fused_add_rms_norm
from blockscale.kernels.ops.linear import linear_w4a4, linear_w4a16
from blockscale.kernels.prepare import FORMATS, Layout, PreparedWeight
from blockscale.models.rope_config import Rope

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PackedProduct:
    """Four-bit weights [N, K] in the layout of the device's kernels."""

    weight: PreparedWeight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.layout is Layout.CPU:  # past torch's dispatcher, whose time shows at one token
            return cpu_linear.linear(x, self.weight, self.bias)
        return linear_w4a16(x, self.weight, self.bias)


@dataclass(frozen=True)
class RoundedProduct:
    """NVFP4 weights times inputs in NVFP4 whose block scales follow the amax of each block."""

    weight: PreparedWeight
    input_global_scale: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.layout is Layout.CPU:
            return cpu_linear.linear_w4a4(x, self.weight, self.bias, self.input_global_scale)
        return linear_w4a4(x, self.weight, self.bias, self.input_global_scale)


@dataclass(frozen=True)
class PlainProduct:
    """Weights [N, K] in the type that the checkpoint has them in."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if x.device.type == "cpu" and x.dtype == torch.float32 and weight.dtype == torch.bfloat16:
            return dense.linear(x, weight, bias)
        return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@dataclass(frozen=True)
class DecodedProduct:
    """Any other stored format, decoded for each call; inputs rounded to `activation` where that is not None.

    Also what corrects the rounding of NVFP4 inputs (residual channels), and ways to choose their block scales.
    Sums are in fp32 where inputs are rounded, as tensor cores sum.
    """

    linear: QuantizedLinear
    activation: Format | None
    method: ActivationScale
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        values, factor = self._rounded(x)
        weight, weight_factor = _unscaled(self.linear.weight)
        if self.activation is not None and self.linear.residual is not None:
            weight = torch.cat((weight, _unscaled(self.linear.residual.weight)[0]), -1)
        is_wide = self.activation is not None or x.dtype == torch.float16
        compute = torch.float32 if is_wide else x.dtype
        y = functional.linear(values.to(compute), weight.to(compute)).float() * (factor * weight_factor)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(values [T, K], or [T, K + S] with residual channels, factor)."""
        activation, scale = self.activation, self.linear.input_global_scale
        if activation is None:
            return x, torch.ones((), device=x.device)

        def round_input(part: Tensor) -> tuple[Tensor, Tensor]:
            return round_activation(part, activation, scale, self.method)

        if self.linear.residual is None:
            return round_input(x)
        return augment_input(x, self.linear.residual.channels, round_input)


@dataclass(frozen=True)
class BranchedProduct:
    """A linear with something beside its weight: y = main(x s) + (x s) down^T up^T + bias.

    pre_quant_scale  s, [K] fp32, or None
    down, up         [r, K] and [N, r], or None
    """

    main: Product
    pre_quant_scale: Tensor | None
    down: Tensor | None
    up: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        y = self.main(x)
        if self.down is None or self.up is None:
            return y
        inner = functional.linear(x, self.down.to(x.dtype))
        return y + functional.linear(inner, self.up.to(x.dtype))


@dataclass(frozen=True)
class JoinedProduct:
    """Linears that read the same x, their results one beside the other."""

    parts: tuple[Product, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def _unscaled(q: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """fp32 weight [N, K] that bf16 holds exactly, and the factor (0-d or [N]) of its products."""
    if q.global_scale is not None:
        return decode_unscaled(q.packed, q.block_scale), q.global_scale
    if q.format.granularity in (Granularity.TENSOR, Granularity.CHANNEL):
        scale = q.block_scale.float()
        return q.packed.float(), scale.reshape(-1) if scale.dim() else scale
    return decode(q), torch.ones((), device=q.packed.device)


def make_linear(
    linear: QuantizedLinear,
    bias: Tensor | None,
    *,
    is_emulating: bool,
    method: ActivationScale,
) -> Product:
    """The linear, on the device it lies on, in the layout of its kernels.

    is_emulating  inputs are rounded as the scheme says
    method        how block scales of NVFP4 inputs are chosen
    """
    activation = linear.scheme.activation if is_emulating else None
    main: Product
    is_kernel = linear.weight.format in FORMATS and linear.weight.shape[-1] % linear.weight.format.block_size == 0
    is_plain_fp4 = activation is NVFP4 and linear.weight.format is NVFP4 and method is ActivationScale.AMAX
    is_corrected = activation is not None and linear.residual is not None
    if is_kernel and (activation is None or (is_plain_fp4 and not is_corrected)):
        op = linears.Op.LINEAR_W4A16 if activation is None else linears.Op.LINEAR_W4A4
        weight = linears.prepare(linear.weight, op)
        if activation is None or linear.input_global_scale is None:
            main = PackedProduct(weight, bias)
        else:
            main = RoundedProduct(weight, linear.input_global_scale, bias)
    else:
        main = DecodedProduct(linear, activation, method, bias)
    if linear.pre_quant_scale is None and linear.low_rank is None:
        return main
    low_rank = linear.low_rank
    scale = None if linear.pre_quant_scale is None else linear.pre_quant_scale.float()
    down, up = (None, None) if low_rank is None else (low_rank.down, low_rank.up)
    return BranchedProduct(main, scale, down, up)


def can_join(parts: Sequence[QuantizedLinear]) -> bool:
    """Whether linears that read the same x are one linear whose rows are theirs, without a number changed."""
    first = parts[0]

    def alike(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b or (a is not None and b is not None and torch.equal(a, b))

    return all(
        part.scheme == first.scheme
        and part.weight.format in FORMATS
        and part.low_rank is None
        and part.residual is None
        and alike(part.weight.global_scale, first.weight.global_scale)
        and alike(part.input_global_scale, first.input_global_scale)
        and alike(part.pre_quant_scale, first.pre_quant_scale)
        for part in parts
    )


def join(parts: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """The one linear of `can_join`."""
    first = parts[0].weight
    rows = sum(part.weight.shape[0] for part in parts)
    weight = QuantizedTensor(
        first.format,
        torch.cat([part.weight.packed for part in parts]),
        torch.cat([part.weight.block_scale.view(torch.uint8) for part in parts]).view(first.block_scale.dtype),
        first.global_scale,
        (rows, first.shape[1]),
        first.dtype,
    )
    return QuantizedLinear(parts[0].scheme, weight, parts[0].input_global_scale, parts[0].pre_quant_scale)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in fp32, rounded once to the dtype of x; weight fp32."""
    if x.dtype == torch.float32:
        fast = cpu_decode.rms_norm(x, weight, epsilon) if x.device.type == "cpu" else None
        return functional.rms_norm(x, weight.shape, weight, epsilon) if fast is None else fast
    return functional.rms_norm(x.float(), weight.shape, weight, epsilon).to(x.dtype)


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + added, `rms_norm` of it): a layer's beginning, with what the one before it leaves to be added."""
    if x.device.type == "cuda":
        return fused_add_rms_norm(x, added, weight, epsilon)
    total = x if added is None else x + added
    return total, rms_norm(total, weight, epsilon)


@dataclass(frozen=True)
class Turns:
    """Rotary positions of a batch's tokens, fp32 [T, 1, R]: x turned = x * cos + (x with its halves swapped) * sin.

    half  R/2
    """

    cos: Tensor
    sin: Tensor

    @property
    def half(self) -> int:
        return self.cos.shape[-1] // 2


def turns(positions: Tensor, frequencies: Tensor, amount: float) -> Turns:
    """positions int64 [T], frequencies fp32 [R/2]."""
    angles = positions.float()[:, None, None] * frequencies
    cos, sin = angles.cos() * amount, angles.sin() * amount
    return Turns(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def frequencies(rope: Rope, device: torch.device) -> Tensor:
    """fp32 [R/2]"""
    return torch.tensor(rope.frequencies, dtype=torch.float32, device=device)


def turn(x: Tensor, by: Turns) -> Tensor:
    """x [T, H, D] like x: element j < R/2 of a head turns with element j + R/2; those past R stay."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        fast = cpu_decode.turn(x, by.cos, by.sin)
        if fast is not None:
            return fast
    half, rest = by.half, None
    wide = x.float()
    if x.shape[-1] > 2 * half:
        wide, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    swapped = torch.cat((wide[..., half:], wide[..., :half]), dim=-1)
    out = torch.addcmul(wide * by.cos, swapped, by.sin)
    return (out if rest is None else torch.cat((out, rest), dim=-1)).to(x.dtype)

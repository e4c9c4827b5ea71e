"""Linear layers that hold their weights as stored: packed, or in 16 bits."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from blockscale.algorithms.fake_quantize import round_activation
from blockscale.checkpoint.linear import QuantizedLinear
from blockscale.formats.nvfp4 import decode_unscaled
from blockscale.formats.spec import Granularity
from blockscale.formats.tensor import QuantizedTensor, decode

Observer = Callable[[str, Tensor], None]  # module name, input [..., K]


class PackedLinear(nn.Module):
    """y = x W^T + b with W quantized, decoded for each call; inputs rounded as the scheme says if `is_emulating`."""

    def __init__(self, linear: QuantizedLinear, bias: Tensor | None, *, is_emulating: bool) -> None:
        super().__init__()
        weight = linear.weight
        self.linear = linear
        self.activation = linear.scheme.activation if is_emulating else None
        self.out_features, self.in_features = weight.shape[-2:]
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        """Moves the packed tensors with the module; never casts them."""
        super()._apply(fn, recurse)
        device = fn(torch.empty(0)).device
        self.linear = self.linear.to(device)
        return self

    def forward(self, x: Tensor, expert: int | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype; `expert` selects one of a stack [E, N, K]."""
        linear = self.linear
        if linear.pre_quant_scale is not None:
            x = x * linear.pre_quant_scale.to(x.dtype)
        values, factor = x, torch.ones((), device=x.device)
        if self.activation is not None:
            values, factor = round_activation(x, self.activation, linear.input_global_scale)
        weight, weight_factor = _unscaled(linear.weight, expert)
        # The tensor core sums in fp32, so emulation does; without global scales products also leave fp16's range.
        is_exact = self.activation is not None or x.dtype == torch.float16
        compute = torch.float32 if is_exact else x.dtype
        y = nn.functional.linear(values.to(compute), weight.to(compute)).float() * (factor * weight_factor)
        if self.bias is not None:
            y = y + (self.bias if expert is None else self.bias[expert])
        return y.to(x.dtype)


def _unscaled(q: QuantizedTensor, expert: int | None) -> tuple[Tensor, Tensor]:
    """fp32 weight [N, K] that bf16 holds exactly, and the factor (0-d or [N]) that the epilogue multiplies by."""
    packed, scale = (q.packed, q.block_scale) if expert is None else (q.packed[expert], q.block_scale[expert])
    if q.global_scale is not None:
        return decode_unscaled(packed, scale), q.global_scale
    if q.format.granularity in (Granularity.TENSOR, Granularity.CHANNEL):
        return packed.float(), scale.float().reshape(-1) if scale.dim() else scale
    one = torch.ones((), device=packed.device)
    return decode(replace(q, packed=packed, block_scale=scale, shape=q.shape[-2:])), one


class KeptLinear(nn.Module):
    """y = x W^T + b with W in its stored 16-bit type, computed in the type of x."""

    def __init__(self, weight: Tensor, bias: Tensor | None, name: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias: Tensor | None
        self.register_buffer("bias", bias)
        self.name = name
        self.observer: Observer | None = None
        self.out_features, self.in_features = weight.shape[-2:]

    def forward(self, x: Tensor, expert: int | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype; `expert` selects one of a stack [E, N, K]."""
        if self.observer is not None:
            self.observer(self.name, x)
        weight = self.weight if expert is None else self.weight[expert]
        bias = self.bias if self.bias is None or expert is None else self.bias[expert]
        return nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

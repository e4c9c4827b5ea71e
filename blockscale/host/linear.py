"""Linear layers that hold their weights as stored: packed, or in 16 bits."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from blockscale.algorithms.fake_quantize import round_activation
from blockscale.checkpoint.linear import QuantizedLinear
from blockscale.formats.nvfp4 import decode_unscaled
from blockscale.formats.tensor import decode

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
        factor: Tensor | None = None
        values = x
        if self.activation is not None:
            values, factor = round_activation(x, self.activation, linear.input_global_scale)
        weight, weight_factor = self._decoded(expert)
        if weight_factor is not None:
            factor = weight_factor if factor is None else factor * weight_factor
        y = nn.functional.linear(values.to(x.dtype), weight.to(x.dtype))
        if factor is not None:
            y = y * factor.to(y.dtype)
        if self.bias is not None:
            y = y + (self.bias if expert is None else self.bias[expert])
        return y

    def _decoded(self, expert: int | None) -> tuple[Tensor, Tensor | None]:
        """fp32 weight [N, K] and what still multiplies the product: the global scale, left to the epilogue."""
        q = self.linear.weight
        if q.global_scale is not None:
            packed, scale = (q.packed, q.block_scale) if expert is None else (q.packed[expert], q.block_scale[expert])
            return decode_unscaled(packed, scale), q.global_scale
        weight = decode(q)
        return (weight if expert is None else weight[expert]), None


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
        y = nn.functional.linear(x, weight.to(x.dtype))
        return y if self.bias is None else y + (self.bias if expert is None else self.bias[expert])

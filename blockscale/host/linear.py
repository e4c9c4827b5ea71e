"""Linear layers that hold their weights as stored: packed, or in 16 bits."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.algorithms.fake_quantize import round_activation
from blockscale.algorithms.residual_channels import augment_input
from blockscale.checkpoint.linear import QuantizedLinear
from blockscale.formats.nvfp4 import decode_unscaled
from blockscale.formats.spec import Granularity
from blockscale.formats.tensor import QuantizedTensor, decode

Observer = Callable[[str, Tensor], None]  # module name, input [..., K]


class PackedLinear(nn.Module):
    """y = x W^T + b with W quantized, decoded for each call; inputs rounded as the scheme says if `is_emulating`.

    A low-rank branch is added to that in any case. Residual channels correct rounded inputs: where inputs are not
    rounded there is nothing to correct.

    learning  fp32 of the weight's shape, without the global scale: what takes the stored codes' place while they are
              being learned; gradients reach it, and the input straight through its rounding
    """

    def __init__(
        self,
        linear: QuantizedLinear,
        bias: Tensor | None,
        *,
        is_emulating: bool,
        activation_scale: ActivationScale = ActivationScale.AMAX,
    ) -> None:
        """`activation_scale`: how block scales of NVFP4 inputs are chosen."""
        super().__init__()
        weight = linear.weight
        self.linear = linear
        self.activation = linear.scheme.activation if is_emulating else None
        self.activation_scale = activation_scale
        self.out_features, self.in_features = weight.shape[-2:]
        self.learning: Tensor | None = None
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
        values, factor = self._rounded(x)
        weight, weight_factor = self._weight(expert)
        if self.activation is not None and linear.residual is not None:  # one product of depth K + S
            weight = torch.cat((weight, _unscaled(linear.residual.weight, None)[0]), -1)
        # The tensor core sums in fp32, so emulation does; without global scales products also leave fp16's range.
        is_exact = self.activation is not None or x.dtype == torch.float16
        compute = torch.float32 if is_exact else x.dtype
        y = nn.functional.linear(values.to(compute), weight.to(compute)).float() * (factor * weight_factor)
        if linear.low_rank is not None:
            inner = nn.functional.linear(x.to(compute), linear.low_rank.down.to(compute))
            y = y + nn.functional.linear(inner, linear.low_rank.up.to(compute)).float()
        if self.bias is not None:
            y = y + (self.bias if expert is None else self.bias[expert])
        return y.to(x.dtype)

    def _weight(self, expert: int | None) -> tuple[Tensor, Tensor]:
        """See `_unscaled`."""
        if self.learning is None:
            return _unscaled(self.linear.weight, expert)
        assert self.linear.weight.global_scale is not None
        return self.learning if expert is None else self.learning[expert], self.linear.weight.global_scale

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(values [..., K], or [..., K + S] with residual channels, factor)."""
        activation, linear = self.activation, self.linear
        if activation is None:
            return x, torch.ones((), device=x.device)

        def round_input(part: Tensor) -> tuple[Tensor, Tensor]:
            return round_activation(part, activation, linear.input_global_scale, self.activation_scale)

        if linear.residual is None:
            return round_input(x)
        return augment_input(x, linear.residual.channels, round_input)


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

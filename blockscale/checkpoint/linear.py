"""One quantized linear layer in memory: one name and one direction for every scale, whatever dialect it came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blockscale.formats.spec import FP8, FP8_CHANNEL, FP8_TOKEN, MXFP4, NVFP4, NVFP4_BLOCK32, Format

if TYPE_CHECKING:  # reading headers needs the schemes, and no torch
    import torch
    from torch import Tensor

    from blockscale.formats.tensor import QuantizedTensor


@dataclass(frozen=True)
class Scheme:
    """How a linear's weight is stored and how its input is rounded when it runs (None: not at all)."""

    weight: Format
    activation: Format | None = None

    @property
    def needs_input_scale(self) -> bool:
        """Whether the activation format has a scale that calibration must find."""
        return self.activation is not None and (self.activation.has_global_scale or self.activation is FP8)

    @property
    def name(self) -> str:
        return self.weight.name + (f"/{self.activation.name}" if self.activation else "/16-bit")


W4A4 = Scheme(NVFP4, NVFP4)
W4A16 = Scheme(NVFP4)
W4A8 = Scheme(NVFP4_BLOCK32, FP8)
W8A8 = Scheme(FP8, FP8)
W8A8_DYNAMIC = Scheme(FP8_CHANNEL, FP8_TOKEN)
MXFP4_W4A4 = Scheme(MXFP4, MXFP4)
MXFP4_W4A16 = Scheme(MXFP4)


@dataclass(frozen=True)
class QuantizedLinear:
    """y = x W^T with W in `weight` ([N, K], or [E, N, K] for a stack of experts).

    input_global_scale  fp32 0-d multiplier of the activations (amax / 2688 for NVFP4, amax / 448 for FP8), or None
    pre_quant_scale     [K] multiplied into x before it is rounded (AWQ), or None
    """

    scheme: Scheme
    weight: QuantizedTensor
    input_global_scale: Tensor | None = None
    pre_quant_scale: Tensor | None = None

    def to(self, device: torch.device | str) -> QuantizedLinear:
        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            weight=self.weight.to(device),
            input_global_scale=move(self.input_global_scale),
            pre_quant_scale=move(self.pre_quant_scale),
        )


@dataclass(frozen=True)
class KVScales:
    """fp32 0-d multipliers of one attention layer's cached keys and values (amax / 448)."""

    key: Tensor
    value: Tensor

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
class LowRank:
    """A branch in 16 bits beside the weight (SVDQuant): y += (x down^T) up^T.

    x is not rounded for it, but has the pre_quant_scale in it. up [N, r], down [r, K].
    """

    up: Tensor
    down: Tensor

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.up, self.down))

    def to(self, device: torch.device | str) -> LowRank:
        return LowRank(self.up.to(device), self.down.to(device))


@dataclass(frozen=True)
class Residual:
    """Channels whose rounding error is rounded too and multiplied once more (ARC): y += q((x - q(x))[channels]) W_S^T.

    channels  int32 [S], S a multiple of 16; neighbours share a block
    weight    NVFP4 [N, S] under the main weight's global scale

    Both q have the linear's input_global_scale. See `algorithms/residual_channels.py`.
    """

    channels: Tensor
    weight: QuantizedTensor

    @property
    def num_bytes(self) -> int:
        """Without the global scale, which is the main weight's."""
        parts = (self.channels, self.weight.packed, self.weight.block_scale)
        return sum(t.numel() * t.element_size() for t in parts)

    def to(self, device: torch.device | str) -> Residual:
        return Residual(self.channels.to(device), self.weight.to(device))


@dataclass(frozen=True)
class QuantizedLinear:
    """y = x W^T with W in `weight` ([N, K], or [E, N, K] for a stack of experts).

    input_global_scale  fp32 0-d multiplier of the activations (amax / 2688 for NVFP4, amax / 448 for FP8), or None
    pre_quant_scale     [K] multiplied into x before it is rounded (AWQ), or None
    low_rank            beside an NVFP4 weight [N, K], or None
    residual            beside an NVFP4 weight [N, K] with NVFP4 activations, or None
    """

    scheme: Scheme
    weight: QuantizedTensor
    input_global_scale: Tensor | None = None
    pre_quant_scale: Tensor | None = None
    low_rank: LowRank | None = None
    residual: Residual | None = None

    @property
    def num_bytes(self) -> int:
        """Of codes, their scales, and what lies beside them."""
        branches = (self.low_rank, self.residual)
        return self.weight.num_bytes + sum(branch.num_bytes for branch in branches if branch is not None)

    def to(self, device: torch.device | str) -> QuantizedLinear:
        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            weight=self.weight.to(device),
            input_global_scale=move(self.input_global_scale),
            pre_quant_scale=move(self.pre_quant_scale),
            low_rank=None if self.low_rank is None else self.low_rank.to(device),
            residual=None if self.residual is None else self.residual.to(device),
        )


@dataclass(frozen=True)
class KVScales:
    """fp32 0-d multipliers of one attention layer's cached keys and values (amax / 448)."""

    key: Tensor
    value: Tensor

"""Hand-made decoder layers, each with one thing that real ones do not have."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from blockscale.host.linear import KeptLinear
from blockscale.quantization.plan import PlannedLinear
from blockscale.quantization.sites import Site, find_sites

H = 32
HIDDEN = torch.zeros(2, 6, H)


class Norm(nn.Module):
    """Multiplies what has no mean square but 1 by `gain(weight)`."""

    def __init__(self, gain: Callable[[Tensor], Tensor] = lambda w: w) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.rand(H, generator=generator) + 0.5, requires_grad=False)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * self.gain(self.weight)


def linear(name: str, n: int = H, k: int = H) -> KeptLinear:
    generator = torch.Generator().manual_seed(len(name))
    return KeptLinear(torch.randn(n, k, generator=generator) * 0.2, None, f"layers.0.{name}")


class Layer(nn.Module):
    """A norm, linears by name, and `compute(layer, hidden)`, to which the hidden states are added."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], *names: str, norm: Norm | None = None) -> None:
        super().__init__()
        self.norm = norm or Norm()
        for name in names:
            setattr(self, name, linear(name))
        self.compute = compute

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.compute(self, hidden)

    def linears(self) -> Mapping[str, PlannedLinear]:
        """All of them are planned; what is planned does not matter here."""
        names = [m.name for m in self.modules() if isinstance(m, KeptLinear)]
        return cast(Mapping[str, PlannedLinear], dict.fromkeys(names))

    def sites(self) -> tuple[Site, ...]:
        return find_sites(self, "layers.0", self.linears(), self, HIDDEN)

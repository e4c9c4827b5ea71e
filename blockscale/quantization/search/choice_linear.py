"""A linear that runs in 16 bits or as any of its options, and that scores what each option would change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from blockscale.host.linear import KeptLinear, PackedLinear

Pack = Callable[[KeptLinear], PackedLinear]


@dataclass
class Switch:
    """What all choice linears of a model look at while it runs.

    chosen  option by group; a group without one runs in 16 bits
    scores  sums of squares by (group, option), where gradients are to be scored; else None
    """

    chosen: Mapping[str, str] = field(default_factory=dict)
    scores: dict[tuple[str, str], float] | None = None


class ChoiceLinear(nn.Module):
    """Takes a KeptLinear's place. Each option is packed when it is first run."""

    def __init__(self, kept: KeptLinear, group: str, options: Mapping[str, Pack], switch: Switch) -> None:
        super().__init__()
        self.kept, self.group, self.options, self.switch = kept, group, options, switch
        self._packed = nn.ModuleDict()
        self.out_features, self.in_features = kept.out_features, kept.in_features

    @property
    def weight(self) -> Tensor:
        """In 16 bits: some models look at its dtype."""
        return self.kept.weight

    def forward(self, x: Tensor, expert: int | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype; `expert` selects one of a stack [E, N, K]."""
        chosen = self.switch.chosen.get(self.group)
        if chosen is not None and chosen in self.options:
            return self._option(chosen)(x, expert)
        y: Tensor = self.kept(x, expert)
        if self.switch.scores is not None and y.requires_grad:
            x_seen, y_seen = x.detach(), y.detach()
            y.register_hook(lambda gradient: self._score(x_seen, y_seen, gradient, expert))
        return y

    def _option(self, name: str) -> nn.Module:
        if name not in self._packed:
            with torch.no_grad():
                self._packed[name] = self.options[name](self.kept)
        return self._packed[name]

    @torch.no_grad()
    def _score(self, x: Tensor, y: Tensor, gradient: Tensor, expert: int | None) -> None:
        """Adds || dL/dy * (y_option - y) ||^2 of this call, for each option."""
        scores = self.switch.scores
        assert scores is not None
        for name in self.options:
            change = self._option(name)(x, expert).float() - y.float()
            key = (self.group, name)
            scores[key] = scores.get(key, 0.0) + (gradient.float() * change).square_().sum(dtype=torch.float64).item()

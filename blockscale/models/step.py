"""What every layer needs to know of a batch, found out once."""

from dataclasses import dataclass

from torch import Tensor

from blockscale.models.attention import Plan
from blockscale.models.batch import Batch
from blockscale.models.latent import Spans
from blockscale.models.layers import Turns


@dataclass(frozen=True)
class Step:
    """turns, local_turns  positions for layers that see all tokens, and for those with a window
    angles              cosine and sine, fp32 [T, R/2] each, where attention is latent
    latent_spans        likewise; None where every sequence has one new token
    """

    batch: Batch
    plan: Plan
    turns: Turns
    local_turns: Turns
    angles: tuple[Tensor, Tensor] | None = None
    latent_spans: Spans | None = None

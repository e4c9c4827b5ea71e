"""Which experts a token goes to, and with what weights: one function a rule.

Each takes the router's logits, fp32 [T, E], and gives (ids int64 [T, top_k], weights fp32 [T, top_k]), the largest
first. None waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Choice = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Router:
    """logits = x W^T + bias, then `choose`.

    weight  [E, K], in the dtype that the product is computed in; its result is read as fp32
    bias    [E] or None
    choose  one of this file's rules, with its settings
    """

    weight: Tensor
    bias: Tensor | None
    choose: Callable[[Tensor], Choice]

    def __call__(self, x: Tensor) -> Choice:
        """x [T, K] -> (ids, weights)."""
        logits = functional.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return self.choose(logits.float())


def softmax_then_top(logits: Tensor, *, top_k: int, is_normalized: bool) -> Choice:
    """The likeliest experts, by a softmax over all of them (Mixtral, Qwen3-MoE).

    is_normalized  the chosen weights are divided by their sum
    """
    weights, ids = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    if is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights


def top_then_softmax(logits: Tensor, *, top_k: int) -> Choice:
    """The largest logits, and a softmax over these alone (gpt-oss)."""
    top, ids = logits.topk(top_k, dim=-1)
    return ids, torch.softmax(top, dim=-1)


def top_of_groups(
    logits: Tensor,
    *,
    correction: Tensor,
    top_k: int,
    num_groups: int,
    num_chosen_groups: int,
    is_normalized: bool,
    factor: float,
) -> Choice:
    """Experts of the best groups, by sigmoid scores whose correction counts for the choice and not for the weights
    (DeepSeek-V3, 2024, section 2.1.2). A group is as good as the sum of its two best experts.

    correction     fp32 [E]
    is_normalized  the chosen weights are divided by their sum
    factor         of the weights
    """
    scores = torch.sigmoid(logits)
    ranked = scores + correction
    if num_groups > 1:
        grouped = ranked.unflatten(-1, (num_groups, -1))  # [T, groups, E / groups]
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        is_chosen = torch.zeros_like(best, dtype=torch.bool)
        is_chosen = is_chosen.scatter(-1, best.topk(num_chosen_groups, dim=-1).indices, True)
        ranked = grouped.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = ranked.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * factor

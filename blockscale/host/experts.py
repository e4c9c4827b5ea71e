"""Routed experts with one linear per expert and projection, or one stack per projection, as checkpoints store them.

transformers holds a layer's experts as fused parameters. Here each expert's linears are modules of their own, so that
they can be packed, and observed, one by one; the gate's arithmetic stays the model's own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from blockscale.errors import ModelError
from blockscale.host.skeleton import DATA_FREE

_GATED_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_PLAIN_NAMES = (("up_proj", "down_proj"),)


def is_fused_experts(module: nn.Module) -> bool:
    """Whether transformers holds stacked expert weights in this module."""
    parameters = dict(module.named_parameters(recurse=False))
    return "down_proj" in parameters and parameters["down_proj"].dim() == 3


class ExpertStack(nn.Module):
    """The place of one projection of all experts, weights [E, N, K], before it has any.

    `is_transposed`: the model, and so the checkpoint, stores it [E, K, N].
    """

    def __init__(self, original: Any, name: str) -> None:
        super().__init__()
        experts, *matrix = getattr(original, name).shape
        self.is_transposed = bool(original.is_transposed)
        self.shape: tuple[int, ...] = (experts, *(reversed(matrix) if self.is_transposed else matrix))
        self.has_bias = bool(original.has_bias)


class HostedExperts(nn.Module):
    """Takes the place of a fused experts module; same call, same result.

    Children are `<expert>.<gate|up|down name>` where the checkpoint has one linear per expert, else `gate_up_proj` (or
    `up_proj`, for experts without a gate) and `down_proj`, stacks that take an expert's number.
    """

    def __init__(self, original: Any, names: set[str]) -> None:
        """`names`: the checkpoint's tensor names below this module."""
        super().__init__()
        if not hasattr(original, "has_gate") or getattr(original, "has_post_expert_norm", False):
            raise ModelError(f"{type(original).__name__}: experts of this kind are not hosted", hint=DATA_FREE)
        # bound to the original, which keeps its activation and limits
        self._activate = original._apply_gate if original.has_gate else original.act_fn
        self.first = "gate_up_proj" if original.has_gate else "up_proj"
        first, down = ExpertStack(original, self.first), ExpertStack(original, "down_proj")
        self.num_experts = down.shape[0]
        all_leaves = _GATED_NAMES if original.has_gate else _PLAIN_NAMES
        self.leaves = next((leaves for leaves in all_leaves if f"0.{leaves[0]}.weight" in names), None)
        if self.leaves is None:
            self.add_module(self.first, first)
            self.down_proj = down
            return
        _, n, k = first.shape
        num_first = len(self.leaves) - 1  # gate and up are halves of the first stack
        shapes = [*[(n // num_first, k)] * num_first, down.shape[1:]]
        for expert in range(self.num_experts):
            linears = {
                leaf: nn.Linear(k, n, bias=first.has_bias, device="meta")
                for leaf, (n, k) in zip(self.leaves, shapes, strict=True)
            }
            self.add_module(str(expert), nn.ModuleDict(linears))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [T, H], experts chosen [T, k] and their weights [T, k] -> [T, H]."""
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:  # an index past the end marks an empty place
                continue
            token, place = torch.where(top_k_index == expert)
            output = self._expert(expert, hidden_states[token])
            weighted = output * top_k_weights[token, place, None]
            result.index_add_(0, token, weighted.to(result.dtype))
        return result

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        if self.leaves is None:
            return self.down_proj(self._activate(self.get_submodule(self.first)(x, expert)), expert)
        *first, down = (self.get_submodule(f"{expert}.{leaf}") for leaf in self.leaves)
        return down(self._activate(torch.cat([linear(x) for linear in first], dim=-1)))

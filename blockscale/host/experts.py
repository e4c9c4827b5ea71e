"""Routed experts with one linear per expert and projection, or one stack per projection, as checkpoints store them.

transformers holds a layer's experts as fused parameters. Here each expert's linears are modules of their own, so that
they can be packed, and observed, one by one; the gate's arithmetic stays the model's own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from blockscale.errors import ModelError

_SPLIT_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def is_fused_experts(module: nn.Module) -> bool:
    """Whether transformers holds stacked expert weights in this module."""
    parameters = dict(module.named_parameters(recurse=False))
    return "down_proj" in parameters and parameters["down_proj"].dim() == 3


class ExpertStack(nn.Module):
    """The place of one projection of all experts, weights [E, N, K], before it has any."""

    def __init__(self, shape: tuple[int, ...], *, has_bias: bool) -> None:
        super().__init__()
        self.shape = shape
        self.has_bias = has_bias


class HostedExperts(nn.Module):
    """Takes the place of a fused experts module; same call, same result.

    Children are `<expert>.<gate|up|down name>` where the checkpoint has one linear per expert, else `gate_up_proj`
    and `down_proj`, stacks that take an expert's number.
    """

    def __init__(self, original: Any, names: set[str]) -> None:
        """`names`: the checkpoint's tensor names below this module."""
        super().__init__()
        if not getattr(original, "has_gate", False) or getattr(original, "has_post_expert_norm", False):
            raise ModelError(f"{type(original).__name__}: experts of this kind are not hosted")
        self._apply_gate = original._apply_gate  # bound to the original, which keeps its activation and limits
        down, gate_up = (_stack_shape(original, name) for name in ("down_proj", "gate_up_proj"))
        self.num_experts = down[0]
        self.leaves = next((leaves for leaves in _SPLIT_NAMES if f"0.{leaves[0]}.weight" in names), None)
        if self.leaves is None:
            self.gate_up_proj = ExpertStack(gate_up, has_bias=original.has_bias)
            self.down_proj = ExpertStack(down, has_bias=original.has_bias)
            return
        half = (gate_up[1] // 2, gate_up[2])
        for expert in range(self.num_experts):
            linears = {
                leaf: nn.Linear(k, n, bias=original.has_bias, device="meta")
                for leaf, (n, k) in zip(self.leaves, (half, half, down[1:]), strict=True)
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
            gated = self._apply_gate(self.gate_up_proj(x, expert))
            return self.down_proj(gated, expert)
        gate, up, down = (self.get_submodule(f"{expert}.{leaf}") for leaf in self.leaves)
        return down(self._apply_gate(torch.cat((gate(x), up(x)), dim=-1)))


def _stack_shape(original: Any, name: str) -> tuple[int, ...]:
    """[E, N, K] of a fused module's parameter, whichever way round it holds it."""
    experts, *matrix = getattr(original, name).shape
    return (experts, *(reversed(matrix) if original.is_transposed else matrix))

"""Routed experts with one linear per expert and projection, or one stack per projection, as checkpoints store them.

transformers holds a layer's experts as fused parameters. Here each expert's linears are modules of their own, so that
they can be packed, and observed, one by one; the gate's arithmetic stays the model's own.
"""

import inspect
from collections.abc import Callable
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

    def __init__(self, stack: Tensor, *, is_transposed: bool, has_bias: bool) -> None:
        """`stack`: the model's own parameter."""
        super().__init__()
        experts, *matrix = stack.shape
        self.shape: tuple[int, ...] = (experts, *(reversed(matrix) if is_transposed else matrix))
        self.is_transposed = is_transposed
        self.has_bias = has_bias


def host_experts(original: Any, names: set[str]) -> nn.Module:
    """What takes a fused module's place. `names`: the checkpoint's tensor names below it. ModelError for experts of an
    unknown kind."""
    if hasattr(original, "has_gate") and not getattr(original, "has_post_expert_norm", False):
        return HostedExperts(original, names)
    if hasattr(original, "act_fn") and len(inspect.signature(original.forward).parameters) == 1:
        return HostedSortedExperts(original, names)
    raise ModelError(f"{type(original).__name__}: experts of this kind are not hosted", hint=DATA_FREE)


def _add_linears(owner: Any, first_name: str, first: ExpertStack, down: ExpertStack, names: set[str]) -> None:
    """Gives a layer's experts their linears: children `<expert>.<gate|up|down name>` where the checkpoint has one for
    each expert, else `first_name` and `down_proj`, stacks that take an expert's number.

    first_name   `gate_up_proj`, or `up_proj` for experts without a gate
    """
    owner.num_experts, owner.first = down.shape[0], first_name
    all_leaves = _GATED_NAMES if first_name == "gate_up_proj" else _PLAIN_NAMES
    owner.leaves = next((leaves for leaves in all_leaves if f"0.{leaves[0]}.weight" in names), None)
    if owner.leaves is None:
        owner.add_module(first_name, first)
        owner.down_proj = down
        return
    _, n, k = first.shape
    num_first = len(owner.leaves) - 1  # gate and up are halves of the first stack
    shapes = [*[(n // num_first, k)] * num_first, down.shape[1:]]
    for expert in range(owner.num_experts):
        linears = {
            leaf: nn.Linear(k, n, bias=first.has_bias, device="meta")
            for leaf, (n, k) in zip(owner.leaves, shapes, strict=True)
        }
        owner.add_module(str(expert), nn.ModuleDict(linears))


def _run_expert(owner: Any, expert: int, x: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """x [T, H] -> [T, H]; `activate` takes what the first linears give, gate before up."""
    if owner.leaves is None:
        return owner.down_proj(activate(owner.get_submodule(owner.first)(x, expert)), expert)
    *first, down = (owner.get_submodule(f"{expert}.{leaf}") for leaf in owner.leaves)
    return down(activate(torch.cat([linear(x) for linear in first], dim=-1)))


class HostedExperts(nn.Module):
    """Takes the place of a fused experts module; same call, same result."""

    def __init__(self, original: Any, names: set[str]) -> None:
        super().__init__()
        # bound to the original, which keeps its activation and limits
        self._activate = original._apply_gate if original.has_gate else original.act_fn
        first_name = "gate_up_proj" if original.has_gate else "up_proj"
        first, down = (
            ExpertStack(getattr(original, name), is_transposed=original.is_transposed, has_bias=original.has_bias)
            for name in (first_name, "down_proj")
        )
        _add_linears(self, first_name, first, down, names)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [T, H], experts chosen [T, k] and their weights [T, k] -> [T, H]."""
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:  # an index past the end marks an empty place
                continue
            token, place = torch.where(top_k_index == expert)
            output = _run_expert(self, expert, hidden_states[token], self._activate)
            weighted = output * top_k_weights[token, place, None]
            result.index_add_(0, token, weighted.to(result.dtype))
        return result


class HostedSortedExperts(nn.Module):
    """Llama 4's experts: each is given all tokens, scaled by its router score, one expert after the other."""

    num_experts: int

    def __init__(self, original: Any, names: set[str]) -> None:
        super().__init__()
        self.act_fn = original.act_fn
        first, down = (
            ExpertStack(getattr(original, name), is_transposed=True, has_bias=False)
            for name in ("gate_up_proj", "down_proj")
        )
        _add_linears(self, "gate_up_proj", first, down, names)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[E * T, H] -> [E * T, H]"""
        chunks = hidden_states.chunk(self.num_experts)
        return torch.cat([_run_expert(self, expert, x, self._activate) for expert, x in enumerate(chunks)])

    def _activate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return up * self.act_fn(gate)

"""Which rows of a stored weight make up a tensor of the file.

A row's codes lie along K with the scales of their blocks, so rows move whole, packed or not, and a bias goes with them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model. `num_experts` is 0 for a dense one."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_tokens: int

    @property
    def num_q(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_kv(self) -> int:
        return self.num_kv_heads * self.head_dim


# Of a weight with so many rows: their int64 indices, in the file's order. ValueError if it cannot have so many.
Rows = Callable[[Geometry, int], Tensor]


def _expect(count: int, expected: int, what: str) -> None:
    if count != expected:
        raise ValueError(f"config.json makes {expected} rows of {what}")


def rotary_q(geometry: Geometry, count: int) -> Tensor:
    _expect(count, geometry.num_q, "queries")
    return _neighbours(torch.arange(count), geometry.num_heads)


def rotary_k(geometry: Geometry, count: int) -> Tensor:
    _expect(count, geometry.num_kv, "keys")
    return _neighbours(torch.arange(count), geometry.num_kv_heads)


def _neighbours(rows: Tensor, num_heads: int) -> Tensor:
    """The model turns a head's rows in pairs (0, h/2), (1, h/2 + 1) ...; llama.cpp's llama as (0, 1), (2, 3) ..."""
    return rows.view(num_heads, 2, -1).transpose(1, 2).flatten()


def fused_q(geometry: Geometry, count: int) -> Tensor:
    """Of q, k and v in one weight: the rows of q, in rotary order."""
    _expect(count, geometry.num_q + 2 * geometry.num_kv, "queries, keys and values")
    return _neighbours(torch.arange(geometry.num_q), geometry.num_heads)


def fused_k(geometry: Geometry, count: int) -> Tensor:
    return geometry.num_q + _neighbours(torch.arange(geometry.num_kv), geometry.num_kv_heads)


def fused_v(geometry: Geometry, count: int) -> Tensor:
    return torch.arange(geometry.num_q + geometry.num_kv, count)


def first_half(geometry: Geometry, count: int) -> Tensor:
    return torch.arange(count // 2)


def second_half(geometry: Geometry, count: int) -> Tensor:
    return torch.arange(count // 2, count)


def even(geometry: Geometry, count: int) -> Tensor:
    return torch.arange(0, count, 2)


def odd(geometry: Geometry, count: int) -> Tensor:
    return torch.arange(1, count, 2)

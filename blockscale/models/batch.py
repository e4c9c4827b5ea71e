"""What one step gives to a model: new tokens of several sequences, and where their keys and values go."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """The new tokens of B sequences, one sequence after the other: T in all. Every tensor is on the model's device.

    token_ids   int64 [T]
    positions   int64 [T], from 0 in each sequence
    cu_seqlens  int32 [B + 1]: where each sequence's new tokens begin
    lengths     int32 [B]: tokens of each sequence, the new ones included
    page_table  int32 [B, P]: pages of each sequence; what lies past its length may hold anything
    slots       int64 [T]: page * page_size + place in the page, where each token's keys and values go
    max_query   the largest number of new tokens that a sequence has
    is_decode   each sequence has one
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    lengths: Tensor
    page_table: Tensor
    slots: Tensor
    max_query: int
    is_decode: bool

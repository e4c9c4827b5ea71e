"""From the experts that tokens chose to tiles of rows of one expert, on the device, with nothing read back.

Pairs (token, choice) are sorted by expert, stably, so that the same choices always give the same tiles. The number of
tiles depends on the choices and the grid must not: `max_tiles` bounds it, and tiles past the last have expert -1.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 256  # pairs that one program ranks: each against each other
_TILES = 64  # tiles written at a time


@dataclass(frozen=True)
class Routing:
    """Rows of the grouped products. All int32.

    pair         [P]          the pair p = token * top_k + choice of each row, by expert; only the first
                              `expert_end[E-1]` are rows, the rest are undefined (pairs without an expert)
    row          [P]          the row of each pair, -1 for a pair without an expert: the inverse of `pair`
    expert_end   [E]          where each expert's rows end
    tile_expert  [max_tiles]  the expert of each tile, or -1
    tile_row     [max_tiles]  its first row
    """

    pair: Tensor
    row: Tensor
    expert_end: Tensor
    tile_expert: Tensor
    tile_row: Tensor


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles of `block_m` rows that any choice of experts needs."""
    with_rows = min(num_pairs, num_experts)  # each of these may end in a tile that is not full
    return with_rows + (num_pairs - with_rows) // block_m


@triton.jit
def _write_tiles(
    counts, expert_end, tile_expert, tile_row, num_tiles, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """`counts` [EP]: rows of each expert. Stores the experts' ends and the map of tiles."""
    e = tl.arange(0, EP)
    start = tl.cumsum(counts, 0) - counts
    tl.store(expert_end + e, start + counts, mask=e < E)
    tiles = (counts + BM - 1) // BM
    tile_end = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    # Row of tile m of expert e is first + m * BM
    first = start - (tile_end - tiles) * BM
    for m0 in range(0, num_tiles, BT):
        m = m0 + tl.arange(0, BT)
        expert = tl.sum((tile_end[None, :] <= m[:, None]).to(tl.int32), 1)
        mine = e[None, :] == expert[:, None]
        row = m * BM + tl.sum(tl.where(mine, first[None, :], 0), 1)
        used = m < total
        tl.store(tile_expert + m, tl.where(used, expert, -1), mask=m < num_tiles)
        tl.store(tile_row + m, tl.where(used, row, 0), mask=m < num_tiles)
    return start


@triton.jit
def _load_ids(ids, p, num_pairs, E: tl.constexpr):
    """int32 expert of each pair, E for one that has none."""
    expert = tl.load(ids + p, mask=p < num_pairs, other=E)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit
def _route_small(
    ids, pair, row, expert_end, tile_expert, tile_row, num_pairs, num_tiles,
    E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One program for everything: a pair's row is the number of pairs that come before it."""
    p = tl.arange(0, CHUNK)
    expert = _load_ids(ids, p, num_pairs, E)
    rank = tl.zeros((CHUNK,), tl.int32)
    for q0 in range(0, CHUNK, 16):
        q = q0 + tl.arange(0, 16)
        other, mine = _load_ids(ids, q, num_pairs, E)[:, None], expert[None, :]
        before = (other < mine) | ((other == mine) & (q[:, None] < p[None, :]))
        rank += tl.sum(before.to(tl.int32), 0)
    has_row = expert < E
    tl.store(pair + rank, p, mask=has_row)
    tl.store(row + p, tl.where(has_row, rank, -1), mask=p < num_pairs)
    counts = tl.histogram(expert, EP, mask=has_row)
    _write_tiles(counts, expert_end, tile_expert, tile_row, num_tiles, E, EP, BM, BT)


@triton.jit
def _count(ids, counts, row, num_pairs, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr):
    """Per chunk: how many pairs each expert has, and each pair's rank among those of its expert (into `row`)."""
    chunk = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    p = chunk * CHUNK + i
    expert = _load_ids(ids, p, num_pairs, E)
    rank = tl.zeros((CHUNK,), tl.int32)
    for j0 in range(0, CHUNK, 16):
        j = j0 + tl.arange(0, 16)
        other = _load_ids(ids, chunk * CHUNK + j, num_pairs, E)
        before = (other[:, None] == expert[None, :]) & (j[:, None] < i[None, :])
        rank += tl.sum(before.to(tl.int32), 0)
    tl.store(row + p, rank, mask=p < num_pairs)
    e = tl.arange(0, EP)
    tl.store(counts + chunk * EP + e, tl.histogram(expert, EP, mask=expert < E))


@triton.jit
def _scan(
    counts, expert_end, tile_expert, tile_row, num_chunks, num_tiles,
    E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Counts of chunks become each chunk's first row of each expert, in place."""
    e = tl.arange(0, EP)
    total = tl.zeros((EP,), tl.int32)
    for c0 in range(0, num_chunks, BC):
        c = c0 + tl.arange(0, BC)
        here = counts + c[:, None] * EP + e[None, :]
        total += tl.sum(tl.load(here, mask=c[:, None] < num_chunks, other=0), 0)
    base = _write_tiles(total, expert_end, tile_expert, tile_row, num_tiles, E, EP, BM, BT)
    for c0 in range(0, num_chunks, BC):
        c = c0 + tl.arange(0, BC)
        here = counts + c[:, None] * EP + e[None, :]
        count = tl.load(here, mask=c[:, None] < num_chunks, other=0)
        tl.store(here, base[None, :] + tl.cumsum(count, 0) - count, mask=c[:, None] < num_chunks)
        base += tl.sum(count, 0)


@triton.jit
def _place(ids, counts, pair, row, num_pairs, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr):
    """Ranks become rows."""
    chunk = tl.program_id(0)
    p = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = _load_ids(ids, p, num_pairs, E)
    has_row = expert < E
    rank = tl.load(row + p, mask=has_row, other=0) + tl.load(counts + chunk * EP + expert, mask=has_row, other=0)
    tl.store(pair + rank, p, mask=has_row)
    tl.store(row + p, tl.where(has_row, rank, -1), mask=p < num_pairs)


def route(topk_ids: Tensor, num_experts: int, block_m: int) -> Routing:
    """The tiles of `block_m` rows for `topk_ids` [T, top_k] (int32 or int64, on the GPU). Nothing is read back."""
    ids = topk_ids.contiguous()
    num_pairs, device = ids.numel(), ids.device
    num_tiles = max_tiles(num_pairs, num_experts, block_m)
    sizes = (num_pairs, num_pairs, num_experts, num_tiles, num_tiles)
    routing = Routing(*torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes))
    if num_pairs == 0:
        return routing
    tiles = (routing.expert_end, routing.tile_expert, routing.tile_row)
    experts = {"E": num_experts, "EP": triton.next_power_of_2(max(num_experts, 2))}
    if num_pairs <= _CHUNK:
        chunk = max(16, triton.next_power_of_2(num_pairs))
        _route_small[(1,)](
            ids, routing.pair, routing.row, *tiles, num_pairs, num_tiles, **experts, BM=block_m, CHUNK=chunk, BT=_TILES,
            num_warps=8,
        )  # fmt: skip
        return routing
    num_chunks = triton.cdiv(num_pairs, _CHUNK)
    counts = torch.empty(num_chunks * experts["EP"], dtype=torch.int32, device=device)
    _count[(num_chunks,)](ids, counts, routing.row, num_pairs, **experts, CHUNK=_CHUNK, num_warps=8)
    _scan[(1,)](counts, *tiles, num_chunks, num_tiles, **experts, BM=block_m, BC=32, BT=_TILES, num_warps=8)
    _place[(num_chunks,)](ids, counts, routing.pair, routing.row, num_pairs, **experts, CHUNK=_CHUNK)
    return routing

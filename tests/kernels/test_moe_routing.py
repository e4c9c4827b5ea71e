"""The sort of pairs by expert, against torch's stable sort; in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import interpreted

routing = interpreted("blockscale.kernels.triton.moe_routing")


def _ids(kind: str, num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens * 31 + num_experts)
    if kind == "one expert":
        return torch.full((num_tokens, top_k), num_experts - 1)
    ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator)
    if kind == "skewed":
        ids[torch.rand(ids.shape, generator=generator) < 0.8] = num_experts // 2
    if kind == "holes":
        ids[torch.rand(ids.shape, generator=generator) < 0.5] = -1
        ids[0, 0] = num_experts
    return ids


@pytest.mark.parametrize("kind", ["balanced", "skewed", "one expert", "holes"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_m"),
    [(1, 1, 1, 16), (3, 2, 5, 16), (16, 8, 128, 16), (100, 4, 6, 16), (301, 3, 33, 32)],
)
def test_tiles_hold_the_pairs_of_their_expert_in_order(
    kind: str, num_tokens: int, top_k: int, num_experts: int, block_m: int
) -> None:
    ids = _ids(kind, num_tokens, top_k, num_experts)
    found = routing.route(ids, num_experts, block_m)
    flat = ids.flatten()
    valid = ((flat >= 0) & (flat < num_experts)).nonzero().flatten()
    order = valid[torch.sort(flat[valid], stable=True).indices]
    counts = torch.bincount(flat[valid], minlength=num_experts)
    assert found.expert_end.tolist() == counts.cumsum(0).tolist()
    assert found.pair[: len(order)].tolist() == order.tolist()
    rows = torch.full_like(flat, -1)
    rows[order] = torch.arange(len(order))
    assert found.row.tolist() == rows.tolist()

    starts = counts.cumsum(0) - counts
    expected = [(e, int(starts[e]) + i) for e in range(num_experts) for i in range(0, int(counts[e]), block_m)]
    tiles = list(zip(found.tile_expert.tolist(), found.tile_row.tolist(), strict=True))
    assert tiles[: len(expected)] == expected
    assert all(expert == -1 for expert, _ in tiles[len(expected) :])


def test_ids_of_32_bits_and_strides_give_the_same() -> None:
    ids = _ids("balanced", 40, 8, 12)
    wide = ids.repeat(1, 2).to(torch.int32)[:, :8]
    assert not wide.is_contiguous()
    assert routing.route(wide, 12, 16).pair.tolist() == routing.route(ids, 12, 16).pair.tolist()


def test_no_pairs_launch_nothing() -> None:
    assert routing.route(torch.empty(0, 8, dtype=torch.int64), 4, 16).tile_expert.numel() == 0


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(1, 128), (8, 128), (128, 4), (1000, 7)])
def test_the_bound_of_tiles_is_reached_by_the_worst_choice(num_pairs: int, num_experts: int) -> None:
    block_m = 16
    ids = torch.arange(num_pairs).clamp(max=num_experts - 1)  # one each, and all others to the last
    counts = torch.bincount(ids, minlength=num_experts)
    needed = int(((counts + block_m - 1) // block_m).sum())
    bound = routing.max_tiles(num_pairs, num_experts, block_m)
    assert needed <= bound <= needed + 1

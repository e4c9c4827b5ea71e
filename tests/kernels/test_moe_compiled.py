"""The grouped Triton kernels compiled for every target, with the instructions and the room they are meant to have."""

import pytest

from blockscale.kernels.triton import moe, moe_routing
from blockscale.kernels.triton.moe import choose_tiles
from tests.kernels.compiled import TRITON_ARCHS, compile_triton

_POINTERS = {"a": "*bf16", "groups": "*i64", "scale": "*u8", "global_scale": "*fp32", "bias": "*bf16", "out": "*bf16"}
_MAPS = dict.fromkeys(("pair", "expert_end", "tile_expert", "tile_row"), "*i32")
_SIZES = dict.fromkeys(("stride_a", "stride_out", "top_k", "N", "K", "num_n"), "i32")
_NUMBERS = dict.fromkeys(("alpha", "beta", "limit"), "fp32")
# dynamic shared memory that a block of each target may have
_ROOM = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}


@pytest.mark.parametrize(("arch", "num_pairs"), [*((arch, 128 * 200) for arch in TRITON_ARCHS), ("sm_90", 8)])
def test_products_build_for_every_target(arch: str, num_pairs: int) -> None:
    number = arch.removeprefix("sm_")
    tiles = choose_tiles(num_pairs, 128, (int(number[:-1]), int(number[-1])))
    gated = {"GATED": True, "INTERLEAVED": True, "SCALES": 1, "HAS_BIAS": True, "MX": False, "EVEN": True}
    built = compile_triton(
        moe._grouped,
        {**_POINTERS, **_MAPS, **_SIZES, **_NUMBERS},
        {**gated, "BN": tiles.n, "BM": tiles.m, "BK": tiles.k},
        arch,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=("a", "groups", "scale", "out", "stride_a", "stride_out", "N", "K"),
    )
    assert built.num_spills == 0
    assert built.shared_bytes <= _ROOM[arch] << 10
    warp_groups = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}  # 64 rows and more
    found = [name for name in ("HMMA", "HGMMA", "UTCHMMA") if built.count(name)]
    assert found in (["HMMA"], [warp_groups.get(arch, "HMMA")])
    assert arch != "sm_90" or found == ["HGMMA"]


@pytest.mark.parametrize("arch", ["sm_90"])
def test_sorts_build(arch: str) -> None:
    shape = {"E": 128, "EP": 128, "BM": 16, "BT": 64}
    maps = dict.fromkeys(("expert_end", "tile_expert", "tile_row"), "*i32")
    small = {"ids": "*i64", "pair": "*i32", "row": "*i32", **maps, "num_pairs": "i32", "num_tiles": "i32"}
    assert compile_triton(moe_routing._route_small, small, {**shape, "CHUNK": 256}, arch, num_warps=8).num_spills == 0
    scan = {"counts": "*i32", **maps, "num_chunks": "i32", "num_tiles": "i32"}
    assert compile_triton(moe_routing._scan, scan, {**shape, "BC": 32}, arch, num_warps=8).num_spills == 0


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    rows = [choose_tiles(n, 128, (9, 0)).m for n in (1, 8, 512, 2048, 8192, 1 << 17)]
    assert rows == sorted(rows)
    assert (rows[0], rows[-1]) == (16, 128)

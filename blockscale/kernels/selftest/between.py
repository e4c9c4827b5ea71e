"""The kernels between linears against plain torch.

Sums of residuals, and whatever turns or is stored without a norm before it, are the same bytes: each states its order
of operations. Norms sum a row and take a root, and gates use exp; there a result may round to the other side.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockscale.kernels.ops.between import ACTIVATIONS, launcher
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate
from blockscale.kernels.reference import between as reference
from blockscale.kernels.select import Choice, Op
from blockscale.kernels.selftest.outcome import HALF_UNIT, Mismatch, check_equal, check_near

_DTYPES = (torch.bfloat16, torch.float16)
_TOKENS, _COLUMNS = 19, 600
_HEADS, _KV_HEADS, _SIZE, _TURNED = 4, 2, 64, 48
_PAGES, _PAGE_SIZE = 4, 16
_BEFORE = 0x5A  # every byte of a cache before anything is written
_MOST_MOVED = 0.01  # of the bytes of normed keys


def test_between(choice: Choice, device: torch.device) -> str:
    """Every dtype and option of the op. Mismatch for the first that is wrong."""
    run = launcher(choice.op, choice.kernel)
    count = sum(_CASES[choice.op](run, dtype, device) for dtype in _DTYPES)
    return f"{count} cases within a rounding of plain torch"


def _values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _check(what: str, found: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """Two roundings, of `magnitude` at most, may each fall to the other side."""
    if found.dtype != expected.dtype:
        raise Mismatch(f"{what}: {found.dtype}, not {expected.dtype}")
    bound = magnitude.double().abs() * 4 * HALF_UNIT[expected.dtype] + 1e-6
    check_near(what, found.cpu(), expected.double(), bound)


def _norm(run: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> int:
    x, added = _values(_TOKENS, _COLUMNS, dtype=dtype), _values(_TOKENS, _COLUMNS, dtype=dtype, seed=1)
    weight = _values(_COLUMNS, seed=2)
    for other in (None, added):
        there = None if other is None else other.to(device)
        total, out = run(x.to(device), there, weight.to(device), 1e-5)
        expected_total, expected = reference.add_rms_norm(x, other, weight, 1e-5)
        check_equal(f"{dtype}, sum", total.cpu(), expected_total)
        _check(f"{dtype}, norm", out, expected, expected)
    return 2


def _gated(run: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> int:
    both = _values(_TOKENS, 2 * _COLUMNS, dtype=dtype)
    for activation in ACTIVATIONS:
        found = run(both.to(device), activation, 1.702, 2.0)
        expected = reference.gated(both, activation, 1.702, 2.0)
        _check(f"{dtype}, {activation}", found, expected, expected)
    return len(ACTIVATIONS)


def _rotate(run: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> int:
    heads = _values(_TOKENS, _HEADS + 2 * _KV_HEADS, _SIZE, dtype=dtype)
    angles = torch.arange(_TOKENS)[:, None, None] * 0.5 ** torch.arange(_TURNED // 2)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    slots = torch.randperm(_PAGES * _PAGE_SIZE, generator=torch.Generator().manual_seed(5))[:_TOKENS]
    slots[7], slots[8] = -1, _PAGES * _PAGE_SIZE
    norms = _values(_SIZE, seed=3), _values(_SIZE, seed=4)
    # What turning adds up: a sum is no better known than its terms, however small it is
    terms = heads.abs(), cos.abs(), sin.abs()
    for fmt in KVFormat:
        for chosen in (None, norms):
            what = f"{dtype}, {fmt.value}, {'normed' if chosen else 'plain'}"
            here, there = (_cache(fmt, dtype, place) for place in ("cpu", str(device)))
            expected = reference.rotate_into_cache(heads, cos, sin, here, slots, chosen, 1e-6)
            moved = None if chosen is None else (chosen[0].to(device), chosen[1].to(device))
            operands = [x.to(device) for x in (heads, cos, sin)]
            found = run(*operands, there, slots.to(device), moved, 1e-6)
            if chosen is None:
                check_equal(f"{what}, queries", found.cpu(), expected)
            else:
                positive = chosen[0].abs(), chosen[1].abs()
                scratch = _cache(fmt, dtype, "cpu")
                magnitude = reference.rotate_into_cache(*terms, scratch, slots, positive, 1e-6)
                _check(f"{what}, queries", found, expected, magnitude)
            _check_caches(what, there, here, slots, 0.0 if chosen is None else _MOST_MOVED)
    return 2 * len(KVFormat)


def _cache(fmt: KVFormat, dtype: torch.dtype, device: str) -> PagedCache:
    cache = allocate(fmt, _PAGES, _PAGE_SIZE, _KV_HEADS, _SIZE, k_scale=0.02, v_scale=0.03, dtype=dtype, device=device)
    for part in (cache.k, cache.v, cache.k_block_scale, cache.v_block_scale):
        if part is not None:
            part.view(torch.uint8).fill_(_BEFORE)
    return cache


def _check_caches(what: str, found: PagedCache, expected: PagedCache, slots: Tensor, most_moved: float) -> None:
    """The same bytes, but for that share of the keys that were written."""
    is_written = torch.zeros(_PAGES * _PAGE_SIZE, dtype=torch.bool)
    is_written[slots[(slots >= 0) & (slots < _PAGES * _PAGE_SIZE)]] = True
    for name in ("k", "v", "k_block_scale", "v_block_scale"):
        a, b = (_bytes_by_slot(getattr(cache, name)) for cache in (found, expected))
        if a is None or b is None:
            continue
        check_equal(f"{what}, places of {name} that nothing goes to", a[~is_written], b[~is_written])
        share = float((a[is_written] != b[is_written]).float().mean())
        if share > (most_moved if name.startswith("k") else 0.0):
            raise Mismatch(f"{what}: {share:.1%} of the bytes of {name} are not what plain torch writes")


def _bytes_by_slot(part: Tensor | None) -> Tensor | None:
    """uint8 [num_pages * page_size, num_kv_heads, bytes of a head] on the CPU."""
    return None if part is None else part.cpu().view(torch.uint8).flatten(0, 1)


_CASES: dict[Op, Callable[[Callable[..., Any], torch.dtype, torch.device], int]] = {
    Op.ADD_RMS_NORM: _norm,
    Op.GATED: _gated,
    Op.ROTATE_INTO_CACHE: _rotate,
}

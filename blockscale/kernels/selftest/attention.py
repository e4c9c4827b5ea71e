"""Attention against float64 without pages, within what 16-bit weights of the values explain; unused pages are NaN.

A kernel may round each probability to bfloat16, by 2^-8 of itself at most, and rounds its result.
"""

import torch
from torch import Tensor

from blockscale.kernels.ops.attention import launcher
from blockscale.kernels.paged_cache import KVFormat, LatentCache, PagedCache, allocate, dequantize_pages
from blockscale.kernels.reference.kv import quantize_kv
from blockscale.kernels.select import Choice, Op
from blockscale.kernels.selftest.outcome import check_near, rounding

_HEADS, _KV_HEADS, _DIM, _PAGE, _PAGES = 8, 2, 64, 16, 40
_LATENT, _ROPE = 128, 64
_LENGTHS = (0, 1, 37, 200)
_OPTIONS: tuple[dict[str, float], ...] = ({}, {"window": 24, "softcap": 30.0})


def test_attention(choice: Choice, device: torch.device) -> str:
    """Every cache format; sequences of no, one and many tokens; in 16 bits also window, softcap and sinks."""
    run = launcher(choice.op, choice.kernel)
    worst, count = 0.0, 0
    table, slots = _pages()
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32)
    new = [1] * len(_LENGTHS) if choice.op is Op.ATTENTION_DECODE else [min(n, 20) for n in _LENGTHS]
    starts = [0, *torch.tensor(new).cumsum(0).tolist()]
    extra = () if choice.op is Op.ATTENTION_DECODE else (torch.tensor(starts, dtype=torch.int32, device=device),)
    for fmt in KVFormat:
        cache = _filled(fmt, slots)
        k, v = _tokens(cache, slots)
        generator = torch.Generator().manual_seed(3)
        for options in _OPTIONS if fmt is KVFormat.BITS16 else _OPTIONS[:1]:
            sinks = torch.randn(_HEADS, generator=generator) if options else None
            q = torch.randn(starts[-1], _HEADS, _DIM, generator=generator).bfloat16()
            there_sinks = None if sinks is None else sinks.to(device)
            operands = (q.to(device), _moved(cache, device), table.to(device), lengths.to(device), *extra)
            y = run(*operands, sinks=there_sinks, **options).cpu()
            expected, size = _dense(q, k, v, new, sinks, **options)
            bound = size * 2.0**-8 + rounding(expected, q.dtype)
            worst = max(worst, check_near(f"{fmt.value}, {options}", y, expected, bound))
            count += 1
    return f"{count} cases, at most {worst:.2f} of what rounding explains"


def test_mla(choice: Choice, device: torch.device) -> str:
    """Every cache format; sequences of no, one and many tokens."""
    run = launcher(choice.op, choice.kernel)
    worst = 0.0
    table, slots = _pages()
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    for fmt in KVFormat:
        # one head of keys of latent and position; the values that are written beside them are not looked at
        wide = _filled(fmt, slots, num_kv_heads=1, head_dim=_LATENT + _ROPE)
        keys = dequantize_pages(fmt, wide.k, wide.k_block_scale, wide.k_scale).flatten(0, 1)[slots].double()
        q = torch.randn(len(_LENGTHS), _HEADS, _LATENT + _ROPE, generator=generator).bfloat16()
        wide = _moved(wide, device)
        scales = None if wide.k_block_scale is None else wide.k_block_scale[:, :, 0].contiguous()
        cache = LatentCache(fmt, wide.k[:, :, 0].contiguous(), scales, wide.k_scale, _ROPE, wide.dtype)
        y = run(q.to(device), cache, table.to(device), lengths.to(device), scale=0.1).cpu()
        k = keys.expand(-1, _HEADS, -1)
        scaled = (q.double() * 0.1 * (_LATENT + _ROPE) ** 0.5, k, k[..., :_LATENT])
        expected, size = _dense(*scaled, [1] * len(_LENGTHS), None)
        bound = size * 2.0**-8 + rounding(expected, q.dtype)
        worst = max(worst, check_near(fmt.value, y, expected, bound))
    return f"{len(KVFormat)} cases, at most {worst:.2f} of what rounding explains"


def _dense(
    q: Tensor, k: Tensor, v: Tensor, new: list[int], sinks: Tensor | None, window: float = 0, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """float64 like q [T, H, D], and the same of the magnitudes of v; k, v [all sequences' tokens, H, D].

    The last `new` tokens of each sequence ask; one of a sequence without tokens gets zeros.
    """
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    size = torch.zeros_like(out)
    first = row = 0
    for length, count in zip(_LENGTHS, new, strict=True):
        for i in range(count):
            last = length - count + i
            begin = max(0, last + 1 - int(window)) if window else 0
            keys, values = k[first + begin : first + last + 1], v[first + begin : first + last + 1]
            if len(keys):
                logits = torch.einsum("hd,thd->ht", q[row].double(), keys) / q.shape[2] ** 0.5
                logits = softcap * torch.tanh(logits / softcap) if softcap else logits
                every = logits if sinks is None else torch.cat((logits, sinks.double()[:, None]), dim=1)
                weights = torch.softmax(every, dim=1)[:, : len(keys)]
                out[row] = torch.einsum("ht,thd->hd", weights, values)
                size[row] = torch.einsum("ht,thd->hd", weights, values.abs())
            row += 1
        first += length
    return out, size


def _pages() -> tuple[Tensor, Tensor]:
    """A page table [B, max_pages] in no order, and the slots of all tokens of the longest sequence of each row."""
    order = torch.randperm(_PAGES, generator=torch.Generator().manual_seed(1)).int()
    widest = -(-max(_LENGTHS) // _PAGE)
    table = torch.full((len(_LENGTHS), widest), 2**20, dtype=torch.int32)  # beyond the cache: must not be read
    slots, used = [], 0
    for b, length in enumerate(_LENGTHS):
        count = -(-length // _PAGE)
        table[b, :count] = order[used : used + count]
        used += count
        slots += [int(table[b, t // _PAGE]) * _PAGE + t % _PAGE for t in range(length)]
    return table, torch.tensor(slots)


def _filled(fmt: KVFormat, slots: Tensor, num_kv_heads: int = _KV_HEADS, head_dim: int = _DIM) -> PagedCache:
    """Random tokens at `slots`, NaN everywhere else."""
    cache = allocate(fmt, _PAGES, _PAGE, num_kv_heads, head_dim, k_scale=0.02, v_scale=0.01, device="cpu")
    for part in (cache.k, cache.v, cache.k_block_scale, cache.v_block_scale):
        if part is not None and part.element_size() == 2:
            part.fill_(torch.nan)
        elif part is not None:
            part.view(torch.uint8).fill_(0x7F)
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(slots.shape[0], num_kv_heads, head_dim, generator=generator).bfloat16() for _ in range(2))
    quantize_kv(cache, k, v, slots)
    return cache


def _tokens(cache: PagedCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """float64 [tokens, num_heads, D] of keys and values, each KV head for all of its query heads."""
    sides = ((cache.k, cache.k_block_scale, cache.k_scale), (cache.v, cache.v_block_scale, cache.v_scale))
    found = []
    for pages, block_scale, scale in sides:
        values = dequantize_pages(cache.format, pages, block_scale, scale).flatten(0, 1)[slots]
        found.append(values.double().repeat_interleave(_HEADS // _KV_HEADS, 1))
    return found[0], found[1]


def _moved(cache: PagedCache, device: torch.device) -> PagedCache:
    def to(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    return PagedCache(
        cache.format,
        cache.k.to(device),
        cache.v.to(device),
        to(cache.k_block_scale),
        to(cache.v_block_scale),
        to(cache.k_scale),
        to(cache.v_scale),
        cache.dtype,
    )

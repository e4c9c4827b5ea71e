"""Quantizers against plain torch: the same bytes, since each states its order of operations.

RMSNorm sums a row and takes a root, and the gates use exp: there the last bit may differ, which may move a code by one
step. So decoded values are compared: within a step of their block, and different in few places.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockscale.formats.error import block_squared_error
from blockscale.formats.nvfp4 import decode_unscaled
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import encode
from blockscale.kernels.ops.quantize import launcher
from blockscale.kernels.paged_cache import KVFormat, PagedCache, allocate
from blockscale.kernels.reference import quantize as reference
from blockscale.kernels.reference.kv import quantize_kv
from blockscale.kernels.select import Choice, Kernel, Op
from blockscale.kernels.selftest.outcome import Mismatch, check_equal

_SHAPE = (2, 19, 384)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_MOVED = 0.01  # of all elements


def test_quantizer(choice: Choice, device: torch.device) -> str:
    """Every dtype, and with bfloat16 the options of the op. Mismatch for the first that is wrong."""
    run = launcher(choice.op, choice.kernel)
    count = 0
    for dtype in _DTYPES:
        x = _values(dtype, seed=1)
        count += _CASES[choice.op](str(dtype).removeprefix("torch."), run, x, choice, device)
    return f"{count} cases, {_AGREEMENT.get(choice.op, 'the same bytes')}"


def _values(dtype: torch.dtype, seed: int) -> Tensor:
    """Normal values over several binades, a row of zeros, an outlier, NaN and Inf."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(_SHAPE, generator=generator) * torch.exp2(
        torch.randint(-6, 3, (*_SHAPE[:2], 1), generator=generator)
    )
    x[0, 3] = 0.0
    x[1, 5, 40] = 300.0
    return x.to(dtype)


def _broken(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 0, 5], x[0, 1, 33], x[1, 2, 100] = torch.nan, torch.inf, -torch.inf
    return x


def _nvfp4(what: str, run: Callable[..., Any], x: Tensor, choice: Choice, device: torch.device) -> int:
    scale = torch.tensor(0.0131)
    options = [(False, False)]
    if x.dtype == torch.bfloat16 and choice.kernel is not Kernel.CPU_QUANTIZE:
        options.append((True, True))
    for four_over_six, swizzled in options:
        chosen = {"four_over_six": four_over_six, "swizzled": swizzled}
        sources = ((x, None), (x, scale), (_broken(x), scale))
        for source, static in sources if not swizzled else sources[1:]:
            found = run(source.to(device), None if static is None else scale.to(device), **chosen)
            expected = reference.quantize_nvfp4(source, static, **chosen)
            case = f"{what}, {'dynamic' if static is None else 'static'}, {chosen}"
            for name, a, b in zip(("packed", "block_scale", "global_scale"), found, expected, strict=True):
                check_equal(f"{case}, {name}", a.cpu(), b)
            if source is x and not (four_over_six or swizzled):
                q = encode(x, NVFP4, global_scale=static)
                check_equal(f"{case}, packed against formats", found[0].cpu(), q.packed)
                check_equal(f"{case}, block_scale against formats", found[1].cpu(), q.block_scale)
    return 3 * len(options) - (len(options) > 1)


def _norm(what: str, run: Callable[..., Any], x: Tensor, choice: Choice, device: torch.device) -> int:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(x.shape[-1], generator=generator).to(x.dtype)
    scale, other = torch.tensor(0.0021), _values(x.dtype, seed=3)
    cases = [(None, False), (other, True)] if x.dtype == torch.bfloat16 else [(other, False)]
    for residual, unit_offset in cases:
        there = None if residual is None else residual.to(device)
        found = run(x.to(device), weight.to(device), scale.to(device), residual=there, unit_offset=unit_offset)
        expected = reference.rms_norm_quantize(x, weight, scale, residual=residual, unit_offset=unit_offset)
        _check_steps(what, found, expected)
        if residual is not None:
            check_equal(f"{what}, residual", found[2].cpu(), expected[2])  # type: ignore[arg-type]
    return len(cases)


def _gated(what: str, run: Callable[..., Any], x: Tensor, choice: Choice, device: torch.device) -> int:
    scale, up = torch.tensor(0.0131), _values(x.dtype, seed=4)
    activations = ("silu", "gelu_tanh", "clamped") if x.dtype == torch.bfloat16 else ("silu",)
    for activation in activations:
        found = run(x.to(device), up.to(device), scale.to(device), activation=activation, alpha=1.702, limit=7.0)
        expected = reference.silu_mul_quantize(x, up, scale, activation=activation, alpha=1.702, limit=7.0)
        _check_steps(f"{what}, {activation}", found, expected)
    return len(activations)


def _hadamard(what: str, run: Callable[..., Any], x: Tensor, choice: Choice, device: torch.device) -> int:
    scale = torch.tensor(0.0131)
    sizes = (16, 128) if x.dtype == torch.bfloat16 else (64,)
    for size in sizes:
        found = run(x.to(device), scale.to(device), size)
        for name, a, b in zip(
            ("packed", "block_scale"), found, reference.hadamard_quantize(x, scale, size), strict=True
        ):
            check_equal(f"{what}, size {size}, {name}", a.cpu(), b)
    return len(sizes)


def _sweep(what: str, run: Callable[..., Any], x: Tensor, choice: Choice, device: torch.device) -> int:
    scale = torch.tensor(300.0 / 1536)
    found, expected = run(x.to(device), scale.to(device)), reference.quantize_weight_sweep(x, scale)
    for name, a, b in zip(("packed", "block_scale"), found, expected, strict=True):
        check_equal(f"{what}, {name}", a.cpu(), b)
    _check_least(what, x, found[1].cpu(), scale)
    return 1


def _check_least(what: str, x: Tensor, block_scale: Tensor, scale: Tensor) -> None:
    """None of the 126 scales there are errs by less."""
    magnitude = (x.float().abs() / scale).unflatten(-1, (-1, 16))
    error = block_squared_error(magnitude, block_scale.float())
    for code in range(1, 127):
        step = torch.full_like(block_scale.view(torch.uint8), code).view(torch.float8_e4m3fn).float()
        if bool((block_squared_error(magnitude, step) < error * (1 - 2.0**-20)).any()):
            raise Mismatch(f"{what}: the block scale of code {code} errs by less than the one chosen")


def _kv(what: str, run: Callable[..., Any], x: Tensor, choice: Choice, device: torch.device) -> int:
    if x.dtype == torch.float32:
        return 0  # a cache stands for 16 bits
    tokens = _broken(x).view(-1, 3, 128)[:38]
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(5))[:38]
    slots[7] = -1
    for fmt in KVFormat:
        here, there = (
            allocate(fmt, 4, 16, 3, 128, k_scale=0.5, v_scale=0.25, dtype=x.dtype, device=str(place))
            for place in ("cpu", device)
        )
        quantize_kv(here, tokens, tokens.flip(0), slots)
        run(there, tokens.to(device), tokens.flip(0).to(device), slots.to(device))
        for name, a, b in zip(("k", "v", "k_block_scale", "v_block_scale"), _stored(there), _stored(here), strict=True):
            if a is not None and b is not None:
                _check_codes(f"{what}, {fmt.value}, {name}", a.cpu(), b)
    return len(KVFormat)


def _stored(cache: PagedCache) -> tuple[Tensor | None, ...]:
    return cache.k, cache.v, cache.k_block_scale, cache.v_block_scale


def _check_codes(what: str, found: Tensor, expected: Tensor) -> None:
    """Equal, but that NaN may have any sign and payload where elements are floats of their own."""
    if expected.dtype in (torch.uint8, torch.float8_e4m3fn):
        return check_equal(what, found, expected)
    both = found.isnan() & expected.isnan()
    return check_equal(what, torch.where(both, 0, found), torch.where(both, 0, expected))


def _check_steps(what: str, found: tuple[Tensor, ...], expected: tuple[Tensor | None, ...]) -> None:
    """(packed, block_scale, ...) twice: decoded values within a step of their block, and mostly equal."""
    assert expected[0] is not None
    assert expected[1] is not None
    a = decode_unscaled(found[0].cpu(), found[1].cpu())
    b = decode_unscaled(expected[0], expected[1])
    # codes move by at most one place (a step of 2 at the top), a block scale by an eighth
    step = expected[1].float().repeat_interleave(16, -1) * (2 + 6 / 8)
    both_nan = a.isnan() & b.isnan()  # blocks that overflowed on the way
    a, b = a.masked_fill(both_nan, 0), b.masked_fill(both_nan, 0)
    if not bool(((a - b).abs() <= step.nan_to_num()).all()):
        raise Mismatch(f"{what}: a value lies more than a step from what plain torch gives")
    moved = float((a != b).float().mean())
    if moved > _MOST_MOVED:
        raise Mismatch(f"{what}: {moved:.1%} of the values differ from plain torch's")


_CASES: dict[Op, Callable[[str, Callable[..., Any], Tensor, Choice, torch.device], int]] = {
    Op.QUANTIZE_NVFP4: _nvfp4,
    Op.RMS_NORM_QUANTIZE: _norm,
    Op.SILU_MUL_QUANTIZE: _gated,
    Op.HADAMARD_QUANTIZE: _hadamard,
    Op.QUANTIZE_WEIGHT_SWEEP: _sweep,
    Op.QUANTIZE_KV: _kv,
}
_AGREEMENT = dict.fromkeys((Op.RMS_NORM_QUANTIZE, Op.SILU_MUL_QUANTIZE), "within a step, 99 % the same")

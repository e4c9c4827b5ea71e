"""Experts in four bits for a few tokens, on sm_90 and later: how the kernels of moe.cu are configured and launched.

Two or three launches: gate and up with the activation, down, and for more than `TOKEN_ROWS` tokens the weighted sum.
They are chained by programmatic dependent launch, which moe.cu makes safe whatever the kernel ahead is. Weights are
decoded exactly, sums are fp32 in a fixed order, h and y are rounded to the dtype of x. With float16 activations an
MXFP4 weight is what float16 holds of it.
"""

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.kernels.checks import rows
from blockscale.kernels.device import Device, describe
from blockscale.kernels.experts import SILU, GatedActivation, check_moe
from blockscale.kernels.nvrtc import Program, launch, load
from blockscale.kernels.prepare import PreparedWeight

SOURCE = "moe.cu"
MAX_PAIRS = 1024  # choices of all tokens: each block looks at every one
TOKEN_ROWS = 4  # up to so many tokens, a block takes a token with all its experts
_MAX_COLUMNS, _ZERO_BYTES, _COLUMNS = 8, 2048, 128  # as in moe.cu


class Mode(IntEnum):
    """What the kernel is used for; moe.cu explains it."""

    GATED = 0
    DOWN = 1
    TOKEN = 2


@dataclass(frozen=True)
class Variant:
    """Template parameters of moe.cu: row blocks and steps of a warp, warps along K and along rows, blocks an SM."""

    row_blocks: int
    steps: int
    k_warps: int
    row_warps: int
    blocks_per_sm: int

    @property
    def threads(self) -> int:
        return 32 * self.k_warps * self.row_warps

    def name(self, activation: torch.dtype, is_mxfp4: bool, mode: Mode) -> str:
        """Name expression of the kernel."""
        shape = (self.row_blocks, self.steps, self.k_warps, self.row_warps, self.blocks_per_sm)
        return f"experts<{', '.join(map(str, (int(activation == torch.float16), int(is_mxfp4), int(mode), *shape)))}>"

    def tile(self, mode: Mode) -> int:
        """Outputs of a block's tile."""
        return (8 if mode is Mode.GATED else 16) * self.row_blocks * self.row_warps

    def shared_bytes(self, mode: Mode, k: int, num_pairs: int, num_experts: int, top_k: int) -> int:
        """Dynamic shared memory; the parts are those of the kernel."""
        sums = 2 * self.k_warps * self.row_warps * self.row_blocks * 512
        columns = -(-k // (self.steps * _COLUMNS)) * self.steps * _COLUMNS
        x = (top_k if mode is Mode.TOKEN else min(num_pairs, _MAX_COLUMNS)) * (columns * 2 + 64)
        return sums + _ZERO_BYTES + x + 4 * (2 * num_pairs + num_experts + 2 * _MAX_COLUMNS + 3)


class Arguments(ctypes.Structure):
    """moe.cu's structure of the same name."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in ("packed", "scale", "global_scale", "bias", "x", "ids", "weights", "out")
        ),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("num_tokens", "top_k", "num_experts", "n", "k", "scales")),
        *((name, ctypes.c_int) for name in ("is_id_64", "is_bias_fp32", "is_interleaved", "num_sms")),
        *((name, ctypes.c_float) for name in ("alpha", "beta", "limit")),
    ]


@dataclass(frozen=True)
class Step:
    """One launch."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: Arguments


@dataclass(frozen=True)
class Variants:
    """Of the kernel in each of its uses."""

    gated: Variant
    down: Variant
    token: Variant


# Measured on an H200. The first is the fastest where it leaves no step empty.
_GATED = (Variant(2, 2, 8, 1, 2), Variant(2, 3, 8, 1, 1), Variant(2, 1, 8, 1, 3))
_DOWN = (Variant(2, 3, 2, 2, 3), Variant(1, 2, 4, 2, 3), Variant(1, 4, 2, 2, 3))
_TOKEN = (Variant(1, 6, 8, 1, 2), Variant(1, 4, 8, 1, 2), Variant(1, 3, 8, 1, 2))


@cache
def choose_variants(gate_up_k: int, down_k: int, top_k: int) -> Variants:
    """The split of K that leaves the fewest steps empty, the first of those that are equal."""

    def best(variants: tuple[Variant, ...], k: int, slices: int = 1) -> Variant:
        steps = -(-k // _COLUMNS)

        def done(v: Variant) -> int:
            return -(-(-(-steps // v.steps) * slices) // v.k_warps) * v.k_warps * v.steps

        return min(variants, key=done)

    return Variants(best(_GATED, gate_up_k), best(_DOWN, down_k), best(_TOKEN, down_k, top_k))


def why_not(x: Tensor, topk_ids: Tensor, gate_up: PreparedWeight, down: PreparedWeight, device: Device) -> str | None:
    """What keeps these operands (that `check_moe` accepts) from this kernel, or None."""
    if device.capability is None or device.capability < (9, 0):
        return "it needs sm_90 or later"
    if topk_ids.numel() > MAX_PAIRS:
        return f"{topk_ids.numel()} choices are more than {MAX_PAIRS}"
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.k % 32:
            return f"K of {name} is {weight.k}, no multiple of 32"
        if weight.n * weight.k >= 1 << 31:
            return f"an expert of {name} is too large"
        if weight.packed.data_ptr() % 16 or weight.block_scale.data_ptr() % 2:
            return f"{name} is not aligned"
    variants = choose_variants(gate_up.k, down.k, topk_ids.shape[1])
    num_experts, top_k = gate_up.shape[0], topk_ids.shape[1]
    needed = max(
        v.shared_bytes(mode, k, topk_ids.numel(), num_experts, top_k)
        for v, mode, k in (
            (variants.gated, Mode.GATED, gate_up.k),
            (variants.down, Mode.DOWN, down.k),
            (variants.token, Mode.TOKEN, down.k),
        )
    )
    return f"{needed} bytes of shared memory are too many" if needed > device.shared_memory_bytes else None


@dataclass(frozen=True)
class Call:
    """Operands as the kernels take them, and room for what lies between the launches."""

    x: Tensor  # [T, K], rows at multiples of 16 bytes
    ids: Tensor
    weights: Tensor  # fp32
    gate_up: PreparedWeight
    down: PreparedWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: GatedActivation
    h: Tensor  # [T * top_k, I]
    part: Tensor | None  # fp32 [T * top_k, N]; None: a block takes a token
    y: Tensor  # [T, N]


def make_call(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: PreparedWeight,
    down: PreparedWeight,
    activation: GatedActivation,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    token_rows: int = TOKEN_ROWS,
) -> Call:
    """Copies what the kernels cannot read as it lies: before the first of them, which the others do not wait for."""
    flat = rows(x)
    if flat.stride(0) % 8 or flat.data_ptr() % 16:
        flat = flat.clone(memory_format=torch.contiguous_format)
    num_tokens, num_pairs = x.shape[0], topk_ids.numel()
    part = None
    if num_tokens > token_rows:
        part = torch.empty(num_pairs, down.n, dtype=torch.float32, device=x.device)
    return Call(
        flat,
        topk_ids.contiguous(),
        topk_weights.to(torch.float32).contiguous(),
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        activation,
        torch.empty(num_pairs, down.k, dtype=x.dtype, device=x.device),
        part,
        torch.empty(num_tokens, down.n, dtype=x.dtype, device=x.device),
    )


def plan(call: Call, variants: Variants, num_sms: int) -> list[Step]:
    """The launches, in order."""
    gated = _step(call, variants.gated, Mode.GATED, call.gate_up, call.gate_up_bias, call.x, call.h, num_sms)
    if call.part is None:
        return [gated, _step(call, variants.token, Mode.TOKEN, call.down, call.down_bias, call.h, call.y, num_sms)]
    down = _step(call, variants.down, Mode.DOWN, call.down, call.down_bias, call.h, call.part, num_sms)
    sums = _arguments(call, call.down, None, call.part, call.y, call.down.n, num_sms)
    grid = (call.x.shape[0], -(-call.down.n // 512), 1)
    return [gated, down, Step(f"combine<{int(call.x.dtype == torch.float16)}>", grid, 128, 0, sums)]


def _step(
    call: Call, variant: Variant, mode: Mode, weight: PreparedWeight, bias: Tensor | None, x: Tensor, out: Tensor,
    num_sms: int,
) -> Step:  # fmt: skip
    num_tokens, top_k = call.ids.shape
    num_experts, n = weight.shape[0], out.shape[1]
    with_rows = min(num_tokens * top_k, num_experts)
    groups = (
        num_tokens if mode is Mode.TOKEN else with_rows + (num_tokens * top_k - with_rows) // _MAX_COLUMNS
    )  # at most
    items = groups * -(-n // variant.tile(mode))
    return Step(
        variant.name(x.dtype, not weight.format.has_global_scale, mode),
        (min(items, variant.blocks_per_sm * num_sms), 1, 1),
        variant.threads,
        variant.shared_bytes(mode, weight.k, num_tokens * top_k, num_experts, top_k),
        _arguments(call, weight, bias, x, out, n, num_sms),
    )


def _arguments(
    call: Call, weight: PreparedWeight, bias: Tensor | None, x: Tensor, out: Tensor, n: int, num_sms: int
) -> Arguments:
    act = call.activation
    return Arguments(
        weight.packed.data_ptr(),
        weight.block_scale.data_ptr(),
        weight.global_scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        x.data_ptr(),
        call.ids.data_ptr(),
        call.weights.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        *call.ids.shape,
        weight.shape[0],
        n,
        weight.k,
        1 if weight.global_scale.dim() == 1 else 2,
        call.ids.dtype == torch.int64,
        bias is not None and bias.dtype == torch.float32,
        act.is_interleaved,
        num_sms,
        act.alpha,
        act.beta,
        act.limit,
    )


def run(steps: list[Step], device: torch.device) -> None:
    """Queues the launches."""
    facts = describe(device)
    for step in steps:
        kernel = load(Program(SOURCE, (step.kernel,)), step.kernel, facts.arch, step.shared_bytes)
        launch(
            kernel,
            step.grid,
            (step.threads, 1, 1),
            (step.arguments,),
            device=device,
            shared_bytes=step.shared_bytes,
            is_programmatic=True,
        )


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: PreparedWeight,
    down: PreparedWeight,
    *,
    activation: GatedActivation = SILU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """[T, N]: as `triton.moe.moe`, which takes what this does not (`why_not`). FormatError for operands that do not
    fit, and for those."""
    check_moe(x, topk_ids, topk_weights, gate_up, down, gate_up_bias, down_bias)
    if x.shape[0] == 0 or down.n == 0 or down.k == 0:
        return torch.zeros(x.shape[0], down.n, dtype=x.dtype, device=x.device)
    device = describe(x.device)
    reason = why_not(x, topk_ids, gate_up, down, device)
    if reason is not None:
        raise FormatError(f"moe (few tokens): {reason}", hint="use the grouped kernels of triton.moe")
    call = make_call(x, topk_ids, topk_weights, gate_up, down, activation, gate_up_bias, down_bias)
    run(plan(call, choose_variants(gate_up.k, down.k, topk_ids.shape[1]), device.num_sms), x.device)
    return call.y

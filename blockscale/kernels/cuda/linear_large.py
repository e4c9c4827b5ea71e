"""W4A16 linear for many rows of activations, on sm_90: how the kernel of linear_large.cu is configured and launched.

    y[..., N] = x[..., K] @ dequantize(W)[N, K].T (+ bias), W in NVFP4 or MXFP4, x and y in bfloat16 or float16

Weights are decoded exactly and sums are fp32, so the only rounding is that of the sums and of y. With float16
activations an MXFP4 weight is what float16 holds of it (2^-24 to 65504); every NVFP4 weight fits.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import MXFP4
from blockscale.kernels.checks import rows
from blockscale.kernels.cuda.operands import check_linear
from blockscale.kernels.cuda.tensor_map import tensor_map
from blockscale.kernels.device import Device, describe
from blockscale.kernels.layouts import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, tiles_shape
from blockscale.kernels.nvrtc import Kernel, Program, launch, load
from blockscale.kernels.prepare import PreparedWeight

SOURCE = "linear_large.cu"
_OP = "linear_w4a16 (large)"
_THREADS, _MULTIPLIERS, _COLUMNS = 384, 256, 64  # as in linear_large.cu
_ORDER = "order_activations"
_STAGING_BYTES = 2 * 64 * 64 * 2


@dataclass(frozen=True)
class Tiling:
    """Template parameters of linear_large.cu, which explains them.

    blocks    a thread block's rows of the weight, in units of 128
    tokens    of a tile: 64, 128 or 256
    cluster   thread blocks that share activations: 1 or 2
    x_stages  depth of the ring of activations, 64 columns a stage
    w_stages  depth of the ring of weights, 128 columns a stage
    """

    blocks: int
    tokens: int
    cluster: int
    x_stages: int
    w_stages: int

    @property
    def rows(self) -> int:
        """Of a cluster's tile."""
        return 128 * self.blocks * self.cluster

    @property
    def shared_bytes(self) -> int:
        x_bytes, w_bytes = self.tokens * _COLUMNS * 2, 128 * self.blocks // TILE_ROWS * TILE_BYTES
        stages = self.x_stages * (x_bytes + 16) + self.w_stages * (w_bytes + 16)
        return stages + _STAGING_BYTES + 1024

    @property
    def partial_bytes(self) -> int:
        """What a thread block leaves for another: fp32 sums of its tile."""
        return 128 * self.blocks * self.tokens * 4

    def name(self, activation: torch.dtype, is_mxfp4: bool) -> str:
        """Name expression of the kernel."""
        kind = (int(activation is torch.float16), int(is_mxfp4))
        numbers = (self.blocks, self.tokens, self.cluster, *kind, self.x_stages, self.w_stages)
        return f"linear_large<{', '.join(map(str, numbers))}>"


WIDE = Tiling(blocks=1, tokens=256, cluster=2, x_stages=5, w_stages=4)
MIDDLE = Tiling(blocks=2, tokens=128, cluster=2, x_stages=6, w_stages=5)
MIDDLE_LOW = Tiling(blocks=1, tokens=128, cluster=2, x_stages=8, w_stages=6)
NARROW = Tiling(blocks=2, tokens=64, cluster=1, x_stages=8, w_stages=7)
NARROW_LOW = Tiling(blocks=1, tokens=64, cluster=1, x_stages=8, w_stages=12)
TILINGS = (WIDE, MIDDLE, MIDDLE_LOW, NARROW, NARROW_LOW)


@dataclass(frozen=True)
class Plan:
    """How one product is dealt out: see `part_of` in large_parts.cuh.

    row_tiles, token_tiles  tiles of a cluster
    band                    token tiles that are computed side by side
    steps                   along K, of 128 columns
    workers                 clusters
    waves                   whole tiles that every worker gets before the rest is dealt out by steps
    """

    tiling: Tiling
    row_tiles: int
    token_tiles: int
    band: int
    steps: int
    workers: int
    waves: int

    @property
    def is_split(self) -> bool:
        """Some tiles are computed in parts, whose sums pass through memory."""
        return self.waves * self.workers < self.row_tiles * self.token_tiles


_BAND_TOKENS = 1024  # activations that stay in L2 while the weights pass by: 16 MB at K = 8192
_MIN_FILL = 0.93  # of the last wave, above which splitting tiles gains less than it costs


_MAX_FETCHED = 256 << 10  # bytes of partial sums that the finisher of a tile may have to wait for


def choose(m: int, n: int, device: Device) -> Tiling:
    """The tiling for x [m, k] and a weight of n rows: tokens by m, and lower tiles where high ones are too few."""
    high, low = (NARROW, NARROW_LOW) if m <= 64 else (MIDDLE, MIDDLE_LOW)
    tiles, workers = -(-n // high.rows) * -(-m // high.tokens), device.num_sms // high.cluster
    if 128 < m <= 256:
        return MIDDLE if tiles >= workers else WIDE
    if m > 384:
        return WIDE
    return low if (workers / tiles - 1) * high.partial_bytes > _MAX_FETCHED else high


def plan(m: int, n: int, k: int, device: Device, tiling: Tiling | None = None) -> Plan:
    """How x [m, k] times a weight [n, k] is computed on `device`; a tiling by the number of rows, if none is given."""
    if tiling is None:
        tiling = choose(m, n, device)
    row_tiles, token_tiles = -(-n // tiling.rows), -(-m // tiling.tokens)
    steps, tiles = tiles_shape(n, k)[1], row_tiles * token_tiles
    workers = min(device.num_sms // tiling.cluster, tiles * steps)
    parts = workers // tiles * tiles
    if parts >= _MIN_FILL * workers:  # every tile in as many parts, and every worker one of them
        workers = parts
    full = -(-tiles // workers)
    waves = full if tiles >= _MIN_FILL * full * workers else max(0, full - 2)
    return Plan(tiling, row_tiles, token_tiles, max(1, _BAND_TOKENS // tiling.tokens), steps, workers, waves)


class _Deal(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("tiles", "steps", "workers", "waves")]


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("tiles", "y", "global_scale", "bias_fp32", "bias", "partials", "flags")),
        *((name, ctypes.c_int) for name in ("m", "n", "row_tiles32", "row_tiles", "token_tiles", "band")),
        ("deal", _Deal),
    ]


def linear(
    x: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
    is_programmatic: bool = True,
) -> Tensor:
    """y [..., N] of the dtype of x.

    x                [..., K] bfloat16 or float16, any strides; meant for 64 rows and more, right for any number
    weight           [N, K] in Layout.FRAGMENTS, on the device of x (sm_90)
    bias             [N] of the dtype of x or fp32
    tiling           the kernel's shape, for measurements; chosen by M otherwise
    is_programmatic  the first of its kernels begins when the one ahead of it in the stream is about to end

    The result does not depend on timing: sums are added in a fixed order. FormatError for what the kernel would
    misread.
    """
    check_linear(_OP, x, weight, bias)
    if x.numel() // max(1, weight.k) >= 1 << 30:
        raise FormatError(f"{_OP}: {x.numel() // weight.k} rows", hint="at most 2^30 - 1 rows at a time")
    flat = _even_rows(x)
    y = torch.empty(flat.shape[0], weight.n, dtype=x.dtype, device=x.device)
    if flat.shape[0]:
        run(plan(flat.shape[0], weight.n, weight.k, describe(x.device), tiling), flat, weight, bias, y, is_programmatic)
    return y.view(*x.shape[:-1], weight.n)


def run(
    p: Plan, x: Tensor, weight: PreparedWeight, bias: Tensor | None, y: Tensor, is_programmatic: bool = True
) -> None:
    """Two launches into y [M, N], contiguous. x [M, K], M > 0: rows of stride 1 that begin at multiples of four bytes.

    The first brings the columns of x into the order of the weights' fragments, in memory of its own: M * K * 2 bytes.
    """
    (m, _), device, tiling = x.shape, x.device, p.tiling
    grid = p.workers * tiling.cluster
    partials = torch.empty(grid * tiling.partial_bytes if p.is_split else 0, dtype=torch.uint8, device=device)
    flags = torch.empty(grid if p.is_split else 0, dtype=torch.int32, device=device)
    ordered = _ordered(x, flags, is_programmatic)
    is_fp32 = bias is not None and bias.dtype == torch.float32
    address = 0 if bias is None else bias.data_ptr()
    arguments = _Arguments(
        weight.packed.data_ptr(),
        y.data_ptr(),
        weight.global_scale.data_ptr(),
        address if is_fp32 else 0,
        0 if is_fp32 else address,
        partials.data_ptr(),
        flags.data_ptr(),
        m,
        weight.n,
        weight.packed.shape[0],
        p.row_tiles,
        p.token_tiles,
        p.band,
        _Deal(p.row_tiles * p.token_tiles, p.steps, p.workers, p.waves),
    )
    launch(
        _kernel(tiling, x.dtype, weight.format is MXFP4, describe(device)),
        (grid, 1, 1),
        (_THREADS, 1, 1),
        [tensor_map(ordered, tiling.tokens // tiling.cluster, _COLUMNS), arguments],
        device=device,
        shared_bytes=tiling.shared_bytes,
        cluster=(tiling.cluster, 1, 1) if tiling.cluster > 1 else None,
        is_programmatic=True,  # reads weights while the activations are ordered
    )


def _ordered(x: Tensor, flags: Tensor, is_programmatic: bool) -> Tensor:
    """x [M, K] -> [M, K'], K' = K rounded up to 64: of each 64 columns, as 4 x 8 pairs, the transpose. Clears flags."""
    m, k = x.shape
    out = torch.empty(m, -(-k // _COLUMNS) * _COLUMNS, dtype=x.dtype, device=x.device)
    sizes = [ctypes.c_int(m), ctypes.c_int(k), ctypes.c_int(out.shape[1])]
    launch(
        load(Program(SOURCE, (_ORDER,)), _ORDER, describe(x.device).arch),
        (-(-max(out.numel() // 8, flags.numel()) // 256), 1, 1),
        (256, 1, 1),
        [x, ctypes.c_longlong(x.stride(0)), out, *sizes, flags, ctypes.c_int(flags.numel())],
        device=x.device,
        is_programmatic=is_programmatic,
    )
    return out


def program(tiling: Tiling, activation: torch.dtype, is_mxfp4: bool) -> Program:
    """The source with one kernel: each shape is compiled when it is first needed."""
    return Program(SOURCE, (tiling.name(activation, is_mxfp4),))


def _kernel(tiling: Tiling, activation: torch.dtype, is_mxfp4: bool, device: Device) -> Kernel:
    name = tiling.name(activation, is_mxfp4)
    return load(program(tiling, activation, is_mxfp4), name, device.arch, tiling.shared_bytes)


def _even_rows(x: Tensor) -> Tensor:
    """[M, K] whose rows begin at multiples of four bytes: a view where that is one."""
    flat = rows(x)
    if flat.data_ptr() % 4 or (flat.shape[0] > 1 and flat.stride(0) % 2):
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat


assert TILE_COLUMNS == 2 * _COLUMNS

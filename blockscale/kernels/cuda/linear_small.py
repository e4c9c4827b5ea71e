"""W4A16 linear for a few rows of activations, on sm_90: how the kernel of linear_small.cu is configured and launched.

    y[..., N] = x[..., K] @ dequantize(W)[N, K].T (+ bias), W in NVFP4 or MXFP4, x and y in bfloat16 or float16

Weights are decoded exactly and sums are fp32, so the only rounding is that of the sums and of y. With float16
activations an MXFP4 weight is what float16 holds of it (2^-24 to 65504); every NVFP4 weight fits.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import MXFP4
from blockscale.kernels.checks import rows
from blockscale.kernels.cuda.operands import check_linear
from blockscale.kernels.device import Device, describe
from blockscale.kernels.layouts import TILE_BYTES, TILE_COLUMNS, tiles_shape
from blockscale.kernels.nvrtc import Kernel, Program, launch, load
from blockscale.kernels.prepare import PreparedWeight

SOURCE = "linear_small.cu"
MAX_ROWS = 32  # of one launch; more rows take several
_OP = "linear_w4a16 (small)"
_X_BARRIERS, _ZERO_BYTES = 16, 512  # as in linear_small.cu
# Measured on an H200: bytes a microsecond that an SM reads, of weights out of memory and of x out of L2; what a tile
# costs beside its bytes; what starting a cluster costs, which splits K or shares x; what a split through the workspace
# costs at the end, the least time of a tile that goes that way, and what each part of K adds to it.
_WEIGHT_BYTES_PER_US, _X_BYTES_PER_US = 35_000.0, 20_000.0
_TILE_US, _CLUSTER_US, _MULTICAST_US = 0.1, 1.3, 1.5
_WORKSPACE_US, _WORKSPACE_TILE_US, _WORKSPACE_PART_US = 2.0, 3.2, 0.3
_CLEARLY = 0.98  # a later configuration is taken if its estimate is that share of an earlier one's


@dataclass(frozen=True)
class Configuration:
    """Template parameters and launch shape of linear_small.cu, which explains them.

    row_units x column_units     32 x 128 tiles of the layout that a warp takes at a time
    column_blocks                rows of x in units of 8, rounded up
    compute_warps, slots         warps that multiply, and the depth of each one's ring
    warp_rows                    groups of warps over the rows of the block's tile
    blocks_per_sm
    split, cluster               blocks that share a tile's K; blocks of a cluster (then 1 or `split`, or `split` is 1)
    groups                       blocks along the tiles: `split` times as many in all
    """

    row_units: int
    column_units: int
    column_blocks: int
    compute_warps: int
    slots: int
    warp_rows: int
    blocks_per_sm: int
    split: int
    cluster: int
    groups: int

    @property
    def tile_blocks(self) -> int:
        """Row blocks of 16 of a block's tile."""
        return 2 * self.row_units * self.warp_rows

    @property
    def epilogue_warps(self) -> int:
        return min(4, self.tile_blocks)

    @property
    def threads(self) -> int:
        return 32 * (self.compute_warps + self.epilogue_warps)

    @property
    def cluster_shape(self) -> tuple[int, int, int] | None:
        if self.cluster == 1:
            return None
        return (self.cluster, 1, 1) if self.split > 1 else (1, self.cluster, 1)

    def name(self, activation: torch.dtype, is_mxfp4: bool) -> str:
        """Name expression of the kernel."""
        numbers = (
            int(activation == torch.float16),
            int(is_mxfp4),
            self.row_units,
            self.column_units,
            self.column_blocks,
            self.compute_warps,
            self.slots,
            self.warp_rows,
            self.blocks_per_sm,
        )
        return f"linear_small<{', '.join(map(str, numbers))}>"

    def num_tiles(self, n: int) -> int:
        return -(-(tiles_shape(n, TILE_COLUMNS)[0] * 2) // self.tile_blocks)

    def num_steps(self, k: int) -> int:
        """Slots that cover K, which must be whole."""
        return tiles_shape(1, k)[1] // self.column_units

    def tiles_per_block(self, n: int) -> int:
        return -(-self.num_tiles(n) // self.groups)

    def shared_bytes(self, m: int, n: int, k: int) -> int:
        """Dynamic shared memory of a block; the parts are those of the kernel."""
        ring = self.compute_warps * self.slots * self.row_units * self.column_units * TILE_BYTES
        k_warps = self.compute_warps // self.warp_rows
        sums = k_warps * self.tile_blocks * self.column_blocks * 512
        barriers = self.compute_warps * self.slots + _X_BARRIERS
        x = m * (-(-self.num_steps(k) // self.split) * self.column_units * TILE_COLUMNS * 2 + 16)
        received = 0
        if self.cluster > 1 and self.split > 1:
            own, warps_per_rank = self.tiles_per_block(n), max(1, self.epilogue_warps // self.split)
            barriers += own * self.epilogue_warps
            per_warp = self.tile_blocks // self.epilogue_warps * self.column_blocks * 512
            received = own * (self.split - 1) * warps_per_rank * per_warp
        return ring + sums + _ZERO_BYTES + (barriers + 15 & ~15) * 8 + x + received

    def workspace_bytes(self, n: int) -> int:
        """Partial sums of a split over blocks that are no cluster."""
        if self.split == 1 or self.cluster > 1:
            return 0
        return self.num_tiles(n) * self.tile_blocks * self.column_blocks * self.split * 512


# (row_units, column_units, compute_warps, slots, warp_rows, blocks_per_sm) by column_blocks, best first.
_SHAPES = {
    1: ((1, 2, 8, 2, 1, 1), (2, 1, 8, 2, 1, 1)),
    2: ((2, 1, 8, 1, 1, 1), (1, 2, 8, 1, 2, 1), (1, 2, 12, 1, 4, 1)),
    3: ((1, 2, 8, 1, 2, 1), (1, 2, 8, 1, 4, 1), (1, 1, 12, 1, 4, 1)),
    4: ((1, 2, 8, 1, 2, 1), (1, 2, 8, 1, 4, 1), (1, 1, 12, 1, 4, 1)),
}
_SPLITS = ((1, 1), (1, 2), (2, 2), *((2**i, 1) for i in range(1, 9)))  # (split, cluster)


@cache
def configure(m: int, n: int, k: int, device: Device) -> Configuration:
    """The configuration for x [m, k], weight [n, k], m <= 32: the fastest by `estimated_us` of those that fit."""
    best, best_us = None, float("inf")
    for shape in _SHAPES[-(-m // 8)]:
        for split, cluster in _SPLITS:
            c = configuration(shape, split, cluster, m, n, device)
            if c is None or not fits(c, m, n, k, device):
                continue
            us = estimated_us(c, m, n, k)
            if us < best_us * _CLEARLY:
                best, best_us = c, us
    if best is None:
        raise FormatError(
            f"{_OP}: M = {m}, N = {n}, K = {k} does not fit {device.shared_memory_bytes} bytes of shared memory",
            hint="use the kernel for more rows",
        )
    return best


def configuration(
    shape: tuple[int, int, int, int, int, int], split: int, cluster: int, m: int, n: int, device: Device
) -> Configuration | None:
    """`shape` with as many blocks as run at once and have work; None if the device has too few multiprocessors."""
    row_units, column_units, warps, slots, warp_rows, per_sm = shape
    along = cluster if split == 1 else 1
    groups = device.num_sms * per_sm // (split * along) * along
    c = Configuration(row_units, column_units, -(-m // 8), warps, slots, warp_rows, per_sm, split, cluster, groups)
    if c.groups == 0:
        return None
    return replace(c, groups=min(c.groups, -(-c.num_tiles(n) // along) * along))


def fits(c: Configuration, m: int, n: int, k: int, device: Device) -> bool:
    """Whether K can be divided so, and a block's shared memory holds it all."""
    reserved = 1024 * (c.blocks_per_sm - 1)  # by the driver, for each further block
    return (
        tiles_shape(1, k)[1] % c.column_units == 0
        and c.split <= c.num_steps(k)
        and (c.cluster == 1 or c.tile_blocks % c.split == 0)
        and c.shared_bytes(m, n, k) <= device.shared_memory_bytes // c.blocks_per_sm - reserved
    )


def estimated_us(c: Configuration, m: int, n: int, k: int) -> float:
    """Time of the busiest block. Good for choosing between configurations, not as a forecast."""
    own, columns = c.tiles_per_block(n), -(-c.num_steps(k) // c.split) * c.column_units * TILE_COLUMNS
    tile_us = c.tile_blocks * 16 * columns * 9 / 16 * c.blocks_per_sm / _WEIGHT_BYTES_PER_US + _TILE_US
    x_us = m * columns * 2 * c.blocks_per_sm / _X_BYTES_PER_US
    if c.cluster > 1:
        return own * tile_us + (x_us / c.cluster + _MULTICAST_US if c.split == 1 else x_us + _CLUSTER_US)
    if c.split == 1:
        return own * tile_us + x_us
    tile_us = max(tile_us + c.split * _WORKSPACE_PART_US, _WORKSPACE_TILE_US)
    return own * tile_us + x_us + _WORKSPACE_US


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("weight", "x", "y", "bias", "workspace", "arrived", "global_scale")),
        ("row_bytes", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "num_row_units", "num_column_units")),
        *((name, ctypes.c_int) for name in ("num_tiles", "tiles_per_block", "steps_per_part", "longer_parts")),
        *((name, ctypes.c_int) for name in ("split", "cluster", "is_programmatic", "is_bias_fp32")),
        ("zero", ctypes.c_uint32),
    ]


def linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None, *, is_programmatic: bool = True) -> Tensor:
    """y [..., N] of the dtype of x.

    x                [..., K] bfloat16 or float16, any strides; meant for up to 64 rows, right for any number
    weight           [N, K] in Layout.FRAGMENTS, on the device of x (sm_90)
    bias             [N] of the dtype of x or fp32
    is_programmatic  begins when the kernel ahead of it in the stream is about to end, and reads weights meanwhile:
                     they are there once `layouts.to_fragments` returns

    The result does not depend on timing: sums are added in a fixed order. One weight must not be used on two streams
    at the same time (layouts.to_fragments). FormatError for what the kernel would misread.
    """
    check_linear(_OP, x, weight, bias)
    flat = _aligned_rows(x)
    y = torch.empty(flat.shape[0], weight.n, dtype=x.dtype, device=x.device)
    for first in range(0, flat.shape[0], MAX_ROWS):
        part = flat[first : first + MAX_ROWS]
        config = configure(part.shape[0], weight.n, weight.k, describe(x.device))
        run(config, part, weight, bias, y[first : first + MAX_ROWS], is_programmatic=is_programmatic)
    return y.view(*x.shape[:-1], weight.n)


def run(
    config: Configuration,
    x: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None,
    y: Tensor,
    *,
    is_programmatic: bool = False,
) -> None:
    """One launch into y [M, N], contiguous. x [M, K]: rows of stride 1 that begin at multiples of 16 bytes, M <= 32."""
    (m, k), n = x.shape, weight.n
    kernel = _kernel(config, x.dtype, weight.format is MXFP4, describe(x.device))
    workspace_bytes, workspace = config.workspace_bytes(n), None
    if workspace_bytes:
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=x.device)
    row_units, column_units = weight.packed.shape[:2]
    arguments = _Arguments(
        weight.packed.data_ptr(),
        x.data_ptr(),
        y.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if workspace is None else workspace.data_ptr(),
        weight.block_scale.data_ptr(),
        weight.global_scale.data_ptr(),
        x.stride(0) * 2,
        m,
        n,
        k,
        row_units,
        column_units,
        config.num_tiles(n),
        config.tiles_per_block(n),
        config.num_steps(k) // config.split,
        config.num_steps(k) % config.split,
        config.split,
        config.cluster,
        is_programmatic,
        bias is not None and bias.dtype == torch.float32,
    )
    launch(
        kernel,
        (config.split, config.groups, 1),
        (config.threads, 1, 1),
        [arguments],
        device=x.device,
        shared_bytes=config.shared_bytes(m, n, k),
        cluster=config.cluster_shape,
        is_programmatic=is_programmatic,
    )


def program(config: Configuration, activation: torch.dtype, is_mxfp4: bool) -> Program:
    """The source with one kernel: each configuration is compiled when it is first needed."""
    return Program(SOURCE, (config.name(activation, is_mxfp4),))


def _kernel(config: Configuration, activation: torch.dtype, is_mxfp4: bool, device: Device) -> Kernel:
    name = config.name(activation, is_mxfp4)
    return load(program(config, activation, is_mxfp4), name, device.arch, device.shared_memory_bytes)


def _aligned_rows(x: Tensor) -> Tensor:
    """[M, K] whose rows begin at multiples of 16 bytes, as bulk copies need: a view where that is one."""
    flat = rows(x)
    if flat.data_ptr() % 16 or flat.stride(0) % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat

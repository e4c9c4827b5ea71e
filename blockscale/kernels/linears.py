"""The linear ops: a weight is laid out once for its device, then each product goes to the kernel that is fastest at
its M."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache

from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import QuantizedTensor
from blockscale.kernels.checks import ACTIVATION_DTYPES
from blockscale.kernels.device import Device, describe
from blockscale.kernels.layouts import to_fragments
from blockscale.kernels.measured import estimated_us, fastest, nearest_table, tables
from blockscale.kernels.prepare import Layout, PreparedWeight, row_major
from blockscale.kernels.select import Choice, Kernel, Op, usable

Launcher = Callable[..., Tensor]
_LAYOUT_ROWS = (1, 4, 16, 64, 256, 1024, 4096)  # decoding counts as much as prefill


def prepare(
    q: QuantizedTensor, op: Op = Op.LINEAR_W4A16, *, layout: Layout | None = None, consume: bool = False
) -> PreparedWeight:
    """The weight in the layout of the kernels that serve `op` best on its device.

    layout   asks for one: E4M3 makes W4A8 faster at twice the memory, ROW_MAJOR is what every device has a kernel for
    consume  the memory of the tensors of `q` is given back where the layout is another one, so that preparing a model
             layer by layer needs one weight's memory more, not a model's; they, and all that share their memory, are
             empty then
    """
    weight = row_major(q)
    layout = layout or best_layout(op, describe(weight.device), weight)
    prepared = PREPARE[layout](weight)
    if consume and prepared.packed.data_ptr() != weight.packed.data_ptr():
        for tensor in (weight.packed, weight.block_scale, q.packed, q.block_scale):
            tensor.untyped_storage().resize_(0)
    return prepared


def best_layout(op: Op, device: Device, weight: PreparedWeight) -> Layout:
    """That whose kernels are fastest over `_LAYOUT_ROWS`, by the table of the device; without one that of the first."""
    able = [
        c for c in usable(op, device) if c.layout is not None and c.kernel is not Kernel.TORCH and _takes(c, weight)
    ]
    table = nearest_table(device, tables())
    layouts = list(dict.fromkeys(c.layout for c in able if c.layout is not None))
    if not layouts or table is None:
        return layouts[0] if layouts else Layout.ROW_MAJOR

    def cost(layout: Layout) -> float:
        """Geometric mean of the best times, so that no M counts more for being slow."""
        best = 0.0
        for m in _LAYOUT_ROWS:
            kernels = [c.kernel for c in able if c.layout is layout and c.is_for(m)]
            times = estimated_us(table, op, weight.n, weight.k, m, kernels)
            best += math.log(min(times.values())) if times else math.inf
        return best

    costs = {layout: cost(layout) for layout in layouts}
    return min(layouts, key=lambda layout: (costs[layout], layouts.index(layout)))


def _takes(choice: Choice, weight: PreparedWeight) -> bool:
    if choice.layout is Layout.E4M3:
        return False  # twice the memory: only for who asks
    return choice.kernel is not Kernel.HUMMING or (weight.format == NVFP4 and weight.dtype in ACTIVATION_DTYPES)


def _humming_layout(weight: PreparedWeight) -> PreparedWeight:
    from blockscale.kernels.humming_linear import prepare

    return prepare(weight)


def _cpu_layout(weight: PreparedWeight) -> PreparedWeight:
    from blockscale.kernels.cpu.linear import prepare

    return prepare(weight)


def _e4m3_layout(weight: PreparedWeight) -> PreparedWeight:
    from blockscale.kernels.cuda.linear_w4a8 import prepare

    ready = prepare(to_fragments(weight))
    return replace(weight, layout=Layout.E4M3, packed=ready.codes, block_scale=ready.scale)


def _e4m3_linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
    from blockscale.kernels.cuda.linear_w4a8 import E4m3Weight, linear

    return linear(x, E4m3Weight(weight.packed, weight.block_scale, weight.n), bias)


PREPARE: dict[Layout, Callable[[PreparedWeight], PreparedWeight]] = {
    Layout.ROW_MAJOR: lambda weight: weight,
    Layout.FRAGMENTS: to_fragments,
    Layout.E4M3: _e4m3_layout,
    Layout.HUMMING: _humming_layout,
    Layout.CPU: _cpu_layout,
}


def run(op: Op, x: Tensor, weight: PreparedWeight, bias: Tensor | None, **options: Tensor | None) -> Tensor:
    """`op` on x [..., K] by the kernel for its M: [..., N] of the dtype of x."""
    m = x.numel() // weight.k if weight.k else 0
    kernel = kernel_for(op, describe(weight.device), weight.layout, weight.n, weight.k, m)
    return launcher(op, kernel)(x, weight, bias, **options)


@lru_cache(maxsize=4096)
def kernel_for(op: Op, device: Device, layout: Layout, n: int, k: int, m: int) -> Kernel:
    """The measured best at (n, k, m) of those that read the layout; without figures the first of them."""
    able = [c for c in usable(op, device) if _serves(c, layout, m)]
    if not able:
        raise FormatError(
            f"{op.value}: no kernel on {device.name} reads a weight in the layout {layout.value}",
            hint=f"prepare the weight for {op.value} on this device",
        )
    table = nearest_table(device, tables())
    fast = [c.kernel for c in able if c.kernel is not Kernel.TORCH]
    best = None if table is None else fastest(table, op, n, k, m, fast)
    return best or able[0].kernel


_READABLE = (Layout.ROW_MAJOR, Layout.FRAGMENTS)


def _serves(choice: Choice, layout: Layout, m: int) -> bool:
    # plain torch takes apart every layout that keeps the weight's bytes
    readable = choice.layout is layout or (choice.kernel is Kernel.TORCH and layout in _READABLE)
    return readable and choice.is_for(m)


@cache
def launcher(op: Op, kernel: Kernel) -> Launcher:
    """The function (x, weight, bias) of a kernel; its module is imported here, and not before."""
    match kernel, op:
        case Kernel.CUDA_LINEAR_SMALL, _:
            from blockscale.kernels.cuda.linear_small import linear as small

            return small
        case Kernel.CUDA_LINEAR_LARGE, _:
            from blockscale.kernels.cuda.linear_large import linear as large

            return large
        case Kernel.CUDA_LINEAR_W4A8, _:
            from blockscale.kernels.cuda.linear_w4a8 import linear as w4a8

            return w4a8
        case Kernel.CUDA_LINEAR_E4M3, _:
            return _e4m3_linear
        case Kernel.HUMMING, _:
            from blockscale.kernels.humming_linear import linear as humming

            return humming
        case Kernel.TRITON_LINEAR, _:
            from blockscale.kernels.triton.linear import linear as portable

            return portable
        case Kernel.TRITON_LINEAR_W4A4, _:
            from blockscale.kernels.triton.linear_w4a4 import linear as emulated

            return emulated
        case Kernel.CPU_LINEAR, Op.LINEAR_W4A4:
            from blockscale.kernels.cpu.linear import linear_w4a4 as cpu_emulated

            return cpu_emulated
        case Kernel.CPU_LINEAR, Op.LINEAR_W4A8:
            from blockscale.kernels.cpu.linear import linear_int8 as cpu_int8

            return cpu_int8
        case Kernel.CPU_LINEAR, _:
            from blockscale.kernels.cpu.linear import linear as cpu

            return cpu
    from blockscale.kernels.reference import linear as reference

    return {
        Op.LINEAR_W4A16: reference.linear_w4a16,
        Op.LINEAR_W4A8: reference.linear_w4a8,
        Op.LINEAR_W4A4: reference.linear_w4a4,
    }[op]

"""`bench kernels`: our linears at shapes and batch sizes, beside torch's products and other libraries' kernels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockscale.formats.spec import NVFP4, Format
from blockscale.kernels.bench import peers
from blockscale.kernels.bench.clock import median_us, num_copies, read_bandwidth
from blockscale.kernels.bench.peers import Contender, Linear
from blockscale.kernels.checks import check_multiple
from blockscale.kernels.device import Device, describe
from blockscale.kernels.linears import PREPARE, kernel_for, launcher
from blockscale.kernels.measured import Row as TableRow
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.kernels.reference.linear import linear_w4a16
from blockscale.kernels.select import Choice, Kernel, Op, usable

_THREADS = 8
_CHECKED_M = 256  # rows of the result that are compared: the reference is slow
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Row:
    """One kernel at one shape.

    us             microseconds, weights cold
    ratio          time of torch's 16-bit product / us; None for what it is compared with
    read_share     of the weights' bytes a second in the read bandwidth measured in this run
    error          largest difference from the fp32 reference / its largest magnitude; W4A8 and FP8 have that of
                   their operands in it
    is_chosen      the dispatch of `linear_w4a16` takes it here
    failure        why there are no figures
    """

    op: str
    kernel: str
    n: int
    k: int
    m: int
    us: float | None
    ratio: float | None
    tb_per_s: float | None
    tflop_per_s: float | None
    read_share: float | None
    error: float | None
    is_chosen: bool
    failure: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_linears(
    shapes: Sequence[tuple[int, int]],
    ms: Sequence[int],
    device: torch.device,
    *,
    fmt: Format = NVFP4,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
) -> list[Row]:
    """Rows for every [N, K] of `shapes`, every M, every kernel that runs on `device` and every peer that is there."""
    for n, k in shapes:
        check_multiple("bench", "N", n, 1)
        check_multiple("bench", "K", k, fmt.block_size)
    bandwidth = read_bandwidth(device)
    rows: list[Row] = []
    for done, (n, k) in enumerate(shapes):
        if progress is not None:
            progress("timing kernels", done, len(shapes))
        rows += _shape(n, k, ms, device, fmt, dtype, bandwidth)
    if progress is not None:
        progress("timing kernels", len(shapes), len(shapes))
    return rows


def random_weight(n: int, k: int, fmt: Format, dtype: torch.dtype, device: torch.device) -> PreparedWeight:
    """Row-major, every code and a few binades of scales; products of unit activations stay near one."""
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    low, high = (48, 72) if fmt == NVFP4 else (120, 126)
    scale = torch.randint(low, high, (n, k // fmt.block_size), dtype=torch.uint8, device=device)
    global_scale = torch.full((), 0.3 * k**-0.5 if fmt == NVFP4 else 1.0, device=device)
    return PreparedWeight(Layout.ROW_MAJOR, packed, scale, global_scale, (n, k), fmt, dtype)


def _shape(
    n: int, k: int, ms: Sequence[int], device: torch.device, fmt: Format, dtype: torch.dtype, bandwidth: float
) -> Iterator[Row]:
    facts = describe(device)
    weight = random_weight(n, k, fmt, dtype, device)
    inputs = {m: torch.randn(m, k, device=device).to(dtype) for m in ms}
    expected = {m: linear_w4a16(x[:_CHECKED_M].float(), weight) for m, x in inputs.items()}
    base_us: dict[int, float] = {}

    def rows(op: Op, name: str, make: Callable[[], Contender | None], kernel: Choice | None) -> Iterator[Row]:
        served = [m for m in ms if kernel is None or kernel.is_for(m)]
        try:
            contender = make()
        except Exception as error:  # a peer that is installed and does not run here is a row, not the end
            yield from (_failed(op, name, n, k, m, error) for m in served)
            return
        if contender is None:
            return
        for m in served:
            try:
                us, error_size = _time(contender, inputs[m], expected[m], device)
            except Exception as error:
                yield _failed(op, name, n, k, m, error)
                continue
            if name == base_name:
                base_us[m] = us
            speed = contender.weight_bytes / (us * 1e-6)
            yield Row(
                op.value,
                contender.name,
                n,
                k,
                m,
                us,
                base_us[m] / us if m in base_us and name != base_name else None,
                speed / 1e12,
                2.0 * m * n * k / us / 1e6,
                speed / bandwidth,
                error_size,
                kernel is not None and kernel.kernel is _chosen(op, kernel, facts, n, k, m),
            )

    ours = [choice for op in (Op.LINEAR_W4A16, Op.LINEAR_W4A8) for choice in _racing(op, facts, fmt)]
    _build(ours, weight, inputs)
    base_name = "torch " + str(dtype).removeprefix("torch.")
    yield from rows(Op.LINEAR_W4A16, base_name, lambda: peers.torch_16bit(weight, dtype), None)
    for choice in ours:
        yield from rows(choice.op, choice.kernel.value, partial(_own, choice, weight), choice)
    if device.type == "cuda":
        yield from rows(Op.LINEAR_W4A8, "torch fp8", lambda: peers.torch_fp8(weight, facts), None)
        yield from rows(Op.LINEAR_W4A16, "marlin", lambda: peers.marlin(weight, dtype), None)


def _racing(op: Op, facts: Device, fmt: Format) -> list[Choice]:
    """What runs here; the reference is not in the race where a kernel is."""
    able = [c for c in usable(op, facts) if c.kernel is not Kernel.HUMMING or fmt == NVFP4]
    return [c for c in able if c.kernel is not Kernel.TORCH] or able


def _build(ours: Sequence[Choice], weight: PreparedWeight, inputs: Mapping[int, Tensor]) -> None:
    """Calls everything once, side by side: compilers take longer than all that is measured afterwards."""

    def call(choice: Choice) -> None:
        with suppress(Exception):  # what fails now fails again when it is timed, and is told then
            (linear,) = _own(choice, weight, num=1).linears
            for m, x in inputs.items():
                if choice.is_for(m):
                    linear(x)

    if weight.device.type == "cuda":
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(call, ours))
        torch.cuda.synchronize(weight.device)


def _chosen(op: Op, kernel: Choice, facts: Device, n: int, k: int, m: int) -> Kernel:
    return kernel_for(op, facts, kernel.layout or Layout.ROW_MAJOR, n, k, m)


def _own(choice: Choice, weight: PreparedWeight, num: int | None = None) -> Contender:
    """A kernel of ours on `num` copies of the weight in its layout: as many as it takes to find none in a cache."""
    layout = choice.layout or Layout.ROW_MAJOR
    run = launcher(choice.op, choice.kernel)

    def linear() -> Linear:
        copy = PREPARE[layout](_copied(weight))
        return lambda x: run(x, copy)

    copies = num or num_copies(weight.num_bytes)
    return Contender(choice.kernel.value, tuple(linear() for _ in range(copies)), weight.num_bytes)


def _copied(weight: PreparedWeight) -> PreparedWeight:
    return PreparedWeight(
        weight.layout,
        weight.packed.clone(),
        weight.block_scale.clone(),
        weight.global_scale,
        weight.shape,
        weight.format,
        weight.dtype,
    )


def _time(contender: Contender, x: Tensor, expected: Tensor, device: torch.device) -> tuple[float, float]:
    """Microseconds, and the error of the first copy's result."""
    y = contender.linears[0](x)
    difference = (y[:_CHECKED_M].float() - expected).abs().amax()
    error = float(difference / expected.abs().amax().clamp(min=1e-30))
    calls = [partial(linear, x) for linear in contender.linears]
    return median_us(calls, device), error


def _failed(op: Op, name: str, n: int, k: int, m: int, error: Exception) -> Row:
    message = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return Row(op.value, name, n, k, m, None, None, None, None, None, None, False, message)


def table_rows(rows: Sequence[Row]) -> tuple[TableRow, ...]:
    """What the dispatch can use of them: the times of the kernels that it chooses from."""
    names = {kernel.value: kernel for kernel in Kernel if kernel is not Kernel.TORCH}
    found: dict[tuple[str, int, int, int], dict[Kernel, float]] = {}
    for row in rows:
        if row.kernel in names and row.us is not None:
            found.setdefault((row.op, row.n, row.k, row.m), {})[names[row.kernel]] = row.us
    return tuple(TableRow(Op(op), n, k, m, times) for (op, n, k, m), times in found.items())

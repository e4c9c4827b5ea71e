"""Timing: on a GPU a CUDA graph of back-to-back launches, on the CPU single calls; medians, weights cold."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from blockscale.errors import BlockscaleError
from blockscale.kernels.device import describe

Call = Callable[[], object]
COLD_BYTES = 300_000_000  # read between two uses of the same weight: several times any cache
MAX_COPIES = 1024
REPLAYS = 10
_GRAPH_US = 1_500.0  # a graph lasts so long at least, so that its own launch counts for nothing
_WARM_SECONDS = 0.03  # clocks fall while the host prepares, and a first timing would show that
_CPU_SECONDS = 0.3


def num_copies(num_bytes: int) -> int:
    """Copies of a weight of that size that are used in turn, so that each is read from memory."""
    return min(MAX_COPIES, max(1, -(-COLD_BYTES // max(1, num_bytes))))


def median_us(calls: Sequence[Call], device: torch.device) -> float:
    """Microseconds of one of `calls`, which are made in turn; the median of several rounds."""
    return _graph_us(calls, device) if device.type == "cuda" else _cpu_us(calls)


def _graph_us(calls: Sequence[Call], device: torch.device) -> float:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls[:3]:  # what is compiled or tuned at first use
                call()
            once = _seconds(lambda: [call() for call in calls], stream) * 1e6 / len(calls)
            rounds = max(1, round(_GRAPH_US / max(once, 0.5) / len(calls)))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(rounds):
                    for call in calls:
                        call()
            warm = 0.0
            while warm < _WARM_SECONDS:
                warm += _seconds(graph.replay, stream)
            times = [_seconds(graph.replay, stream) for _ in range(REPLAYS)]
        return statistics.median(times) * 1e6 / (rounds * len(calls))


def _seconds(work: Callable[[], object], stream: torch.cuda.Stream) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _cpu_us(calls: Sequence[Call]) -> float:
    return statistics.median(_cpu_seconds(calls)) * 1e6


def _cpu_seconds(calls: Sequence[Call]) -> list[float]:
    calls[0]()
    times: list[float] = []
    stop = time.perf_counter() + _CPU_SECONDS
    while len(times) < REPLAYS or time.perf_counter() < stop:
        call = calls[len(times) % len(calls)]
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that a kernel which does nothing else reads from memory."""
    if device.type == "cpu":
        x = torch.ones(COLD_BYTES // 4)
        # the best time, not the median: on a busy machine a ceiling would else lie below what is held against it
        return x.numel() * 4 / min(_cpu_seconds([x.amax]))
    import ctypes

    from blockscale.kernels.nvrtc import Program, launch, load

    facts = describe(device)
    free_bytes = torch.cuda.mem_get_info(device)[0]
    size = min(4 << 30, free_bytes // 2) // 4096 * 4096
    if size < 64 << 20:
        raise BlockscaleError(
            f"{facts.name}: {free_bytes >> 20} MiB of memory are free", hint="stop what else runs there"
        )
    x = torch.empty(size, dtype=torch.uint8, device=device)
    x.view(torch.int32).random_()
    out = torch.zeros(1, dtype=torch.int32, device=device)
    kernel = load(Program("read.cu", ("read_all",)), "read_all", facts.arch)

    def call() -> None:
        arguments = [x, ctypes.c_longlong(size // 16), out]
        launch(kernel, (facts.num_sms * 4, 1, 1), (512, 1, 1), arguments, device=device)

    return size / (_graph_us([call], device) * 1e-6)

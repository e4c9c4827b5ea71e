"""How fast the CPU's kernels multiply one row of activations, against memory and against llama.cpp.

    nice -n -15 python benchmarks/kernels_cpu.py [--ggml FOLDER] [--threads 2 1] [--rounds 41] [--prefill 256]

FOLDER holds libggml-cpu.so and libggml-base.so (of a llama-cpp-python built with CMAKE_ARGS=-DGGML_NATIVE=ON: lib/).
On each shape every contender passes over copies of its weight that no cache holds, all in 2 MiB pages and in an order
drawn by lot, in turn, a round after another; the median of the rounds counts, and ratios are those within a round.
llama.cpp's functions take int8 activations (Q8_0), which are quantized anew for each product, as ours are. A read of as
much memory, written in C, is the ceiling.

    ours int8, exact     bf16 activations; NVFP4, and MXFP4 where it says so
    read a copy          a read of one copy after another, threads started and awaited for each as for a product
    ggml nvfp4, q4_0     vec_dot, a row at a time
    ggml q4_0 x8         the product of eight interleaved rows, which llama.cpp takes for Q4_0 where it can

`--prefill M` times M rows as well, against torch's bf16 product with the decoded weight; then each instruction set that
the machine has on the last shape, and the activation quantizer.
"""

import argparse
import ctypes
import mmap
import statistics
import subprocess
import tempfile
import time
from ctypes import POINTER, byref, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from record import record

from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.formats.tensor import encode
from blockscale.kernels.cpu.build import find_compiler
from blockscale.kernels.cpu.library import (
    DTYPE_CODES,
    FORMAT_CODES,
    Level,
    Linear,
    best_level,
    can_run,
    level_argument,
    load,
)
from blockscale.kernels.cpu.linear import Activations, linear, linear_int8, prepare
from blockscale.kernels.cpu.quantize import quantize_nvfp4
from blockscale.kernels.prepare import row_major

SHAPES = ((576, 576), (1536, 576), (576, 1536), (49152, 576), (4096, 4096))
COPIES_BYTES = 160 << 20
HUGE = 2 << 20
READ_AHEAD = (2048, 8192)  # bytes; whichever reads faster


class Peer(ctypes.Structure):
    """struct peer of kernels_cpu.c."""

    _fields_ = (
        ("dot", c_void_p),
        ("many", c_void_p),
        ("quantize", c_void_p),
        ("weight", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("row_bytes", c_int64),
        ("x", c_void_p),
        ("quantized", c_void_p),
        ("y", c_void_p),
    )


@dataclass(frozen=True)
class PeerKind:
    """`block`: a block of weights of it as bytes, `values` of them."""

    dot: str
    many: str
    block: bytes
    values: int


PEERS = {
    "ggml nvfp4": PeerKind("ggml_vec_dot_nvfp4_q8_0", "", bytes([0x38] * 4 + [0x5A] * 32), 64),
    "ggml q4_0": PeerKind("ggml_vec_dot_q4_0_q8_0", "", bytes([0, 0x3C] + [0x5A] * 16), 32),
    "ggml q4_0 x8": PeerKind("", "ggml_gemv_q4_0_8x8_q8_0", bytes([0, 0x3C] * 8 + [0x5A] * 128), 256),
}


def harness(folder: Path) -> ctypes.CDLL:
    path = folder / "kernels_cpu.so"
    source = Path(__file__).with_suffix(".c")
    flags = ["-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-w"]
    subprocess.run([*find_compiler(), *flags, str(source), "-o", str(path), "-lpthread"], check=True)
    built = ctypes.CDLL(str(path))
    for function in (built.time_calls, built.read_bandwidth, built.time_reads, built.time_peer):
        function.restype = c_double
    built.time_calls.argtypes = [c_void_p, c_void_p, c_int64, c_int64]
    built.read_bandwidth.argtypes = [c_void_p, c_int64, c_int, c_int]
    built.time_reads.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int]
    built.time_peer.argtypes = [POINTER(Peer), c_void_p, c_int64, c_int]
    return built


def huge_memory(num_bytes: int) -> torch.Tensor:
    """uint8 zeros that begin at a 2 MiB boundary, in pages of that size where the system has them."""
    area = mmap.mmap(-1, num_bytes + HUGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE
    return whole[skip : skip + num_bytes].zero_()


class Ours:
    """Calls of blockscale_linear on copies of one weight."""

    def __init__(
        self, fmt: Format, activations: Activations, n: int, k: int, threads: int, level: Level | None = None
    ) -> None:
        weight = prepare(row_major(encode(torch.randn(n, k) * 0.02, fmt)))
        size = weight.packed.numel()
        self.bytes, self.count = size, max(2, COPIES_BYTES // size)
        self.memory = huge_memory(size * self.count)
        self.memory.view(self.count, size).copy_(weight.packed.view(-1))
        self.x, self.y = torch.randn(1, k).bfloat16(), torch.empty(1, n, dtype=torch.bfloat16)
        one = {
            "x": self.x.data_ptr(),
            "y": self.y.data_ptr(),
            "n": n,
            "k": k,
            "m": 1,
            "x_stride": k,
            "global_scale": float(weight.global_scale),
            "format": FORMAT_CODES[fmt],
            "dtype": DTYPE_CODES[torch.bfloat16],
            "activation": activations.value,
            "threads": threads,
            "level": level_argument(level),
        }
        starts = [self.memory.data_ptr() + size * i for i in torch.randperm(self.count).tolist()]
        self.calls = (Linear * self.count)(*(Linear(groups=start, **one) for start in starts))
        self.function = ctypes.cast(load().blockscale_linear, c_void_p)

    def seconds(self, c: ctypes.CDLL) -> float:
        return c.time_calls(self.function, self.calls, ctypes.sizeof(Linear), self.count)


class Theirs:
    """llama.cpp's functions on copies of one weight."""

    def __init__(self, ggml: ctypes.CDLL, kind: PeerKind, n: int, k: int, threads: int) -> None:
        self.bytes, self.threads = n * k // kind.values * len(kind.block), threads
        self.count = max(2, COPIES_BYTES // self.bytes)
        self.memory = huge_memory(self.bytes * self.count)
        self.memory.view(-1, len(kind.block)).copy_(torch.frombuffer(bytearray(kind.block), dtype=torch.uint8))
        self.x, self.y = torch.randn(k), torch.empty(n)
        self.quantized = torch.empty(k // 32 * 34, dtype=torch.uint8)
        self.order = torch.randperm(self.count)

        def address(name: str) -> int | None:
            return ctypes.cast(getattr(ggml, name), c_void_p).value if name else None

        self.peer = Peer(
            dot=address(kind.dot),
            many=address(kind.many),
            quantize=address("quantize_row_q8_0"),
            weight=self.memory.data_ptr(),
            n=n,
            k=k,
            row_bytes=self.bytes // n,
            x=self.x.data_ptr(),
            quantized=self.quantized.data_ptr(),
            y=self.y.data_ptr(),
        )

    def seconds(self, c: ctypes.CDLL) -> float:
        return c.time_peer(byref(self.peer), self.order.data_ptr(), self.count, self.threads)


class Reads:
    """A plain read of each copy of a weight."""

    def __init__(self, ours: Ours, threads: int) -> None:
        self.bytes, self.memory, self.threads = ours.bytes, ours.memory, threads
        self.order = torch.randperm(ours.count)

    def seconds(self, c: ctypes.CDLL) -> float:
        memory, order = self.memory.data_ptr(), self.order.data_ptr()
        return c.time_reads(memory, self.bytes, order, len(self.order), self.threads)


def decode_rows(c: ctypes.CDLL, ggml: ctypes.CDLL | None, n: int, k: int, threads: int, rounds: int) -> list[dict]:
    """One row of x: a row of figures for each contender."""
    int8 = Ours(NVFP4, Activations.INT8, n, k, threads)
    contenders: dict[str, Ours | Theirs | Reads] = {
        "ours int8": int8,
        "ours exact": Ours(NVFP4, Activations.EXACT, n, k, threads),
        "ours int8 mxfp4": Ours(MXFP4, Activations.INT8, n, k, threads),
        "read a copy": Reads(int8, threads),
    }
    if ggml is not None:
        contenders |= {name: Theirs(ggml, kind, n, k, threads) for name, kind in PEERS.items()}
    reads: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 2):
        memory = int8.memory
        read = max(c.read_bandwidth(memory.data_ptr(), memory.numel(), threads, ahead) for ahead in READ_AHEAD)
        one = {name: contender.seconds(c) for name, contender in contenders.items()}
        if round_number >= 2:  # caches, clocks and threads are warm
            reads.append(read)
            for name, value in one.items():
                times[name].append(value)
    rows = []
    for name, contender in contenders.items():
        shares = [contender.bytes / t / read for t, read in zip(times[name], reads, strict=True)]
        row = {
            "shape": [n, k],
            "threads": threads,
            "kernel": name,
            "us": statistics.median(times[name]) * 1e6,
            "gb_per_s": contender.bytes / statistics.median(times[name]) / 1e9,
            "read_gb_per_s": statistics.median(reads) / 1e9,
            "share_of_read": statistics.median(shares),
        }
        for peer in PEERS if name.startswith("ours") else ():
            if peer in times:
                ratios = [theirs / ours for theirs, ours in zip(times[peer], times[name], strict=True)]
                row[f"speed_over_{peer.replace(' ', '_')}"] = statistics.median(ratios)
        rows.append(row)
    return rows


def level_rows(c: ctypes.CDLL, n: int, k: int, threads: int) -> list[dict]:
    """One row of x with each instruction set of this machine."""
    rows = []
    for level in filter(can_run, Level):
        for activations in (Activations.INT8, Activations.EXACT):
            contender = Ours(NVFP4, activations, n, k, threads, level)
            seconds = statistics.median(contender.seconds(c) for _ in range(7))
            row = {"shape": [n, k], "threads": threads, "level": level.value, "activations": activations.name.lower()}
            rows.append(row | {"us": seconds * 1e6, "gb_per_s": contender.bytes / seconds / 1e9})
    return rows


def quantize_row(m: int, k: int, threads: int) -> dict:
    """The activation quantizer, static global scale, against a copy by torch of the same bf16 activations."""
    x, scale = torch.randn(m, k).bfloat16(), torch.tensor(0.002)
    other = torch.empty_like(x)
    ours: list[float] = []
    copies: list[float] = []
    for _ in range(11):
        for times, call in ((ours, lambda: quantize_nvfp4(x, scale)), (copies, lambda: other.copy_(x))):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    median = statistics.median(ours)
    ratio = statistics.median(a / b for a, b in zip(ours, copies, strict=True))
    return {"shape": [m, k], "threads": threads, "us": median * 1e6, "values_per_s": m * k / median, "over_copy": ratio}


def prefill_rows(n: int, k: int, m: int, rounds: int) -> list[dict]:
    """m rows of x, against the bf16 product of torch."""
    q = encode(torch.randn(n, k) * 0.02, NVFP4, name="weight")
    weight, dense = prepare(row_major(q)), q.dequantize(torch.bfloat16)
    x = torch.randn(m, k).bfloat16()
    contenders = {
        "ours exact": lambda: linear(x, weight),
        "ours int8": lambda: linear_int8(x, weight),
        "torch bf16": lambda: x @ dense.T,
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):
        for name, call in contenders.items():
            begin = time.perf_counter()
            call()
            if round_number:
                times[name].append(time.perf_counter() - begin)
    rows = []
    for name, values in times.items():
        median = statistics.median(values)
        ratio = statistics.median(a / b for a, b in zip(times["torch bf16"], values, strict=True))
        row = {"shape": [n, k], "m": m, "threads": torch.get_num_threads(), "kernel": name, "us": median * 1e6}
        rows.append(row | {"gflop_per_s": 2e-9 * m * n * k / median, "speed_over_torch_bf16": ratio})
    return rows


def load_ggml(folder: Path) -> tuple[ctypes.CDLL, str]:
    """The library with its tables filled in, and its version."""
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    base.ggml_version.restype = ctypes.c_char_p
    ggml = ctypes.CDLL(str(folder / "libggml-cpu.so"))
    ggml.ggml_cpu_init()
    return ggml, base.ggml_version().decode()


def describe(row: dict) -> str:
    ratios = "  ".join(f"{value:.2f}x {key[11:]}" for key, value in row.items() if key.startswith("speed"))
    where = f"{row['shape']} threads {row['threads']} {row.get('kernel', '')}"
    for key, form in (
        ("us", "{:.1f} us"),
        ("gb_per_s", "{:.1f} GB/s"),
        ("share_of_read", "{:.0%}"),
        ("gflop_per_s", "{:.0f} GFLOP/s"),
    ):
        where += "  " + form.format(row[key]) if key in row else ""
    return f"{where} {row.get('level', '')} {row.get('activations', '')} {ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--prefill", type=int, default=0, metavar="M")
    parser.add_argument("--shape", action="append", metavar="N,K")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shapes = [tuple(map(int, s.split(","))) for s in arguments.shape] if arguments.shape else SHAPES
    ggml, ggml_version = load_ggml(arguments.ggml) if arguments.ggml else (None, None)
    level = best_level()
    figures: dict[str, list[dict]] = {"decode": [], "levels": [], "prefill": [], "quantize": []}

    def add(kind: str, rows: list[dict]) -> None:
        figures[kind] += rows
        for row in rows:
            print(kind, describe(row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        c = harness(Path(folder))
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for n, k in shapes:
                add("decode", decode_rows(c, ggml, n, k, threads, arguments.rounds))
            if arguments.prefill:
                for n, k in shapes:
                    add("prefill", prefill_rows(n, k, arguments.prefill, min(arguments.rounds, 9)))
                add("levels", level_rows(c, *shapes[-1], threads))
                add("quantize", [quantize_row(2048, 4096, threads)])
    if not arguments.no_record:
        print(record("kernels_cpu", {"level": level and level.value, "ggml": ggml_version, **figures}))


if __name__ == "__main__":
    main()

"""The C sources of this folder, built into one shared library by the system's compiler, once for each machine's cache.

Every instruction set is a source file (or one file twice) with flags of its own, and the library chooses among them by
what the processor says when it runs: one cache folder may serve different machines.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blockscale.errors import MissingDependencyError
from blockscale.kernels.cache import fetch_file

SOURCES = Path(__file__).parent
# No contraction: the quantizer's operations and their order are those of formats/
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Unit:
    """One object file. `macro`: tells the others that it is there; units that have one may fail to build."""

    source: str
    flags: tuple[str, ...] = ()
    macro: str = ""


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
X86_UNITS = (
    Unit("avx2.c", _AVX2, "HAVE_AVX2"),
    Unit("avx2.c", (*_AVX2, "-mavxvnni"), "HAVE_AVX2_VNNI"),
    Unit("avx512.c", _AVX512, "HAVE_AVX512"),
    Unit("avx512.c", (*_AVX512, "-mavx512vbmi", "-mavx512bf16"), "HAVE_AVX512_BF16"),
)
PLAIN_UNITS = (
    *(Unit(f"{name}.c") for name in ("portable", "linear", "prepare", "pool", "dispatch")),
    # their sums have no other file's to be equal to
    Unit("dense.c", ("-ffp-contract=fast",)),
    Unit("decode.c", ("-ffp-contract=fast",)),
    Unit("layers.c"),
)


def find_compiler() -> list[str]:
    """The command of $CC, or of the first of cc, gcc and clang; MissingDependencyError where there is none."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    missing = f"CC={named[0]}" if named else "none of " + ", ".join(COMPILERS)
    raise MissingDependencyError(
        f"no C compiler: {missing} is found", hint="install gcc or clang, or name a compiler by the variable CC"
    )


def build_library() -> Path:
    """The shared library of the CPU kernels; built unless the cache folder has it.

    MissingDependencyError without a compiler, and where the compiler fails on plain C.
    """
    if sys.byteorder != "little":
        raise MissingDependencyError("the CPU kernels read little-endian bytes only", hint="use the torch kernels")
    compiler = find_compiler()
    units = _units(platform.machine().lower())
    parts = [_version(tuple(compiler)), platform.system(), platform.machine(), *FLAGS, *map(repr, units)]
    for path in sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))):
        parts += [path.name, path.read_text(encoding="utf-8")]

    def build(target: Path) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="blockscale-build-") as folder:
                _build(compiler, units, Path(folder), target)
        except OSError as error:  # told apart from a folder that cannot be written
            raise MissingDependencyError(f"the C compiler {shlex.join(compiler)} does not run: {error}") from error

    return fetch_file(parts, ".so", build)


def _units(machine: str) -> tuple[Unit, ...]:
    return (*X86_UNITS, *PLAIN_UNITS) if machine in ("x86_64", "amd64") else PLAIN_UNITS


def _build(compiler: Sequence[str], units: Sequence[Unit], folder: Path, target: Path) -> None:
    optional, plain = [u for u in units if u.macro], [u for u in units if not u.macro]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = [folder / f"optional{i}.o" for i in range(len(optional))]
        failures = list(pool.map(lambda unit, out: _compile(compiler, unit.flags, unit.source, out), optional, objects))
        built = [out for out, failure in zip(objects, failures, strict=True) if not failure]
        macros = [f"-D{unit.macro}" for unit, failure in zip(optional, failures, strict=True) if not failure]
        objects = [folder / f"plain{i}.o" for i in range(len(plain))]
        failures = list(pool.map(lambda unit, out: _compile(compiler, macros, unit.source, out), plain, objects))
    failure = next(filter(None, failures), "")
    if not failure:
        failure = _run(compiler, ["-shared", "-o", str(target), *map(str, built + objects), "-lpthread", "-lm"])
    if failure:
        raise MissingDependencyError(
            f"the C compiler {shlex.join(compiler)} fails: {failure}",
            hint="name a compiler that works by the variable CC (gcc 9 or clang 10 and later do)",
        )


def _compile(compiler: Sequence[str], flags: Sequence[str], source: str, out: Path) -> str:
    return _run(compiler, [*FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(out)])


def _run(compiler: Sequence[str], arguments: Sequence[str]) -> str:
    """What went wrong, empty if nothing did."""
    try:
        done = subprocess.run(
            [*compiler, *arguments], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return next((line for line in lines if "error" in line), lines[-1])


@cache
def _version(compiler: tuple[str, ...]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return shlex.join(compiler) + done.stdout

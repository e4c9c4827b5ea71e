"""Kernels compiled for a GPU that this machine need not have, and what their machine code holds.

Needs the wheels of NVRTC or Triton, cuobjdump and nvdisasm; no GPU and no driver.
"""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blockscale.kernels.nvrtc import Program, compile_program

# What Triton kernels are compiled for; CUDA kernels name their own.
TRITON_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class Compiled:
    """One kernel of a cubin.

    mnemonics     SASS instructions with their modifiers (`HMMA.16816.F32.BF16`), and how often each stands there
    registers     a thread's
    stack_bytes   a thread's local memory: what was spilled, and arrays that are indexed at run time
    shared_bytes  static; Triton's dynamic shared memory is counted here, too
    """

    name: str
    mnemonics: Counter[str]
    registers: int
    stack_bytes: int
    shared_bytes: int

    def count(self, mnemonic: str) -> int:
        """Instructions of that name, with any modifiers after those that are named: `HMMA` or `HMMA.16816`."""
        return sum(n for m, n in self.mnemonics.items() if m == mnemonic or m.startswith(mnemonic + "."))

    @property
    def num_spills(self) -> int:
        """Loads and stores of local memory."""
        return self.count("LDL") + self.count("STL")


def compile_cuda(program: Program, arch: str) -> dict[str, Compiled]:
    """Every kernel of `program` by its name expression."""
    cubin = compile_program(program, arch)
    found = read_cubin(cubin.data)
    return {name: found[symbol] for name, symbol in cubin.symbols.items()}


def compile_triton(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    arch: str,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible_by_16: tuple[str, ...] = (),
    enable_fp_fusion: bool = True,
) -> Compiled:
    """A `triton.jit` function for an architecture such as sm_90.

    signature        argument -> Triton's type: {"x": "*bf16", "m": "i32"}; constexpr arguments may be left out
    constexprs       values of the constexpr arguments
    divisible_by_16  pointers and sizes that Triton would find aligned at run time: wide loads depend on it
    enable_fp_fusion whether products and sums become fma, as the launcher says
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = list(getattr(fn, "arg_names", signature))
    full = {name: "constexpr" if name in constexprs else signature[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible_by_16}
    source = ASTSource(fn, full, {(names.index(name),): value for name, value in constexprs.items()}, attributes)
    capability = int(re.sub(r"\D", "", arch))
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
    built = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    (kernel,) = read_cubin(built.asm["cubin"]).values()
    return Compiled(
        kernel.name, kernel.mnemonics, kernel.registers, kernel.stack_bytes, kernel.shared_bytes + built.metadata.shared
    )


def read_cubin(data: bytes) -> dict[str, Compiled]:
    """Every kernel of a cubin by its symbol."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(data)
        sass, usage = _cuobjdump("-sass", file), _cuobjdump("-res-usage", file)
    resources = {
        match["name"]: match
        for match in re.finditer(
            r"Function (?P<name>[^\s:]+):\s*REG:(?P<reg>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+)", usage
        )
    }
    found = {}
    for part in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]:
        name = part.split("\n", 1)[0].strip()
        mnemonics = Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", part, re.MULTILINE))
        use = resources[name]
        found[name] = Compiled(name, mnemonics, int(use["reg"]), int(use["stack"]), int(use["shared"]))
    return found


def _cuobjdump(option: str, file: Path) -> str:
    folder = _tools()
    environment = {**os.environ, "PATH": f"{folder}:{os.environ.get('PATH', '')}"}  # it calls nvdisasm by name
    done = subprocess.run(
        [folder / "cuobjdump", option, file], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@cache
def _tools() -> Path:
    spec = find_spec("nvidia")
    assert spec is not None, "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    places = spec.submodule_search_locations or ()
    return next(p for place in places for p in Path(place).glob("cu*/bin") if (p / "cuobjdump").is_file())


def make_host_library(source: str, folder: Path, *, flags: tuple[str, ...] = ()) -> Path:
    """A shared library of C++ `source` for ctypes: device functions that are plain C++, checked on all their inputs.

    Headers of `cuda/` are found by name.
    """
    from blockscale.kernels.nvrtc import SOURCES

    code, library = folder / "host.cpp", folder / "host.so"
    code.write_text(source, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-I", SOURCES, *flags, "-o", library, code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library

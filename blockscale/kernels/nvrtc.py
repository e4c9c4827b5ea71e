"""CUDA C++ to kernels that torch's tensors go through: compiled by NVRTC when first used, kept on disk, launched on
torch's current stream.

Both NVRTC and the driver are reached through cuda.bindings, which torch's CUDA wheels bring along. Compiling needs
neither a GPU nor a driver. A source names its headers as `#include "name.cuh"`; they lie beside it and are part of the
cache's key, so that a changed header is a new kernel.
"""

import ctypes
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.errors import BlockscaleError, MissingDependencyError
from blockscale.kernels.cache import fetch
from blockscale.kernels.device import describe

SOURCES = Path(__file__).parent / "cuda"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_FLAGS = ("--std=c++17",)


@dataclass(frozen=True)
class Program:
    """What is compiled: a source of `cuda/`, and the kernels wanted from it.

    file     name of a .cu file of `cuda/`, or the path of one
    names    name expressions of the kernels, such as `linear<8, false>` or the name of an extern "C" function
    defines  -D macros, each (name, value)
    flags    further options of NVRTC
    """

    file: str | Path
    names: tuple[str, ...]
    defines: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture. `symbols`: name expression -> the symbol's name in it."""

    data: bytes
    symbols: Mapping[str, str]


@dataclass(frozen=True)
class Kernel:
    """A kernel that was loaded. `function` is the driver's handle, good on every GPU of the architecture."""

    name: str
    function: int
    _library: Any  # unloading it would take the function away


def compile_program(program: Program, arch: str) -> Cubin:
    """The cubin for `arch` (sm_86, sm_90a, sm_120a ...), from the cache where it is there."""
    source, headers = _read(program.file)
    version = ".".join(map(str, _nvrtc_version()))
    options = _options(program, arch)
    parts = ["cubin", version, *options, *program.names, source]
    for name in sorted(headers):
        parts += [name, headers[name]]
    stored = fetch(parts, ".cubin", lambda: _compile(program, source, headers, options))
    head, _, data = stored.partition(b"\n")
    return Cubin(data, json.loads(head))


@cache
def load(program: Program, name: str, arch: str, shared_bytes: int = 0) -> Kernel:
    """The kernel `name` of `program`, compiled for `arch`, with room for `shared_bytes` of dynamic shared memory."""
    driver = _driver()
    library = _library(program, arch)
    kernel = _done(driver.cuLibraryGetKernel(library, compile_program(program, arch).symbols[name].encode()), name)
    if shared_bytes > 48 << 10:  # more must be asked for
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for index in range(torch.cuda.device_count()):
            if describe(torch.device("cuda", index)).arch == arch:
                device = _done(driver.cuDeviceGet(index), name)
                _done(driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, device), name)
    return Kernel(name, int(kernel), library)


def launch(
    kernel: Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    arguments: Sequence[Any],
    *,
    device: torch.device,
    shared_bytes: int = 0,
    cluster: tuple[int, int, int] | None = None,
    is_programmatic: bool = False,
) -> None:
    """Queues `kernel` on the current stream of `device`; an empty grid queues nothing.

    arguments        ctypes values and structures, in the kernel's order; a Tensor stands for its address
    cluster          thread blocks that share their memory (sm_90 and up)
    is_programmatic  may begin before the kernel ahead of it has ended; it must then wait by griddepcontrol.wait
    """
    if 0 in grid:
        return
    values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    attributes, num_attributes = _attributes(cluster, is_programmatic)
    index = torch.cuda.current_device() if device.index is None else device.index
    # The stream's handle as torch's own launchers fetch it: a Stream object costs as much as the launch.
    stream = torch._C._cuda_getCurrentRawStream(index)
    config = _Config(*grid, *block, shared_bytes, stream, attributes, num_attributes)
    with torch.cuda.device(index) if index != torch.cuda.current_device() else nullcontext():
        result = _launcher()(ctypes.byref(config), kernel.function, pointers, None)
        if result == _INVALID_CONTEXT:  # a thread's first call may come before torch's own
            _make_current(_driver(), index)
            result = _launcher()(ctypes.byref(config), kernel.function, pointers, None)
    if result:
        _done((_driver().CUresult(result),), kernel.name)


_INVALID_CONTEXT = 201
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, with as much of its value as is used here."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def _attributes(cluster: tuple[int, int, int] | None, is_programmatic: bool) -> tuple[Any, int]:
    """The array that a launch points to, and its length."""
    found = []
    if is_programmatic:
        found.append(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_uint * 16)(1)))
    if cluster is not None:
        found.append(_Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(*cluster)))
    return (_Attribute * len(found))(*found), len(found)


@cache
def _launcher() -> Any:
    """cuLaunchKernelEx by ctypes, which costs the host less than the same call through cuda.bindings."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function


def _make_current(driver: Any, index: int) -> None:
    """The context that torch uses becomes this thread's."""
    device = _done(driver.cuDeviceGet(index), "cuDeviceGet")
    _done(driver.cuCtxSetCurrent(_done(driver.cuDevicePrimaryCtxRetain(device), "context")), "context")


def _read(file: str | Path) -> tuple[str, dict[str, str]]:
    """The source, and every header it includes by a name in quotes, at any depth."""
    path = SOURCES / file  # an absolute path stays itself
    source = path.read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    waiting = _INCLUDE.findall(source)
    while waiting:
        name = waiting.pop()
        if name not in headers:
            headers[name] = (path.parent / name).read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(headers[name])
    return source, headers


def _options(program: Program, arch: str) -> list[str]:
    defines = [f"-D{name}={value}" for name, value in program.defines]
    return [f"--gpu-architecture={arch}", *_FLAGS, *defines, *program.flags]


def _compile(program: Program, source: str, headers: Mapping[str, str], options: Sequence[str]) -> bytes:
    """A line of JSON (name expression -> symbol), then the cubin."""
    nvrtc = _nvrtc()
    file = Path(program.file).name
    names, texts = list(headers), [headers[name].encode() for name in headers]
    made = nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), len(names), texts, [n.encode() for n in names])
    handle = _done(made, file)
    try:
        for name in program.names:
            _done(nvrtc.nvrtcAddNameExpression(handle, name.encode()), file)
        # The folder of CUDA's own headers differs between machines and changes nothing about the kernel.
        arguments = [o.encode() for o in (*options, *(f"--include-path={p}" for p in _cuda_headers()))]
        (result,) = nvrtc.nvrtcCompileProgram(handle, len(arguments), arguments)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            wanted = f"{file} does not compile, {options[0].removeprefix('--gpu-architecture=')}"
            raise BlockscaleError(f"{wanted}: {_log(nvrtc, handle)}", hint="please report it")
        symbols = {
            name: _done(nvrtc.nvrtcGetLoweredName(handle, name.encode()), file).decode() for name in program.names
        }
        cubin = bytearray(_done(nvrtc.nvrtcGetCUBINSize(handle), file))
        _done(nvrtc.nvrtcGetCUBIN(handle, cubin), file)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return json.dumps(symbols).encode() + b"\n" + bytes(cubin)


def _log(nvrtc: Any, handle: Any) -> str:
    text = bytearray(_done(nvrtc.nvrtcGetProgramLogSize(handle), "log"))
    _done(nvrtc.nvrtcGetProgramLog(handle, text), "log")
    return text.decode(errors="replace").strip("\x00\n ")


@cache
def _library(program: Program, arch: str) -> Any:
    driver = _driver()
    torch.cuda.init()
    data = compile_program(program, arch).data
    return _done(driver.cuLibraryLoadData(data, [], [], 0, [], [], 0), f"{program.file} ({arch})")


def _done(result: tuple[Any, ...], what: str) -> Any:
    """The value of a call of cuda.bindings. BlockscaleError names what failed and the code."""
    code, *values = result
    if int(code) != 0:
        hint = "the GPU has not enough memory left" if "OUT_OF_MEMORY" in code.name else ""
        raise BlockscaleError(f"{what}: {code.name}", hint=hint)
    return values[0] if values else None


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(f"NVRTC cannot be loaded: {error}", hint=_INSTALL) from error
    return nvrtc


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver

        driver.cuDriverGetVersion()
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(f"the CUDA driver cannot be loaded: {error}", hint=_INSTALL) from error
    return driver


_INSTALL = "torch built for CUDA brings both; or: pip install 'blockscale[kernels]'"


def _nvrtc_version() -> tuple[int, int]:
    code, major, minor = _nvrtc().nvrtcVersion()
    return _done((code, (major, minor)), "nvrtcVersion")


@cache
def _cuda_headers() -> tuple[Path, ...]:
    """Where cuda_bf16.h and its like lie: in the wheel of the CUDA runtime, or an installed toolkit."""
    spec = find_spec("nvidia")
    wheels = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    folders = [include for wheel in wheels for include in (*wheel.glob("cu*/include"), wheel / "cuda_runtime/include")]
    folders.append(Path("/usr/local/cuda/include"))
    found = next((folder for folder in folders if (folder / "cuda_bf16.h").is_file()), None)
    return (found,) if found is not None else ()

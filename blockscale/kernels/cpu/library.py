"""The functions of the shared library for Python, and what is said once where it cannot be had."""

import ctypes
import warnings
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from enum import Enum
from functools import cache

import torch

from blockscale.errors import BlockscaleError, MissingDependencyError, UsageError
from blockscale.formats.spec import MXFP4, NVFP4
from blockscale.kernels.cpu.build import build_library

# The enums of kernels.h
FORMAT_CODES = {NVFP4: 0, MXFP4: 1}
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_MEMORY = -2


class Level(Enum):
    """Instruction sets that there are kernels for.

    PORTABLE     plain C
    AVX2         with FMA and F16C: Haswell, Zen and later
    AVX2_VNNI    with AVX-VNNI: Alder Lake, Zen 5 and later
    AVX512       F, BW, VL, DQ and VNNI: Cascade Lake and later
    AVX512_BF16  with VBMI and BF16: Sapphire Rapids, Zen 4 and later
    """

    PORTABLE = "portable"
    AVX2 = "avx2"
    AVX2_VNNI = "avx2_vnni"
    AVX512 = "avx512"
    AVX512_BF16 = "avx512_bf16"


class Linear(ctypes.Structure):
    """struct linear of calls.h."""

    _fields_ = (
        ("groups", c_void_p),
        ("x", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("level", c_char_p),
        ("n", c_int64),
        ("k", c_int64),
        ("m", c_int64),
        ("x_stride", c_int64),
        ("global_scale", c_float),
        ("x_global_scale", c_float),
        ("format", c_int32),
        ("dtype", c_int32),
        ("activation", c_int32),
        ("threads", c_int32),
    )


_SIGNATURES = {
    "blockscale_dense": (None, [c_void_p]),
    "blockscale_attention": (c_int64, [c_void_p]),
    "blockscale_rms_norm": (None, [c_void_p]),
    "blockscale_turn": (None, [c_void_p]),
    "blockscale_gate": (None, [c_void_p]),
    "blockscale_write_pages": (c_int64, [c_void_p]),
    "blockscale_decode_layers": (c_int64, [c_void_p]),
    "blockscale_linear": (c_int64, [POINTER(Linear)]),
    "blockscale_prepare": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32, c_void_p]),
    "blockscale_group_bytes": (c_int64, [c_int32, c_int64]),
    "blockscale_quantize": (
        c_int64,
        [c_void_p, c_int64, c_int64, c_int64, c_int32, c_float, c_char_p, c_int32, c_void_p, c_void_p],
    ),
    "blockscale_amax": (
        c_int64,
        [c_void_p, c_int64, c_int64, c_int64, c_int32, c_char_p, c_int32, POINTER(c_float)],
    ),
    "blockscale_level": (c_char_p, [c_char_p]),
}


@cache
def library() -> ctypes.CDLL | None:
    """The built kernels. None, with one notice a process, where they cannot be built: plain torch serves then."""
    try:
        return load()
    except MissingDependencyError as error:
        warnings.warn(f"CPU kernels run in plain torch, slowly: {error}; {error.hint}", RuntimeWarning, stacklevel=3)
        return None


def load() -> ctypes.CDLL:
    """The built kernels; MissingDependencyError where they cannot be built or loaded."""
    path = build_library()
    try:
        built = ctypes.CDLL(str(path))
    except OSError:  # damaged on disk: once more
        with suppress(OSError):
            path.unlink()
        try:
            built = ctypes.CDLL(str(build_library()))
        except OSError as error:
            raise MissingDependencyError(
                f"the built kernels cannot be loaded: {error}",
                hint="set BLOCKSCALE_CACHE to a folder that programs may be run from",
            ) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(built, name)
        function.restype, function.argtypes = result, arguments
    return built


def best_level() -> Level | None:
    """What the kernels use on this processor; None without a compiler."""
    built = library()
    return None if built is None else Level(built.blockscale_level(None).decode())


def can_run(level: Level) -> bool:
    """Whether this processor has the instructions and the compiler knew them."""
    built = library()
    return built is not None and built.blockscale_level(level.value.encode()) is not None


def level_argument(level: Level | None) -> bytes | None:
    return None if level is None else level.value.encode()


def check_result(op: str, result: int, level: Level | None) -> int:
    """The count that a function returned; UsageError or BlockscaleError for a negative one."""
    if result >= 0:
        return result
    if result == _NO_MEMORY:
        raise BlockscaleError(f"{op}: out of memory for the activations' copy", hint="use a smaller batch")
    assert level is not None
    raise UsageError(
        f"{op}: this processor or the compiler of the kernels lacks {level.value}",
        hint="leave the level out: the best is taken",
    )

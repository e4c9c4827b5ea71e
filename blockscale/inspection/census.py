"""What stored scales are: a histogram of one-byte scales, and single scales read where they lie. Needs no torch."""

import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from blockscale.checkpoint.header import TensorInfo, truncated, unreadable
from blockscale.formats.spec import E4M3, ScaleType

_CHUNK_BYTES = 4 << 20
_MIN_PAIRS = 1 << 16  # below, the table of pairs costs more than it saves
_MANTISSAS = 1 << E4M3.mantissa_bits
_E8M0_BIAS = 127
NAN_BYTES = {ScaleType.E4M3: (0x7F, 0xFF), ScaleType.E8M0: (0xFF,)}


@dataclass(frozen=True)
class Census:
    """How often each byte occurs among the block scales of a tensor, or of several.

    scale   E4M3 or E8M0
    counts  256 numbers, by byte
    """

    scale: ScaleType
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def num_nan(self) -> int:
        return sum(self.counts[byte] for byte in NAN_BYTES[self.scale])

    @property
    def num_negative(self) -> int:
        """Sign bits, but for NaN; -0 counts."""
        return sum(self.counts[0x80:0xFF]) if self.scale is ScaleType.E4M3 else 0

    @property
    def num_zero(self) -> int:
        """E8M0 has no zero; its smallest, 2^-127, is what memory that was never written holds."""
        return self.counts[0] + (self.counts[0x80] if self.scale is ScaleType.E4M3 else 0)

    @cached_property
    def magnitudes(self) -> dict[float, int]:
        """Value without sign -> how often, ascending; without zeros and NaN."""
        counts = np.asarray(self.counts)
        if self.scale is ScaleType.E4M3:
            counts = counts[:0x80] + counts[0x80:]
        found = [byte for byte in np.flatnonzero(counts).tolist() if byte not in (0, *NAN_BYTES[self.scale])]
        return {scale_value(self.scale, byte): int(counts[byte]) for byte in found}

    @property
    def minimum(self) -> float | None:
        """Smallest magnitude that is not zero."""
        return next(iter(self.magnitudes), None)

    @property
    def maximum(self) -> float | None:
        """Largest magnitude."""
        return next(reversed(self.magnitudes), None)

    @property
    def subnormal_share(self) -> float:
        """Of the scales that are neither zero nor NaN: those below E4M3's smallest normal number. 0 for E8M0."""
        return share_below(self, E4M3.min_normal) if self.scale is ScaleType.E4M3 else 0.0


def share_below(census: Census, limit: float) -> float:
    """Share of magnitudes below `limit` among those that are neither zero nor NaN."""
    known = sum(census.magnitudes.values())
    return sum(n for value, n in census.magnitudes.items() if value < limit) / known if known else 0.0


def scale_value(scale: ScaleType, byte: int) -> float:
    """Value of a byte, NaN included."""
    if byte in NAN_BYTES[scale]:
        return float("nan")
    if scale is ScaleType.E8M0:
        return 2.0 ** (byte - _E8M0_BIAS)
    exponent, mantissa = divmod(byte & 0x7F, _MANTISSAS)
    fraction = mantissa / _MANTISSAS + (exponent > 0)
    return (-1.0 if byte & 0x80 else 1.0) * fraction * 2.0 ** (max(exponent, 1) - E4M3.bias)


def one_byte_scale(info: TensorInfo, scale: ScaleType) -> bool:
    """Whether a tensor can hold block scales of that type; a config may say so of anything."""
    return info.dtype in {ScaleType.E4M3: ("F8_E4M3",), ScaleType.E8M0: ("U8", "F8_E8M0")}.get(scale, ())


def take_census(info: TensorInfo, scale: ScaleType) -> Census:
    """Counts every byte of a tensor of one-byte scales. CheckpointError if the file cannot be read."""
    return Census(scale, tuple(count_bytes(info).tolist()))


def joined(censuses: Iterable[Census]) -> Census:
    """Of several tensors of one scale type; at least one."""
    censuses = list(censuses)
    return Census(censuses[0].scale, tuple(np.sum([c.counts for c in censuses], axis=0).tolist()))


def count_bytes(info: TensorInfo) -> NDArray[np.int64]:
    """[256] histogram of the stored bytes. Holes of a sparse file count as zeros and are not read.

    Two bytes are counted at a time: a table of 65536 still fits the cache, and half as many entries are widened.
    """
    counts = np.zeros(256, np.int64)
    pairs: NDArray[np.int64] | None = None
    for piece, size in pieces(info):
        if piece is None:
            counts[0] += size
        elif size < _MIN_PAIRS:
            counts += np.bincount(piece, minlength=256)
        else:
            even = size & ~1
            found = np.bincount(piece[:even].view(np.uint16), minlength=65536)
            pairs = found if pairs is None else pairs + found
            counts += np.bincount(piece[even:], minlength=256)
    if pairs is not None:
        table = pairs.reshape(256, 256)
        counts += table.sum(0) + table.sum(1)
    return counts


def pieces(info: TensorInfo, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[tuple[NDArray[np.uint8] | None, int]]:
    """A tensor's bytes in order: (uint8, size), or (None, size) for a hole. An array is overwritten by the next."""
    buffer: NDArray[np.uint8] | None = None
    position, end = info.offset, info.offset + info.num_bytes
    try:
        with info.path.open("rb", buffering=0) as file:
            descriptor = file.fileno()
            if os.fstat(descriptor).st_size < end:  # or what lies behind the end would pass for a hole
                raise truncated(info.path, f"'{info.name}' ends at byte {end}")
            while position < end:
                data = _seek(descriptor, position, end, "SEEK_DATA")
                if data > position:
                    yield None, data - position
                    position = data
                    continue
                hole = _seek(descriptor, position, end, "SEEK_HOLE")
                buffer = np.empty(min(chunk_bytes, info.num_bytes), np.uint8) if buffer is None else buffer
                view = memoryview(buffer)  # type: ignore[arg-type]
                while position < hole:
                    got = os.preadv(descriptor, [view[: min(hole - position, len(view))]], position)
                    if got == 0:
                        raise truncated(info.path, f"it ended while '{info.name}' was read")
                    yield buffer[:got], got
                    position += got
    except OSError as e:
        raise unreadable(info.path, e) from e


def read_bytes(info: TensorInfo) -> NDArray[np.uint8]:
    """The stored bytes, flat."""
    parts = [np.zeros(size, np.uint8) if piece is None else piece.copy() for piece, size in pieces(info)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def is_hole(info: TensorInfo) -> bool:
    """Whether nothing was ever written where the tensor lies; a file system that knows no holes has none."""
    return all(piece is None for piece, _ in pieces(info, 1))


def _seek(descriptor: int, position: int, end: int, whence: str) -> int:
    """Where the next data or hole begins, `end` at the latest. A file system without holes is all data."""
    is_data = whence == "SEEK_DATA"
    try:
        return min(os.lseek(descriptor, position, getattr(os, whence)), end)
    except AttributeError:
        return position if is_data else end
    except OSError as e:
        if e.errno == errno.ENXIO:  # a hole up to the end of the file
            return end
        return position if is_data else end


# ---------------------------------------------------------------- scales that stand alone

_SINGLE: dict[str, Callable[[bytes], float]] = {
    "F64": lambda raw: float(struct.unpack("<d", raw)[0]),
    "F32": lambda raw: float(struct.unpack("<f", raw)[0]),
    "F16": lambda raw: float(struct.unpack("<e", raw)[0]),
    "BF16": lambda raw: float(struct.unpack("<f", b"\0\0" + raw)[0]),  # the upper half of fp32
    "F8_E5M2": lambda raw: float(struct.unpack("<e", b"\0" + raw)[0]),  # the upper half of fp16
    "F8_E4M3": lambda raw: scale_value(ScaleType.E4M3, raw[0]),
}


def is_scalar(info: TensorInfo) -> bool:
    """Whether `read_scalars` reads it: one float, of any number of dimensions."""
    return info.dtype in _SINGLE and all(n == 1 for n in info.shape)


def read_scalars(infos: Iterable[TensorInfo]) -> dict[str, float]:
    """Name -> value of tensors of one element. Each file is opened once and read where the scalars lie."""
    by_path: dict[str, list[TensorInfo]] = {}
    for info in infos:
        by_path.setdefault(os.fspath(info.path), []).append(info)
    values = {}
    for group in by_path.values():
        path = group[0].path
        try:
            with path.open("rb", buffering=0) as file:
                descriptor = file.fileno()
                for info in sorted(group, key=lambda i: i.offset):
                    raw = os.pread(descriptor, info.num_bytes, info.offset)
                    if len(raw) != info.num_bytes:
                        raise truncated(path, f"it ended while '{info.name}' was read")
                    values[info.name] = _SINGLE[info.dtype](raw)
        except OSError as e:
            raise unreadable(path, e) from e
    return values


_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
FLOAT_DTYPES = tuple(_NUMPY)


def read_floats(info: TensorInfo) -> NDArray[np.float64]:
    """Flat values of a tensor of scales per row or tile; its dtype is one of FLOAT_DTYPES."""
    values = read_bytes(info).view(np.dtype(_NUMPY[info.dtype]))
    if info.dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        return np.asarray(values, np.float64)

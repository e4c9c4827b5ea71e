"""Faults of scales: values that no engine can use, wrong directions, and fused weights that disagree."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.header import TensorInfo
from blockscale.errors import CheckpointError
from blockscale.formats.spec import E4M3, Granularity, ScaleType
from blockscale.inspection.census import (
    FLOAT_DTYPES,
    NAN_BYTES,
    Census,
    count_bytes,
    is_hole,
    one_byte_scale,
    pieces,
    read_bytes,
    read_floats,
    read_scalars,
    share_below,
    take_census,
)
from blockscale.inspection.checks.branches import branch_value_faults
from blockscale.inspection.checks.global_scales import (
    WEIGHT,
    fused_faults,
    global_scales,
    odd_faults,
    reversed_faults,
    reversed_scales,
    stored_scales,
    value_faults,
)
from blockscale.inspection.reading import Reading

Progress = Callable[[str, int, int], None]
_MOST = 0.5
_MAGNITUDE_BITS = 0x77  # of the two codes of a byte
_CHUNK_BYTES = 1 << 20
_ZEROS = {ScaleType.E4M3: (0x00, 0x80), ScaleType.E8M0: (0x00,)}
_SUBNORMALS = (*range(0x01, 0x08), *range(0x81, 0x88))  # of E4M3

Bytes = NDArray[np.uint8]


def scale_faults(reading: Reading, *, quick: bool = False, progress: Progress | None = None) -> Iterator[Fault]:
    """BS101, BS102, BS104 to BS109, BS116 to BS118 and BS120.

    quick     only scales that stand alone are read: no block scales
    progress  (stage, bytes done, bytes in all)
    """
    try:
        yield from _source_faults(reading, quick)
        yield from _model_faults(reading, quick, progress)
    except CheckpointError as e:
        yield Fault("unreadable-file", str(reading.folder.path), str(e), e.hint)


def _model_faults(reading: Reading, quick: bool, progress: Progress | None) -> Iterator[Fault]:
    model = reading.model
    if model is None:
        return
    scales = global_scales(model, read_scalars(stored_scales(model)))
    is_explained: set[str] = set()
    if not quick:
        for scale in scales:
            linear = model.linears.get(scale.where)
            if scale.kind != WEIGHT or scale.stored != 0 or linear is None:
                continue
            found = _signs_of_zeros(linear)
            if found is not None:
                is_explained.add(scale.where)
                yield Fault("zero-weight-as-nan", scale.where, f"{scale.where}: global scale 0, {found}")
    scales = [scale for scale in scales if scale.kind != WEIGHT or scale.where not in is_explained]
    yield from value_faults(scales)

    @cache
    def largest_block_scale(module: str) -> float | None:
        census = None if quick else _census(model.linears[module])
        return None if census is None else census.maximum

    backwards = reversed_scales(scales, largest_block_scale)
    yield from reversed_faults(backwards)
    yield from odd_faults(scales, backwards)
    yield from fused_faults(scales, frozenset(backwards))
    if quick:
        return
    linears = [linear for linear in model.linears.values() if "block_scale" in linear.tensors]
    total = sum(linear.tensors["block_scale"].num_bytes for linear in linears)
    done = 0
    for linear in linears:
        if linear.name not in is_explained:
            yield from _block_faults(linear)
        if "pre_quant_scale" in linear.tensors:
            yield from _float_faults(linear.name, linear.tensors["pre_quant_scale"])
        yield from branch_value_faults(linear)
        done += linear.tensors["block_scale"].num_bytes
        if progress:
            progress("reading scales", done, total)


def _block_faults(linear: StoredLinear) -> Iterator[Fault]:
    info = linear.tensors["block_scale"]
    if linear.scheme.weight.granularity is Granularity.CHANNEL:
        yield from _float_faults(linear.name, info)
        return
    census = _census(linear)
    if census is None:
        return
    yield from _nan_faults(linear.name, info, census)
    if census.num_negative:
        what = f"{info.name}: {_share(census.num_negative, census)} have their sign bit set, first at"
        yield Fault("negative-block-scale", linear.name, f"{what} {_first(info, range(0x80, 0xFF))}")
    if census.num_zero > _MOST * census.total:
        num_lost = _num_in_use(linear, _ZEROS[census.scale])
        if num_lost > _MOST * census.total:
            what = f"{info.name}: {_share(num_lost, census)} are zero over codes that are not"
            hint = "they were never written; quantize the layer again"
            yield Fault("zero-block-scales", linear.name, what, hint, is_fatal=False)
    yield from _subnormal_faults(linear, info, census)


def _nan_faults(layer: str, info: TensorInfo, census: Census) -> Iterator[Fault]:
    if census.num_nan:
        nan = NAN_BYTES[census.scale]
        by_byte = ", ".join(f"{census.counts[byte]} x 0x{byte:02X}" for byte in nan if census.counts[byte])
        what = f"{info.name}: {_share(census.num_nan, census)} are NaN ({by_byte}), first at {_first(info, nan)}"
        yield Fault("nan-block-scale", layer, what, "the layer was exported while damaged; quantize it again")


def _subnormal_faults(linear: StoredLinear, info: TensorInfo, census: Census) -> Iterator[Fault]:
    """Most are subnormal. Where the largest leaves room, a power of two can move from the global scale into the blocks.
    Where it does not, one block dwarfs the others, which matters only if those hold anything."""
    if census.subnormal_share <= _MOST or census.maximum is None:
        return
    what = (
        f"{info.name}: {census.subnormal_share:.0%} of the block scales are E4M3 subnormals (below 2^-6; median "
        f"{_median(census):.3g}, largest {census.maximum:.3g} of {E4M3.max:.0f})"
    )
    shift = headroom(census)
    if share_below(census, E4M3.min_normal / shift) <= _MOST:
        what += f": the global scale is {shift:.0f} times as large as it need be"
        hint = "it is 1, or another weight's: it should be amax / 2688"
    elif _num_in_use(linear, _SUBNORMALS) > _MOST * census.total:
        what += ": a few blocks are so large that the others have no room"
        hint = "keep the layer in 16 bits, or find out where its outliers come from"
    else:
        return
    yield Fault("subnormal-block-scales", linear.name, what, hint, is_fatal=False)


def headroom(census: Census) -> float:
    """The largest power of two that all block scales can be multiplied by in E4M3; 1 if there is none."""
    shift = 1.0
    while census.maximum is not None and census.maximum * shift * 2 <= E4M3.max:
        shift *= 2
    return shift


def _median(census: Census) -> float:
    half, seen = sum(census.magnitudes.values()) / 2, 0
    for value, count in census.magnitudes.items():
        seen += count
        if seen >= half:
            return value
    return 0.0


def _census(linear: StoredLinear) -> Census | None:
    """None for what holds no one-byte block scales: other formats, and other dtypes, which are another rule's."""
    fmt = linear.scheme.weight
    info = linear.tensors.get("block_scale")
    if info is None or fmt.granularity is not Granularity.BLOCK or not one_byte_scale(info, fmt.scale):
        return None
    return take_census(info, fmt.scale)


def _share(count: int, census: Census) -> str:
    return f"{count} of {census.total} block scales"


def _first(info: TensorInfo, wanted: Iterable[int]) -> list[int]:
    """Position of the first of these bytes."""
    is_wanted = _byte_table(wanted)
    position = 0
    for piece, size in pieces(info):
        hits = np.flatnonzero(is_wanted[piece if piece is not None else np.zeros(1, np.uint8)])
        if hits.size:
            return [int(i) for i in np.unravel_index(position + int(hits[0]), info.shape)]
        position += size
    return []


def _byte_table(wanted: Iterable[int]) -> NDArray[np.bool_]:
    table = np.zeros(256, bool)
    table[list(wanted)] = True
    return table


# ---------------------------------------------------------------- codes, where scales alone do not tell


def _signs_of_zeros(linear: StoredLinear) -> str | None:
    """How a weight of zeros is written where nobody looks, if this one is: in Model Optimizer 0 / 0 saturates to the
    largest code; others write codes of zero."""
    scale = linear.tensors.get("block_scale")
    census = None if scale is None or is_hole(scale) else _census(linear)
    if census is None or not census.total or census.num_nan not in (0, census.total):
        return None
    magnitudes = {byte & _MAGNITUDE_BITS for byte in np.flatnonzero(count_bytes(linear.tensors["packed"])).tolist()}
    if magnitudes == {0x00}:
        return "every code zero"
    if census.num_nan and magnitudes == {_MAGNITUDE_BITS}:
        return "every block scale NaN, every code the largest: 0 / 0 throughout"
    return None


def _num_in_use(linear: StoredLinear, stored: Iterable[int]) -> int:
    """Blocks whose scale is one of the `stored` bytes and whose codes are not all zero."""
    packed, scale = linear.tensors["packed"], linear.tensors["block_scale"]
    num_bytes = linear.scheme.weight.block_size // 2
    if packed.num_bytes != num_bytes * scale.num_bytes:
        return 0  # shapes that do not fit are another rule's
    # codes of a block lie together, but in a stack [E, K, N] they are `width` bytes apart
    width = scale.shape[-1] if linear.is_transposed and len(scale.shape) == 3 else 1
    size = max(1, _CHUNK_BYTES // width) * width
    is_wanted, count = _byte_table(stored), 0
    for begin in range(0, scale.num_bytes, size):
        length = min(size, scale.num_bytes - begin)
        codes = _slice(packed, begin * num_bytes, length * num_bytes)
        if is_hole(codes):
            continue
        has_codes = _any_code(read_bytes(codes).reshape(-1, num_bytes, width))
        count += int(np.count_nonzero(has_codes & is_wanted[read_bytes(_slice(scale, begin, length))]))
    return count


def _slice(info: TensorInfo, begin: int, length: int) -> TensorInfo:
    return TensorInfo(info.name, "U8", (length,), info.path, info.offset + begin, length)


def _any_code(blocks: Bytes) -> NDArray[np.bool_]:
    """[blocks, bytes a block, width] -> flat [blocks * width]: whether any of a block's codes is not zero."""
    if blocks.shape[-1] == 1:  # eight bytes at a time
        words = blocks.reshape(-1).view(np.uint64).reshape(len(blocks), -1)
        found: NDArray[np.uint64] = np.bitwise_or.reduce(
            words & np.uint64(0x0101010101010101 * _MAGNITUDE_BITS), axis=1
        )
        return found != 0
    return (np.bitwise_or.reduce(blocks, axis=1) & _MAGNITUDE_BITS).reshape(-1) != 0


# ---------------------------------------------------------------- scales that are floats, and sources


def _float_faults(layer: str, info: TensorInfo) -> Iterator[Fault]:
    """Scales per row, column or tile. Zero is right for a row of zeros, so it is no fault here."""
    values = read_floats(info) if info.dtype in FLOAT_DTYPES else np.zeros(0)
    is_bad = ~np.isfinite(values) | (values < 0)
    if is_bad.any():
        first = int(is_bad.argmax())
        what = f"{info.name}: {int(is_bad.sum())} of {values.size} scales are NaN, infinite or negative, first"
        yield Fault("bad-global-scale", layer, f"{what} {values[first]:.4g} at {first}")


def _source_faults(reading: Reading, quick: bool) -> Iterator[Fault]:
    """Of weights in the formats that models are published in: FP8 tiles, and gpt-oss' MXFP4."""
    if reading.model is not None or quick:
        return
    for name, info in reading.kept.items():
        if name.endswith("_scale_inv"):
            yield from _float_faults(name.removesuffix(".weight_scale_inv"), info)
        elif name.endswith("_scales") and info.dtype == "U8":
            yield from _nan_faults(name.removesuffix("_scales"), info, take_census(info, ScaleType.E8M0))

"""Order of nibbles and of block scales, and distance from the 16-bit source.

With the source each linear is compared on a sample. Without it, swizzled block scales show in their own values; the
order of nibbles shows nowhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.structure import layer_number
from blockscale.errors import CheckpointError
from blockscale.inspection.census import FLOAT_DTYPES, read_floats
from blockscale.inspection.checks.scale_order import (
    can_be_swizzled,
    is_padding_swizzled,
    padded_shape,
    scale_shape,
    swizzle_evidence,
)
from blockscale.inspection.reading import Reading

if TYPE_CHECKING:  # 16-bit views need torch
    from blockscale.checkpoint.source import Source, SourceTensor
    from blockscale.inspection.checks.against_source import Closeness, Layout

Progress = Callable[[str, int, int], None]

_SURE = 8.0  # standard deviations; peers' and random checkpoints stay below 3
_ENOUGH = 3  # layers that agree
# Shares of the source's power. NVFP4 errs by 0.01, a layer that was trained on or pruned by a little more; a third is
# one of three samples that has nothing to do with the source.
_CLOSE, _EXPLAINED, _FOREIGN = 0.025, 0.2, 0.25
_CLEARLY = 2.0
# 15 dB, and 6 dB less than is usual: what rounding does to one layer and not to its like.
_NOISY, _FAR = 0.0316, 4.0
# Magnitudes: rows and columns may have been scaled before, but not by as much as a wrong global scale does.
_SAME_RATIO, _ANY_RATIO, _NEARLY = 1.15, 100.0, 10.0
_IN_ROWS = "checkpoints hold block scales row by row; engines swizzle them as they load"


def layout_faults(reading: Reading, source: Source | None = None, progress: Progress | None = None) -> Iterator[Fault]:
    """BS401 to BS403 and BS405; beside a source BS109 too.

    source    a 16-bit view of the model that the checkpoint was made from; needs torch
    progress  (stage, layers done, layers in all)
    """
    if reading.model is None:
        return
    linears = list(reading.model.linears.values())
    try:
        padded = [fault for linear in linears for fault in _padding_faults(linear)]
        yield from padded
        compared = _pairs(linears, source)
        left = [linear for linear in linears if linear.name not in compared]
        yield from _order_faults(left, len(padded), progress)
        is_folded = _folding_test(reading, source)
        noise: dict[str, float] = {}
        reported: set[str] = set()
        for done, (linear, tensor) in enumerate(compared.values(), 1):
            faults = list(_source_faults(linear, tensor, is_folded, noise))
            yield from faults
            reported |= {fault.where for fault in faults}
            if progress:
                progress("comparing with the source", done, len(compared))
        yield from _far_faults({name: linear for name, (linear, _) in compared.items()}, noise, reported)
    except CheckpointError as e:
        yield Fault("unreadable-file", str(reading.folder.path), str(e), e.hint)


def layout_notices(reading: Reading, source: Source | None = None) -> list[str]:
    """What `layout_faults` could not look at, and why."""
    if reading.model is None:
        return []
    if source is None and not any(linear.scheme.weight.element.bits == 4 for linear in reading.model.linears.values()):
        return []
    if source is None:
        return ["the order of nibbles cannot be told from a checkpoint alone: give the 16-bit model with --source"]
    linears = list(reading.model.linears.values())
    compared = _pairs(linears, source)
    left = [linear.name for linear in linears if linear.name not in compared]
    if not left:
        return []
    why = "the source has no weight of that name, or their own tensors do not fit together"
    return [f"{len(left)} of {len(linears)} linears were not compared with the source, first {left[0]}: {why}"]


# ---------------------------------------------------------------- alone


def _padding_faults(linear: StoredLinear) -> Iterator[Fault]:
    """Block scales with the shape of whole 128x4 tiles over a weight that does not fill them."""
    shape = scale_shape(linear)
    if shape is None:
        return
    info, padded = linear.tensors["block_scale"], padded_shape(*shape)
    if info.num_bytes != math.prod(padded) or padded == shape or not is_padding_swizzled(info, *shape):
        return
    what = (
        f"{info.name}: {list(info.shape)} is {list(shape)} padded to whole tiles of 128x4, and its padding lies as the "
        "tensor core's order scatters it"
    )
    yield Fault("swizzled-scales", linear.name, what, "checkpoints hold block scales row by row, without padding")


def _order_faults(linears: Sequence[StoredLinear], num_padded: int, progress: Progress | None) -> Iterator[Fault]:
    """Scales whose values are smooth in 128x4 order and not as they are stored.

    A layer too even to tell goes with the others if they agree: one writer stores all of them alike. `num_padded`:
    others that are known by their padding.
    """
    candidates = [linear for linear in linears if can_be_swizzled(linear)]
    evidence: dict[str, float] = {}
    for done, linear in enumerate(candidates, 1):
        found = swizzle_evidence(linear)
        if found is not None:
            evidence[linear.name] = found
        if progress:
            progress("looking at the order of scales", done, len(candidates))
    num_swizzled = num_padded + sum(value > _SURE for value in evidence.values())
    in_rows = [name for name, value in evidence.items() if value < -_SURE]
    for name, value in evidence.items():
        what = None
        if value > _SURE:
            what = f"rows and columns explain its block scales in 128x4 order, by {value:.0f} standard deviations"
        elif num_swizzled >= _ENOUGH and not in_rows and value > -_SURE / 2:
            what = f"too even to tell by itself, but {num_swizzled} other layers are in 128x4 order and none in rows"
        if what:
            yield Fault("swizzled-scales", name, f"{name}: {what}", _IN_ROWS, is_fatal=False)


# ---------------------------------------------------------------- beside the source


def _pairs(linears: Sequence[StoredLinear], source: Source | None) -> dict[str, tuple[StoredLinear, SourceTensor]]:
    """Linears that the source has a weight for, under the same name."""
    if source is None:
        return {}
    from blockscale.inspection.checks.against_source import is_comparable

    found = {}
    for linear in linears:
        tensor = source.tensors.get(f"{linear.name}.weight", source.tensors.get(linear.name))
        if tensor is not None and is_comparable(linear):
            found[linear.name] = (linear, tensor)
    return found


def _source_faults(
    linear: StoredLinear, tensor: SourceTensor, is_folded: Callable[[str], bool], noise: dict[str, float]
) -> Iterator[Fault]:
    """`noise`: gets the layer's, as a share of the source's power."""
    from blockscale.inspection.checks.against_source import (
        AS_STORED,
        closeness,
        decibels,
        errors_by_layout,
        stored_shape,
    )

    if tensor.shape != stored_shape(linear):
        what = f"{linear.name}: it stands for {list(stored_shape(linear))}, the source has {list(tensor.shape)}"
        yield _differs(linear.name, what, "is this the model that it was made from?")
        return
    found = closeness(linear, tensor)
    if found is None:
        return
    noise[linear.name] = found.error
    if found.error < _CLOSE:
        return
    errors = errors_by_layout(linear, tensor)
    stored, least = errors[AS_STORED], min(errors.values())
    noise[linear.name] = stored
    if least < _EXPLAINED and stored > _CLEARLY * least:
        yield from _layout_fault(linear.name, errors)
    elif stored > _FOREIGN:
        what = (
            f"{linear.name}: its correlation with the source is {found.correlation:.2f}, signal to noise "
            f"{decibels(found.error):.1f} dB, and {decibels(least):.1f} dB in the layout that fits best"
        )
        yield _differs(linear.name, what, "another model's weights, another order of rows, or a rotation")
    else:
        is_one_factor = found.least < stored + _CLOSE / 2
        yield from _magnitude_fault(linear, found, _SAME_RATIO if is_one_factor else _ANY_RATIO, is_folded)


def _layout_fault(name: str, errors: Mapping[Layout, float]) -> Iterator[Fault]:
    """Of the simplest layout that is nearly as good as any."""
    from blockscale.inspection.checks.against_source import AS_STORED, decibels

    layout = next(layout for layout, error in errors.items() if error <= 1.5 * min(errors.values()))
    fit = f"{decibels(errors[layout]):.1f} dB, as they are stored {decibels(errors[AS_STORED]):.1f} dB"
    if layout.is_swapped:
        what = f"{name}: codes fit the source with the two of each byte swapped: signal to noise {fit}"
        yield Fault("swapped-nibbles", name, what, "the even element belongs in the low nibble", is_fatal=False)
    if layout.is_swizzled:
        what = f"{name}: block scales fit the source in the tensor core's 128x4 order: signal to noise {fit}"
        yield Fault("swizzled-scales", name, what, _IN_ROWS, is_fatal=False)


def _magnitude_fault(
    linear: StoredLinear, found: Closeness, limit: float, is_folded: Callable[[str], bool]
) -> Iterator[Fault]:
    """The values have the source's pattern. Their magnitude may be up to `limit` times apart, and more if a norm took
    the rest."""
    name = linear.name
    apart = max(found.ratio, 1 / found.ratio) if found.ratio > 0 else math.inf
    if apart <= limit or (apart <= _ANY_RATIO and is_folded(name)):
        return
    if found.ratio <= 0:
        yield _differs(name, f"{name}: its values are zero or have the wrong sign", "quantize the layer again")
        return
    what = f"{name}: its values are {1 / found.ratio:.4g} times the source's"
    otherwise = found.ratio * found.multiplier**2  # the ratio, were the multiplier its reciprocal
    if max(otherwise, 1 / otherwise) < min(_NEARLY, apart / 2):
        what += f", and with the reciprocal of its global scale {1 / otherwise:.3g} times"
        scale = linear.tensors.get("global_scale") or linear.tensors["block_scale"]  # FP8's only one
        hint = "it is the other dialect's direction"
        yield Fault("reversed-global-scale", name, what, hint, is_fatal=False, tensors=(scale.name,))
        return
    yield _differs(name, what, "its global scale is another weight's, or was changed without its block scales")


def _far_faults(
    linears: Mapping[str, StoredLinear], noise: Mapping[str, float], reported: Collection[str]
) -> Iterator[Fault]:
    """Layers with much more noise than those of the same leaf, or of the same format where few have the leaf."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for name, share in noise.items():
        fmt, leaf = linears[name].scheme.weight.name, name.rpartition(".")[2]
        for kind in ((fmt, leaf), (fmt, "")):
            kinds.setdefault(kind, []).append(share)
    medians = {kind: statistics.median(shares) for kind, shares in kinds.items() if len(shares) > _ENOUGH}
    for name, share in noise.items():
        if share < _NOISY or name in reported:
            continue
        fmt, leaf = linears[name].scheme.weight.name, name.rpartition(".")[2]
        usual = medians.get((fmt, leaf), medians.get((fmt, "")))
        if usual is not None and share > _FAR * usual:
            from blockscale.inspection.checks.against_source import decibels

            what = (
                f"{name}: signal to noise beside the source is {decibels(share):.1f} dB, and in the median of the "
                f"layers like it {decibels(usual):.1f} dB"
            )
            yield Fault("far-from-source", name, what, "its block scales or codes may be another's", is_fatal=False)


def _differs(name: str, what: str, hint: str) -> Fault:
    return Fault("differs-from-source", name, what, hint, is_fatal=False)


def _folding_test(reading: Reading, source: Source | None) -> Callable[[str], bool]:
    """Of a linear: whether a norm or bias of its decoder layer is not the source's."""
    vectors: dict[int, list[tuple[TensorInfo, TensorInfo]]] = {}
    tensors = {} if source is None else source.tensors
    for name, info in reading.kept.items():
        tensor = tensors.get(name)
        number = layer_number(name) if len(info.shape) == 1 else None
        if number is not None and tensor is not None and tensor.is_plain:
            vectors.setdefault(number, []).append((info, tensor.stored[0]))

    @cache
    def is_changed(number: int | None) -> bool:
        return number is not None and not all(_same_floats(*pair) for pair in vectors.get(number, ()))

    return lambda linear: is_changed(layer_number(linear))


def _same_floats(info: TensorInfo, other: TensorInfo) -> bool:
    if info.dtype not in FLOAT_DTYPES or other.dtype not in FLOAT_DTYPES:
        return True
    return info.shape == other.shape and np.array_equal(read_floats(info), read_floats(other), equal_nan=True)

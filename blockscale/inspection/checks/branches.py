"""What lies beside a weight, by its values: factors that are no numbers, channels that are not there or named twice.

Shapes and dtypes are the reader's: see `checkpoint/dialects/branches.py`.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from blockscale.checkpoint.dialects import branches
from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.header import TensorInfo
from blockscale.formats.spec import ScaleType
from blockscale.inspection.census import read_bytes, read_floats, take_census


def branch_value_faults(linear: StoredLinear) -> Iterator[Fault]:
    """BS120 of one linear. Nothing of one whose branches have the wrong shapes: that has been said."""
    shaped = branches.branch_faults(linear.name, linear.scheme, linear.shape, linear.tensors)
    if len(linear.shape) != 2 or next(shaped, None) is not None:
        return
    for role in branches.LOW_RANK_ROLES:
        if role in linear.tensors:
            yield from _factor_faults(linear, linear.tensors[role])
    if branches.has_residual(linear.tensors):
        yield from _channel_faults(linear, linear.tensors[branches.CHANNELS])
        yield from _scale_faults(linear, linear.tensors[branches.BLOCK_SCALE])


def _factor_faults(linear: StoredLinear, info: TensorInfo) -> Iterator[Fault]:
    is_bad = ~np.isfinite(read_floats(info))
    if is_bad.any():
        what = f"{info.name}: {int(is_bad.sum())} of {is_bad.size} are NaN or infinite, first at {_first(is_bad, info)}"
        yield _fault(linear, what)


def _channel_faults(linear: StoredLinear, info: TensorInfo) -> Iterator[Fault]:
    channels, num_inputs = read_bytes(info).view("<i4"), linear.shape[-1]
    is_beyond = (channels < 0) | (channels >= num_inputs)
    if is_beyond.any():
        first = int(is_beyond.argmax())
        what = f"{info.name}: {int(is_beyond.sum())} of {channels.size} channels are not among {num_inputs} inputs"
        yield _fault(linear, f"{what}, first {channels[first]} at {first}")
        return
    values, counts = np.unique(channels, return_counts=True)
    if values.size < channels.size:
        again = values[counts > 1]
        yield _fault(linear, f"{info.name}: {again.size} channels are named more than once, first {again[0]}")


def _scale_faults(linear: StoredLinear, info: TensorInfo) -> Iterator[Fault]:
    census = take_census(info, ScaleType.E4M3)
    num_bad = census.num_nan + census.num_negative
    if num_bad:
        yield _fault(linear, f"{info.name}: {num_bad} of {census.total} block scales are NaN or negative")


def _first(is_bad: NDArray[np.bool_], info: TensorInfo) -> list[int]:
    return [int(i) for i in np.unravel_index(int(is_bad.argmax()), info.shape)]


def _fault(linear: StoredLinear, what: str) -> Fault:
    return Fault(branches.RULE, linear.name, what, "the file is damaged: download it again")

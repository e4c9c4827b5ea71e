"""What lies in a folder besides good safetensors: pickle files, and tensors whose bytes were never written."""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.header import TensorInfo
from blockscale.inspection.reading import Reading

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")
_ONLY_THERE = "the weights may be nowhere else: convert it to safetensors if you trust who wrote it"
_UNITS = 512  # bytes of a block as `stat` counts them, whatever the file system has


def pickle_faults(reading: Reading) -> Iterator[Fault]:
    """BS208, by name alone: such a file is not opened."""
    is_whole = bool(reading.folder.tensors) and not any(fault.is_fatal for fault in reading.folder.faults)
    hint = "delete it: the weights are in safetensors" if is_whole else _ONLY_THERE
    for file in sorted(reading.folder.path.iterdir()):
        if file.suffix in _PICKLES and file.name not in _NO_WEIGHTS and file.is_file():
            what = f"{file.name} may be a pickle, which runs code when it is loaded"
            yield Fault("pickle-weights", file.name, what, hint, is_fatal=False)


def unwritten_faults(reading: Reading) -> Iterator[Fault]:
    """BS210, a file at a time. Only matrices, codes and block scales count: zeros are usual in what is smaller."""
    by_file: dict[Path, list[TensorInfo]] = {}
    for info in reading.folder.tensors.values():
        if info.num_bytes and len(info.shape) > 1:
            by_file.setdefault(info.path, []).append(info)
    for path, infos in by_file.items():
        lost = _in_holes(infos, _holes(path))
        if lost:
            what = (
                f"{path}: {len(lost)} of {len(infos)} matrices lie in parts of the file that were never written, first "
                f"'{lost[0].name}'"
            )
            yield Fault("unwritten-data", path.name, what, "finish the download", is_fatal=False)


def _holes(path: Path) -> list[tuple[int, int]]:
    """Begin and end of the parts of a file that have no bytes on disk; none where the file system does not say."""
    if not hasattr(os, "SEEK_HOLE"):
        return []
    holes: list[tuple[int, int]] = []
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return []
    try:
        status = os.fstat(file)
        if status.st_blocks * _UNITS >= status.st_size:
            return []
        position = 0
        while position < status.st_size:
            begin = os.lseek(file, position, os.SEEK_HOLE)
            position = _next_data(file, begin, status.st_size)
            if begin < position:
                holes.append((begin, position))
    except OSError:
        return []
    finally:
        os.close(file)
    return holes


def _next_data(file: int, position: int, size: int) -> int:
    try:
        return os.lseek(file, position, os.SEEK_DATA)
    except OSError:  # nothing but a hole is left
        return size


def _in_holes(infos: Sequence[TensorInfo], holes: Sequence[tuple[int, int]]) -> list[TensorInfo]:
    """Tensors of which at least half lies in holes."""
    if not holes:
        return []
    begins = [begin for begin, _ in holes]
    before = [0, *accumulate(end - begin for begin, end in holes)]  # bytes in holes before each one

    def in_holes_up_to(position: int) -> int:
        i = bisect_right(begins, position)
        return before[i] if i == 0 else before[i - 1] + min(position, holes[i - 1][1]) - begins[i - 1]

    return [
        info
        for info in infos
        if 2 * (in_holes_up_to(info.offset + info.num_bytes) - in_holes_up_to(info.offset)) >= info.num_bytes
    ]

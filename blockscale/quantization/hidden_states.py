"""What calibration holds between two decoder layers, on disk, so that memory holds one batch of it.

    NAME/3/0     batch 0 of the inputs of layer 3: generation 3, read while generation 4 is written
    NAME/shared/ what layers leave for later ones beside their output, by window

A file is written under another name and renamed: after a kill it is whole or not there. Reads copy; nothing is mapped,
since mapped pages count as memory. Every file is a safetensors file.
"""

import copy
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor

from blockscale.checkpoint.header import TensorInfo, header_bytes, read_header
from blockscale.checkpoint.target import disk_errors
from blockscale.checkpoint.tensors import DTYPE_NAMES, pwrite_all, read_tensor, tensor_bytes
from blockscale.errors import CheckpointError, OutputError


def write_tensors(path: Path, tensors: Sequence[Tensor]) -> None:
    """The file appears whole or not at all. Any device, and any dtype that safetensors has. OutputError if the disk is
    full."""
    named = {str(i): tensor for i, tensor in enumerate(tensors)}
    header, offsets = header_bytes({name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in named.items()})
    partial = path.with_name(f"{path.name}.partial")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb", buffering=0) as file:
            pwrite_all(file.fileno(), memoryview(header), 0)
            for name, tensor in named.items():
                pwrite_all(file.fileno(), tensor_bytes(tensor), offsets[name])
        os.replace(partial, path)


def stored_tensors(path: Path) -> list[TensorInfo]:
    """Where a file's tensors lie, in their order. CheckpointError for a file that is not whole."""
    infos = read_header(path)
    return [infos[str(i)] for i in range(len(infos))]


def read_back(info: TensorInfo) -> Tensor:
    """A tensor of its own on the CPU. OutputError if somebody changed the file meanwhile."""
    try:
        return read_tensor(info)
    except CheckpointError as e:
        raise _lost(info.path, e) from e


def _read_all(path: Path) -> list[Tensor]:
    try:
        infos = stored_tensors(path)
    except CheckpointError as e:
        raise _lost(path, e) from e
    return [read_back(info) for info in infos]


def _lost(path: Path, why: CheckpointError) -> OutputError:
    return OutputError(f"{path}: unfinished work cannot be read back: {why}", hint="start over, without --resume")


Batches = Sequence[Sequence[int]]  # numbers of the windows of each


def batch_dim(hidden: Tensor) -> int:
    """Of [B, T, H]; some models stack several of them, [S, B, T, H]."""
    return hidden.dim() - 3


@dataclass(frozen=True)
class _Part:
    """Windows of a batch, by their places in it."""

    batch: int
    places: tuple[int, ...]


class HiddenStates:
    """One stream of hidden states through the decoder, in `folder`. Batches keep their dtype and shape."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._folder = folder / name
        self._left: Mapping[int, Sequence[_Part]] = {}

    def write(self, generation: int, batch: int, hidden: Tensor) -> None:
        """[B, T, H], from any device. OutputError if the disk is full."""
        write_tensors(self._path(generation, batch), [hidden])

    def read(self, generation: int, batch: int) -> Tensor:
        """[B, T, H] on the CPU, a tensor of its own."""
        if generation not in self._left:
            (hidden,) = _read_all(self._path(generation, batch))
            return hidden
        part = self._left[generation][batch]
        (hidden,) = _read_all(self._path(generation, part.batch))
        return hidden.index_select(batch_dim(hidden), torch.tensor(part.places))

    def leaving_out(self, generation: int, written: Batches, left: Batches) -> "HiddenStates":
        """The same stream, of which a generation that holds the batches `written` is read as if it held `left`, which
        lack some windows. Nothing changes on disk: a run that is killed meanwhile finds there what it knew of."""
        places = {number: (i, place) for i, batch in enumerate(written) for place, number in enumerate(batch)}
        if (seen := self._left.get(generation)) is not None:
            places = {number: (seen[i].batch, seen[i].places[place]) for number, (i, place) in places.items()}
        other = copy.copy(self)
        other._left = {
            generation: [_Part(places[numbers[0]][0], tuple(places[n][1] for n in numbers)) for numbers in left]
        }
        return other

    def is_whole(self, generation: int, num_batches: int) -> bool:
        """Whether every batch can be read."""
        try:
            return all(len(stored_tensors(self._path(generation, batch))) == 1 for batch in range(num_batches))
        except CheckpointError:
            return False

    def keep_only(self, generation: int) -> None:
        """Removes all others: older ones, and what a killed run had begun."""
        with disk_errors(self._folder):
            for entry in self._folder.iterdir() if self._folder.is_dir() else ():
                if entry.name.isdigit() and entry.name != str(generation):
                    shutil.rmtree(entry)

    def clear(self) -> None:
        with disk_errors(self._folder):
            if self._folder.is_dir():
                shutil.rmtree(self._folder)

    def shared(self, windows: Sequence[int], device: str) -> "SharedStates":
        """What layers left for later ones, of these windows."""
        return SharedStates(self._folder / "shared", windows, device)

    def _path(self, generation: int, batch: int) -> Path:
        return self._folder / str(generation) / str(batch)


class SharedStates:
    """A mapping from a name of the model's to tensors [B, ...], which one decoder layer fills and later ones look into
    (keys and values that layers share), on disk by window: batches may lose windows on the way."""

    def __init__(self, folder: Path, windows: Sequence[int], device: str) -> None:
        self._folder, self._windows, self._device = folder, windows, device

    def __setitem__(self, name: object, tensors: tuple[Tensor, ...]) -> None:
        for i, window in enumerate(self._windows):
            write_tensors(self._path(name, window), [tensor[i] for tensor in tensors])

    def __getitem__(self, name: object) -> tuple[Tensor, ...]:
        if name not in self:
            raise KeyError(name)
        by_window = [_read_all(self._path(name, window)) for window in self._windows]
        return tuple(torch.stack(parts).to(self._device) for parts in zip(*by_window, strict=True))

    def __contains__(self, name: object) -> bool:
        return all(self._path(name, window).is_file() for window in self._windows)

    def _path(self, name: object, window: int) -> Path:
        return self._folder / quote(str(name), safe="") / str(window)

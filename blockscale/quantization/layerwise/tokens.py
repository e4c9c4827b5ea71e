"""Inputs of one site over all calibration batches: in memory up to a limit, and from there on disk."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from blockscale.quantization.hidden_states import read_back, stored_tensors, write_tensors

_CPU_LIMIT_BYTES = 128 << 20
_GPU_SHARE = 8  # of the free memory


class TokenStore:
    """Tensors [T, K], read back in the order in which they were added, on the device that they came from."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._places: list[Tensor | Path] = []
        self._free = _CPU_LIMIT_BYTES if device == "cpu" else torch.cuda.mem_get_info(device)[0] // _GPU_SHARE

    def add(self, x: Tensor) -> None:
        """OutputError if the disk is full."""
        if x.nbytes <= self._free:
            self._free -= x.nbytes
            self._places.append(x)
            return
        path = self._folder / str(len(self._places))
        write_tensors(path, [x])
        self._places.append(path)

    def __iter__(self) -> Iterator[Tensor]:
        for place in self._places:
            if isinstance(place, Tensor):
                yield place
            else:
                yield read_back(stored_tensors(place)[0]).to(self._device)

    def __len__(self) -> int:
        return len(self._places)

    def clear(self) -> None:
        for place in self._places:
            if isinstance(place, Path):
                place.unlink(missing_ok=True)
        self._places.clear()

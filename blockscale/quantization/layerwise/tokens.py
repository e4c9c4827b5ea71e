"""Inputs of one site over all calibration batches: in memory up to a limit, and from there on disk."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from blockscale.quantization.hidden_states import read_back, stored_tensors, write_tensors

_CPU_LIMIT_BYTES, _CPU_TOTAL_BYTES = 8 << 20, 64 << 20
_GPU_SHARE, _GPU_TOTAL_SHARE = 8, 2  # of the free memory: an eighth, a half


def room_bytes(device: str, num_stores: int) -> int:
    """What each of so many stores may hold in memory."""
    if device == "cpu":
        return min(_CPU_LIMIT_BYTES, _CPU_TOTAL_BYTES // num_stores)
    free: int = torch.cuda.mem_get_info(device)[0]
    return min(free // _GPU_SHARE, free // _GPU_TOTAL_SHARE // num_stores)


class TokenStore:
    """Tensors [T, K], read back in the order in which they were added, on the device that they came from. The first
    `limit_bytes` of them are held in memory."""

    def __init__(self, folder: Path, device: str, limit_bytes: int) -> None:
        self._folder, self._device = folder, device
        self._places: list[Tensor | Path] = []
        self._free = limit_bytes
        self._amax: Tensor | None = None
        self.num_tokens = 0

    def add(self, x: Tensor) -> None:
        """OutputError if the disk is full."""
        if len(x):
            amax = x.abs().amax()
            self._amax = amax if self._amax is None else torch.maximum(self._amax, amax)
            self.num_tokens += len(x)
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

    @property
    def amax(self) -> float | None:
        """The largest magnitude, None where no token came; known without reading anything back."""
        return None if self._amax is None else self._amax.item()

    def clear(self) -> None:
        for place in self._places:
            if isinstance(place, Path):
                place.unlink(missing_ok=True)
        self._places.clear()

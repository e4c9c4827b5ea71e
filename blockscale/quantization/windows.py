"""Calibration windows in batches, without those on which the model gives NaN or Inf."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from blockscale.errors import ModelError, NonFiniteError

BATCH = 8
_HINT = "the model is damaged or needs more than its stored precision"

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Windows:
    """Token windows [W, T] int64, and those that are left out: number -> what of it held NaN or Inf, as found.

    `batch_size`: windows that run together; a GPU wants more than a CPU.
    """

    ids: Tensor
    faults: Mapping[int, str] = field(default_factory=dict)
    batch_size: int = BATCH

    @property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the windows of each batch. A batch that lost some is smaller; one that lost all is gone."""
        numbers = torch.arange(len(self.ids)).split(self.batch_size)
        batches = [tuple(n for n in batch.tolist() if n not in self.faults) for batch in numbers]
        return tuple(batch for batch in batches if batch)

    @property
    def num_tokens(self) -> int:
        return (len(self.ids) - len(self.faults)) * self.ids.shape[1]

    def tokens(self, numbers: Sequence[int]) -> Tensor:
        """[B, T]"""
        return self.ids[list(numbers)]

    def without(self, faults: Mapping[int, str]) -> "Windows":
        """ModelError where more than half would be left out."""
        faults = {**self.faults, **faults}
        if 2 * len(faults) > len(self.ids):
            raise ModelError(f"{next(iter(faults.values()))} on the calibration text", hint=_HINT)
        return replace(self, faults=faults)

    @property
    def notices(self) -> tuple[str, ...]:
        if not self.faults:
            return ()
        return (
            f"{len(self.faults)} of {len(self.ids)} calibration windows are left out from where they gave NaN or Inf: "
            f"first, {next(iter(self.faults.values()))}",
        )


def not_finite(what: str) -> NonFiniteError:
    return NonFiniteError(f"{what} holds NaN or Inf", hint=_HINT)


def run_sound(numbers: Sequence[int], run: Callable[[Sequence[int]], _Result]) -> tuple[_Result | None, dict[int, str]]:
    """What `run` gives for a batch without the windows that it cannot run, and those: number -> why.

    run   takes places in the batch and raises NonFiniteError if one of these windows gives NaN or Inf

    None if no window is left. Windows are told apart by running each alone, only where the batch failed.
    """

    def attempt(places: Sequence[int]) -> tuple[_Result | None, str]:
        try:
            return run(places), ""
        except NonFiniteError as e:
            return None, str(e)

    places = range(len(numbers))
    result, why = attempt(places)
    if not why:
        return result, {}
    found = {place: attempt([place])[1] for place in places}
    sound = [place for place in places if not found[place]]
    if sound and len(sound) < len(numbers):
        result, again = attempt(sound)
        if not again:
            return result, {numbers[place]: fault for place, fault in found.items() if fault}
    return None, {number: found[place] or why for place, number in enumerate(numbers)}

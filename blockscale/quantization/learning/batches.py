"""Calibration windows in batches: most to learn from, some held back to judge."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockscale.checkpoint.structure import text_config
from blockscale.errors import ModelError
from blockscale.host.model import HostedModel
from blockscale.quantization.layerwise.capture import is_held_back
from blockscale.quantization.learning.student import run_logits

_STEP_TOKENS = {"cpu": 512, "cuda": 4096}
_MAX_LOGITS = 2**29  # at once, of one step; and of the teacher's that are kept


@dataclass(frozen=True)
class Batch:
    """Token ids [B, T], and the teacher's logits [B * T, V] where they are kept."""

    ids: Tensor
    kept_logits: Tensor | None = None

    def teacher_logits(self, teacher: HostedModel) -> Tensor:
        """[B * T, V] in the teacher's dtype, without a history."""
        if self.kept_logits is not None:
            return self.kept_logits
        with torch.no_grad():
            return run_logits(teacher, self.ids)


@dataclass(frozen=True)
class Batches:
    """`held` is empty where there is but one window, which then judges itself."""

    train: tuple[Batch, ...]
    held: tuple[Batch, ...]
    notices: tuple[str, ...] = ()


def vocabulary_size(config: Mapping[str, Any]) -> int:
    """As the config says it; 1 where it says nothing."""
    return int(text_config(config).get("vocab_size") or 1)


def step_windows(length: int, config: Mapping[str, Any], device: str) -> int:
    """How many windows of `length` tokens are learned from at once."""
    wanted = _STEP_TOKENS[torch.device(device).type] // length
    return max(1, min(wanted, _MAX_LOGITS // (length * vocabulary_size(config))))


def make_batches(windows: Tensor, size: int, teacher: HostedModel) -> Batches:
    """`size` of the windows [W, T] a batch, each from all over the texts.

    Every eighth window is held back; of these as many judge, evenly, as the teacher's logits may be kept of. ModelError
    where these are not finite.
    """
    judges = [i for i in range(len(windows)) if is_held_back(i, len(windows))]
    train = windows[[i for i in range(len(windows)) if not is_held_back(i, len(windows))]]
    count = -(-len(train) // size)
    limit = max(1, _MAX_LOGITS // (windows.shape[1] * vocabulary_size(teacher.checkpoint.folder.config)))
    step = max(1, -(-len(judges) // limit))
    held = []
    for judge in judges[::step]:
        batch = Batch(windows[judge : judge + 1])
        logits = batch.teacher_logits(teacher)
        if torch.isfinite(logits).all():
            held.append(Batch(batch.ids, logits))
    num_lost = len(judges[::step]) - len(held)
    if num_lost and not held:
        raise ModelError(
            "the 16-bit model gives NaN or Inf on the calibration text", hint="the model is damaged; see lint"
        )
    notices = (f"{num_lost} calibration windows judge nothing: the 16-bit model gives NaN or Inf on them",)
    return Batches(tuple(Batch(train[i::count]) for i in range(count)), tuple(held), notices if num_lost else ())

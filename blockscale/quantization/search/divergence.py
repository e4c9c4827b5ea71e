"""KL divergence between the 16-bit model and a choice of formats, on windows of text that nothing was fitted to."""

import math
from collections.abc import Mapping

from torch import Tensor

from blockscale.algorithms.divergence import score_tokens
from blockscale.errors import ModelError
from blockscale.quantization.search.subject import Subject

LOGITS_BYTES = 2**29  # fp32 logits of one batch
_KEPT_BYTES = 2**31  # fp32 logits of the 16-bit model that are kept between measurements, else computed again


class Measure:
    """KL(16-bit || chosen) over fixed windows [W, T]: every token but the last of each predicts the next."""

    def __init__(self, subject: Subject, windows: Tensor) -> None:
        self._subject, self._windows = subject, windows
        self._reference: list[Tensor] = []
        self.num_measured = 0

    @property
    def num_tokens(self) -> int:
        return self._windows.shape[0] * (self._windows.shape[1] - 1)

    def kl(self, chosen: Mapping[str, str]) -> float:
        """Nats a token. ModelError where logits are not finite."""
        self.num_measured += 1
        sums = []
        size = batch_size(self._subject, self._windows)
        for index, ids in enumerate(self._windows.split(size)):
            logits = self._subject.logits(ids, chosen)[:, :-1].flatten(0, 1)
            reference = self._reference_logits(index, ids)
            kl = score_tokens(logits, ids[:, 1:].flatten(), reference).kl
            assert kl is not None
            sums.append(kl.sum().item())
        mean = math.fsum(sums) / self.num_tokens
        if not math.isfinite(mean):
            raise ModelError(
                "the model gives NaN or Inf on the calibration text", hint="the model is damaged; see lint"
            )
        return mean

    def _reference_logits(self, index: int, ids: Tensor) -> Tensor:
        if index < len(self._reference):
            return self._reference[index]
        logits = self._subject.logits(ids, {})[:, :-1].flatten(0, 1)
        held = sum(kept.numel() for kept in self._reference)
        if index == len(self._reference) and 4 * (held + logits.numel()) <= _KEPT_BYTES:
            self._reference.append(logits.clone())
        return logits


def batch_size(subject: Subject, windows: Tensor) -> int:
    """Windows that run at once: their logits stay small."""
    vocabulary = subject.model.get_input_embeddings().weight.shape[0]
    return max(1, min(8, LOGITS_BYTES // (4 * vocabulary * windows.shape[1])))

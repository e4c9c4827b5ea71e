"""Runs a candidate and its reference over the windows of a text, side by side.

Logits live for one batch. What is kept is one float a token for the KL percentile and a few sums a window.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from blockscale.algorithms.divergence import TokenScores, score_tokens
from blockscale.errors import ModelError, UsageError
from blockscale.evaluation.result import TextResult
from blockscale.evaluation.statistics import exp_interval, mean_intervals
from blockscale.evaluation.windows import TokenWindows, Window

Logits = Callable[[Tensor], Tensor]  # int64 [B, T] -> float [B, T, V]

LOGITS_BYTES = 2**30  # what the fp32 logits of one batch of one model may take


def evaluate_text(
    name: str,
    token_windows: TokenWindows,
    candidate: Logits,
    reference: Logits | None = None,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
    seed: int = 0,
) -> TextResult:
    """Perplexity of `candidate` on a text and, with a `reference`, what separates the two.

    `batch_size` windows at most go through a model at once, fewer where the vocabulary is so large that their logits
    would pass 1 GiB. `progress(done, total)` counts windows. `seed` is that of the bootstrap.
    """
    windows = token_windows.windows
    if not windows or batch_size < 1:
        raise UsageError(f"nothing to evaluate: {len(windows)} windows in batches of {batch_size}")
    per_window: list[list[float]] = []  # sums of nll, nll_reference, kl, agrees
    divergences: list[Tensor] = []  # [n] a window
    limit = 1  # the first window alone shows the vocabulary
    begin = 0
    while begin < len(windows):
        batch = equal_lengths(windows, begin, limit)
        all_scores, vocabulary = run_batch(batch, candidate, reference)
        for scores in all_scores:
            columns = (scores.nll, scores.nll_reference, scores.kl, scores.agrees)
            per_window.append([column.double().sum().item() for column in columns if column is not None])
            if scores.kl is not None:
                divergences.append(scores.kl.float())
        begin += len(batch)
        limit = max(1, min(batch_size, LOGITS_BYTES // (4 * vocabulary * len(batch[0].ids))))
        if progress is not None:
            progress(begin, len(windows))

    sums = np.array(per_window, dtype=np.float64).T  # [1 or 4, W]
    sizes = np.array([w.num_scored for w in windows], dtype=np.float64)
    if reference is None:
        (nll,) = mean_intervals(sums, sizes, seed=seed)
        return TextResult(name, token_windows.num_tokens, len(windows), exp_interval(nll))
    stacked = np.concatenate((sums, sums[:1] - sums[1:2]))
    nll, nll_reference, kl, agreement, log_ratio = mean_intervals(stacked, sizes, seed=seed)
    return TextResult(
        name,
        token_windows.num_tokens,
        len(windows),
        perplexity=exp_interval(nll),
        reference_perplexity=exp_interval(nll_reference),
        perplexity_ratio=exp_interval(log_ratio),
        kl_mean=kl,
        kl_p99=float(np.quantile(torch.cat(divergences).numpy(), 0.99)),
        top1_agreement=agreement,
    )


def equal_lengths(windows: tuple[Window, ...], begin: int, limit: int) -> list[Window]:
    """The next windows, at most `limit`, that have as many ids as the first: no padding, so no mask is needed."""
    length = len(windows[begin].ids)
    end = begin + 1
    while end < min(begin + limit, len(windows)) and len(windows[end].ids) == length:
        end += 1
    return list(windows[begin:end])


def run_batch(batch: list[Window], candidate: Logits, reference: Logits | None) -> tuple[list[TokenScores], int]:
    """Scores of each window of a batch, and the size of the vocabulary."""
    ids = torch.stack([w.ids for w in batch])  # [B, T]
    logits = run_model(candidate, ids)
    logits_reference = None if reference is None else run_model(reference, ids)
    all_scores = []
    for row, window in enumerate(batch):
        span = slice(-window.num_scored - 1, -1)  # the logits at a position are about the token after it
        row_reference = None if logits_reference is None else logits_reference[row, span]
        all_scores.append(score_tokens(logits[row, span], window.ids[-window.num_scored :], row_reference))
    return all_scores, logits.shape[-1]


def run_model(logits: Logits, ids: Tensor) -> Tensor:
    """[B, T, V], checked for its shape."""
    with torch.inference_mode():
        out = logits(ids)
    if out.dim() != 3 or out.shape[:2] != ids.shape:
        raise ModelError(f"the model gives logits {list(out.shape)} for input ids {list(ids.shape)}")
    return out

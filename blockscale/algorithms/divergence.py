"""How two models' next-token distributions differ, token by token.

With u = z - max(z) the shifted logits and S = sum(exp(u)):

    nll = log S_c - u_c[target]                                                  nats
    KL(reference || candidate) = sum(exp(u_r) (u_r - u_c)) / S_r - log S_r + log S_c   nats

Exponentials and sums run in fp32, in chunks of tokens, because [T, V] copies of a 262144-token vocabulary do not fit;
the last scalars are put together in float64. The difference u_r - u_c is taken between the shifted logits, not between
log-probabilities, so equal logits give exactly 0 and small divergences are not lost in the rounding of log S.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.errors import ModelError

CHUNK_ELEMENTS = 2**24  # logits per chunk: 64 MiB in fp32, of which a handful of copies live at once


@dataclass(frozen=True)
class TokenScores:
    """Per scored token, [N] each, on the CPU. What compares with a reference is None without one."""

    nll: Tensor  # float64, nats
    nll_reference: Tensor | None  # float64, nats
    kl: Tensor | None  # float64, nats, KL(reference || candidate), never negative
    agrees: Tensor | None  # bool, both models' most likely token is the same


def shifted(logits: Tensor) -> Tensor:
    """[N, V] of any float dtype -> new fp32 [N, V] whose largest entry a row is 0."""
    fp32 = logits.float()
    return fp32 - fp32.amax(-1, keepdim=True)


def log_sum(exponentials: Tensor) -> Tensor:
    """[N, V] -> float64 [N]: log of the row sums."""
    return exponentials.sum(-1).double().log()


def target_logits(u: Tensor, targets: Tensor) -> Tensor:
    """float64 [N]: the entry of each row that `targets` names."""
    return u.gather(-1, targets.unsqueeze(-1)).squeeze(-1).double()


def chunk_scores(candidate: Tensor, targets: Tensor, reference: Tensor | None) -> list[Tensor]:
    """nll, or nll, nll_reference, kl and agrees, of one chunk: logits [n, V], targets int64 [n]."""
    u_c = shifted(candidate)
    log_s_c = log_sum(u_c.exp())
    nll = log_s_c - target_logits(u_c, targets)
    if reference is None:
        return [nll]
    u_r = shifted(reference.to(candidate.device))
    weights = u_r.exp()
    log_s_r = log_sum(weights)
    nll_reference = log_s_r - target_logits(u_r, targets)
    agrees = u_c.argmax(-1) == u_r.argmax(-1)
    # A token that the reference rules out adds nothing, even where both logits are -inf and their difference is NaN.
    difference = u_r.sub_(u_c).masked_fill_(weights == 0, 0.0)
    mean = difference.mul_(weights).sum(-1).double() / log_s_r.exp()
    return [nll, nll_reference, (mean - log_s_r + log_s_c).clamp_(min=0.0), agrees]


def score_tokens(candidate: Tensor, targets: Tensor, reference: Tensor | None = None) -> TokenScores:
    """Scores of N tokens. Logits [N, V], any float dtype and device; targets int64 [N]. NaN logits give NaN."""
    if reference is not None and reference.shape != candidate.shape:
        raise ModelError(
            f"the model gives logits {list(candidate.shape)} and its reference {list(reference.shape)}",
            hint="compare models of one vocabulary, with the same tokenizer",
        )
    num_tokens, vocabulary = candidate.shape
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    targets = targets.to(candidate.device)
    chunks = [
        chunk_scores(
            candidate[i : i + size], targets[i : i + size], None if reference is None else reference[i : i + size]
        )
        for i in range(0, num_tokens, size)
    ]
    columns = [torch.cat(parts).cpu() for parts in zip(*chunks, strict=True)]
    if reference is None:
        return TokenScores(columns[0], None, None, None)
    return TokenScores(*columns)

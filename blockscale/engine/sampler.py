"""Tokens from logits: each row by its own request's rules, all rows at once.

What a row draws follows from its logits, its request's seed and its place in the output, never from the rows beside it:
one number in (0, 1) is hashed from seed and place, and the token is found by it on the cumulated probabilities, which
are summed in float64 so that the order of the sum does not show.

A proposed token needs no other arithmetic: where the proposal is one token, rejection sampling (Leviathan et al.,
"Fast inference from transformers via speculative decoding", 2023) accepts it with its own probability and else draws
from the rest, and that is a draw from the whole distribution, compared with the proposal. See `ngram.accepted`.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.engine.sampling import Sampling
from blockscale.engine.transfer import sent

_WEIGHT_BITS = 30  # of a float32 from 0 to 1, whose order is that of its bits as an integer
_PARTS = 128  # of a row, at most
_FEW = 1024  # so many of the largest are found sooner by topk


@dataclass(frozen=True)
class Row:
    """What the sampler needs to know of one row of logits.

    seed           of the request; any whole number of 64 bits
    position       tokens of the output before this one
    prompt, output token ids so far; read where penalties are asked for, may be empty elsewhere
    end_ids        the model's end tokens, forbidden before `min_tokens`
    mask           int32 [ceil(V/32)], bit i of word j allows token 32 j + i; None allows all
    """

    sampling: Sampling
    seed: int
    position: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    end_ids: Sequence[int] = ()
    mask: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """On the logits' device; reading `tokens` waits for it.

    tokens    int64 [R]
    is_valid  bool [R]: False where logits were NaN or +Inf, or nothing was allowed; the token then means nothing
    """

    tokens: Tensor
    is_valid: Tensor


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities.

    chosen    float32 [R], of the token that was asked about
    top_ids   int64 [R, n], likeliest first, equal ones by id (which of them come in where not all do is left open)
    top       float32 [R, n]
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def sample(logits: Tensor, rows: Sequence[Row]) -> Sampled:
    """Chooses a token a row.

    logits  float32 [R, V], of the model; they are not changed
    rows    R of them
    """
    logits = _adjusted(logits, rows)
    largest, tokens = _largest(logits)
    is_valid = largest.isfinite()
    drawn = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    if not drawn:
        return Sampled(tokens, is_valid)
    picked = _ids(drawn, logits.device)
    is_all = len(drawn) == len(rows)
    chosen = [rows[i] for i in drawn]
    weights = _weights(logits if is_all else logits[picked], largest if is_all else largest[picked], chosen)
    draws = _draw(weights, chosen)
    return Sampled(draws if is_all else tokens.index_copy(0, picked, draws), is_valid)


def uniform(seed: int, position: int) -> float:
    """A number inside (0, 1), of 48 bits, that looks random and follows from seed and place."""
    text = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(text, digest_size=6, person=b"sampler").digest()
    return (int.from_bytes(digest, "little") + 0.5) * 2.0**-48


def distribution(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """float64 [R, V]: the probabilities that `sample` draws with; 1 for the token of a greedy row."""
    logits = _adjusted(logits, rows)
    probabilities = torch.zeros_like(logits, dtype=torch.float64)
    for i, row in enumerate(rows):
        if row.sampling.is_greedy:
            probabilities[i, logits[i].argmax()] = 1
        else:
            weights = _weights(logits[i : i + 1], logits[i : i + 1].amax(-1), [row])[0].double()
            probabilities[i] = weights / weights.sum()
    return probabilities


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Of the model's own distribution: pass the logits as the model gave them.

    logits   float32 [R, V]
    tokens   int64 [R], whose log-probabilities are wanted
    num_top  n, the largest that a row asks for; 0 for none
    """
    total = logits.logsumexp(-1)
    chosen = logits.gather(-1, tokens[:, None])[:, 0] - total
    if num_top == 0:
        empty = tokens.new_empty(len(tokens), 0)
        return Logprobs(chosen, empty, empty.to(chosen.dtype))
    top, ids = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    # topk leaves the order of equal ones open: by id first, then by value
    by_id = ids.argsort(-1)
    top, ids = top.gather(-1, by_id), ids.gather(-1, by_id)
    by_value = top.sort(dim=-1, descending=True, stable=True).indices
    return Logprobs(chosen, ids.gather(-1, by_value), top.gather(-1, by_value) - total[:, None])


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[R] and int64 [R]: the largest of each row and the first place of it. NaN wins, as it should."""
    if logits.device.type != "cpu":
        return _largest_of_parts(logits)
    # torch wakes its threads for this, and they spin afterwards in the way of the kernels' own
    tokens = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(-1, tokens[:, None])[:, 0], tokens


def _largest_of_parts(logits: Tensor) -> tuple[Tensor, Tensor]:
    """A GPU reads a row in one block, so that a few long rows are read faster as many short ones."""
    num_parts = math.gcd(logits.shape[-1], _PARTS)
    found, places = logits.unflatten(-1, (num_parts, -1)).max(-1)  # [R, P] each
    largest, part = found.max(-1)
    return largest, part * (logits.shape[-1] // num_parts) + places.gather(-1, part[:, None])[:, 0]


def _adjusted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """After bias, penalties, min_tokens and masks: the logits themselves where no row asks for any."""
    biased = [(i, t, bias) for i, row in enumerate(rows) for t, bias in row.sampling.logit_bias]
    penalized = [i for i, row in enumerate(rows) if row.sampling.has_penalties]
    forbidden = [(i, t) for i, row in enumerate(rows) for t in _forbidden(row)]
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    if not (biased or penalized or forbidden or masked):
        return logits
    logits = logits.clone()
    device = logits.device
    if penalized:
        logits[_ids(penalized, device)] = _penalized(logits[_ids(penalized, device)], [rows[i] for i in penalized])
    if biased:
        where = (_ids([b[0] for b in biased], device), _ids([b[1] for b in biased], device))
        logits.index_put_(where, sent([b[2] for b in biased], logits.dtype, device), accumulate=True)
    if forbidden:
        where = (_ids([f[0] for f in forbidden], device), _ids([f[1] for f in forbidden], device))
        logits[where] = -torch.inf
    if masked:
        words = torch.stack([row.mask for row in rows if row.mask is not None]).to(device)  # int32 [Rm, ceil(V/32)]
        at = _ids(masked, device)
        logits[at] = logits[at].masked_fill(~unpacked(words, logits.shape[-1]), -torch.inf)
    return logits


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """bool [R, V] from the bits of int32 [R, ceil(V/32)]."""
    bits = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> bits) & 1).bool().flatten(-2)[..., :vocab_size]


def _forbidden(row: Row) -> tuple[int, ...]:
    if row.position >= row.sampling.min_tokens:
        return ()
    return (*row.end_ids, *row.sampling.stop_token_ids)


def _penalized(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Repetition (Keskar et al., "CTRL", 2019) over prompt and output; presence and frequency over the output."""
    num_output = _counts(logits, [row.output for row in rows])
    is_seen = (num_output > 0) | (_counts(logits, [row.prompt for row in rows]) > 0)
    repetition = _column(rows, lambda s: s.repetition_penalty, logits)
    logits = torch.where(is_seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - _column(rows, lambda s: s.frequency_penalty, logits) * num_output
    return logits - _column(rows, lambda s: s.presence_penalty, logits) * (num_output > 0)


def _counts(logits: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
    """float32 [R, V]: how often each token is in each text."""
    counts = torch.zeros_like(logits)
    tokens = _ids([t for text in texts for t in text], logits.device)
    at = torch.repeat_interleave(
        torch.arange(len(texts), device=logits.device),
        _ids([len(text) for text in texts], logits.device),
        output_size=len(tokens),
    )
    return counts.index_put_((at, tokens), counts.new_ones(()), accumulate=True)


def _weights(logits: Tensor, largest: Tensor, rows: Sequence[Row]) -> Tensor:
    """float32 [R, V]: probabilities up to a factor, the likeliest 1, what was dropped 0."""
    temperature = _column(rows, lambda s: s.temperature, logits)
    weights = ((logits - largest[:, None]) / temperature).exp()
    if any(row.sampling.min_p > 0 for row in rows):
        weights = weights.where(weights >= _column(rows, lambda s: s.min_p, logits), 0)
    if any(row.sampling.top_k > 0 for row in rows):
        limits = [min(row.sampling.top_k or weights.shape[-1], weights.shape[-1]) for row in rows]
        weights = _top_k(weights, limits)
    if any(row.sampling.top_p < 1 for row in rows):
        weights = _top_p(weights, [row.sampling.top_p for row in rows])
    return weights


def _top_k(weights: Tensor, limits: Sequence[int]) -> Tensor:
    """Keeps `limits` of the heaviest in each row, of equal ones the lowest ids."""
    vocab_size = weights.shape[-1]
    ones, wanted = torch.ones_like(weights), _numbers(limits, weights.device)
    largest = max((k for k in limits if k < vocab_size), default=1)
    if largest <= _FEW:
        ranks = _ids([[min(k, largest) - 1] for k in limits], weights.device)
        lightest = weights.topk(largest, dim=-1).values.gather(-1, ranks).view(torch.int32)
        is_limited = sent([[k < vocab_size] for k in limits], torch.bool, weights.device)
        lightest = lightest.where(is_limited, 0)
    else:
        lightest = _lightest(weights, ones, wanted)
    return _kept(weights, ones, wanted, lightest)


def _top_p(weights: Tensor, shares: Sequence[float]) -> Tensor:
    """Keeps the fewest of the heaviest that hold such a share of each row, of equal ones the lowest ids."""
    is_limited = sent([[share < 1] for share in shares], torch.bool, weights.device)
    wanted = (_numbers(shares, weights.device) * weights.sum(-1, dtype=torch.float64)).where(is_limited[:, 0], 0)
    top = weights.topk(min(_FEW, weights.shape[-1]), dim=-1).values
    cumulated = top.cumsum(-1, dtype=torch.float64)
    if bool((cumulated[:, -1] < wanted).any()):  # a flat distribution: a few do not hold as much
        lightest = _lightest(weights, weights, wanted)
    else:
        places = (cumulated < wanted[:, None]).sum(-1, keepdim=True)
        lightest = top.gather(-1, places).view(torch.int32)
    return _kept(weights, weights, wanted, lightest.where(is_limited, 0))


def _lightest(weights: Tensor, amounts: Tensor, wanted: Tensor) -> Tensor:
    """int32 [R, 1], bits of the largest weight such that it and all heavier ones have `wanted` of `amounts`.

    Nothing is sorted: the bits are found one after the other, and the sums that this takes are plain reads of the row,
    which takes a quarter of the time of sorting it.

    weights, amounts  float32 [R, V], not negative; `amounts` the same for equal weights
    wanted            float64 [R]
    """
    bits = weights.view(torch.int32)
    lightest = torch.zeros(len(weights), 1, dtype=torch.int32, device=weights.device)
    for bit in reversed(range(_WEIGHT_BITS)):
        heavier = lightest | (1 << bit)
        is_enough = amounts.where(bits >= heavier, 0).sum(-1, dtype=torch.float64) >= wanted
        lightest = heavier.where(is_enough[:, None], lightest)
    return lightest


def _kept(weights: Tensor, amounts: Tensor, wanted: Tensor, lightest: Tensor) -> Tensor:
    """Weights from `lightest` on; of those equal to it, only as many of the lowest ids as it takes to have `wanted`."""
    bits = weights.view(torch.int32)
    is_heavier, is_equal = bits > lightest, bits == lightest
    missing = wanted - amounts.where(is_heavier, 0).sum(-1, dtype=torch.float64)
    each = amounts.where(is_equal, 0).amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    is_first = is_equal.cumsum(-1, dtype=torch.int32) <= (missing / each).ceil()[:, None]
    return weights.where(is_heavier | (is_equal & is_first), 0)


def _draw(weights: Tensor, rows: Sequence[Row]) -> Tensor:
    """int64 [R]. A token of weight 0 adds nothing to the sum, so that no number falls on it."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    numbers = _numbers([uniform(row.seed, row.position) for row in rows], weights.device)
    places = torch.searchsorted(cumulated, (numbers * cumulated[:, -1])[:, None], right=True)[:, 0]
    return places.clamp(max=weights.shape[-1] - 1)  # only logits that are NaN lead past the end


def _column(rows: Sequence[Row], field: Callable[[Sampling], float], like: Tensor) -> Tensor:
    """[R, 1] of a field of each row's sampling."""
    return sent([[field(row.sampling)] for row in rows], like.dtype, like.device)


def _numbers(values: Sequence[float], device: torch.device) -> Tensor:
    return sent(values, torch.float64, device)


def _ids(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return sent(values, torch.int64, device)

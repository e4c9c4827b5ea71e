"""What new tokens make of a request: its text, and whether it ends."""

from collections.abc import Sequence

from blockscale.engine.request import Event, FinishReason, Request, TokenLogprob
from blockscale.errors import BlockscaleError, EngineError


def take(request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Event:
    """Appends sampled tokens, up to the one that ends the output. `logprobs`: one a token, or none.

    The event has its finish reason; state and pages are the scheduler's to change.
    """
    is_first = request.num_output == 0
    text, num = "", 0
    reason: FinishReason | None = None
    stopped_by: str | int | None = None
    error: BlockscaleError | None = None
    for token in tokens:
        request.tokens.append(token)
        num += 1
        reason, stopped_by, is_text = _end(request, token)
        if request.structure is not None and not request.structure.accept(token):
            reason, error = FinishReason.ERROR, EngineError(f"token {token} is none that the structure allows")
            break
        if is_text and request.detokenizer is not None:
            text += request.detokenizer.push(token)
            if request.detokenizer.stopped_by is not None:
                reason, stopped_by = FinishReason.STOP, request.detokenizer.stopped_by
        if request.structure is not None and request.structure.is_finished:
            reason = FinishReason.STOP
        if reason is None and len(request.tokens) >= request.last:
            reason = FinishReason.LENGTH
        if reason is not None:
            break
    if request.ngrams is not None:
        request.ngrams.extend(tokens[:num])
    if reason is not None and request.detokenizer is not None and request.detokenizer.stopped_by is None:
        text += request.detokenizer.finish()
    return Event(
        request.id,
        tuple(tokens[:num]),
        text,
        tuple(logprobs[:num]),
        tuple(request.prompt_logprobs) if is_first else (),
        reason,
        stopped_by,
        error,
        request.usage() if reason is not None else None,
    )


def ended(request: Request, reason: FinishReason, error: BlockscaleError | None = None) -> Event:
    """The last event of a request that gets no further tokens; with the text that was held back."""
    has_text = request.detokenizer is not None and request.detokenizer.stopped_by is None
    text = request.detokenizer.finish() if request.detokenizer is not None and has_text else ""
    return Event(request.id, text=text, finish_reason=reason, error=error, usage=request.usage())


def _end(request: Request, token: int) -> tuple[FinishReason | None, int | None, bool]:
    """(reason to end, the stop token that was it, whether the token is text)."""
    sampling = request.sampling
    if token in sampling.stop_token_ids:
        return FinishReason.STOP, token, False
    if token in request.end_ids:
        return (None if sampling.ignore_eos else FinishReason.STOP), None, sampling.ignore_eos
    return None, None, True

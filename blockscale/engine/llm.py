"""Whole outputs from an engine: submit, step until all is there, collect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockscale.engine.engine import Engine
from blockscale.engine.request import FinishReason, TokenLogprob, Usage
from blockscale.engine.sampling import Sampling
from blockscale.errors import UsageError


@dataclass(frozen=True)
class Output:
    """All that a request's events said. Log-probabilities are there where they were asked for."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stopped_by: str | int | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    usage: Usage


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samplings: Sampling | Sequence[Sampling],
    write: Callable[[int, str], None] | None = None,
) -> list[Output]:
    """One output a prompt of token ids, in order; they run together. The engine must have nothing else to do.

    samplings  one for all prompts, or one a prompt
    write      gets (index of the prompt, text) as it comes

    Raises the error of the first request that fails, or what `write` raises, and then no request is left in the engine.
    """
    each = [samplings] * len(prompts) if isinstance(samplings, Sampling) else list(samplings)
    if len(each) != len(prompts):
        raise UsageError(f"{len(prompts)} prompts, {len(each)} samplings", hint="give one for all, or one a prompt")
    if engine.has_work:
        raise UsageError("the engine is at work for others", hint="use submit and step, or an engine of its own")
    outputs: list[Output | None] = [None] * len(prompts)
    indices: dict[str, int] = {}
    try:
        for i, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
            indices[engine.submit(prompt, sampling)] = i
        _run(engine, indices, outputs, write)
    except BaseException:
        for name in indices:
            engine.abort(name)
        engine.take_events()
        raise
    return [output for output in outputs if output is not None]


def _run(
    engine: Engine, indices: dict[str, int], outputs: list[Output | None], write: Callable[[int, str], None] | None
) -> None:
    tokens: list[list[int]] = [[] for _ in outputs]
    texts: list[list[str]] = [[] for _ in outputs]
    logprobs: list[list[TokenLogprob]] = [[] for _ in outputs]
    prompt_logprobs: list[tuple[TokenLogprob, ...]] = [() for _ in outputs]
    while engine.has_work:
        for event in engine.step():
            i = indices[event.request_id]
            tokens[i] += event.token_ids
            texts[i].append(event.text)
            logprobs[i] += event.logprobs
            prompt_logprobs[i] += event.prompt_logprobs
            if write is not None and event.text:
                write(i, event.text)
            if event.error is not None:
                raise event.error
            if event.finish_reason is None:
                continue
            assert event.usage is not None
            outputs[i] = Output(
                tuple(tokens[i]),
                "".join(texts[i]),
                event.finish_reason,
                event.stopped_by,
                tuple(logprobs[i]),
                prompt_logprobs[i],
                event.usage,
            )

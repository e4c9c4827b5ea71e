"""The engine: requests go in, events come out, one step at a time. One thread uses it."""

import hashlib
import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blockscale.engine.compute import Computed, compute
from blockscale.engine.detokenizer import Detokenizer
from blockscale.engine.flight import Flight, can_fly, landed, launch
from blockscale.engine.memory import choose_num_pages
from blockscale.engine.model import Model
from blockscale.engine.ngram import NgramIndex
from blockscale.engine.options import EngineOptions
from blockscale.engine.pages import PageCounts, PagePool
from blockscale.engine.parallel import ParallelModel
from blockscale.engine.pooling import take_pooled
from blockscale.engine.progress import ended, take
from blockscale.engine.request import Event, FinishReason, Request
from blockscale.engine.runner import Runner
from blockscale.engine.sampling import Sampling, check_vocabulary
from blockscale.engine.scheduler import Limits, Scheduler, Work
from blockscale.engine.structure import Grammars, Structure, make_grammars
from blockscale.engine.vocabulary import Vocabulary
from blockscale.errors import BlockscaleError, BusyError, EngineError, RankError, UsageError

# What libraries call a failure of the GPU that are not torch
_CUDA_S = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")


@dataclass(frozen=True)
class Stats:
    """Figures of now (running, waiting, pages) and since the engine was made (the others).

    num_cached_tokens  of prompts, found in the cache
    num_accepted       of the `num_drafted` proposed tokens, that the model chose too
    why_without_graphs None where graphs are used
    """

    num_running: int
    num_waiting: int
    pages: PageCounts
    page_size: int
    num_steps: int
    num_finished: int
    num_failed: int
    num_aborted: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preempted: int
    num_drafted: int
    num_accepted: int
    why_without_graphs: str | None


@dataclass
class _Counts:
    steps: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class Engine:
    """Continuous batching over a paged cache.

    Steps that only decode run ahead of their tokens, see `flight`.
    Given the same requests in the same order it does the same: what a request draws follows from its seed alone.

    context  tokens of a sequence at most, prompt and output together: a longer output ends there, as `length`
    """

    def __init__(
        self,
        model: Model,
        options: EngineOptions | None = None,
        *,
        vocabulary: Vocabulary | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """vocabulary  without one there is no text, and no stop string or structure is served
        end_ids     tokens with which the model ends an output

        EngineError where there is too little memory; it says what would fit.
        """
        self.options = options = options or EngineOptions()
        self.model = model
        self._vocabulary = vocabulary
        self._end_ids = frozenset(end_ids)
        num_pages = choose_num_pages(model, options)
        self.context = min(options.max_context or model.context, model.context, num_pages * options.page_size)
        self._runner = Runner(model, num_pages, options.page_size, use_graphs=options.use_graphs)
        limits = Limits(options.max_running, options.max_step_tokens, options.num_draft, options.use_prefix_cache)
        self._scheduler = Scheduler(PagePool(num_pages, options.page_size, model.identity), limits)
        self._requests: dict[str, Request] = {}
        self._events: list[Event] = []  # that no step brought
        self._grammars: Grammars | None = None
        self._seed = secrets.randbits(64) if options.seed is None else options.seed
        self._num_arrived = 0
        self._counts = _Counts()
        self._lost: EngineError | None = None
        asked = model.device.type == "cuda" if options.run_ahead is None else options.run_ahead
        self._is_running_ahead = asked and options.num_draft == 0 and self._runner.can_run_ahead
        self._flight: Flight | None = None  # launched, and not read yet

    @property
    def has_work(self) -> bool:
        """There are requests, or events that no step has returned yet."""
        return self._scheduler.has_work or bool(self._events)

    @property
    def lost(self) -> EngineError | None:
        """Why nothing can be computed any more: a GPU is gone, and the process with it. None while all is well."""
        return self._lost

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling | None = None, request_id: str | None = None) -> str:
        """Puts a request into the queue and returns its id.

        UsageError for one that cannot be served, BusyError where `max_waiting` are in the queue.
        """
        sampling = sampling or Sampling()
        if self._lost is not None:
            raise self._lost
        arrival = self._num_arrived
        request_id = f"request-{arrival}" if request_id is None else request_id
        tokens = _whole(prompt_ids)
        self._check(tokens, sampling, request_id)
        limit = self.options.max_waiting
        if limit is not None and len(self._scheduler.waiting) >= limit:
            raise BusyError(f"{limit} requests wait, and no more may", hint="ask again later")
        request = Request(
            request_id,
            arrival,
            tokens,
            len(tokens),
            sampling,
            self._seed_of(arrival) if sampling.seed is None else sampling.seed,
            len(tokens) if sampling.pooling else min(len(tokens) + sampling.max_tokens, self.context),
            self._end_ids,
            Detokenizer(self._vocabulary, sampling) if self._vocabulary is not None else None,
            Structure(self._grammars_of(), sampling) if sampling.is_structured else None,
            NgramIndex(tokens) if self.options.num_draft else None,
        )
        self._scheduler.add(request)
        self._requests[request_id] = request
        self._num_arrived += 1
        self._counts.prompt_tokens += len(tokens)
        return request_id

    def abort(self, request_id: str) -> bool:
        """Ends a request, whose last event comes with the next step. False where there is none of that id."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._counts.aborted += 1
        self._events.append(self._end(request, FinishReason.ABORT))
        return True

    def step(self) -> list[Event]:
        """Computes one step and returns what came of it: at most one event with tokens a request, in order of arrival.

        What the model or the memory fails at ends the requests it fails for, with an error; the others go on.
        """
        events = self.take_events()
        flight, self._flight = self._flight, None
        if flight is None or not self._live(flight.works):
            works = self._scheduler.schedule()
            if not works:
                return events
            flight = self._launch(works, None)
            if flight is None:
                return events + self._finish(works, self._compute(works))
        following = self._scheduler.ahead(flight.works)
        self._flight = self._launch(following, flight)
        return events + self._finish(flight.works, self._land(flight))

    def take_events(self) -> list[Event]:
        """Events that no step has returned yet, without a step."""
        events, self._events = self._events, []
        return events

    def fail_all(self, error: BlockscaleError) -> list[Event]:
        """Ends every request with this error."""
        return self.take_events() + [self._end(r, FinishReason.ERROR, error) for r in list(self._requests.values())]

    def stats(self) -> Stats:
        scheduler, counts = self._scheduler, self._counts
        graphs = self._runner.graphs
        return Stats(
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.pool.counts,
            scheduler.pool.page_size,
            counts.steps,
            counts.finished,
            counts.failed,
            counts.aborted,
            counts.prompt_tokens,
            counts.cached_tokens,
            counts.output_tokens,
            scheduler.num_preempted,
            counts.drafted,
            counts.accepted,
            "not asked for, or not a GPU" if graphs is None else graphs.why_without,
        )

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._scheduler.pool.forget()

    def close(self) -> None:
        """Ends the processes of a model that is divided among several devices; nothing can be computed then."""
        if isinstance(self.model, ParallelModel):
            self._lost = self._lost or EngineError("the engine is closed", hint="make another")
            self.model.close()

    def check_integrity(self) -> None:
        """EngineError unless pages and requests agree: every page free, kept or held, and held by whom it should be."""
        self._scheduler.check_integrity()
        listed = {id(r) for r in (*self._scheduler.running, *self._scheduler.waiting)}
        if listed != {id(r) for r in self._requests.values()}:
            raise EngineError("requests are lost between engine and scheduler", hint="this is a fault of the engine")

    def _check(self, prompt_ids: list[int], sampling: Sampling, request_id: str) -> None:
        if request_id in self._requests:
            raise UsageError(f"request '{request_id}' is running", hint="give every request an id of its own")
        if not prompt_ids:
            raise UsageError("the prompt is empty", hint="give at least one token")
        if len(prompt_ids) > self.context - (sampling.pooling is None):
            raise UsageError(
                f"the prompt has {len(prompt_ids)} tokens: {self.context} are all that prompt and output may have",
                hint="shorten it",
            )
        check_vocabulary(sampling, self.model.vocab_size)
        largest, smallest = max(prompt_ids), min(prompt_ids)
        if smallest < 0 or largest >= self.model.vocab_size:
            wrong = largest if smallest >= 0 else smallest
            raise UsageError(
                f"the prompt has token {wrong}, the model knows 0 to {self.model.vocab_size - 1}",
                hint="use the model's own tokenizer",
            )
        if self._vocabulary is None and (sampling.stop or sampling.is_structured):
            raise UsageError("stop strings and structures need the model's tokenizer", hint="give the engine one")

    def _grammars_of(self) -> Grammars:
        if self._grammars is None:
            assert self._vocabulary is not None
            self._grammars = make_grammars(self._vocabulary, self.model.vocab_size, sorted(self._end_ids))
        return self._grammars

    def _seed_of(self, arrival: int) -> int:
        text = (self._seed % 2**64).to_bytes(8, "little") + arrival.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"engine").digest(), "little")

    def _compute(self, works: list[Work]) -> list[Computed | Event]:
        """Each work's result, or its request's last event. A step that fails is done again, one request at a time."""
        try:
            computed: list[Computed | Event] = [*compute(self._runner, works)]
            self._runner.check()
            return computed
        except RankError as e:
            self._lost = e
            return [*self.fail_all(e)]
        except Exception as e:  # of a model anything can come, and the other requests are not to blame
            if _is_device_lost(e, self.model.device):
                self._lost = EngineError(f"the GPU failed: {_first_line(e)}", hint="start the process anew")
                return [*self.fail_all(self._lost)]
            if len(works) == 1:
                return [self._end(works[0].request, FinishReason.ERROR, _as_error(e))]
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        results: list[Computed | Event] = []
        for work in works:
            if self._lost is None:
                results += self._compute([work])
        return results

    def _live(self, works: Sequence[Work]) -> list[Work]:
        """Those whose requests have not ended since."""
        return [work for work in works if self._requests.get(work.request.id) is work.request]

    def _launch(self, works: Sequence[Work], before: Flight | None) -> Flight | None:
        """None where the step waits: it is none to run ahead of, or fails and is computed again to see for whom."""
        if not (works and self._is_running_ahead and (before is not None or can_fly(works))):
            return None
        try:
            return launch(self._runner, works, before)
        except Exception:
            return None

    def _land(self, flight: Flight) -> list[Computed | Event]:
        try:
            return [*landed(flight)]
        except Exception:
            self._flight = None  # it took its tokens from this one
            live = self._live(flight.works)
            return self._compute(live) if live else []

    def _finish(self, works: Sequence[Work], results: Sequence[Computed | Event]) -> list[Event]:
        self._counts.steps += bool(works)
        events: list[Event] = []
        for result in results:
            events += [result] if isinstance(result, Event) else self._apply(result)
        return events

    def _apply(self, computed: Computed) -> list[Event]:
        work, request = computed.work, computed.work.request
        if self._requests.get(request.id) is not request:
            return []  # it has ended: with all others, when the device was lost, or while its step ran ahead
        if not computed.is_valid:
            error = EngineError(
                "the model's numbers are not finite, or no token is allowed",
                hint="`blockscale lint` says what is wrong with a checkpoint; see logit_bias and the structure",
            )
            return [self._end(request, FinishReason.ERROR, error)]
        if request.sampling.pooling is not None:
            embedded = take_pooled(request, work, computed.pooled)
            self._scheduler.computed(work, 0)
            if embedded is None:
                return []
            self._close(request, FinishReason.STOP)
            return [embedded]
        request.prompt_logprobs += computed.prompt_logprobs
        self._counts.drafted += len(work.draft)
        if not work.is_sampled:
            self._scheduler.computed(work, 0)
            return []
        self._counts.accepted += computed.num_accepted
        event = take(request, computed.tokens, computed.logprobs)
        self._scheduler.computed(work, min(len(event.token_ids), computed.num_accepted))
        self._counts.output_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            self._close(request, event.finish_reason)
        return [event]

    def _end(self, request: Request, reason: FinishReason, error: BlockscaleError | None = None) -> Event:
        event = ended(request, reason, error)
        self._close(request, reason)
        return event

    def _close(self, request: Request, reason: FinishReason) -> None:
        self._scheduler.finish(request)
        del self._requests[request.id]
        self._counts.cached_tokens += request.num_cached or 0
        self._counts.failed += reason is FinishReason.ERROR
        self._counts.finished += reason in (FinishReason.STOP, FinishReason.LENGTH)


def _whole(prompt_ids: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt_ids]
    except TypeError:
        raise UsageError("the prompt is not a list of token ids", hint="tokenize the text first") from None


def _is_device_lost(error: Exception, device: torch.device) -> bool:
    """CUDA refuses everything from now on; out of memory is no such error. On a GPU, the GPU itself is asked."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return False
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return True
        return False
    is_cuda_s = isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in _CUDA_S)
    return isinstance(error, RuntimeError) and is_cuda_s


def _as_error(error: Exception) -> BlockscaleError:
    if isinstance(error, BlockscaleError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return EngineError(
            f"out of memory: {_first_line(error)}", hint="lower max_step_tokens or memory_share, or shorten the prompt"
        )
    return EngineError(f"the model failed: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

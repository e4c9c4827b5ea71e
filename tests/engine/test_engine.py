"""The whole engine over a model that shows any mix-up of pages: batched is what one by one is, and nothing leaks."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockscale.engine.engine import Engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.request import Event, FinishReason
from blockscale.engine.sampling import Sampling
from blockscale.engine.vocabulary import Vocabulary
from blockscale.errors import BusyError, EngineError, UsageError
from blockscale.models.batch import Batch
from engine.fake_decoder import VOCAB_SIZE, FakeModel, greedy, logits_of, running_hashes

SMALL = {"page_size": 16, "num_pages": 32, "max_running": 4, "max_step_tokens": 16, "seed": 1}
LETTERS = Vocabulary(tuple(bytes([33 + i]) for i in range(90)) + (b"",) * 7, frozenset(range(90, 97)))


def make(fails=None, context: int = 512, vocabulary: Vocabulary | None = None, end_ids=(), **options) -> Engine:
    chosen = EngineOptions(**{**SMALL, **options})
    return Engine(FakeModel(context, fails), chosen, vocabulary=vocabulary, end_ids=end_ids)


def run(engine: Engine) -> dict[str, list[Event]]:
    """Events of each request, until all is done; the books are checked after each step."""
    found: dict[str, list[Event]] = {}
    while engine.has_work:
        for event in engine.step():
            found.setdefault(event.request_id, []).append(event)
        engine.check_integrity()
    assert engine.stats().pages.held == 0
    return found


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def outputs(engine: Engine, prompts: Sequence[Sequence[int]], num: int) -> list[list[int]]:
    names = [engine.submit(prompt, Sampling(max_tokens=num)) for prompt in prompts]
    events = run(engine)
    return [tokens_of(events[name]) for name in names]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_many_at_once_are_what_one_by_one_is() -> None:
    prompts = [prompt(i, length) for i, length in enumerate((1, 5, 16, 17, 40, 3, 90))]
    assert outputs(make(), prompts, 20) == [greedy(p, 20) for p in prompts]


def test_equal_prompts_at_once_have_equal_outputs() -> None:
    assert outputs(make(max_running=8, max_step_tokens=64), [prompt(0, 21)] * 8, 30) == [greedy(prompt(0, 21), 30)] * 8


def test_a_long_output_stays_right() -> None:
    assert outputs(make(), [prompt(4, 7)], 300) == [greedy(prompt(4, 7), 300)]


def test_a_beginning_that_was_computed_is_not_computed_again() -> None:
    engine = make()
    shared = prompt(1, 48)
    outputs(engine, [shared], 4)
    engine.model.batches.clear()
    longer = [*shared, 5, 6, 7]
    assert outputs(engine, [longer], 4) == [greedy(longer, 4)]
    assert engine.model.batches[0].token_ids.tolist() == [5, 6, 7]
    assert engine.stats().num_cached_tokens == 48
    # the same prompt again: its last token is computed, for the logits after it
    engine.model.batches.clear()
    assert outputs(engine, [shared], 4) == [greedy(shared, 4)]
    assert engine.model.batches[0].token_ids.tolist() == shared[32:]
    engine.forget_prefixes()
    engine.model.batches.clear()
    outputs(engine, [longer], 1)
    assert sum(len(b.token_ids) for b in engine.model.batches) == len(longer)


def test_an_answer_is_found_again_as_part_of_the_next_prompt() -> None:
    engine = make()
    first = prompt(2, 20)
    answer = outputs(engine, [first], 30)[0]
    engine.model.batches.clear()
    conversation = [*first, *answer, 1, 2, 3]
    assert outputs(engine, [conversation], 5) == [greedy(conversation, 5)]
    assert len(engine.model.batches[0].token_ids) == len(conversation) - 48  # the last token was never computed


def test_without_the_cache_nothing_is_found() -> None:
    engine = make(use_prefix_cache=False)
    assert outputs(engine, [prompt(1, 48)], 4) == outputs(engine, [prompt(1, 48)], 4) == [greedy(prompt(1, 48), 4)]
    assert (engine.stats().num_cached_tokens, engine.stats().pages.kept) == (0, 0)


def test_preempted_requests_lose_nothing() -> None:
    prompts = [prompt(i, 15) for i in range(4)]
    engine = make(num_pages=8, num_draft=0)
    assert outputs(engine, prompts, 60) == [greedy(p, 60) for p in prompts]
    assert engine.stats().num_preempted > 0


def test_drafts_change_no_output() -> None:
    prompts = [[*prompt(i, 6) * 3] for i in range(5)]
    plain = make(num_draft=0)
    samplings = [Sampling(max_tokens=40, temperature=0.6 * (i % 2), seed=i) for i in range(5)]
    expected = []
    for engine in (plain, make(num_draft=5, num_pages=12)):
        names = [engine.submit(p, s) for p, s in zip(prompts, samplings, strict=True)]
        events = run(engine)
        expected.append([tokens_of(events[name]) for name in names])
    assert expected[0] == expected[1]
    assert engine.stats().num_drafted > 0


class Cycle(FakeModel):
    """After t comes t + 1, of seven tokens: drafts from the request's own text are always right."""

    def forward(self, batch: Batch, caches: Sequence[torch.Tensor]) -> torch.Tensor:
        super().forward(batch, caches)
        return batch.token_ids[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((hidden[:, 0] + 1) % 7, VOCAB_SIZE).float()


def test_accepted_drafts_save_steps() -> None:
    engine = Engine(Cycle(), EngineOptions(**SMALL, num_draft=4))
    assert outputs(engine, [[*range(7), *range(7)]], 50) == [[i % 7 for i in range(50)]]
    stats = engine.stats()
    assert stats.num_steps <= 1 + math.ceil(49 / 5)
    assert stats.num_accepted >= 35


def test_an_output_that_ends_within_its_draft() -> None:
    engine = Engine(Cycle(), EngineOptions(**SMALL, num_draft=4))
    engine.submit([i % 7 for i in range(13)], Sampling(max_tokens=50, stop_token_ids=(0,)), "a")
    events = run(engine)["a"]
    assert tokens_of(events) == [6, 0]
    assert (events[-1].finish_reason, events[-1].stopped_by) == (FinishReason.STOP, 0)
    assert engine.stats().pages.kept == 0, "14 tokens are computed and the output's: no full page"


def test_structures_cut_drafts_short_and_others_beside_them_go_on() -> None:
    pytest.importorskip("xgrammar")
    a, b, c = (LETTERS.pieces.index(letter) for letter in (b"A", b"B", b"C"))
    expected = None
    for num_draft in (0, 5):
        engine = make(vocabulary=LETTERS, end_ids=[95], num_draft=num_draft)
        structured = Sampling(max_tokens=40, regex="AB[AB]{3}C(AB){4}")
        plain = Sampling(max_tokens=30, ignore_eos=True)
        names = [engine.submit([a, b] * 6 + [c], structured), engine.submit([a, b] * 5, plain)]
        names.append(engine.submit([a, b, a, b], structured))
        events = run(engine)
        found = [tokens_of(events[name]) for name in names]
        text = "".join(event.text for event in events[names[0]])
        assert (len(text), text[:2], text[5:]) == (14, "AB", "CABABABAB")
        assert events[names[0]][-1].finish_reason is FinishReason.STOP
        assert found[1] == greedy([a, b] * 5, 30)
        assert expected in (None, found)
        expected = found
    assert engine.stats().num_accepted > 0


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step at which it comes
        st.sampled_from([(0, 0), (0, 16), (0, 33), (1, 20), (1, 33)]),  # a beginning that others have too
        st.integers(1, 12),  # tokens of its own
        st.integers(1, 30),  # tokens that it asks for
        st.none() | st.integers(0, 25),  # steps after which it is cancelled
    ),
    min_size=1,
    max_size=9,
)


@given(
    arrivals=ARRIVALS,
    num_pages=st.integers(3, 9),
    max_running=st.integers(1, 5),
    budget=st.integers(0, 20),
    use_prefix_cache=st.booleans(),
    num_draft=st.sampled_from([0, 3]),
)
@settings(max_examples=60, deadline=None)
def test_any_load_ends_with_the_right_outputs_and_no_page_lost(
    arrivals, num_pages: int, max_running: int, budget: int, use_prefix_cache: bool, num_draft: int
) -> None:
    """Arrivals, cancels, tiny pools, pieces, shared prefixes, drafts: what is finished is right, all else is whole."""
    engine = make(
        num_pages=num_pages,
        max_running=max_running,
        max_step_tokens=max_running + budget,
        use_prefix_cache=use_prefix_cache,
        num_draft=num_draft,
    )
    asked: dict[str, tuple[list[int], int]] = {}
    found: dict[str, list[Event]] = {}
    cancelled = set()
    step = 0
    while step <= 12 or engine.has_work:
        for i, (at, (shared, length), num_own, num, _) in enumerate(arrivals):
            tokens = [*prompt(shared, 33)[:length], *prompt(100 + i, num_own)]
            if at == step and len(tokens) < engine.context:
                engine.submit(tokens, Sampling(max_tokens=num), str(i))
                asked[str(i)] = tokens, num
        for i, (at, *_, after) in enumerate(arrivals):
            if after is not None and step == at + after and engine.abort(str(i)):
                cancelled.add(str(i))
        for event in engine.step():
            assert not _is_ended(found.get(event.request_id)), "nothing comes after the end"
            found.setdefault(event.request_id, []).append(event)
        engine.check_integrity()
        step += 1
        assert step < 2000
    assert engine.stats().pages.held == 0
    for name, (tokens, num) in asked.items():
        expected = greedy(tokens, min(num, engine.context - len(tokens)))
        got = tokens_of(found[name])
        if name in cancelled:
            assert found[name][-1].finish_reason is FinishReason.ABORT
            assert got == expected[: len(got)]
        else:
            assert got == expected
            assert found[name][-1].finish_reason is FinishReason.LENGTH


def _is_ended(events: list[Event] | None) -> bool:
    return bool(events) and events[-1].finish_reason is not None


def test_what_is_drawn_follows_from_the_seed_alone() -> None:
    def drawn(engine: Engine, seeds: Sequence[int | None]) -> list[list[int]]:
        names = [engine.submit(prompt(9, 8), Sampling(max_tokens=12, temperature=1.5, seed=seed)) for seed in seeds]
        events = run(engine)
        return [tokens_of(events[name]) for name in names]

    alone = drawn(make(), [7])[0]
    assert drawn(make(), [1, 7, None, 3, 7])[1] == alone == drawn(make(num_pages=3), [2, 7])[1]
    first, second = drawn(make(), [None, None])
    assert first != second, "without a seed, every request draws by its own"
    assert drawn(make(), [None, None]) == [first, second], "and again so where the engine's seed is the same"
    assert drawn(make(seed=2), [None])[0] != first


def test_how_outputs_end() -> None:
    out = greedy(prompt(3, 4), 30)
    at = next(i for i in range(3, 30) if out[i] not in out[:i])
    for ends, sampling, expected, stopped_by in (
        ([out[at]], Sampling(max_tokens=30), (FinishReason.STOP, at + 1), None),
        ([out[at]], Sampling(max_tokens=30, ignore_eos=True), (FinishReason.LENGTH, 30), None),
        ([], Sampling(max_tokens=30, stop_token_ids=(out[at],)), (FinishReason.STOP, at + 1), out[at]),
        ([], Sampling(max_tokens=at), (FinishReason.LENGTH, at), None),
    ):
        engine = make(end_ids=ends)
        engine.submit(prompt(3, 4), sampling, "a")
        events = run(engine)["a"]
        assert (events[-1].finish_reason, len(tokens_of(events))) == expected
        assert events[-1].stopped_by == stopped_by
        assert tokens_of(events) == out[: expected[1]]
        assert events[-1].usage is not None
        assert (events[-1].usage.prompt_tokens, events[-1].usage.output_tokens) == (4, expected[1])


def test_text_and_stop_strings() -> None:
    out = greedy(prompt(5, 4), 40)
    text = "".join(LETTERS.piece(token).decode() for token in out)
    engine = make(vocabulary=LETTERS)
    engine.submit(prompt(5, 4), Sampling(max_tokens=40), "all")
    stop = text[10:13]
    engine.submit(prompt(5, 4), Sampling(max_tokens=40, stop=("never there", stop)), "stopped")
    found = run(engine)
    assert "".join(event.text for event in found["all"]) == text
    assert "".join(event.text for event in found["stopped"]) == text[: text.index(stop)]
    last = found["stopped"][-1]
    assert (last.finish_reason, last.stopped_by) == (FinishReason.STOP, stop)


def test_aborted_text_ends_where_it_was() -> None:
    engine = make(vocabulary=LETTERS)
    engine.submit(prompt(5, 4), Sampling(max_tokens=40, stop=("\x00",)), "a")
    events = engine.step() + engine.step()
    assert engine.abort("a")
    assert not engine.abort("a")
    events += engine.step()
    assert events[-1].finish_reason is FinishReason.ABORT
    assert "".join(e.text for e in events) == "".join(LETTERS.piece(t).decode() for t in tokens_of(events))
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize("num_pages", [32, 4])
def test_logprobs_of_output_and_prompt(num_pages: int) -> None:
    """In pieces, and with a request that gives way in between."""
    engine = make(num_pages=num_pages, max_step_tokens=7)
    tokens = prompt(6, 23)
    engine.submit(prompt(1, 30), Sampling(max_tokens=30))
    engine.submit(tokens, Sampling(max_tokens=25, logprobs=2, prompt_logprobs=3), "a")
    engine.submit(tokens, Sampling(max_tokens=5), "b")
    engine.submit(tokens, Sampling(max_tokens=5, logprobs=0), "c")
    found = run(engine)
    assert (engine.stats().num_preempted > 0) == (num_pages == 4)
    events = found["a"]
    out = tokens_of(events)
    assert out == greedy(tokens, 25)
    whole = [*tokens, *out]
    expected = torch.stack([logits_of(state) for state in running_hashes(whole)]).log_softmax(-1)
    entries = [*events[0].prompt_logprobs, *(entry for event in events for entry in event.logprobs)]
    assert not any(event.prompt_logprobs for event in events[1:])
    assert [entry.token_id for entry in entries] == whole[1:]
    for i, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[i, whole[i + 1]]), abs=1e-4)
        top = expected[i].topk(3 if i < len(tokens) - 1 else 2)
        assert [t for t, _ in entry.top] == top.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert not any(event.logprobs or event.prompt_logprobs for event in found["b"])
    bare = [entry for event in found["c"] for entry in event.logprobs]
    assert [(entry.token_id, entry.top) for entry in bare] == [(token, ()) for token in out[:5]]


def test_the_context_ends_an_output() -> None:
    engine = make(max_context=20)
    engine.submit(prompt(0, 15), Sampling(max_tokens=100), "a")
    events = run(engine)["a"]
    assert (events[-1].finish_reason, tokens_of(events)) == (FinishReason.LENGTH, greedy(prompt(0, 15), 5))


@pytest.mark.parametrize(
    ("tokens", "sampling", "message"),
    [
        ([], {}, "prompt is empty"),
        ([VOCAB_SIZE], {}, "the prompt has token 97"),
        ([3, -1], {}, "the prompt has token -1"),
        ([1.5], {}, "not a list of token ids"),
        ([1] * 512, {}, "the prompt has 512 tokens"),
        ([1], {"logit_bias": ((500, 1.0),)}, "logit_bias"),
        ([1], {"stop": ("x",)}, "need the model's tokenizer"),
        ([1], {"regex": "a*"}, "need the model's tokenizer"),
    ],
)
def test_requests_that_cannot_be_served(tokens: list[int], sampling: dict, message: str) -> None:
    engine = make()
    with pytest.raises(UsageError, match=message):
        engine.submit(tokens, Sampling(**sampling))
    assert not engine.has_work
    engine.check_integrity()


def test_an_id_is_used_once_at_a_time_and_the_queue_has_an_end() -> None:
    engine = make(max_waiting=2)
    engine.submit([1], request_id="a")
    with pytest.raises(UsageError, match="'a' is running"):
        engine.submit([1], request_id="a")
    engine.submit([2])
    with pytest.raises(BusyError):
        engine.submit([3])
    run(engine)
    engine.submit([1], request_id="a")
    run(engine)


def test_a_request_that_the_model_fails_at_leaves_the_others_alone() -> None:
    def fails(batch: Batch) -> None:
        if (batch.token_ids == 96).any():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    engine = make(fails, vocabulary=LETTERS)
    good = [t for t in prompt(1, 30) if t != 96]
    assert 96 not in greedy(good, 15)
    names = [engine.submit(p, Sampling(max_tokens=15)) for p in (good[:9], [5, 96, 5], good)]
    found = run(engine)
    last = found[names[1]][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, EngineError)
    assert "out of memory" in str(last.error)
    for name, tokens in ((names[0], good[:9]), (names[2], good)):
        assert tokens_of(found[name]) == greedy(tokens, 15)[: len(tokens_of(found[name]))]
        assert found[name][-1].finish_reason in (FinishReason.LENGTH, FinishReason.ERROR)
    assert found[names[2]][-1].finish_reason is FinishReason.LENGTH
    assert engine.stats().num_failed == 1


def test_numbers_that_are_not_finite_end_their_own_request() -> None:
    class Poisoned(FakeModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            found = super().logits(hidden)
            bad = running_hashes([4, 4])[-1]
            return found.masked_fill(hidden == bad, torch.nan)

    engine = Engine(Poisoned(), EngineOptions(**SMALL))
    for name, tokens in (("bad", [4, 4]), ("good", [4, 5])):
        engine.submit(tokens, Sampling(max_tokens=9), name)
    found = run(engine)
    assert found["bad"][-1].finish_reason is FinishReason.ERROR
    assert "not finite" in str(found["bad"][-1].error)
    assert tokens_of(found["good"]) == greedy([4, 5], 9)


def test_a_lost_device_ends_all_and_nothing_is_taken_any_more() -> None:
    state = {"left": 3}

    def fails(batch: Batch) -> None:
        state["left"] -= 1
        if state["left"] < 0:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine = make(fails)
    for i in range(6):
        engine.submit(prompt(i, 5), Sampling(max_tokens=9), str(i))
    found = run(engine)
    assert {name: events[-1].finish_reason for name, events in found.items()} == {
        str(i): FinishReason.ERROR for i in range(6)
    }
    with pytest.raises(EngineError, match="illegal memory access"):
        engine.submit([1])


def test_too_little_memory_says_what_would_fit() -> None:
    with pytest.raises(EngineError, match=r"one sequence of 400 tokens .* 320 tokens would fit"):
        make(num_pages=20, max_context=400)
    with pytest.raises(UsageError, match="max_step_tokens"):
        EngineOptions(max_running=8, max_step_tokens=4)


def test_memory_decides_where_nothing_is_said() -> None:
    engine = make(num_pages=None, context=512)
    counts = engine.stats().pages
    assert counts.free == 2 * 4 * 512 // 16  # all that four sequences could fill, twice

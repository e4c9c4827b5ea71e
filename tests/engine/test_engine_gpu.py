"""The engine on a GPU: graphs, steps that run ahead, caches of every format, memory of loading."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from blockscale.engine.bench.random_model import draw_weights, random_config, write_hollow
from blockscale.engine.engine import Engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.request import Request, TokenLogprob
from blockscale.engine.runner import Runner
from blockscale.engine.sampling import Sampling
from blockscale.engine.scheduler import Work
from blockscale.kernels.paged_cache import KVFormat
from blockscale.models.decoder import Decoder
from blockscale.models.load import load_decoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIONS = EngineOptions(num_pages=256, max_running=16, max_step_tokens=64, seed=1)
NUM_TOKENS = 40
# logits are sums of bf16 products over a few layers, of a width of hundreds: rounding moves them by some 2^-8
NOISE_NATS = 0.1


def random_decoder(folder: Path, weights: str, kv_format: KVFormat = KVFormat.BITS16) -> Decoder:
    write_hollow(folder, random_config("tiny"), weights)
    decoder = load_decoder(folder, device="cuda", kv_format=kv_format)
    draw_weights(decoder, seed=3)
    return decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(tmp_path_factory.mktemp("tiny"), "nvfp4")


def prompts(num: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(num)
    return [torch.randint(500, (5 + 7 * i,), generator=generator).tolist() for i in range(num)]


def outputs(engine: Engine, texts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[TokenLogprob]]:
    """Tokens, with their log-probabilities where asked for, else with 0."""
    found: dict[str, list[TokenLogprob]] = {engine.submit(text, sampling): [] for text in texts}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            given = event.logprobs or tuple(TokenLogprob(token, 0.0) for token in event.token_ids)
            found[event.request_id] += given
    engine.check_integrity()
    return list(found.values())


def tokens(found: Sequence[Sequence[TokenLogprob]]) -> list[list[int]]:
    return [[one.token_id for one in own] for own in found]


@pytest.mark.parametrize("num", [1, 2, 4, 8])  # sizes of graphs: no row is added, and the kernels are the same
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_graphs_and_running_ahead_change_nothing(decoder: Decoder, num: int, temperature: float) -> None:
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=temperature, ignore_eos=True)
    found = []
    for use_graphs, run_ahead in ((False, False), (True, False), (True, True), (False, True)):
        options = EngineOptions(
            num_pages=256, max_running=16, max_step_tokens=512, seed=1, use_graphs=use_graphs, run_ahead=run_ahead
        )
        engine = Engine(decoder, options)
        found.append(tokens(outputs(engine, prompts(num), sampling)))
        if use_graphs:
            assert engine.stats().why_without_graphs is None
    assert all(len(own) == NUM_TOKENS for own in found[0])
    assert found[1] == found[2]
    assert found[0] == found[3]
    assert [own[0] for own in found[0]] == [own[0] for own in found[1]]  # prompts run without graphs on both sides


def test_a_graph_computes_what_its_kernels_compute(decoder: Decoder) -> None:
    """Its page table is wider, so that attention may add up in another order."""
    by_graph, plain = Runner(decoder, 64, 16), Runner(decoder, 64, 16, use_graphs=False)
    for num in (1, 3, 8):
        requests = [Request(str(i), i, [7 + i] * 33, 33, Sampling(), 0, 64, frozenset()) for i in range(num)]
        for i, request in enumerate(requests):
            request.add_pages([3 * i, 3 * i + 1, 3 * i + 2])
        for runner in (by_graph, plain):
            runner.run([Work(request, 0, 32) for request in requests])
        works = [Work(request, 32, 33) for request in requests]
        found, expected = by_graph.run(works).float(), plain.run(works).float()
        assert (found - expected).norm() <= 2**-7 * expected.norm()


def test_batched_greedy_is_that_of_one_by_one_up_to_rounding(decoder: Decoder) -> None:
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    texts = prompts(11)
    engine = Engine(decoder, OPTIONS)
    alone = [outputs(engine, [text], sampling)[0] for text in texts]
    together = outputs(engine, texts, sampling)
    num_equal = 0
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            if a.token_id != b.token_id:
                assert a.top[0][1] - a.top[1][1] < NOISE_NATS, "not a matter of rounding"
                break
            assert abs(a.logprob - b.logprob) < NOISE_NATS
            num_equal += 1
    assert num_equal >= len(texts), "every first token is compared at least"


@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
def test_caches_of_every_format(weights: str, kv_format: KVFormat, tmp_path: Path) -> None:
    """Against 16 bits, by the log-probabilities of the same text."""
    noise = {KVFormat.BITS16: 0.0, KVFormat.FP8: 0.25, KVFormat.NVFP4: 1.0}[kv_format]
    text = prompts(6)[5]
    sampling = Sampling(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    scored = []
    for fmt in (KVFormat.BITS16, kv_format):
        engine = Engine(random_decoder(tmp_path, weights, fmt), OPTIONS)
        engine.submit(text, sampling)
        events = [event for _ in range(3) for event in engine.step()]
        scored.append(torch.tensor([one.logprob for one in events[0].prompt_logprobs]))
        assert all(len(own) == NUM_TOKENS for own in outputs(engine, [text], Sampling(NUM_TOKENS, ignore_eos=True)))
    assert scored[0].isfinite().all()
    assert (scored[0] - scored[1]).abs().mean() <= noise


def test_a_thousand_replays_are_one(decoder: Decoder) -> None:
    runner = Runner(decoder, 64, 16)
    works = []
    for i in range(8):
        request = Request(str(i), i, [3 + i] * (20 + i), 19 + i, Sampling(), 0, 64, frozenset())
        request.add_pages([4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3])
        runner.run([Work(request, 0, 19 + i)])
        works.append(Work(request, 19 + i, 20 + i))
    first = runner.run(works).clone()
    assert first.isfinite().all()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += (runner.run(works) != first).any()
    assert int(differing) == 0
    assert runner.graphs is not None
    assert runner.graphs.why_without is None


def test_a_step_that_is_prepared_early_does_not_change_the_one_before(decoder: Decoder) -> None:
    """The host fills the graph's next inputs while the GPU is behind by many steps."""
    runner = Runner(decoder, 64, 16)

    def works_of(token: int) -> list[Work]:
        request = Request("a", 0, [token], 1, Sampling(), 0, 9, frozenset())
        request.add_pages([token % 64])
        return [Work(request, 0, 1)]

    expected = [runner.run(works_of(token)).clone() for token in range(60)]
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # the GPU is busy for tens of milliseconds
    found = [runner.run(works_of(token)).clone() for token in range(60)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_request_joins_and_one_leaves_while_steps_run_ahead(decoder: Decoder) -> None:
    texts = prompts(4)
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)

    def play(*, run_ahead: bool) -> dict[str, int]:
        engine = Engine(decoder, EngineOptions(num_pages=256, max_step_tokens=512, seed=1, run_ahead=run_ahead))
        counts: dict[str, int] = {}
        for i, text in enumerate(texts):
            engine.submit(text, sampling, str(i))
            for _ in range(7):
                for event in engine.step():
                    counts[event.request_id] = counts.get(event.request_id, 0) + len(event.token_ids)
        engine.abort("0")
        while engine.has_work:
            for event in engine.step():
                assert event.error is None
                counts[event.request_id] = counts.get(event.request_id, 0) + len(event.token_ids)
        engine.check_integrity()
        return counts

    ahead, waiting = play(run_ahead=True), play(run_ahead=False)
    for name in "123":
        assert ahead[name] == waiting[name] == NUM_TOKENS
    assert 0 < ahead["0"] < NUM_TOKENS


@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
def test_loading_takes_little_more_than_the_weights(weights: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 24, "head_dim": 128}
    config = {**random_config("tiny"), **wide, "num_attention_heads": 16, "num_key_value_heads": 4}
    write_hollow(tmp_path, config, weights)
    stored = (tmp_path / "model.safetensors").stat().st_size
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    decoder = load_decoder(tmp_path, device="cuda")
    torch.cuda.synchronize()
    assert decoder.device.type == "cuda"
    assert torch.cuda.max_memory_allocated() - before <= 1.15 * stored

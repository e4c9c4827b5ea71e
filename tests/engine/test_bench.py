"""`bench engine`: loads, their figures and random models, with an engine of known times. Needs nothing."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockscale.checkpoint.load import load_linear
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.engine.bench.energy import energy_meter
from blockscale.engine.bench.figures import Subject, row, spread
from blockscale.engine.bench.floor import decode_bytes
from blockscale.engine.bench.random_model import NAMES, draw_weights, random_config, write_hollow
from blockscale.engine.bench.workload import Run, Workload, drive
from blockscale.engine.request import Event, FinishReason
from blockscale.engine.sampling import Sampling
from blockscale.errors import BlockscaleError, UsageError
from blockscale.formats.spec import NVFP4
from blockscale.host.linear import PackedLinear
from blockscale.host.model import load_model
from blockscale.kernels.linears import prepare
from blockscale.kernels.ops.linear import linear_w4a16
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.planning.models.architecture import from_config
from blockscale.planning.models.model import find_model
from blockscale.planning.models.weights import weights_of


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class FakeEngine:
    """A step takes 1 s, and 10 s where a new request is in it; `bad` requests fail at once."""

    def __init__(self, clock: Clock, bad: Sequence[str] = ()) -> None:
        self.clock, self.bad = clock, bad
        self.left: dict[str, int] = {}
        self.new: set[str] = set()
        self.prompts: list[list[int]] = []
        self.most = 0

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str | None = None) -> str:
        assert request_id is not None
        assert sampling.ignore_eos
        self.prompts.append(list(prompt_ids))
        self.left[request_id] = sampling.max_tokens
        self.new.add(request_id)
        self.most = max(self.most, len(self.left))
        return request_id

    def step(self) -> list[Event]:
        self.clock.time += 10.0 if self.new else 1.0
        self.new = set()
        events = []
        for request in list(self.left):
            if request in self.bad:
                del self.left[request]
                events.append(Event(request, finish_reason=FinishReason.ERROR, error=BlockscaleError("out of memory")))
                continue
            self.left[request] -= 1
            is_last = self.left[request] == 0
            if is_last:
                del self.left[request]
            events.append(Event(request, (7,), finish_reason=FinishReason.LENGTH if is_last else None))
        return events


def run(workload: Workload, bad: Sequence[str] = ()) -> tuple[Run, FakeEngine]:
    clock = Clock()
    engine = FakeEngine(clock, bad)
    return drive(engine, workload, 50, now=clock.now, sleep=clock.sleep), engine


SUBJECT = Subject("m", "nvfp4", "bf16", "cpu", 1000.0, lambda sequences, context: 100.0 * sequences + context)


def test_one_at_a_time() -> None:
    workload = Workload(2, 5, 4, concurrency=1)
    result, engine = run(workload)
    assert engine.most == 1
    assert result.seconds == 2 * 13.0
    figures = row(SUBJECT, workload, result, joules=16.0)
    assert (figures.ttft_ms.p50, figures.itl_ms.p50 if figures.itl_ms else None) == (10_000.0, 1000.0)
    assert figures.tokens_per_s == 8 / 26
    assert figures.step_ms == 1000.0
    # contexts are 6, 7, 8: a prompt of 5, and the tokens so far
    assert figures.gb_per_s == pytest.approx(107e-9)
    assert figures.read_share == pytest.approx(0.107)
    assert figures.joules_per_token == 2.0
    assert figures.num_failed == 0


def test_a_fixed_number_at_once() -> None:
    workload = Workload(7, 5, 4, concurrency=3)
    result, engine = run(workload)
    assert engine.most == 3
    assert len(result.timelines) == 7
    assert all(len(t.tokens) == 4 for t in result.timelines)
    # the first three, the next three, the last one: 10 s and 3 of 1 s each
    assert result.seconds == 39.0
    assert row(SUBJECT, workload, result, None).sequences == pytest.approx(28 / 12)
    assert {step.sequences for step in result.decodes} == {1, 3}


def test_steps_that_also_compute_prompts_count_as_no_decode_step() -> None:
    result, _ = run(Workload(40, 5, 20, rate=0.2))
    assert all(step.seconds == 1.0 for step in result.decodes)
    assert max(gap for t in result.timelines for gap in t.gaps) == 10.0


def test_waiting_counts_from_when_a_request_came_by_chance() -> None:
    workload = Workload(3, 5, 2, rate=0.5, seed=4)
    result, _ = run(workload)
    for timeline, at in zip(result.timelines, workload.arrivals(), strict=True):
        assert timeline.due == 100.0 + at
        assert timeline.ttft >= 10.0 - 1e-9
    gap = workload.arrivals()[1] - workload.arrivals()[0]
    assert gap < 10  # it came while the first was computed, and waited for the step to end
    assert result.timelines[1].ttft > 10.0


def test_arrivals_are_a_poisson_process() -> None:
    times = Workload(4000, 1, 1, rate=5.0, seed=1).arrivals()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    # mean and deviation of an exponential distribution are equal; both to 4 standard errors
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=4 / 4000**0.5)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=4 * (2 / 4000) ** 0.5)


def test_prompts_are_the_same_each_time_and_different_from_one_another() -> None:
    prompts = Workload(5, 30, 1, concurrency=1).prompts(50)
    assert prompts == Workload(5, 30, 1, concurrency=2).prompts(50)
    assert len({tuple(p) for p in prompts}) == 5
    assert max(map(max, prompts)) < 50
    assert prompts != Workload(5, 30, 1, concurrency=1, seed=1).prompts(50)


def test_requests_that_fail_are_counted_and_in_no_other_figure() -> None:
    workload = Workload(3, 5, 4, concurrency=3)
    result, _ = run(workload, bad=["bench-1"])
    figures = row(SUBJECT, workload, result, None)
    assert figures.num_failed == 1
    assert figures.tokens_per_s == 8 / 13
    everything, _ = run(workload, bad=["bench-0", "bench-1", "bench-2"])
    with pytest.raises(BlockscaleError, match="out of memory"):
        row(SUBJECT, workload, everything, None)


@pytest.mark.parametrize(
    "options", [{}, {"concurrency": 1, "rate": 1.0}, {"concurrency": 0}, {"rate": -1.0}, {"rate": float("inf")}]
)
def test_a_load_that_is_none(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Workload(1, 1, 1, **options)  # type: ignore[arg-type]


def test_a_spread_is_of_measured_values() -> None:
    assert spread([float(i) for i in range(1, 101)]) == spread([float(i) for i in range(100, 0, -1)])
    assert (spread([3.0]).p50, spread([3.0]).p99) == (3.0, 3.0)
    ranks = spread([float(i) for i in range(1, 101)])
    assert (ranks.p50, ranks.p90, ranks.p99) == (50.0, 90.0, 99.0)


def test_what_a_step_of_a_dense_model_must_read() -> None:
    architecture = from_config(random_config("llama-3.1-8b"))
    weights = weights_of(architecture, "nvfp4")
    # 6.98e9 parameters in layers at 4.5 bits, a head of 128256 x 4096 in 16; 2 * 8 * 128 * 32 elements a token
    layers = 32 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 14336) * 4.5 / 8
    expected = layers + 128256 * 4096 * 2 + 3 * 1000 * 65536 * 1.0
    assert decode_bytes(architecture, weights, "fp8", 3, 1000) == pytest.approx(expected, rel=1e-3)


def test_what_a_step_of_experts_must_read() -> None:
    architecture = from_config(random_config("qwen3-30b-a3b"))
    weights = weights_of(architecture, "nvfp4")
    experts = 48 * 128 * 3 * 2048 * 768 * 4.5 / 8
    one, many = (decode_bytes(architecture, weights, "bf16", n, 0) for n in (1, 10_000))
    assert many - one == pytest.approx(experts * (1 - 8 / 128), rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_hollow_models_are_checkpoints_of_their_architecture(name: str, tmp_path: Path) -> None:
    write_hollow(tmp_path, random_config(name))
    model = find_model(tmp_path)
    assert model.weights is not None
    expected = weights_of(from_config(random_config(name)), "nvfp4")
    assert model.weights.num_bytes == pytest.approx(expected.num_bytes, rel=1e-4)
    on_disk = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
    assert on_disk < 20e6  # headers, norms and scales


def test_a_hollow_model_in_16_bits(tmp_path: Path) -> None:
    write_hollow(tmp_path, random_config("tiny"), "bf16")
    model = find_model(tmp_path)
    assert model.weights is not None
    assert model.stored_format == "bf16"
    assert model.weights.num_bytes == weights_of(model.architecture, "bf16").num_bytes
    with pytest.raises(UsageError, match="no random weights in 'int3'"):
        write_hollow(tmp_path, random_config("tiny"), "int3")
    with pytest.raises(UsageError, match="no random model 'gpt-5'"):
        random_config("gpt-5")


@pytest.mark.parametrize("name", ["tiny", "qwen3-30b-a3b"])
def test_hollow_models_have_all_that_transformers_asks_for(name: str, tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}
    config = random_config(name)
    config |= {key: value for key, value in small.items() if key in config}
    config |= {"vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    write_hollow(tmp_path, config)
    hosted = load_model(tmp_path)
    weights = [m.linear.weight for m in hosted.model.modules() if isinstance(m, PackedLinear)]
    assert len(weights) == 2 * (4 + 3 * config.get("num_experts", 1))
    with torch.inference_mode():
        logits = hosted.model(torch.arange(5)[None]).logits
    assert not logits.any()  # a hole reads as zeros


def test_weights_are_drawn_in_the_layout_that_they_have(tmp_path: Path) -> None:
    write_hollow(tmp_path, random_config("tiny"))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.quantized is not None
    stored = checkpoint.quantized.linears["model.layers.0.mlp.up_proj"]
    packed = prepare(load_linear(stored, torch.bfloat16).weight)
    stack = prepare_stack()
    head = checkpoint.kept["lm_head.weight"].read()
    norm = checkpoint.kept["model.norm.weight"].read()
    decoder = SimpleNamespace  # a holder of no kind that is looked into
    model = {"layers": [packed, (stack,)], "head": head, "tied": head, "norm": norm, "other": decoder}
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    assert not linear_w4a16(x, packed).any()
    num_bytes = draw_weights(model)
    assert num_bytes == packed.num_bytes + stack.num_bytes + head.numel() * 2
    assert torch.equal(norm, torch.ones_like(norm))
    y = linear_w4a16(x, packed)
    assert y.isfinite().all()
    assert 0.1 < y.float().std() < 10
    assert 0.5 < (head.float().std() * 256**0.5) < 2
    assert stack.block_scale.unique().numel() > 10


def prepare_stack() -> PreparedWeight:
    packed = torch.zeros(4, 32, 32, dtype=torch.uint8)
    scales = torch.zeros(4, 32, 4, dtype=torch.uint8)
    return PreparedWeight(Layout.ROW_MAJOR, packed, scales, torch.ones(4), (4, 32, 64), NVFP4, torch.bfloat16)


def test_the_cpu_has_no_meter() -> None:
    assert energy_meter(torch.device("cpu")) is None

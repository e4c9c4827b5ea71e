"""Predictions against published measurements, and how they move with what they depend on."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from blockscale.errors import UsageError
from blockscale.planning.hardware.catalogue import find_gpu
from blockscale.planning.models.architecture import Part, from_config
from blockscale.planning.models.model import presets
from blockscale.planning.models.weights import PartWeights, Weights, weights_of
from blockscale.planning.speed.layout import parse_layout
from blockscale.planning.speed.predict import Prediction, Workload, default_priors, predict
from blockscale.planning.speed.roofline import Deployment, decode_step, expert_coverage, prefill, serve

VALIDATION = Path(__file__).parents[1] / "golden" / "planning" / "validation.csv"
GPUS = {"B200 SXM": "b200", "H100 SXM": "h100", "H200 SXM": "h200", "GB200": "gb200"}
MODELS = {
    "Llama-3.3-70B": "llama-3.1-70b",
    "Llama-3.1-70B": "llama-3.1-70b",
    "Llama-2-70B-99.9": "llama-2-70b",
    "Llama-3.1-405B": "llama-3.1-405b",
    "gpt-oss-120b": "gpt-oss-120b",
    "DeepSeek-R1-0528": "deepseek-r1",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
}
LAYOUTS = {"D13": "tp1dp8", "D14": "tp2pp2dp2", "D15": "tp1dp8"}


def published(row: dict[str, str]) -> Deployment:
    """The deployment that a row of the validation file was measured on."""
    name = MODELS[row["model"]]
    config = presets()[name] if name != "llama-2-70b" else {**presets()["llama-3.1-70b"], "vocab_size": 32_000}
    a, gpu = from_config(config, name), find_gpu(GPUS[row["gpu"]])
    kind = row["weight_format"].split()[0]
    if kind == "mxfp4":  # gpt-oss: only the experts
        parts = dict(weights_of(a, "bf16", {Part.EXPERTS: "mxfp4"}).parts)
        activation = "mxfp8" if "mxfp8" in gpu.native else None
        parts[Part.EXPERTS] = PartWeights("mxfp4", activation, parts[Part.EXPERTS].num_bytes)
        weights = Weights(parts)
    elif name == "deepseek-r1":
        weights = weights_of(a, "nvfp4", {Part.ATTENTION: "fp8"}) if kind == "nvfp4" else weights_of(a, "fp8-block128")
    else:
        weights = weights_of(a, kind)
    cache = "fp8" if row["kv_format"].startswith("fp8") else "bf16"
    return Deployment(a, weights, gpu, parse_layout(LAYOUTS.get(row["id"], row["parallel"].lower())), cache)


def predicted(row: dict[str, str]) -> tuple[Prediction, float]:
    """A row's prediction and measured over predicted time: of a token, or per token at the most throughput."""
    concurrency = int(row["concurrency"]) if row["concurrency"].isdigit() else None
    workload = Workload(round(float(row["isl_mean"])), round(float(row["osl_mean"])), concurrency)
    prediction = predict(published(row), workload)
    if row["tpot_ms"]:
        return prediction, float(row["tpot_ms"]) / 1e3 / prediction.itl_s.value
    return prediction, prediction.tokens_per_s_per_gpu.value / float(row["out_tok_s_per_gpu"])


def rows() -> list[dict[str, str]]:
    with VALIDATION.open() as file:
        return list(csv.DictReader(file))


def test_published_measurements() -> None:
    """One set of efficiencies for every GPU, engine and model: 30 % on average, four fifths inside the interval."""
    ratios = {row["id"]: predicted(row)[1] for row in rows()}
    errors = [abs(1 / ratio - 1) for ratio in ratios.values()]
    inside = [abs(math.log(ratio)) <= default_priors().spread.itl for ratio in ratios.values()]
    assert len(ratios) == 15
    assert sum(errors) / len(errors) < 0.3, ratios
    assert sum(inside) >= 12, ratios


def llama(gpu: str = "b200", fmt: str = "nvfp4", layout: str = "tp1") -> Deployment:
    a = from_config(presets()["llama-3.1-70b"], "llama-3.1-70b")
    return Deployment(a, weights_of(a, fmt), find_gpu(gpu), parse_layout(layout), "fp8")


def test_a_step_is_never_faster_than_its_ceilings() -> None:
    d, e = llama(), default_priors().efficiency
    ideal = replace(
        e,
        **dict.fromkeys(("weights", "experts", "cache", "compute", "prefill", "narrow", "link"), 1.0),
        **dict.fromkeys(("layer_s", "expert_layer_s", "reduce_s", "exchange_s", "step_s", "sequence_s"), 0.0),
    )
    step = decode_step(d, ideal, 1, 1)
    read = d.weights.num_bytes - d.weights.bytes_of(Part.EMBEDDING)
    assert step.seconds == pytest.approx((read + 163_840) / d.gpu.bandwidth.value, rel=1e-9)
    assert decode_step(d, e, 1, 1).seconds > step.seconds
    # prefill of many tokens is arithmetic: 2 FLOP a parameter and token, half of S^2 in attention
    tokens = 8192
    flops = 2 * d.architecture.active_parameters * tokens
    assert prefill(d, ideal, tokens).compute > flops / d.gpu.peak("fp4").value


def test_experts_touched() -> None:
    assert expert_coverage(256, 8, 1) == pytest.approx(8 / 256)
    assert expert_coverage(256, 8, 1000) == pytest.approx(1.0, abs=1e-9)
    assert 0.6 < expert_coverage(128, 8, 16) < 0.65


def test_directions() -> None:
    """More of what costs time costs time."""
    work = Workload(1024, 1024, 64)
    base = predict(llama(), work)
    assert predict(llama(fmt="fp8"), work).itl_s.value > base.itl_s.value
    assert predict(llama(gpu="h200"), work).itl_s.value > base.itl_s.value
    assert predict(llama(layout="tp4"), work).itl_s.value < base.itl_s.value
    assert predict(llama(layout="tp4"), work).tokens_per_s_per_gpu.value < base.tokens_per_s_per_gpu.value
    assert predict(llama(), Workload(8192, 1024, 64)).ttft_s.value > base.ttft_s.value
    assert predict(llama(), Workload(1024, 1024, 128)).tokens_per_s_per_gpu.value > base.tokens_per_s_per_gpu.value


def test_intervals_hold_their_value() -> None:
    p = predict(llama(), Workload(1024, 1024, 64))
    for estimate in (p.itl_s, p.ttft_s, p.tokens_per_s_per_gpu):
        assert 0 < estimate.low < estimate.value < estimate.high
    assert p.tokens_per_s_per_gpu.value == pytest.approx(64 / p.itl_s.value)


def test_more_than_is_admitted_waits() -> None:
    few, many = (predict(llama(), Workload(1024, 1024, n)) for n in (64, 5000))
    assert few.waiting == 0
    assert many.waiting == 5000 - many.sequences
    assert many.sequences == many.memory.max_sequences
    assert many.ttft_s.value > 10 * few.ttft_s.value


def test_fewer_requests_than_replicas_leave_some_standing_still() -> None:
    one, four = (predict(llama(layout=layout), Workload(1024, 1024, 1)) for layout in ("tp1", "tp1dp4"))
    assert four.itl_s == one.itl_s
    assert 4 * four.tokens_per_s_per_gpu.value == pytest.approx(one.tokens_per_s_per_gpu.value)


def test_stages_work_on_prompts_of_different_requests_at_once() -> None:
    """The latency of one prompt is the sum of all stages; what many take of each step is the work of one stage."""
    whole, staged = llama("h200", "fp8", "tp1"), llama("h200", "fp8", "pp4")
    e = default_priors().efficiency
    assert prefill(staged, e, 4096).compute == prefill(whole, e, 4096).compute
    busy, decode = serve(staged, e, 64, 4096, 64), decode_step(staged, e, 64, 4096 + 32)
    work = prefill(staged, e, 4096).compute * 64 / 64
    assert busy.step.compute - decode.compute == pytest.approx(work / 4)
    assert busy.busy == 1
    alone = serve(staged, e, 1, 4096, 64)  # one request finds the other stages standing still
    assert alone.busy == 0.25
    assert alone.step.compute - decode_step(staged, e, 1, 4096 + 32).compute == pytest.approx(work / 64)
    # four stages of long prompts make about four times what one GPU makes, each at its own full batch
    single = serve(whole, e, 16, 4096, 64)
    assert 3 < busy.tokens_per_s / single.tokens_per_s < 4.5


def test_a_rate_fills_the_batch_or_the_queue() -> None:
    slow, fast, much = (predict(llama(), Workload(1000, 1000, rate=rate)) for rate in (0.5, 4.0, 50.0))
    assert slow.utilization is not None
    assert fast.utilization is not None
    assert much.utilization is not None
    assert slow.utilization < fast.utilization < 1 < much.utilization
    assert slow.sequences < fast.sequences
    assert slow.ttft_s.value < fast.ttft_s.value < much.ttft_s.value == math.inf


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"input_tokens": 0, "output_tokens": 1}, "--input 0"),
        ({"input_tokens": 1, "output_tokens": -5}, "--output -5"),
        ({"input_tokens": 1, "output_tokens": 1, "concurrency": 0}, "--concurrency 0"),
        ({"input_tokens": 1, "output_tokens": 1, "rate": 0.0}, "--rate 0"),
        ({"input_tokens": 1, "output_tokens": 1, "rate": math.inf}, "--rate inf"),
        ({"input_tokens": 1, "output_tokens": 1, "rate": 1.0, "concurrency": 1}, "two workloads"),
    ],
)
def test_workloads_that_make_no_sense(fields: dict[str, float], what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        Workload(**fields)  # type: ignore[arg-type]
    assert caught.value.hint


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(UsageError, match=r"does not fit tp1 of H200 SXM: [\d.]+ GB are missing") as caught:
        predict(llama("h200", "bf16"), Workload(1024, 1024, 1))
    assert "fewer bits" in caught.value.hint

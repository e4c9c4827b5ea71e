"""Calibration: what the engines' benchmarks write, the fit, and the file that keeps it."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockscale.engine.bench.figures import Subject, row
from blockscale.engine.bench.workload import Run as TimedRun
from blockscale.engine.bench.workload import Timeline, Workload
from blockscale.errors import UsageError
from blockscale.planning.calibration.calibrate import (
    Calibration,
    Run,
    calibrate,
    fit,
    fit_runs,
    free_parameters,
    is_named,
)
from blockscale.planning.calibration.measurements import Measurement, read_measurements
from blockscale.planning.calibration.store import (
    default_calibration_file,
    load_calibration,
    read_calibrations,
    save_calibration,
)
from blockscale.planning.hardware.catalogue import find_gpu
from blockscale.planning.models.architecture import from_config
from blockscale.planning.models.model import presets
from blockscale.planning.models.weights import weights_of
from blockscale.planning.speed.layout import Layout, parse_layout
from blockscale.planning.speed.memory import plan_memory
from blockscale.planning.speed.predict import calibrated_spread, default_priors
from blockscale.planning.speed.roofline import Deployment, Efficiency, serve

LLAMA = from_config(presets()["llama-3.1-8b"], "llama-3.1-8b")
ON_H200 = Deployment(LLAMA, weights_of(LLAMA, "fp8"), find_gpu("h200"), Layout(), "fp8")
WORKLOADS = [(n, i, o) for n in (1, 8, 32, 128) for i, o in ((1024, 1024), (4096, 512))]
USUAL = default_priors().efficiency
OFF = {"weights": 0.8, "cache": 0.7, "layer_s": 1.4, "ahead": 1.5}
TRUTH = replace(USUAL, **{name: getattr(USUAL, name) * factor for name, factor in OFF.items()})


def measured(e: Efficiency, sequences: float, num_input: int, num_output: int) -> Measurement:
    """What a run would give if `e` were the truth."""
    served = serve(ON_H200, e, sequences, num_input, num_output)
    return Measurement(
        "vllm", "0.19.0", "h200", None, None, num_input, num_output, sequences, served.itl_s, served.ttft_s, "test"
    )


def vllm(sequences: int = 8, num_input: int = 1024, num_output: int = 1024, **more: Any) -> dict[str, Any]:
    """A result of `vllm bench serve`, with what is read of it."""
    served = serve(ON_H200, TRUTH, sequences, num_input, num_output)
    return {
        "backend": "vllm",
        "model_id": "meta-llama/Llama-3.1-8B",
        "request_rate": "inf",
        "max_concurrency": sequences,
        "completed": 4 * sequences,
        "total_input_tokens": 4 * sequences * num_input,
        "total_output_tokens": 4 * sequences * num_output,
        "request_throughput": 3.0,
        "mean_ttft_ms": served.ttft_s * 1e3,
        "mean_tpot_ms": served.itl_s * 1e3,
        "engine_version": "0.19.0",
        "gpu": "NVIDIA H200",
        **more,
    }


def sglang(**more: Any) -> dict[str, Any]:
    server = {"version": "0.5.9", "tp_size": 4, "dp_size": 1, "model_path": "m", **more.pop("server", {})}
    return {**vllm(), "backend": "sglang", "concurrency": 7.7, "server_info": server, **more}


def tensorrt_llm(**more: Any) -> dict[str, Any]:
    return {
        "engine": {"model": "m", "version": "1.2.0"},
        "machine": {"name": "NVIDIA H200"},
        "world_info": {"tp_size": 2, "pp_size": 2, "ep_size": 1, "world_size": 4},
        "request_info": {
            "num_requests": 50,
            "avg_num_concurrent_requests": 15.5,
            "avg_input_length": 1000.0,
            "avg_output_length": 500.0,
        },
        "performance": {"total_latency_ms": 1.0},
        "streaming_metrics": {"avg_ttft_ms": 120.0, "avg_tpot_ms": 9.5},
        **more,
    }


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def runs_file(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Path:
    return write(path, [change(vllm(*workload)) for workload in WORKLOADS])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """Of eight runs of vLLM 0.19.0."""
    return calibrate([runs_file(tmp_path_factory.mktemp("runs") / "runs.json")], ON_H200)


def test_vllm(tmp_path: Path) -> None:
    (m,) = read_measurements(write(tmp_path / "a.json", vllm(8, 1000, 500)))
    assert (m.engine, m.version, m.gpu, m.layout, m.sequences) == ("vllm", "0.19.0", "NVIDIA H200", None, 8)
    assert (m.input_tokens, m.output_tokens) == (1000, 500)
    assert m.itl_s == pytest.approx(serve(ON_H200, TRUTH, 8, 1000, 500).itl_s)


def test_vllm_at_a_rate_counts_the_requests_in_flight(tmp_path: Path) -> None:
    at_rate = vllm(request_rate=3.0, max_concurrency=None, mean_ttft_ms=100.0, mean_tpot_ms=10.0)
    (m,) = read_measurements(write(tmp_path / "a.json", at_rate))
    assert m.sequences == pytest.approx(3.0 * (0.1 + 1023 * 0.01))


def test_a_limit_above_the_number_of_requests(tmp_path: Path) -> None:
    (m,) = read_measurements(write(tmp_path / "a.json", vllm(8, max_concurrency=512)))
    assert m.sequences == 32


def test_vllm_layout_from_its_metadata(tmp_path: Path) -> None:
    (m,) = read_measurements(write(tmp_path / "a.json", vllm(layout="tp4pp2")))
    assert m.layout == parse_layout("tp4pp2")


@pytest.mark.parametrize(
    ("server", "layout"),
    [
        ({}, "tp4"),
        ({"dp_size": 2}, "tp4dp2"),
        ({"dp_size": 4, "enable_dp_attention": True, "ep_size": 4}, "dep4"),
        ({"dp_size": 1, "attn_dp_size": 4, "enable_dp_attention": True, "ep_size": 4}, "dep4"),
        ({"tp_size": None}, None),
    ],
)
def test_sglang_lines(server: dict[str, Any], layout: str | None, tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(sglang(server=server)) for _ in range(2))
    first, second = read_measurements(write(tmp_path / "a.jsonl", lines))
    assert (first.engine, first.version, first.sequences) == ("sglang", "0.5.9", 8)
    assert second.where == "a.jsonl, run 2"
    assert first.layout == (None if layout is None else parse_layout(layout))


def test_tensorrt_llm(tmp_path: Path) -> None:
    (m,) = read_measurements(write(tmp_path / "a.json", tensorrt_llm()))
    assert (m.engine, m.version, m.gpu) == ("tensorrt-llm", "1.2.0", "NVIDIA H200")
    assert (m.sequences, m.input_tokens, m.output_tokens, m.itl_s, m.ttft_s) == (15.5, 1000, 500, 0.0095, 0.12)
    assert m.layout == parse_layout("tp2pp2")


def test_our_own_rows(tmp_path: Path) -> None:
    row = {"input_tokens": 1024, "output_tokens": 256, "concurrency": 4, "ttft_ms": 50.0, "itl_ms": 8.0}
    common = {"engine": "blockscale", "engine_version": "0.1.0", "gpu": "h200", "layout": "tp1"}
    wrapped = read_measurements(write(tmp_path / "a.json", {**common, "rows": [row, row]}))
    bare = read_measurements(write(tmp_path / "a.json", [{**common, **row}, {**common, **row}]))
    assert wrapped == bare
    assert (wrapped[0].engine, wrapped[0].version, wrapped[0].itl_s) == ("blockscale", "0.1.0", 0.008)


def test_rows_as_the_verb_writes_them(tmp_path: Path) -> None:
    workload = Workload(2, 1024, 256, concurrency=2)
    timelines = [Timeline(0.0, [0.05 + 0.008 * i for i in range(256)]) for _ in range(2)]
    subject = Subject("llama-3.1-8b", "nvfp4", "bf16", "cpu", 1.0, lambda sequences, context: 1.0)
    written = row(subject, workload, TimedRun(timelines, 2.1, [2] * 256), joules=None).to_dict()
    (m,) = read_measurements(write(tmp_path / "a.json", [written]))
    assert (m.engine, m.model, m.format) == ("blockscale", "llama-3.1-8b", "nvfp4")
    assert (m.sequences, m.input_tokens, m.output_tokens) == (2, 1024, 256)
    assert (m.ttft_s, m.itl_s) == (pytest.approx(0.05), pytest.approx(0.008))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "no run in it"),
        ("[3]", "not a JSON object"),
        ("7", "not a JSON object"),
        ({"rows": [1]}, "a row is no JSON object"),
        ({"a": 1}, "no benchmark result that is known"),
        (vllm(completed=0), "run 1"),
        (vllm(mean_tpot_ms=-1.0), "ITL is -1.0"),
        (vllm(mean_tpot_ms=0, mean_ttft_ms=0), "neither TTFT nor time per token"),
        (vllm(mean_tpot_ms="fast"), "run 1"),
        (vllm(total_input_tokens=None), "run 1"),
        (vllm(spec_decode_acceptance_length=2.1), "speculative decoding"),
        (sglang(accept_length=1.8), "speculative decoding"),
        (sglang(server={"tp_size": "four"}), "run 1"),
        (tensorrt_llm(decoding_stats={}), "speculative decoding"),
        (tensorrt_llm(streaming_metrics=None), "no latencies"),
        (tensorrt_llm(request_info={}), "lacks 'num_requests'"),
        (vllm(layout="sideways"), "layout 'sideways'"),
    ],
)
def test_what_cannot_be_read(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_measurements(write(tmp_path / "a.json", content))
    assert caught.value.hint


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_measurements(tmp_path / "absent.json")


def test_the_fit_comes_close_to_the_truth() -> None:
    """On runs that it has not seen: a different efficiency is learned from eight."""
    found = fit_runs([Run(ON_H200, measured(TRUTH, *workload)) for workload in WORKLOADS])
    for workload in ((16, 2048, 2048), (64, 512, 256)):
        truth = serve(ON_H200, TRUTH, *workload).itl_s
        before = abs(math.log(serve(ON_H200, default_priors().efficiency, *workload).itl_s / truth))
        after = abs(math.log(serve(ON_H200, found.efficiency, *workload).itl_s / truth))
        assert after < 0.03
        assert after < before / 4
    assert found.error_after < found.error_before
    assert found.spread == calibrated_spread()


def test_one_wild_run_does_not_move_the_fit() -> None:
    runs = [Run(ON_H200, measured(TRUTH, *workload)) for workload in WORKLOADS]
    wild = replace(runs[0].measurement, itl_s=runs[0].measurement.itl_s * 8)  # type: ignore[operator]
    clean, disturbed = fit_runs(runs), fit_runs([Run(ON_H200, wild), *runs[1:]])
    at = (32, 2048, 1024)
    moved = serve(ON_H200, disturbed.efficiency, *at).itl_s / serve(ON_H200, clean.efficiency, *at).itl_s
    assert moved == pytest.approx(1, abs=0.1)
    assert disturbed.spread.itl > clean.spread.itl


def test_efficiencies_stay_possible() -> None:
    """Runs that are faster than the memory's bandwidth allows do not make a share of it larger than 1."""
    runs = [
        Run(ON_H200, replace(m, itl_s=m.itl_s / 5))  # type: ignore[operator]
        for m in (measured(TRUTH, *workload) for workload in WORKLOADS)
    ]
    e = fit_runs(runs).efficiency
    assert max(e.weights, e.cache, e.compute, e.prefill, e.alone) <= 1


def test_what_a_deployment_does_not_have_is_not_fitted() -> None:
    names = free_parameters([ON_H200])
    assert not {"experts", "narrow", "link", "reduce_s", "exchange_s"} & set(names)
    assert {"link", "reduce_s"} <= set(free_parameters([replace(ON_H200, layout=parse_layout("tp2"))]))
    found = fit_runs([Run(ON_H200, measured(TRUTH, *workload)) for workload in WORKLOADS]).efficiency
    assert (found.experts, found.link) == (default_priors().efficiency.experts, default_priors().efficiency.link)


def test_too_few_runs(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", [vllm(*workload) for workload in WORKLOADS[:3]])
    with pytest.raises(UsageError, match="3 runs with 6 figures cannot fit 8 efficiencies") as caught:
        calibrate([file], ON_H200)
    assert "eight runs" in caught.value.hint


def test_queues_say_nothing_about_prefill() -> None:
    """More in flight than memory admits: TTFT is a wait there, and the batch is what fits."""
    runs = [Run(ON_H200, measured(TRUTH, *workload)) for workload in WORKLOADS]
    admitted = plan_memory(ON_H200, 8_192 + 1_024).max_sequences
    most = replace(measured(TRUTH, admitted, 8_192, 1_024), sequences=10_000.0, ttft_s=500.0)
    with_queue = fit_runs([*runs, Run(ON_H200, most)]).efficiency
    assert with_queue.ahead == pytest.approx(fit_runs(runs).efficiency.ahead, rel=0.1)


def test_calibrate_files(tmp_path: Path) -> None:
    file = runs_file(tmp_path / "runs.json")
    found = calibrate([file], ON_H200, engine="vllm", version="0.19.0")
    assert (found.gpu, found.engine, found.version, found.format) == ("h200", "vllm", "0.19.0", "fp8")
    assert (found.num_runs, found.notices) == (8, ())
    assert found.error_after < found.error_before
    priors = fit([file], ON_H200)
    assert priors.efficiency == found.efficiency
    assert "8 runs of vllm 0.19.0 on h200, llama-3.1-8b in fp8" in priors.source
    assert priors.spread.itl < default_priors().spread.itl


@pytest.mark.parametrize(
    ("change", "asked", "message"),
    [
        ({"gpu": "NVIDIA B200"}, {}, "measured on NVIDIA B200, and the plan is for H200"),
        ({}, {"version": "0.20.0"}, "engine version 0.19.0, and 0.20.0 is asked for"),
        ({}, {"engine": "sglang"}, "engine vllm, and sglang is asked for"),
        ({"layout": "tp3"}, {}, "tensor parallel 3 does not divide"),
    ],
)
def test_runs_of_something_else(change: dict[str, Any], asked: dict[str, str], message: str, tmp_path: Path) -> None:
    file = runs_file(tmp_path / "runs.json", lambda run: {**run, **change})
    with pytest.raises(UsageError, match=message):
        calibrate([file], ON_H200, **asked)


def test_two_versions_are_not_mixed(tmp_path: Path) -> None:
    old = runs_file(tmp_path / "old.json")
    new = runs_file(tmp_path / "new.json", lambda run: {**run, "engine_version": "0.20.0"})
    with pytest.raises(UsageError, match=r"more than one engine version: 0\.19\.0, 0\.20\.0"):
        calibrate([old, new], ON_H200)


def test_notices(tmp_path: Path) -> None:
    file = runs_file(tmp_path / "a.json", lambda run: {**run, "engine_version": None})
    assert "version" in calibrate([file], ON_H200).notices[0]
    speeds = iter((0.2, 5.0) * 4)
    wild = runs_file(tmp_path / "b.json", lambda run: {**run, "mean_tpot_ms": run["mean_tpot_ms"] * next(speeds)})
    assert "are model, format and layout" in calibrate([wild], ON_H200).notices[0]


@pytest.mark.parametrize(
    ("gpu", "text", "is_it"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("h200", "NVIDIA H200", True),
        ("h200", "NVIDIA H100 80GB HBM3", False),
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("b200", "NVIDIA GB200", False),
        ("gb200", "NVIDIA GB200", True),
        ("rtx-5090", "NVIDIA GeForce RTX 5090", True),
        ("dgx-spark", "NVIDIA GB10", True),
        ("b200", "b200", True),
    ],
)
def test_names_of_gpus(gpu: str, text: str, is_it: bool) -> None:
    assert is_named(find_gpu(gpu), text) == is_it


def test_kept_and_found_again(found: Calibration, tmp_path: Path) -> None:
    file = tmp_path / "folder" / "calibrations.json"
    save_calibration(found, file)
    other = replace(found, engine="sglang", version="0.5.9")
    save_calibration(other, file)
    newer = replace(found, date="2099-01-01")
    save_calibration(newer, file)
    assert read_calibrations(file) == [other, newer]
    assert load_calibration(ON_H200, "vllm", "0.19.0", file) == newer
    assert load_calibration(ON_H200, "sglang", None, file) == other
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("asked", [("vllm", "0.20.0"), ("tensorrt-llm", None)])
def test_another_engine_or_version_is_refused(
    asked: tuple[str, str | None], found: Calibration, tmp_path: Path
) -> None:
    file = save_calibration(found, tmp_path / "c.json")
    with pytest.raises(UsageError, match="no calibration for") as caught:
        load_calibration(ON_H200, *asked, file)
    assert "vllm 0.19.0 on h200, llama-3.1-8b in fp8" in caught.value.hint


def test_another_gpu_format_or_model_is_not_calibrated(found: Calibration, tmp_path: Path) -> None:
    file = save_calibration(found, tmp_path / "c.json")
    larger = from_config(presets()["llama-3.1-70b"], "llama-3.1-8b")
    assert load_calibration(replace(ON_H200, gpu=find_gpu("b200")), "vllm", None, file) is None
    assert load_calibration(replace(ON_H200, weights=weights_of(LLAMA, "nvfp4")), "vllm", None, file) is None
    assert load_calibration(replace(ON_H200, architecture=larger), "vllm", None, file) is None
    renamed = replace(ON_H200, architecture=replace(LLAMA, name="my-tuned-llama"))
    assert load_calibration(renamed, "vllm", None, file) is not None


def test_the_users_own_file(found: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKSCALE_CONFIG", str(tmp_path / "config"))
    assert load_calibration(ON_H200) is None
    assert save_calibration(found) == default_calibration_file() == tmp_path / "config" / "calibrations.json"
    assert load_calibration(ON_H200) == found
    assert load_calibration(ON_H200, "sglang") is None


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"calibrations": 3}', '{"calibrations": [{}]}', '{"calibrations": [7]}']
)
def test_a_file_that_is_no_calibration(content: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a calibration file"):
        read_calibrations(write(tmp_path / "c.json", content))


def test_a_damaged_calibration(found: Calibration, tmp_path: Path) -> None:
    file = save_calibration(found, tmp_path / "c.json")
    content = json.loads(file.read_text())
    for value in (-1, "much", None, float("nan")):
        content["calibrations"][0]["efficiency"]["weights"] = value
        with pytest.raises(UsageError, match="not a calibration file"):
            read_calibrations(write(file, content))

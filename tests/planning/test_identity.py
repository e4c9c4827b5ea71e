"""Whether a run can be of the planned model and format, by names as hubs, folders and engines have them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from blockscale.errors import UsageError
from blockscale.planning.calibration.calibrate import calibrate
from blockscale.planning.calibration.calibrations import Calibrations, measured_layout
from blockscale.planning.calibration.identity import format_in, is_same_format, is_same_model
from blockscale.planning.calibration.store import read_calibrations, save_calibration
from blockscale.planning.models.model import find_model
from blockscale.planning.planner import plan
from blockscale.planning.speed.layout import parse_layout
from blockscale.planning.speed.predict import Reach, Workload, calibrated_spread, default_priors, predict
from tests.planning.test_calibrate import ON_H200, runs_file, sglang, tensorrt_llm, vllm, write


@pytest.mark.parametrize(
    ("planned", "said", "is_same"),
    [
        ("llama-3.1-70b", "meta-llama/Llama-3.1-70B-Instruct", True),
        ("llama-3.1-70b", "nvidia/Llama-3.3-70B-Instruct-FP4", True),  # one shape
        ("llama-3.1-70b", "/data/models/llama-3.1-70b-nvfp4/", True),
        ("llama-3.1-70b", "/c/hub/models--meta-llama--Llama-3.1-70B/snapshots/0a1b2c/", True),
        ("llama-3.1-70b", "acme/Hermes-3-Llama-3.1-70B", True),  # an edition
        ("llama-3.1-70b", "model", True),  # says nothing
        ("llama-3.1-70b", "meta-llama/Llama-3.1-8B-Instruct", False),
        ("llama-3.1-70b", "openai/gpt-oss-120b", False),
        ("llama-3.1-70b", "Qwen/Qwen2.5-72B-Instruct", False),  # of a like size
        ("llama-3.1-70b", "acme/support", False),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-70B", False),
        ("deepseek-r1", "deepseek-ai/DeepSeek-R1-0528", True),
        ("deepseek-r1", "nvidia/DeepSeek-R1-0528-NVFP4-v2", True),
        ("deepseek-r1", "deepseek-ai/DeepSeek-V3", True),
        ("deepseek-r1", "deepseek-ai/DeepSeek-R1-Distill-Llama-70B", False),
        ("deepseek-r1", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", False),  # near the size of one token's
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", True),
        ("qwen3-30b-a3b", "Qwen/Qwen3-32B", False),
        ("llama-4-maverick", "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", True),
        ("llama-4-maverick", "meta-llama/Llama-4-Scout-17B-16E-Instruct", False),
    ],
)
def test_names_of_models(planned: str, said: str, is_same: bool) -> None:
    assert is_same_model(said, find_model(planned).architecture) == is_same


@pytest.mark.parametrize(
    ("text", "fmt"),
    [
        ("nvidia/Llama-3.1-8B-Instruct-FP4", "nvfp4"),
        ("meta-llama/Llama-3.1-8B-Instruct", None),
        ("Qwen/Qwen3-8B-AWQ", "int4"),
        ("modelopt_fp4", "nvfp4"),
        ("NVFP4", "nvfp4"),
        ("FP8", "fp8"),
        ("something", None),
    ],
)
def test_formats_in_names(text: str, fmt: str | None) -> None:
    assert format_in(text) == fmt


def test_blocks_of_fp8_are_fp8() -> None:
    assert is_same_format("fp8", "fp8-block128")
    assert not is_same_format("fp8", "nvfp4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_id": "openai/gpt-oss-120b"}, "measured with openai/gpt-oss-120b, and the plan is for llama-3.1-8b"),
        ({"model_id": "meta-llama/Llama-3.1-70B"}, "measured with meta-llama/Llama-3.1-70B"),
        ({"model_id": "nvidia/Llama-3.1-8B-Instruct-FP4"}, "measured in nvfp4, and the plan is for fp8"),
        ({"format": "bf16"}, "measured in bf16, and the plan is for fp8"),
        ({"layout": "tp4"}, "measured as tp4, and the plan is for tp1"),
    ],
)
def test_runs_of_another_model_format_or_layout(change: dict[str, str], message: str, tmp_path: Path) -> None:
    file = runs_file(tmp_path / "runs.json", lambda run: {**run, **change})
    with pytest.raises(UsageError, match=message) as caught:
        calibrate([file], ON_H200)
    assert caught.value.hint


def test_one_run_of_another_model_among_others(tmp_path: Path) -> None:
    own, other = runs_file(tmp_path / "own.json"), write(tmp_path / "other.json", vllm(model_id="Qwen/Qwen3-8B"))
    with pytest.raises(UsageError, match=r"other\.json, run 1: measured with Qwen/Qwen3-8B"):
        calibrate([own, other], ON_H200)


def test_what_says_nothing_is_taken(tmp_path: Path) -> None:
    file = runs_file(tmp_path / "runs.json", lambda run: {**run, "model_id": None, "layout": "tp1", "format": "fp8"})
    assert calibrate([file], ON_H200).num_runs == 8


def test_engines_that_say_the_format(tmp_path: Path) -> None:
    wrong = [
        write(tmp_path / "a.json", [sglang(server={"quantization": "modelopt_fp4", "tp_size": None})] * 8),
        write(tmp_path / "b.json", [tensorrt_llm(engine={"model": "m", "version": "1", "quantization": "NVFP4"})] * 8),
    ]
    for file in wrong:
        with pytest.raises(UsageError, match="measured in nvfp4, and the plan is for fp8"):
            calibrate([file], ON_H200)


def test_a_calibration_knows_what_its_runs_spanned(tmp_path: Path) -> None:
    found = calibrate([runs_file(tmp_path / "runs.json", lambda run: {**run, "layout": "tp1dp2"})], ON_H200)
    assert found.layouts == ("tp1",)
    assert found.reach == Reach((1.0, 64.0), (1024.0, 4096.0), (512.0, 1024.0))  # half of 128 on each of two replicas
    file = save_calibration(found, tmp_path / "kept.json")
    assert read_calibrations(file) == [found]
    old = json.loads(file.read_text())
    for name in ("reach", "layouts"):
        del old["calibrations"][0][name]
    (before,) = read_calibrations(write(tmp_path / "old.json", old))
    assert (before.reach, before.layouts) == (None, ())


def test_beyond_the_calibrated_range_intervals_are_wide_and_said_to_be(tmp_path: Path) -> None:
    file, known = runs_file(tmp_path / "runs.json"), Calibrations("vllm", None, tmp_path / "kept.json")
    known.add([file], ON_H200)
    priors, wide, narrow = known.priors_for(ON_H200), default_priors().spread, calibrated_spread()
    for work, spread in (
        (Workload(1024, 1024, 128), narrow),
        (Workload(1024, 1024, 255), narrow),
        (Workload(1024, 1024, 400), wide),
        (Workload(1024, 128, 64), wide),
        (Workload(16384, 512, 8), wide),
    ):
        p = predict(ON_H200, work, priors)
        assert priors.spread_at(p.sequences, work) == spread
        assert p.itl_s.high / p.itl_s.value == pytest.approx(math.exp(spread.itl))
        said = " ".join(known.notices_for(ON_H200, p.sequences, work))
        assert ("far outside" in said) == (spread == wide)
    said = " ".join(known.notices_for(ON_H200, 400, Workload(1024, 1024, 400)))
    assert "400 requests a replica against 1 to 128" in said


def test_a_layout_that_was_not_measured_is_as_without_a_calibration(tmp_path: Path) -> None:
    known = Calibrations("vllm", None, tmp_path / "kept.json")
    known.add([runs_file(tmp_path / "runs.json")], ON_H200)
    other = replace(ON_H200, layout=parse_layout("tp2dp2"))
    assert known.priors_for(ON_H200).spread == calibrated_spread()
    assert known.priors_for(other).spread == default_priors().spread
    assert "has seen tp1, not tp2" in " ".join(known.notices_for(other, 8, Workload(1024, 1024, 16)))


def test_without_a_layout_that_of_the_runs_is_planned(tmp_path: Path) -> None:
    """The runs' own goes before the one that would serve best."""
    file = runs_file(tmp_path / "runs.json", lambda run: {**run, "layout": "tp2"})
    assert measured_layout([file]) == parse_layout("tp2")
    options = {"gpu": "h200", "format": "fp8", "calibrate": [file], "calibration_file": tmp_path / "kept.json"}
    assert plan("llama-3.1-8b", gpus=4, **options).choice.layout.name == "tp2dp2"
    assert plan("llama-3.1-8b", **options).choice.layout.name == "tp2"
    silent = runs_file(tmp_path / "silent.json")
    assert (
        plan("llama-3.1-8b", gpus=4, **{**options, "calibrate": [silent]}).choice.layout.name == "tp4"
    )  # the usual one
    with pytest.raises(UsageError, match="measured as tp2, and the plan is for tp4"):
        plan("llama-3.1-8b", layout="tp4", **options)

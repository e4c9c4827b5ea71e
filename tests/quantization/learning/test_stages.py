"""`quantize` with a recipe that learns: two stages, one output, and what is left of it when something goes wrong."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import blockscale as bs
from blockscale.checkpoint.shards import read_json
from blockscale.errors import ModelError, OutputError
from blockscale.quantization.layerwise.method import METHODS, SWEPT
from blockscale.quantization.learning import memory
from blockscale.quantization.learning.stages import learning_path

Find = Callable[[str], Path]
STAGES = ("quantizing layers", "quantizing", "learning", "writing")


class Stopped(Exception):
    """What a test stops a run with."""


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = replace(METHODS["learned"], candidates=(SWEPT,), smoothing=(), learning_steps=6)
    monkeypatch.setitem(METHODS, "learned", quick)


@pytest.fixture
def run(tiny_model: Find, calibration_text: Path, tmp_path: Path) -> Callable[..., Any]:
    """Quantizes and learns to `tmp_path / name`."""

    def quantize(name: str = "out", **options: Any) -> Any:
        given = {"calibration": [calibration_text], "max_calibration_tokens": 4096, **options}
        return bs.quantize(tiny_model("llama"), tmp_path / name, "nvfp4-learned", **given)

    return quantize


def stop_at(stage: str, how: type[BaseException], count: int = 1) -> Callable[[str, int, int], None]:
    """A progress that raises when `stage` was told of `count` times."""
    told = 0

    def progress(name: str, done: int, total: int) -> None:
        nonlocal told
        told += name == stage
        if told == count:
            raise how("stopped by a test")

    return progress


def left_in(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.iterdir())


def test_one_folder_comes_of_it(run: Callable[..., Any], tmp_path: Path) -> None:
    seen: list[str] = []
    summary = run(progress=lambda stage, done, total: seen.append(stage))
    assert set(left_in(tmp_path)) == {"out"}
    assert list(dict.fromkeys(seen)) == list(STAGES)
    record = read_json(tmp_path / "out" / "blockscale.json")
    assert summary.learning is not None
    assert summary.learning.steps == 6
    assert summary.learning.kl_after <= summary.learning.kl_before
    assert record["learning"] == summary.to_dict()["learning"]
    assert record["layers"] == json.loads(json.dumps(summary.to_dict()["layers"]))
    assert "method: learned" in record["recipe"]
    assert summary.out == tmp_path / "out"
    assert summary.num_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert not [f for f in bs.lint(tmp_path / "out").findings if f.severity != "info"]


def test_recipes_without_steps_do_not_learn(
    tiny_model: Find, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    summary = bs.quantize(tiny_model("llama"), tmp_path / "out", "nvfp4-gptq", calibration=[calibration_text])
    assert summary.learning is None
    assert "learning" not in read_json(tmp_path / "out" / "blockscale.json")
    assert summary.to_dict()["learning"] is None


@pytest.mark.parametrize(("stage", "count"), [("quantizing layers", 1), ("learning", 3), ("writing", 2)])
def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(
    run: Callable[..., Any], tmp_path: Path, stage: str, count: int
) -> None:
    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run(progress=stop_at(stage, KeyboardInterrupt, count))
    assert learning_path(tmp_path / "out").is_dir()
    assert not (tmp_path / "out").exists()
    seen: list[str] = []
    summary = run(resume=True, progress=lambda stage, done, total: seen.append(stage))
    assert ("quantizing" in seen) == (stage == "quantizing layers"), "a finished first stage is not done again"
    assert set(left_in(tmp_path)) == {"whole", "out"}
    for file in sorted((tmp_path / "whole").iterdir()):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
    assert set(summary.layers) == {
        name.removesuffix(".weight_scale_2")
        for name in load_file(tmp_path / "out" / "model.safetensors")
        if name.endswith(".weight_scale_2")
    }


def test_without_resume_it_starts_over(run: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(progress=stop_at("learning", KeyboardInterrupt))
    seen: list[str] = []
    run(progress=lambda stage, done, total: seen.append(stage))
    assert "quantizing layers" in seen
    assert set(left_in(tmp_path)) == {"out"}


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_leaves_nothing(run: Callable[..., Any], tmp_path: Path, stage: str) -> None:
    with pytest.raises(Stopped):
        run(progress=stop_at(stage, Stopped))
    assert not set(left_in(tmp_path))


@pytest.mark.parametrize("stage", ["quantizing layers", "learning"])
def test_another_jobs_work_is_not_taken_up_and_not_lost(run: Callable[..., Any], tmp_path: Path, stage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(progress=stop_at(stage, KeyboardInterrupt))
    with pytest.raises(OutputError, match="another job"):
        run(resume=True, max_calibration_tokens=2048)
    seen: list[str] = []
    run(resume=True, progress=lambda stage, done, total: seen.append(stage))
    assert (tmp_path / "out").is_dir()
    assert ("quantizing" in seen) == (stage == "quantizing layers")


def test_a_first_stage_that_was_killed_before_it_was_noted_is_done_again(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(progress=stop_at("learning", KeyboardInterrupt))
    (learning_path(tmp_path / "out") / "finished.json").unlink()
    run(resume=True)
    assert set(left_in(tmp_path)) == {"out"}


def test_too_little_memory_is_told_before_the_first_stage(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100_000)
    seen: list[str] = []
    with pytest.raises(ModelError, match="learning needs about"):
        run(progress=lambda stage, done, total: seen.append(stage))
    assert not seen
    assert not set(left_in(tmp_path))


def test_it_learns_from_what_the_model_writes(run: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(calibration=[], max_calibration_tokens=1024, progress=stop_at("learning", KeyboardInterrupt))
    summary = run(calibration=[], max_calibration_tokens=1024, resume=True)
    assert summary.learning is not None
    assert set(left_in(tmp_path)) == {"out"}

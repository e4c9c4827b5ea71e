"""Calibration on what the model writes itself: how much, how it resumes, what is recorded, and when it is used."""

import gc
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockscale import api
from blockscale.checkpoint.output import PROGRESS_NAME, partial_path
from blockscale.cli.main import main
from blockscale.errors import ModelError, OutputError
from blockscale.host.model import load_tokenizer
from blockscale.quantization import self_text
from blockscale.quantization.calibration_data import CalibrationData, tokenize
from blockscale.quantization.search.budget import Budget
from blockscale.quantization.self_text import add_self_text
from blockscale.texts import Text

Find = Callable[[str], Path]
LENGTH = 24


class Stop(BaseException):
    """An interruption."""


def asked(count: int, seed: int = 0) -> CalibrationData:
    data = tokenize([], list, count * LENGTH, LENGTH, self_share=1.0, seed=seed)
    assert data.num_to_write == count
    return data


@pytest.fixture
def model(tiny_model: Find) -> Path:
    return tiny_model("llama")


def write(data: CalibrationData, path: Path, **options: Any) -> CalibrationData:
    return add_self_text(data, path, **options)


def test_windows_and_what_is_recorded(model: Path) -> None:
    data = write(asked(3, seed=5), model)
    assert data.windows.shape == (3, LENGTH)
    assert data.num_to_write == 0
    assert [(text.name, text.num_tokens) for text in data.texts] == [("self", 3 * LENGTH)]
    record = json.loads(json.dumps(data.to_dict()))
    assert (record["seed"], record["texts"][0]["name"]) == (5, "self")
    assert data.texts[0].words.num_words > 0
    assert torch.equal(data.windows, write(asked(3, seed=5), model).windows)
    assert data.digest == write(asked(3, seed=5), model).digest
    others = [write(asked(3), model), write(asked(3, seed=6), model)]
    assert len({data.digest, *(other.digest for other in others)}) == 3


def test_behind_the_windows_of_texts(model: Path) -> None:
    texts = [Text("a", "x" * 1000)]
    data = tokenize(texts, load_tokenizer(model).encode, 4 * LENGTH, LENGTH, shares=[0.5], self_share=0.5)
    whole = write(data, model)
    assert torch.equal(whole.windows[:2], data.windows)
    assert (data.windows == ord("x")).all()
    assert not (whole.windows[2:] == ord("x")).all()
    assert [(text.name, text.num_tokens) for text in whole.texts] == [("a", 2 * LENGTH), ("self", 2 * LENGTH)]
    assert write(tokenize(texts, load_tokenizer(model).encode, LENGTH, LENGTH), model).num_tokens == LENGTH


def test_batches_go_on_where_a_killed_run_stopped(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_text, "BATCH", 2)
    whole = write(asked(5), model)
    assert len({tuple(window) for window in whole.windows.tolist()}) == 5

    def stop(stage: str, done: int, total: int) -> None:
        assert total == 5 * LENGTH
        if done > 3.5 * LENGTH:
            raise Stop

    with pytest.raises(Stop):
        write(asked(5), model, folder=tmp_path / "state", progress=stop)
    seen: list[int] = []
    resumed = write(asked(5), model, folder=tmp_path / "state", progress=lambda *a: seen.append(a[1]))
    assert torch.equal(resumed.windows, whole.windows)
    assert resumed.digest == whole.digest
    assert 2 * LENGTH < seen[0] < 3 * LENGTH, "the first batch is not written again"
    assert seen[-1] == 5 * LENGTH

    monkeypatch.setattr(self_text, "load_model", lambda *_, **__: pytest.fail("all windows were there"))
    assert torch.equal(write(asked(5), model, folder=tmp_path / "state").windows, whole.windows)


def test_what_another_job_left_is_not_taken(model: Path, tmp_path: Path) -> None:
    write(asked(2, seed=1), model, folder=tmp_path)
    assert torch.equal(write(asked(2, seed=2), model, folder=tmp_path).windows, write(asked(2, seed=2), model).windows)


def test_the_model_is_gone_afterwards(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def load(path: Path, **options: Any) -> Any:
        hosted = load_model(path, **options)
        loaded.append(weakref.ref(hosted.model))
        return hosted

    load_model = self_text.load_model
    monkeypatch.setattr(self_text, "load_model", load)
    gc.disable()
    try:
        write(asked(2), model)
        assert loaded[0]() is None
    finally:
        gc.enable()


def test_a_model_larger_than_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(self_text.os, "sysconf", lambda name: sizes[name])
    with pytest.raises(ModelError, match=r"needs .* kB of memory, and there are 40.96 kB") as error:
        write(asked(2), model)
    assert "--calibration FILE" in error.value.hint


def quantize(model: Path, out: Path, recipe: str = "nvfp4-gptq", **options: Any) -> Any:
    return api.quantize(model, out, recipe, max_calibration_tokens=1024, **options)


def record_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "blockscale.json").read_text())["calibration"]
    return found


def test_a_method_without_text_takes_it_by_itself(model: Path, tmp_path: Path) -> None:
    """Weights only or activations too, and the same as asking for it."""
    summary = quantize(model, tmp_path / "a", "nvfp4-w4a16-gptq")
    assert any(notice.startswith("no calibration text: the model writes its own") for notice in summary.notices)
    assert all(layer.activation is None for layer in summary.layers.values())
    record = record_of(tmp_path / "a")
    assert [(text["name"], text["num_tokens"]) for text in record["texts"]] == [("self", 1024)]
    assert record["seed"] == 0

    summary = quantize(model, tmp_path / "b")
    assert all(layer.activation == "nvfp4" for layer in summary.layers.values())
    asked = quantize(model, tmp_path / "c", calibration=["self"])
    assert not any("the model writes its own" in notice for notice in asked.notices)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "bc"]
    assert weights[0] == weights[1]


def test_ranges_are_calibrated_on_it_when_asked(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    argv = ["quantize", model, tmp_path / "q", "--calibration", "self", "--calibration-tokens", "512"]
    assert main([str(a) for a in [*argv, "--calibration-seed", "7", "--kv-cache", "fp8"]]) == 0
    record = record_of(tmp_path / "q")
    assert (record["seed"], record["texts"][0]["num_tokens"]) == (7, 512)
    summary = quantize(model, tmp_path / "w", "nvfp4")
    assert all(layer.activation is None for layer in summary.layers.values()), "without asking, weights only"


def test_in_a_mix(model: Path, calibration_text: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "q", calibration=["self:0.5", (calibration_text, 0.5)])
    texts = record_of(tmp_path / "q")["texts"]
    assert [(text["name"], text["num_tokens"]) for text in texts] == [("calibration", 512), ("self", 512)]


@pytest.mark.parametrize("stage", ["writing calibration text", "quantizing layers"])
def test_interrupted_and_resumed(stage: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_text, "BATCH", 1)
    quantize(model, tmp_path / "whole")

    def stop(name: str, done: int, total: int) -> None:
        if name == stage and done > 0.6 * total:
            raise Stop

    with pytest.raises(Stop):
        quantize(model, tmp_path / "out", progress=stop)
    assert (partial_path(tmp_path / "out") / "self_text" / PROGRESS_NAME).is_file()
    seen: list[tuple[str, int, int]] = []
    quantize(model, tmp_path / "out", resume=True, progress=lambda *a: seen.append(a))
    written = [done for name, done, _ in seen if name == "writing calibration text"]
    assert written[:1] == ([512 + 2] if stage == "writing calibration text" else [])
    files = [sorted((p.name, p.read_bytes()) for p in (tmp_path / name).iterdir()) for name in ("whole", "out")]
    assert files[0] == files[1]
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def test_another_seed_is_another_job(model: Path, tmp_path: Path) -> None:
    def stop(name: str, done: int, total: int) -> None:
        if name == "quantizing layers":
            raise Stop

    with pytest.raises(Stop):
        quantize(model, tmp_path / "out", progress=stop)
    with pytest.raises(OutputError, match="unfinished work of another job"):
        quantize(model, tmp_path / "out", resume=True, calibration_seed=1)


def test_a_search_can_score_on_it(model: Path) -> None:
    mixture = api.search_recipe(model, budget=Budget(bits=6.0), calibration=["self"], max_calibration_tokens=1024)
    assert mixture.bits <= 6.0

"""Killed and interrupted runs: what they leave behind, and that resuming gives the bytes of an undisturbed run."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blockscale import api
from blockscale.checkpoint.output import PROGRESS_NAME, OutputFolder, partial_path
from blockscale.errors import BlockscaleError, OutputError

from .sources import llama
from .test_pipeline import CONFIG, all_files, drawn, spread

Find = Callable[[str], Path]
W4A16 = "nvfp4-w4a16"

CHILD = textwrap.dedent(
    """
    import json, os, signal, sys
    from blockscale import api
    from blockscale.checkpoint.output import OutputFolder

    arguments = json.loads(sys.argv[1])
    stage, share, when, number = arguments.pop("at")

    def stop():
        os.kill(os.getpid(), number)

    def progress(name, done, total):
        if name == stage and when == "progress" and done >= share * total:
            stop()

    if when == "journal":  # the tensors of a unit are written, and not yet known to be
        mark_done, units = OutputFolder.mark_done, []
        def mark(self, unit, record=None):
            units.append(unit)
            if len(units) == 5:
                stop()
            mark_done(self, unit, record)
        OutputFolder.mark_done = mark
    if when == "rename":
        os.replace = lambda *_: stop()
    api.quantize(progress=progress, **arguments)
    """
)


def run_child(at: tuple[str, float, str, int], **arguments: object) -> subprocess.CompletedProcess[str]:
    """Quantizes in another process that sends itself a signal."""
    what = json.dumps({"at": at, **arguments}, default=str)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", CHILD, what], capture_output=True, text=True, env=environment, timeout=120, check=False
    )


@pytest.fixture
def job(with_tokenizer: Find, calibration_text: Path) -> dict[str, object]:
    """Of both stages: calibrated W4A4 with cache scales."""
    return {
        "model": with_tokenizer("base_qwen3moe"),
        "recipe": "nvfp4",
        "calibration": [str(calibration_text)],
        "max_calibration_tokens": 2048,
        "kv_cache": "fp8",
    }


@pytest.mark.parametrize(
    "at",
    [("calibrating", 0.5, "progress"), ("quantizing", 0.5, "progress"), ("quantizing", 0.0, "journal")],
    ids=["calibrating", "streaming", "before the journal"],
)
def test_killed_and_resumed(at: tuple[str, float, str], job: dict[str, object], tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    api.quantize(out=whole, **job)
    child = run_child((*at, signal.SIGKILL), out=out, **job)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert not out.exists(), "an output appears whole or not at all"
    assert (partial_path(out) / "calibration" / PROGRESS_NAME).is_file()

    seen = []
    api.quantize(out=out, resume=True, progress=lambda *a: seen.append(a), **job)
    assert all_files(out) == all_files(whole)
    assert not partial_path(out).exists()
    if at[0] == "calibrating":
        assert [a for a in seen if a[0] == "calibrating"] == [("calibrating", 2, 2)], "layer 0 is not run again"
    else:
        assert not any(stage == "calibrating" for stage, *_ in seen)
        first = next(a for a in seen if a[0] == "quantizing")
        assert first[1] > (0.4 * first[2] if at[2] == "progress" else 0), "finished units are not done again"


def test_killed_at_the_last_moment(write_model, tmp_path: Path) -> None:
    """Everything is written and checked, and only the name is missing."""
    source, out = write_model(CONFIG, spread(drawn(llama(2)), 2)), tmp_path / "out"
    child = run_child(("", 0.0, "rename", signal.SIGKILL), model=source, out=out, recipe=W4A16)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert not out.exists()
    api.quantize(source, tmp_path / "whole", W4A16)
    api.quantize(source, out, W4A16, resume=True, progress=lambda *a: pytest.fail("a unit was done again"))
    assert all_files(out) == all_files(tmp_path / "whole")


def test_interrupted_from_the_keyboard(write_model, tmp_path: Path) -> None:
    source, out = write_model(CONFIG, spread(drawn(llama(2)), 2)), tmp_path / "out"
    child = run_child(("quantizing", 0.3, "progress", signal.SIGINT), model=source, out=out, recipe=W4A16)
    assert child.returncode != 0
    assert "KeyboardInterrupt" in child.stderr
    assert not out.exists()
    assert partial_path(out).is_dir()
    api.quantize(source, tmp_path / "whole", W4A16)
    api.quantize(source, out, W4A16, resume=True)
    assert all_files(out) == all_files(tmp_path / "whole")


class Stop(BaseException):
    """An interruption."""


def interrupted(source: Path, out: Path, share: float = 0.5, **options: object) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if done >= share * total:
            raise Stop

    with pytest.raises(Stop):
        api.quantize(source, out, W4A16, progress=progress, **options)
    assert partial_path(out).is_dir()


def test_without_resume_a_run_starts_anew(write_model, tmp_path: Path) -> None:
    source, out = write_model(CONFIG, [drawn(llama(2))]), tmp_path / "out"
    interrupted(source, out)
    done = []
    api.quantize(source, out, W4A16, progress=lambda *a: done.append(a[1]))
    assert done[0] < done[-1] / 4
    api.quantize(source, tmp_path / "whole", W4A16)
    assert all_files(out) == all_files(tmp_path / "whole")


@pytest.mark.parametrize("change", ["recipe", "keep", "source"])
def test_another_job_does_not_take_up_the_work(change: str, write_model, tmp_path: Path) -> None:
    tensors = drawn(llama(2))
    source, out = write_model(CONFIG, [tensors]), tmp_path / "out"
    interrupted(source, out)
    recipe, keep = W4A16, []
    if change == "recipe":
        recipe = "nvfp4-w4a16-sweep"
    elif change == "keep":
        keep = ["*.o_proj"]
    else:
        time = (source / "model.safetensors").stat().st_mtime_ns
        tensors["model.layers.0.self_attn.o_proj.weight"] += 1
        write_model(CONFIG, [tensors], "other")
        os.replace(tmp_path / "other" / "model.safetensors", source / "model.safetensors")
        os.utime(source / "model.safetensors", ns=(time + 1, time + 1))
    with pytest.raises(OutputError, match="unfinished work of another job"):
        api.quantize(source, out, recipe, keep=keep, resume=True)
    api.quantize(source, out, recipe, keep=keep)
    api.quantize(source, tmp_path / "whole", recipe, keep=keep)
    assert all_files(out) == all_files(tmp_path / "whole")


@pytest.mark.parametrize("shares", [(0.2, 0.5, 0.8)])
def test_resumed_again_and_again(shares: tuple[float, ...], write_model, tmp_path: Path) -> None:
    source, out = write_model(CONFIG, spread(drawn(llama(2)), 3)), tmp_path / "out"
    for share in shares:
        interrupted(source, out, share, resume=True)
    api.quantize(source, out, W4A16, resume=True)
    api.quantize(source, tmp_path / "whole", W4A16)
    assert all_files(out) == all_files(tmp_path / "whole")


def test_an_error_removes_the_work(write_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a unit in a worker thread, while others run; torch's threads are as before."""
    source, out = write_model(CONFIG, [drawn(llama(8))]), tmp_path / "out"
    write, calls = OutputFolder.write, []

    def fail_late(self: OutputFolder, name: str, tensor: torch.Tensor) -> None:
        calls.append(name)
        if len(calls) == 20:
            raise BlockscaleError("the disk fell out")
        write(self, name, tensor)

    monkeypatch.setattr(OutputFolder, "write", fail_late)
    before = torch.get_num_threads()
    with pytest.raises(BlockscaleError, match="the disk fell out"):
        api.quantize(source, out, W4A16)
    assert {p.name for p in tmp_path.iterdir()} == {"model"}
    assert torch.get_num_threads() == before
    assert len(calls) < 8 * 7 * 3 / 2, "units that had not begun are dropped"


def test_two_processes_do_not_share_one_output(write_model, tmp_path: Path) -> None:
    source, out = write_model(CONFIG, [drawn(llama(1))]), tmp_path / "out"

    def start_another(stage: str, done: int, total: int) -> None:
        for resume in (False, True):
            with pytest.raises(BlockscaleError, match="being written by another process"):
                api.quantize(source, out, W4A16, resume=resume)

    api.quantize(source, out, W4A16, progress=start_another)
    assert (out / "model.safetensors").is_file()

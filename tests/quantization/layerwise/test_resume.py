"""Layer-wise runs that are interrupted or killed, and taken up: the same bytes, and no layer twice."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.fresh import run_fresh
from torch import Tensor

from blockscale import api
from blockscale.checkpoint.output import PROGRESS_NAME, partial_path
from blockscale.errors import OutputError

from ..test_pipeline import all_files
from ..test_walk import SHARING, small_model
from .running import quantize, windows
from .test_left_out import ids, overflowing

Find = Callable[[str], Path]
LAYERS = "quantizing layers"


class Stop(BaseException):
    """An interruption."""


def interrupted(model: Path, out: Path, recipe: str, given: Tensor, stage: str, done: int) -> None:
    def progress(name: str, now: int, total: int) -> None:
        if (name, now) == (stage, done) or (name == stage and not done):
            raise Stop

    with pytest.raises(Stop):
        quantize(model, out, recipe, given, kv_cache="fp8", resume=True, progress=progress)
    assert not out.exists()


def resumed(model: Path, out: Path, recipe: str, given: Tensor) -> list[int]:
    """Layers that were still to do."""
    seen: list[tuple[str, int]] = []
    quantize(model, out, recipe, given, kv_cache="fp8", resume=True, progress=lambda *a: seen.append(a[:2]))
    assert not partial_path(out).exists()
    return [layer for stage, layer in seen if stage == LAYERS]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_interrupted_after_every_layer(family: str, tiny_model: Find, tmp_path: Path) -> None:
    model, out, given = tiny_model(family), tmp_path / "out", windows(9, 16)
    quantize(model, tmp_path / "whole", "nvfp4-best", given, kv_cache="fp8")
    interrupted(model, out, "nvfp4-best", given, LAYERS, 1)
    interrupted(model, out, "nvfp4-best", given, LAYERS, 2)
    assert resumed(model, out, "nvfp4-best", given) == []
    assert all_files(out) == all_files(tmp_path / "whole")


def test_interrupted_after_the_layers(tiny_model: Find, tmp_path: Path) -> None:
    """Hours may lie behind: none of them is done again."""
    model, out, given = tiny_model("llama"), tmp_path / "out", windows(9, 16)
    quantize(model, tmp_path / "whole", "nvfp4-gptq", given, kv_cache="fp8")
    interrupted(model, out, "nvfp4-gptq", given, "quantizing", 0)
    folder = partial_path(out) / "layers"
    assert not list(folder.glob("*/*/*")), "hidden states are of no more use"
    assert resumed(model, out, "nvfp4-gptq", given) == []
    assert all_files(out) == all_files(tmp_path / "whole")


def test_windows_that_were_left_out_stay_out(tmp_path: Path) -> None:
    """Found in the last layer, of a run that had been interrupted before it and is again after it."""
    model, out, given = overflowing(tmp_path / "m"), tmp_path / "out", ids(1, 8, 9, 16, 17, 18, 19)
    quantize(model, tmp_path / "whole", "nvfp4-best", given, kv_cache="fp8")
    for done in (1, 2):
        interrupted(model, out, "nvfp4-best", given, LAYERS, done)
        state = json.loads((partial_path(out) / "layers" / PROGRESS_NAME).read_text())
        assert len(state["faults"]) == (0 if done == 1 else 7)
    assert resumed(model, out, "nvfp4-best", given) == []
    assert all_files(out) == all_files(tmp_path / "whole")


def test_layers_that_share_keys_and_values(tmp_path: Path) -> None:
    """Windows longer than what layers are probed with; the second layer leaves what the fourth reads, in another run
    too. Its linears before the layers keep the range of their inputs."""
    model = small_model(tmp_path / "m", "gemma4_text", **SHARING, sliding_window=8)
    out, given = tmp_path / "out", windows(9, 48)
    quantize(model, tmp_path / "whole", "nvfp4-best", given, kv_cache="fp8")
    interrupted(model, out, "nvfp4-best", given, LAYERS, 2)
    assert resumed(model, out, "nvfp4-best", given) == [3, 4]
    assert all_files(out) == all_files(tmp_path / "whole")
    record = json.loads((out / "blockscale.json").read_text())["layers"]
    assert record["model.per_layer_model_projection"]["input_amax"] > 0


@pytest.mark.parametrize("damage", ["hidden states", "state", "not a state"])
def test_what_is_damaged_is_done_again(damage: str, tiny_model: Find, tmp_path: Path) -> None:
    model, out, given = tiny_model("llama"), tmp_path / "out", windows(9, 16)
    quantize(model, tmp_path / "whole", "nvfp4-gptq", given, kv_cache="fp8")
    interrupted(model, out, "nvfp4-gptq", given, LAYERS, 1)
    folder = partial_path(out) / "layers"
    if damage == "hidden states":
        (folder / "reference" / "1" / "1").write_bytes(b"cut")
    elif damage == "state":
        (folder / PROGRESS_NAME).write_text("{")
    else:
        (folder / PROGRESS_NAME).write_text('["next_layer"]')
    assert resumed(model, out, "nvfp4-gptq", given) == [1, 2]
    assert all_files(out) == all_files(tmp_path / "whole")


@pytest.mark.parametrize("change", ["method", "activation_scale", "text"])
def test_another_job_is_not_taken_up(change: str, tiny_model: Find, tmp_path: Path) -> None:
    model, out, given = tiny_model("llama"), tmp_path / "out", windows(9, 16)
    interrupted(model, out, "nvfp4-best", given, LAYERS, 1)
    recipe = "nvfp4-gptq" if change == "method" else "nvfp4-best"
    if change == "activation_scale":
        file = tmp_path / "amax.yaml"
        file.write_text("{name: nvfp4-best, weight: nvfp4, activation: nvfp4, scale: sweep, method: best}")
        recipe = str(file)
    other = windows(9, 16, seed=5) if change == "text" else given
    with pytest.raises(OutputError, match="unfinished work of another job"):
        quantize(model, out, recipe, other, kv_cache="fp8", resume=True)


def test_a_seed_that_draws_other_windows_is_another_job(
    tiny_model: Find, calibration_text: Path, tmp_path: Path
) -> None:
    model, out = tiny_model("llama"), tmp_path / "out"
    how = {"calibration": [calibration_text], "max_calibration_tokens": 1024}

    def stop(*_: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        api.quantize(model, out, "nvfp4-gptq", calibration_seed=1, progress=stop, **how)
    with pytest.raises(OutputError, match="unfinished work of another job"):
        api.quantize(model, out, "nvfp4-gptq", calibration_seed=2, resume=True, **how)


# One process imports once and forks for every run: a child that is killed, then one that goes on.
KILLED = textwrap.dedent(
    """
    import shutil, sys
    from pathlib import Path
    import torch
    sys.path[:0] = [{tests!r}]
    from faults.dying import count_writes, in_child, killed_at
    from quantization.layerwise.running import quantize
    from quantization.layerwise.test_left_out import ids
    from quantization.test_pipeline import all_files

    torch.set_num_threads(1)
    model, work = Path({path!r}), Path({work!r})
    given = ids(*{bad!r}, count=9)

    def run(out):
        done = []
        quantize(model, out, "nvfp4-awq", given, resume=True,
                 progress=lambda stage, layer, total: done.append(layer) if stage == "quantizing layers" else None)
        return all_files(out), done

    whole, _ = run(work / "whole")  # and all is imported
    total = count_writes(lambda: run(work / "counted"))
    result = dict(total=total, signals=[], layers=[], wrong=[])
    for die_at in sorted(set(range({first}, total, {step})) | set([total - 1])):
        out = work / str(die_at)
        result["signals"].append(killed_at(die_at, lambda: run(out)))

        def go_on():
            if out.exists():  # it died while it removed what is of no more use
                return all_files(out) == whole, []
            files, done = run(out)
            return files == whole and not (work / ("." + out.name + ".partial")).exists(), done

        is_right, layers = in_child(go_on)
        result["layers"].append(layers)
        if not is_right:
            result["wrong"].append(die_at)
        shutil.rmtree(out)
    """
)


@pytest.mark.parametrize("bad", [(), (1, 8)], ids=["sound windows", "windows left out"])
@pytest.mark.parametrize(
    ("first", "step"), [(5, 19), pytest.param(0, 1, marks=pytest.mark.slow)], ids=["at some writes", "at every write"]
)
def test_killed(first: int, step: int, bad: tuple[int, ...], tmp_path: Path) -> None:
    """In the middle of a layer too, and of one that finds that it cannot run some windows."""
    model, tests = overflowing(tmp_path / "m"), Path(__file__).parents[2]
    code = KILLED.format(path=str(model), work=str(tmp_path), tests=str(tests), bad=bad, first=first, step=step)
    found = run_fresh(code, {"OMP_NUM_THREADS": "1"}).result
    assert set(found["signals"]) == {-9}
    assert found["wrong"] == []
    assert found["total"] > 100
    layers = [tuple(run) for run in found["layers"]]
    assert layers == sorted(layers, key=len, reverse=True), "the later it died, the less is done again"
    assert set(layers) == {(1, 2), (2,), ()}

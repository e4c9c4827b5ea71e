"""What inspect, lint and the verdicts on engines say of what lies beside weights."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults.branches import NUM_CHANNELS, RANK, add_residual, record, with_branches
from faults.raw import GOLDEN, Tensors, copy_golden, edit, load, modules_of, num_bytes

from blockscale import api
from blockscale.inspection.contents import inspect_folder
from blockscale.inspection.engines import Verdict
from blockscale.inspection.lint import lint_folder
from blockscale.inspection.rows import layer_rows

NVFP4 = "modelopt_llama_nvfp4"
SERVERS = ("vLLM", "SGLang", "TensorRT-LLM")
DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_branches(tmp_path_factory.mktemp("branches"), None)


def verdict(folder: Path, engine: str) -> Verdict:
    return next(found for found in inspect_folder(folder).engines if found.engine == engine)


# ---------------------------------------------------------------- inspect


def test_they_are_shown_and_their_bits_are_counted(folder: Path) -> None:
    found = inspect_folder(folder)
    assert not found.faults
    assert found.num_bytes == num_bytes(load(folder))
    linears = {m.weight.name for layer in found.layers for m in layer.members}
    assert {kept.name for kept in found.kept} == load(GOLDEN / "base_llama").keys() - {f"{m}.weight" for m in linears}
    tensors = load(folder)
    for layer in found.layers:
        has_branch = layer.name.endswith(("o_proj", "down_proj"))
        assert (layer.rank, layer.num_residual_channels) == (RANK if has_branch else 0, NUM_CHANNELS)
        names = [m.weight.name for m in layer.members]
        own = sum(
            t.numel() * t.element_size()
            for n, t in tensors.items()
            if n.startswith(tuple(f"{name}." for name in names))
        )
        assert layer.num_bytes == own
        entry = layer.to_dict()
        assert (entry["rank"], entry["num_residual_channels"]) == (layer.rank, NUM_CHANNELS)
        assert entry["format"] == "nvfp4"
    assert found.num_parameters == inspect_folder(GOLDEN / NVFP4).num_parameters
    assert found.quantized_bits_per_parameter > inspect_folder(GOLDEN / NVFP4).quantized_bits_per_parameter
    formats = {row.name.rpartition(".")[2]: row.format for row in layer_rows(found)}
    assert formats["down_proj"] == f"nvfp4 + rank {RANK} + {NUM_CHANNELS} residual channels"
    assert formats["gate+up_proj"] == f"nvfp4 + {NUM_CHANNELS} residual channels"


def test_layers_that_differ_in_that_are_not_one_row(tmp_path: Path) -> None:
    folder = copy_golden(NVFP4, tmp_path)
    edit(folder, lambda tensors: add_residual(tensors, "model.layers.1.mlp.down_proj"))
    rows = [row for row in layer_rows(inspect_folder(folder)) if row.name.endswith("down_proj")]
    assert sorted(row.format for row in rows) == ["nvfp4", f"nvfp4 + {NUM_CHANNELS} residual channels"]


def test_the_command_line_and_the_page_show_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from blockscale.cli.main import main

    assert main(["inspect", str(folder), "--report", str(tmp_path / "page.html")]) == 0
    assert "rank 4 + 16 residual channels" in capsys.readouterr().out
    assert "rank 4 + 16 residual channels" in (tmp_path / "page.html").read_text()


# ---------------------------------------------------------------- engines


def test_blockscale_alone_runs_them(folder: Path) -> None:
    found = {each.engine: each for each in inspect_folder(folder).engines}
    assert found["blockscale"].loads
    for engine in (*SERVERS, "transformers", "llama.cpp"):
        assert found[engine].loads is False, engine
    for engine in SERVERS:
        assert "low-rank branch" in found[engine].reason


def test_engines_do_not_run_residual_channels(tmp_path: Path) -> None:
    folder = copy_golden(NVFP4, tmp_path)

    def change(tensors: Tensors) -> None:
        for module in modules_of(tensors):
            add_residual(tensors, module)

    edit(folder, change)
    for engine in SERVERS:
        found = verdict(folder, engine)
        assert found.loads is False
        assert "residual channels" in found.reason
        assert "--to compressed-tensors" in found.reason
    assert verdict(folder, "blockscale").loads
    api.convert(folder, tmp_path / "ct", "compressed-tensors")
    assert all(verdict(tmp_path / "ct", engine).loads for engine in SERVERS)


@pytest.mark.parametrize("name", [NVFP4, "ct_llama_nvfp4"])
def test_engines_take_amax_whatever_the_record_says(name: str, tmp_path: Path) -> None:
    folder = copy_golden(name, tmp_path)
    assert not any("by amax" in each.reason for each in inspect_folder(folder).engines)
    record(activation_scale="four_over_six")(folder)
    for engine in SERVERS:
        found = verdict(folder, engine)
        assert found.loads
        assert "by amax, where blockscale does by four_over_six" in found.reason
    assert "amax" not in verdict(folder, "blockscale").reason


def test_where_nothing_is_rounded_there_is_nothing_to_say(tmp_path: Path) -> None:
    folder = copy_golden("modelopt_llama_w4a16_nvfp4", tmp_path)
    record(activation_scale="sweep")(folder)
    assert not any("by amax" in each.reason for each in inspect_folder(folder).engines)


def test_a_record_that_only_blockscale_stops_at(tmp_path: Path) -> None:
    folder = copy_golden(NVFP4, tmp_path)
    record(activation_scale="of_tomorrow")(folder)
    assert all(verdict(folder, engine).loads for engine in SERVERS)
    assert verdict(folder, "blockscale").loads is False
    (finding,) = (f for f in lint_folder(folder).findings if f.severity == "error")
    assert (finding.code, finding.name, finding.layer) == ("BS323", "unknown-activation-scale", "blockscale.json")


# ---------------------------------------------------------------- lint


@pytest.mark.parametrize("quick", [False, True])
def test_lint_knows_them(folder: Path, quick: bool) -> None:
    assert not [f for f in lint_folder(folder, quick=quick).findings if f.severity != "info"]


def test_lint_knows_the_weight_beside_its_source(folder: Path) -> None:
    """Which the codes alone are not: a branch holds the largest parts of it."""
    report = lint_folder(folder, source=GOLDEN / "base_llama")
    assert not [f for f in report.findings if f.severity != "info"]


def changed(folder: Path, parent: Path, change: Callable[[Tensors], None]) -> Path:
    copy = Path(shutil.copytree(folder, parent / "changed"))
    edit(copy, change)
    return copy


def test_a_branch_of_another_weight_shows_beside_the_source(folder: Path, tmp_path: Path) -> None:
    def negate(tensors: Tensors) -> None:
        tensors[f"{DOWN}.svdquant_lora_b"].neg_()

    other = changed(folder, tmp_path, negate)
    found = lint_folder(other, source=GOLDEN / "base_llama").findings
    assert any(f.layer == DOWN and f.severity != "info" for f in found)


def test_each_weight_is_named(folder: Path, tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[f"{UP}.residual_channels"].fill_(3)
        tensors[f"{DOWN}.svdquant_lora_a"].fill_(torch.nan)

    damaged = changed(folder, tmp_path, damage)
    found = {f.layer: f for f in lint_folder(damaged).findings if f.name == "bad-branch"}
    assert found.keys() == {UP, DOWN}
    assert {(f.code, f.severity, f.repair) for f in found.values()} == {("BS120", "error", "")}
    assert "1 channels are named more than once, first 3" in found[UP].message
    assert "are NaN or infinite, first at [0, 0]" in found[DOWN].message
    assert not [f for f in lint_folder(damaged, quick=True).findings if f.name == "bad-branch"], "values are not read"

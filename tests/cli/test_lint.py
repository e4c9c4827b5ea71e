"""`blockscale lint` as a user meets it: a block a rule, totals, JSON, exit codes, and names not to be trusted."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockscale.cli.main import main
from blockscale.cli.output import printable

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
NVFP4, MOE, SOURCE = (GOLDEN / name for name in ("modelopt_llama_nvfp4", "modelopt_qwen3moe_nvfp4", "base_llama"))
DOWN = "model.layers.1.mlp.down_proj"
Tensors = dict[str, torch.Tensor]
Capture = pytest.CaptureFixture[str]


def broken(parent: Path, change: Callable[[Tensors], Any], base: Path = NVFP4) -> Path:
    folder = Path(shutil.copytree(base, parent / "broken"))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def exclude(folder: Path, *entries: str) -> Path:
    for file, section, key in (
        ("config.json", "quantization_config", "ignore"),
        ("hf_quant_config.json", "quantization", "exclude_modules"),
    ):
        config = json.loads((folder / file).read_text())
        config[section][key] += entries
        (folder / file).write_text(json.dumps(config))
    return folder


def test_a_clean_checkpoint(capsys: Capture) -> None:
    assert main(["lint", str(NVFP4)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "0 errors, 0 warnings\n"
    assert captured.err.startswith("note: ")
    assert "error" not in captured.err


def test_findings_come_a_rule_at_a_time(tmp_path: Path, capsys: Capture) -> None:
    folder = exclude(Path(shutil.copytree(MOE, tmp_path / "m")), "model.layers.1.mlp.experts*", "model.vision*")
    assert main(["lint", str(folder)]) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "error: BS304 excluded-but-quantized (12 times)"
    assert sum(line.startswith("  - model.layers.1.mlp.experts.") for line in lines) == 1
    assert (
        sum(line.startswith("    so too model.layers.1.mlp.experts.") and line.endswith(" 8 more") for line in lines)
        == 1
    )
    assert "  --repair: The lists are written from the tensors." in lines
    assert "info: BS306 exclude-matches-nothing" in lines
    assert lines[-1] == "12 errors, 0 warnings, 1 note"
    assert f"error: {folder}: 12 errors\nhint: --repair OUT" in captured.err


def test_json_is_the_report(tmp_path: Path, capsys: Capture) -> None:
    folder = broken(tmp_path, lambda tensors: tensors[f"{DOWN}.weight_scale"].view(torch.uint8)[0, 0].fill_(0x7F))
    assert main(["lint", str(folder), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    (finding,) = data["findings"]
    assert (finding["rule"], finding["name"], finding["severity"], finding["layer"]) == (
        "BS104 nan-block-scale",
        "nan-block-scale",
        "error",
        DOWN,
    )
    assert finding["message"]
    assert (data["ok"], data["error"], data["warning"], data["info"]) == (False, 1, 0, 0)
    assert data["path"] == str(folder)


def test_warnings_alone_are_no_failure(tmp_path: Path, capsys: Capture) -> None:
    folder = Path(shutil.copytree(NVFP4, tmp_path / "m"))
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert main(["lint", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("0 errors, 1 warning\n")


def test_options_reach_lint(tmp_path: Path, capsys: Capture) -> None:
    assert main(["lint", str(NVFP4), "--tensor-parallel", "8", "--json"]) == 1
    assert "unshardable-dimension" in {f["name"] for f in json.loads(capsys.readouterr().out)["findings"]}

    def swap(tensors: Tensors) -> None:
        packed = tensors[f"{DOWN}.weight"]
        packed.copy_(packed << 4 | packed >> 4)

    folder = broken(tmp_path, swap)
    assert main(["lint", str(folder)]) == 0
    capsys.readouterr()
    assert main(["lint", str(folder), "--source", str(SOURCE)]) == 1
    assert "BS401 swapped-nibbles" in capsys.readouterr().out


def test_a_repair(tmp_path: Path, capsys: Capture) -> None:
    folder, out = exclude(Path(shutil.copytree(NVFP4, tmp_path / "m")), DOWN), tmp_path / "out"
    assert main(["lint", str(folder), "--repair", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{out}: 1 finding repaired"
    assert lines[1] == f"  BS304 excluded-but-quantized: {DOWN}"
    assert lines[-1] == "0 errors, 0 warnings"
    assert main(["lint", str(out), "--repair", str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.startswith("There is nothing to repair; nothing was written.\n")
    assert not (tmp_path / "again").exists()


def test_a_repair_that_rounds_says_how_much(tmp_path: Path, capsys: Capture) -> None:
    def enlarge(tensors: Tensors) -> None:
        name = "model.layers.1.mlp.up_proj"
        tensors[f"{name}.weight_scale_2"] *= 1.7

    folder = broken(tmp_path, enlarge)
    assert main(["lint", str(folder), "--repair", str(tmp_path / "out"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["findings"] == []
    assert list(data["repair"]["repairs"]) == ["BS101 fused-global-scale-mismatch"]
    assert all(0 < error < 0.1 for error in data["repair"]["errors"].values())
    assert main(["lint", str(folder), "--repair", str(tmp_path / "again")]) == 0
    assert "relative error added by rounding: model.layers.1.mlp." in capsys.readouterr().out


def test_a_repair_that_would_lose_something(tmp_path: Path, capsys: Capture) -> None:
    folder = broken(tmp_path, lambda tensors: tensors.pop(f"{DOWN}.weight_scale"))
    assert main(["lint", str(folder), "--repair", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cannot be repaired" in captured.err
    assert DOWN in captured.err
    assert not (tmp_path / "out").exists()


def test_the_last_hint_says_whether_a_repair_would_be_refused(tmp_path: Path, capsys: Capture) -> None:
    folder = broken(tmp_path, lambda tensors: tensors.pop(f"{DOWN}.weight_scale"))
    assert main(["lint", str(folder)]) == 1
    assert "--repair would refuse: nothing mends BS110 missing-block-scale without loss" in capsys.readouterr().err
    (folder / "config.json").write_text("{")
    assert main(["lint", str(folder)]) == 1
    assert "BS207 malformed-json" in capsys.readouterr().err.splitlines()[-1]


def test_a_refusal_names_the_cause_and_what_helps(tmp_path: Path, capsys: Capture) -> None:
    folder = Path(shutil.copytree(NVFP4, tmp_path / "m"))
    (folder / "config.json").write_text("{")
    assert main(["lint", str(folder), "--repair", str(tmp_path / "out")]) == 1
    assert "nothing was written; correct it there, or download it again" in capsys.readouterr().err
    shutil.copy(NVFP4 / "config.json", folder)
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert main(["lint", str(folder), "--repair", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "BS202 missing-shard: model-00002-of-00002.safetensors" in said
    assert "BS302" not in said
    assert "finish the download" in said


def test_a_reader_that_leaves_keeps_the_outcome(tmp_path: Path) -> None:
    folder = broken(tmp_path, lambda tensors: tensors.pop(f"{DOWN}.weight_scale"))
    run = subprocess.Popen(
        [sys.executable, "-m", "blockscale", "lint", str(folder), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.close()  # before anything is printed
    said = run.stderr.read()
    assert run.wait() == 1
    assert ": 2 errors\n" in said
    assert "Broken" not in said


BAD = {
    "no folder": (["/no/such/model"], "no such model folder"),
    "hub id offline": (["someone/some-model"], "hub cannot be reached"),
    "no GPUs": ([str(NVFP4), "--tensor-parallel", "0"], "--tensor-parallel 0: not a number of GPUs"),
    "no number": ([str(NVFP4), "--tensor-parallel", "x"], "invalid int value"),
    "no source": ([str(NVFP4), "--source", "/no/such/model"], "no such model folder"),
    "quantized source": ([str(NVFP4), "--source", str(MOE)], "already quantized"),
    "existing output": ([str(NVFP4), "--repair", str(SOURCE)], "exists already"),
    "quick source": ([str(NVFP4), "--quick", "--source", str(SOURCE)], "compares nothing"),
    "no model": ([str(GOLDEN)], "no model lies here"),
    "quick repair": ([str(NVFP4), "--quick", "--repair", "/no/such/folder"], "exclude each other"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_clear_error(case: str, capsys: Capture) -> None:
    argv, expected = BAD[case]
    try:
        code: object = main(["lint", *argv])
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.count("error: ") == 1
    assert expected in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


# ---------------------------------------------------------------- names that are not to be trusted

WICKED = "evil\x1b[31m\r\n\x07\u202e\u2028name"


def test_names_reach_the_terminal_as_escapes(tmp_path: Path, capsys: Capture) -> None:
    folder = broken(tmp_path, lambda tensors: tensors.update({f"{WICKED}.weight_scale_2": torch.tensor(1.0)}))
    exclude(folder, WICKED)
    assert main(["lint", str(folder)]) == 1
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert r"evil\x1b[31m\r\n\x07\u202e\u2028name" in shown
    assert not set(shown) & set("\x1b\r\x07\u202e\u2028")
    assert main(["lint", str(folder), "--json"]) == 1
    assert WICKED in {f["layer"] for f in json.loads(capsys.readouterr().out)["findings"]}


def test_what_is_printable() -> None:
    assert printable("model.layers.0 = 'é漢' µ") == "model.layers.0 = 'é漢' µ"
    assert printable("\udc80\x7f\t") == r"\udc80\x7f\t"

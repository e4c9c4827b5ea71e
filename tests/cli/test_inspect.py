"""`blockscale inspect` as a user meets it. Needs nothing."""

import gc
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from blockscale.cli.main import main

Find = Callable[[str], Path]


def printed(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["inspect", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_the_table(golden_checkpoint: Find, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, golden_checkpoint("modelopt_qwen3moe_nvfp4"))
    lines = out.splitlines()
    assert lines[0].endswith("Qwen3MoeForCausalLM, modelopt, written by modelopt 0.47.0")
    experts = next(line for line in lines if line.startswith("model.layers.{0,1}.mlp.experts.{0..3}.gate+up_proj"))
    assert experts.split()[1:7] == ["8", "nvfp4", "nvfp4", "32+32", "x", "64"]
    assert next(line for line in lines if line.startswith("lm_head.weight")).endswith("output head")
    assert next(line for line in lines if line.startswith("all ")).split() == [
        "all",
        "107.39",
        "k",
        "109.06",
        "kB",
        "8.124",
    ]
    assert next(line for line in lines if line.startswith("transformers ")).split()[1] == "refuses"
    assert "block scales" not in out
    assert "KV cache: 16 bits" in out


def test_every_layer(golden_checkpoint: Find, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, golden_checkpoint("modelopt_qwen3moe_nvfp4"), "--all")
    assert "{" not in out
    assert out.count("gate+up_proj") == 8
    assert "model.layers.1.self_attn.q_norm.weight" in out


def test_block_scales(golden_checkpoint: Find, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, golden_checkpoint("ct_llama_nvfp4"), "--scales")
    assert "block scales" in out
    assert " to 448" in out


def test_a_model_of_16_bits(golden_checkpoint: Find, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, golden_checkpoint("base_llama"))
    assert "LlamaForCausalLM, not quantized" in out
    assert "global scale" not in out
    assert "bits a parameter in quantized layers" not in out


def test_json_on_stdout_alone(golden_checkpoint: Find, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, golden_checkpoint("ct_llama_nvfp4_fp8kv"), "--json", "--scales")
    data = json.loads(out)
    assert {"num_parameters", "bytes", "bits_per_parameter", "layers", "kept", "kv_cache", "engines"} <= set(data)
    assert data["num_parameters"] == 106_816
    assert data["engines"]["vLLM"]["loads"] is True
    assert data["kv_cache"]["format"] == "fp8"
    assert len(data["layers"]) == 8
    assert sum(line.startswith('{"name": "model.layers') for line in out.splitlines()) == 8 + 4  # layers and norms


def test_the_page(golden_checkpoint: Find, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, golden_checkpoint("ct_llama_nvfp4"), "--report", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_scales_that_are_not_finite_are_null_in_json(
    golden_checkpoint: Find, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(golden_checkpoint("modelopt_llama_nvfp4"), tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight_scale_2"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors")
    data = json.loads(printed(capsys, folder, "--json"), parse_constant=pytest.fail)
    down = next(layer for layer in data["layers"] if layer["name"] == "model.layers.0.mlp.down_proj")
    assert down["scales"]["global"] == [None, None]
    out = printed(capsys, folder)
    assert "NaN" in out
    assert "1 fault found: `blockscale lint` explains them" in out
    assert "BS107 bad-global-scale" in out


def test_names_do_not_reach_the_terminal_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "evil\x1b[2J\nname\u202e\ud800.weight"
    header = json.dumps({name: {"dtype": "BF16", "shape": [4, 16], "data_offsets": [0, 128]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(128))
    config = {"architectures": ["A\x1b[31m"], "quantization_config": {"quant_method": "x\x07y"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert not {"\x1b", "\x07", "\u202e", "\ud800"} & set(text)
    assert r"evil\x1b[2J\nname\u202e\ud800.weight" in captured.out


def test_a_broken_checkpoint_is_shown_and_is_no_failure(
    golden_checkpoint: Find, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(golden_checkpoint("modelopt_llama_nvfp4"), tmp_path / "m"))
    (folder / "model.safetensors").write_bytes(b"123")
    out = printed(capsys, folder)
    assert "BS201 unreadable-file" in out
    assert "`blockscale lint` explains them" in out


def test_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "x")]) == 2
    captured = capsys.readouterr()
    assert "no such model folder" in captured.err
    assert captured.out == ""


def test_the_garbage_collector_is_left_as_it_was(golden_checkpoint: Find, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, golden_checkpoint("base_llama"))
    assert gc.isenabled()


def test_neither_torch_nor_transformers_is_needed(golden_checkpoint: Find) -> None:
    code = (
        "import sys; from blockscale.cli.main import main; "
        f"main(['inspect', {str(golden_checkpoint('modelopt_llama_nvfp4'))!r}, '--scales']); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0

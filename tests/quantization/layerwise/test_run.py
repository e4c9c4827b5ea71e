"""Layer-wise methods from end to end, on tiny models of many architectures."""

from collections.abc import Callable
from pathlib import Path

import pytest

import blockscale as bs
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.shards import read_json

FAMILIES = (
    "llama",
    "gemma3_text",
    "qwen3",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "olmo2",
    "cohere",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_best_writes_a_checkpoint_that_lints_clean(
    family: str, tiny_model: Callable[[str], Path], calibration_text: Path, tmp_path: Path
) -> None:
    model = tiny_model(family)
    summary = bs.quantize(model, tmp_path / "out", "nvfp4-best", calibration=[calibration_text])

    findings = [f for f in bs.lint(tmp_path / "out").findings if f.severity != "info"]
    layers = read_json(tmp_path / "out" / "blockscale.json")["layers"]

    assert not findings
    assert set(layers) == set(summary.layers) == set(open_checkpoint(tmp_path / "out").quantized.linears)
    assert all(layer["chosen"] for layer in layers.values() if layer["format"] == "nvfp4")
    assert all(layer["gain"] is None or layer["gain"] >= 0 for layer in layers.values())

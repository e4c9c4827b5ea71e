"""What a report says of how its figures were computed, and how activations can be rounded otherwise."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from blockscale import api
from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.errors import UsageError
from blockscale.evaluation.arithmetic import arithmetic, chosen_scale
from blockscale.host.linear import PackedLinear
from blockscale.host.model import load_model

NVFP4 = "modelopt_llama_nvfp4"


@pytest.fixture
def folder(with_tokenizer: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint that asks for a search."""
    path = Path(shutil.copytree(with_tokenizer(NVFP4), tmp_path / "model"))
    (path / "blockscale.json").write_text(json.dumps({"activation_scale": "sweep"}))
    return path


@pytest.mark.parametrize("asked", [None, *ActivationScale])
def test_the_model_rounds_as_it_is_asked(folder: Path, asked: ActivationScale | None) -> None:
    hosted = load_model(folder, activation_scale=asked)
    method = ActivationScale.SWEEP if asked is None else asked
    assert hosted.activation_scale is method
    packed = [module for module in hosted.model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 14
    assert {module.activation_scale for module in packed} == {method}


def test_evaluate_shows_what_other_engines_would_give(folder: Path, calibration_text: Path) -> None:
    options = {"text": [calibration_text], "max_tokens": 256, "window": 64}
    own, asked, others = (
        api.evaluate(folder, activation_scale=name, **options).texts[0].perplexity.value
        for name in (None, "sweep", "amax")
    )
    assert own == asked
    assert others != own
    plain = shutil.copytree(folder, folder.parent / "plain")
    (plain / "blockscale.json").unlink()
    assert api.evaluate(plain, **options).texts[0].perplexity.value == others


def test_the_sentence(folder: Path, with_tokenizer: Callable[[str], Path]) -> None:
    assert arithmetic(load_model(folder), False).endswith(
        "activations are rounded as the tensor core sees them, block scales chosen by sweep."
    )
    assert "chosen by" not in arithmetic(load_model(with_tokenizer(NVFP4)), False)
    assert "left as they are" in arithmetic(load_model(folder, emulate_activations=False), True)


def test_names() -> None:
    assert chosen_scale(None, True) is None
    assert chosen_scale("four_over_six", False) is ActivationScale.FOUR_OVER_SIX
    with pytest.raises(UsageError, match="unknown activation_scale 'max'") as caught:
        chosen_scale("max", False)
    assert "four_over_six" in caught.value.hint
    with pytest.raises(UsageError, match="not rounded"):
        chosen_scale("amax", True)


def test_the_command_line(folder: Path, calibration_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from blockscale.cli.main import main

    command = [
        "evaluate",
        str(folder),
        "--text",
        str(calibration_text),
        "--max-tokens",
        "64",
        "--window",
        "32",
        "--json",
    ]
    assert main([*command, "--activation-scale", "amax"]) == 0
    amax = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    own = json.loads(capsys.readouterr().out)
    assert amax["perplexity"] != own["perplexity"]
    assert main([*command, "--activation-scale", "amax", "--weights-only"]) == 2

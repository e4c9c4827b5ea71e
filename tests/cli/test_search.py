"""`quantize` with a budget, as a user meets it. Tiny models."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from blockscale.cli.main import main

from .test_cli import fails

Find = Callable[[str], Path]


@pytest.fixture(scope="module")
def job(tiny_model: Find, calibration_text: Path) -> list[str]:
    """The options of a small search."""
    text = ["--calibration", str(calibration_text), "--calibration-tokens", "2048"]
    return ["quantize", str(tiny_model("llama")), *text]


def test_search_and_quantization_in_one_go(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, front, recipe = (tmp_path / name for name in ("mixed", "front.svg", "mixed.yaml"))
    options = ["--bits", "6", "--pareto", str(front), "--save-recipe", str(recipe)]
    assert main([*job, str(out), *options]) == 0
    printed = capsys.readouterr().out
    assert "KL divergence, nats a token: predicted " in printed
    table = [line.split() for line in printed.splitlines() if "%" in line and "B " in line]
    assert sum(line[0] == "chosen" for line in table) == 1
    assert len(table) > 10
    assert front.read_text().startswith("<svg")
    assert recipe.read_text().startswith("name: mixed-5.")
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "MIXED_PRECISION"


def test_a_recipe_alone(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mixed.yaml"
    options = ["--bytes", "120kB", "--context", "200", "--json"]
    assert main([*job, str(recipe), *options]) == 0
    found = json.loads(capsys.readouterr().out)["search"]
    assert found["recipe"] == recipe.read_text()
    assert found["num_bytes"] <= 120_000
    assert found["measured_kl"] > 0
    assert [point for point in found["front"] if point["is_answer"]]
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "4"], "no mixture has 4 bits: the least is 4.5 bits"),
        (["--bits", "5", "--bytes", "1GB"], "one budget"),
        (["--bytes", "lots"], "no size"),
        (["--itl-ms", "5"], "needs to know the GPU"),
        (["--itl-ms", "5", "--gpu", "h20000"], "h20000"),
        (["--gpu", "h200"], "--gpu needs a budget"),
        (["--pareto", "front.svg"], "--pareto needs a budget"),
        (["--bits", "5", "--pareto", "front.pdf"], "neither .svg nor .html"),
    ],
)
def test_what_makes_no_sense(
    options: list[str], message: str, job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fails(capsys, *job, tmp_path / "out", *options)
    assert list(tmp_path.iterdir()) == []


def test_a_search_needs_text(tiny_model: Find, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, "quantize", tiny_model("llama"), tmp_path / "out", "--bits", "5")
    assert "needs calibration text" in error

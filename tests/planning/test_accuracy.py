"""What is recorded of the planner's accuracy holds the figures that it is to reach, and the page shows it."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from blockscale.planning.speed.predict import calibrated_spread, default_priors

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "planner_accuracy.json").read_text())["figures"]


def test_the_page_is_current(figures: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("generate_planner", ROOT / "docs" / "generate_planner.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "docs" / "concepts" / "planner.md").read_text()
    assert module.page(text, figures) == text, "run docs/generate_planner.py"


@pytest.mark.parametrize("by", ["model", "gpu"])
def test_uncalibrated(by: str, figures: dict[str, Any]) -> None:
    held = figures["held_out"][by]
    assert held["all"]["mean_error"] <= 0.30
    assert held["all"]["inside_80"] >= 0.80
    assert held["ttft"]["inside_80"] >= 0.80


@pytest.mark.parametrize("which", ["same_model", "models_mixed"])
def test_calibrated(which: str, figures: dict[str, Any]) -> None:
    calibrated = figures[f"calibrated_on_8_{which}"]
    assert calibrated["itl"]["mean_error"] <= 0.12
    assert calibrated["itl"]["inside_80"] >= 0.80
    assert calibrated["ttft"]["inside_80"] >= 0.80


def test_calibration_narrows_the_interval() -> None:
    assert calibrated_spread().itl < default_priors().spread.itl
    assert calibrated_spread().ttft < default_priors().spread.ttft


def test_against_the_peer(figures: dict[str, Any]) -> None:
    peer = figures["against_aiconfigurator"]
    assert peer["blockscale"]["itl"]["mean_error"] < peer["aiconfigurator"]["itl"]["mean_error"]
    assert peer["itl_without_gpt_oss"]["blockscale"] < peer["itl_without_gpt_oss"]["aiconfigurator"]

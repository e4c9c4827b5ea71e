"""Lint has nothing to say of good checkpoints: the peers' own, and whatever this package writes."""

from collections.abc import Callable
from pathlib import Path

import pytest

import blockscale
from blockscale.errors import CheckpointError
from blockscale.quantization.recipe import RECIPES

from .bases import GOOD
from .inject import Bases
from .linting import serious
from .raw import GOLDEN

Find = Callable[[str], Path]
DIALECTS = ("modelopt", "compressed-tensors")
FAMILIES = ("llama", "mixtral", "gemma3_text", "qwen2", "qwen3", "phi3", "phimoe", "llama4_text", "gpt_oss", "gemma3",
            "qwen3_vl", "nemotron_h")  # fmt: skip
SOURCES = {"base_llama": ("modelopt_llama", "ct_llama"), "base_qwen3moe": ("modelopt_qwen3moe",)}


@pytest.mark.parametrize("name", [*GOOD, *SOURCES])
def test_good_checkpoints(name: str, bases: Bases) -> None:
    report = blockscale.lint(GOLDEN / name if name in SOURCES else bases[name])
    assert not serious(report)
    assert report.ok


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_good_checkpoints_beside_their_source(name: str) -> None:
    source = next(base for base, prefixes in SOURCES.items() if name.startswith((base, *prefixes)))
    assert not serious(blockscale.lint(GOLDEN / name, source=GOLDEN / source))


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_good_checkpoints_over_two_devices(name: str) -> None:
    assert not serious(blockscale.lint(GOLDEN / name, tensor_parallel=2))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("is_calibrated", [False, True])
def test_every_recipe(
    recipe: str, dialect: str, is_calibrated: bool, tiny_model: Find, calibration_text: Path, tmp_path: Path
) -> None:
    texts = [calibration_text] if is_calibrated else []
    source = tiny_model("llama")
    options = {"calibration": texts, "max_calibration_tokens": 512, "dialect": dialect}
    try:
        blockscale.quantize(source, tmp_path / "q", recipe, **options)
    except CheckpointError as error:
        assert dialect == "compressed-tensors"  # which has no place beside a weight
        assert recipe.endswith(("-svdquant", "-arc"))
        pytest.skip(str(error))
    assert not serious(blockscale.lint(tmp_path / "q"))
    assert not serious(blockscale.lint(tmp_path / "q", source=source))


@pytest.mark.parametrize("kv_cache", ["fp8", "nvfp4"])
def test_caches(kv_cache: str, tiny_model: Find, calibration_text: Path, tmp_path: Path) -> None:
    for dialect in DIALECTS if kv_cache == "fp8" else DIALECTS[:1]:
        out = tmp_path / dialect
        options = {"calibration": [calibration_text], "max_calibration_tokens": 512, "kv_cache": kv_cache}
        blockscale.quantize(tiny_model("llama"), out, "nvfp4", dialect=dialect, **options)
        assert not serious(blockscale.lint(out))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, dialect: str, tiny_model: Find, tmp_path: Path) -> None:
    source = tiny_model(family)
    try:
        blockscale.quantize(source, tmp_path / "q", "nvfp4-w4a16", dialect=dialect)
    except CheckpointError as error:
        assert dialect == "compressed-tensors"  # which has no stacks of experts
        pytest.skip(str(error))
    assert not serious(blockscale.lint(tmp_path / "q"))
    assert not serious(blockscale.lint(tmp_path / "q", source=source))

"""Fixtures of the GGUF tests: tiny models, quantized ones, and the peers' checkpoints with a tokenizer."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conversion.gguf_models import add_byte_level_tokenizer, make_model


@pytest.fixture(scope="session")
def gguf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name in MODELS -> folder. Read only."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_model(name, tmp_path_factory.mktemp(name) / name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def gguf_quantized(
    tmp_path_factory: pytest.TempPathFactory, gguf_model: Callable[[str], Path]
) -> Callable[[str, str], Path]:
    """(name, recipe) -> folder of a quantized model. Read only."""
    from blockscale import api

    made: dict[tuple[str, str], Path] = {}

    def make(name: str, recipe: str) -> Path:
        if (name, recipe) not in made:
            out = tmp_path_factory.mktemp(name) / f"{name}-{recipe}"
            # the other dialect has no stacks of experts
            api.quantize(gguf_model(name), out, recipe, dialect="modelopt" if name.startswith("gpt_oss") else None)
            made[name, recipe] = out
        return made[name, recipe]

    return make


@pytest.fixture
def gguf_golden(golden_checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Name -> a copy of a peer's checkpoint with a tokenizer."""

    def copy(name: str) -> Path:
        folder = tmp_path / name
        if not folder.is_dir():
            shutil.copytree(golden_checkpoint(name), folder)
            add_byte_level_tokenizer(folder, num_bytes=128)
        return folder

    return copy

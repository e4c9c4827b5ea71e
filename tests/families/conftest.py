"""Each family's model, quantized and converted once and shared by the tests. All of it is read only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from blockscale import api
from blockscale.host.model import load_model

from .logits import token_ids
from .table import Family

W4A4, W4A16 = "nvfp4", "nvfp4-w4a16"
Source = Callable[[Family], Path]
Make = Callable[..., Path]


@pytest.fixture(scope="session")
def source(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Family -> its 16-bit model, as its makers publish it."""
    made: dict[str, Path] = {}

    def publish(family: Family) -> Path:
        if family.name not in made:
            model = tiny_model(family.model)
            target = tmp_path_factory.mktemp("published") / "model"
            made[family.name] = model if family.publish is None else family.publish(model, target)
        return made[family.name]

    return publish


@pytest.fixture(scope="session")
def quantized(source: Source, tmp_path_factory: pytest.TempPathFactory, calibration_text: Path) -> Make:
    """(family, recipe, dialect="modelopt") -> a quantized folder. W4A4 has a KV cache in FP8 wherever there are k_proj
    and v_proj to give its scales to."""
    made: dict[tuple[str, str, str], Path] = {}

    def quantize(family: Family, recipe: str, dialect: str = "modelopt") -> Path:
        key = (family.name, recipe, dialect)
        if key not in made:
            options: dict[str, Any] = {}
            if recipe == W4A4:
                options = {"calibration": [calibration_text], "max_calibration_tokens": 1024}
                options |= {"kv_cache": "fp8"} if "k_proj" in family.linears else {}
            out = tmp_path_factory.mktemp("quantized") / "model"
            api.quantize(source(family), out, recipe, dialect=dialect, **options)
            made[key] = out
        return made[key]

    return quantize


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """(folder, target) -> what `convert` makes of it."""
    made: dict[tuple[Path, str], Path] = {}

    def convert(folder: Path, to: str) -> Path:
        if (folder, to) not in made:
            out = tmp_path_factory.mktemp("converted") / "model"
            api.convert(folder, out, to)
            made[folder, to] = out
        return made[folder, to]

    return convert


@pytest.fixture(scope="session")
def logits() -> Callable[..., Tensor]:
    """(folder, emulate_activations=True) -> what the packed model answers."""
    made: dict[tuple[Path, bool], Tensor] = {}

    def answer(folder: Path, *, emulate_activations: bool = True) -> Tensor:
        key = (folder, emulate_activations)
        if key not in made:
            made[key] = load_model(folder, emulate_activations=emulate_activations).logits(token_ids())
        return made[key]

    return answer

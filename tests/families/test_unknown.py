"""Models that transformers has no class for go the same way by their tensors' names; only answers they cannot give."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from blockscale import api
from blockscale.errors import ModelError
from blockscale.host.model import load_model

from .conftest import W4A16, Make, Source
from .published import of_unknown_type
from .table import BY_NAME, Family

UNKNOWN = ("Llama 3", "Phi-4", "Mixtral", "DeepSeek-V3", "Qwen3-Next", "Nemotron-H", "Qwen2.5-VL")
unknown = pytest.mark.parametrize("family", [BY_NAME[name] for name in UNKNOWN], ids=str)


@pytest.fixture(scope="module")
def stranger(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], tuple[Path, Path]]:
    """Family -> the model under a type that nobody knows, and the same quantized."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(family: Family) -> tuple[Path, Path]:
        if family.name not in made:
            folder = tmp_path_factory.mktemp("stranger")
            model = of_unknown_type(source(family), folder / "model")
            api.quantize(model, folder / "quantized", W4A16)
            made[family.name] = model, folder / "quantized"
        return made[family.name]

    return make


@unknown
def test_it_is_quantized_as_if_it_were_known(family: Family, stranger, quantized: Make) -> None:
    _, found = stranger(family)
    known = quantized(family, W4A16)
    assert (found / "model.safetensors").read_bytes() == (known / "model.safetensors").read_bytes()
    assert (found / "hf_quant_config.json").read_bytes() == (known / "hf_quant_config.json").read_bytes()


@unknown
def test_it_is_linted_inspected_and_converted(family: Family, stranger, converted: Make, quantized: Make) -> None:
    model, folder = stranger(family)
    other = converted(folder, "compressed-tensors")
    plain = load_file(converted(folder, "bf16") / "model.safetensors")
    known = converted(quantized(family, W4A16), "compressed-tensors")
    assert (other / "model.safetensors").read_bytes() == (known / "model.safetensors").read_bytes()
    assert {n: (t.dtype, t.shape) for n, t in plain.items()} == {
        n: (t.dtype, t.shape) for n, t in load_file(model / "model.safetensors").items()
    }
    for made in (folder, other, converted(other, "modelopt")):
        assert api.lint(made, source=model).findings == ()
        assert len(api.inspect(made).layers) > 0


@unknown
def test_it_gives_no_answers(family: Family, stranger) -> None:
    for folder in stranger(family):
        with pytest.raises(ModelError, match="transformers cannot read the config") as error:
            load_model(folder)
        assert error.value.hint


def test_calibration_says_what_works_without_a_class(stranger, tmp_path: Path, calibration_text: Path) -> None:
    model, _ = stranger(BY_NAME["Llama 3"])
    with pytest.raises(ModelError, match="transformers cannot read the config") as error:
        api.quantize(model, tmp_path / "out", "nvfp4", calibration=[calibration_text])
    assert "nvfp4-w4a16" in str(error.value.hint)
    assert list(tmp_path.iterdir()) == []

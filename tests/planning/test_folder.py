"""Bytes from headers are the file's, to the byte, and formats are those that are stored."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from blockscale.planning.models.architecture import Part
from blockscale.planning.models.folder import read_model

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def stored_bytes(folder: Path) -> int:
    """Of every tensor, through the reference library's header."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        total += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    return total


@pytest.mark.parametrize("name", FOLDERS)
def test_no_byte_is_off(name: str) -> None:
    _, weights = read_model(GOLDEN / name)
    assert weights.is_exact
    assert weights.num_bytes == stored_bytes(GOLDEN / name)


def test_formats_by_part() -> None:
    _, weights = read_model(GOLDEN / "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv")
    found = {part: (stored.format, stored.activation) for part, stored in weights.parts.items()}
    assert found[Part.ATTENTION] == ("fp8", "fp8")
    assert found[Part.FEED_FORWARD] == ("nvfp4", "nvfp4")
    assert found[Part.HEAD] == found[Part.EMBEDDING] == ("bf16", None)
    _, experts = read_model(GOLDEN / "modelopt_qwen3moe_nvfp4")
    assert experts.parts[Part.EXPERTS].format == "nvfp4"
    assert experts.parts[Part.ROUTER].format == "bf16"


def test_parameters_agree_with_the_files() -> None:
    """What the formulas count for a config is what its 16-bit model holds."""
    for name in ("base_llama", "base_qwen3moe"):
        architecture, _ = read_model(GOLDEN / name)
        with safe_open(GOLDEN / name / "model.safetensors", "pt") as file:
            count = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
        assert architecture.num_parameters == count


def test_families_count_what_transformers_builds(tiny_model: Callable[[str], Path]) -> None:
    """The formulas against real tiny models, norms and biases included."""
    for family in ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"):
        architecture, weights = read_model(tiny_model(family))
        assert 2 * architecture.num_parameters == weights.num_bytes, family

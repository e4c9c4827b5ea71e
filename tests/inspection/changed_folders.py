"""Golden folders, changed copies of them, and folders written by hand; nothing here knows blockscale."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
FILE = "model.safetensors"


def golden_names(*, quantized: bool | None = None) -> list[str]:
    names = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
    return [name for name in names if quantized is None or name.startswith("base_") != quantized]


def base_of(name: str) -> str:
    return "base_qwen3moe" if "qwen3moe" in name else "base_llama"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / FILE)


def copied(name: str, parent: Path, change: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
    """A copy of a golden folder, its tensors changed in place."""
    folder = Path(shutil.copytree(GOLDEN / name, parent / name))
    if change is not None:
        tensors = tensors_of(folder)
        change(tensors)
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / FILE, {"format": "pt"})
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_settings(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """quantization_config of config.json."""
    edit_json(folder / "config.json", lambda config: change(config["quantization_config"]))


def written(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / FILE, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder

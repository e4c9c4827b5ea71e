"""Files to read: golden checkpoints, changed copies of them, and safetensors files written by hand."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"


def names(prefix: str) -> list[str]:
    """Golden folders whose names begin so."""
    return sorted(path.name for path in GOLDEN.glob(f"{prefix}*") if path.is_dir())


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor, through the reference library."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bytes: NaNs and signs of zero count."""
    return a.dtype == b.dtype and a.shape == b.shape and as_bytes(a) == as_bytes(b)


def changed(
    name: str,
    parent: Path,
    *,
    tensors: Callable[[dict[str, Tensor]], None] | None = None,
    config: Callable[[dict[str, Any]], None] | None = None,
    hf_quant_config: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """A copy of a golden checkpoint below `parent`, changed in place by the callables."""
    folder = Path(shutil.copytree(GOLDEN / name, parent / name))
    if tensors:
        stored = load_file(folder / "model.safetensors")
        tensors(stored)
        save_file({n: t.contiguous() for n, t in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    for file, change in (("config.json", config), ("hf_quant_config.json", hf_quant_config)):
        if change:
            edit_json(folder / file, change)
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def model_folder(path: Path, shards: dict[str, dict[str, Tensor]], weight_map: dict[str, Any] | None = None) -> Path:
    """A folder with an empty config, these files, and an index if a weight_map is given."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    for file, content in shards.items():
        save_file({name: tensor.clone() for name, tensor in content.items()}, path / file)
    if weight_map is not None:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def entry(shape: list[Any], begin: Any, end: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    """A safetensors file with any header: bytes as they are, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path

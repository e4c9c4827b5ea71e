"""Checkpoint folders edited through the safetensors library, json and plain bytes; nothing here knows blockscale."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

Tensors = dict[str, Tensor]
Json = dict[str, Any]


def copy_golden(name: str, parent: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / name, parent / name))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def load(folder: Path) -> Tensors:
    """Every tensor; of two copies the index's, as loaders should."""
    tensors = {}
    for file in shards(folder):
        for name, tensor in load_file(file).items():
            if name not in tensors or place(folder, name) == file.name:
                tensors[name] = tensor
    return tensors


def names(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in shards(folder):
        with safe_open(file, "pt") as opened:
            found |= set(opened.keys())
    return found


def place(folder: Path, name: str) -> str:
    """The file in which a loader looks for a tensor."""
    if not (folder / INDEX).exists():
        return SINGLE
    return str(read_json(folder / INDEX)["weight_map"][name])


def save(path: Path, tensors: Tensors) -> None:
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def edit(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Changes the tensors of a folder; new ones go into its last file, and the index is kept true."""
    tensors = load(folder)
    files = {name: place(folder, name) for name in tensors}
    change(tensors)
    last = shards(folder)[-1].name
    by_file: dict[str, Tensors] = {file.name: {} for file in shards(folder)}
    for name, tensor in tensors.items():
        by_file[files.get(name, last)][name] = tensor
    for file, content in by_file.items():
        save(folder / file, content)
    if (folder / INDEX).exists():
        write_index(folder, {name: files.get(name, last) for name in sorted(tensors)}, num_bytes(tensors))


def split(folder: Path, count: int) -> None:
    """One file becomes `count` with an index; neighbours by name lie in different files."""
    tensors = load(folder)
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    weight_map = {name: files[i % count] for i, name in enumerate(sorted(tensors))}
    (folder / SINGLE).unlink()
    for file in files:
        save(folder / file, {name: tensors[name] for name in tensors if weight_map[name] == file})
    write_index(folder, weight_map, num_bytes(tensors))


def num_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_index(folder: Path, weight_map: Json, total_size: int) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def read_json(path: Path) -> Json:
    value = json.loads(path.read_text())
    assert isinstance(value, dict)
    return value


def edit_json(path: Path, change: Callable[[Json], None]) -> None:
    value = read_json(path)
    change(value)
    path.write_text(json.dumps(value, indent=2))


def read_header(path: Path) -> tuple[Json, int]:
    """A file's header as it stands, and where its data begin."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        return json.loads(file.read(length)), 8 + length


def write_header(path: Path, header: Json) -> int:
    """A file that holds a header and nothing yet; returns its length."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return 8 + len(text)


# ---------------------------------------------------------------- what the bytes stand for


def is_packed(tensors: Tensors, module: str) -> bool:
    return f"{module}.weight_scale" in tensors and weight_of(tensors, module).dtype == torch.uint8


def weight_of(tensors: Tensors, module: str) -> Tensor:
    """The codes of a quantized linear, in either dialect."""
    packed = tensors.get(f"{module}.weight_packed")
    return tensors[f"{module}.weight"] if packed is None else packed


def unpack(packed: Tensor) -> Tensor:
    """uint8 [N, K/2] -> codes uint8 [N, K], the even element from the low nibble."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode(tensors: Tensors, module: str) -> Tensor:
    """float64 [N, K]: what a quantized linear's own tensors stand for, whatever its neighbours have."""
    values = E2M1.double()[unpack(weight_of(tensors, module)).long()]
    scale = tensors[f"{module}.weight_scale"]
    scale = 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    step = scale.repeat_interleave(values.shape[-1] // scale.shape[-1], dim=-1)
    if f"{module}.weight_scale_2" in tensors:
        step = step * tensors[f"{module}.weight_scale_2"].double().reshape(())
    elif f"{module}.weight_global_scale" in tensors:
        step = step / tensors[f"{module}.weight_global_scale"].double().reshape(())
    return values * step


def modules_of(tensors: Tensors) -> list[str]:
    """Every 4-bit linear with its scales."""
    found = sorted({name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")})
    return [m for m in found if {f"{m}.weight", f"{m}.weight_packed"} & tensors.keys() and is_packed(tensors, m)]

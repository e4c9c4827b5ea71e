"""What a checkpoint's files stand for, read through the safetensors library alone; and folders to convert."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint.files import tensors as read_tensors
from safetensors.torch import save_file
from torch import Tensor

from .stored import E2M1

SUFFIXES = {  # role of a linear's tensor -> its names in the two dialects
    "packed": ("weight", "weight_packed"),
    "block_scale": ("weight_scale", "weight_scale"),
    "global_scale": ("weight_scale_2", "weight_global_scale"),
    "input_scale": ("input_scale", "input_global_scale"),
    "pre_quant_scale": ("pre_quant_scale", "pre_quant_scale"),
}


@dataclass(frozen=True)
class Stored:
    """A quantized linear as stored, stacks in memory's order [E, N, K]. `multipliers` are float64, by role."""

    packed: Tensor
    block_scale: Tensor
    multipliers: dict[str, float]
    pre_quant_scale: Tensor | None = None

    @property
    def unscaled(self) -> Tensor:
        """float64: codes times block scales."""
        scale = self.block_scale
        if self.packed.dtype == torch.float8_e4m3fn:
            values = self.packed.double()
            return values * (scale.double().reshape(-1, 1) if scale.numel() > 1 else scale.double().reshape(()))
        values = E2M1[torch.stack((self.packed & 15, self.packed >> 4), dim=-1).flatten(-2).long()]
        scale = 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
        return values * scale.repeat_interleave(values.shape[-1] // scale.shape[-1], -1)

    @property
    def value(self) -> Tensor:
        """float64 [N, K] or [E, N, K]."""
        value = self.unscaled * self.multipliers.get("global_scale", 1.0)
        return value if self.pre_quant_scale is None else value * self.pre_quant_scale.double()


def linears(folder: Path) -> dict[str, Stored]:
    """Every linear that has block scales."""
    found = read_tensors(folder)
    result = {}
    for name in found:
        if not name.endswith("weight_scale"):
            continue
        module, is_stack = name[: -len("_weight_scale")], name.endswith("_weight_scale")
        separator = "_" if is_stack else "."
        parts = {
            role: found[f"{module}{separator}{suffix}"]
            for role, suffixes in SUFFIXES.items()
            for suffix in suffixes
            if f"{module}{separator}{suffix}" in found
        }
        is_divisor = f"{module}.weight_packed" in found
        if is_stack:
            parts["packed"] = found[module]
            parts |= {role: parts[role].transpose(-1, -2).contiguous() for role in ("packed", "block_scale")}
        scales = {role: parts[role].double().item() for role in ("global_scale", "input_scale") if role in parts}
        multipliers = {role: 1 / scale if is_divisor else scale for role, scale in scales.items()}
        result[module] = Stored(parts["packed"], parts["block_scale"], multipliers, parts.get("pre_quant_scale"))
    return result


def others(folder: Path) -> dict[str, Tensor]:
    """Every tensor that is no quantized linear's, and no scale of a KV cache."""
    taken = set()
    for module in linears(folder):
        taken |= {f"{module}.{suffix}" for suffixes in SUFFIXES.values() for suffix in suffixes}
        taken |= {module, *(f"{module}_{suffix}" for suffixes in SUFFIXES.values() for suffix in suffixes)}
    found = read_tensors(folder)
    return {n: t for n, t in found.items() if n not in taken and not n.endswith(("k_scale", "v_scale"))}


def kv_scales(folder: Path) -> dict[str, float]:
    """By attention module and side, whichever way they are named."""
    found = {n: t for n, t in read_tensors(folder).items() if n.endswith(("k_scale", "v_scale"))}
    return {name.replace(".k_proj", "").replace(".v_proj", ""): t.float().item() for name, t in found.items()}


def config(folder: Path) -> dict[str, Any]:
    value = json.loads((folder / "config.json").read_text())
    assert isinstance(value, dict)
    return value


def write(folder: Path, content: dict[str, Tensor], settings: dict[str, Any], **files: str) -> Path:
    """A folder of one shard; `files`: name of a JSON file without its ending -> content."""
    folder.mkdir(parents=True)
    save_file({n: t.contiguous() for n, t in content.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder

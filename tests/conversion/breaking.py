"""Golden checkpoints to break and to mend."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faults.raw import (
    Tensors,
    copy_golden,
    decode,
    edit,
    modules_of,
    weight_of,
)

from blockscale.conversion.repair.repair import RepairSummary, repair_checkpoint
from blockscale.inspection.lint import lint_folder

NVFP4, CT, MOE = "modelopt_llama_nvfp4", "ct_llama_nvfp4", "modelopt_qwen3moe_nvfp4"
LAYER = "model.layers.1"
DOWN, UP, GATE, QUERY = (
    f"{LAYER}.mlp.down_proj",
    f"{LAYER}.mlp.up_proj",
    f"{LAYER}.mlp.gate_proj",
    f"{LAYER}.self_attn.q_proj",
)
EXPERTS = f"{LAYER}.mlp.experts"
NAN = float("nan")
Change = Callable[[Tensors], None]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def fill(name: str, value: float) -> Change:
    return lambda tensors: tensors.update({name: torch.full_like(tensors[name], value)})


def flip_signs(module: str) -> Change:
    """Of every other block scale, and of its codes: the values stay."""

    def change(tensors: Tensors) -> None:
        packed, scale = weight_of(tensors, module), tensors[f"{module}.weight_scale"].view(torch.uint8)
        scale[:, ::2] ^= 0x80
        packed.unflatten(-1, (scale.shape[-1], -1))[:, ::2] ^= 0x88

    return change


def swap(module: str) -> Change:
    def change(tensors: Tensors) -> None:
        packed = weight_of(tensors, module)
        packed.copy_((packed << 4) | (packed >> 4))

    return change


def changed(name: str, parent: Path, *changes: Change) -> Path:
    folder = copy_golden(name, parent)
    for change in changes:
        edit(folder, change)
    return folder


def mended(folder: Path, out: Path, **options: Any) -> RepairSummary:
    """After checking what every repair must do."""
    before = contents(folder)
    summary = repair_checkpoint(folder, out, **options)
    assert contents(folder) == before
    assert summary.out == out
    assert summary.repairs
    assert summary.report.ok
    assert summary.report == lint_folder(out, **options)
    assert {path.name for path in out.parent.iterdir() if path.name.startswith(".")} == set()
    return summary


def assert_same_values(first: Tensors, second: Tensors) -> None:
    assert modules_of(first) == modules_of(second)
    for module in modules_of(first):
        assert torch.equal(decode(first, module), decode(second, module)), module

"""A GGUF file as gguf's own reader sees it, and what it should hold."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from blockscale.checkpoint.load import load_linear
from blockscale.checkpoint.reader import Checkpoint, open_checkpoint
from blockscale.conversion.gguf.write import GgufSummary, write_gguf
from blockscale.formats.tensor import decode

MakeModel = Callable[[str], Path]
Quantized = Callable[[str, str], Path]


@dataclass(frozen=True)
class ReadFile:
    """`values`: fp32 in torch's order of dimensions, without any global scale."""

    fields: dict[str, Any]
    kinds: dict[str, str]
    values: dict[str, Tensor]

    def weight(self, name: str) -> Tensor:
        """What it stands for: times `.scale`, one a stack's member, if there is one."""
        value = self.values[f"{name}.weight"]
        scale = self.values.get(f"{name}.scale")
        return value if scale is None else value * scale.view(-1, *[1] * (value.dim() - 1))


def read_gguf(path: Path) -> ReadFile:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kinds, values = {}, {}
    for tensor in reader.tensors:
        kinds[tensor.name] = tensor.tensor_type.name
        shape = [int(n) for n in reversed(tensor.shape)]
        values[tensor.name] = _values(tensor.data, tensor.tensor_type).view(shape)
    return ReadFile(fields, kinds, values)


def _values(data: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(np.array(data), kind).astype(np.float32))


def write(folder: Path, out: Path, **options: Any) -> tuple[GgufSummary, ReadFile]:
    summary = write_gguf(open_checkpoint(folder), out, **options)
    return summary, read_gguf(out)


def decoded(checkpoint: Checkpoint, module: str) -> Tensor:
    """fp32 weight of a quantized linear, or a kept weight."""
    assert checkpoint.quantized is not None
    if module in checkpoint.quantized.linears:
        return decode(load_linear(checkpoint.quantized.linears[module], torch.bfloat16).weight)
    return checkpoint.kept[f"{module}.weight"].read().float()


def neighbours(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head as llama.cpp turns them: row i of its first half beside row i of its second."""
    size = len(weight) // num_heads
    order = [h * size + i + half * size // 2 for h in range(num_heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]

"""A checkpoint's weights by the model's own names, whatever they are stored in."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.linear import MXFP4_W4A16, QuantizedLinear
from blockscale.checkpoint.load import load_linear, plain_values
from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.source import SourceTensor
from blockscale.checkpoint.tensors import read_tensor
from blockscale.formats.spec import MXFP4, NVFP4, Format
from blockscale.formats.tensor import QuantizedTensor

_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head", "lm_head"),
)
# Towers of models that see images too: llama.cpp reads them from a file of their own.
_TOWERS = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
_COMPUTED = ".rotary_emb.inv_freq"  # old checkpoints hold it


@dataclass(frozen=True)
class Weight:
    """One weight [N, K], stack [E, N, K] or vector. `is_transposed`: a plain stack is stored [E, K, N]."""

    stored: StoredLinear | SourceTensor
    dtype: torch.dtype
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.stored.shape
        if self.is_transposed and isinstance(self.stored, SourceTensor) and len(shape) > 1:
            return (*shape[:-2], shape[-1], shape[-2])
        return shape

    @property
    def format(self) -> Format | None:
        """None for a plain weight; gpt-oss's own experts count as MXFP4."""
        if isinstance(self.stored, StoredLinear):
            return self.stored.scheme.weight
        return MXFP4 if _is_mxfp4(self.stored) else None

    @property
    def is_packable(self) -> bool:
        """Whether GGML has its format, and it stands for y = x W^T with nothing done to x before."""
        if isinstance(self.stored, StoredLinear) and "pre_quant_scale" in self.stored.tensors:
            return False
        return self.format in (NVFP4, MXFP4)

    @property
    def wants_16bit_activations(self) -> bool:
        return isinstance(self.stored, StoredLinear) and self.stored.scheme.activation is None

    def load(self) -> QuantizedLinear:
        """Of a quantized weight."""
        if isinstance(self.stored, StoredLinear):
            return load_linear(self.stored, self.dtype)
        blocks, scales = (read_tensor(info) for info in self.stored.stored)
        weight = QuantizedTensor(MXFP4, blocks.flatten(-2), scales, None, self.shape, self.dtype)
        return QuantizedLinear(MXFP4_W4A16, weight)

    def values(self) -> Tensor:
        """What it stands for: fp32 of a quantized weight, else as stored. A rescaling of x goes into the columns."""
        if isinstance(self.stored, StoredLinear):
            return plain_values(self.load())
        values = self.stored.read()
        return values.transpose(-1, -2) if self.is_transposed else values  # stacks only: see `Source`


def _is_mxfp4(tensor: SourceTensor) -> bool:
    return len(tensor.stored) == 2 and tensor.stored[0].name.endswith("_blocks")


@dataclass(frozen=True)
class Inventory:
    """`linears` by module, `tensors` by full name, both as the text model calls them.

    left_out   names of tensors that no text model has
    """

    linears: Mapping[str, StoredLinear]
    tensors: Mapping[str, SourceTensor]
    left_out: tuple[str, ...]
    dtype: torch.dtype

    def find(self, module: str, *, is_transposed: bool = False) -> Weight | None:
        """The weight of a module, or a tensor that is called like it (a stack of experts)."""
        if module in self.linears:
            return Weight(self.linears[module], self.dtype)
        for name in (f"{module}.weight", module):
            if name in self.tensors:
                return Weight(self.tensors[name], self.dtype, is_transposed)
        return None

    def find_bias(self, module: str) -> SourceTensor | None:
        """A stack's is called `_bias`."""
        return self.tensors.get(f"{module}.bias") or self.tensors.get(f"{module}_bias")


def take_inventory(checkpoint: Checkpoint) -> Inventory:
    linears = checkpoint.quantized.linears if checkpoint.quantized else {}
    tensors, left_out = {}, []
    for name, tensor in checkpoint.kept.items():
        if name.startswith(_TOWERS):
            left_out.append(name)
        elif not name.endswith(_COMPUTED):
            tensors[_text_name(name)] = tensor
    left_out += [name for name in linears if name.startswith(_TOWERS)]
    text = {_text_name(name): linear for name, linear in linears.items() if not name.startswith(_TOWERS)}
    return Inventory(text, tensors, tuple(left_out), checkpoint.dtype)


def _text_name(name: str) -> str:
    for prefix, own in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name

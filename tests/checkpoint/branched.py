"""Quantized linears with something beside their weight, in memory and as a folder of Model Optimizer's dialect."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from blockscale.checkpoint.dialects import modelopt
from blockscale.checkpoint.linear import W4A4, LowRank, QuantizedLinear, Residual, Scheme
from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import QuantizedTensor, encode

N, K = 48, 64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def branched(
    scheme: Scheme = W4A4, *, rank: int = 4, channels: int = 16, seed: int = 0, pre_quant: bool = False
) -> QuantizedLinear:
    """[48, 64], with a branch of `rank` and that many residual channels (0: none)."""
    weight = drawn(N, K, seed=seed).bfloat16()
    q = encode(weight, scheme.weight)
    low_rank = LowRank(drawn(N, rank, seed=1).bfloat16(), drawn(rank, K, seed=2).bfloat16()) if rank else None
    residual = None
    if channels:
        chosen = torch.randperm(K, generator=torch.Generator().manual_seed(seed))[:channels].int()
        residual = Residual(chosen, encode(weight[:, chosen], NVFP4, global_scale=q.global_scale))
    scale = torch.tensor(0.01) if scheme.needs_input_scale else None
    return QuantizedLinear(
        scheme, q, scale, (drawn(K).abs() + 0.5).bfloat16() if pre_quant else None, low_rank, residual
    )


def stored(linears: Mapping[str, QuantizedLinear]) -> dict[str, Tensor]:
    tensors = {"lm_head.weight": torch.ones(8, K, dtype=torch.bfloat16)}
    for name, linear in linears.items():
        tensors |= modelopt.to_tensors(name, linear)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write(folder: Path, linears: Mapping[str, QuantizedLinear], tensors: Mapping[str, Tensor] | None = None) -> Path:
    """`tensors`: to be written in place of the linears' own."""
    folder.mkdir(exist_ok=True)
    save_file(dict(stored(linears) if tensors is None else tensors), folder / "model.safetensors")
    files = modelopt.config_files(
        {"dtype": "bfloat16"},
        {name: linear.scheme for name, linear in linears.items()},
        ["lm_head"],
        None,
        has_pre_quant_scale=any(linear.pre_quant_scale is not None for linear in linears.values()),
        low_rank={name for name, linear in linears.items() if linear.low_rank is not None},
    )
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def algorithm(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["quantization_config"]["quant_algo"])


def same_residual(a: Residual | None, b: Residual | None) -> bool:
    if a is None or b is None:
        return a is b
    ours: QuantizedTensor = a.weight
    pairs = [
        (a.channels, b.channels),
        (ours.packed, b.weight.packed),
        (ours.block_scale.view(torch.uint8), b.weight.block_scale.view(torch.uint8)),
        (ours.global_scale, b.weight.global_scale),
    ]
    return ours.shape == b.weight.shape and all(
        one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)
        for one, other in pairs
    )


def same_low_rank(a: LowRank | None, b: LowRank | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in ((a.up, b.up), (a.down, b.down)))

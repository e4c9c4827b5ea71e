"""humming's W4A16 kernels behind our op: an optional package, used where a table says that it is faster.

Source: humming-kernels 0.1.20, `HummingLayer` and `humming_forward`.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blockscale.errors import FormatError
from blockscale.formats.spec import NVFP4
from blockscale.kernels.checks import check_activation, check_bias, check_same_device, rows
from blockscale.kernels.prepare import Layout, PreparedWeight

_OP = "linear_w4a16 (humming)"
_NUM_LOCKS = 2048


def prepare(weight: PreparedWeight) -> PreparedWeight:
    """A row-major NVFP4 weight [N, K] in humming's order: its tensors stand in the fields of the same meaning."""
    if weight.layout is not Layout.ROW_MAJOR or weight.format != NVFP4 or len(weight.shape) != 2:
        found = f"{weight.format.name} {list(weight.shape)}, {weight.layout.value}"
        raise FormatError(f"{_OP}: the weight is {found}", hint="give a row-major NVFP4 weight [N, K]")
    layer = _layer(weight)
    return replace(
        weight,
        layout=Layout.HUMMING,
        packed=layer.weight.data,
        block_scale=layer.weight_scale.data,
        global_scale=layer.weight_scale_2.data,
    )


def linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] of the weight's own dtype (bf16 or fp16) times a weight in Layout.HUMMING: [..., N]."""
    if weight.layout is not Layout.HUMMING:
        raise FormatError(f"{_OP}: the weight is {weight.layout.value}", hint="prepare it with humming_linear.prepare")
    check_activation(_OP, x, weight.k, (weight.dtype,))
    check_bias(_OP, bias, weight.n, x)
    check_same_device(_OP, x=x, weight=weight.packed, bias=bias)
    if x.numel() == 0:
        return x.new_zeros(*x.shape[:-1], weight.n)
    from humming.forward import humming_forward

    index = x.device.index or 0
    stream = torch.cuda.current_stream(x.device).cuda_stream
    with torch.cuda.device(x.device):
        y = humming_forward(
            _meta(weight.n, weight.k, weight.dtype, index),
            inputs=rows(x).contiguous(),
            weight=weight.packed,
            weight_scale=weight.block_scale,
            weight_scale_2=weight.global_scale,
            locks=_locks(index, stream),
        )
    if bias is not None:
        y += bias.to(y.dtype)
    return y.view(*x.shape[:-1], weight.n)


def _layer(weight: PreparedWeight) -> Any:
    from humming.layer import HummingLayer

    with torch.cuda.device(weight.device):
        config = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        layer = HummingLayer(shape_n=weight.n, shape_k=weight.k, weight_config=config, torch_dtype=weight.dtype)
        layer = layer.to(weight.device)
        layer.load_from_tensors(
            {
                "weight": weight.packed,
                "weight_scale": weight.block_scale.view(torch.float8_e4m3fn),
                "weight_scale_2": weight.global_scale.view(1),
            }
        )
        layer.transform()
    return layer


@cache
def _meta(n: int, k: int, dtype: torch.dtype, index: int) -> Any:
    """What humming knows of a layer but for its values; it takes one such layer to find out."""
    device = torch.device("cuda", index)
    packed = torch.zeros(n, k // 2, dtype=torch.uint8, device=device)
    scale = torch.zeros(n, k // 16, dtype=torch.uint8, device=device)
    one = torch.ones((), device=device)
    return _layer(PreparedWeight(Layout.ROW_MAJOR, packed, scale, one, (n, k), NVFP4, dtype)).humming_metas[""]


@cache
def _locks(index: int, stream: int) -> Tensor:
    """Counters that its kernels leave at zero; kernels of one stream follow each other."""
    return torch.zeros(_NUM_LOCKS, dtype=torch.int32, device=f"cuda:{index}")

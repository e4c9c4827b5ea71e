"""What our linears are timed against: torch's own products (cuBLAS), humming and vLLM's Marlin where installed.

Each maker takes a weight in the checkpoint's order and gives functions of x, one for each copy of the weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from blockscale.formats.spec import NVFP4
from blockscale.kernels.bench.clock import num_copies
from blockscale.kernels.device import Device
from blockscale.kernels.prepare import PreparedWeight
from blockscale.kernels.reference.linear import decoded_rows

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """`linears`: one for each copy of the weight. `weight_bytes`: that one of them reads."""

    name: str
    linears: tuple[Linear, ...]
    weight_bytes: int


def dense(weight: PreparedWeight, dtype: torch.dtype) -> Tensor:
    """[N, K] of `dtype`: the weight, its global scale included."""
    out = torch.empty(weight.n, weight.k, dtype=dtype, device=weight.device)
    for first, values in decoded_rows(weight):
        out[first : first + len(values)] = (values * weight.global_scale).to(dtype)
    return out


def torch_16bit(weight: PreparedWeight, dtype: torch.dtype) -> Contender:
    """torch's linear on the dequantized weight: cuBLAS on a GPU."""
    first = dense(weight, dtype)
    copies = [first, *(first.clone() for _ in range(num_copies(first.numel() * 2) - 1))]

    def linear(w: Tensor) -> Linear:
        return lambda x: torch.nn.functional.linear(x, w)

    name = "torch " + str(dtype).removeprefix("torch.")
    return Contender(name, tuple(map(linear, copies)), first.numel() * 2)


def torch_fp8(weight: PreparedWeight, device: Device) -> Contender | None:
    """cuBLAS on E4M3 with one scale for each operand; the cast of the activations is part of it. From 8.9 on."""
    if device.capability is None or device.capability < (8, 9):
        return None
    values = dense(weight, torch.bfloat16)
    scale = (values.abs().amax().float() / 448).clamp(min=1e-12)
    first = (values / scale).to(torch.float8_e4m3fn)
    copies = [first, *(first.clone() for _ in range(num_copies(first.numel()) - 1))]

    def linear(w: Tensor) -> Linear:
        def run(x: Tensor) -> Tensor:
            x_scale = x.abs().amax().float() / 448
            codes = (x / x_scale).to(torch.float8_e4m3fn)
            return torch._scaled_mm(codes, w.t(), scale_a=x_scale, scale_b=scale, out_dtype=x.dtype)

        return run

    return Contender("torch fp8", tuple(map(linear, copies)), first.numel())


def marlin(weight: PreparedWeight, dtype: torch.dtype) -> Contender | None:
    """vLLM's W4A16 kernel for NVFP4; None where vLLM is not installed."""
    if weight.format != NVFP4 or find_spec("vllm") is None:
        return None
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4

    def linear() -> Linear:
        layer = torch.nn.Module()
        facts = {
            "output_size_per_partition": weight.n,
            "input_size_per_partition": weight.k,
            "params_dtype": dtype,
        }
        for name, value in facts.items():
            setattr(layer, name, value)
        layer.weight = torch.nn.Parameter(weight.packed.clone(), requires_grad=False)
        scale = weight.block_scale.clone().view(torch.float8_e4m3fn)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        layer.weight_global_scale = torch.nn.Parameter(weight.global_scale.clone(), requires_grad=False)
        fp4.prepare_fp4_layer_for_marlin(layer)

        def run(x: Tensor) -> Tensor:
            return fp4.apply_fp4_marlin_linear(
                x, layer.weight, layer.weight_scale, layer.weight_global_scale, layer.workspace, weight.n, weight.k
            )

        return run

    return Contender("marlin", tuple(linear() for _ in range(num_copies(weight.num_bytes))), weight.num_bytes)

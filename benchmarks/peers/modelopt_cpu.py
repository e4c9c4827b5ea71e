"""NVFP4 rounding in plain torch for Model Optimizer on a machine without a GPU.

Model Optimizer calibrates and exports on a CPU, but its two NVFP4 roundings, which the searches (AWQ, MSE, GPTQ) and
its own forward pass need, are Triton kernels alone. `install` puts the functions below in their place: block scales as
its exporter computes them, elements rounded half to even, as in the kernels. The kernels themselves differ from the
exporter where a division ends on a tie. Rows made so say it.
"""

import modelopt.torch.kernels.quantization.gemm as gemm
import modelopt.torch.quantization.tensor_quant as tensor_quant
import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import _cast_per_block_scale_to_fp8
from torch import Tensor

NOTE = "made on a CPU: plain torch rounds to NVFP4 in place of the peer's kernels, which need a GPU"

_BLOCK = 16
_LEAST_SCALE = 1e-5  # the kernel takes block scales below it as 1, which rounds the block to zeros
_DECISIONS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_IS_EVEN_BELOW = (True, False, True, False, True, False, True)  # a tie goes to the level with the even code


def _round(x: Tensor, scale: Tensor) -> Tensor:
    """fp32 `x` [..., B] to E2M1 by `scale` [..., 1]."""
    magnitude = x.abs() / scale
    codes = torch.zeros(magnitude.shape, dtype=torch.int64, device=x.device)
    for decision, is_even in zip(_DECISIONS, _IS_EVEN_BELOW, strict=True):
        codes += magnitude > decision if is_even else magnitude >= decision
    rounded = torch.tensor(_LEVELS, device=x.device)[codes] * scale
    return torch.where(x >= 0, rounded, -rounded)


def dynamic_block_quantize(
    inputs: Tensor,
    block_size: int,
    amax: Tensor | None,
    num_bits: int,
    exponent_bits: int,
    scale_num_bits: int,
    scale_exponent_bits: int,
) -> Tensor:
    """`inputs` [..., K] with block scales of their own and the calibrated `amax` of the whole; NVFP4 alone."""
    is_nvfp4 = (num_bits, exponent_bits, scale_num_bits, scale_exponent_bits, block_size) == (4, 2, 8, 4, _BLOCK)
    if not is_nvfp4 or amax is None:
        raise NotImplementedError("on the CPU only NVFP4 with a calibrated amax is rounded")
    global_scale = (amax.float().amax() / 2688).clamp(min=1e-12)
    blocks = inputs.float().unflatten(-1, (-1, _BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / (6 * global_scale)).clamp(max=448)
    scale = scale.to(torch.float8_e4m3fn).float() * global_scale
    scale = torch.where(scale >= _LEAST_SCALE, scale, 1.0)
    return _round(blocks, scale).flatten(-2).to(inputs.dtype)


def static_blockwise_fp4_fake_quant(
    x: Tensor,
    amax: Tensor,
    global_amax: Tensor | None = None,
    quantize_block_scales: bool = True,
    fp8_max_for_normalization: float = 448.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x` [blocks, B] by the calibrated block amax [blocks]."""
    scale = amax.float().reshape(-1, 1) / 6
    if quantize_block_scales:
        whole = amax.float().amax() if global_amax is None else global_amax.float()
        codes = _cast_per_block_scale_to_fp8(scale, whole / 6, fp8_max_for_normalization)
        scale = torch.where(scale == 0, 0.0, codes.float() * (whole / (6 * fp8_max_for_normalization)))
    is_usable = scale.isfinite() & (scale != 0)
    rounded = _round(x.float(), torch.where(is_usable, scale, 1.0))
    return torch.where(scale == 0, 0.0, rounded).to(out_dtype or x.dtype)


def install() -> None:
    tensor_quant.dynamic_block_quantize_op = dynamic_block_quantize
    gemm.static_blockwise_fp4_fake_quant = static_blockwise_fp4_fake_quant
    gemm.IS_AVAILABLE = True

"""Linears over weights in bfloat16 on the CPU, with activations and sums in fp32.

torch has no product of the two types: it would round the activations, or make the weight twice as large.
"""

import ctypes
from ctypes import byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional

from blockscale.kernels.checks import check_activation, check_bias, check_contiguous, check_dtype, check_shape, rows
from blockscale.kernels.cpu.library import library

_OP = "linear in 16 bits"


class Dense(ctypes.Structure):
    """struct dense of calls.h."""

    _fields_ = (
        ("w", c_void_p),
        ("x", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("m", c_int64),
        ("threads", c_int32),
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """fp32 [..., N]: x fp32 [..., K] times `weight` bfloat16 [N, K] plus `bias` fp32 [N].

    Where the kernels can be built: the same bytes for any number of threads and any batch that a row of x comes in.
    """
    check_dtype(_OP, "weight", weight, (torch.bfloat16,))
    check_shape(_OP, "weight", weight, (None, None))
    check_contiguous(_OP, "weight", weight)
    check_activation(_OP, x, weight.shape[1], (torch.float32,))
    check_bias(_OP, bias, weight.shape[0], x)
    built = library()
    if built is None:
        return functional.linear(x, weight.float(), bias)
    flat, n = rows(x).contiguous(), weight.shape[0]
    y = torch.empty(flat.shape[0], n)
    added = None if bias is None else bias.float().contiguous()
    call = Dense(
        weight.data_ptr(),
        flat.data_ptr(),
        None if added is None else added.data_ptr(),
        y.data_ptr(),
        n,
        weight.shape[1],
        flat.shape[0],
        torch.get_num_threads(),
    )
    built.blockscale_dense(byref(call))
    return y.view(*x.shape[:-1], n)

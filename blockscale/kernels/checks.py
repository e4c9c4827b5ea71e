"""Operands that a kernel would misread are refused here, in the same words for every kernel.

Each check raises FormatError that names the op, the operand, what it is and what it should be. None of them looks at
values, so that nothing waits for the device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockscale.errors import FormatError

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16)


def describe_tensor(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} on {x.device}".removeprefix("torch.")


def check_dtype(op: str, name: str, x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """`x` has one of `dtypes`."""
    if x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise FormatError(f"{op}: {name} is {describe_tensor(x)}", hint=f"{name} must be {wanted}")


def check_shape(op: str, name: str, x: Tensor, shape: Sequence[int | None]) -> None:
    """`x` has that shape; None stands for any size."""
    fits = x.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, x.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise FormatError(f"{op}: {name} is {describe_tensor(x)}", hint=f"{name} must have shape [{wanted}]")


def check_activation(
    op: str, x: Tensor, k: int, dtypes: Sequence[torch.dtype] = ACTIVATION_DTYPES, name: str = "x"
) -> None:
    """`x` is [..., k] of one of `dtypes`."""
    check_dtype(op, name, x, dtypes)
    if x.dim() == 0 or x.shape[-1] != k:
        raise FormatError(f"{op}: {name} is {describe_tensor(x)}", hint=f"the last dimension of {name} must be {k}")


def check_multiple(op: str, what: str, size: int, multiple: int) -> None:
    """A dimension is a positive multiple, such as K of a block."""
    if size <= 0 or size % multiple:
        raise FormatError(f"{op}: {what} = {size}", hint=f"{what} must be a positive multiple of {multiple}")


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    """All of them lie on the device of the first; None is passed over."""
    there = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(there.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in there.items())
        raise FormatError(f"{op}: operands on different devices: {where}", hint="move them to one device")


def check_bias(op: str, bias: Tensor | None, n: int, x: Tensor) -> None:
    """None, or [n] of the activation's dtype or fp32."""
    if bias is not None:
        check_shape(op, "bias", bias, (n,))
        check_dtype(op, "bias", bias, tuple(dict.fromkeys((x.dtype, torch.float32))))


def check_contiguous(op: str, name: str, x: Tensor) -> None:
    """Weights are read by position: a strided one would be read wrong, and a copy made silently would not be seen."""
    if not x.is_contiguous():
        raise FormatError(f"{op}: {name} has strides {x.stride()}", hint=f"give {name}.contiguous()")


def check_aligned(op: str, name: str, x: Tensor, num_bytes: int) -> None:
    """The first element lies at a multiple of `num_bytes`, as wide loads need. An empty tensor passes."""
    if x.numel() and x.data_ptr() % num_bytes:
        raise FormatError(
            f"{op}: {name} does not begin at a multiple of {num_bytes} bytes", hint=f"give {name}.clone()"
        )


def rows(x: Tensor) -> Tensor:
    """[..., K] -> [M, K] whose last dimension has stride 1: a view where there is one, a copy otherwise.

    M is the product of the leading dimensions; the rows may lie any distance apart.
    """
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(0, 0)
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()

"""Tensors that hypothesis draws."""

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("normal", "heavy tail", "mostly zero", "few bits", "wide range")


def build(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """fp32 of that shape, its largest magnitude between 2^-16 and 2^10."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "heavy tail":
        x = x / torch.randn(shape, generator=generator).abs().clamp(min=0.02)
    elif kind == "mostly zero":
        x = x * (torch.rand(shape, generator=generator) < 0.05)
    elif kind == "few bits":  # multiples of 1/4: many exact ties
        x = (x * 8).round() / 4
    elif kind == "wide range":
        x = x * 2.0 ** torch.randint(-12, 4, shape, generator=generator)
    return x


@st.composite
def tensors(draw: st.DrawFn, last: int = 128, dtypes: tuple[torch.dtype, ...] = DTYPES, max_dim: int = 4) -> Tensor:
    """Finite tensors of 1 to `max_dim` dimensions, the last of them `last` or twice that."""
    leading = draw(st.lists(st.integers(1, 3), max_size=max_dim - 1))
    shape = (*leading, last * draw(st.integers(1, 2)))
    x = build(draw(st.sampled_from(KINDS)), shape, draw(st.integers(0, 2**32 - 1)))
    return x.to(draw(st.sampled_from(dtypes)))

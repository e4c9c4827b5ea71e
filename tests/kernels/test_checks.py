"""Operands that a kernel would misread are refused by name. Needs nothing."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockscale.errors import FormatError
from blockscale.kernels import checks

X = torch.zeros(2, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("check", "message", "hint"),
    [
        (lambda: checks.check_activation("op", X.double(), 32), r"op: x is float64 \[2, 32\]", "bfloat16 or float16"),
        (lambda: checks.check_activation("op", X, 48), r"x is bfloat16 \[2, 32\] on cpu", "must be 48"),
        (lambda: checks.check_activation("op", X[0, 0], 32), r"x is bfloat16 \[\]", "must be 32"),
        (lambda: checks.check_multiple("op", "K", 24, 16), "op: K = 24", "multiple of 16"),
        (lambda: checks.check_multiple("op", "K", 0, 16), "op: K = 0", "positive"),
        (lambda: checks.check_same_device("op", x=X, w=X.to("meta"), b=None), "x on cpu, w on meta", "one device"),
        (lambda: checks.check_bias("op", X[0], 16, X), r"bias is bfloat16 \[32\]", r"\[16\]"),
        (lambda: checks.check_bias("op", X[0].half(), 32, X), "bias is float16", "bfloat16 or float32"),
        (lambda: checks.check_shape("op", "w", X, (None, 16)), r"w is bfloat16 \[2, 32\]", r"\[\*, 16\]"),
        (lambda: checks.check_shape("op", "w", X, (2, 32, 1)), "w is", r"\[2, 32, 1\]"),
        (lambda: checks.check_contiguous("op", "w", X.T), r"w has strides \(1, 32\)", "contiguous"),
        (lambda: checks.check_aligned("op", "w", X.view(-1)[1:], 16), "multiple of 16 bytes", "clone"),
    ],
)
def test_a_wrong_operand_is_named(check: Callable[[], None], message: str, hint: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        check()
    assert pytest.importorskip("re").search(hint, caught.value.hint)


def test_right_operands_pass() -> None:
    checks.check_activation("op", X, 32)
    checks.check_activation("op", X[:0], 32)
    checks.check_same_device("op", x=X, bias=None)
    checks.check_bias("op", None, 5, X)
    checks.check_bias("op", X[0].float(), 32, X)
    checks.check_shape("op", "w", X, (None, 32))
    checks.check_aligned("op", "w", X[:0].view(-1), 16)


@given(st.lists(st.integers(0, 3), min_size=0, max_size=3), st.permutations(range(3)), st.integers(1, 2))
def test_rows_hold_the_same_values_with_unit_stride(lead: list[int], order: list[int], step: int) -> None:
    x = torch.arange(64 * 3**3).float().view(3, 3, 3, 64)
    x = x.permute(*order, 3)[..., :: 2 * step - 1][tuple(slice(n) for n in lead)]
    flat = checks.rows(x)
    assert flat.dim() == 2
    assert flat.stride(1) == 1 or flat.shape[1] == 1
    assert torch.equal(flat, x.reshape(-1, x.shape[-1]))


def test_rows_of_a_slice_are_a_view() -> None:
    x = torch.zeros(8, 96)
    assert checks.rows(x[::2, 16:48]).data_ptr() == x[0, 16:].data_ptr()
    assert checks.rows(torch.zeros(4, 0, 16)).shape == (0, 16)
    assert checks.rows(torch.zeros(16)).shape == (1, 16)

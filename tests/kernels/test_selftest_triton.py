"""The self-tests of Triton's kernels, through the ops' own launchers, in Triton's interpreter. Needs Triton, no GPU."""

import sys
from collections.abc import Iterator

import pytest
import torch

from blockscale.kernels import linears
from blockscale.kernels.device import describe
from blockscale.kernels.ops import attention as attention_ops
from blockscale.kernels.ops import between as between_ops
from blockscale.kernels.ops import moe as moe_ops
from blockscale.kernels.ops import quantize as quantize_ops
from blockscale.kernels.select import CANDIDATES, Candidate, Choice, Op
from blockscale.kernels.selftest import between, linear, moe, quantize, run
from tests.kernels.interpreter import interpreted

MODULES = (
    "linear",
    "linear_w4a4",
    "quantize",
    "norm_quantize",
    "silu_quantize",
    "hadamard_quantize",
    "weight_sweep",
    "kv_quantize",
    "moe",
    "attention_decode",
    "attention_prefill",
    "attention_mla",
    "norm",
    "gated",
    "rotary",
)
SERVED = {op: c for op, every in CANDIDATES.items() for c in every if c.kernel.value.startswith("triton/")}
LAUNCHERS = (linears.launcher, moe_ops.launcher, attention_ops.launcher, quantize_ops.launcher, between_ops.launcher)


@pytest.fixture(autouse=True)
def in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What launchers import is the interpreted copy; cases are few and small."""
    for name in MODULES:
        full = f"blockscale.kernels.triton.{name}"
        monkeypatch.setitem(sys.modules, full, interpreted(full))
    monkeypatch.setattr(linear, "ROWS", (3, 9))
    monkeypatch.setattr(linear, "N", 40)
    monkeypatch.setattr(moe, "_TOKENS", (5,))
    monkeypatch.setattr(quantize, "_DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(between, "_DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(between, "_TOKENS", 9)
    for launcher in LAUNCHERS:
        launcher.cache_clear()
    yield
    for launcher in LAUNCHERS:
        launcher.cache_clear()


@pytest.mark.parametrize("op", SERVED)
def test_a_kernel_is_called_as_its_op_says_and_is_right(op: Op) -> None:
    found: Candidate = SERVED[op]
    choice = Choice(op, found.kernel, found.mode, "", found.layout)
    verdict = run._verdict(choice, describe("cpu"), torch.device("cpu"))
    assert verdict.self_test == "passed", verdict.detail


def test_triton_serves_all_but_one() -> None:
    assert set(Op) - set(SERVED) == {Op.LINEAR_W4A8}

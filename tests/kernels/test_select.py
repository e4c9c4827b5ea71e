"""Which kernel serves which op on which device. Needs nothing: devices are described, not had."""

import json

import pytest
import torch

from blockscale.formats.spec import NVFP4
from blockscale.formats.tensor import encode
from blockscale.kernels import select
from blockscale.kernels.device import Device
from blockscale.kernels.linears import kernel_for
from blockscale.kernels.ops import moe
from blockscale.kernels.prepare import Layout, row_major
from blockscale.kernels.select import Kernel, Mode, Op, choices, choose, usable

CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
CPU = Device("cpu", None, "CPU", 8, 0, 0)
LINEARS = (Op.LINEAR_W4A16, Op.LINEAR_W4A8, Op.LINEAR_W4A4)


def gpu(capability: tuple[int, int], name: str = "a GPU") -> Device:
    return Device("cuda", capability, name, 132, 232448, 60 << 20)


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton 3.9, cuda-bindings and a compiler were there, and humming were not."""
    forget()
    monkeypatch.setattr(select, "version", lambda package: "3.9.0")
    monkeypatch.setattr(select, "find_spec", lambda name: None if name == "humming" else object())
    monkeypatch.setattr(select, "find_compiler", lambda: ["/usr/bin/cc"])
    yield
    forget()


def forget() -> None:
    for cached in (choose, usable, kernel_for):
        cached.cache_clear()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_op_has_one_kernel_on_every_gpu(capability: tuple[int, int]) -> None:
    found = {choice.op: choice for choice in choices(gpu(capability))}
    assert set(found) == set(Op)
    # only W4A8 needs FP8 tensor cores that are programmed for one architecture
    slow = {op for op, choice in found.items() if choice.kernel is Kernel.TORCH}
    assert slow == (set() if capability == (9, 0) else {Op.LINEAR_W4A8})
    assert all(choice.reason for choice in found.values())
    assert "{}.{}".format(*capability) in found[Op.LINEAR_W4A16].reason


def test_hopper_has_kernels_of_its_own() -> None:
    found = [c.kernel for c in usable(Op.LINEAR_W4A16, gpu((9, 0)))]
    assert found[:2] == [Kernel.CUDA_LINEAR_SMALL, Kernel.CUDA_LINEAR_LARGE]
    assert found[-2:] == [Kernel.TRITON_LINEAR, Kernel.TORCH]
    assert choose(Op.LINEAR_W4A16, gpu((9, 0))).layout is Layout.FRAGMENTS


@pytest.mark.parametrize("capability", [(7, 5), (8, 8), (9, 1), (10, 1), (12, 2), (13, 0)])
def test_a_family_never_stands_in_for_a_member(capability: tuple[int, int]) -> None:
    """What nobody compiled for is served by plain torch, whatever its neighbours have."""
    for choice in choices(gpu(capability)):
        assert choice.kernel is Kernel.TORCH
        assert choice.mode is Mode.REFERENCE
        assert choice.reason == "no kernel for capability {}.{}".format(*capability)


def test_the_cpu_has_linears_and_a_quantizer() -> None:
    found = {choice.op: choice for choice in choices(CPU)}
    assert {op for op, c in found.items() if c.kernel is not Kernel.TORCH} == {*LINEARS, Op.QUANTIZE_NVFP4}
    assert found[Op.LINEAR_W4A4].mode is Mode.EMULATED
    assert found[Op.MOE_W4A16].reason == "no kernel for CPU"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("CC", "/nowhere/cc")
    choice = choose(Op.LINEAR_W4A16, CPU)
    assert (choice.kernel, choice.mode) == (Kernel.TORCH, Mode.REFERENCE)
    assert "install gcc or clang" in choice.reason

    def no_package(package: str) -> str:
        raise select.PackageNotFoundError(package)

    monkeypatch.setattr(select, "version", no_package)
    choice = choose(Op.MOE_W4A16, gpu((8, 0)))
    assert choice.kernel is Kernel.TORCH
    assert "triton is not installed" in choice.reason
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    forget()
    assert "cuda-bindings is not installed" in choose(Op.LINEAR_W4A8, gpu((9, 0))).reason


@pytest.mark.parametrize(
    ("installed", "capability", "kernel"),
    [
        ("3.5.1", (8, 0), Kernel.TORCH),
        ("3.6.0", (8, 0), Kernel.TRITON_LINEAR),
        ("3.6.0+git1", (12, 1), Kernel.TRITON_LINEAR),
        ("3.6.0", (11, 0), Kernel.TORCH),
        ("3.9.0", (11, 0), Kernel.TRITON_LINEAR),
        ("3.10.2", (11, 0), Kernel.TRITON_LINEAR),
    ],
)
def test_versions_of_triton(
    monkeypatch: pytest.MonkeyPatch, installed: str, capability: tuple[int, int], kernel: Kernel
) -> None:
    monkeypatch.setattr(select, "version", lambda package: installed)
    choice = choose(Op.LINEAR_W4A16, gpu(capability))
    assert choice.kernel is kernel
    if kernel is Kernel.TORCH:
        assert f"triton {installed} is too old" in choice.reason


def test_humming_comes_after_what_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: object())
    found = [c.kernel for c in usable(Op.LINEAR_W4A16, gpu((8, 6)))]
    assert found == [Kernel.TRITON_LINEAR, Kernel.HUMMING, Kernel.TORCH]


@pytest.mark.parametrize(
    ("capability", "tokens", "k", "kernel"),
    [
        ((9, 0), 1, 64, Kernel.CUDA_MOE),
        ((9, 0), 512, 64, Kernel.CUDA_MOE),
        ((9, 0), 513, 64, Kernel.TRITON_MOE),  # more choices than it looks at
        ((9, 0), 1, 48, Kernel.TRITON_MOE),  # no multiple of 32
        ((8, 0), 1, 64, Kernel.TRITON_MOE),
        ((10, 3), 1, 64, Kernel.TRITON_MOE),
        ((7, 5), 1, 64, Kernel.TORCH),
    ],
)
def test_experts_for_few_tokens_have_a_kernel_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], tokens: int, k: int, kernel: Kernel
) -> None:
    monkeypatch.setattr(moe, "describe", lambda device: gpu(capability))
    stacks = [row_major(encode(torch.ones(4, n, depth), NVFP4)) for n, depth in ((128, k), (k, 64))]
    x, ids = torch.zeros(tokens, k), torch.zeros(tokens, 2, dtype=torch.int32)
    assert moe.kernel_for(x, ids, *stacks) is kernel


def test_choices_are_plain_data() -> None:
    text = json.dumps([[c.op.value, c.kernel.value, c.mode.value, c.reason] for c in choices(gpu((9, 0)))])
    assert "cuda/linear_small" in text

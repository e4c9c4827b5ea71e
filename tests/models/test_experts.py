"""Experts as every kind of checkpoint keeps them, against the modules of transformers on the decoded weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families.published import with_mxfp4_experts
from torch import Tensor, nn

from blockscale import api
from blockscale.checkpoint import load as load_module
from blockscale.checkpoint import source as source_module
from blockscale.checkpoint.dialects.stored import StoredLinear
from blockscale.checkpoint.header import TensorInfo
from blockscale.checkpoint.load import load_linear, plain_values
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.source import SourceTensor
from blockscale.checkpoint.tensors import read_tensor
from blockscale.errors import ModelError
from blockscale.host.model import load_model
from blockscale.kernels.experts import GPT_OSS, SILU
from blockscale.models import moe
from blockscale.models.expert_weights import Stored
from blockscale.models.experts import PackedExperts, PlainExperts, Product, SeparateExperts

CPU = torch.device("cpu")
DTYPE = torch.float16
WIDTHS = {"qwen3_moe": 32, "mixtral": 96, "gpt_oss": 64}
PREFIX = {"mixtral": "model.layers.0.block_sparse_moe.experts"}
PLACE = "model.layers.0.mlp.experts"
# fp16 rounds the activations between the projections and the result, half a place each, and sums are in fp32
BOUND = 2.0**-10
TinyModel = Callable[[str], Path]


def fp32_linear(stored: Stored, bias: SourceTensor | None) -> Product:
    weight = plain_values(load_linear(stored, DTYPE)) if isinstance(stored, StoredLinear) else stored.read().float()
    added = None if bias is None else bias.read().float()
    return lambda x: nn.functional.linear(x.float(), weight, added)


def routed(num_tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(num_tokens, 64, generator=generator).to(DTYPE)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(num_tokens)])
    return x, ids, torch.rand(num_tokens, 2, generator=generator)


def load(path: Path, family: str, *, is_emulating: bool = False) -> Any:
    return moe.load_experts(
        open_checkpoint(path),
        PREFIX.get(family, PLACE),
        (4, 64, WIDTHS[family]),
        fp32_linear,
        device=CPU,
        dtype=DTYPE,
        is_emulating=is_emulating,
        activation=GPT_OSS if family == "gpt_oss" else SILU,
        is_transposed=family == "gpt_oss",
    )


def expected(path: Path) -> Tensor:
    x, ids, weights = routed()
    module = load_model(path, emulate_activations=False).model.get_submodule(PLACE)
    with torch.inference_mode():
        return module(x.float(), ids, weights)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


@pytest.fixture
def with_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: stacks go to the mixture-of-experts op."""
    monkeypatch.setattr(moe, "has_kernel", lambda device: True)


@pytest.mark.parametrize("family", WIDTHS)
def test_sixteen_bits(family: str, tiny_model: TinyModel) -> None:
    path = tiny_model(family)
    experts = load(path, family)
    assert isinstance(experts, PlainExperts)
    assert relative(experts(*routed()), expected(path)) < BOUND
    assert relative(experts._grouped(*routed()), expected(path)) < BOUND  # a GPU's way


@pytest.mark.parametrize(
    ("family", "recipe"), [*((family, "nvfp4-w4a16") for family in WIDTHS), ("qwen3_moe", "mxfp4")]
)
def test_four_bits_go_to_the_op(family: str, recipe: str, tiny_model: TinyModel, tmp_path: Path, with_op: None) -> None:
    path = tmp_path / "model"
    api.quantize(tiny_model(family), path, recipe)
    experts = load(path, family)
    assert isinstance(experts, PackedExperts)
    assert experts.gate_up.shape == (4, 2 * WIDTHS[family], 64)
    assert relative(experts(*routed()), expected(path)) < BOUND


def test_published_mxfp4_stays_packed(tiny_model: TinyModel, tmp_path: Path, with_op: None) -> None:
    path = with_mxfp4_experts(tiny_model("gpt_oss"), tmp_path / "model")
    experts = load(path, "gpt_oss")
    assert isinstance(experts, PackedExperts)
    assert experts.gate_up.packed.element_size() * experts.gate_up.packed.numel() == 4 * 128 * 64 // 2
    assert relative(experts(*routed()), expected(path)) < BOUND


@pytest.mark.parametrize("family", WIDTHS)
def test_without_a_kernel_linears_run_one_by_one(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "model"
    api.quantize(tiny_model(family), path, "nvfp4-w4a16")
    experts = load(path, family)
    assert isinstance(experts, SeparateExperts)
    assert relative(experts(*routed()), expected(path)) < BOUND


def test_rounded_inputs_and_other_formats_are_no_stack(tiny_model: TinyModel, tmp_path: Path, with_op: None) -> None:
    path = tmp_path / "fp8"
    api.quantize(tiny_model("qwen3_moe"), path, "fp8")
    experts = load(path, "qwen3_moe")
    assert isinstance(experts, SeparateExperts)
    assert relative(experts(*routed()), expected(path)) < BOUND
    mx = tmp_path / "mx"
    api.quantize(tiny_model("qwen3_moe"), mx, "mxfp4")
    assert isinstance(load(mx, "qwen3_moe", is_emulating=True), SeparateExperts)
    assert isinstance(load(mx, "qwen3_moe"), PackedExperts)


@pytest.mark.parametrize("form", ["plain", "packed", "separate"])
def test_padding_adds_nothing(
    form: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("mixtral")
    if form != "plain":
        path = tmp_path / "model"
        api.quantize(tiny_model("mixtral"), path, "nvfp4-w4a16")
        monkeypatch.setattr(moe, "has_kernel", lambda device: form == "packed")
    experts = load(path, "mixtral")
    x, ids, weights = routed()
    ids[3] = -1
    y = experts(x, ids, weights)
    assert not y[3].any()
    assert y[2].any()


def test_what_is_missing_is_named(tiny_model: TinyModel) -> None:
    checkpoint = open_checkpoint(tiny_model("mixtral"))
    options: dict[str, Any] = {"device": CPU, "dtype": DTYPE, "is_emulating": False}
    prefix = PREFIX["mixtral"]
    with pytest.raises(ModelError, match=r"experts\.4\.w1: the checkpoint has no weight"):
        moe.load_experts(checkpoint, prefix, (5, 64, 96), fp32_linear, **options)
    with pytest.raises(ModelError, match=r"experts\.0\.w1.*\[96, 64\], the model \[80, 64\]"):
        moe.load_experts(checkpoint, prefix, (4, 64, 80), fp32_linear, **options)
    with pytest.raises(ModelError, match="no experts there"):
        moe.load_experts(checkpoint, "model.layers.9.mlp.experts", (4, 64, 96), fp32_linear, **options)


@pytest.mark.parametrize("form", ["16 bits", "NVFP4", "MXFP4"])
def test_a_stack_is_read_one_expert_at_a_time(
    form: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_op: None
) -> None:
    path = tiny_model("gpt_oss")
    if form == "NVFP4":
        path = tmp_path / "model"
        api.quantize(tiny_model("gpt_oss"), path, "nvfp4-w4a16")
    elif form == "MXFP4":
        path = with_mxfp4_experts(path, tmp_path / "model")
    read: list[int] = []

    def recorded(info: TensorInfo) -> Tensor:
        read.append(info.num_bytes)
        return read_tensor(info)

    monkeypatch.setattr(load_module, "read_tensor", recorded)
    monkeypatch.setattr(source_module, "read_tensor", recorded)
    experts = load(path, "gpt_oss")
    largest = 128 * 64 * 2 if form == "16 bits" else 128 * 64 // 2  # gate and up of one expert
    assert max(read) == largest
    assert len(read) > 4 * 2
    assert isinstance(experts, PlainExperts if form == "16 bits" else PackedExperts)

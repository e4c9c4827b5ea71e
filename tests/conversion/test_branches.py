"""What lies beside weights on the way to somewhere else: copied, added to the weight, left out and said, refused."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint.files import same
from faults.branches import add_residual, name_algorithm, with_branches
from faults.raw import GOLDEN, Tensors, copy_golden, decode, edit, load, modules_of, read_json

from blockscale import api
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.conversion.repair.repair import repair_checkpoint
from blockscale.errors import CheckFailed, CheckpointError
from blockscale.host.model import load_model
from tests.conversion.gguf_models import add_byte_level_tokenizer
from tests.conversion.gguf_reading import decoded, write

DOWN = "model.layers.1.mlp.down_proj"
IDS = torch.arange(24).view(2, 12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Low-rank branches on two linears of a layer, residual channels on all."""
    return with_branches(tmp_path, None)


@pytest.fixture
def channels_only(tmp_path: Path) -> Path:
    def change(tensors: Tensors) -> None:
        for module in modules_of(tensors):
            add_residual(tensors, module)

    (tmp_path / "channels").mkdir()
    path = copy_golden("modelopt_llama_nvfp4", tmp_path / "channels")
    edit(path, change)
    return path


def algorithm(folder: Path) -> str:
    return str(read_json(folder / "config.json")["quantization_config"]["quant_algo"])


def test_the_same_dialect_copies_them(folder: Path, tmp_path: Path) -> None:
    summary = api.convert(folder, tmp_path / "out", "modelopt")
    before, after = load(folder), load(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same(before[name], after[name]) for name in before)
    assert algorithm(tmp_path / "out") == "NVFP4_SVD"
    assert summary.exact
    assert not summary.notices


def test_16_bits_have_the_branch_in_the_weight(folder: Path, tmp_path: Path) -> None:
    summary = api.convert(folder, tmp_path / "out", "bf16")
    stored, plain, source = load(folder), load(tmp_path / "out"), load(GOLDEN / "base_llama")
    assert plain.keys() == source.keys()
    for module in modules_of(stored):
        whole = decode(stored, module)
        if f"{module}.svdquant_lora_a" in stored:
            factors = (stored[f"{module}.svdquant_lora_{letter}"].double() for letter in "ba")
            whole = whole + torch.matmul(*factors)
        found = plain[f"{module}.weight"].double()
        # half a unit in bf16's last place, and fp32's sums of five terms before it
        assert ((found - whole).abs() <= 2.0**-8 * whole.abs() + 8 * 2.0**-24).all(), module
        assert (found - source[f"{module}.weight"].double()).norm() < 0.15 * found.norm()
    assert summary.notices == ("the residual channels of 14 weights are left out: a 16-bit model rounds no inputs",)


def test_a_16_bit_model_answers_as_the_hosted_one_without_rounding(folder: Path, tmp_path: Path) -> None:
    api.convert(folder, tmp_path / "out", "bf16")
    packed = load_model(folder, emulate_activations=False).logits(IDS)
    assert torch.allclose(load_model(tmp_path / "out").logits(IDS), packed, rtol=0, atol=0.02 * packed.abs().max())


def test_the_other_dialect_refuses_a_branch_before_any_work(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"proj: compressed-tensors cannot hold a low-rank branch") as caught:
        api.convert(folder, tmp_path / "out", "compressed-tensors")
    assert "--to bf16" in caught.value.hint
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}


def test_the_other_dialect_goes_without_residual_channels(channels_only: Path, tmp_path: Path) -> None:
    """What is left is what Model Optimizer wrote, bit for bit."""
    summary = api.convert(channels_only, tmp_path / "ct", "compressed-tensors")
    api.convert(GOLDEN / "modelopt_llama_nvfp4", tmp_path / "plain", "compressed-tensors")
    found, plain = load(tmp_path / "ct"), load(tmp_path / "plain")
    assert found.keys() == plain.keys()
    assert all(same(found[name], plain[name]) for name in plain)
    (notice,) = summary.notices
    assert notice.startswith("the residual channels of 14 weights are left out")
    assert "standard layout" in notice


def test_gguf(folder: Path, channels_only: Path, tmp_path: Path) -> None:
    add_byte_level_tokenizer(channels_only, num_bytes=128)
    summary, file = write(channels_only, tmp_path / "x.gguf")
    assert "the residual channels of 14 weights are left out: GGUF has no place for them" in summary.notices
    expected = decoded(open_checkpoint(channels_only), "model.layers.0.mlp.gate_proj")
    assert torch.equal(file.weight("blk.0.ffn_gate"), expected)
    add_byte_level_tokenizer(folder, num_bytes=128)
    with pytest.raises(CheckpointError, match="GGUF has no place for a low-rank branch") as caught:
        api.convert(folder, tmp_path / "y.gguf", "gguf")
    assert "bf16" in caught.value.hint
    assert not (tmp_path / "y.gguf").exists()


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors", "bf16"])
def test_how_activations_are_rounded_goes_along(to: str, tmp_path: Path) -> None:
    """But into a 16-bit model, which rounds none."""
    folder = copy_golden("modelopt_llama_nvfp4", tmp_path)
    (folder / "blockscale.json").write_text(json.dumps({"activation_scale": "sweep", "recipe": "r"}))
    api.convert(folder, tmp_path / "out", to)
    record = read_json(tmp_path / "out" / "blockscale.json")
    assert record.get("activation_scale") == (None if to == "bf16" else "sweep")
    assert open_checkpoint(tmp_path / "out").activation_scale.value == ("amax" if to == "bf16" else "sweep")


def test_a_repair_keeps_branches_and_how_activations_are_rounded(folder: Path, tmp_path: Path) -> None:
    (folder / "blockscale.json").write_text(json.dumps({"activation_scale": "four_over_six"}))
    edit(folder, lambda tensors: tensors["model.layers.0.self_attn.q_proj.input_scale"].mul_(1.5))
    before = load(folder)
    repair_checkpoint(folder, tmp_path / "out")
    after = load(tmp_path / "out")
    assert before.keys() == after.keys()
    beside = [name for name in before if "lora" in name or "residual" in name]
    assert len(beside) == 2 * 4 + 3 * 14
    assert all(same(before[name], after[name]) for name in beside)
    assert algorithm(tmp_path / "out") == "NVFP4_SVD"
    assert open_checkpoint(tmp_path / "out").activation_scale.value == "four_over_six"


def test_a_repair_of_scales_that_channels_go_by_is_refused(folder: Path, tmp_path: Path) -> None:
    edit(folder, lambda tensors: tensors["model.layers.0.self_attn.q_proj.weight_scale_2"].mul_(2))
    with pytest.raises(CheckFailed, match="residual channels go by the same scales"):
        repair_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_half_a_branch_is_not_passed_over(tmp_path: Path) -> None:
    folder = copy_golden("modelopt_llama_nvfp4", tmp_path)
    name_algorithm(folder, "NVFP4_SVD")
    edit(folder, lambda tensors: tensors.update({f"{DOWN}.svdquant_lora_a": torch.ones(4, 128).bfloat16()}))
    for to in ("modelopt", "compressed-tensors", "bf16", "gguf"):
        with pytest.raises(CheckpointError, match="svdquant_lora_a is there, and the other factor is missing"):
            api.convert(folder, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_what_is_stored_is_what_runs(folder: Path) -> None:
    """With all parts, with none, and with the channels that correct inputs."""
    whole = load_model(folder).logits(IDS)
    assert not torch.equal(whole, load_model(folder, emulate_activations=False).logits(IDS))

    def without(*parts: str) -> torch.Tensor:
        def change(tensors: Tensors) -> None:
            for name in [name for name in tensors if any(part in name for part in parts)]:
                del tensors[name]

        edit(folder, change)
        return load_model(folder).logits(IDS)

    reference = load_model(GOLDEN / "base_llama").logits(IDS)
    no_channels = without("residual")
    name_algorithm(folder, "NVFP4")
    no_branch = without("lora")
    errors = [(logits - reference).norm().item() for logits in (whole, no_channels, no_branch)]
    assert errors[1] != errors[0]
    assert max(errors[:2]) < 0.5 * errors[2], "a weight without its branch is another weight"

"""Verdicts on checkpoints whose parts are lost, or stored as engines cannot run them: headers alone show it. Needs
nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale.inspection.contents import inspect_folder

from .changed_folders import copied, edit_json, edit_settings

SERVERS = ("vLLM", "SGLang", "TensorRT-LLM")
EXPERTS = "model.layers.0.mlp.experts"
Change = Callable[[dict[str, Tensor]], None]


def refusals(folder: Path) -> dict[str, str]:
    """Engine -> the rule that it refuses the folder for, of those that know the modelopt dialect."""
    engines = inspect_folder(folder).engines
    return {v.engine: v.reason.split()[0] for v in engines if v.loads is False and v.engine in (*SERVERS, "blockscale")}


def lost(start: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            del tensors[name]

    return change


def in_16_bits(*linears: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for linear in linears:
            n, half_k = tensors[f"{linear}.weight"].shape
            lost(f"{linear}.")(tensors)
            tensors[f"{linear}.weight"] = torch.ones(n, 2 * half_k, dtype=torch.bfloat16)

    return change


def packed(linear: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        n, k = tensors[f"{linear}.weight"].shape
        tensors[f"{linear}.weight"] = torch.full((n, k // 2), 0x21, dtype=torch.uint8)
        tensors[f"{linear}.weight_scale"] = torch.ones(n, k // 16).to(torch.float8_e4m3fn)
        tensors[f"{linear}.weight_scale_2"] = torch.tensor(1e-4)
        tensors[f"{linear}.input_scale"] = torch.tensor(1e-3)

    return change


def relist(folder: Path, *, added: tuple[str, ...] = (), removed: tuple[str, ...] = ()) -> None:
    """Changes the list of what stays in 16 bits, in both configs."""

    def change(entries: list[str]) -> list[str]:
        return [entry for entry in entries if entry not in removed] + list(added)

    edit_settings(folder, lambda c: c.update(ignore=change(c["ignore"])))
    edit_json(
        folder / "hf_quant_config.json",
        lambda c: c["quantization"].update(exclude_modules=change(c["quantization"]["exclude_modules"])),
    )


@pytest.mark.parametrize(
    ("name", "start", "rule"),
    [
        ("modelopt_qwen3moe_nvfp4", f"{EXPERTS}.2.", "BS115"),
        ("modelopt_qwen3moe_nvfp4", f"{EXPERTS}.2.up_proj", "BS115"),
        ("modelopt_llama_nvfp4", "model.layers.1.input_layernorm", "BS318"),
        ("modelopt_llama_nvfp4", "lm_head", "BS318"),
        ("modelopt_llama_nvfp4", "model.layers.1.", "BS317"),
    ],
)
def test_nothing_runs_with_a_part_lost(name: str, start: str, rule: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path, lost(start))
    assert refusals(folder) == dict.fromkeys((*SERVERS, "blockscale"), rule)


def test_servers_fuse_what_is_stored_alike(tmp_path: Path) -> None:
    linear = "model.layers.1.self_attn.k_proj"
    folder = copied("modelopt_llama_nvfp4", tmp_path, in_16_bits(linear))
    relist(folder, added=(linear,))
    assert refusals(folder) == dict.fromkeys(SERVERS, "BS103")


def test_experts_of_two_formats_run_here_only(tmp_path: Path) -> None:
    folder = copied("modelopt_qwen3moe_nvfp4", tmp_path, in_16_bits(f"{EXPERTS}.2.down_proj"))
    assert set(refusals(folder)) == set(SERVERS)


def test_servers_have_no_packed_router(tmp_path: Path) -> None:
    folder = copied("modelopt_qwen3moe_nvfp4", tmp_path, packed("model.layers.0.mlp.gate"))
    relist(folder, removed=("model.layers.0.mlp.gate",))
    assert refusals(folder) == dict.fromkeys(SERVERS, "BS316")


@pytest.mark.parametrize(("file", "is_found"), [("model.safetensors", True), ("weights.safetensors", False)])
def test_transformers_looks_for_files_by_name(file: str, is_found: bool, tmp_path: Path) -> None:
    folder = copied("ct_llama_nvfp4", tmp_path)
    (folder / "model.safetensors").rename(folder / file)
    found = {v.engine: v for v in inspect_folder(folder).engines}
    assert found["vLLM"].loads
    assert found["transformers"].loads is is_found
    assert is_found or "neither model.safetensors nor an index" in found["transformers"].reason


def test_vllm_and_sglang_have_no_packed_head(tmp_path: Path) -> None:
    folder = copied("modelopt_llama_nvfp4", tmp_path, packed("lm_head"))
    relist(folder, removed=("lm_head",))
    assert refusals(folder) == dict.fromkeys(("vLLM", "SGLang"), "BS312")

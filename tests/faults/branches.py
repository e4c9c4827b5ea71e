"""Something beside the weights: Model Optimizer's low-rank branches, blockscale's residual channels. Nothing here knows
blockscale."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .breaking_tensors import E4M3_MAX, E4M3_STEP, EVEN_FIRST, Break, nvfp4, on_tensors
from .raw import E2M1, GOLDEN, Json, Tensors, copy_golden, decode, edit, edit_json, load, modules_of, pack

RANK, NUM_CHANNELS = 4, 16
_WITH_RANK = ("o_proj", "down_proj")  # fused weights share a scale, which the rest of one alone would not have


def with_branches(parent: Path, _: object) -> Path:
    """Llama in NVFP4: all linears with residual channels, two of a layer with a low-rank branch."""
    folder, source = copy_golden("modelopt_llama_nvfp4", parent), load(GOLDEN / "base_llama")

    def change(tensors: Tensors) -> None:
        for module in modules_of(tensors):
            if module.endswith(_WITH_RANK):
                add_low_rank(tensors, module, source[f"{module}.weight"])
            add_residual(tensors, module)

    edit(folder, change)
    name_algorithm(folder, "NVFP4_SVD")
    return folder


def name_algorithm(folder: Path, name: str) -> None:
    edit_json(folder / "config.json", lambda config: config["quantization_config"].update(quant_algo=name))
    edit_json(folder / "hf_quant_config.json", lambda config: config["quantization"].update(quant_algo=name))


def add_low_rank(tensors: Tensors, module: str, weight: Tensor, rank: int = RANK) -> None:
    """The largest singular values of a weight in 16 bits, and what they leave in NVFP4."""
    u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
    root = s[:rank].sqrt()
    up, down = (u[:, :rank] * root).bfloat16(), (root.unsqueeze(1) * v[:rank]).bfloat16()
    tensors.update(nvfp4(weight.double() - up.double() @ down.double(), module, input_scale=None))
    tensors |= {f"{module}.svdquant_lora_a": down, f"{module}.svdquant_lora_b": up}


def add_residual(tensors: Tensors, module: str, count: int = NUM_CHANNELS) -> None:
    """Every third column once more, under the weight's global scale."""
    weight, step = decode(tensors, module), tensors[f"{module}.weight_scale_2"].double()
    channels = (torch.arange(count) * 3 + 1) % weight.shape[1]
    blocks = weight[:, channels].unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / (6 * step)).clamp(E4M3_STEP, E4M3_MAX).float().to(torch.float8_e4m3fn)
    scaled = blocks / (scale.double() * step).unsqueeze(-1)
    nearest = (scaled.unsqueeze(-1) - E2M1[EVEN_FIRST].double()).abs().min(-1).indices
    tensors |= {
        f"{module}.residual_channels": channels.int(),
        f"{module}.residual_weight": pack(EVEN_FIRST[nearest].to(torch.uint8).flatten(-2)),
        f"{module}.residual_weight_scale": scale,
    }


# ---------------------------------------------------------------- ways to break them


def part(module: str, suffix: str, change: Callable[[Tensor], Tensor]) -> Break:
    """Another tensor in the place of one."""
    name = f"{module}.{suffix}"
    return on_tensors(lambda tensors: tensors.update({name: change(tensors[name].clone())}))


def spoil(module: str, suffix: str, value: float, position: int = 5) -> Break:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[position] = value
        return tensor

    return part(module, suffix, change)


def algorithm(name: str) -> Break:
    return lambda folder: name_algorithm(folder, name)


def record(**entries: object) -> Break:
    """blockscale.json."""

    def change(folder: Path) -> None:
        (folder / "blockscale.json").write_text("{}")

        def update(content: Json) -> None:
            content.update(entries)

        edit_json(folder / "blockscale.json", update)

    return change

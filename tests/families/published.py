"""Tiny models as their makers publish them: with draft layers that transformers does not know, experts in MXFP4."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockscale.formats.spec import MXFP4
from blockscale.formats.tensor import encode

FILE = "model.safetensors"
Tensors = dict[str, Tensor]


def with_draft_layer(source: Path, target: Path) -> Path:
    """DeepSeek-V3's and GLM-4.5's way: one more decoder layer behind the others, with an embedding and a head."""
    tensors = load_file(source / FILE)
    number = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    draft = f"model.layers.{number}."
    extra = _moved(tensors, f"model.layers.{number - 1}.", draft)
    extra |= _drawn(
        tensors,
        norms=[f"{draft}{norm}.weight" for norm in ("enorm", "hnorm", "shared_head.norm")],
        joint=f"{draft}eh_proj.weight",
    )
    extra[f"{draft}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    extra[f"{draft}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return _copy(source, target, {**tensors, **extra}, {"num_nextn_predict_layers": 1})


def with_draft_root(source: Path, target: Path) -> Path:
    """Qwen3-Next's way: a layer under a root of its own, like the last decoder layer."""
    tensors = load_file(source / FILE)
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    extra = _moved(tensors, f"model.layers.{last}.", "mtp.layers.0.")
    norms = [f"mtp.{norm}.weight" for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")]
    extra |= _drawn(tensors, norms=norms, joint="mtp.fc.weight")
    return _copy(source, target, {**tensors, **extra}, {})


def with_mxfp4_experts(source: Path, target: Path) -> Path:
    """gpt-oss' way: the stacks as blocks of codes, [E, N, K/32, 16], and their scales."""
    tensors = load_file(source / FILE)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        q = encode(tensors.pop(name).transpose(-1, -2).contiguous(), MXFP4)
        tensors[f"{name}_blocks"] = q.packed.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = q.block_scale
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    return _copy(source, target, tensors, {"quantization_config": quantization})


def without_computed_buffers(source: Path, target: Path) -> Path:
    """MiniMax's first files: the decays of linear attention follow from the config, and are not stored."""
    tensors = load_file(source / FILE)
    stored = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_decay", "slope_rate"))}
    assert len(stored) < len(tensors)
    return _copy(source, target, stored, {})


def of_unknown_type(source: Path, target: Path) -> Path:
    """A model that no library has a class for; its tensors are named as usual."""
    return _copy(source, target, load_file(source / FILE), {"model_type": "next_9000", "architectures": ["Next9000"]})


def _moved(tensors: Tensors, old: str, new: str) -> Tensors:
    return {new + n.removeprefix(old): t.clone() for n, t in tensors.items() if n.startswith(old)}


def _drawn(tensors: Tensors, norms: list[str], joint: str) -> Tensors:
    """Norms, and the matrix that joins the hidden state with the next token's embedding."""
    hidden = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(11)
    drawn = {norm: torch.randn(hidden, generator=generator).bfloat16() for norm in norms}
    return {**drawn, joint: (torch.randn(hidden, 2 * hidden, generator=generator) * 0.12).bfloat16()}


def _copy(source: Path, target: Path, tensors: Tensors, entries: Mapping[str, Any]) -> Path:
    """The model with these tensors, and more entries in its config."""
    shutil.copytree(source, target)
    save_file(tensors, target / FILE, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **entries}))
    return target

"""Good checkpoints to break: the peers' golden ones, whole and in shards, and tiny models quantized here."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .branches import with_branches
from .raw import GOLDEN, SINGLE, Tensors, copy_golden, edit, edit_json, load, split

Find = Callable[[str], Path]  # model type -> a tiny 16-bit model of it
Base = Callable[[Path, Find], Path]  # a folder of one's own below the first path


def golden(name: str, shards: int = 1, change: Callable[[Tensors], None] | None = None) -> Base:
    def make(parent: Path, _: Find) -> Path:
        folder = copy_golden(name, parent)
        if change is not None:
            edit(folder, change)
        if shards > 1:
            split(folder, shards)
        return folder

    return make


def quantized(
    source: Callable[[Path, Find], Path], recipe: str = "nvfp4-w4a16", dialect: str = "modelopt", shards: int = 1
) -> Base:
    def make(parent: Path, tiny_model: Find) -> Path:
        from blockscale import api

        api.quantize(source(parent, tiny_model), parent / "quantized", recipe, dialect=dialect)
        if shards > 1:
            split(parent / "quantized", shards)
        return parent / "quantized"

    return make


# ---------------------------------------------------------------- 16-bit models


def tiny(family: str, parent: Path, tiny_model: Find) -> Path:
    return tiny_model(family)


def _changed(family: str, parent: Path, tiny_model: Find, config: Mapping[str, Any], extra: Tensors) -> Path:
    """A tiny model with other entries in its config and more tensors."""
    folder = parent / "source"
    folder.mkdir()
    for file in tiny_model(family).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    edit_json(folder / "config.json", lambda old: old.update(config))
    save_file({**load(folder), **extra}, folder / SINGLE, {"format": "pt"})
    return folder


def deepseek_with_draft(parent: Path, tiny_model: Find) -> Path:
    """DeepSeek-V3 with its draft layer, which lies behind the decoder layers: a third of two."""
    body = load(tiny_model("deepseek_v3"))
    last, draft = "model.layers.1.", "model.layers.2."
    extra = {draft + name.removeprefix(last): tensor.clone() for name, tensor in body.items() if name.startswith(last)}
    hidden = body["model.norm.weight"].shape[0]
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        extra[f"{draft}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    extra[f"{draft}eh_proj.weight"] = _drawn(hidden, 2 * hidden)
    extra[f"{draft}embed_tokens.weight"] = body["model.embed_tokens.weight"].clone()
    extra[f"{draft}shared_head.head.weight"] = body["lm_head.weight"].clone()
    return _changed("deepseek_v3", parent, tiny_model, {"num_nextn_predict_layers": 1}, extra)


def qwen_with_draft(parent: Path, tiny_model: Find) -> Path:
    """A draft layer under a root of its own, `mtp`."""
    body = load(tiny_model("qwen3"))
    layer = "model.layers.1."
    extra = {"mtp.layers.0." + n.removeprefix(layer): t.clone() for n, t in body.items() if n.startswith(layer)}
    hidden = body["model.norm.weight"].shape[0]
    extra["mtp.fc.weight"] = _drawn(hidden, 2 * hidden)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        extra[f"mtp.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return _changed("qwen3", parent, tiny_model, {"mtp_num_hidden_layers": 1}, extra)


def llama(hidden: int, intermediate: int, spread: float, parent: Path, tiny_model: Find) -> Path:
    """One decoder layer of another size. Rows and columns of real weights differ in magnitude: by e^(`spread` times a
    normal number) here."""
    folder = parent / f"llama-{hidden}-{intermediate}"
    folder.mkdir()
    vocabulary = 128
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    tensors = {"model.embed_tokens.weight": _drawn(vocabulary, hidden), "lm_head.weight": _drawn(vocabulary, hidden)}
    for seed, (name, (n, k)) in enumerate(shapes.items()):
        tensors[f"model.layers.0.{name}.weight"] = _drawn(n, k, seed, spread)
    for norm in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        tensors[f"{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    config = json.loads((GOLDEN / "base_llama" / "config.json").read_text())
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "head_dim": hidden // 4}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, **heads}))
    return folder


def _drawn(n: int, k: int, seed: int = 0, spread: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * 0.02
    rows, cols = torch.randn(n, 1, generator=generator), torch.randn(1, k, generator=generator)
    return (weight * (spread * rows).exp() * (spread * cols).exp()).bfloat16()


def zero_down(tensors: Tensors) -> None:
    """A weight of zeros, as it should be stored."""
    module = "model.layers.1.mlp.down_proj"
    tensors[f"{module}.weight"].zero_()
    tensors[f"{module}.weight_scale"].fill_(1.0)
    tensors[f"{module}.weight_scale_2"].fill_(1.0)


# ---------------------------------------------------------------- by name

_PEERS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir() and not path.name.startswith("base_"))

GOOD: dict[str, Base] = {
    **{name: golden(name) for name in _PEERS},
    "modelopt_llama_nvfp4 in 3 files": golden("modelopt_llama_nvfp4", shards=3),
    "ct_llama_nvfp4 in 3 files": golden("ct_llama_nvfp4", shards=3),
    "modelopt_qwen3moe_nvfp4 in 5 files": golden("modelopt_qwen3moe_nvfp4", shards=5),
    "modelopt_llama_nvfp4 with zeros": golden("modelopt_llama_nvfp4", change=zero_down),
    "tied head": quantized(partial(tiny, "qwen2")),
    "tied head, ct": quantized(partial(tiny, "qwen2"), dialect="compressed-tensors"),
    "fused qkv": quantized(partial(tiny, "phi3")),
    "stacked experts": quantized(partial(tiny, "llama4_text")),
    "stacked experts with bias": quantized(partial(tiny, "gpt_oss")),
    "vision tower": quantized(partial(tiny, "qwen3_vl")),
    "vision tower, ct": quantized(partial(tiny, "qwen3_vl"), dialect="compressed-tensors"),
    "draft layer": quantized(deepseek_with_draft),
    "draft layer, ct in 4 files": quantized(deepseek_with_draft, dialect="compressed-tensors", shards=4),
    "draft root": quantized(qwen_with_draft),
    "branches": with_branches,
    "real magnitudes": quantized(partial(llama, 256, 512, 0.5)),
    "real magnitudes, ct": quantized(partial(llama, 256, 512, 0.5), dialect="compressed-tensors"),
}
# Nothing is wrong with their bytes; engines cannot tile them.
ODD: dict[str, Base] = {
    "4304 rows": quantized(partial(llama, 64, 4304, 0.0)),
    "4304 rows, ct": quantized(partial(llama, 64, 4304, 0.0), dialect="compressed-tensors"),
}
BASES: dict[str, Base] = {**GOOD, **ODD}

"""Checkpoints that exist as names, dtypes and shapes only, read as lint reads them. No file is written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.folder import Folder
from blockscale.checkpoint.header import TensorInfo
from blockscale.inspection.reading import Reading, read_surveyed

Entry = tuple[str, tuple[int, ...]]  # dtype, shape
Entries = dict[str, Entry]

WIDTH, INNER, VOCABULARY = 64, 128, 256  # hidden and inner size
ATTENTION = {
    "q_proj": (WIDTH, WIDTH),
    "k_proj": (WIDTH // 2, WIDTH),
    "v_proj": (WIDTH // 2, WIDTH),
    "o_proj": (WIDTH, WIDTH),
}
MLP = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}


def nvfp4(module: str, n: int, k: int, *, dialect: str = "modelopt", is_static: bool = True) -> Entries:
    """One linear, W4A4 or (not static) W4A16."""
    names = ("weight", "weight_scale_2", "input_scale")
    scalar: tuple[int, ...] = ()
    if dialect == "compressed-tensors":
        names, scalar = ("weight_packed", "weight_global_scale", "input_global_scale"), (1,)
    packed, weight_scale, input_scale = (f"{module}.{name}" for name in names)
    entries: Entries = {
        packed: ("U8", (n, k // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (n, k // 16)),
        weight_scale: ("F32", scalar),
    }
    return entries | ({input_scale: ("F32", scalar)} if is_static else {})


def fp8(module: str, n: int, k: int) -> Entries:
    scales: Entries = {f"{module}.weight_scale": ("F32", ()), f"{module}.input_scale": ("F32", ())}
    return {f"{module}.weight": ("F8_E4M3", (n, k)), **scales}


def plain(module: str, *shape: int) -> Entries:
    return {f"{module}.weight": ("BF16", shape)}


def ends(head: bool = True) -> Entries:
    found = plain("model.embed_tokens", VOCABULARY, WIDTH) | plain("model.norm", WIDTH)
    return found | (plain("lm_head", VOCABULARY, WIDTH) if head else {})


def norms(layer: str) -> Entries:
    return plain(f"{layer}.input_layernorm", WIDTH) | plain(f"{layer}.post_attention_layernorm", WIDTH)


def decoder_layer(number: int, root: str = "model", **options: Any) -> Entries:
    layer = f"{root}.layers.{number}"
    found = norms(layer)
    for block, shapes in (("self_attn", ATTENTION), ("mlp", MLP)):
        for leaf, (n, k) in shapes.items():
            found |= nvfp4(f"{layer}.{block}.{leaf}", n, k, **options)
    return found


def moe_layer(number: int, num_experts: int = 4, **options: Any) -> Entries:
    layer = f"model.layers.{number}"
    found = norms(layer) | plain(f"{layer}.mlp.gate", num_experts, WIDTH)
    for leaf, (n, k) in ATTENTION.items():
        found |= nvfp4(f"{layer}.self_attn.{leaf}", n, k, **options)
    for expert in range(num_experts):
        for leaf, (n, k) in MLP.items():
            found |= nvfp4(f"{layer}.mlp.experts.{expert}.{leaf}", n, k, **options)
    return found


def without(entries: Mapping[str, Entry], *prefixes: str) -> Entries:
    """Without the tensors whose names begin so; there must be some for each."""
    for prefix in prefixes:
        assert any(name.startswith(prefix) for name in entries), prefix
    return {name: entry for name, entry in entries.items() if not name.startswith(prefixes)}


def in_16_bits(entries: Mapping[str, Entry], module: str, *shape: int) -> Entries:
    """With one linear as it was before."""
    return without(entries, f"{module}.") | plain(module, *shape)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
MOE = {**LLAMA, "num_experts": 4}
ROUTERS = ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")


def llama(**options: Any) -> Entries:
    return ends() | decoder_layer(0, **options) | decoder_layer(1, **options)


def moe(num_experts: int = 4, **options: Any) -> Entries:
    return ends() | moe_layer(0, num_experts, **options) | moe_layer(1, num_experts, **options)


def modelopt(
    entries: Mapping[str, Entry],
    excluded: Sequence[str] = ("lm_head",),
    *,
    config: Mapping[str, Any] = LLAMA,
    nested_excluded: Sequence[str] | None = None,
    quantization: Mapping[str, Any] | None = None,
    nested: Mapping[str, Any] | None = None,
    faults: Sequence[Fault] = (),
    is_flat: bool = True,
) -> Reading:
    """`excluded` in both config files, or `nested_excluded` in hf_quant_config.json; the rest is added to each.
    Not flat: config.json says nothing."""
    inner = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": list(excluded if nested_excluded is None else nested_excluded),
        **(nested or {}),
    }
    flat = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": list(excluded), **(quantization or {})}
    config = {**config, "quantization_config": flat} if is_flat else config
    return _read(entries, config, {"quantization": inner}, faults)


def compressed(
    entries: Mapping[str, Entry],
    ignored: Sequence[str] = ("lm_head",),
    *,
    config: Mapping[str, Any] = LLAMA,
    targets: Sequence[str] = ("Linear",),
) -> Reading:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    group = {"targets": list(targets), "weights": weights, "input_activations": weights}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": list(ignored),
        "config_groups": {"group_0": group},
    }
    return _read(entries, {**config, "quantization_config": quantization}, None, ())


def _read(
    entries: Mapping[str, Entry], config: Mapping[str, Any], nested: Mapping[str, Any] | None, faults: Sequence[Fault]
) -> Reading:
    infos = {n: TensorInfo(n, dtype, shape, Path("m.safetensors"), 0, 0) for n, (dtype, shape) in entries.items()}
    return read_surveyed(Folder(Path("m"), config, infos, (), nested, tuple(faults)))


def found(faults: Any) -> list[tuple[str, str]]:
    """Rule and place."""
    return [(fault.rule, fault.where) for fault in faults]

"""From a checkpoint of any dialect, or a 16-bit model, to a decoder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from blockscale.checkpoint.load import load_kv_scales
from blockscale.checkpoint.reader import Checkpoint, open_checkpoint
from blockscale.checkpoint.structure import layer_number
from blockscale.errors import UsageError
from blockscale.kernels.paged_cache import KVFormat
from blockscale.models.caches import with_format
from blockscale.models.config import DecoderConfig, read_config
from blockscale.models.decoder import Decoder, Layer
from blockscale.models.deepseek_layer import load_deepseek_layer
from blockscale.models.gemma3 import load_gemma_layer
from blockscale.models.layers import PlainProduct, Product, frequencies
from blockscale.models.llama import load_llama_layer
from blockscale.models.parallel import Group
from blockscale.models.reading import Reader, find_prefix
from blockscale.models.shard import WHOLE, Part, Shard, of_rank

LoadLayer = Callable[[Reader, DecoderConfig, int], Layer]


def load_decoder(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    kv_format: KVFormat | None = None,
    emulate_activations: bool = False,
    is_long: bool = False,
    shard: Shard = WHOLE,
    group: Group | None = None,
) -> Decoder:
    """The model in the folder `path`, its weights in the layout of the device's kernels.

    dtype                of activations; by default fp32 on the CPU and the checkpoint's own 16 bits on a GPU
    kv_format            of the cache; by default what the checkpoint has scales for, else 16 bits
    emulate_activations  linears' inputs are rounded as the scheme says (W4A4); else weights only
    is_long              a model with LongRoPE serves its whole context; see `config.read_config`
    shard, group         the part of this device, and all that have one; no more than that part is read and kept
    ModelError for an architecture that has no decoder here, and for weights that are missing or do not fit it;
    CheckpointError for a folder that cannot be read. UsageError for a model that has no such parts.
    """
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint.folder.config, is_long=is_long)
    device = torch.device(device)
    dtype = _dtype(dtype, device, checkpoint, config)
    prefix, has_unit_offset = find_prefix(checkpoint), config.has_unit_offset
    reader = Reader(checkpoint, prefix, device, dtype, emulate_activations, has_unit_offset, shard, group)
    own, vocabulary = of_rank(config, shard), shard.vocabulary(config.vocab_size)
    embedding = _embedding(reader, config, vocabulary)
    load_layer = _load_layer(config)
    layers = tuple(load_layer(reader, config, i) for i in range(config.num_layers))
    norm = reader.norm("norm", config.hidden)
    head = PlainProduct(embedding) if config.is_tied else _head(reader, config, vocabulary)
    if config.moe is None:  # experts are found by other means
        reader.check_all_used(config.num_layers)
    quantized = checkpoint.quantized
    tensors = quantized.kv_tensors if quantized is not None else {}
    kv_scales = {layer_number(f"{name}.") or 0: load_kv_scales(infos) for name, infos in tensors.items()}
    chosen = with_format(kv_format, quantized.kv_format if quantized is not None and tensors else None)
    whole = frequencies(config.rope, device)
    local = whole if config.local_rope == config.rope else frequencies(config.local_rope, device)
    way = "rounded" if emulate_activations else "weights only"
    identity = f"{path.resolve()} | {str(dtype).removeprefix('torch.')} | {way} | {chosen.value} | {is_long}"
    if shard.size > 1:
        identity += f" | {shard.size} parts"
    weights = (embedding, layers, norm, head, (whole, local))
    return Decoder(own, identity, device, dtype, *weights, chosen, kv_scales, vocabulary, group)


def _load_layer(config: DecoderConfig) -> LoadLayer:
    if config.latent is not None:
        return load_deepseek_layer
    return load_gemma_layer if config.has_outer_norms else load_llama_layer


def _dtype(
    asked: torch.dtype | None, device: torch.device, checkpoint: Checkpoint, config: DecoderConfig
) -> torch.dtype:
    stored = torch.bfloat16 if checkpoint.dtype == torch.float32 else checkpoint.dtype
    if asked is None:
        return torch.float32 if device.type == "cpu" and config.latent is None else stored
    is_wide = asked == torch.float32 and device.type == "cpu" and config.latent is None
    if asked not in (torch.bfloat16, torch.float16) and not is_wide:
        raise UsageError(
            f"cannot compute in {asked} on {device.type}",
            hint="bfloat16 or float16; float32 on the CPU, where attention is not latent",
        )
    return asked


def _embedding(reader: Reader, config: DecoderConfig, vocabulary: Part) -> Tensor:
    """[vocabulary.size, hidden] in the stored type on the CPU, in the model's on a GPU."""
    weight = reader.tensor("embed_tokens.weight", config.vocab_size, config.hidden, rows=vocabulary)
    return weight if reader.device.type == "cpu" else weight.to(reader.dtype)


def _head(reader: Reader, config: DecoderConfig, vocabulary: Part) -> Product:
    """It stands beside the model's body, and not in it."""
    shape = (config.vocab_size, config.hidden)
    outside = reader.prefix.removesuffix("model.") if reader.prefix.endswith("model.") else reader.prefix
    for prefix in dict.fromkeys((outside, "", reader.prefix)):
        beside = replace(reader, prefix=prefix)
        if beside.has("lm_head.weight"):
            return beside.linear("lm_head", shape, has_bias=False, rows=vocabulary)
    return reader.linear("lm_head", shape, has_bias=False)  # which says what is missing

"""A GGUF file as a 16-bit Hugging Face folder, made once and kept in a cache.

Config and tokenizer come from transformers' own reading of the file. Tensors of the architectures below are read
directly, one at a time: dequantize, rename, undo what the GGUF converter did to them. Any other architecture goes
through `from_pretrained`, which holds the whole model and needs accelerate.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from blockscale.checkpoint.output import OutputFolder, disk_errors
from blockscale.errors import CheckpointError, MissingDependencyError

_SLICE_BYTES = 4 << 20
_GGUF_CONVERTER_ONLY = ("rope_freqs.weight",)  # derived from the config, not a weight


def cache_folder() -> Path:
    """BLOCKSCALE_CACHE, or blockscale under XDG_CACHE_HOME or ~/.cache."""
    if "BLOCKSCALE_CACHE" in os.environ:
        return Path(os.environ["BLOCKSCALE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "blockscale"


def import_gguf(path: Path) -> Path:
    """The folder of the bf16 model that the file stands for. CheckpointError for what cannot be read."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    out = cache_folder() / f"{path.stem}-{key}"
    if not out.is_dir():
        with disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        _convert(path, out)
    return out


def _convert(path: Path, out: Path) -> None:
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as e:
        raise CheckpointError(f"{path}: not a readable GGUF file: {e}", hint="download it again") from e
    architecture = reader.fields["general.architecture"].contents()
    restore = _RESTORE.get(architecture)
    if restore is None:
        _convert_through_transformers(path, out)
        return
    config = _config(path)
    names = _model_names(config, architecture)
    sources = {}
    for tensor in reader.tensors:
        if tensor.name in _GGUF_CONVERTER_ONLY:
            continue
        if tensor.name not in names:
            raise CheckpointError(f"{path}: tensor '{tensor.name}' has no place in a {architecture} model")
        sources[names[tensor.name]] = tensor
    layout = {name: (torch.bfloat16, tuple(int(n) for n in reversed(t.shape))) for name, t in sources.items()}
    with OutputFolder(out, layout, job=str(path), resume=False) as output:
        for name, tensor in sources.items():
            output.write(name, restore(name, _dequantize(tensor), config).to(torch.bfloat16))
        side = output.state_path("tokenizer")
        _save_tokenizer(path, side)
        output.finish({"config.json": _config_json(config)}, sorted(side.iterdir()))


def _dequantize(tensor: Any) -> Tensor:
    """bf16 (vectors: fp32), a slice of rows at a time: gguf's dequantizers hold several fp32 copies of their input."""
    dtype = torch.bfloat16 if tensor.data.ndim > 1 else torch.float32
    data = tensor.data if tensor.data.ndim > 1 else tensor.data[None]
    step = max(1, _SLICE_BYTES // data[0].nbytes)
    parts = [
        torch.from_numpy(gguf.quants.dequantize(data[i : i + step], tensor.tensor_type).astype("float32"))
        for i in range(0, len(data), step)
    ]
    return torch.cat([part.to(dtype) for part in parts]).view([int(n) for n in reversed(tensor.shape)])


def _config_json(config: Any) -> str:
    """Without transformers' private entries, which name the file that the config was read from."""
    public = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    return json.dumps({**public, "dtype": "bfloat16"}, indent=2) + "\n"


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, OSError, NotImplementedError) as e:
        raise CheckpointError(f"{path}: transformers cannot read its config: {e}") from e
    config.architectures = config.architectures or [_architecture_class(config)]
    return config


def _architecture_class(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])


def _model_names(config: Any, architecture: str) -> dict[str, str]:
    """GGUF tensor name -> the model's own name, through gguf's table and the model's skeleton."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    names = {}
    for name in skeleton.state_dict():
        gguf_name = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is not None:
            names[gguf_name] = name
    return names


def _save_tokenizer(path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


def _unpermute_rotary(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF pairs a head's rotary rows (0, 1), (2, 3) ...; the model pairs (0, h/2), (1, h/2 + 1) ..."""
    heads = weight.unflatten(0, (num_heads, -1, 2))  # [heads, h/2, 2, ...]
    return heads.transpose(1, 2).reshape(weight.shape)


def _restore_llama(name: str, weight: Tensor, config: Any) -> Tensor:
    if ".q_proj." in name:
        return _unpermute_rotary(weight, config.num_attention_heads)
    if ".k_proj." in name:
        return _unpermute_rotary(weight, config.num_key_value_heads)
    return weight


def _restore_gemma(name: str, weight: Tensor, config: Any) -> Tensor:
    """GGUF stores 1 + weight of a norm, the model adds the 1 itself."""
    return weight - 1 if name.endswith("norm.weight") else weight


def _restore_nothing(name: str, weight: Tensor, config: Any) -> Tensor:
    return weight


_RESTORE: dict[str, Callable[[str, Tensor, Any], Tensor]] = {
    "llama": _restore_llama,
    "gemma2": _restore_gemma,
    "gemma3": _restore_gemma,
    "qwen2": _restore_nothing,
    "qwen3": _restore_nothing,
}


def _convert_through_transformers(path: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM

    work = out.with_name(f".{out.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
        # transformers marks a model read from GGUF as quantized and then refuses to save it
        for owner, attribute in (
            (model, "hf_quantizer"),
            (model, "is_quantized"),
            (model.config, "quantization_config"),
        ):
            if hasattr(owner, attribute):
                delattr(owner, attribute)
        model.save_pretrained(work)
        _save_tokenizer(path, work)
    except ImportError as e:
        raise MissingDependencyError(f"{path}: {e}", hint="pip install accelerate") from e
    except (ValueError, KeyError, NotImplementedError) as e:
        raise CheckpointError(
            f"{path}: transformers cannot read this GGUF: {e}", hint="use the model's own folder"
        ) from e
    else:
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)

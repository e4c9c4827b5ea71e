"""A GGUF file as a 16-bit Hugging Face folder, made once and kept in a cache.

Config and tokenizer come from transformers' own reading of the file. Tensors of the architectures below are read
directly, one at a time: dequantize, rename, undo what the GGUF converter did to them. Any other architecture goes
through `from_pretrained`, which holds the whole model and needs accelerate.
"""

import hashlib
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from blockscale.cache_folder import cache_folder
from blockscale.checkpoint.output import Layout, OutputFolder
from blockscale.checkpoint.target import disk_errors
from blockscale.errors import CheckpointError, MissingDependencyError

_SLICE_BYTES = 4 << 20
_OWN_FOLDER = "use the model's own folder"
_ROPE_FACTORS = "rope_freqs.weight"  # derived from a config that the file does not hold
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def import_gguf(path: Path) -> Path:
    """The folder of the bf16 model that the file stands for. CheckpointError for what cannot be read."""
    stat = path.stat()
    made_by = [version(name) for name in ("blockscale", "transformers", "gguf")]  # what the folder depends on
    facts = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{made_by}"
    key = hashlib.sha256(facts.encode()).hexdigest()[:12]
    out = cache_folder() / f"{path.stem}-{key}"
    if not out.is_dir():
        with disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        _convert(path, out)
    return out


def _convert(path: Path, out: Path) -> None:
    try:
        reader = gguf.GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
    except (ValueError, OSError, IndexError, KeyError, OverflowError, MemoryError) as e:
        raise CheckpointError(f"{path}: not a readable GGUF file: {e}", hint="download it again") from e
    restore = _RESTORE.get(architecture)
    if restore is None:
        _convert_through_transformers(path, out)
        return
    config = _config(path)
    _check_layers(path, reader, config)
    _set_rope(path, reader, config)
    layout, sources = _match_tensors(path, reader, _model_tensors(config, architecture))
    with OutputFolder(out, layout, job=str(path), resume=False) as output:
        for name, tensor in sources.items():
            output.write(name, restore(name, _dequantize(path, tensor), config).to(torch.bfloat16))
        side = output.state_path("tokenizer")
        _save_tokenizer(path, side)
        output.finish({"config.json": _config_json(config)}, sorted(side.iterdir()))


def _check_layers(path: Path, reader: Any, config: Any) -> None:
    """CheckpointError if the file counts more layers than it holds: to build those would take time and memory."""
    held = {tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")}
    if config.num_hidden_layers > len(held):
        what = f"{path}: it counts {config.num_hidden_layers} layers and holds {len(held)}"
        raise CheckpointError(what, hint="download it again")


def _match_tensors(path: Path, reader: Any, model: Mapping[str, "_Place"]) -> tuple[Layout, dict[str, Any]]:
    """The output's layout and the file's tensors, by the model's names. CheckpointError unless they are the same set of
    tensors in the same shapes."""
    layout, sources = {}, {}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        if tensor.name not in model:
            raise CheckpointError(f"{path}: tensor '{tensor.name}' has no place in the model", hint=_OWN_FOLDER)
        place = model[tensor.name]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if shape != place.shape:
            raise CheckpointError(f"{path}: '{tensor.name}' is {list(shape)}, the model's {list(place.shape)}")
        layout[place.name], sources[place.name] = (torch.bfloat16, shape), tensor
    missing = [name for name, place in model.items() if place.name not in sources and not place.is_tied]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} tensors of the model are missing, first '{missing[0]}'", hint="download it again"
        )
    return layout, sources


def _dequantize(path: Path, tensor: Any) -> Tensor:
    """bf16 (vectors: fp32), a slice of rows at a time: gguf's dequantizers hold several fp32 copies of their input."""
    dtype = torch.bfloat16 if tensor.data.ndim > 1 else torch.float32
    data = tensor.data if tensor.data.ndim > 1 else tensor.data[None]
    step = max(1, _SLICE_BYTES // data[0].nbytes)
    try:
        parts = [
            torch.from_numpy(gguf.quants.dequantize(data[i : i + step], tensor.tensor_type).astype("float32"))
            for i in range(0, len(data), step)
        ]
    except NotImplementedError as e:
        raise CheckpointError(
            f"{path}: '{tensor.name}' is {tensor.tensor_type.name}, which is not read", hint=_OWN_FOLDER
        ) from e
    return torch.cat([part.to(dtype) for part in parts]).view([int(n) for n in reversed(tensor.shape)])


def _config_json(config: Any) -> str:
    """Without transformers' private entries, which name the file that the config was read from."""
    public = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    return json.dumps({**public, "dtype": "bfloat16"}, indent=2) + "\n"


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as e:  # transformers raises what its parsing trips over
        raise CheckpointError(f"{path}: transformers cannot read its config: {e}", hint=_OWN_FOLDER) from e
    config.architectures = config.architectures or [_architecture_class(config)]
    return config


def _architecture_class(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])


@dataclass(frozen=True)
class _Place:
    """A tensor of the model. `is_tied`: it is another one's storage and need not be in a file."""

    name: str
    shape: tuple[int, ...]
    is_tied: bool


def _model_tensors(config: Any, architecture: str) -> dict[str, _Place]:
    """The model's tensors by their GGUF names, through gguf's table and the model's skeleton."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    tied = getattr(skeleton, "_tied_weights_keys", None) or {}
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for name, tensor in skeleton.state_dict().items():
        gguf_name = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is not None:
            found[gguf_name] = _Place(name, tuple(tensor.shape), config.tie_word_embeddings and name in tied)
    return found


def _set_rope(path: Path, reader: Any, config: Any) -> None:
    """Long-context scaling of the rotary embedding, which transformers does not take from a GGUF file: Llama 3's is
    stored as factors; any other is refused."""
    field = reader.fields.get(f"{reader.fields['general.architecture'].contents()}.rope.scaling.type")
    if field is not None and field.contents() != "none":
        raise CheckpointError(f"{path}: rotary scaling '{field.contents()}' is not read", hint=_OWN_FOLDER)
    stored = next((tensor for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), None)
    if stored is None:
        return
    factors = torch.from_numpy(stored.data.astype("float64"))
    theta = config.rope_parameters["rope_theta"]
    scaling = {"rope_type": "llama3", "factor": factors.max().item(), **_LLAMA3_SCALING}
    if not torch.allclose(factors, _llama3_factors(2 * len(factors), theta, scaling), rtol=1e-4):
        raise CheckpointError(f"{path}: its {_ROPE_FACTORS} are not those of Llama 3", hint=_OWN_FOLDER)
    config.rope_parameters = {"rope_theta": theta, **scaling}


def _llama3_factors(dim: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """What each rotary wavelength is stretched by, float64 [dim/2]: nothing when short, `factor` when long."""
    wavelength = 2 * math.pi * theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    rotations = scaling["original_max_position_embeddings"] / wavelength
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((rotations - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _save_tokenizer(path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as e:  # transformers raises what its parsing trips over
        raise CheckpointError(f"{path}: transformers cannot read its tokenizer: {e}", hint=_OWN_FOLDER) from e
    tokenizer.save_pretrained(folder)


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
    import transformers
    from transformers import AutoModelForCausalLM

    gguf_config = getattr(transformers, "GgufConfig", None)
    if importlib.util.find_spec("accelerate") is None:
        raise MissingDependencyError(f"{path}: transformers needs accelerate to read it", hint="pip install accelerate")
    # newer versions would leave the weights packed
    options = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
    with disk_errors(out), tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        work = Path(folder) / "model"
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.bfloat16, **options
            )
        except Exception as e:  # transformers raises what its parsing trips over
            raise CheckpointError(f"{path}: transformers cannot read this GGUF: {e}", hint=_OWN_FOLDER) from e
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
        if not out.is_dir():  # another process may have been faster
            os.replace(work, out)

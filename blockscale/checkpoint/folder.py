"""A model folder as it lies on disk: config, tensors by name, and the files that travel along."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockscale.checkpoint.faults import Fault, raise_first
from blockscale.checkpoint.header import TensorInfo, unreadable
from blockscale.checkpoint.shards import read_json, survey_shards
from blockscale.errors import CheckpointError

HF_QUANT_CONFIG = "hf_quant_config.json"
_OF_MODELS = ("config.json", HF_QUANT_CONFIG)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Weights in other containers, and what this program writes itself, do not travel with a quantized model.
_NOT_COPIED = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf"),
    *("*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot"),
)
_NOT_COPIED_NAMES = (
    *("config.json", HF_QUANT_CONFIG, "blockscale.json", "recipe.yaml", "quant_cfg.json"),
    *("quant_config.json", "quantize_config.json"),  # AutoAWQ's and AutoGPTQ's: of the source, not of what it becomes
)


@dataclass(frozen=True)
class Folder:
    """`tensors` in storage order (shard by shard); `companions` are tokenizer, templates, generation config ...

    quant_config  what hf_quant_config.json holds, where there is one
    faults        what contradicts itself; none of those of a folder that `open_folder` returns is fatal
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    companions: tuple[Path, ...]
    quant_config: Mapping[str, Any] | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())

    @property
    def method(self) -> str | None:
        """How the weights are stored, as the config names it; None where it names nothing."""
        quantization = self.config.get("quantization_config") or {}
        method = quantization.get("quant_method")
        if method is None and ("quant_algo" in quantization or self.quant_config is not None):
            return "modelopt"
        return None if method is None else str(method)


def open_folder(path: Path) -> Folder:
    """Reads config, index and headers, no weights. CheckpointError for whatever is missing or contradictory."""
    folder = survey_folder(path)
    raise_first(folder.faults)
    return folder


def survey_folder(path: Path) -> Folder:
    """The same, but goes on past faults with what can be read. CheckpointError only where there is no folder."""
    try:
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: no such model folder", hint="give a folder with config.json and safetensors"
            )
        if not _is_model(path):
            raise CheckpointError(
                f"{path}: no model lies here: neither config.json nor weights",
                hint="give the folder that holds config.json and *.safetensors",
            )
        config, faults = _survey_config(path)
        tensors, shard_faults = survey_shards(path)
        quant_config, quant_faults = _survey_quant_config(
            path / HF_QUANT_CONFIG, is_needed="quantization_config" not in config
        )
        companions = _companions(path)
    except OSError as e:  # no right to look into it
        raise unreadable(path, e) from e
    return Folder(path, config, tensors, companions, quant_config, (*faults, *shard_faults, *quant_faults))


def _is_model(path: Path) -> bool:
    """Whether anything in a folder is a model's, however damaged."""
    return any(
        file.name in _OF_MODELS or ".safetensors" in file.name or file.suffix in _PICKLES for file in path.iterdir()
    )


def _survey_config(path: Path) -> tuple[dict[str, Any], list[Fault]]:
    file = path / "config.json"
    try:
        if not file.exists():
            raise CheckpointError(f"{path}: no config.json", hint="this is not a Hugging Face model folder")
        config = read_json(file)
    except CheckpointError as e:
        return {}, [Fault("malformed-json", file.name, str(e), e.hint)]
    wrong = [key for key in ("quantization_config", "text_config") if not isinstance(config.get(key), dict | None)]
    faults = [
        Fault("malformed-json", file.name, f"{file}: {key} is no JSON object", "download the file again")
        for key in wrong
    ]
    return {key: value for key, value in config.items() if key not in wrong}, faults


def _survey_quant_config(file: Path, *, is_needed: bool) -> tuple[dict[str, Any] | None, list[Fault]]:
    if not file.exists():
        return None, []
    try:
        return read_json(file), []
    except CheckpointError as e:
        return None, [Fault("malformed-json", file.name, str(e), e.hint, is_needed)]


def _companions(path: Path) -> tuple[Path, ...]:
    return tuple(
        file
        for file in sorted(path.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and file.name not in _NOT_COPIED_NAMES
        and not any(file.match(pattern) for pattern in _NOT_COPIED)
    )

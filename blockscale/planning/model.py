"""MODEL as `plan` takes it - a preset's name, a config.json, a model folder, a hub id - to its architecture."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from blockscale.errors import UsageError
from blockscale.planning.architecture import Architecture, from_config
from blockscale.planning.weights import Weights


@dataclass(frozen=True)
class Model:
    """`weights`: summed from files' headers, where there are any. `origin`: what the figures come from, in words."""

    name: str
    architecture: Architecture
    config: Mapping[str, Any]
    weights: Weights | None
    origin: str

    @property
    def stored_format(self) -> str:
        """The format in which it is published, as its config says."""
        return _stored_format(self.config)


def find_model(name: str | Path) -> Model:
    """UsageError offers the nearest presets; a config that lacks a field is named with the field."""
    text = str(name)
    preset = _preset(text)
    if preset is not None:
        return Model(text, from_config(preset, text), preset, None, "preset")
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            return _from_file(path / "config.json", path.resolve().name, path)
        if path.is_file():
            if path.suffix == ".json":
                return _from_file(path, path.resolve().parent.name or path.stem, None)
            raise UsageError(f"{path}: not a config.json", hint="a folder, a config.json, a preset or a hub id")
    except OSError as e:  # a name too long for the disk, a folder that may not be read
        raise UsageError(f"{text}: cannot be read: {e.strerror or e}", hint="check the path") from e
    if text.count("/") == 1 and not text.startswith((".", "/", "~")) and path.suffix not in (".json", ".gguf"):
        return _from_hub(text)
    raise _unknown(text)


@cache
def presets() -> dict[str, Mapping[str, Any]]:
    """Every preset's config, under its name and its aliases."""
    text = resources.files("blockscale.planning").joinpath("presets.toml").read_text(encoding="utf-8")
    return {
        alias: config for name, config in tomllib.loads(text).items() for alias in (name, *config.get("aliases", ()))
    }


def _preset(name: str) -> Mapping[str, Any] | None:
    wanted = name.lower().replace("_", "-")
    # a hub's owner in front does not matter, nor what says that it is tuned for chat
    wanted = wanted.removesuffix("-instruct").removesuffix("-it")
    return presets().get(wanted)


def _unknown(name: str) -> UsageError:
    near = difflib.get_close_matches(name.lower(), presets(), 3, 0.5)
    hint = "nearest presets: " + ", ".join(near) if near else "presets: " + ", ".join(presets())
    return UsageError(f"no model '{name}': neither a preset nor a file", hint=hint)


def _from_file(file: Path, name: str, folder: Path | None) -> Model:
    config = read_config(file)
    return Model(name, from_config(config, name), config, folder, str(file))


def read_config(file: Path) -> Mapping[str, Any]:
    """UsageError for what is no JSON object."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"{file}: cannot be read: {e.strerror or e}", hint="a model folder has a config.json") from e
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{file}: not valid JSON: {e}", hint="download the file again") from e
    if not isinstance(config, dict):
        raise UsageError(f"{file}: not a JSON object", hint="download the file again")
    return config


def _from_hub(name: str) -> Model:
    """Only config.json is fetched (or found in the hub's cache)."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        file = Path(hf_hub_download(name, "config.json"))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as e:
        near = difflib.get_close_matches(name.split("/")[-1].lower(), presets(), 3, 0.5)
        hint = "nearest presets: " + ", ".join(near) if near else "check the network, or give a config.json"
        raise UsageError(f"{name}: not on this disk, and the hub cannot be reached", hint=hint) from e
    except (HFValidationError, HfHubHTTPError) as e:
        raise UsageError(f"{name}: no such model on the hub", hint="check the name; gated models need a token") from e
    except OSError as e:
        raise UsageError(f"{name}: cannot be fetched: {e.strerror or e}", hint="check the network and the disk") from e
    return _from_file(file, name, None)


def _stored_format(config: Mapping[str, Any]) -> str:
    """What a config's own quantization is called here; bf16 without one."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = str(quantization.get("quant_method", "")).lower()
        algorithm = str(quantization.get("quant_algo", "")).lower()
        if method == "fp8":
            return "fp8-block128" if quantization.get("weight_block_size") else "fp8"
        for word in (method, algorithm, str(quantization.get("format", "")).lower()):
            for part in ("nvfp4", "mxfp4", "mxfp8", "fp8"):
                if part in word or (part == "fp8" and "float-quantized" in word):
                    return part
        if method in ("awq", "gptq") or "pack-quantized" in str(quantization.get("format", "")):
            return "int4"
    model_type = str(config.get("model_type", ""))
    return _PUBLISHED_IN.get(model_type, "bf16")


# Models that have no 16-bit edition, for configs that do not say it.
_PUBLISHED_IN = {
    "gpt_oss": "mxfp4",
    "deepseek_v3": "fp8-block128",
    "kimi_k2": "fp8-block128",
    "minimax_m2": "fp8-block128",
}

"""MODEL as `plan` takes it - a preset's name, a config.json, a model folder, a hub id - to its architecture."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from blockscale.checkpoint.shards import read_json
from blockscale.errors import CheckpointError, UsageError
from blockscale.planning.models.architecture import LINEAR_PARTS, Architecture, Part, from_config
from blockscale.planning.models.weights import Weights


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
        """The format that most of its layers' bytes have, or in which it is published, as its config says."""
        if self.weights is None:
            return _published_format(self.config)
        sizes: dict[str, int] = {}
        for part in LINEAR_PARTS:
            if part in self.weights.parts:
                own = self.weights.parts[part]
                sizes[own.format] = sizes.get(own.format, 0) + own.num_bytes
        return max(sizes, key=lambda fmt: sizes[fmt], default="bf16")


def find_model(name: str | Path) -> Model:
    """UsageError offers the nearest presets; a config that lacks a field is named with the field.

    CheckpointError for a folder or a .gguf file whose tensors cannot be read.
    """
    text = str(name)
    preset = _preset(text)
    if preset is not None:
        return Model(text, architecture_of(preset, text), preset, None, "preset")
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            return _from_folder(path)
        if text == "demo" or path.suffix == ".gguf":
            from blockscale.checkpoint.locate import locate  # unpacks it into a folder, with torch

            return replace(_from_folder(locate(text)), name=path.stem)
        if path.is_file():
            if path.suffix == ".json":
                return _from_file(path, path.resolve().parent.name or path.stem)
            raise UsageError(f"{path}: not a config.json", hint="a folder, a config.json, a preset or a hub id")
    except OSError as e:  # a name too long for the disk, a folder that may not be read
        raise UsageError(f"{text}: cannot be read: {e.strerror or e}", hint="check the path") from e
    if text.count("/") == 1 and not text.startswith((".", "/", "~")) and path.suffix not in (".json", ".gguf"):
        return _from_hub(text)
    raise _unknown(text)


@cache
def presets() -> dict[str, Mapping[str, Any]]:
    """Every preset's config, under its name and its aliases."""
    text = resources.files("blockscale.planning.models").joinpath("presets.toml").read_text(encoding="utf-8")
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


def _from_folder(path: Path) -> Model:
    """With the bytes of its weights, if any lie in it; a folder with a config alone will do."""
    name = path.resolve().name
    if not any(path.glob("*.safetensors")):
        return _from_file(path / "config.json", name)
    from blockscale.planning.models.folder import read_model

    config = read_config(path / "config.json")
    architecture_of(config, name)  # says what is wrong with the config before anything else is read
    architecture, weights = read_model(path)
    return Model(name, architecture, config, weights, f"headers of {path}")


def _from_file(file: Path, name: str) -> Model:
    config = read_config(file)
    return Model(name, architecture_of(config, name), config, None, str(file))


def architecture_of(config: Mapping[str, Any], name: str) -> Architecture:
    """UsageError for whatever a config may hold that is no model."""
    for text in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        layers = text.get("num_hidden_layers")
        if isinstance(layers, int) and layers > _MAX_LAYERS:
            raise UsageError(f"{name}: {layers:,} layers are no model's", hint="check num_hidden_layers in config.json")
    try:
        return from_config(config, name)
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, OverflowError) as e:
        raise UsageError(f"{name}: config.json has a field of the wrong type: {e}", hint="check config.json") from e


_MAX_LAYERS = 10_000


def read_config(file: Path) -> Mapping[str, Any]:
    """UsageError for what is no JSON object."""
    try:
        return read_json(file)
    except CheckpointError as e:
        hint = e.hint if file.exists() else "a model folder has a config.json"
        raise UsageError(str(e), hint=hint) from e


def _from_hub(name: str) -> Model:
    """Config and headers of a repository; where the hub cannot be reached, its config if it was fetched before."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from blockscale.planning.models.hub import read_hub_model

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError as e:
        raise UsageError(f"{name}: no name of a hub's model", hint="check the name") from e
    try:
        architecture, weights = read_hub_model(name)
        file = hf_hub_download(name, "config.json")
    except UsageError as e:
        if isinstance(cached, str):
            return _from_file(Path(cached), name)
        near = difflib.get_close_matches(name.split("/")[-1].lower(), presets(), 3, 0.5)
        raise UsageError(str(e), hint="nearest presets: " + ", ".join(near) if near else e.hint) from e
    except OSError as e:
        raise UsageError(f"{name}: cannot be fetched: {e.strerror or e}", hint="check the network and the disk") from e
    return Model(name, architecture, read_config(Path(file)), weights, f"headers of {name} on the hub")


def _published_format(config: Mapping[str, Any]) -> str:
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


def linear_shapes(model: Model) -> tuple[tuple[int, int], ...]:
    """[N, K] of the model's dense linears, each once, in the order of its layers.

    Gate and up are one product, as every engine computes them; experts are not dense and are left out.
    """
    shapes: dict[tuple[int, int], None] = {}
    for block in model.architecture.blocks:
        for matrix in block.matrices:
            if matrix.part not in (Part.ATTENTION, Part.FEED_FORWARD, Part.SHARED_EXPERTS) or matrix.n < 16:
                continue
            is_pair = matrix.part is not Part.ATTENTION and matrix.count == 2 * block.streams
            shapes[matrix.n * (2 if is_pair else 1), matrix.k] = None
    return tuple(shapes)

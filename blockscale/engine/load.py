"""From a model as users write it to an engine that is ready for requests."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from blockscale.checkpoint.folder import Folder, open_folder
from blockscale.checkpoint.locate import locate
from blockscale.engine.engine import Engine
from blockscale.engine.memory import free_bytes, gib
from blockscale.engine.options import EngineOptions
from blockscale.engine.parallel import ParallelModel, load_parallel
from blockscale.engine.vocabulary import read_vocabulary
from blockscale.errors import BlockscaleError, CheckpointError, EngineError, ModelError, UsageError
from blockscale.host.generate import stored_end_ids
from blockscale.host.model import check_device, load_tokenizer
from blockscale.inspection.lint import lint_folder
from blockscale.kernels.bench.run import default_device
from blockscale.kernels.paged_cache import KVFormat
from blockscale.models.config import FAMILIES, has_decoder
from blockscale.models.decoder import Decoder
from blockscale.models.load import load_decoder
from blockscale.planning.answer.choice import weights_in
from blockscale.planning.models.model import find_model

_CACHES = {"bf16": KVFormat.BITS16, "fp8": KVFormat.FP8, "nvfp4": KVFormat.NVFP4}
# Errors for engines that give a fused layer one scale. Here each part keeps its own.
_HARMLESS = ("fused-global-scale-mismatch", "fused-input-scale-mismatch")
_SMALLER = ("fp8", "nvfp4")  # what weights that have no room could be stored in, the largest first


def load_engine(
    model: str | Path,
    *,
    device: str | None = None,
    kv_cache: str | None = None,
    emulate_activations: bool = False,
    options: EngineOptions | None = None,
) -> tuple[Engine, Any]:
    """An engine and the model's tokenizer.

    model                folder, .gguf, hub id or `demo`
    device               "cuda", "cuda:1", "cpu"; None: the GPU, where there is one
    kv_cache             "bf16" (16 bits), "fp8" or "nvfp4"; None: what the checkpoint has scales for, else 16 bits
    emulate_activations  linears' inputs are rounded as the scheme says (W4A4); else weights only
    options              with tensor_parallel above 1 the model is divided among so many GPUs, from `device` on

    ModelError for an architecture, a variant or a tokenizer that the engine does not know; CheckpointError for a
    folder that `lint` finds an error in, a cache's scale of one side among them; EngineError for too little memory,
    with what would fit.
    """
    cache, place = cache_format(kv_cache), default_device() if device is None else device
    check_device(place)
    path = locate(model)
    folder = open_folder(path)
    check_sound(path)
    if not has_decoder(folder.config):
        found = folder.config.get("model_type")
        raise ModelError(f"the engine has no decoder for '{found}'", hint=f"it has: {', '.join(FAMILIES)}")
    tokenizer = load_tokenizer(path)
    vocabulary = read_vocabulary(tokenizer)
    end_ids = stored_end_ids(path, tokenizer)
    size = 1 if options is None else options.tensor_parallel
    room = check_room(folder, place, size)
    try:
        decoder = _load(path, size, device=place, kv_format=cache, emulate_activations=emulate_activations)
        known = [token for token in end_ids if 0 <= token < decoder.vocab_size]
        with _closed_on_error(decoder):
            return Engine(decoder, options, vocabulary=vocabulary, end_ids=known), tokenizer
    except (torch.OutOfMemoryError, MemoryError) as e:
        raise EngineError(f"{path}: {place} ran out of memory while loading", hint=_hint(path, room)) from e


def load_for_bench(
    path: Path, kv_cache: str, device: torch.device, *, tensor_parallel: int = 1
) -> Decoder | ParallelModel:
    """A folder's model with a cache of that format, as it is: random weights have no tokenizer and pass no check."""
    return _load(path, tensor_parallel, device=device, kv_format=cache_format(kv_cache))


def _load(path: Path, size: int, **how: Any) -> Decoder | ParallelModel:
    return load_decoder(path, **how) if size == 1 else load_parallel(path, size, **how)


@contextmanager
def _closed_on_error(model: Decoder | ParallelModel) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if isinstance(model, ParallelModel):
            model.close()
        raise


def cache_format(name: str | None) -> KVFormat | None:
    """UsageError for a name that is none of a cache."""
    if name is not None and name not in _CACHES:
        raise UsageError(f"no cache in '{name}'", hint="there are " + ", ".join(_CACHES))
    return None if name is None else _CACHES[name]


def check_sound(path: Path) -> None:
    """CheckpointError where lint finds an error in headers, configs and single scales. Weights are not read for it."""
    report = lint_folder(path, quick=True)
    errors = [f for f in report.findings if f.severity == "error" and f.name not in _HARMLESS]
    if errors:
        first = errors[0]
        more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        raise CheckpointError(
            f"{path}: {first.rule}: {first.message}{more}",
            hint=f"{first.hint}; `blockscale lint` says everything, and --repair mends what it can".removeprefix("; "),
        )


def check_room(folder: Folder, device: str, num_devices: int = 1) -> int:
    """Free bytes of the device. EngineError where the weights alone take more; the hint says in which format not.

    num_devices  GPUs that each have a part, this one the first
    """
    is_gpu = torch.device(device).type == "cuda"
    # on a GPU fp32 weights become 16 bits
    sizes = (min(t.num_bytes, 2 * math.prod(t.shape)) if is_gpu else t.num_bytes for t in folder.tensors.values())
    needed, room = sum(sizes), free_bytes(torch.device(device)) * (num_devices if is_gpu else 1)
    if needed > room:
        raise EngineError(
            f"{folder.path}: the weights take {gib(needed)}, {device} has {gib(room)} free",
            hint=_hint(folder.path, room),
        )
    return room


def _hint(path: Path, room: int) -> str:
    """What would fit, by the planner's formulas; it does not know every model."""
    try:
        model = find_model(path)
        sizes = {fmt: weights_in(model, fmt).num_bytes for fmt in _SMALLER}
    except BlockscaleError:
        sizes = {}
    for fmt, size in sizes.items():
        if 0 < size < room:
            return f"quantized to {fmt} they would take {gib(size)}, besides the cache: `blockscale quantize`"
    return "free memory, or take a larger device: `blockscale plan` says which would do"

"""Calibration without any text: windows that the 16-bit model writes itself (`--calibration self`).

Windows come in batches, each with a seed of its own, and every finished batch is written down, so that a killed run
goes on with the next one and gives the same windows. The model is in memory for as long as it writes, and no longer.
"""

import gc
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blockscale.checkpoint.output import PROGRESS_NAME, save_progress
from blockscale.checkpoint.source import open_source
from blockscale.checkpoint.target import disk_errors
from blockscale.errors import ModelError
from blockscale.host.documents import GIVE_TEXT, write_documents
from blockscale.host.model import load_model, load_tokenizer
from blockscale.pages import size
from blockscale.quantization.calibration_data import SELF, CalibratedText, CalibrationData
from blockscale.texts.short_words import short_words

BATCH = 32  # windows written side by side: their keys and values are what memory holds beside the model
_STAGE = "writing calibration text"

Windows = list[list[int]]


def add_self_text(
    data: CalibrationData,
    path: Path,
    *,
    device: str = "cpu",
    folder: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> CalibrationData:
    """`data` with the windows that the model at `path` has yet to write, if it asks for any, behind the others.

    folder   for finished batches, taken up from there if they are of the same `data`; None keeps none

    ModelError for a model that does not fit in memory, does not generate, or gives NaN or Inf.
    """
    if not data.num_to_write:
        return data
    tokenizer, written = load_tokenizer(path), _load_state(folder, data)
    if len(written) < data.num_to_write:
        written = _write(data, written, path, tokenizer, device, folder, progress)
    windows = torch.cat([data.windows, torch.tensor(written)])
    words = short_words(" ".join(tokenizer.decode(window, skip_special_tokens=True) for window in written))
    own = CalibratedText(SELF, sum(map(len, written)), words)
    digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()[:16]
    return replace(data, windows=windows, digest=digest, texts=(*data.texts, own), num_to_write=0)


def _write(
    data: CalibrationData,
    written: Windows,
    path: Path,
    tokenizer: Any,
    device: str,
    folder: Path | None,
    progress: Callable[[str, int, int], None] | None,
) -> Windows:
    """`written` and the windows that follow."""
    count, length = data.num_to_write, data.windows.shape[1]
    seeds = torch.randint(2**62, (math.ceil(count / BATCH),), generator=torch.Generator().manual_seed(data.seed))
    _check_memory(path, device)
    try:
        hosted = load_model(path, device=device, emulate_activations=False)
        for first in range(len(written), count, BATCH):

            def report(num_tokens: int, done: int = first) -> None:
                if progress:
                    progress(_STAGE, done * length + num_tokens, count * length)

            generator = torch.Generator().manual_seed(int(seeds[first // BATCH]))
            batch = write_documents(hosted, tokenizer, min(BATCH, count - first), length, generator, report)
            written = [*written, *batch.tolist()]
            _save_state(folder, data, written)
    except torch.OutOfMemoryError as e:
        raise ModelError(f"{path}: not enough memory on {device} to let the model write", hint=GIVE_TEXT) from e
    del hosted
    gc.collect()  # models refer to themselves
    if device != "cpu":
        torch.cuda.empty_cache()
    return written


def _check_memory(path: Path, device: str) -> None:
    """ModelError where the whole model, as it runs on a CPU, is larger than the machine's memory."""
    if device != "cpu":
        return
    tensors = open_source(path).tensors.values()
    needed = 4 * sum(math.prod(tensor.shape) for tensor in tensors)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ModelError(
            f"{path}: to write its own calibration text the model needs {size(needed)} of memory, and there are "
            f"{size(memory)}",
            hint=GIVE_TEXT,
        )


def _save_state(folder: Path | None, data: CalibrationData, written: Sequence[Sequence[int]]) -> None:
    if folder is None:
        return
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    save_progress(folder, {"digest": data.digest, "windows": written})


def _load_state(folder: Path | None, data: CalibrationData) -> Windows:
    """Whole batches that an earlier run left of the same job."""
    if folder is None or not (folder / PROGRESS_NAME).is_file():
        return []
    facts = json.loads((folder / PROGRESS_NAME).read_text(encoding="utf-8"))
    windows: Windows = facts["windows"]
    return windows if facts["digest"] == data.digest else []

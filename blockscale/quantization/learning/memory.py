"""Whether learning fits into a machine's memory, before anything is loaded."""

import os
from pathlib import Path

import torch

from blockscale.errors import ModelError
from blockscale.pages import size

# For each weight: the latent, Adam's two moments, the decoded weight, its gradient and the weight before rounding, in
# fp32; the codes at the start, at their best and now.
_WEIGHT_BYTES = 6 * 4 + 3
_LOGITS_BYTES = 5 * 4  # the student's in fp32, their gradient twice, the teacher's, and what the model makes on the way
_MEMINFO = Path("/proc/meminfo")


def check_learnable(num_weights: int, model_bytes: int, num_logits: int, device: str) -> int:
    """How many bytes are left for what layers keep for going backward. ModelError if there is no room for the rest.

    num_weights  that learn
    model_bytes  of the 16-bit model on disk
    num_logits   of one step: tokens times vocabulary
    """
    models = model_bytes * (2 if device == "cpu" else 1.5)  # the teacher; the student's share that is not packed
    needed = _WEIGHT_BYTES * num_weights + int(models) + _LOGITS_BYTES * num_logits
    left = free_bytes(device) - needed
    if left < 0:
        raise ModelError(
            f"learning needs about {size(needed)} of memory on {device}, and {size(needed + left)} are free: each of "
            f"{num_weights} weights takes {_WEIGHT_BYTES} bytes",
            hint="take a machine with more, or a recipe without learning: nvfp4-best",
        )
    return left


def free_bytes(device: str) -> int:
    """What a process may still take, caches that the system would give up included."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    if _MEMINFO.is_file():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

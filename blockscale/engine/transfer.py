"""Small tensors from the host to the device, without waiting for what the device does."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sent(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers, or rows of numbers, as a tensor there. From memory that is not pinned a copy waits for its turn."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

"""Where blockscale keeps what it made once: GGUF files as folders, built kernels."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """BLOCKSCALE_CACHE, or blockscale under XDG_CACHE_HOME or ~/.cache. It need not be there yet."""
    if own := os.environ.get("BLOCKSCALE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockscale"

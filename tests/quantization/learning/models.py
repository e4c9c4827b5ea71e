"""Quantized tiny models to learn."""

from pathlib import Path
from typing import Any

import torch

import blockscale as bs
from blockscale.quantization.calibration_data import CalibrationData


def quantized(source: Path, folder: Path, calibration: Path, recipe: str = "nvfp4", **options: Any) -> Path:
    """W4A4 where the recipe says so."""
    texts = [] if "w4a16" in recipe else [calibration]
    bs.quantize(source, folder / "quantized", recipe, calibration=texts, **options)
    return folder / "quantized"


def windows(num: int = 16, length: int = 32, seed: int = 1) -> CalibrationData:
    """Ordinary ASCII characters."""
    generator = torch.Generator().manual_seed(seed)
    return CalibrationData(torch.randint(32, 126, (num, length), generator=generator), f"digest {seed}")

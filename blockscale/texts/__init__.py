"""Texts to calibrate and evaluate on: files, data sets on the hub, and the package's own by name.

The package's two texts (original prose about 4-bit numbers, English and Brazilian Portuguese) are each split in half:
`en-calibration` and `pt-calibration`, `en-evaluation` and `pt-evaluation`.
"""

from blockscale.texts.own import CALIBRATION, EVALUATION
from blockscale.texts.read import read_text
from blockscale.texts.text import Text
from blockscale.texts.tokens import encode_text, special_tokens

__all__ = ["CALIBRATION", "EVALUATION", "Text", "encode_text", "read_text", "special_tokens"]

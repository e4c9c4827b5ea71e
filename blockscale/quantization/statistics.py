"""What calibration learned: one number per linear's input and per attention layer's cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ActivationStatistics:
    """Largest magnitudes seen.

    input_amax  by module
    kv_amax     (keys after rotary embedding, values) by attention module
    notices     modules whose value had to be inferred, and other things to know
    """

    input_amax: Mapping[str, float] = field(default_factory=dict)
    kv_amax: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    num_tokens: int = 0
    notices: tuple[str, ...] = ()

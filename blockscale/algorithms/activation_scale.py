"""How the E4M3 scale of each block of an NVFP4 activation is chosen as the model runs. Needs no torch."""

from enum import Enum


class ActivationScale(Enum):
    """AMAX is what every engine does. The others are blockscale's own, and want an input_global_scale with headroom for
    a scale above the amax scale: amax / (6 * 256)."""

    AMAX = "amax"
    FOUR_OVER_SIX = "four_over_six"
    SWEEP = "sweep"

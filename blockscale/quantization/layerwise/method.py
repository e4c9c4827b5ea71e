"""How the weights of a fused group are found: which ways are tried, and what may be done to their inputs first.

A method names candidates. Each gives codes and scales for the group; the one with the least output error on held-back
calibration tokens is kept, so a method with more candidates is never worse there than one with fewer, and one that
tries round to nearest is never worse than round to nearest.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Candidate:
    """One way to codes and scales.

    is_swept       block scales of least error, each input channel weighted by E[x^2]; else from the amax
    is_sequential  GPTQ: column by column, each error made up for by the columns after it
    correction     how far the target moves towards the weight that makes up for earlier layers' errors, 0 ... 1;
                   one half: the whole way fits the calibration text, and on others it was worse than none
    """

    name: str
    is_swept: bool = True
    is_sequential: bool = False
    correction: float = 0.0


@dataclass(frozen=True)
class Method:
    """`smoothing`: families of input scales that are searched (`smoothing.FAMILIES`); none: inputs stay as they are.

    damp               of GPTQ's Hessian, times its mean diagonal
    correction_damp    likewise, of the corrected target: the larger, the less it trusts the calibration text
    residual_channels  input channels whose rounding error is multiplied once more
    rank               of a 16-bit branch beside each weight
    learning_steps     of learned rounding over the whole model, after everything else
    activation_scale   of recipes by this method, unless they say otherwise
    """

    candidates: tuple[Candidate, ...]
    smoothing: tuple[str, ...] = ()
    damp: float = 0.01
    correction_damp: float = 0.1
    residual_channels: int = 0
    rank: int = 0
    learning_steps: int = 0
    activation_scale: str = "amax"


NEAREST = Candidate("nearest", is_swept=False)
SWEPT = Candidate("sweep")
GPTQ = Candidate("gptq", is_sequential=True)
CORRECTED = Candidate("gptq+correction", is_sequential=True, correction=0.5)

_BEST = Method((NEAREST, SWEPT, GPTQ, CORRECTED), ("rms",), activation_scale="four_over_six")
METHODS: dict[str, Method] = {
    "gptq": Method((GPTQ,)),
    "awq": Method((SWEPT,), ("awq",)),
    "smoothquant": Method((SWEPT,), ("smoothquant",)),
    "svdquant": Method((SWEPT,), ("awq",), rank=32),
    "best": _BEST,
    "best-arc": replace(_BEST, residual_channels=64),
    "learned": replace(_BEST, learning_steps=200),
}

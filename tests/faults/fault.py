"""One way to break a checkpoint, and what lint must say to it."""

from dataclasses import dataclass

from .breaking_tensors import Break

# Where the kinds come from: what users of other tools have reported, by what went wrong.
KINDS = {
    "B1": "fused projections with different global scales",
    "B2": "scales that are missing, zero or were never calibrated",
    "B3": "scales that overflow, underflow or are NaN",
    "B4": "layout: nibbles, swizzles, padding, memory that was never written",
    "B5": "dimensions that do not divide",
    "B6": "lists of excluded modules, and names",
    "B7": "output heads, embeddings, tied weights",
    "B8": "draft layers",
    "B9": "structure of experts, and nothing quantized without a word",
    "B10": "export and conversion",
    "B12": "scales multiplied where they should divide",
    "B16": "members of a fused layer in different files",
    "B17": "values far from the source's",
    "B19": "MXFP4",
}


@dataclass(frozen=True)
class Fault:
    """`layer`: the finding's, None where it is about the whole folder.

    bound            how far a repaired value may lie from the right one, in steps of its block (block scale times
                     global scale); 0 where the repair loses nothing
    is_right_alone   each linear of the broken folder stands for the right values by itself: those that a repair must
                     keep
    leaves           rules that still have something to say of the repaired folder, by what the model is
    source           the 16-bit folder that lint is given
    """

    name: str
    ref: str
    base: str
    break_: Break
    rule: str
    layer: str | None
    is_repairable: bool
    bound: float = 0.0
    is_right_alone: bool = False
    leaves: tuple[str, ...] = ()
    source: str | None = None
    tensor_parallel: int = 1

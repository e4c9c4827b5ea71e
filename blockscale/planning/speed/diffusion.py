"""How long an image takes in a diffusion transformer: one pass over all its tokens a step, and as many steps as asked.

    FLOPs of a step = 2 x weights that a token meets x tokens + 4 x layers x width x tokens^2

The same roofline as a prompt's, but that every token attends to all of them. The text encoders and the decoder of the
image are not counted: they run once an image.
"""

import re
from dataclasses import dataclass

from blockscale.errors import UsageError
from blockscale.planning.models.architecture import LINEAR_PARTS, Architecture
from blockscale.planning.speed.predict import Estimate, Priors, around, quickest_and_slowest
from blockscale.planning.speed.roofline import Deployment, Step, image_step

PIXELS_PER_TOKEN = 16  # along each side: 8 of the image's encoder times patches of 2 (FLUX.1)
TEXT_TOKENS = 512  # that FLUX.1-dev pads its prompt to
STEPS = 28  # of FLUX.1-dev's own examples
_MAX_SIDE = 8192


@dataclass(frozen=True)
class ImageRequest:
    """Pixels and steps of one image. UsageError for what no image can have."""

    width: int = 1024
    height: int = 1024
    steps: int = STEPS

    def __post_init__(self) -> None:
        if any(side % PIXELS_PER_TOKEN or not 0 < side <= _MAX_SIDE for side in (self.width, self.height)):
            raise UsageError(
                f"--resolution {self.width}x{self.height}: no size of an image",
                hint=f"multiples of {PIXELS_PER_TOKEN} up to {_MAX_SIDE}, like 1024 or 1024x768",
            )
        if not 0 < self.steps <= 1000:
            raise UsageError(f"--steps {self.steps}: no number of steps", hint="from 1 to 1000; usually 4 to 50")

    @property
    def num_tokens(self) -> int:
        """Of image and text together."""
        return self.width * self.height // PIXELS_PER_TOKEN**2 + TEXT_TOKENS


@dataclass(frozen=True)
class ImagePrediction:
    """One image at a time on one replica. `flops_per_step`: of linears and attention, on all its GPUs together."""

    request: ImageRequest
    flops_per_step: float
    step: Step
    step_s: Estimate

    @property
    def image_s(self) -> Estimate:
        return self.step_s.scaled(self.request.steps)


def parse_resolution(text: str) -> tuple[int, int]:
    """`1024` or `1024x768`: width and height in pixels."""
    match = re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?", text.strip().lower())
    if match is None:
        raise UsageError(f"--resolution {text}: no size of an image", hint="1024 or 1024x768")
    return int(match[1]), int(match[2] or match[1])


def linear_flops(a: Architecture, tokens: int) -> float:
    """Of one step: a token of a block with several streams meets the weights of its own."""
    weights = sum(
        matrix.num_parameters * block.count // block.streams
        for block in a.blocks
        for matrix in block.matrices
        if matrix.part in LINEAR_PARTS
    )
    return 2.0 * weights * tokens


def attention_flops(a: Architecture, tokens: int) -> float:
    """Of one step: each token with each, in both products."""
    return 2.0 * sum(block.count * block.attention.prefill_products for block in a.blocks) * tokens**2


def predict_image(d: Deployment, request: ImageRequest, priors: Priors) -> ImagePrediction:
    """With the interval of a prompt's time: no diffusion model was among the measurements."""
    tokens = request.num_tokens
    linear, attention = linear_flops(d.architecture, tokens), attention_flops(d.architecture, tokens)

    def at(end: Deployment) -> Step:
        return image_step(end, priors.efficiency, tokens, linear, attention)

    step = at(d)
    quick, slow = (at(end).seconds for end in quickest_and_slowest(d))
    return ImagePrediction(request, linear + attention, step, around(step.seconds, priors.spread.ttft, quick, slow))

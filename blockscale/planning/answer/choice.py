"""One configuration to plan for: which GPU, how many and how joined, in which format."""

import difflib
import re
from dataclasses import dataclass

from blockscale.errors import UsageError
from blockscale.planning.hardware.catalogue import Gpu, find_gpu
from blockscale.planning.models.architecture import Architecture, Part
from blockscale.planning.models.model import Model
from blockscale.planning.models.weights import FORMATS, Weights, weights_of
from blockscale.planning.speed.layout import Layout, check_layout, parse_layout
from blockscale.planning.speed.roofline import CACHE_BYTES, Deployment

CACHES = tuple(CACHE_BYTES)
ENGINES = ("vllm", "sglang", "tensorrt-llm", "blockscale")
WEIGHT_ONLY = "-w4a16"


@dataclass(frozen=True)
class Choice:
    """`format`: one of FORMATS, with `-w4a16` behind it where only weights are rounded."""

    gpu: Gpu
    layout: Layout
    format: str
    cache: str

    @property
    def name(self) -> str:
        return f"{self.layout.num_gpus} x {self.gpu.name}, {self.layout.name}, {self.format}"


def check_format(name: str) -> str:
    """UsageError offers the nearest."""
    if name.removesuffix(WEIGHT_ONLY) in FORMATS:
        return name
    raise UsageError(f"unknown format '{name}'", hint=_near(name, FORMATS))


def check_cache(name: str) -> str:
    if name in CACHES:
        return name
    raise UsageError(f"unknown KV-cache format '{name}'", hint=_near(name, CACHES))


def check_engine(name: str) -> str:
    if name in ENGINES:
        return name
    raise UsageError(f"unknown engine '{name}'", hint=_near(name, ENGINES))


def _near(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.lower(), known, 2, 0.5)
    return ("nearest: " if near else "known: ") + ", ".join(near or known)


def weights_in(model: Model, fmt: str) -> Weights:
    """Bytes of a model whose layers are in `fmt`: those of its files where they are in it, else by formulas.

    gpt-oss has its experts alone in 4 bits, in every edition.
    """
    if model.weights is not None and fmt == model.stored_format:
        return model.weights
    base = fmt.removesuffix(WEIGHT_ONLY)
    kept: dict[Part, str] = {}
    if model.config.get("model_type") == "gpt_oss" and base in ("mxfp4", "nvfp4"):
        kept = {Part.ATTENTION: "bf16"}
    return weights_of(model.architecture, base, kept, weight_only=base != fmt)


MAX_TENSOR = 8  # beyond it all-reduces take more than cut matrices give


def default_layout(architecture: Architecture, gpu: Gpu, num_gpus: int, weights_bytes: int) -> Layout:
    """What engines do unless told otherwise: tensor parallel as far as heads and one node allow, then copies of that,
    or stages where one copy does not hold the weights."""
    if num_gpus < 1:
        raise UsageError(f"--gpus {num_gpus}: at least one", hint="give a positive number")
    heads = [block.attention.num_heads for block in architecture.blocks]
    sizes = range(1, min(num_gpus, MAX_TENSOR) + 1)
    tensor = max(n for n in sizes if num_gpus % n == 0 and all(h % n == 0 for h in heads))
    rest = num_gpus // tensor
    needed = weights_bytes / tensor / (_WEIGHTS_SHARE * gpu.memory_bytes)
    possible = [n for n in range(1, min(rest, architecture.num_layers) + 1) if rest % n == 0]
    stages = next((n for n in possible if n >= needed), possible[-1])
    return Layout(tensor=tensor, pipeline=stages, replicas=rest // stages)


_WEIGHTS_SHARE = 0.8  # of a GPU's memory; the rest is for cache and scratch


def resolve_layout(
    architecture: Architecture, gpu: Gpu, text: str | None, num_gpus: int | None, weights_bytes: int
) -> Layout:
    """The layout of `--layout` and `--gpus`: whole copies of it fill the GPUs. UsageError for what cannot be built."""
    if num_gpus is not None and num_gpus < 1:
        raise UsageError(f"--gpus {num_gpus}: at least one", hint="give a positive number")
    if text is None:
        layout = default_layout(architecture, gpu, num_gpus or 1, weights_bytes)
    else:
        layout = parse_layout(text)
        if num_gpus is not None and num_gpus != layout.num_gpus:
            if layout.replicas > 1 or num_gpus % layout.gpus_per_replica:
                raise UsageError(
                    f"layout {layout.name} takes {layout.num_gpus} GPUs, and --gpus says {num_gpus}",
                    hint="leave one of them out, or give a multiple",
                )
            copies = num_gpus // layout.gpus_per_replica
            layout = Layout(layout.tensor, layout.pipeline, layout.attention_data, layout.is_expert, copies)
    check_layout(layout, architecture)
    return layout


def deploy(model: Model, choice: Choice) -> Deployment:
    """What the predictions are about."""
    return Deployment(model.architecture, weights_in(model, choice.format), choice.gpu, choice.layout, choice.cache)


_COMPARED = re.compile(
    r"(?:(?P<format>[a-z0-9-]+)@)?(?:(?P<gpus>\d+)x)?(?P<gpu>[^@:]+)(?::(?P<layout>[a-z0-9]+))?", re.IGNORECASE
)


def parse_choice(text: str, model: Model, like: Choice) -> Choice:
    """`fp8@h200`, `fp8@8xh200:tp8`, `h200`: what is left out is as in `like`."""
    match = _COMPARED.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"'{text}' is no configuration", hint="for example fp8@h200 or fp8@8xh200:tp8")
    gpu = find_gpu(match["gpu"])
    fmt = check_format(match["format"].lower()) if match["format"] else like.format
    if match["gpus"] or match["layout"]:
        num_gpus = int(match["gpus"]) if match["gpus"] else None
        size = weights_in(model, fmt).num_bytes
        layout = resolve_layout(model.architecture, gpu, match["layout"], num_gpus, size)
    else:
        layout = like.layout
    return Choice(gpu, layout, fmt, like.cache)

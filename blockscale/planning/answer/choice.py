"""One configuration to plan for: which GPU, how many and how joined, in which format."""

import difflib
import re
from dataclasses import dataclass, replace

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
    """Without a choice by what serves best: tensor parallel as far as heads and one node allow, then copies of that,
    or stages where one copy does not hold the weights."""
    heads = [block.attention.num_heads for block in architecture.blocks]
    sizes = range(1, min(num_gpus, MAX_TENSOR) + 1)
    tensor = max(n for n in sizes if num_gpus % n == 0 and all(h % n == 0 for h in heads))
    rest = num_gpus // tensor
    needed = weights_bytes / tensor / (_WEIGHTS_SHARE * gpu.memory_bytes)
    possible = [n for n in range(1, min(rest, architecture.num_layers) + 1) if rest % n == 0]
    stages = next((n for n in possible if n >= needed), possible[-1])
    return Layout(tensor=tensor, pipeline=stages, replicas=rest // stages)


_WEIGHTS_SHARE = 0.8  # of a GPU's memory; the rest is for cache and scratch


def check_gpus(num_gpus: int | None) -> None:
    if num_gpus is not None and num_gpus < 1:
        raise UsageError(f"--gpus {num_gpus}: at least one", hint="give a positive number")


def filled(layout: Layout, num_gpus: int | None, architecture: Architecture) -> Layout:
    """Whole copies of a layout on so many GPUs; None: as it is. UsageError for what cannot be built."""
    if num_gpus is not None and num_gpus != layout.num_gpus:
        if layout.replicas > 1 or num_gpus % layout.gpus_per_replica:
            raise UsageError(
                f"layout {layout.name} takes {layout.num_gpus} GPUs, and --gpus says {num_gpus}",
                hint="leave one of them out, or give a multiple",
            )
        layout = replace(layout, replicas=num_gpus // layout.gpus_per_replica)
    check_layout(layout, architecture)
    return layout


def deploy(model: Model, choice: Choice) -> Deployment:
    """What the predictions are about."""
    return Deployment(model.architecture, weights_in(model, choice.format), choice.gpu, choice.layout, choice.cache)


_COMPARED = re.compile(
    r"(?:(?P<format>[a-z0-9-]+)@)?(?:(?P<gpus>\d+)x)?(?P<gpu>[^@:]+)(?::(?P<layout>[a-z0-9]+))?", re.IGNORECASE
)


@dataclass(frozen=True)
class Wanted:
    """A configuration as it is asked for. `layout` None: the one that serves best on so many GPUs."""

    gpu: Gpu
    format: str
    cache: str
    num_gpus: int | None
    layout: Layout | None


def compared_gpu(text: str) -> Gpu | None:
    """The GPU of a configuration that is compared, if a file describes it."""
    match = _COMPARED.fullmatch(text.strip())
    return find_gpu(match["gpu"]) if match is not None and match["gpu"].endswith(".toml") else None


def parse_wanted(text: str, like: Choice, layout: Layout | None) -> Wanted:
    """`fp8@h200`, `fp8@8xh200:tp8`, `h200`: what is left out is as in `like`, whose layout was `layout` if it was asked
    for."""
    match = _COMPARED.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"'{text}' is no configuration", hint="for example fp8@h200 or fp8@8xh200:tp8")
    gpu = find_gpu(match["gpu"])
    fmt = check_format(match["format"].lower()) if match["format"] else like.format
    if match["layout"]:
        layout, num_gpus = parse_layout(match["layout"]), int(match["gpus"]) if match["gpus"] else None
        return Wanted(gpu, fmt, like.cache, num_gpus, layout)
    if match["gpus"]:
        check_gpus(int(match["gpus"]))
        return Wanted(gpu, fmt, like.cache, int(match["gpus"]), None)
    return Wanted(gpu, fmt, like.cache, like.layout.num_gpus, layout)

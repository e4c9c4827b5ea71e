"""Whether a run was made of the model and in the format that is planned, by what its file says of them.

Names differ between hubs, folders and presets: `meta-llama/Llama-3.1-70B-Instruct`, `/models/llama-3.1-70b-fp8` and
`llama-3.3-70b` mean one model here, which is its shape. What says nothing of either (`model`, `default`) is taken at
the user's word.
"""

import re

from blockscale.errors import UsageError
from blockscale.planning.models.architecture import Architecture
from blockscale.planning.models.model import find_model, presets

# How engines and hubs call formats of weights.
FORMATS = {
    **dict.fromkeys(("nvfp4", "fp4", "modelopt_fp4"), "nvfp4"),
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    **dict.fromkeys(("fp8", "fbgemm_fp8", "fp8_block_scales", "fp8-block128"), "fp8"),
    **dict.fromkeys(("int4", "awq", "gptq", "w4a16_awq", "w4a16_gptq", "awq_marlin", "gptq_marlin"), "int4"),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16"), "bf16"),
}
_SAYS_NOTHING = frozenset(
    [
        "instruct",
        "it",
        "chat",
        "base",
        "hf",
        "model",
        "models",
        "checkpoint",
        "default",
        "quantized",
        "quant",
        "dynamic",
        "test",
        "main",
        "latest",
        "served",
    ]
)
_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/")  # of the hub's cache
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(b|m)")
_WHOLE, _ACTIVE = 1.3, 1.1  # factors between a name's size and the parameters, all of them or those of one token


def format_in(text: str) -> str | None:
    """The format of weights that a name or a `quantization` field says, where it says one."""
    if text.lower() in FORMATS:
        return FORMATS[text.lower()]
    return next((FORMATS[word] for word in reversed(_split(text)) if word in FORMATS), None)


def is_same_format(one: str, other: str) -> bool:
    """Blocks of FP8 are called FP8."""
    return one.split("-")[0] == other.split("-")[0]


def is_same_model(text: str, architecture: Architecture) -> bool:
    """Whether `text`, of a run, can mean the planned model or an edition of it."""
    said, own = _words(text), _words(architecture.name)
    if not said or said == own:
        return True
    known = _preset(said)
    if known is not None:
        return find_model(known).architecture.num_parameters == architecture.num_parameters
    if not all(_is_size_of(word, architecture) for word in said):
        return False
    return bool(own) and (own <= said or said <= own)


def _preset(said: frozenset[str]) -> str | None:
    return next((name for name in presets() if _words(name) == said), None)


def _is_size_of(word: str, a: Architecture) -> bool:
    """True for what is no size."""
    match = _SIZE.fullmatch(word)
    if match is None:
        return True
    size = float(match[1]) * {"b": 1e9, "m": 1e6}[match[2]]
    return any(
        counted / factor <= size <= counted * factor
        for counted, factor in ((a.num_parameters, _WHOLE), (a.active_parameters, _ACTIVE))
    )


def _words(text: str) -> frozenset[str]:
    """What tells a model from others: without its owner and folder, format, date and what says that it is tuned."""
    return frozenset(
        word
        for word in _split(text)
        if word not in FORMATS and word not in _SAYS_NOTHING and len(word) > 1 and not re.fullmatch(r"\d{4,}", word)
    )


def _split(text: str) -> list[str]:
    cached = _SNAPSHOT.search(text)
    name = cached[1].split("--")[-1] if cached else text.rstrip("/").split("/")[-1]
    return [word for word in re.split(r"[-_\s:@]+", name.lower()) if word]


def check_model(text: str | None, where: str, architecture: Architecture) -> None:
    """UsageError for a run that names another model."""
    if text is not None and not is_same_model(text, architecture):
        raise UsageError(
            f"{where}: measured with {text}, and the plan is for {architecture.name}",
            hint=f"plan the model that was measured; an edition of {architecture.name} can be called so in the file",
        )


def check_format(text: str | None, where: str, planned: str) -> None:
    """UsageError for a run whose weights were in another format."""
    if text is not None and not is_same_format(text, planned):
        raise UsageError(
            f"{where}: measured in {text}, and the plan is for {planned}", hint=f"--format {text}, or other runs"
        )

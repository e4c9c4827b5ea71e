"""Which engines run a checkpoint, and why not the others.

Each engine has one table of obstacles and one of remarks, by what was found in its loader's sources or by running it.
A text goes on from the engine's name. An error among the faults stops every engine, but for those of `_STOPS_ONLY`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from blockscale.checkpoint.faults import Fault
from blockscale.checkpoint.linear import MXFP4_W4A4, MXFP4_W4A16, W4A4, W4A16, W8A8_DYNAMIC, Scheme
from blockscale.formats.spec import FP8, FP8_CHANNEL, MXFP4, NVFP4
from blockscale.inspection.engine_facts import Facts, gather_facts
from blockscale.inspection.reading import Reading
from blockscale.inspection.rules import RULES

VLLM, SGLANG, TENSORRT_LLM = "vLLM", "SGLang", "TensorRT-LLM"
TRANSFORMERS, LLAMA_CPP, BLOCKSCALE = "transformers", "llama.cpp", "blockscale"
TO_GGUF = "blockscale convert CKPT OUT.gguf --to gguf"


@dataclass(frozen=True)
class Verdict:
    """loads    whether the engine runs it as it was meant to be; None: not known
    reason   why not, or what to know where it does; one sentence, may be empty
    checked  the version whose behaviour this is
    after    the command that has to be run first
    """

    engine: str
    loads: bool | None
    reason: str
    checked: str
    after: str = ""


# True, or what the text's {} stands for, where there is something to say.
Condition = Callable[[Facts], bool | str]
Table = tuple[tuple[Condition, str], ...]


# ---------------------------------------------------------------- conditions


def _is_modelopt(f: Facts) -> bool:
    return f.dialect == "modelopt"


def _is_ct(f: Facts) -> bool:
    return f.dialect == "compressed-tensors"


def _other_algorithm(known: Iterable[str], *, from_file: bool = False, any_case: bool = False) -> Condition:
    """A quant_algo, of the whole model or of a layer, that is not among `known`."""
    names = frozenset(known)

    def found(f: Facts) -> str:
        algorithm = f.file_algorithm if from_file else f.algorithm
        if not _is_modelopt(f) or not algorithm:
            return ""
        algorithms = f.layer_algorithms if algorithm == "MIXED_PRECISION" else {algorithm}
        return next((a for a in sorted(algorithms) if (a.upper() if any_case else a) not in names), "")

    return found


def _ct_scheme_other_than(known: Iterable[Scheme], *, experts: bool = False) -> Condition:
    allowed = frozenset(known)

    def found(f: Facts) -> str:
        schemes = f.expert_schemes if experts else f.schemes
        return (
            next((s.name for s in sorted(schemes, key=lambda s: s.name) if s not in allowed), "") if _is_ct(f) else ""
        )

    return found


def _nested_lacks(*keys: str) -> Condition:
    """Fields that hf_quant_config.json lacks, where config.json says nothing."""

    def found(f: Facts) -> str:
        if not _is_modelopt(f) or "quant_algo" in f.settings or f.file_settings is None or "NVFP4" not in f.algorithm:
            return ""
        return ", ".join(key for key in keys if key not in f.file_settings)

    return found


def _stacks_other_than(*model_types: str) -> Condition:
    return lambda f: f.stack if f.model_type not in model_types else ""


def _source(method: str, is_wrong: Callable[[Mapping[str, Any]], bool] = lambda settings: True) -> Condition:
    return lambda f: f.dialect is None and f.method == method and is_wrong(f.settings)


def _lacks_algorithm(f: Facts) -> bool:
    return _is_modelopt(f) and not f.algorithm


def _has_expert_pre_quant(f: Facts) -> str:
    return next((name for name in f.pre_quant_scales if ".experts." in name), "")


def _has_fused_pre_quant(f: Facts) -> str:
    return next((n for n in f.pre_quant_scales if n.endswith((".q_proj", ".k_proj", ".v_proj"))), "")


def _is_per_channel_experts(f: Facts) -> bool:
    return _is_modelopt(f) and W8A8_DYNAMIC in f.expert_schemes


def _has_other_block(settings: Mapping[str, Any]) -> bool:
    return settings.get("weight_block_size") != [128, 128]


def _is_other_awq(settings: Mapping[str, Any]) -> bool:
    layouts = {str(settings[key]).lower() for key in ("version", "format", "checkpoint_format") if settings.get(key)}
    return bool(layouts - {"gemm"}) or settings.get("bits", settings.get("w_bit")) != 4


def _is_other_gptq(settings: Mapping[str, Any]) -> bool:
    layouts = {str(settings[key]).lower() for key in ("checkpoint_format", "format") if settings.get(key)}
    is_marlin = bool(settings.get("is_marlin_format"))
    return bool(layouts - {"gptq", "gptq_v2"}) or is_marlin or settings.get("bits") not in (2, 4, 8)


def _has_class_groups(f: Facts) -> bool:
    """More than one config group, of which one is chosen by a class name."""
    groups = f.groups if _is_ct(f) else []
    targets = [t for group in groups for t in group.get("targets") or () if isinstance(t, str)]
    return len(groups) > 1 and any("." not in t and not t.startswith("re:") for t in targets)


def _rounds_inputs_to_4_bits(f: Facts) -> bool:
    return W4A4 in f.schemes


# ---------------------------------------------------------------- tables

# Models whose GGUF `convert` can write.
GGUF_MODEL_TYPES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
    *("gemma2", "gemma3_text", "phi3", "gpt_oss"),
)
_FP8_SCHEMES = (Scheme(FP8, FP8), W8A8_DYNAMIC)
_FP8_WEIGHTS = (Scheme(FP8), Scheme(FP8_CHANNEL))
_UNNAMED = (_lacks_algorithm, "finds no quant_algo in the configs")
_UNEVEN = (lambda f: f.uneven_experts, "wants all experts of a layer in one format: {} has several")
_NO_PRE_QUANT = "has no place for pre_quant_scale ({})"
_NO_KV_SCALES = (
    lambda f: f.kv_format is not None and not f.has_kv_scales,
    "the KV cache has no scales: 1.0 is taken for each",
)
_NO_LOW_RANK = (lambda f: f.low_rank, "runs no low-rank branch beside a weight ({})")
_NO_RESIDUAL = (
    lambda f: f.residual,
    "runs no residual channels ({}): `blockscale convert --to compressed-tensors` leaves them out",
)
_BY_AMAX = (
    lambda f: f.activation_scale,
    "chooses block scales of activations by amax, where blockscale does by {}",
)
_OLD_GPU = "activations are rounded to 4 bits on Blackwell; older GPUs compute with 16-bit activations"

OBSTACLES: dict[str, Table] = {
    VLLM: (
        _UNNAMED,
        _NO_LOW_RANK,
        _NO_RESIDUAL,
        (
            _other_algorithm(
                ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION"),
                any_case=True,
            ),
            "takes no quant_algo {}",
        ),
        (_nested_lacks("group_size", "kv_cache_quant_algo", "exclude_modules"), "wants {} in hf_quant_config.json"),
        (lambda f: next(iter(f.pre_quant_scales), ""), _NO_PRE_QUANT),
        (
            _is_per_channel_experts,
            "wants one FP8 scale a tensor in experts of this dialect, these have one a row",
        ),
        (_stacks_other_than("llama4", "llama4_text"), "reads no scales of experts stacked in one tensor here ({})"),
        (
            _ct_scheme_other_than((W4A4, W4A16, MXFP4_W4A4, MXFP4_W4A16, *_FP8_SCHEMES, *_FP8_WEIGHTS)),
            "has no compressed-tensors scheme for {}",
        ),
        (
            _ct_scheme_other_than((W4A4, W4A16, MXFP4_W4A4, MXFP4_W4A16, *_FP8_SCHEMES), experts=True),
            "has no compressed-tensors experts in {}",
        ),
        _UNEVEN,
    ),
    SGLANG: (
        _UNNAMED,
        _NO_LOW_RANK,
        _NO_RESIDUAL,
        (
            _other_algorithm(("FP8", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION")),
            "takes no quant_algo {}",
        ),
        (
            lambda f: (
                _is_modelopt(f)
                and f.algorithm == "MIXED_PRECISION"
                and not f.layer_algorithms & {"NVFP4", "W4A16_NVFP4"}
            ),
            "takes a mixture without NVFP4 layers for W4AFP8",
        ),
        (_nested_lacks("group_size"), "wants {} in hf_quant_config.json"),
        (lambda f: next(iter(f.pre_quant_scales), "") if f.algorithm != "NVFP4_AWQ" else "", _NO_PRE_QUANT),
        (_has_expert_pre_quant, "applies pre_quant_scale in linear layers only, and {} is an expert"),
        (lambda f: f.stack, "reads no block scales of experts stacked in one tensor ({})"),
        (
            lambda f: _is_ct(f) and any(scheme.weight is MXFP4 for scheme in f.schemes),
            "knows 4-bit floats of compressed-tensors in NVFP4 only",
        ),
        (
            _ct_scheme_other_than((W4A4, W4A16, *_FP8_SCHEMES, *_FP8_WEIGHTS)),
            "has no compressed-tensors scheme for {}",
        ),
        (_ct_scheme_other_than((W4A4, W4A16, *_FP8_SCHEMES), experts=True), "has no compressed-tensors experts in {}"),
        _UNEVEN,
    ),
    TENSORRT_LLM: (
        _UNNAMED,
        _NO_LOW_RANK,
        _NO_RESIDUAL,
        (
            _other_algorithm(
                (
                    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK_SCALES", "fp8_pb_wo", "NVFP4", "NVFP4_AWQ"),
                    *("W4A16_NVFP4", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A8_MXFP4_MXFP8", "W4A16_MXFP4", "MXFP8"),
                    *("W4A16_AWQ", "W4A8_AWQ", "MIXED_PRECISION"),
                ),
                from_file=True,
            ),
            "takes no quant_algo {}",
        ),
        (_has_fused_pre_quant, "applies no pre_quant_scale in fused q/k/v ({})"),
        (_has_expert_pre_quant, "applies no pre_quant_scale in experts ({})"),
        (_stacks_other_than("llama4", "llama4_text", "gpt_oss"), "reads no experts stacked in one tensor here ({})"),
        (
            lambda f: f.stack if W4A4 not in f.expert_schemes else "",
            "is not known to read stacked experts without NVFP4 activations ({})",
        ),
        (
            lambda f: _is_ct(f) and W4A16 in f.schemes,
            "wants NVFP4 activations with NVFP4 weights of compressed-tensors",
        ),
        (lambda f: _is_ct(f) and MXFP4_W4A4 in f.schemes, "takes MXFP4 of compressed-tensors for weights only"),
        (
            _ct_scheme_other_than((W4A4, MXFP4_W4A16, W8A8_DYNAMIC)),
            "has no compressed-tensors scheme for {}",
        ),
        (_has_class_groups, "reads several config_groups only where they name their modules"),
        (_source("fp8", _has_other_block), "reads FP8 in blocks of 128 x 128 only"),
        (_source("awq"), "reads no AWQ of other tools than Model Optimizer"),
        (_source("gptq"), "reads no GPTQ"),
        _UNEVEN,
    ),
    TRANSFORMERS: (
        (lambda f: not f.is_named, "finds neither model.safetensors nor an index of several files"),
        (_is_modelopt, "does not know the modelopt dialect: `blockscale convert` writes compressed-tensors"),
        (
            lambda f: _is_ct(f) and any(scheme.weight is NVFP4 for scheme in f.expert_schemes),
            "loads NVFP4 experts without their global scale: they come out thousands of times too large",
        ),
    ),
    LLAMA_CPP: (
        (lambda f: f.model_type not in GGUF_MODEL_TYPES, "blockscale writes no GGUF of this architecture"),
        (lambda f: not f.has_tokenizer, "a GGUF file holds the tokenizer, and this folder has none"),
        _NO_LOW_RANK,
    ),
    BLOCKSCALE: (
        (_source("fp8", _has_other_block), "reads FP8 in blocks of 128 x 128 only"),
        (_source("awq", _is_other_awq), "reads AWQ of 4 bits in the layout gemm only"),
        (_source("gptq", _is_other_gptq), "reads GPTQ of 2, 4 or 8 bits in the layouts gptq and gptq_v2 only"),
    ),
}
REMARKS: dict[str, Table] = {
    VLLM: (
        (_rounds_inputs_to_4_bits, _OLD_GPU),
        _BY_AMAX,
        _NO_KV_SCALES,
        (
            lambda f: _is_modelopt(f) and f.kv_format == "nvfp4" and "kv_cache_scheme" in f.settings,
            "the KV cache stays in 16 bits: NVFP4 in kv_cache_scheme is not read",
        ),
    ),
    SGLANG: ((_rounds_inputs_to_4_bits, _OLD_GPU), _BY_AMAX, _NO_KV_SCALES),
    TENSORRT_LLM: (
        (
            lambda f: _is_modelopt(f) and f.file_settings is None,
            "reads config.json; older releases look for hf_quant_config.json, which is not here",
        ),
        _BY_AMAX,
        _NO_KV_SCALES,
    ),
    TRANSFORMERS: (
        (_is_ct, "with the compressed-tensors package"),
        _BY_AMAX,
        (_source("awq"), "with the gptqmodel package"),
        (_source("gptq"), "with the gptqmodel and optimum packages"),
    ),
    LLAMA_CPP: (
        (lambda f: f.num_untiled > 0 and str(f.num_untiled), "{} weights whose K is no multiple of 64 become 16 bits"),
        (lambda f: next(iter(f.pre_quant_scales), ""), "weights with a pre_quant_scale become 16 bits ({})"),
        (lambda f: f.has_kv_scales, "scales of the KV cache are left out"),
        (lambda f: f.residual, "residual channels are left out ({})"),
    ),
    BLOCKSCALE: (),
}

CHECKED = {
    VLLM: "0.33.0",
    SGLANG: "0.5.23",
    TENSORRT_LLM: "sources of 2026",
    TRANSFORMERS: "5.24.0",
    LLAMA_CPP: "0c1e570",
    BLOCKSCALE: version("blockscale"),
}

# Faults that stop some engines only. Of others, those whose rule is an error stop all; blockscale, and llama.cpp after
# it, stop at those that keep a checkpoint from being read.
_SERVERS = (VLLM, SGLANG, TENSORRT_LLM)
_STOPS_ONLY: dict[str, tuple[str, ...]] = {
    "fused-global-scale-mismatch": _SERVERS,
    "fused-input-scale-mismatch": (TENSORRT_LLM,),  # the others take the largest
    "one-sided-kv-scale": _SERVERS,
    "quantized-lm-head": (VLLM, SGLANG),
    "tower-quantized": (VLLM, SGLANG),
    "unknown-activation-scale": (),  # a file that they do not read
}
# What no engine runs without, though the rest of the checkpoint can be read.
_STOPS_ALL = ("missing-layers", "missing-tensor")
KNOWN_METHODS = (None, "modelopt", "compressed-tensors", "fp8", "mxfp4", "awq", "gptq")


def verdicts(reading: Reading, more_faults: Iterable[Fault] = ()) -> tuple[Verdict, ...]:
    """One an engine. `more_faults`: what was found by looking closer than `reading` did."""
    facts = gather_facts(reading, more_faults)
    return tuple(_verdict(engine, facts) for engine in CHECKED)


def _verdict(engine: str, facts: Facts) -> Verdict:
    def say(loads: bool | None, reason: str, after: str = "") -> Verdict:
        return Verdict(engine, loads, reason, CHECKED[engine], after)

    reads_itself = engine in (BLOCKSCALE, LLAMA_CPP)
    if facts.method not in KNOWN_METHODS:
        if reads_itself:
            return say(False, f"does not read weights quantized with {facts.method}")
        return say(None, f"nothing is known here about {facts.method}")
    tables = (OBSTACLES[BLOCKSCALE], OBSTACLES[engine]) if reads_itself else (OBSTACLES[engine],)
    reason = next((said for table in tables for said in _said(table, facts)), None)
    if reason is not None:
        return say(False, reason)
    if not reads_itself and any(fault.rule == "unknown-algorithm" for fault in facts.faults):
        return say(None, "the config names a scheme or a KV cache that is not known here")
    fault = next((fault for fault in facts.faults if _stops(fault, engine, facts, reads_itself=reads_itself)), None)
    if fault is not None:
        return say(False, f"{RULES[fault.rule].label}: {fault.where}")
    remarks = "; ".join(_said(REMARKS[engine], facts))
    return say(True, remarks, TO_GGUF if engine == LLAMA_CPP else "")


def _said(table: Table, facts: Facts) -> list[str]:
    found = ((condition(facts), text) for condition, text in table)
    return [text.format(what) for what, text in found if what]


def _stops(fault: Fault, engine: str, facts: Facts, *, reads_itself: bool) -> bool:
    if reads_itself:
        # experts of several formats run here, lost ones do not
        is_lost = fault.rule == "experts-incomplete" and not facts.uneven_experts
        return fault.is_fatal or fault.rule in _STOPS_ALL or is_lost
    if fault.rule == "malformed-json" and not fault.is_fatal:
        return engine == TENSORRT_LLM  # hf_quant_config.json, which the others do not need here
    if fault.rule == "fused-input-scale-mismatch" and ".experts." in fault.where:
        return False  # of experts TensorRT-LLM, too, takes the largest
    if fault.rule in _STOPS_ONLY:
        return engine in _STOPS_ONLY[fault.rule]
    return RULES[fault.rule].severity == "error"

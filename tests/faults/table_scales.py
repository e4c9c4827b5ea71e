"""Faults of scales."""

import torch

from .breaking_files import all_of, exclude, layer_entry
from .breaking_tensors import (
    byte,
    drop,
    drop_below,
    fill,
    move_scale,
    multiply,
    one_level,
    put,
    reciprocal,
    reciprocal_everywhere,
    rename,
    set_bit,
    svd_part,
    to_fp8,
    unquantize,
    zero_as_nan,
    zero_scales,
    zeros_throughout,
)
from .fault import Fault

NVFP4, MOE, CT = "modelopt_llama_nvfp4", "modelopt_qwen3moe_nvfp4", "ct_llama_nvfp4"
NVFP4_3, MOE_5, CT_3 = f"{NVFP4} in 3 files", f"{MOE} in 5 files", f"{CT} in 3 files"
A16, CT_A16 = "modelopt_llama_w4a16_nvfp4", "ct_llama_nvfp4a16"
FP8, MIXED, MXFP4 = "modelopt_llama_fp8", "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv", "ct_llama_mxfp4"
KV, CT_KV = "modelopt_llama_nvfp4_fp8kv", "ct_llama_nvfp4_fp8kv"

ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
QUERY, KEY, VALUE, OUT = (f"{ATTENTION}.{leaf}_proj" for leaf in "qkvo")
GATE, UP, DOWN = f"{MLP}.gate_proj", f"{MLP}.up_proj", f"{MLP}.down_proj"
QKV, GATE_UP = f"{ATTENTION}.q_proj+k_proj+v_proj", f"{MLP}.gate_proj+up_proj"
EXPERTS = f"{MLP}.experts"
EXPERT = f"{EXPERTS}.2"
EXPERT_GATE_UP = f"{EXPERT}.gate_proj+up_proj"

# A block scale rounds by 1/16 of itself at most, and a value by half of the largest gap between codes, 2.
RESCALED = 1 + 1 / 16
ULP = 6 * 2.0**-23  # of the global scale, on the largest code

NAN, INF = float("nan"), float("inf")

FUSED = (
    Fault("up twice gate", "B1", NVFP4, move_scale(UP, 2), "fused-global-scale-mismatch", GATE_UP, True, 0, True),
    Fault("up 1.25 of gate", "B1", NVFP4, move_scale(UP, 1.25), "fused-global-scale-mismatch", GATE_UP, True,
          RESCALED, True),
    Fault("value ten times", "B1", NVFP4, move_scale(VALUE, 10), "fused-global-scale-mismatch", QKV, True,
          RESCALED, True),
    Fault("an expert's up ten times", "B1", MOE, move_scale(f"{EXPERT}.up_proj", 10), "fused-global-scale-mismatch",
          EXPERT_GATE_UP, True, RESCALED, True),
    Fault("an expert's gate 1.25 times", "B1", MOE_5, move_scale(f"{EXPERT}.gate_proj", 1.25),
          "fused-global-scale-mismatch", EXPERT_GATE_UP, True, RESCALED, True),
    Fault("key 4 times, ct", "B1", CT, move_scale(KEY, 4), "fused-global-scale-mismatch", QKV, True, 0, True),
    Fault("key 10 times, ct", "B1", CT_A16, move_scale(KEY, 10), "fused-global-scale-mismatch", QKV, True,
          RESCALED, True),
    Fault("members in different files", "B16", NVFP4_3, move_scale(KEY, 3), "fused-global-scale-mismatch", QKV, True,
          RESCALED, True),
    Fault("members in different files, ct", "B16", CT_3, move_scale(UP, 3), "fused-global-scale-mismatch", GATE_UP,
          True, RESCALED, True),
    Fault("inputs of query and key", "B1", NVFP4, multiply(f"{KEY}.input_scale", 1.5), "fused-input-scale-mismatch",
          QKV, True),
    Fault("inputs of an expert's gate and up", "B1", MOE, multiply(f"{EXPERT}.gate_proj.input_scale", 1.5),
          "fused-input-scale-mismatch", EXPERT_GATE_UP, True),
    Fault("inputs of gate and up, ct", "B1", CT, multiply(f"{UP}.input_global_scale", 1.5),
          "fused-input-scale-mismatch", GATE_UP, True),
    Fault("value left in 16 bits", "B1", NVFP4, all_of(unquantize(VALUE), exclude(VALUE)), "fused-formats-differ", QKV,
          False),
    Fault("up left in 16 bits, ct", "B1", CT, all_of(unquantize(UP), exclude(UP)), "fused-formats-differ", GATE_UP,
          False),
    Fault("up in FP8", "B1", MIXED, all_of(to_fp8(UP), layer_entry(UP, {"quant_algo": "FP8"})), "fused-formats-differ",
          GATE_UP, False),
)  # fmt: skip

BLOCKS = (
    *(
        Fault(f"byte {value:#x}", "B3", base, byte(f"{DOWN}.weight_scale", value), "nan-block-scale", DOWN, False)
        for base in (NVFP4, CT, A16)
        for value in (0x7F, 0xFF)
    ),
    Fault("a NaN byte in an expert", "B3", MOE_5, byte(f"{EXPERT}.up_proj.weight_scale", 0x7F), "nan-block-scale",
          f"{EXPERT}.up_proj", False),
    Fault("E8M0 byte 255", "B19", MXFP4, byte(f"{DOWN}.weight_scale", 255), "nan-block-scale", DOWN, False),
    Fault("NaN scale of an FP8 layer", "B3", FP8, fill(f"{DOWN}.weight_scale", NAN), "bad-global-scale", DOWN, False),
    Fault("a sign bit", "B3", NVFP4, set_bit(f"{DOWN}.weight_scale", 0x80), "negative-block-scale", DOWN, True,
          0, True),
    Fault("a sign bit, ct", "B3", CT, set_bit(f"{DOWN}.weight_scale", 0x80), "negative-block-scale", DOWN, True,
          0, True),
    Fault("scales never written", "B4", NVFP4, zero_scales(DOWN), "zero-block-scales", DOWN, False),
    Fault("scales never written after 2 rows", "B4", CT, zero_scales(DOWN, 2), "zero-block-scales", DOWN, False),
    Fault("an expert's scales never written", "B4", MOE, zero_scales(f"{EXPERT}.down_proj"), "zero-block-scales",
          f"{EXPERT}.down_proj", False),
    Fault("one level", "B3", NVFP4, one_level(DOWN), "subnormal-block-scales", DOWN, True, 0, True),
    Fault("one level, ct", "B3", CT_A16, one_level(DOWN), "subnormal-block-scales", DOWN, True, 0, True),
    Fault("zeros throughout", "B3", f"{NVFP4} with zeros", zeros_throughout(DOWN), "zero-weight-as-nan", DOWN, True),
    Fault("zeros as NaN", "B3", f"{NVFP4} with zeros", zero_as_nan(DOWN), "zero-weight-as-nan", DOWN, True),
)  # fmt: skip

GLOBALS = (
    *(
        Fault(f"{suffix} {value}", "B2", base, fill(f"{DOWN}.{suffix}", value), "bad-global-scale", DOWN, False)
        for base, suffixes in (
            (NVFP4, ("weight_scale_2", "input_scale")),
            (CT, ("weight_global_scale", "input_global_scale")),
        )
        for suffix in suffixes
        for value in (0.0, NAN, INF)
    ),
    Fault("negative weight scale", "B2", A16, multiply(f"{DOWN}.weight_scale_2", -1), "bad-global-scale", DOWN, True,
          0, True),
    Fault("negative divisor", "B2", CT, multiply(f"{DOWN}.weight_global_scale", -1), "bad-global-scale", DOWN, True, 0,
          True),
    Fault("negative input scale", "B2", NVFP4, multiply(f"{DOWN}.input_scale", -1), "bad-global-scale", DOWN, False),
    *(
        Fault(f"input scale {value} beside a good one", "B2", base, fill(name, value), "bad-global-scale", QUERY, True)
        for base, name in ((NVFP4, f"{QUERY}.input_scale"), (CT, f"{QUERY}.input_global_scale"))
        for value in (0.0, NAN)
    ),
    *(
        Fault(f"{scale} {value}", "B2", base, fill(f"{ATTENTION}.{scale}", value), "bad-global-scale", ATTENTION, False)
        for base, scale in ((KV, "k_proj.k_scale"), (KV, "v_proj.v_scale"), (CT_KV, "v_scale"))
        for value in (0.0, NAN, INF, -0.01)
    ),
    Fault("an expert's scale Inf", "B2", MOE, fill(f"{EXPERT}.down_proj.input_scale", INF), "bad-global-scale",
          f"{EXPERT}.down_proj", True),
    Fault("denormal input scale", "B2", NVFP4, fill(f"{DOWN}.input_scale", 1e-40), "denormal-global-scale", DOWN,
          False),
    Fault("an expert's denormal input scale", "B2", MOE, fill(f"{EXPERT}.down_proj.input_scale", 1e-40),
          "denormal-global-scale", f"{EXPERT}.down_proj", True),
    Fault("denormal weight scale", "B2", A16, fill(f"{DOWN}.weight_scale_2", 1e-40), "denormal-global-scale", DOWN,
          False),
    Fault("denormal divisor", "B2", CT, fill(f"{DOWN}.input_global_scale", 1e-40), "denormal-global-scale", DOWN,
          False),
    Fault("inputs of 300,000 in one layer", "B2", NVFP4, fill(f"{DOWN}.input_scale", 3e5 / 2688), "odd-input-scale",
          DOWN, False),
    Fault("divisor for multiplier", "B4", NVFP4, reciprocal(f"{DOWN}.weight_scale_2"), "reversed-global-scale", DOWN,
          True, ULP),
    Fault("divisors for multipliers", "B12", A16, reciprocal_everywhere("weight_scale_2"), "reversed-global-scale",
          DOWN, True, ULP),
    Fault("an expert's divisor for multiplier", "B4", MOE, reciprocal(f"{EXPERT}.down_proj.weight_scale_2"),
          "reversed-global-scale", f"{EXPERT}.down_proj", True, ULP),
    Fault("divisors of inputs", "B12", NVFP4, reciprocal_everywhere("input_scale"), "reversed-global-scale", DOWN,
          True),
    Fault("multiplier for divisor", "B4", CT, reciprocal(f"{DOWN}.weight_global_scale"), "reversed-global-scale", DOWN,
          True, ULP),
    Fault("multipliers for divisors", "B12", CT_3, reciprocal_everywhere("weight_global_scale"),
          "reversed-global-scale", DOWN, True, ULP),
    Fault("multipliers of inputs", "B12", CT, reciprocal_everywhere("input_global_scale"), "reversed-global-scale",
          DOWN, True),
)  # fmt: skip

MISSING = (
    *(
        Fault(f"no {suffix}", "B2", base, drop(f"{DOWN}.{suffix}"), rule, DOWN, False)
        for base, suffix, rule in (
            (NVFP4, "weight_scale", "missing-block-scale"),
            (CT, "weight_scale", "missing-block-scale"),
            (MXFP4, "weight_scale", "missing-block-scale"),
            (NVFP4, "weight_scale_2", "missing-global-scale"),
            (NVFP4_3, "weight_scale_2", "missing-global-scale"),
            (CT, "weight_global_scale", "missing-global-scale"),
            (NVFP4, "input_scale", "missing-input-scale"),
            (FP8, "input_scale", "missing-input-scale"),
            (CT, "input_global_scale", "missing-input-scale"),
            (NVFP4, "weight", "loose-scale"),
            (CT, "weight_packed", "loose-scale"),
        )
    ),
    *(
        Fault(f"an expert without {suffix}", "B2", MOE, drop(f"{EXPERT}.down_proj.{suffix}"), rule,
              f"{EXPERT}.down_proj", suffix == "input_scale")
        for suffix, rule in (
            ("weight_scale", "missing-block-scale"),
            ("weight_scale_2", "missing-global-scale"),
            ("input_scale", "missing-input-scale"),
        )
    ),
    Fault("no input scale beside a good one", "B2", NVFP4, drop(f"{QUERY}.input_scale"), "missing-input-scale", QUERY,
          True),
    Fault("no input scale beside a good one, ct", "B2", CT, drop(f"{QUERY}.input_global_scale"),
          "missing-input-scale", QUERY, True),
    Fault("a stack without its scale", "B9", "stacked experts",
          drop("model.layers.1.feed_forward.experts.down_proj_weight_scale_2"), "missing-global-scale",
          "model.layers.1.feed_forward.experts.down_proj", False),
    Fault("no scale of tensors at all", "B10", A16,
          drop(*(f"model.layers.{i}.{m}.weight_scale_2" for i in (0, 1) for m in (
              "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
              "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))), "missing-global-scale", DOWN, False),
    Fault("a scale of a layer that is not there", "B2", NVFP4, put("model.layers.9.mlp.up_proj.weight_scale_2",
          torch.tensor(0.01)), "loose-scale", "model.layers.9.mlp.up_proj", True),
    Fault("a scale under another name", "B10", NVFP4, rename(f"{DOWN}.input_scale", f"{MLP}.down.input_scale"),
          "loose-scale", f"{MLP}.down", False),
    Fault("an input scale below 16-bit inputs", "B10", A16, put(f"{DOWN}.input_scale", torch.tensor(0.01)),
          "unread-input-scale", DOWN, True),
    Fault("a low-rank part", "B10", NVFP4, svd_part(DOWN), "format-mismatch", "config.json", True),
    Fault("a quantizer's own tensor", "B10", NVFP4, put(f"{DOWN}.weight_quantizer._amax", torch.tensor(0.1)),
          "loose-scale", DOWN, True),
    Fault("key without value", "B4", KV, drop(f"{VALUE}.v_scale"), "one-sided-kv-scale", ATTENTION, False),
    Fault("value without key", "B4", KV, drop(f"{KEY}.k_scale"), "one-sided-kv-scale", ATTENTION, False),
    Fault("key without value, ct", "B4", CT_KV, drop(f"{ATTENTION}.v_scale"), "one-sided-kv-scale", ATTENTION, False),
    Fault("an expert in 16 bits", "B9", MOE, unquantize(*(f"{EXPERT}.{m}_proj" for m in ("gate", "up", "down"))),
          "experts-incomplete", EXPERTS, False),
    Fault("an expert in 16 bits, excluded", "B9", MOE_5,
          all_of(unquantize(*(f"{EXPERT}.{m}_proj" for m in ("gate", "up", "down"))), exclude(f"{EXPERT}*")),
          "experts-incomplete", EXPERTS, False),
    Fault("an expert without scales", "B2", MOE,
          drop(*(f"{EXPERT}.{m}_proj.{s}" for m in ("gate", "up", "down") for s in ("weight_scale", "weight_scale_2",
               "input_scale"))), "experts-incomplete", EXPERTS, False),
    Fault("an expert less", "B10", MOE, drop_below(EXPERT), "experts-incomplete", EXPERTS, False),
)  # fmt: skip

SCALES = (*FUSED, *BLOCKS, *GLOBALS, *MISSING)

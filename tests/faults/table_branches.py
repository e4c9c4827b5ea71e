"""Faults of what lies beside weights, and of how their inputs are to be rounded."""

import torch

from .branches import algorithm, part, record, spoil
from .breaking_tensors import byte, drop, move_scale, multiply, put, swap_nibbles
from .fault import Fault
from .table_scales import A16, DOWN, GATE, GATE_UP, INF, NAN, NVFP4, QKV, QUERY, UP

WITH = "branches"
A, B, CODES, SCALE = "svdquant_lora_a", "svdquant_lora_b", "residual_weight", "residual_weight_scale"
CHANNELS = "residual_channels"


def bad(name: str, change, layer: str = DOWN, base: str = WITH) -> Fault:
    return Fault(name, "B10", base, change, "bad-branch", layer, False)


BRANCHES = (
    bad("half a branch", drop(f"{DOWN}.{A}")),
    bad("the other half", drop(f"{DOWN}.{B}")),
    bad("half a branch below a quantizer", put(f"{DOWN}.weight_quantizer._svdquant_lora_a",
        torch.ones(4, 128, dtype=torch.bfloat16)), DOWN, NVFP4),
    bad("ranks that differ", part(DOWN, B, lambda t: t[:, 1:])),
    bad("a factor turned round", part(DOWN, A, lambda t: t.t().contiguous())),
    bad("a factor of integers", part(DOWN, A, lambda t: t.int())),
    bad("a NaN factor", spoil(DOWN, A, NAN)),
    bad("an infinite factor", spoil(DOWN, B, -INF)),
    bad("no channels", drop(f"{GATE}.{CHANNELS}"), GATE),
    bad("channels alone", drop(f"{GATE}.{CODES}", f"{GATE}.{SCALE}"), GATE),
    bad("15 channels", part(UP, CHANNELS, lambda t: t[1:]), UP),
    bad("a row less", part(UP, CODES, lambda t: t[1:]), UP),
    bad("scales of a block more", part(UP, SCALE, lambda t: torch.cat((t, t), -1)), UP),
    bad("channels in 64 bits", part(UP, CHANNELS, lambda t: t.long()), UP),
    bad("a channel twice", spoil(QUERY, CHANNELS, 1), QUERY),
    bad("a channel that is not there", spoil(QUERY, CHANNELS, 64), QUERY),
    bad("a channel below zero", spoil(QUERY, CHANNELS, -1), QUERY),
    bad("a NaN scale", byte(f"{QUERY}.{SCALE}", 0x7F), QUERY),
    bad("a negative scale", byte(f"{QUERY}.{SCALE}", 0xB8), QUERY),
    bad("channels of 16-bit inputs", put(f"{DOWN}.{CHANNELS}", torch.arange(16).int()), DOWN, A16),
    bad("a branch that is promised", algorithm("NVFP4_SVD"), "config.json", NVFP4),
    Fault("a branch under a plain name", "B10", WITH, algorithm("NVFP4"), "format-mismatch", "config.json", True),
    Fault("parts of a weight that is not there", "B10", WITH, put(f"model.layers.9.mlp.up_proj.{CHANNELS}",
          torch.arange(16).int()), "loose-scale", "model.layers.9.mlp.up_proj", False),
    Fault("an input scale less, with channels", "B2", WITH, drop(f"{QUERY}.input_scale"), "missing-input-scale", QUERY,
          True),
    Fault("inputs of query and key, with channels", "B1", WITH, multiply(f"{QUERY}.input_scale", 1.5),
          "fused-input-scale-mismatch", QKV, True),
    # the channels' scales would have to move along
    Fault("up twice gate, with channels", "B1", WITH, move_scale(UP, 2), "fused-global-scale-mismatch", GATE_UP, False),
    Fault("nibbles, with channels", "B4", WITH, swap_nibbles(DOWN), "swapped-nibbles", DOWN, False,
          source="base_llama"),
    Fault("another engine's scales", "B10", NVFP4, record(activation_scale="five_over_six"),
          "unknown-activation-scale", "blockscale.json", False),
    Fault("no engine's scales", "B10", "ct_llama_nvfp4", record(activation_scale=6), "unknown-activation-scale",
          "blockscale.json", False),
)  # fmt: skip

"""Faults of layout, of values against the source, and of sizes that engines cannot tile or share out."""

from .breaking_tensors import (
    as_it_is,
    copy,
    drop,
    drop_ending,
    other_codes,
    reshape,
    shuffle_rows,
    swap_nibbles,
    swizzle_padded_scales,
    swizzle_scales,
    under_another_name,
)
from .fault import Fault
from .table_scales import A16, CT, CT_3, CT_A16, DOWN, EXPERT, GATE, MOE, NVFP4, NVFP4_3, OUT

LLAMA, MOE_SOURCE = "base_llama", "base_qwen3moe"
REAL, CT_REAL = "real magnitudes", "real magnitudes, ct"
WIDE, CT_WIDE = "4304 rows", "4304 rows, ct"
FIRST_GATE, FIRST_DOWN = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"

WITH_SOURCE = (
    Fault("nibbles of one layer", "B4", NVFP4, swap_nibbles(DOWN), "swapped-nibbles", DOWN, True, source=LLAMA),
    Fault("nibbles of all layers", "B4", A16, swap_nibbles(), "swapped-nibbles", DOWN, True, source=LLAMA),
    Fault("nibbles of all layers, ct", "B4", CT_3, swap_nibbles(), "swapped-nibbles", DOWN, True, source=LLAMA),
    Fault("nibbles of an expert", "B4", MOE, swap_nibbles(f"{EXPERT}.up_proj"), "swapped-nibbles",
          f"{EXPERT}.up_proj", True, source=MOE_SOURCE),
    Fault("a swizzle", "B4", NVFP4, swizzle_scales(GATE), "swizzled-scales", GATE, True, source=LLAMA),
    Fault("a swizzle, ct", "B4", CT, swizzle_scales(GATE), "swizzled-scales", GATE, True, source=LLAMA),
    Fault("a swizzle of padded rows", "B4", NVFP4_3, swizzle_padded_scales(OUT), "swizzled-scales", OUT, True,
          source=LLAMA),
    Fault("rows in another order", "B9", NVFP4, shuffle_rows(OUT), "differs-from-source", OUT, False, source=LLAMA),
    Fault("block scales of another layer", "B17", NVFP4, copy(f"{FIRST_DOWN}.weight_scale", f"{DOWN}.weight_scale"),
          "far-from-source", DOWN, False, source=LLAMA),
    Fault("a norm less in the first layer", "B10", NVFP4, drop("model.layers.0.input_layernorm.weight"),
          "missing-tensor", "model.layers.0.input_layernorm", False, source=LLAMA),
    Fault("a norm less in all layers", "B10", CT, drop_ending(".post_attention_layernorm.weight"), "missing-tensor",
          "model.layers.1.post_attention_layernorm", False, source=LLAMA),
    Fault("the last norm less", "B10", CT_3, drop_ending("model.norm.weight"), "missing-tensor", "model.norm", False,
          source=LLAMA),
    Fault("other names than the source's", "B6", A16, under_another_name, "source-not-compared", None, False,
          source=LLAMA),
    Fault("codes of another weight", "B17", CT_A16, other_codes(DOWN), "differs-from-source", DOWN, False,
          source=LLAMA),
    Fault("an expert's codes of another weight", "B17", MOE, other_codes(f"{EXPERT}.up_proj"), "differs-from-source",
          f"{EXPERT}.up_proj", False, source=MOE_SOURCE),
)  # fmt: skip

WITHOUT_SOURCE = (
    Fault("a swizzle of all layers", "B4", REAL, swizzle_scales(), "swizzled-scales", FIRST_GATE, True),
    Fault("a swizzle of all layers, ct", "B4", CT_REAL, swizzle_scales(), "swizzled-scales", FIRST_DOWN, True),
    Fault("a swizzle of one layer", "B4", REAL, swizzle_scales(FIRST_GATE), "swizzled-scales", FIRST_GATE, True),
    Fault("a global scale of one dimension", "B4", NVFP4, reshape(f"{DOWN}.weight_scale_2", 1), "wrong-global-shape",
          DOWN, True),
    Fault("a global scale of no dimension, ct", "B4", CT, reshape(f"{DOWN}.weight_global_scale"),
          "wrong-global-shape", DOWN, True),
)  # fmt: skip

SIZES = (
    Fault("4304 rows", "B5", WIDE, as_it_is, "untileable-dimension", FIRST_DOWN, False),
    Fault("4304 rows, ct", "B5", CT_WIDE, as_it_is, "untileable-dimension", FIRST_DOWN, False),
    Fault("K of 4304 over 2", "B5", WIDE, as_it_is, "unshardable-dimension", FIRST_DOWN, False, tensor_parallel=2),
    Fault("K of 64 over 8", "B5", NVFP4, as_it_is, "unshardable-dimension", OUT, False, tensor_parallel=8),
    Fault("K of 64 over 8, ct", "B5", CT, as_it_is, "unshardable-dimension", OUT, False, tensor_parallel=8),
    Fault("an expert's K of 32 over 4", "B5", MOE, as_it_is, "unshardable-dimension", f"{EXPERT}.down_proj", False,
          tensor_parallel=4),
)  # fmt: skip

LAYOUT = (*WITH_SOURCE, *WITHOUT_SOURCE, *SIZES)

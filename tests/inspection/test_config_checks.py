"""Config files against tensors: what is found, where, and what is left alone."""

from typing import Any

import pytest

from blockscale.inspection.checks.config import config_faults

from .readings import (
    ATTENTION,
    INNER,
    LLAMA,
    MOE,
    ROUTERS,
    VOCABULARY,
    WIDTH,
    Entries,
    compressed,
    ends,
    found,
    fp8,
    in_16_bits,
    llama,
    modelopt,
    moe,
    nvfp4,
    plain,
    without,
)

P = "model.layers.1"
DOWN = f"{P}.mlp.down_proj"
CT = {"dialect": "compressed-tensors"}
ROUTED = ("lm_head", *ROUTERS)


def faults(reading: Any) -> list[tuple[str, str]]:
    return found(config_faults(reading))


def llama_without_attention() -> Entries:
    entries = llama()
    for i in (0, 1):
        for leaf, (n, k) in ATTENTION.items():
            entries = in_16_bits(entries, f"model.layers.{i}.self_attn.{leaf}", n, k)
    return entries


GOOD = {
    "modelopt": modelopt(llama()),
    "compressed-tensors": compressed(llama(**CT)),
    "experts": modelopt(moe(), ROUTED, config=MOE),
    "experts, ct": compressed(moe(**CT), ("lm_head", "re:.*mlp.gate$"), config=MOE),
    "embedding listed": modelopt(llama(), ("lm_head", "model.embed_tokens")),
    "upper and lower case": modelopt(llama(), nested={"quant_algo": "nvfp4"}),
    "one file of the two": modelopt(llama(), is_flat=False),
    "lists in another order": modelopt(moe(), ROUTED, config=MOE, nested_excluded=ROUTED[::-1]),
    "lists that mean the same": modelopt(llama(), ("lm_head",), nested_excluded=["lm_hea*"]),
    "attention kept whole": modelopt(
        llama_without_attention(), ("lm_head", "model.layers.0.self_attn*", "model.layers.1.self_attn*")
    ),
    "tied head without a tensor": modelopt(without(llama(), "lm_head"), config={**LLAMA, "tie_word_embeddings": True}),
    "targets by name leave the rest": compressed(llama(**CT), (), targets=["re:model.layers.*proj$"]),
}


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_wrong(name: str) -> None:
    assert not GOOD[name].faults
    assert faults(GOOD[name]) == []


# ---------------------------------------------------------------- lists


def test_an_entry_over_quantized_layers() -> None:
    expected = [("excluded-but-quantized", f"{P}.mlp.{leaf}_proj") for leaf in ("gate", "up", "down")]
    assert faults(modelopt(llama(), ("lm_head", f"{P}.mlp.*"))) == expected


def test_one_member_of_a_fused_layer_in_the_list() -> None:
    """vLLM and SGLang stop at it, TensorRT-LLM takes all for excluded: the list is wrong in each."""
    query = f"{P}.self_attn.q_proj"
    assert faults(modelopt(llama(), ("lm_head", query))) == [("excluded-but-quantized", query)]
    assert faults(compressed(llama(**CT), ("lm_head", query))) == [("excluded-but-quantized", query)]


@pytest.mark.parametrize("module", ["lm_head", DOWN])
def test_a_16bit_matrix_that_no_entry_covers(module: str) -> None:
    entries = llama() if module == "lm_head" else in_16_bits(llama(), DOWN, WIDTH, INNER)
    excluded = () if module == "lm_head" else ("lm_head",)
    assert faults(modelopt(entries, excluded)) == [("kept-but-not-excluded", module)]


def test_experts_in_16_bits_are_named_once() -> None:
    entries = without(moe(), f"{P}.mlp.experts")
    for expert in range(4):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            entries |= plain(f"{P}.mlp.experts.{expert}.{leaf}", WIDTH, WIDTH)
    assert faults(modelopt(entries, ROUTED, config=MOE)) == [("kept-but-not-excluded", f"{P}.mlp.experts")]
    assert faults(modelopt(entries, (*ROUTED, f"{P}.mlp.experts*"), config=MOE)) == []


def test_a_tied_head_is_to_be_listed_too() -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    reading = modelopt(without(llama(), "lm_head"), (), config=tied)
    assert faults(reading) == [("kept-but-not-excluded", "lm_head")]
    assert faults(modelopt(without(llama(), "lm_head"), (), config={**tied, "tie_word_embeddings": None})) == []


@pytest.mark.parametrize(
    ("entry", "is_read_by"), [("down_proj", "not TensorRT-LLM"), (f"{P}.mlp", "not SGLang and TensorRT-LLM")]
)
def test_an_entry_that_engines_read_differently(entry: str, is_read_by: str) -> None:
    entries = in_16_bits(llama(), DOWN, WIDTH, INNER)
    for leaf in ("gate_proj", "up_proj"):
        entries = in_16_bits(entries, f"{P}.mlp.{leaf}", INNER, WIDTH)
    entries = in_16_bits(entries, "model.layers.0.mlp.down_proj", WIDTH, INNER)
    excluded = ("lm_head", "model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj", entry)
    seen = [f for f in config_faults(modelopt(entries, excluded)) if f.rule == "exclude-read-differently"]
    assert DOWN in {fault.where for fault in seen}
    assert any(is_read_by in fault.message for fault in seen)


def test_mixed_groups_are_another_checks() -> None:
    """No more is said of a group that is stored in two formats than that."""
    assert faults(modelopt(in_16_bits(llama(), f"{P}.mlp.up_proj", INNER, WIDTH))) == []


@pytest.mark.parametrize(
    ("excluded", "entries"),
    [
        (("lm_head", "model.vision_tower*"), ["model.vision_tower*"]),
        (("lm_head", "lm_haed", "model.layers.7*"), ["lm_haed", "model.layers.7*"]),
        (("lm_head", "*.router"), ["*.router"]),
        (("lm_head*", "model.embed_tokens*", "model.embed_positions"), []),
    ],
)
def test_entries_that_name_nothing(excluded: tuple[str, ...], entries: list[str]) -> None:
    assert faults(modelopt(llama(), excluded)) == [("exclude-matches-nothing", entry) for entry in entries]


def test_classes_and_patterns_of_compressed_tensors() -> None:
    ignored = ("lm_head", "LlamaRMSNorm", "re:.*vision.*")
    assert faults(compressed(llama(**CT), ignored)) == [("exclude-matches-nothing", "re:.*vision.*")]


def test_an_entry_that_is_no_regular_expression() -> None:
    assert faults(compressed(llama(**CT), ("lm_head", "re:("))) == [("unknown-algorithm", "config.json")]


# ---------------------------------------------------------------- towers and drafts

SEEING = {"text_config": LLAMA, "vision_config": {"depth": 1}, "tie_word_embeddings": False}
TOWER = plain("model.visual.blocks.0.attn.qkv", 3 * WIDTH, WIDTH) | plain("model.visual.patch_embed.proj", WIDTH, WIDTH)


@pytest.mark.parametrize("entry", ["model.visual*", "visual*", "*visual*", "model.visual.blocks.0.attn.qkv"])
def test_a_tower_may_be_listed_by_either_of_its_names(entry: str) -> None:
    assert faults(modelopt(llama() | TOWER, ("lm_head", entry), config=SEEING)) == []


def test_a_tower_that_is_not_listed() -> None:
    """vLLM leaves it in 16 bits anyway, the others do not."""
    expected = [("kept-but-not-excluded", "model.visual.blocks.0.attn.qkv")]
    assert faults(modelopt(llama() | TOWER, config=SEEING)) == expected


def draft(root: str) -> Entries:
    layer = plain(f"{root}.eh_proj", WIDTH, 2 * WIDTH) | plain(f"{root}.enorm", WIDTH)
    return layer | plain(f"{root}.self_attn.q_proj", WIDTH, WIDTH) | plain(f"{root}.embed_tokens", VOCABULARY, WIDTH)


@pytest.mark.parametrize(("root", "where"), [("model.layers.2", "model.layers.2"), ("mtp.layers.0", "mtp")])
def test_a_draft_layer_is_named_once(root: str, where: str) -> None:
    assert faults(modelopt(llama() | draft(root))) == [("draft-layer-format", where)]
    assert faults(modelopt(llama() | draft(root), ("lm_head", f"{where}*"))) == []


def test_a_draft_layer_that_is_quantized_and_excluded() -> None:
    entries = llama() | nvfp4("mtp.layers.0.self_attn.o_proj", WIDTH, WIDTH)
    assert faults(modelopt(entries, ("lm_head", "mtp*"))) == [("draft-layer-format", "mtp")]


# ---------------------------------------------------------------- two files


DIFFERENT = {
    "algorithm": {"quant_algo": "FP8"},
    "cache": {"kv_cache_quant_algo": "FP8"},
    "list": {"exclude_modules": ["lm_head", f"{P}.mlp*"]},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_configs_that_disagree(name: str) -> None:
    reading = modelopt(llama(), nested=DIFFERENT[name])
    assert ("configs-disagree", "hf_quant_config.json") in faults(reading)


def test_a_list_that_only_one_engine_gets_is_said_once() -> None:
    reading = modelopt(moe(), ROUTED, config=MOE, nested_excluded=["lm_head"])
    assert faults(reading) == [("configs-disagree", "hf_quant_config.json")]


# ---------------------------------------------------------------- mixed formats

MIXED_ENTRIES = (
    ends()
    | fp8(f"{P}.self_attn.o_proj", WIDTH, WIDTH)
    | nvfp4(DOWN, WIDTH, INNER)
    | plain(f"{P}.mlp.x_proj", WIDTH, WIDTH)
)
LAYERS = {f"{P}.self_attn.o_proj": {"quant_algo": "FP8"}, DOWN: {"quant_algo": "NVFP4", "group_size": 16}}


def mixed(layers: dict[str, Any], entries: Entries = MIXED_ENTRIES) -> Any:
    said = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return modelopt(entries, (), quantization=said, nested=said)


def test_a_mixture_needs_no_list() -> None:
    reading = mixed(LAYERS)
    assert not reading.faults
    assert faults(reading) == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({f"{P}.mlp.up_proj": {"quant_algo": "FP8"}}, f"{P}.mlp.up_proj"),  # of which there is no tensor
        ({f"{P}.mlp.x_proj": {"quant_algo": "NVFP4"}}, f"{P}.mlp.x_proj"),  # which is in 16 bits
        ({DOWN: {"quant_algo": "FP8"}}, DOWN),
    ],
)
def test_entries_of_a_mixture_that_are_wrong(change: dict[str, Any], where: str) -> None:
    assert set(faults(mixed({**LAYERS, **change}))) == {("mixed-layers-mismatch", where)}


def test_experts_of_a_mixture_are_one_entry() -> None:
    entries = (
        ends() | nvfp4(f"{P}.mlp.experts.0.up_proj", WIDTH, WIDTH) | nvfp4(f"{P}.mlp.experts.1.up_proj", WIDTH, WIDTH)
    )
    assert faults(mixed({f"{P}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}, entries)) == []


# ---------------------------------------------------------------- head


@pytest.mark.parametrize(("tied", "rule"), [(True, "quantized-tied-head"), (False, "quantized-lm-head")])
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_quantized_head(tied: bool, rule: str, is_inner: bool) -> None:
    entries = without(llama(), "lm_head") | nvfp4("lm_head", VOCABULARY, WIDTH)
    said = {**LLAMA, "tie_word_embeddings": tied}
    config = {"text_config": said} if is_inner else said
    assert faults(modelopt(entries, (), config=config)) == [(rule, "lm_head")]


# ---------------------------------------------------------------- KV cache


def cache(*layers: int) -> Entries:
    return {f"model.layers.{i}.self_attn.{s}_proj.{s}_scale": ("F32", ()) for i in layers for s in "kv"}


FP8_CACHE = {"quantization": {"kv_cache_scheme": {"num_bits": 8}}, "nested": {"kv_cache_quant_algo": "FP8"}}


def test_a_cache_as_it_should_be() -> None:
    assert faults(modelopt(llama() | cache(0, 1), **FP8_CACHE)) == []


def test_a_cache_that_is_not_announced() -> None:
    assert faults(modelopt(llama() | cache(0, 1))) == [("kv-config-mismatch", "config.json")]


def test_a_cache_without_scales() -> None:
    assert faults(modelopt(llama(), **FP8_CACHE)) == [("kv-scales-missing", "config.json")]


def test_a_cache_with_scales_of_heads_has_some() -> None:
    entries = llama() | dict.fromkeys(cache(0, 1), ("F32", (2, 1)))
    reading = modelopt(entries, **FP8_CACHE)
    assert faults(reading) == []
    assert {fault.rule for fault in reading.faults} == {"kv-config-mismatch"}


# ---------------------------------------------------------------- more than codes and scales


def with_input_factors(*modules: str) -> Entries:
    return llama() | {f"{module}.pre_quant_scale": ("BF16", (INNER,)) for module in modules}


def test_awq_is_not_plain_nvfp4() -> None:
    assert faults(modelopt(with_input_factors(DOWN))) == [("format-mismatch", "config.json")]
    named = {"quantization": {"quant_algo": "NVFP4_AWQ"}, "nested": {"quant_algo": "NVFP4_AWQ"}}
    assert faults(modelopt(with_input_factors(DOWN), **named)) == []


def test_a_low_rank_part_is_not_plain_nvfp4() -> None:
    parts = {"a": (4, INNER), "b": (llama()[f"{DOWN}.weight"][1][0], 4)}
    entries = with_input_factors(DOWN)
    entries |= {f"{DOWN}.weight_quantizer._svdquant_lora_{name}": ("BF16", shape) for name, shape in parts.items()}
    (fault,) = config_faults(modelopt(entries))
    assert (fault.rule, fault.where, fault.is_fatal) == ("format-mismatch", "config.json", False)
    assert "low-rank branch" in fault.message
    named = {"quantization": {"quant_algo": "NVFP4_SVD"}, "nested": {"quant_algo": "NVFP4_SVD"}}
    assert faults(modelopt(entries, **named)) == []


def test_a_layer_without_scales_of_its_cache() -> None:
    reading = modelopt(llama() | cache(0), **FP8_CACHE)
    assert faults(reading) == [("kv-config-mismatch", f"{P}.self_attn")]


def test_attention_of_another_kind_needs_no_scales() -> None:
    """Linear attention has keys and values, and no cache."""
    entries = llama() | cache(0) | nvfp4(f"{P}.self_attn.z_proj", WIDTH, WIDTH)
    assert faults(modelopt(entries, **FP8_CACHE)) == []
    drafts = (
        llama()
        | cache(0, 1)
        | nvfp4("mtp.self_attn.k_proj", WIDTH, WIDTH)
        | nvfp4("mtp.self_attn.v_proj", WIDTH, WIDTH)
    )
    assert faults(modelopt(drafts, **FP8_CACHE)) == []


# ---------------------------------------------------------------- nothing to compare


def test_without_a_config_there_is_nothing_to_compare() -> None:
    reading = modelopt(llama())
    config = {key: value for key, value in reading.folder.config.items() if key != "quantization_config"}
    from blockscale.checkpoint.folder import Folder
    from blockscale.inspection.reading import read_surveyed

    bare = read_surveyed(Folder(reading.folder.path, config, reading.folder.tensors, ()))
    assert [fault.rule for fault in bare.faults] == ["no-quantization-config"]
    assert faults(bare) == []
    plain_model = read_surveyed(Folder(reading.folder.path, {}, {}, ()))
    assert faults(plain_model) == []

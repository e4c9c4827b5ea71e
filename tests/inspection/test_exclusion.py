"""Each engine's own way of matching a list, by examples that tell them apart."""

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockscale.inspection.checks.exclusion import (
    ENGINES,
    SGLANG,
    TENSORRT_LLM,
    VLLM,
    Layer,
    aliases,
    compressed_tensors,
    engine_layers,
    entry_of_module,
)

P = "model.layers.1"
ATTENTION = tuple(f"{P}.self_attn.{leaf}_proj" for leaf in "qkv")
GATE_UP = (f"{P}.mlp.gate_proj", f"{P}.mlp.up_proj")
MLA = (f"{P}.self_attn.q_a_proj", f"{P}.self_attn.kv_a_proj_with_mqa")
DOWN = (f"{P}.mlp.down_proj",)
EXPERTS = tuple(f"{P}.mlp.experts.{i}.{leaf}_proj" for i in range(2) for leaf in ("gate", "up", "down"))
HEAD = ("language_model.lm_head",)
ALL, NONE = {VLLM, SGLANG, TENSORRT_LLM}, set()

# modules of one layer, the list, the engines that leave it in 16 bits
CASES = [
    (DOWN, [], NONE),
    (DOWN, [f"{P}.mlp.down_proj"], ALL),
    (DOWN, [f"{P}*"], ALL),
    (DOWN, [f"{P}.*"], ALL),
    (DOWN, ["*.down_proj"], ALL),
    (DOWN, ["model.layers.10*"], NONE),
    (DOWN, ["down_proj"], {VLLM, SGLANG}),  # part of the name
    (DOWN, ["down"], {VLLM}),  # part of a part
    (DOWN, ["down*"], {SGLANG}),  # a part as a glob
    (DOWN, [f"{P}.mlp"], {VLLM}),  # a module above it
    (DOWN, [f"{P}.mlp.down_pro?"], {VLLM, TENSORRT_LLM}),
    (DOWN, [f"{P}.mlp.[d]own_proj"], ALL),
    (DOWN, [f"{P}.MLP.down_proj"], NONE),
    (DOWN, ["(", f"{P}.mlp.down_proj"], ALL),
    (DOWN, ["(*"], NONE),  # no regular expression, which SGLang takes it for
    (GATE_UP, list(GATE_UP), ALL),
    (GATE_UP, [f"{P}.mlp.gate"], {VLLM}),  # the router of other layers; here it lies in gate_up_proj
    (GATE_UP, [f"{P}.mlp.gate_up_proj"], ALL),
    (GATE_UP, ["*gate_proj"], {TENSORRT_LLM}),
    (GATE_UP, ["*gate*"], ALL),
    (ATTENTION, [f"{P}.self_attn*"], ALL),
    (ATTENTION, ["self_attn"], {VLLM, SGLANG}),
    (ATTENTION, [f"{P}.self_attn.qkv"], {VLLM}),
    (MLA, list(MLA), ALL),
    (MLA, ["model.layers.7.self_attn.kv_a_proj_with_mqa"], {SGLANG}),  # by the end of the entry alone
    (MLA, [f"{P}.self_attn.fused_qkv_a_proj*"], {VLLM, SGLANG}),
    (("model.layers.1.self_attn.q_b_proj",), ["model.layers.7.self_attn.q_b_proj"], {SGLANG}),
    (EXPERTS, [f"{P}.mlp.experts*"], ALL),
    (EXPERTS, [f"{P}.mlp.experts"], ALL),
    (EXPERTS, [f"{P}.mlp.experts.0.gate_proj"], {VLLM}),  # one expert's name stands for all
    (EXPERTS, [f"{P}.mlp.experts.*"], {VLLM}),  # the layer's name has no dot at its end
    (EXPERTS, ["experts"], {VLLM, SGLANG}),
    (HEAD, ["lm_head"], {VLLM, SGLANG}),
    (HEAD, ["*lm_head"], ALL),
    (("lm_head",), ["lm_head"], ALL),
]


@pytest.mark.parametrize(("modules", "entries", "expected"), CASES)
def test_who_leaves_a_layer_in_16_bits(modules: tuple[str, ...], entries: list[str], expected: set[str]) -> None:
    (layer,) = engine_layers(modules)
    assert {name for name, make in ENGINES.items() if make(entries)(layer).entry is not None} == expected


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_a_list_that_names_part_of_a_fused_layer(engine: str) -> None:
    (layer,) = engine_layers(ATTENTION)
    ruling = ENGINES[engine]([ATTENTION[0], ATTENTION[2], "lm_head"])(layer)
    assert ruling.part == (ATTENTION[0], ATTENTION[2])
    assert not ENGINES[engine](list(ATTENTION))(layer).part


def test_tensorrt_llm_goes_by_any_member() -> None:
    (layer,) = engine_layers(ATTENTION)
    ruling = ENGINES[TENSORRT_LLM]([ATTENTION[2]])(layer)
    assert ruling.entry == ATTENTION[2]
    assert not ruling.part


def test_layers_are_what_engines_build() -> None:
    layers = engine_layers(["lm_head", *ATTENTION, *EXPERTS, *GATE_UP, *DOWN, f"{P}.feed_forward.w1", f"{P}.x.q_proj"])
    assert [(layer.name_in(VLLM), len(layer.members)) for layer in layers] == [
        ("lm_head", 1),
        (f"{P}.self_attn.qkv_proj", 3),
        (f"{P}.mlp.experts", 6),
        (f"{P}.mlp.gate_up_proj", 2),
        (f"{P}.mlp.down_proj", 1),
        (f"{P}.feed_forward.w1", 1),  # alone, it is fused with nothing
        (f"{P}.x.q_proj", 1),
    ]


def test_one_expert_that_holds_all_is_still_experts() -> None:
    (layer,) = engine_layers([f"{P}.mlp.experts.gate_up_proj"])
    assert layer.is_experts
    assert layer.name_in(SGLANG) == f"{P}.mlp.experts"


COMPRESSED = [
    (DOWN, [f"{P}.mlp.down_proj"], True),
    (DOWN, ["down_proj"], False),
    (DOWN, [f"{P}*"], False),  # no glob
    (DOWN, ["re:.*down_proj"], True),
    (DOWN, ["re:down_proj"], False),  # anchored at the start
    (DOWN, ["re:model.*down"], True),  # and not at the end
    (DOWN, ["Linear"], True),
    (GATE_UP, [f"{P}.mlp.gate_up_proj"], False),
    (EXPERTS, ["re:.*experts.*"], True),
]


@pytest.mark.parametrize(("modules", "entries", "expected"), COMPRESSED)
def test_compressed_tensors(modules: tuple[str, ...], entries: list[str], expected: bool) -> None:
    (layer,) = engine_layers(modules)
    assert (compressed_tensors(entries)(layer).entry is not None) == expected


def test_compressed_tensors_takes_each_expert_for_itself() -> None:
    (layer,) = engine_layers(EXPERTS)
    assert compressed_tensors([r"re:.*experts\.1\."])(layer).part == EXPERTS[3:]


def test_targets_and_lists_match_alike() -> None:
    covers = entry_of_module(["lm_head", "re:.*gate$"])
    assert [covers(module) for module in ("lm_head", "a.mlp.gate", "a.mlp.gate_proj")] == [
        "lm_head",
        "re:.*gate$",
        None,
    ]


@pytest.mark.parametrize("module", ["model.visual.blocks.0.attn.qkv", "visual.blocks.0.attn.qkv"])
def test_aliases_of_a_multimodal_model(module: str) -> None:
    names = {layer.name for layer in aliases(Layer(module, (module,)))} | {module}
    assert {"model.visual.blocks.0.attn.qkv", "visual.blocks.0.attn.qkv"} <= names


NAMES = st.lists(st.sampled_from(["model", "layers", "1", "10", "mlp", "gate", "proj"]), min_size=1, max_size=5)
GLOBS = st.lists(st.sampled_from(["model", "layers", "1", "*", "mlp*", "ga?e", "[gp]ate"]), min_size=1, max_size=5)


@given(NAMES, GLOBS)
def test_globs_are_those_of_the_standard_library(name: list[str], glob: list[str]) -> None:
    module, pattern = ".".join(name), ".".join(glob)
    layer = Layer(module, (module,))
    assert (ENGINES[TENSORRT_LLM]([pattern])(layer).entry is not None) == fnmatch.fnmatchcase(module, pattern)
    by_parts = "?" not in pattern and any(fnmatch.fnmatchcase(part, pattern) for part in (module, *name))
    assert (ENGINES[SGLANG]([pattern])(layer).entry is not None) == by_parts
    expected = pattern in module or fnmatch.fnmatchcase(module, pattern)
    assert (ENGINES[VLLM]([pattern])(layer).entry is not None) == expected


@pytest.mark.parametrize("pattern", ["*a" * 40 + "b", "(a+)+$*", "[a-z]?" * 40 + "0*", "(((((*"])
def test_no_entry_keeps_a_matcher_busy(pattern: str) -> None:
    name = "a" * 200
    layer = Layer(name, (name,))
    for make in ENGINES.values():
        assert make([pattern])(layer).entry is None

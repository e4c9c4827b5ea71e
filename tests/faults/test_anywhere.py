"""The same faults on any layer of any checkpoint, drawn from a seed: no finding depends on where the table breaks."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import blockscale

from .bases import GOOD
from .breaking_tensors import (
    Break,
    byte,
    drop,
    fill,
    global_name,
    move_scale,
    reciprocal,
    set_bit,
    swap_nibbles,
    unquantize,
    zero_scales,
)
from .inject import Bases
from .raw import GOLDEN, Tensors, load, modules_of

SEEDS = range(12)
ROUNDS = 6
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
Make = Callable[[str, Tensors, random.Random], Break]


def scale(module: str) -> str:
    return f"{module}.weight_scale"


def position(name: str, tensors: Tensors, draw: random.Random) -> int:
    return draw.randrange(tensors[name].numel())


ON_A_LAYER: dict[str, Make] = {
    "nan-block-scale": lambda m, t, draw: byte(scale(m), draw.choice((0x7F, 0xFF)), position(scale(m), t, draw)),
    "negative-block-scale": lambda m, t, draw: set_bit(scale(m), 0x80, position(scale(m), t, draw)),
    "zero-block-scales": lambda m, t, draw: zero_scales(m, draw.randrange(3)),
    "bad-global-scale": lambda m, t, draw: fill(
        global_name(t, m), draw.choice((0.0, float("nan"), float("inf"), -2.0))
    ),
    "reversed-global-scale": lambda m, t, draw: reciprocal(global_name(t, m)),
    "missing-block-scale": lambda m, t, draw: drop(scale(m)),
    "missing-global-scale": lambda m, t, draw: drop(global_name(t, m)),
}
ON_A_GROUP: dict[str, Make] = {
    "fused-global-scale-mismatch": lambda m, t, draw: move_scale(m, draw.choice((1.01, 1.5, 2.0, 7.0, 100.0))),
}
# base -> its 16-bit model, where one is known
NVFP4_BASES = {
    "modelopt_llama_nvfp4": "base_llama",
    "modelopt_qwen3moe_nvfp4": "base_qwen3moe",
    "ct_llama_nvfp4": "base_llama",
    "ct_llama_nvfp4a16": "base_llama",
    "modelopt_llama_w4a16_nvfp4": "base_llama",
    "modelopt_llama_nvfp4_four_over_six": "base_llama",
    "draft layer": None,
    "tied head, ct": None,
    "vision tower": None,
}
assert NVFP4_BASES.keys() <= GOOD.keys()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_of_any_layer_is_found_on_it(seed: int, bases: Bases, tmp_path: Path) -> None:
    draw = random.Random(seed)
    for i in range(ROUNDS):
        name = draw.choice(list(NVFP4_BASES))
        tensors = load(bases[name])
        module = draw.choice(modules_of(tensors))
        leaf = module.rpartition(".")[2]
        makes = {**ON_A_LAYER, **(ON_A_GROUP if leaf in FUSED else {})}
        rule = draw.choice(list(makes))
        folder = Path(shutil.copytree(bases[name], tmp_path / f"{i}"))
        makes[rule](module, tensors, draw)(folder)
        findings = [f for f in blockscale.lint(folder).findings if f.name == rule]
        parent = module.rpartition(".")[0]
        places = {f.layer for f in findings}
        expected = {p for p in places if p.startswith(f"{parent}.") and leaf in p} if rule in ON_A_GROUP else {module}
        # where several layers lack the same, a finding may stand for the set of experts
        assert expected, (name, module, rule, places)
        assert expected & places, (name, module, rule, places)


@pytest.mark.parametrize("seed", SEEDS)
def test_swapped_nibbles_of_any_layer_are_found_beside_the_source(seed: int, bases: Bases, tmp_path: Path) -> None:
    draw = random.Random(seed)
    name = draw.choice([n for n, source in NVFP4_BASES.items() if source])
    module = draw.choice(modules_of(load(bases[name])))
    folder = Path(shutil.copytree(bases[name], tmp_path / "broken"))
    swap_nibbles(module)(folder)
    report = blockscale.lint(folder, source=GOLDEN / str(NVFP4_BASES[name]))
    assert [f.layer for f in report.findings if f.name == "swapped-nibbles"] == [module]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_layer_left_in_16_bits_without_a_word_is_found(seed: int, bases: Bases, tmp_path: Path) -> None:
    draw = random.Random(seed)
    name = draw.choice([n for n in NVFP4_BASES if "llama" in n])
    module = draw.choice(modules_of(load(bases[name])))
    folder = Path(shutil.copytree(bases[name], tmp_path / "broken"))
    unquantize(module)(folder)
    rules = {f.name for f in blockscale.lint(folder).findings if f.severity == "error"}
    assert rules & {"kept-but-not-excluded", "fused-formats-differ"}

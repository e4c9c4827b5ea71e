"""The injector itself: it covers every rule and kind, changes what it says, and nothing else."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from .bases import GOOD
from .breaking_tensors import as_it_is, nvfp4, swizzled_order
from .fault import KINDS, Fault
from .inject import FAULTS, NO_ERRORS, RULES, Bases, broken, severity
from .raw import GOLDEN, decode, load, modules_of, names, shards

CHANGING = [fault for fault in FAULTS if fault.break_ is not as_it_is]
RIGHT_ALONE = [fault for fault in CHANGING if fault.is_right_alone and not fault.rule.startswith(("negative", "bad"))]
IDS = [f"{fault.rule}: {fault.name} ({fault.base})" for fault in CHANGING]


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_every_rule_has_a_fault_and_every_kind_too() -> None:
    assert {fault.rule for fault in FAULTS} == RULES.keys()
    assert {fault.ref for fault in FAULTS} == KINDS.keys()
    assert NO_ERRORS.keys() <= RULES.keys()


def test_the_rules_are_the_products_own() -> None:
    from blockscale.inspection.rules import RULES as OWN

    assert {name: (rule.code, rule.severity) for name, rule in OWN.items()} == {
        name: (code, severity(name)) for name, code in RULES.items()
    }


def test_names_are_unique() -> None:
    twice = [name for name, count in Counter((f.name, f.base, f.rule) for f in FAULTS).items() if count > 1]
    assert not twice


@pytest.mark.parametrize("fault", CHANGING, ids=IDS)
def test_a_fault_changes_its_copy_and_leaves_its_base(fault: Fault, bases: Bases, tmp_path: Path) -> None:
    base = bases[fault.base]
    before = files(base)
    assert files(broken(fault, base, tmp_path)) != before
    assert files(base) == before


@pytest.mark.parametrize("fault", RIGHT_ALONE, ids=lambda fault: fault.name)
def test_linears_that_are_said_to_be_right_alone_are_near_the_base(fault: Fault, bases: Bases, tmp_path: Path) -> None:
    """By E4M3's rounding of the block scale: 1/16, and half its subnormal step."""
    before, after = load(bases[fault.base]), load(broken(fault, bases[fault.base], tmp_path))
    assert modules_of(before) == modules_of(after)
    changed = 0
    for module in modules_of(before):
        right, found = decode(before, module), decode(after, module)
        if fault.rule == "subnormal-block-scales" and not torch.equal(right, found):
            slack = right.abs() / 16 + 6 * 2.0**-10 + 6 * 2.0**-9
        else:
            slack = right.abs() / 16 if fault.bound else 1e-6 * right.abs()
        assert ((found - right).abs() <= slack).all()
        changed += not all(torch.equal(before[n], after[n]) for n in before if n.startswith(f"{module}."))
    assert changed


@pytest.mark.parametrize("name", ["modelopt_llama_nvfp4", "ct_llama_nvfp4", "ct_llama_mxfp4"])
def test_decoding_by_hand_comes_near_the_source(name: str) -> None:
    quantized, source = load(GOLDEN / name), load(GOLDEN / "base_llama")
    modules = modules_of(quantized)
    assert len(modules) == 14
    for module in modules:
        right = source[f"{module}.weight"].double()
        assert (decode(quantized, module) - right).norm() < 0.15 * right.norm()


def test_quantizing_by_hand_makes_the_golden_scales_and_values() -> None:
    module = "model.layers.1.mlp.down_proj"
    golden = load(GOLDEN / "modelopt_llama_w4a16_nvfp4")
    made = nvfp4(load(GOLDEN / "base_llama")[f"{module}.weight"], module, input_scale=None)
    for suffix in ("weight_scale", "weight_scale_2"):
        mine, theirs = (t[f"{module}.{suffix}"].reshape(-1).view(torch.uint8) for t in (made, golden))
        assert torch.equal(mine, theirs)
    assert torch.equal(decode(made, module), decode(golden, module))


def test_the_swizzle_by_hand_is_a_permutation_and_that_of_the_formats() -> None:
    from blockscale.formats.layout import swizzle

    order = swizzled_order(256, 8)
    assert sorted(order.tolist()) == list(range(256 * 8))
    scale = torch.arange(256 * 8).remainder(251).to(torch.uint8).view(256, 8)
    assert torch.equal(scale.view(-1)[order], swizzle(scale))


@pytest.mark.parametrize("name", GOOD)
def test_bases_open(name: str, bases: Bases) -> None:
    from blockscale.checkpoint.reader import open_checkpoint

    checkpoint = open_checkpoint(bases[name])
    assert checkpoint.quantized is not None
    assert checkpoint.folder.tensors.keys() == names(bases[name])
    assert len(shards(bases[name])) == int(name.split(" in ")[1].split()[0] if " in " in name else 1)

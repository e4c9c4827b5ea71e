"""`lint(folder, repair=out)`: what can be put right without loss is, and the rest is refused by name."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale.checkpoint.load import load_linear
from blockscale.checkpoint.reader import Checkpoint, open_checkpoint
from blockscale.errors import BlockscaleError

from .fault import Fault
from .inject import FAULTS, Bases, broken
from .linting import found, lint, serious
from .raw import Tensors, decode, load, modules_of
from .test_inject import files

LM_HEAD = "quantized-lm-head"
TWO_ROUNDINGS = 2 * 2.0**-24 + 2.0**-48
REPAIRABLE = [fault for fault in FAULTS if fault.is_repairable]
REFUSED = [fault for fault in FAULTS if not fault.is_repairable]


def identify(fault: Fault) -> str:
    return f"{fault.rule}: {fault.name} ({fault.base})"


def steps(tensors: Tensors, module: str) -> Tensor:
    """float64 [N, K]: block scale times global scale of every element."""
    ones = {**tensors}
    for name in (f"{module}.weight", f"{module}.weight_packed"):
        if name in ones:
            ones[name] = torch.full_like(ones[name], 0x22)  # two codes of 1
    return decode(ones, module)


def values(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """fp32, as blockscale itself reads them."""
    assert checkpoint.quantized is not None
    linears = checkpoint.quantized.linears
    return {name: load_linear(linear, torch.float32).weight.dequantize() for name, linear in linears.items()}


@pytest.mark.parametrize("fault", REPAIRABLE, ids=identify)
def test_a_repair_lints_clean_and_keeps_the_values(fault: Fault, bases: Bases, tmp_path: Path) -> None:
    base = bases[fault.base]
    folder, out = broken(fault, base, tmp_path), tmp_path / "out"
    before = files(folder)
    lint(folder, fault, repair=out)
    assert files(folder) == before
    report = lint(out, fault)
    assert {line.split()[1] for line in serious(report)} <= {*fault.leaves}, serious(report)
    assert report.ok
    assert not found(report, fault)

    right, repaired = load(folder if fault.is_right_alone else base), load(out)
    if LM_HEAD in fault.leaves:  # packed by the fault itself
        right = {**right, **{n: t for n, t in load(folder).items() if n.startswith("lm_head.")}}
    read = values(open_checkpoint(out))
    as_in_base = values(open_checkpoint(base))
    packed = [module for module in modules_of(right) if module in read]
    assert as_in_base.keys() - read.keys() <= {fault.layer}  # which the fault itself left in 16 bits
    for module in packed:
        expected, got = decode(right, module), decode(repaired, module)
        if fault.bound:
            assert ((got - expected).abs() <= fault.bound * steps(right, module)).all(), module
        else:
            assert torch.equal(got, expected), module
        # blockscale works in fp32: a divisor's reciprocal is rounded, and the product with it
        assert ((read[module].double() - got).abs() <= TWO_ROUNDINGS * got.abs() + 2.0**-149).all(), module
    for module in read.keys() - packed:
        assert torch.equal(read[module], as_in_base[module]), module


@pytest.mark.parametrize("fault", REPAIRABLE, ids=identify)
def test_a_repair_leaves_the_rest_as_it_is(fault: Fault, bases: Bases, tmp_path: Path) -> None:
    """Every tensor that is no part of a quantized linear, byte for byte, and every file that holds no weights."""
    base = bases[fault.base]
    folder, out = broken(fault, base, tmp_path), tmp_path / "out"
    lint(folder, fault, repair=out)
    kept, found_now = dict(open_checkpoint(base).kept), load(out)
    if LM_HEAD in fault.leaves:
        kept.pop("lm_head.weight", None)
    tensors = load(base)
    for name in kept:
        if name in found_now:
            assert torch.equal(
                found_now[name].reshape(-1).view(torch.uint8), tensors[name].reshape(-1).view(torch.uint8)
            )
    assert kept.keys() - found_now.keys() <= {f"{fault.layer}.weight"}
    missing = {file.name for file in base.iterdir()} - {file.name for file in out.iterdir()}
    assert all(name.endswith((".safetensors", ".index.json")) for name in missing)


@pytest.mark.parametrize("fault", REFUSED, ids=identify)
def test_what_would_lose_something_is_not_made_to_look_right(fault: Fault, bases: Bases, tmp_path: Path) -> None:
    """No output, or one that still says what is wrong."""
    folder, out = broken(fault, bases[fault.base], tmp_path), tmp_path / "out"
    before = files(folder)
    with contextlib.suppress(BlockscaleError):
        lint(folder, fault, repair=out)
    assert files(folder) == before
    assert not out.exists() or found(lint(out, fault), fault)
    assert {path.name for path in tmp_path.iterdir()} <= {"broken", "out"}

"""Engines load every family: the rules of their loaders, applied to what is written."""

from collections.abc import Mapping

import pytest
from checkpoint.loader_rules import ENGINES, Refused

from .conftest import W4A4, W4A16, Make, Source
from .published import with_mxfp4_experts
from .table import FAMILIES, KEPT, KEPT_BELOW, Family


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("recipe", [W4A16, W4A4])
@pytest.mark.parametrize("engine", ENGINES)
def test_model_optimizers_dialect(
    engine: str, recipe: str, family: Family, quantized: Make, converted: Make, source: Source
) -> None:
    base = source(family) if family.publish is not with_mxfp4_experts else converted(source(family), "bf16")
    methods = ENGINES[engine](quantized(family, recipe), base)
    check_methods(methods, "NVFP4" if recipe == W4A4 else "W4A16_NVFP4")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.model != "gpt_oss"], ids=str)
@pytest.mark.parametrize("recipe", [W4A16, W4A4])
@pytest.mark.parametrize("engine", ENGINES)
def test_compressed_tensors(
    engine: str, recipe: str, family: Family, quantized: Make, converted: Make, source: Source
) -> None:
    folder = converted(quantized(family, recipe), "compressed-tensors")
    base = converted(folder, "bf16") if family.has_stacks else source(family)
    if engine == "TensorRT-LLM" and recipe == W4A16:
        with pytest.raises(Refused, match="NVFP4 weights want NVFP4 activations"):
            ENGINES[engine](folder, base)
        return
    check_methods(ENGINES[engine](folder, base), "CT_NVFP4" if recipe == W4A4 else "CT_NVFP4A16")


def check_methods(methods: Mapping[str, str], packed: str) -> None:
    """Heads, routers, towers and draft layers stay; everything else is packed."""
    kept = {prefix for prefix, method in methods.items() if method == "NONE"}
    assert set(methods.values()) - {"NONE"} == {packed}
    assert {p for p in kept if p.rpartition(".")[2] not in KEPT and not any(part in p for part in KEPT_BELOW)} == set()
    assert not any(part in p for p in methods.keys() - kept for part in KEPT_BELOW)

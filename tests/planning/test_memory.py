"""What lies in a GPU's memory, by hand on a small case and against known engines' behaviour."""

import pytest

from blockscale.planning.hardware.catalogue import find_gpu
from blockscale.planning.models.architecture import Part, from_config
from blockscale.planning.models.model import presets
from blockscale.planning.models.weights import weights_of
from blockscale.planning.speed.layout import parse_layout
from blockscale.planning.speed.memory import kv_bytes_per_token, plan_memory, sequence_bytes
from blockscale.planning.speed.roofline import Deployment


def deployment(model: str, fmt: str, gpu: str, layout: str = "tp1", cache: str = "fp8") -> Deployment:
    a = from_config(presets()[model], model)
    return Deployment(a, weights_of(a, fmt), find_gpu(gpu), parse_layout(layout), cache)


@pytest.mark.parametrize(
    ("model", "bf16", "fp8", "nvfp4"),
    [
        ("llama-3.1-8b", 131_072, 65_536, 36_864),
        ("llama-3.1-70b", 327_680, 163_840, 92_160),
        ("llama-3.1-405b", 516_096, 258_048, 145_152),
        ("qwen3-235b-a22b", 192_512, 96_256, 54_144),
        ("deepseek-r1", 70_272, 35_136, 19_764),
    ],
)
def test_published_cache_bytes(model: str, bf16: int, fp8: int, nvfp4: int) -> None:
    a = from_config(presets()[model])
    assert [kv_bytes_per_token(a, cache) for cache in ("bf16", "fp8", "nvfp4")] == [bf16, fp8, nvfp4]


def test_a_sequence_takes_whole_pages() -> None:
    d = deployment("llama-3.1-8b", "nvfp4", "h200")
    assert sequence_bytes(d, 1) == sequence_bytes(d, 64) == 64 * 65_536
    assert sequence_bytes(d, 65) == 128 * 65_536


def test_more_gpus_than_heads_hold_copies() -> None:
    at_8, at_16 = (sequence_bytes(deployment("llama-3.1-70b", "fp8", "h200", f"tp{n}"), 1024) for n in (8, 16))
    assert at_8 == at_16 == 1024 * 163_840 / 8


def test_every_gpu_holds_a_latent_cache() -> None:
    one, eight = (sequence_bytes(deployment("deepseek-r1", "nvfp4", "b200", n), 1024) for n in ("tp1", "tp8"))
    assert one == eight == 1024 * 35_136


def test_spreading_experts_copies_attention() -> None:
    """Each GPU holds all of the attention and an eighth of the experts."""
    d = deployment("deepseek-r1", "nvfp4", "b200", "dep8")
    assert d.per_gpu(Part.ATTENTION) == d.weights.bytes_of(Part.ATTENTION)
    assert d.per_gpu(Part.EXPERTS) == d.weights.bytes_of(Part.EXPERTS) / 8


def test_what_fits_on_an_h200() -> None:
    """70B: bf16 does not fit one H200, NVFP4 does with room for many."""
    assert not plan_memory(deployment("llama-3.1-70b", "bf16", "h200"), 2048).fits
    plan = plan_memory(deployment("llama-3.1-70b", "nvfp4", "h200"), 2048)
    assert plan.fits
    assert plan.max_sequences == int(plan.free_bytes // plan.sequence_bytes)
    assert 200 < plan.max_sequences < 300
    assert sum(plan.parts.values()) + plan.free_bytes == pytest.approx(plan.usable_bytes)


def test_each_copy_of_attention_admits_its_own() -> None:
    plan = plan_memory(deployment("deepseek-r1", "nvfp4", "b200", "dep8"), 2048)
    assert plan.max_sequences == 8 * int(plan.free_bytes // plan.sequence_bytes)

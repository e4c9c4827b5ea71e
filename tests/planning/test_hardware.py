"""The catalogue: names, units, native formats, and files that users write."""

from pathlib import Path

import pytest

from blockscale.errors import UsageError
from blockscale.planning.answer import sentences
from blockscale.planning.answer.language import language
from blockscale.planning.hardware.catalogue import catalogue, find_gpu, read_gpu
from blockscale.planning.planner import plan
from blockscale.planning.report.page import render_plan


def test_every_entry_is_whole() -> None:
    for key, gpu in catalogue().items():
        assert gpu.memory_bytes > 2e10, key
        assert 2e11 < gpu.bandwidth.value < 3e13, key
        for figure in (gpu.bandwidth, *gpu.peaks.values()):
            assert figure.low <= figure.value <= figure.high, key


def test_peaks_are_dense() -> None:
    """Headlines count zeros that sparsity skips."""
    assert find_gpu("b200").peak("fp4").value == 9e15
    assert find_gpu("gb200").peak("fp8").value == 5e15
    assert find_gpu("rtx-5090").peak("fp4").value == pytest.approx(1.676e15)
    assert find_gpu("b300").peak("int8").value < 2e14  # Blackwell Ultra gave its int8 units up


@pytest.mark.parametrize(
    ("gpu", "weight", "activation", "operand", "is_native"),
    [
        ("b200", "nvfp4", "nvfp4", "fp4", True),
        ("b200", "nvfp4", None, "bf16", False),
        ("h200", "nvfp4", "nvfp4", "bf16", False),
        ("h200", "nvfp4", "fp8", "fp8", False),
        ("h200", "fp8", "fp8", "fp8", True),
        ("a100", "fp8", "fp8", "bf16", False),
        ("mi355x", "nvfp4", "nvfp4", "bf16", False),
        ("mi355x", "mxfp4", "mxfp4", "fp4", True),
        ("b200", "mxfp4", "mxfp8", "fp8", True),
        ("b200", "bf16", None, "bf16", True),
        ("b200", "int4", None, "bf16", False),
    ],
)
def test_what_is_native(gpu: str, weight: str, activation: str | None, operand: str, is_native: bool) -> None:
    assert find_gpu(gpu).compute_format(weight, activation) == (operand, is_native)


@pytest.mark.parametrize("name", ["H200", "nvidia-h200", "h200_sxm", "B200", "GB10", "rtx 5090"])
def test_names_people_write(name: str) -> None:
    assert find_gpu(name).memory_bytes > 0


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match="no GPU 'h20o'") as caught:
        find_gpu("h20o")
    assert "h200" in caught.value.hint


def test_a_gpu_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("memory_bytes = 50e9\nbandwidth_tb_per_s = 2.0\npeak_tflops = { bf16 = 100, fp8 = 200 }\n")
    gpu = find_gpu(str(file))
    assert (gpu.key, gpu.memory_bytes, gpu.bandwidth.value, gpu.peak("fp8").value) == ("mine", 50e9, 2e12, 2e14)
    assert gpu.compute_format("nvfp4", "nvfp4") == ("bf16", False)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("memory_bytes = 1", "lacks bandwidth_tb_per_s, peak_tflops"),
        ("memory_bytes = 'much'\nbandwidth_tb_per_s = 1\npeak_tflops = {}", "wrong type"),
        ("memory_bytes = [", "not valid TOML"),
        ("memory_bytes = 1\nbandwidth_tb_per_s = 1\npeak_tflops = 3", "wrong type"),
    ],
)
def test_a_file_that_makes_no_sense(text: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=what) as caught:
        read_gpu(file)
    assert caught.value.hint
    with pytest.raises(UsageError, match="cannot be read"):
        read_gpu(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("change", "what", "unit"),
    [
        ("memory_bytes = 96", "memory_bytes", "bytes: 96 GB"),
        ("bandwidth_tb_per_s = 1792", "bandwidth_tb_per_s", "TB/s: 1792 GB/s are 1.792"),
        ("peak_tflops = { bf16 = 2_000_000_000_000_000 }", "peak_tflops", "TFLOP/s"),
        ("tdp_watts = 0.7", "tdp_watts", "watts of one board"),
        ("link = { gb_per_s = 900_000_000_000, domain = 8 }", "link.gb_per_s", "GB/s of a GPU"),
        ("system = { name = 'box', gpus = 8, kw = 10200 }", "system.kw", "kilowatts of the system"),
    ],
)
def test_figures_in_another_unit(change: str, what: str, unit: str, tmp_path: Path) -> None:
    entry = {"memory_bytes": "96e9", "bandwidth_tb_per_s": "1.8", "peak_tflops": "{ bf16 = 500 }"}
    name, value = change.split(" = ", 1)
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(f"{key} = {text}" for key, text in {**entry, name: value}.items()))
    with pytest.raises(UsageError, match=f"{what} of mine is far from any GPU's") as caught:
        read_gpu(file)
    assert unit in caught.value.hint


def test_ranges_of_announced_gpus_widen_what_is_predicted() -> None:
    """Between 13 and 22 TB/s, and between a peak and twice of it, no interval is that of a GPU that was measured."""
    rubin, b200 = (plan("llama-3.1-8b", gpu=name) for name in ("rubin", "b200"))
    assert rubin.itl_ms is not None
    assert b200.itl_ms is not None
    assert rubin.itl_ms.high / rubin.itl_ms.value > 1.05 * b200.itl_ms.high / b200.itl_ms.value
    quick, slow = find_gpu("rubin").ends
    assert (slow.bandwidth.value, quick.bandwidth.value) == (13e12, 22e12)
    assert slow.peak("bf16").value <= find_gpu("rubin").peak("bf16").value < quick.peak("bf16").value
    assert not find_gpu("b200").is_uncertain


def test_what_cannot_be_bought_is_said_before_any_figure() -> None:
    words = language("en")
    result = plan("llama-3.1-8b", gpu="h100", compare=["rubin"])
    (banner,) = sentences.banners(result, words)
    assert "not for sale" in banner
    assert banner not in sentences.notices(result, words)
    page = render_plan(result)
    assert page.index("not for sale") < page.index("The answer")
    assert sentences.banners(plan("llama-3.1-8b", gpu="b300"), words) == []

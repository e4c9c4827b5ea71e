"""What runs natively where. Needs nothing: machines are described, and one is not there."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from blockscale.errors import UsageError
from blockscale.planning.hardware import machine
from blockscale.planning.hardware.catalogue import catalogue, find_gpu
from blockscale.planning.hardware.doctor import doctor, verdicts, version_numbers
from blockscale.planning.hardware.machine import Device, Machine, catalogue_entry, parse_nvidia_smi


def modes(gpu: str, **versions: str) -> dict[str, str]:
    return {f.format: f.mode.value for f in doctor(gpu, **versions).gpus[0].formats}


def test_native_and_emulated_by_generation() -> None:
    new = {"driver": "580.95", "cuda": "13.0", "torch": "2.10", "triton": "3.6"}
    assert set(modes("b200", **new).values()) == {"native", "emulated"}
    assert [f for f, mode in modes("b200", **new).items() if mode == "emulated"] == ["int4"]
    assert [f for f, mode in modes("h200", **new).items() if mode == "native"] == ["fp8", "bf16"]
    assert [f for f, mode in modes("a100", **new).items() if mode == "native"] == ["bf16"]
    assert [f for f, mode in modes("mi355x", rocm="7.0").items() if mode == "emulated"] == ["nvfp4", "int4"]


@pytest.mark.parametrize(
    ("gpu", "versions", "blocking"),
    [
        ("b200", {"driver": "550.54"}, "driver 550.54 (570.26 is needed)"),
        ("b200", {"cuda": "12.4"}, "CUDA 12.4 (12.8 is needed)"),
        ("b300", {"cuda": "12.8"}, "CUDA 12.8 (12.9 is needed)"),
        ("b200", {"torch": "2.6"}, "torch 2.6 (2.7 is needed)"),
        ("mi355x", {"rocm": "6.2"}, "ROCm 6.2 (7.0 is needed)"),
        ("mi355x", {"cuda": "12.8"}, "CUDA 12.8 (ROCm 7.0 is needed)"),
        ("h200", {"driver": "570.86", "cuda": "13.0"}, "driver 570.86 (580.65 is needed by CUDA 13.0)"),
    ],
)
def test_a_version_that_blocks_everything_is_named(gpu: str, versions: dict, blocking: str) -> None:
    for verdict in doctor(gpu, **versions).gpus[0].formats:
        assert verdict.mode.value == "impossible"
        assert blocking in verdict.blocking


def test_a_version_that_blocks_one_format_is_named() -> None:
    formats = {f.format: f for f in doctor("b200", driver="570.86", cuda="12.8", torch="2.7").gpus[0].formats}
    assert formats["nvfp4"].mode.value == "emulated"
    assert formats["nvfp4"].blocking == ("torch 2.7 (2.8 is needed)",)
    assert formats["mxfp8"].mode.value == "native"
    old = {f.format: f for f in doctor("b200", triton="3.2").gpus[0].formats}
    assert old["nvfp4"].blocking == ("triton 3.2 (3.3 is needed)",)
    assert old["fp8"].mode.value == "native"


def test_a_branch_of_drivers_is_taken_at_its_word() -> None:
    assert modes("b200", driver="570")["nvfp4"] == "native"
    assert modes("b200", driver="565")["nvfp4"] == "impossible"


def test_what_was_not_given_is_said() -> None:
    assert doctor("b200", driver="580").unchecked == ("toolkit", "torch", "triton")


def test_a_described_gpu(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(
        'name = "T4"\nvendor = "NVIDIA"\ncapability = "7.5"\nmemory_bytes = 16000000000\n'
        "bandwidth_tb_per_s = 0.32\npeak_tflops = { bf16 = 65 }\n"
    )
    diagnosis = doctor(str(file))
    assert {f.operand for f in diagnosis.gpus[0].formats} == {"fp16"}
    assert {f.mode.value for f in diagnosis.gpus[0].formats} == {"emulated"}


GOOD = "memory_bytes = 48000000000\nbandwidth_tb_per_s = 1\npeak_tflops = { bf16 = 10 }\n"
BAD = (
    *("", "memory_bytes = 'x'", "= 1", "[gpu]\na = 1\n[gpu.b]\n", "peak_tflops = 3"),
    *(
        GOOD.replace("48000000000", "-4"),
        GOOD.replace("per_s = 1", "per_s = 0"),
        GOOD.replace("per_s = 1", "per_s = nan"),
    ),
    *(GOOD.replace("= 10", "= 0"), GOOD.replace("= 10", "= { value = 1, low = 2, high = 3 }")),
    *(GOOD + 'native = "nvfp4"', GOOD + "link = 3", GOOD + "system = { gpus = 0 }", GOOD + "tdp_watts = -1"),
    *(GOOD + "all_in_kw = 'x'", GOOD + "link = { gb_per_s = inf }"),
)


@pytest.mark.parametrize("text", BAD)
def test_a_file_that_describes_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "my.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        doctor(str(file))
    assert caught.value.hint


def test_every_gpu_of_the_catalogue_has_verdicts() -> None:
    for gpu in catalogue().values():
        assert len(list(verdicts(gpu, Machine()))) == 7


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    diagnosis = doctor()
    assert diagnosis.gpus == ()
    assert "no NVIDIA driver" in diagnosis.machine.reason
    data = diagnosis.to_dict()
    assert data["ops"] is None
    assert data["formats"] == {}


def test_nvidia_smi() -> None:
    text = "NVIDIA H200, 570.86.15, 143771, 9.0\nNVIDIA H200, 570.86.15, 143771, 9.0\n"
    devices, driver, reason = parse_nvidia_smi(text)
    assert devices == (Device("NVIDIA H200", "9.0", 143771 * 2**20),) * 2
    assert (driver, reason) == ("570.86.15", "")
    assert catalogue_entry(devices[0]) == find_gpu("h200")
    assert parse_nvidia_smi("No devices were found\n")[0] == ()


@pytest.mark.parametrize(
    ("name", "capability", "mebibytes", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "9.0", 81559, "h100"),
        ("NVIDIA A100-SXM4-40GB", "8.0", 40960, "a100-40gb"),
        ("NVIDIA B200", "10.0", 183359, "b200"),
        ("NVIDIA GeForce RTX 5090", "12.0", 32607, "rtx-5090"),
        ("NVIDIA GeForce RTX 4090", "8.9", 24564, "rtx-4090"),
        ("Quadro T1000", "7.5", 4096, None),
    ],
)
def test_devices_are_found_in_the_catalogue(name: str, capability: str, mebibytes: int, key: str | None) -> None:
    found = catalogue_entry(Device(name, capability, mebibytes * 2**20))
    assert (found and found.key) == key


def test_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with NVML's functions: two GPUs of one kind are one entry."""

    class NVMLError(Exception):
        pass

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda _: b"NVIDIA B200",
        nvmlDeviceGetCudaComputeCapability=lambda _: (10, 0),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=183359 * 2**20),
        nvmlSystemGetDriverVersion=lambda: "570.86.15",
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(machine, "_installed_torch", lambda: ("2.9.0", "CUDA 12.8"))
    (gpu,) = doctor().gpus
    assert (gpu.name, gpu.count, gpu.capability) == ("NVIDIA B200", 2, "10.0")
    assert {f.format: f.mode.value for f in gpu.formats}["nvfp4"] == "native"
    monkeypatch.setattr(machine, "_installed_torch", lambda: ("2.9.0", None))
    (gpu,) = doctor().gpus
    assert "built for the CPU alone" in gpu.formats[0].blocking[0]

    def fails() -> None:
        raise NVMLError("driver not loaded")

    fake.nvmlInit = fails
    assert "driver not loaded" in doctor().machine.reason


@pytest.mark.parametrize("option", ["driver", "cuda", "rocm", "torch", "triton"])
def test_what_is_no_version(option: str) -> None:
    with pytest.raises(UsageError, match=f"--{option} new"):
        doctor("b200", **{option: "new"})


def test_two_toolkits() -> None:
    with pytest.raises(UsageError, match="two toolkits"):
        doctor("b200", cuda="12.8", rocm="7.0")


def test_version_numbers() -> None:
    assert version_numbers("2.13.0+cpu") == (2, 13, 0)
    assert version_numbers("TBC") is None

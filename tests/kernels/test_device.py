"""What a device is described by. Needs nothing."""

import pytest
import torch

from blockscale.errors import FormatError
from blockscale.kernels.device import Device, describe


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 3), "sm_103a"), ((12, 1), "sm_121a")],
)
def test_architectures_are_named_as_compilers_name_them(capability: tuple[int, int], arch: str) -> None:
    assert Device("cuda", capability, "a GPU", 1, 0, 0).arch == arch


def test_the_cpu() -> None:
    device = describe("cpu")
    assert (device.type, device.capability, device.arch) == ("cpu", None, "cpu")
    assert device.num_sms == torch.get_num_threads()
    assert describe(torch.device("cpu")) is device


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_other_devices_have_no_kernels(name: str) -> None:
    with pytest.raises(FormatError, match=f"no kernels for device '{name}'"):
        describe(name)

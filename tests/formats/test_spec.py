"""The list of formats."""

import pytest

from blockscale.errors import FormatError
from blockscale.formats.spec import FORMATS, MXFP4, NVFP4, get_format

BITS_PER_ELEMENT = {
    "nvfp4": 4.5,
    "nvfp4-block32": 4.25,
    "mxfp4": 4.25,
    "mxfp6-e2m3": 6.25,
    "mxfp6-e3m2": 6.25,
    "mxfp8": 8.25,
    "mxfp8-e5m2": 8.25,
    "fp8": 8,
    "fp8-channel": 8,
    "fp8-token": 8,
    "fp8-block128": 8 + 32 / 128**2,
    "fp8-e5m2": 8,
    "fp8-e5m2-channel": 8,
    "fp8-e5m2-token": 8,
    "fp8-e5m2-block128": 8 + 32 / 128**2,
    "int4-g16": 5,
    "int4-g32": 4.5,
    "int4-g128": 4.125,
}


def test_names_and_bits_per_element() -> None:
    assert {name: fmt.bits_per_element for name, fmt in FORMATS.items()} == BITS_PER_ELEMENT
    assert all(name == fmt.name for name, fmt in FORMATS.items())


def test_get_format_takes_a_name_or_a_format() -> None:
    assert get_format("nvfp4") is NVFP4
    assert get_format(MXFP4) is MXFP4


@pytest.mark.parametrize("name", ["nvfp3", "NVFP4", "", "int4"])
def test_unknown_name_lists_the_names_there_are(name: str) -> None:
    with pytest.raises(FormatError, match=f"unknown format '{name}'") as raised:
        get_format(name)
    assert all(known in raised.value.hint for known in FORMATS)


def test_only_nvfp4_has_two_levels() -> None:
    assert [name for name, fmt in FORMATS.items() if fmt.has_global_scale] == ["nvfp4", "nvfp4-block32"]

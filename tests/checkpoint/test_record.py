"""What blockscale.json says of how a model is to be run."""

import json
from pathlib import Path

import pytest

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.checkpoint.record import activation_scale_entry
from blockscale.errors import CheckpointError

from .files import changed

NVFP4 = "modelopt_llama_nvfp4"


@pytest.mark.parametrize("method", ActivationScale)
@pytest.mark.parametrize("name", [NVFP4, "ct_llama_nvfp4"])
def test_what_is_written_is_read(name: str, method: ActivationScale, tmp_path: Path) -> None:
    folder = changed(name, tmp_path)
    (folder / "blockscale.json").write_text(json.dumps({"recipe": "x", **activation_scale_entry(method)}))
    assert open_checkpoint(folder).activation_scale is method


def test_without_a_record_it_is_amax(tmp_path: Path) -> None:
    assert open_checkpoint(changed(NVFP4, tmp_path)).activation_scale is ActivationScale.AMAX
    assert activation_scale_entry(ActivationScale.AMAX) == {}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"{}", b'{"activation_scale": null}', b"null"])
def test_a_broken_record_is_passed_over(content: bytes, tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path)
    (folder / "blockscale.json").write_bytes(content)
    assert open_checkpoint(folder).activation_scale is ActivationScale.AMAX


def test_a_folder_in_its_place_is_passed_over(tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path)
    (folder / "blockscale.json").mkdir()
    assert open_checkpoint(folder).activation_scale is ActivationScale.AMAX


@pytest.mark.parametrize("value", ["five_over_six", "AMAX", "", 3, True, ["sweep"], {"a": 1}])
def test_an_unknown_value_is_an_error(value: object, tmp_path: Path) -> None:
    folder = changed(NVFP4, tmp_path)
    (folder / "blockscale.json").write_text(json.dumps({"activation_scale": value}))
    with pytest.raises(CheckpointError, match=r"blockscale\.json: activation_scale .* is not known") as caught:
        open_checkpoint(folder)
    assert "four_over_six" in caught.value.hint

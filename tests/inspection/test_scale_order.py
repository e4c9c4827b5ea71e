"""Swizzled block scales, told from their values alone. Needs nothing; one slow test needs the demo model."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from blockscale.checkpoint.faults import Fault
from blockscale.formats.layout import unswizzle
from blockscale.formats.spec import MXFP4, NVFP4, NVFP4_BLOCK32, Format
from blockscale.inspection.checks.layout import layout_faults, layout_notices
from blockscale.inspection.checks.scale_order import swizzle_evidence, unswizzled_tile
from blockscale.inspection.reading import read_folder

from .changed_folders import golden_names
from .layouts import Tensors, drawn, on_bytes, reading_of, stored, swizzle_scales

FORMATS = [NVFP4, MXFP4, NVFP4_BLOCK32]


def evidence(parent: Path, weight: Tensor, fmt: Format = NVFP4, *, is_swizzled: bool = False) -> float | None:
    tensors = stored({"a": weight}, fmt)
    if is_swizzled:
        swizzle_scales(tensors, "a")
    model = reading_of(parent, tensors, fmt).model
    assert model is not None
    return swizzle_evidence(model.linears["a"])


def layers(*weights: Tensor) -> Tensors:
    return {f"model.layers.{i}.mlp.down_proj": weight for i, weight in enumerate(weights)}


def swizzled_by_lint(parent: Path, tensors: Tensors) -> list[str]:
    faults = list(layout_faults(reading_of(parent, tensors)))
    assert {fault.rule for fault in faults} <= {"swizzled-scales"}
    return [fault.where for fault in faults]


# ---------------------------------------------------------------- evidence


@pytest.mark.parametrize("cols", [4, 8, 36, 512])
def test_a_tile_is_unswizzled_as_formats_do(cols: int) -> None:
    tile = np.random.default_rng(0).integers(0, 256, (128, cols), dtype=np.uint8)
    expected = unswizzle(torch.from_numpy(tile), 128, cols)
    np.testing.assert_array_equal(unswizzled_tile(tile), expected.numpy())


@pytest.mark.parametrize(("n", "k"), [(128, 256), (128, 1024), (256, 576), (512, 2048), (384, 4096), (256, 8192)])
def test_real_magnitudes_tell(tmp_path: Path, n: int, k: int) -> None:
    for is_swizzled in (False, True):
        found = evidence(tmp_path, drawn(n, k), is_swizzled=is_swizzled)
        assert found is not None
        assert found > 8 if is_swizzled else found < -8


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_in_every_format(tmp_path: Path, fmt: Format) -> None:
    found = [evidence(tmp_path, drawn(256, 1024), fmt, is_swizzled=flag) for flag in (False, True)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] < -8 < 8 < found[1]


def normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.normal(size=shape)


def heavy(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_t(2, size=shape)


def sparse(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.normal(size=shape) * (rng.random(shape) < 0.02)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("draw", [normal, heavy, sparse])
def test_random_weights_do_not_tell(tmp_path: Path, draw: Callable[..., np.ndarray], seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (128 * int(rng.integers(1, 4)), 64 * int(rng.integers(2, 20)))
    weight = torch.from_numpy(0.02 * draw(rng, shape)).bfloat16()
    found = evidence(tmp_path, weight, is_swizzled=bool(seed % 2))
    assert found is not None
    assert abs(found) < 5  # standard deviations


def test_equal_scales_do_not_tell(tmp_path: Path) -> None:
    assert evidence(tmp_path, torch.ones(128, 128)) is None


def test_four_columns_of_scales_do_not_tell(tmp_path: Path) -> None:
    """Of a K of 64 the order only moves whole rows."""
    found = evidence(tmp_path, drawn(256, 64), is_swizzled=True)
    assert found == pytest.approx(0, abs=1e-6)


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("name", golden_names())
def test_the_peers_scales_lie_in_rows(name: str, golden_checkpoint: Callable[[str], Path]) -> None:
    assert list(layout_faults(read_folder(golden_checkpoint(name)))) == []


def test_one_of_many(tmp_path: Path) -> None:
    tensors = stored(layers(*(drawn(256, 512, seed) for seed in range(4))))
    swizzle_scales(tensors, "model.layers.2.mlp.down_proj")
    assert swizzled_by_lint(tmp_path, tensors) == ["model.layers.2.mlp.down_proj"]


def test_even_layers_go_with_the_others(tmp_path: Path) -> None:
    weights = layers(*(drawn(256, 512, seed) for seed in range(3)), drawn(128, 512, 9, spread=0))
    tensors = stored(weights)
    for name in weights:
        swizzle_scales(tensors, name)
    assert swizzled_by_lint(tmp_path, tensors) == list(weights)


def test_even_layers_go_with_those_that_padding_shows(tmp_path: Path) -> None:
    """The repair would mend the padded ones alone, and nothing would show the rest."""
    weights = layers(drawn(128, 512, 9, spread=0), *(drawn(100, 512, seed, spread=0) for seed in range(3)))
    tensors = stored(weights)
    for name in weights:
        swizzle_scales(tensors, name)
    assert set(swizzled_by_lint(tmp_path, tensors)) == set(weights)


def test_even_layers_stay_where_the_others_differ(tmp_path: Path) -> None:
    weights = layers(*(drawn(256, 512, seed) for seed in range(4)), drawn(128, 512, 9, spread=0))
    tensors = stored(weights)
    names = list(weights)
    for name in names[:3]:
        swizzle_scales(tensors, name)
    assert swizzled_by_lint(tmp_path, tensors) == names[:3]


def test_even_layers_alone_stay(tmp_path: Path) -> None:
    weights = layers(*(drawn(256, 512, seed, spread=0) for seed in range(6)))
    tensors = stored(weights)
    for name in weights:
        swizzle_scales(tensors, name)
    assert swizzled_by_lint(tmp_path, tensors) == []


def padded_fault(parent: Path, weight: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> list[Fault]:
    tensors = stored({"a": weight})
    swizzle_scales(tensors, "a")
    if change is not None:
        on_bytes(tensors, "a", change)
    return list(layout_faults(reading_of(parent, tensors)))


@pytest.mark.parametrize(("n", "k"), [(64, 64), (100, 512), (200, 80), (130, 16), (128, 208)])
def test_padded_tiles(tmp_path: Path, n: int, k: int) -> None:
    for change in (None, torch.flatten):
        parent = tmp_path / str(change)
        parent.mkdir()
        faults = padded_fault(parent, drawn(n, k), change)
        assert [(fault.rule, fault.where) for fault in faults] == [("swizzled-scales", "a")]
        assert "padded to whole tiles of 128x4" in faults[0].message


def test_padding_behind_rows_is_not_swizzled(tmp_path: Path) -> None:
    tensors = stored({"a": drawn(100, 512)})
    on_bytes(tensors, "a", lambda scale: torch.nn.functional.pad(scale, (0, 0, 0, 28)))
    reading = reading_of(tmp_path, tensors)
    assert list(layout_faults(reading)) == []
    assert [fault.rule for fault in reading.faults] == ["format-mismatch"]


def test_without_a_source_nibbles_cannot_be_seen(tmp_path: Path) -> None:
    notices = layout_notices(reading_of(tmp_path, stored({"a": drawn(64, 64)})))
    assert len(notices) == 1
    assert "--source" in notices[0]


def test_a_16_bit_model_has_no_layout(golden_checkpoint: Callable[[str], Path]) -> None:
    reading = read_folder(golden_checkpoint("base_llama"))
    assert (list(layout_faults(reading)), layout_notices(reading)) == ([], [])


# ---------------------------------------------------------------- a real model


@pytest.mark.slow
def test_every_layer_of_a_real_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from blockscale import api

    api.quantize("demo", tmp_path / "q", "nvfp4-w4a16")
    reading = read_folder(tmp_path / "q")
    assert reading.model is not None
    assert list(layout_faults(reading)) == []
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    for name in reading.model.linears:
        swizzle_scales(tensors, name)
    save_file(tensors, file, {"format": "pt"})
    swizzled = {fault.where for fault in layout_faults(read_folder(tmp_path / "q"))}
    assert swizzled == set(reading.model.linears)

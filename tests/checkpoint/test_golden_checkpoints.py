"""Every golden checkpoint is read as what its producer meant, and written again as its producer wrote it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockscale.checkpoint.linear import MXFP4_W4A4, W4A4, W4A8, W4A16, W8A8, W8A8_DYNAMIC, QuantizedLinear, Scheme
from blockscale.checkpoint.load import load_kv_scales, load_linear
from blockscale.checkpoint.reader import DIALECTS, Checkpoint, open_checkpoint
from blockscale.formats.fp8 import expand_scale
from blockscale.formats.minifloat import decode_table
from blockscale.formats.packing import unpack_nibbles
from blockscale.formats.spec import E2M1, MXFP4, Minifloat

from .files import GOLDEN, names, same, tensors

SCHEMES: dict[str, set[Scheme]] = {
    "ct_llama_fp8_dynamic": {W8A8_DYNAMIC},
    "ct_llama_mxfp4": {MXFP4_W4A4},
    "ct_llama_nvfp4": {W4A4},
    "ct_llama_nvfp4_fp8kv": {W4A4},
    "ct_llama_nvfp4a16": {W4A16},
    "modelopt_llama_fp8": {W8A8},
    "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv": {W8A8, W4A4},
    "modelopt_llama_nvfp4": {W4A4},
    "modelopt_llama_nvfp4_awq_lite": {W4A4},
    "modelopt_llama_nvfp4_four_over_six": {W4A4},
    "modelopt_llama_nvfp4_fp8kv": {W4A4},
    "modelopt_llama_w4a16_nvfp4": {W4A16},
    "modelopt_llama_w4a8_nvfp4_fp8": {W4A8},
    "modelopt_qwen3moe_nvfp4": {W4A4},
}
AWQ = "modelopt_llama_nvfp4_awq_lite"
QUANTIZED = sorted(SCHEMES)


@pytest.fixture(scope="module")
def opened() -> dict[str, Checkpoint]:
    return {name: open_checkpoint(GOLDEN / name) for name in QUANTIZED}


def base_of(name: str) -> dict[str, Tensor]:
    return tensors(GOLDEN / ("base_qwen3moe" if "qwen3moe" in name else "base_llama"))


def linears_of(checkpoint: Checkpoint) -> dict[str, QuantizedLinear]:
    assert checkpoint.quantized is not None
    return {name: load_linear(linear, torch.bfloat16) for name, linear in checkpoint.quantized.linears.items()}


def test_all_are_covered() -> None:
    assert names("modelopt") + names("ct") == sorted(QUANTIZED, key=lambda name: name.startswith("ct"))


# ---------------------------------------------------------------- what is in them


@pytest.mark.parametrize("name", QUANTIZED)
def test_schemes_and_places(name: str, opened: dict[str, Checkpoint]) -> None:
    """Each linear of the base is quantized but the head and the routers, and the rest is kept as it was."""
    checkpoint, base = opened[name], base_of(name)
    quantized = checkpoint.quantized
    assert quantized is not None
    assert quantized.dialect == ("modelopt" if name.startswith("modelopt") else "compressed-tensors")
    assert {linear.scheme for linear in quantized.linears.values()} == SCHEMES[name]
    expected = {n.removesuffix(".weight") for n in base if n.endswith("_proj.weight")}
    assert quantized.linears.keys() == expected
    assert {n: linear.shape for n, linear in quantized.linears.items()} == {
        n: tuple(base[f"{n}.weight"].shape) for n in expected
    }
    assert checkpoint.kept.keys() == base.keys() - {f"{n}.weight" for n in expected}
    folded = {n for n in checkpoint.kept if n.endswith("layernorm.weight")} if name == AWQ else set()
    assert all(same(t.read(), base[n]) for n, t in checkpoint.kept.items() if n not in folded)
    assert checkpoint.dtype == torch.bfloat16


def test_mixed_precision_layer_by_layer(opened: dict[str, Checkpoint]) -> None:
    quantized = opened["modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv"].quantized
    assert quantized is not None
    assert {n: linear.scheme for n, linear in quantized.linears.items()} == {
        n: W8A8 if "self_attn" in n else W4A4 for n in quantized.linears
    }


# ---------------------------------------------------------------- what the numbers mean


def half_gaps(values: Tensor, element: Minifloat) -> Tensor:
    """Half the larger distance from each value to a neighbour in its format: how far what rounds to it may lie."""
    table = decode_table(element).double()
    grid = table[torch.isfinite(table)].unique()
    gaps = grid.diff()
    wider = torch.cat([gaps[:1], torch.maximum(gaps[1:], gaps[:-1]), gaps[-1:]]) / 2
    return wider[torch.searchsorted(grid, values.contiguous())]


def check_rounding(weight: Tensor, linear: QuantizedLinear, slack: float) -> None:
    """The bound that round-to-nearest implies, element by element: the source, in units of the scales, lies no further
    from the value of its code than half a gap; only beyond the largest value does the scale's own rounding show.

    An E4M3 scale is within 2^-4 of the one that fits the block's largest value exactly, and a power of two lets values
    up to 7 be cut to 6. The producers' own arithmetic adds `slack`.
    """
    q = linear.weight
    fmt = q.format
    assert isinstance(fmt.element, Minifloat)
    beyond = 0.0
    if fmt.element == E2M1:
        values, scale = decode_table(E2M1).double()[unpack_nibbles(q.packed).long()], q.block_scale.double()
        if fmt is MXFP4:
            scale, beyond = 2.0 ** (scale - 127), 7.0 - 6.0
        else:
            assert q.global_scale is not None
            scale, beyond = scale * q.global_scale.double(), 6.0 / (1 - 2.0**-4) - 6.0
        scale = scale.repeat_interleave(fmt.block_size, -1)
    else:
        values, scale = q.packed.double(), expand_scale(q.block_scale, q.shape, fmt).double()
    source = weight.double() / scale
    is_largest = values.abs() == fmt.element.max
    allowed = half_gaps(values, fmt.element) + slack * source.abs() + torch.where(is_largest, beyond, 0.0)
    assert ((source - values).abs() <= allowed).all()


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != AWQ])
def test_weights_lie_within_half_a_gap_of_the_base(name: str, opened: dict[str, Checkpoint]) -> None:
    base = base_of(name)
    for module, linear in linears_of(opened[name]).items():
        assert linear.pre_quant_scale is None
        # Model Optimizer divides NVFP4 in fp32, in two steps; the others in bf16, twice
        is_fp32 = linear.weight.format.has_global_scale and name.startswith("modelopt")
        check_rounding(base[f"{module}.weight"], linear, slack=2.0**-22 if is_fp32 else 2.0**-7)


def test_weights_that_were_scaled_before(opened: dict[str, Checkpoint]) -> None:
    """Activation-aware scaling divides columns by what was folded into the norm before, or kept beside the weight."""
    checkpoint, base = opened[AWQ], base_of(AWQ)
    linears = linears_of(checkpoint)
    kept = {name: tensor.read() for name, tensor in checkpoint.kept.items()}
    assert {n for n, linear in linears.items() if linear.pre_quant_scale is not None} == {
        f"model.layers.{i}.self_attn.o_proj" for i in range(2)
    }
    checked = 0
    for module, linear in linears.items():
        layer, leaf = ".".join(module.split(".")[:3]), module.rpartition(".")[2]
        if leaf == "o_proj":
            factor = linear.pre_quant_scale
        elif leaf in ("q_proj", "k_proj", "gate_proj"):
            norm = f"{layer}.{'post_attention' if leaf == 'gate_proj' else 'input'}_layernorm.weight"
            factor = kept[norm].double() / base[norm].double()
        else:  # v, up and down carry scales of a neighbour that is not stored
            continue
        assert factor is not None
        checked += 1
        check_rounding(base[f"{module}.weight"].double() / factor.double(), linear, slack=2.0**-7)
    assert checked == 8


@pytest.mark.parametrize("name", QUANTIZED)
def test_scales_of_fused_layers_are_one(name: str, opened: dict[str, Checkpoint]) -> None:
    linears = linears_of(opened[name])
    pairs = 0
    for module, linear in linears.items():
        for first, second in (("q_proj", "k_proj"), ("q_proj", "v_proj"), ("gate_proj", "up_proj")):
            other = linears.get(module.removesuffix(first) + second) if module.endswith(first) else None
            if other is None:
                continue
            pairs += 1
            if linear.weight.global_scale is not None:
                assert torch.equal(linear.weight.global_scale, other.weight.global_scale)  # type: ignore[arg-type]
            if linear.input_global_scale is not None:
                assert torch.equal(linear.input_global_scale, other.input_global_scale)  # type: ignore[arg-type]
    assert pairs == (12 if "qwen3moe" in name else 6)


def test_scales_have_one_direction_whatever_the_dialect(opened: dict[str, Checkpoint]) -> None:
    """Multipliers: the two producers differ by what bf16 arithmetic costs compressed-tensors, not by a reciprocal."""
    first, second = (linears_of(opened[name]) for name in ("modelopt_llama_nvfp4", "ct_llama_nvfp4"))
    for module, linear in first.items():
        other = second[module]
        for a, b in (
            (linear.weight.global_scale, other.weight.global_scale),
            (linear.input_global_scale, other.input_global_scale),
        ):
            assert a is not None
            assert b is not None
            assert a.shape == b.shape == ()
            assert a.dtype == b.dtype == torch.float32
        assert abs(linear.weight.global_scale / other.weight.global_scale - 1) < 2.0**-7  # type: ignore[operator]
        assert linear.weight.global_scale < 1e-3  # type: ignore[operator]
        # the inputs were calibrated on the same text by two programs
        assert 0.5 < linear.input_global_scale / other.input_global_scale < 2  # type: ignore[operator]


@pytest.mark.parametrize("name", QUANTIZED)
def test_kv_scales(name: str, opened: dict[str, Checkpoint]) -> None:
    checkpoint = opened[name]
    quantized = checkpoint.quantized
    assert quantized is not None
    if not name.endswith("fp8kv"):
        assert (quantized.kv_format, quantized.kv_tensors) == (None, {})
        return
    assert quantized.kv_format == "fp8"
    assert quantized.kv_tensors.keys() == {f"model.layers.{i}.self_attn" for i in range(2)}
    stored = tensors(checkpoint.path)
    for attention, infos in quantized.kv_tensors.items():
        scales = load_kv_scales(infos)
        key, value = (
            (f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale")
            if quantized.dialect == "modelopt"
            else (f"{attention}.k_scale", f"{attention}.v_scale")
        )
        for scale, stored_name in ((scales.key, key), (scales.value, value)):
            assert (scale.dtype, scale.shape) == (torch.float32, ())
            assert scale.item() == stored[stored_name].item()


# ---------------------------------------------------------------- written again


@pytest.mark.parametrize("name", QUANTIZED)
def test_written_again_in_the_same_dialect(name: str, opened: dict[str, Checkpoint]) -> None:
    """Names, dtypes, shapes and bytes. A divisor goes through the multiplier and back: at most one unit in the last
    place, since no multiplier at all may have it as its reciprocal."""
    checkpoint = opened[name]
    assert checkpoint.quantized is not None
    dialect = DIALECTS[checkpoint.quantized.dialect]
    stored = tensors(checkpoint.path)
    written = {}
    for module, linear in linears_of(checkpoint).items():
        written |= dialect.to_tensors(module, linear)
    for attention, infos in checkpoint.quantized.kv_tensors.items():
        scales = dialect.kv_to_tensors(attention, load_kv_scales(infos))
        written |= {n: t.to(stored[n].dtype) for n, t in scales.items()}  # ours are fp32, of which bf16 is a part
    assert written.keys() == stored.keys() - checkpoint.kept.keys()
    for key, tensor in written.items():
        if key.endswith("_global_scale") and not same(tensor, stored[key]):
            assert (tensor.dtype, tensor.shape) == (stored[key].dtype, stored[key].shape)
            assert abs(tensor.view(torch.int32) - stored[key].view(torch.int32)).item() == 1
        else:
            assert same(tensor, stored[key]), key


def without_observers(value: Any) -> Any:
    """A config without what only says how a scale was found, and targets in a fixed order."""
    if isinstance(value, dict):
        return {k: without_observers(v) for k, v in value.items() if k not in ("observer", "version")}
    return sorted(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else value


def written_config(checkpoint: Checkpoint) -> dict[str, str]:
    quantized = checkpoint.quantized
    assert quantized is not None
    config = dict(checkpoint.folder.config)
    kept = config.pop("quantization_config")["ignore"]
    schemes = {n: linear.scheme for n, linear in quantized.linears.items()}
    has_pre_quant_scale = any("pre_quant_scale" in linear.tensors for linear in quantized.linears.values())
    dialect = DIALECTS[quantized.dialect]
    return dialect.config_files(config, schemes, kept, quantized.kv_format, has_pre_quant_scale)


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_same_config_files(name: str, opened: dict[str, Checkpoint]) -> None:
    checkpoint = opened[name]
    written = written_config(checkpoint)
    on_disk = {path.name for path in checkpoint.path.glob("*config.json")} - {"generation_config.json"}
    assert written.keys() == on_disk
    for file, text in written.items():
        theirs, ours = json.loads((checkpoint.path / file).read_text()), json.loads(text)
        assert without_observers(ours) == without_observers(theirs)


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name.startswith("modelopt")])
def test_either_config_file_of_modelopt_is_enough(name: str, opened: dict[str, Checkpoint], tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(GOLDEN / name / "model.safetensors")
    config = json.loads((GOLDEN / name / "config.json").read_text())
    quantization = config.pop("quantization_config")
    nested = (GOLDEN / name / "hf_quant_config.json").read_text()
    expected = opened[name].quantized
    assert expected is not None

    def check() -> None:
        found = open_checkpoint(folder).quantized
        assert found is not None
        assert found.kv_format == expected.kv_format
        assert {n: x.scheme for n, x in found.linears.items()} == {n: x.scheme for n, x in expected.linears.items()}

    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    check()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(nested)
    check()
    flat = json.loads(nested)["quantization"]  # without the wrapping, as some producers write it
    (folder / "hf_quant_config.json").write_text(json.dumps(flat))
    check()
    if quantization["quant_algo"] == "MIXED_PRECISION":  # the layers may be left to the second file
        short = {k: v for k, v in quantization.items() if k != "quantized_layers"}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": short}))
        check()

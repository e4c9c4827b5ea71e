"""Parts that do not belong together or are missing, holes in files and pickles; and the many ways in which models are
not regular."""

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from blockscale.checkpoint.faults import Fault
from blockscale.inspection.checks.structure import structure_faults
from blockscale.inspection.reading import Reading, read_folder

from .readings import (
    INNER,
    LLAMA,
    MLP,
    MOE,
    WIDTH,
    Entries,
    compressed,
    decoder_layer,
    ends,
    found,
    fp8,
    in_16_bits,
    llama,
    modelopt,
    moe,
    moe_layer,
    norms,
    nvfp4,
    plain,
    without,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
P = "model.layers.1"
EXPERTS = f"{P}.mlp.experts"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings without files are of the folder `m`."""
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)


def faults(reading: Reading) -> list[tuple[str, str]]:
    return found(structure_faults(reading))


@pytest.mark.parametrize("folder", sorted(path for path in GOLDEN.iterdir() if path.is_dir()), ids=lambda p: p.name)
def test_nothing_is_wrong_with_golden_checkpoints(folder: Path) -> None:
    assert faults(read_folder(folder)) == []


@pytest.mark.parametrize(("entries", "config"), [(llama(), LLAMA), (moe(), MOE), (moe(64), {**MOE, "num_experts": 64})])
def test_nothing_is_wrong(entries: Entries, config: dict[str, Any]) -> None:
    assert faults(modelopt(entries, config=config)) == []


# ---------------------------------------------------------------- what runs together


def test_a_fused_group_in_two_formats() -> None:
    entries = in_16_bits(llama(), f"{P}.self_attn.v_proj", WIDTH // 2, WIDTH)
    assert faults(modelopt(entries)) == [("fused-formats-differ", f"{P}.self_attn.q_proj+k_proj+v_proj")]


def test_a_fused_group_in_fp4_and_fp8() -> None:
    entries = without(llama(), f"{P}.mlp.up_proj") | fp8(f"{P}.mlp.up_proj", INNER, WIDTH)
    assert faults(modelopt(entries)) == [("fused-formats-differ", f"{P}.mlp.gate_proj+up_proj")]


def test_an_expert_in_16_bits_is_one_fault() -> None:
    entries = moe()
    for leaf, (n, k) in MLP.items():
        entries = in_16_bits(entries, f"{EXPERTS}.2.{leaf}", n, k)
    assert faults(modelopt(entries, config=MOE)) == [("experts-incomplete", EXPERTS)]


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ([f"{EXPERTS}.2."], "of 4 experts, these have no usable weights: 2"),
        ([f"{EXPERTS}.3."], "of 4 experts, these have no usable weights: 3"),  # by the config's count alone
        ([f"{EXPERTS}.1.down_proj"], "of 4 experts, these have no usable weights: 1 (down_proj)"),
        ([f"{EXPERTS}.0.", f"{EXPERTS}.2.up_proj"], "0, 2 (up_proj)"),
        ([f"{EXPERTS}.2.up_proj.weight_scale"], "2 (up_proj)"),
    ],
)
def test_experts_that_are_not_there(lost: list[str], message: str) -> None:
    seen = list(structure_faults(modelopt(without(moe(), *lost), config=MOE)))
    assert found(seen) == [("experts-incomplete", EXPERTS)]
    assert message in seen[0].message


@pytest.mark.parametrize("count", [10**18, -1, True, "4", [4, 4], None])
def test_counts_of_experts_that_are_none(count: object) -> None:
    """No loop over them, and no guess."""
    expected = [("experts-incomplete", f"model.layers.{i}.mlp.experts") for i in (0, 1)] if count == 10**18 else []
    assert faults(modelopt(moe(), config={**MOE, "num_experts": count})) == expected


def test_stacks_of_experts_have_nothing_to_count() -> None:
    config = {**MOE, "model_type": "llama4_text"}
    entries = ends() | decoder_layer(0) | decoder_layer(1)
    for leaf, shape in (("gate_up_proj", (4, WIDTH // 2, INNER)), ("down_proj", (4, INNER // 2, WIDTH))):
        stack = f"{P}.feed_forward.experts.{leaf}"
        entries |= {stack: ("U8", shape), f"{stack}_weight_scale": ("F8_E4M3", (4, shape[1] // 8, shape[2]))}
        entries |= {f"{stack}_{scale}": ("F32", ()) for scale in ("weight_scale_2", "input_scale")}
        entries |= {f"{stack}_bias": ("BF16", (4, shape[2]))}
    seen = faults(modelopt(entries, config=config))
    assert not [rule for rule, _ in seen if rule == "experts-incomplete"]


# ---------------------------------------------------------------- single linears


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (f"{P}.mlp.router", "router-quantized"),
        (f"{P}.mlp.gate", "router-quantized"),
        ("model.visual.blocks.0.mlp.fc1", "tower-quantized"),
        ("model.multi_modal_projector.linear_1", "tower-quantized"),
        ("model.embed_tokens", "quantized-embedding"),
        ("transformer.wte", "quantized-embedding"),
        ("model.language_model.embed_tokens_per_layer", "quantized-embedding"),
    ],
)
def test_what_should_not_be_quantized(module: str, rule: str) -> None:
    entries = {name: entry for name, entry in llama().items() if not name.startswith(f"{module}.")}
    seen = faults(modelopt(entries | nvfp4(module, WIDTH, WIDTH)))
    assert (rule, module) in seen


@pytest.mark.parametrize("module", ["model.embed_vision.embedding_projection", f"{P}.mlp.shared_embed.up_proj"])
def test_linears_that_work_on_embeddings(module: str) -> None:
    assert "quantized-embedding" not in {rule for rule, _ in faults(modelopt(llama() | nvfp4(module, WIDTH, WIDTH)))}


def test_an_input_scale_that_nothing_reads() -> None:
    entries = llama(is_static=False) | {f"{P}.mlp.up_proj.input_scale": ("F32", ())}
    assert faults(modelopt(entries, quantization={"quant_algo": "W4A16_NVFP4", "config_groups": None})) == [
        ("unread-input-scale", f"{P}.mlp.up_proj")
    ]


def test_a_stack_has_one_global_scale() -> None:
    stack = f"{P}.feed_forward.experts.down_proj"
    entries = llama() | {stack: ("U8", (4, INNER // 2, WIDTH)), f"{stack}_weight_scale": ("F8_E4M3", (4, 8, WIDTH))}
    entries |= {f"{stack}_weight_scale_2": ("F32", (4,)), f"{stack}_input_scale": ("F32", ())}
    (fault,) = modelopt(entries).faults
    assert (fault.rule, fault.where) == ("format-mismatch", stack)
    assert "one scale a stack" in fault.message
    assert "for all experts" in fault.hint


def test_shapes_of_global_scales() -> None:
    assert faults(compressed(llama(dialect="compressed-tensors"))) == []
    for name in ("weight_scale_2", "input_scale"):
        entries = llama() | {f"{P}.mlp.down_proj.{name}": ("F32", (1,))}
        assert faults(modelopt(entries)) == [("wrong-global-shape", f"{P}.mlp.down_proj")]
    entries = llama(dialect="compressed-tensors") | {f"{P}.mlp.down_proj.weight_global_scale": ("F32", (1, 1))}
    assert faults(compressed(entries)) == [("wrong-global-shape", f"{P}.mlp.down_proj")]


def test_what_a_quantizer_left() -> None:
    entries = llama() | {f"{P}.mlp.up_proj.weight_quantizer._amax": ("F32", ())}
    assert faults(modelopt(entries)) == [("loose-scale", f"{P}.mlp.up_proj")]


# ---------------------------------------------------------------- layers


def test_layers_that_the_config_counts() -> None:
    assert faults(modelopt(llama(), config={**LLAMA, "num_hidden_layers": 4})) == [("missing-layers", "model.layers.2")]
    assert faults(modelopt(without(llama(), "model.layers.0."))) == [("missing-layers", "model.layers.0")]
    assert faults(modelopt(llama(), config={**LLAMA, "num_hidden_layers": 10**18}))[0][0] == "missing-layers"


@pytest.mark.parametrize("count", [1, "2", None, True, -3])
def test_counts_of_layers_that_ask_for_nothing(count: object) -> None:
    assert faults(modelopt(llama(), config={**LLAMA, "num_hidden_layers": count})) == []


def test_layers_under_other_names() -> None:
    entries = {name.replace("model.layers", "transformer.h"): entry for name, entry in llama().items()}
    assert faults(modelopt(entries)) == []
    assert faults(modelopt(without(entries, "transformer.h.1"))) == [("missing-layers", "transformer.h.1")]


def test_a_tower_has_layers_of_its_own() -> None:
    tower = {f"vision_tower.layers.{i}.fc.weight": ("BF16", (WIDTH, WIDTH)) for i in range(9)}
    config = {"text_config": {**LLAMA, "num_hidden_layers": 3}}
    assert ("missing-layers", "model.layers.2") in faults(modelopt(llama() | tower, config=config))


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_draft_layers_that_were_lost(key: str) -> None:
    config = {**LLAMA, key: 1}
    assert faults(modelopt(llama(), config=config)) == [("missing-draft-layers", "config.json")]
    for draft in ("mtp.fc", "model.layers.2.eh_proj"):
        assert faults(modelopt(llama() | plain(draft, WIDTH, WIDTH), config=config)) == []


@pytest.mark.parametrize(
    ("lost", "where"),
    [
        (f"{P}.input_layernorm", f"{P}.input_layernorm"),
        (f"{P}.mlp.down_proj", f"{P}.mlp.down_proj"),
        (f"{P}.self_attn", f"{P}.self_attn.k_proj"),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
    ],
)
def test_a_layer_that_lacks_what_the_other_has(lost: str, where: str) -> None:
    assert ("missing-tensor", where) in faults(modelopt(without(llama(), lost)))


def test_a_bias_is_missed_at_its_module() -> None:
    biases: Entries = {f"model.layers.{i}.self_attn.{p}_proj.bias": ("BF16", (WIDTH,)) for i in (0, 1) for p in "qk"}
    entries = without(llama() | biases, f"{P}.self_attn.q_proj.bias")
    assert faults(modelopt(entries)) == [("missing-tensor", f"{P}.self_attn.q_proj")]


def test_all_experts_of_a_layer() -> None:
    assert faults(modelopt(without(moe(), EXPERTS), config=MOE)) == [("missing-tensor", EXPERTS)]


def test_a_scale_that_is_missing_is_another_checks() -> None:
    entries = without(llama(), f"{P}.mlp.down_proj.input_scale", f"{P}.mlp.down_proj.weight_scale_2")
    assert faults(modelopt(entries)) == []


def many(count: int, *odd: int, part: str) -> Entries:
    """Layers that have a part, except some."""
    entries = ends()
    for i in range(count):
        entries |= norms(f"model.layers.{i}") | nvfp4(f"model.layers.{i}.mlp.down_proj", WIDTH, INNER)
        entries |= {} if i in odd else plain(f"model.layers.{i}.{part}", WIDTH)
    return entries


def test_one_layer_of_many_and_a_kind_of_its_own() -> None:
    config = {**LLAMA, "num_hidden_layers": 16}
    assert faults(modelopt(many(16, 5, part="self_attn.q_norm"), config=config)) == [
        ("missing-tensor", "model.layers.5.self_attn.q_norm")
    ]
    # three of sixteen, or every second: a kind of layer
    assert faults(modelopt(many(16, 3, 7, 11, part="self_attn.q_norm"), config=config)) == []
    assert faults(modelopt(many(16, *range(0, 16, 2), part="self_attn.q_norm"), config=config)) == []
    # the first layer's input comes normalised
    assert faults(modelopt(many(16, 0, part="attn_norm"), config=config)) == []


def test_kinds_of_layers_that_the_config_tells_apart() -> None:
    entries = many(3, 1, part="self_attn.v_norm")
    config = {**LLAMA, "num_hidden_layers": 3}
    assert faults(modelopt(entries, config=config)) == [("missing-tensor", f"{P}.self_attn.v_norm")]
    kinds: list[dict[str, Any]] = [
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"hybrid_override_pattern": "M*M"},
        {"no_rope_layers": [1, 0, 1]},
        {"block_configs": [{}, {"attention": {"no_op": True}}, {}]},
    ]
    for kind in kinds:
        assert faults(modelopt(entries, config={**config, **kind})) == []


def test_dense_layers_before_experts() -> None:
    config = {**MOE, "num_hidden_layers": 4}
    assert faults(modelopt(ends() | decoder_layer(0) | moe_layer(1) | moe_layer(2) | moe_layer(3), config=config)) == []


def test_a_head_that_is_not_there() -> None:
    headless = without(llama(), "lm_head")
    assert faults(modelopt(headless)) == [("missing-tensor", "lm_head")]
    for tied in (True, None):
        assert faults(modelopt(headless, config={**LLAMA, "tie_word_embeddings": tied})) == []
    assert faults(modelopt(headless, config={**LLAMA, "architectures": ["LlamaModel"]})) == []
    assert faults(modelopt(headless | nvfp4("lm_head", 256, WIDTH))) == []


@pytest.mark.parametrize("rule", ["missing-shard", "unreadable-file", "ghost-index-entry", "unindexed-tensor"])
def test_what_a_lost_file_held_is_not_missed_again(rule: str) -> None:
    entries = without(moe(), f"{EXPERTS}.2.", f"{P}.input_layernorm", "lm_head")
    reading = modelopt(entries, config={**MOE, "num_hidden_layers": 3}, faults=[Fault(rule, "x", "x")])
    assert faults(reading) == []


# ---------------------------------------------------------------- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "modelopt_llama_nvfp4", tmp_path / "copy"))


def test_pickles_by_their_names(folder: Path) -> None:
    for name in ("pytorch_model.bin", "a.pt", "b.pth", "c.ckpt", "training_args.bin", "notes.txt", "x.safetensors.bak"):
        (folder / name).write_bytes(b"not to be read")
        (folder / name).chmod(0)
    (folder / "folder.pt").mkdir()
    os.mkfifo(folder / "pipe.bin")
    expected = ["a.pt", "b.pth", "c.ckpt", "pytorch_model.bin"]
    assert faults(read_folder(folder)) == [("pickle-weights", name) for name in expected]


def has_holes(folder: Path) -> bool:
    """Whether the file system keeps holes and tells them."""
    with (folder / "hole").open("wb") as file:
        file.truncate(1 << 20)
        return os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 0


def data_start(path: Path) -> int:
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


def test_data_that_were_never_written(folder: Path, tmp_path: Path) -> None:
    if not has_holes(tmp_path):
        pytest.skip("no holes on this file system")
    path = folder / "model.safetensors"
    size, begin = path.stat().st_size, data_start(path)
    os.truncate(path, begin)
    os.truncate(path, size)
    (fault,) = structure_faults(read_folder(folder))
    assert (fault.rule, fault.where) == ("unwritten-data", "model.safetensors")
    num_matrices = sum(len(info.shape) > 1 for info in read_folder(folder).folder.tensors.values())
    assert f"{num_matrices} of {num_matrices} matrices" in fault.message


def test_the_end_of_a_download(folder: Path, tmp_path: Path) -> None:
    if not has_holes(tmp_path):
        pytest.skip("no holes on this file system")
    path = folder / "model.safetensors"
    size = path.stat().st_size
    last = max(read_folder(folder).folder.tensors.values(), key=lambda info: (len(info.shape) > 1) * info.offset)
    os.truncate(path, last.offset - last.offset % 4096)
    os.truncate(path, size)
    (fault,) = structure_faults(read_folder(folder))
    assert fault.rule == "unwritten-data"
    assert "first 'model" in fault.message


def test_zeros_that_were_written_are_no_hole(folder: Path) -> None:
    path = folder / "model.safetensors"
    begin = data_start(path)
    header = path.read_bytes()[:begin]
    path.write_bytes(header + bytes(path.stat().st_size - begin))
    assert faults(read_folder(folder)) == []


def test_small_holes_are_no_fault(folder: Path, tmp_path: Path) -> None:
    """Zeros in a hole of a page within a larger tensor, such as a sparse copy makes."""
    if not has_holes(tmp_path):
        pytest.skip("no holes on this file system")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    infos = read_folder(folder).folder.tensors
    large = max(infos.values(), key=lambda info: info.num_bytes)
    hole = -(-large.offset // 4096) * 4096
    assert large.num_bytes > 3 * 4096
    path.unlink()
    with path.open("wb") as file:
        file.write(data[:hole])
        file.seek(hole + 4096)
        file.write(data[hole + 4096 :])
    assert faults(read_folder(folder)) == []

"""Lint as a whole: what it joins, what it says it did not look at, and that it never says less than reading does."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults.inject import FAULTS, Bases, broken
from safetensors.torch import load_file, save_file

import blockscale
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.errors import CheckpointError, UsageError
from blockscale.inspection.findings import Finding
from blockscale.inspection.lint import lint_folder
from blockscale.inspection.rules import RULES

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
NVFP4, SOURCE = GOLDEN / "modelopt_llama_nvfp4", GOLDEN / "base_llama"
ALL = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
DOWN = "model.layers.1.mlp.down_proj"
Find = Callable[[str], Path]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(NVFP4, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def set_config(folder: Path, **entries: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


@pytest.mark.parametrize("folder", ALL, ids=lambda path: path.name)
@pytest.mark.parametrize("quick", [False, True])
def test_golden_checkpoints_are_clean(folder: Path, quick: bool) -> None:
    report = lint_folder(folder, quick=quick)
    assert report.findings == ()
    assert report.ok


# ---------------------------------------------------------------- never less than reading

KINDS = {(fault.rule, fault.base): fault for fault in FAULTS}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, tiny_model: Find) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"), tiny_model)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.rule}: {fault.name} ({fault.base})")
def test_what_cannot_be_opened_has_an_error(fault: object, bases: Bases, tmp_path: Path) -> None:
    folder = broken(fault, bases[fault.base], tmp_path)  # type: ignore[attr-defined]
    try:
        open_checkpoint(folder)
    except CheckpointError:
        is_readable = False
    else:
        is_readable = True
    assert is_readable or not blockscale.lint(folder, quick=True).ok


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "bitsandbytes"])
def test_weights_of_other_methods_that_are_none(copied: Path, method: str) -> None:
    """They are no dialect's, but what stops a reader is an error all the same."""
    set_config(copied, quantization_config={"quant_method": method})
    with pytest.raises(CheckpointError):
        open_checkpoint(copied)
    assert [(f.name, f.severity) for f in lint_folder(copied).findings] == [("format-mismatch", "error")]


# ---------------------------------------------------------------- what is joined


def test_one_fault_of_each_kind(copied: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{DOWN}.weight_scale"].view(torch.uint8)[0, 0] = 0x7F
        tensors[f"{DOWN}.input_scale"] = torch.tensor(0.0)
        del tensors["model.layers.1.input_layernorm.weight"]

    edit(copied, change)
    (copied / "weights.bin").write_bytes(b"")
    set_config(copied, num_attention_heads=3)
    report = lint_folder(copied, tensor_parallel=2)
    assert [(f.rule, f.layer, f.severity) for f in report.findings] == [
        ("BS104 nan-block-scale", DOWN, "error"),
        ("BS107 bad-global-scale", DOWN, "error"),
        ("BS318 missing-tensor", "model.layers.1.input_layernorm", "error"),
        ("BS502 unshardable-dimension", "config.json", "error"),
        ("BS208 pickle-weights", "weights.bin", "warning"),
    ]
    assert not report.ok
    assert (report.num_errors, report.count("warning"), report.count("info")) == (4, 1, 0)


def test_quick_leaves_block_scales_unread(copied: Path) -> None:
    edit(copied, lambda tensors: tensors[f"{DOWN}.weight_scale"].view(torch.uint8)[0, 0].fill_(0x7F))
    assert [f.name for f in lint_folder(copied).findings] == ["nan-block-scale"]
    quick = lint_folder(copied, quick=True)
    assert quick.findings == ()
    assert any("block scales and weights were not read" in notice for notice in quick.notices)


def test_the_source_shows_what_the_checkpoint_does_not(copied: Path) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        packed = tensors[f"{DOWN}.weight"]
        packed.copy_(packed << 4 | packed >> 4)

    edit(copied, swap)
    assert lint_folder(copied).findings == ()
    assert any("--source" in notice for notice in lint_folder(copied).notices)
    assert [(f.name, f.layer) for f in lint_folder(copied, source=SOURCE).findings] == [("swapped-nibbles", DOWN)]
    with pytest.raises(UsageError, match="quick"):
        lint_folder(copied, source=SOURCE, quick=True)


@pytest.mark.parametrize(
    ("layer", "algorithm"), [(DOWN, "FP8"), ("model.layers.1.self_attn.o_proj", "NVFP4")], ids=["FP8", "NVFP4"]
)
def test_a_wrong_entry_of_a_mixture_is_said_once(layer: str, algorithm: str, tmp_path: Path) -> None:
    name = "modelopt_llama_mixed_fp8attn_nvfp4mlp_fp8kv"
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / "copy"))
    for file, section in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        config = json.loads((folder / file).read_text())
        config[section]["quantized_layers"][layer] = {"quant_algo": algorithm}
        (folder / file).write_text(json.dumps(config))
    assert [(f.name, f.layer) for f in lint_folder(folder).findings] == [("mixed-layers-mismatch", layer)]


def test_what_was_never_written_is_not_judged_by_its_zeros(copied: Path) -> None:
    path = copied / "model.safetensors"
    size = path.stat().st_size
    import os

    os.truncate(path, size // 4)
    os.truncate(path, size)
    report = lint_folder(copied)
    if not report.findings:
        pytest.skip("no holes on this file system")
    assert {f.name for f in report.findings} == {"unwritten-data"}
    assert any("never written" in notice for notice in report.notices)


def test_a_16bit_model_says_that_there_is_nothing_quantized() -> None:
    assert any("16-bit model" in notice for notice in lint_folder(SOURCE).notices)


# ---------------------------------------------------------------- beside the embedding, the next layer and the source


@pytest.mark.parametrize("last", [True, False])
def test_a_copy_of_the_embedding_is_no_head_of_its_own(copied: Path, last: bool) -> None:
    set_config(copied, tie_word_embeddings=True)
    assert [(f.name, f.layer) for f in lint_folder(copied).findings] == [("ignored-head", "lm_head")]

    def tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(copied, tie)
    assert lint_folder(copied).findings == ()
    edit(copied, lambda tensors: tensors["lm_head.weight"].view(torch.uint8)[-1 if last else 0, -1].bitwise_xor_(1))
    assert [f.name for f in lint_folder(copied).findings] == ["ignored-head"]
    assert lint_folder(copied, quick=True).findings == ()


def test_the_first_norm_is_missed_where_models_have_it(copied: Path) -> None:
    edit(copied, lambda tensors: tensors.pop("model.layers.0.input_layernorm.weight"))
    expected = [("missing-tensor", "model.layers.0.input_layernorm")]
    assert [(f.name, f.layer) for f in lint_folder(copied).findings] == expected
    set_config(copied, architectures=["LlamaForCausalLMEagle"])
    assert lint_folder(copied).findings == ()
    set_config(copied, architectures=["LlamaForCausalLM"], model_type="another")
    assert lint_folder(copied).findings == ()
    assert [(f.name, f.layer) for f in lint_folder(copied, source=SOURCE).findings] == expected


def test_what_has_another_name_than_in_the_source_is_not_lost(copied: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.final_norm.weight"] = tensors.pop("model.norm.weight")

    edit(copied, rename)
    assert lint_folder(copied, source=SOURCE).findings == ()


def test_a_pickle_beside_nothing_is_not_to_be_deleted(copied: Path) -> None:
    (copied / "pytorch_model.bin").write_bytes(b"")
    (finding,) = lint_folder(copied).findings
    assert finding.hint.startswith("delete it")
    (copied / "model.safetensors").unlink()
    shard, pickle = lint_folder(copied).findings
    assert (shard.name, shard.repair) == ("missing-shard", "")
    assert "delete" not in pickle.hint
    assert lint_folder(copied).notices == ()


# ---------------------------------------------------------------- the verb


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model folder"):
        lint_folder(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no such model folder"):
        blockscale.lint(NVFP4, source=tmp_path / "nothing" / "below" / "it")
    with pytest.raises(UsageError, match="number of GPUs: 0"):
        blockscale.lint(NVFP4, tensor_parallel=0)


def test_progress_reaches_its_end(copied: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    blockscale.lint(copied, source=SOURCE, progress=lambda stage, done, total: seen.update({stage: (done, total)}))
    assert seen
    assert all(done == total > 0 for done, total in seen.values())


def test_a_repair_is_written_beside(copied: Path, tmp_path: Path) -> None:
    edit(copied, lambda tensors: tensors.update({f"{DOWN}.input_scale": tensors[f"{DOWN}.input_scale"].reshape(1)}))
    report = blockscale.lint(copied, repair=tmp_path / "mended")
    assert [f.name for f in report.findings] == ["wrong-global-shape"]
    assert blockscale.lint(tmp_path / "mended").findings == ()


def test_no_torch_is_needed_unless_weights_are_compared() -> None:
    code = f"import sys, blockscale; blockscale.lint({str(NVFP4)!r}); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# ---------------------------------------------------------------- findings and rules


@pytest.mark.parametrize("method", ["mxfp4", "awq", "gptq"])
@pytest.mark.parametrize("golden", ["modelopt_llama_nvfp4", "ct_llama_nvfp4", "ct_llama_mxfp4"])
def test_another_ones_method_over_a_dialects_tensors(golden: str, method: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / golden, tmp_path / "copy"))
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    settings = {"quant_method": method, "bits": 4, "group_size": 32, "version": "gemm"}
    set_config(folder, quantization_config=settings)
    assert [finding.name for finding in lint_folder(folder).findings] == ["format-mismatch"]
    with pytest.raises(CheckpointError, match=method):
        open_checkpoint(folder)


def test_findings_carry_their_rules_words(copied: Path) -> None:
    edit(copied, lambda tensors: tensors.pop(f"{DOWN}.input_scale"))
    (finding,) = lint_folder(copied).findings
    rule = RULES["missing-input-scale"]
    assert finding == Finding(
        rule.label, rule.name, rule.severity, DOWN, finding.message, rule.consequence, rule.repair, finding.hint
    )
    data = lint_folder(copied).to_dict()
    assert data["ok"] is False
    assert data["findings"] == [{"code": "BS112", **vars(finding), "tensors": []}]
    assert json.loads(json.dumps(data)) == data


def test_rules_are_told_apart() -> None:
    codes = [rule.code for rule in RULES.values()]
    assert len(set(codes)) == len(codes)
    assert codes == sorted(codes)
    for rule in RULES.values():
        for text in (rule.summary, rule.consequence, rule.repair):
            assert not text or text.endswith("."), rule.label


def test_reference_page_is_made_of_the_rules() -> None:
    script = Path(__file__).parents[2] / "docs" / "generate_lint.py"
    run = subprocess.run([sys.executable, script, "--check"], check=False)
    assert run.returncode == 0, "run `make docs`"

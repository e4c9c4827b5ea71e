"""The command line as a user meets it: output, errors, exit codes. Needs nothing."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from blockscale.cli.main import VERBS, main
from blockscale.cli.output import progress_bar

Find = Callable[[str], Path]


def fails(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Runs a command that must fail with exit code 2, one error, and no traceback; returns stderr."""
    try:
        code = main([str(a) for a in argv])
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.count("error: ") == 1
    assert "Traceback" not in captured.err
    return captured.err


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, with_tokenizer: Find, calibration_text: Path) -> Path:
    """base_llama in NVFP4 with calibrated activations."""
    out = tmp_path_factory.mktemp("cli") / "llama-nvfp4"
    model = with_tokenizer("base_llama")
    assert main(["quantize", str(model), str(out), "--calibration", str(calibration_text)]) == 0
    return out


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from blockscale.cli.main import build_parser; build_parser().format_help(); "
        "print(sorted(m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([verb, "--help"])
    assert exit_.value.code == 0
    assert f"usage: blockscale {verb}" in capsys.readouterr().out


def test_reference_page_is_what_help_says() -> None:
    script = Path(__file__).parents[2] / "docs" / "generate_cli.py"
    run = subprocess.run([sys.executable, script, "--check"], check=False)
    assert run.returncode == 0, "run `make docs`"


def test_quantize_prints_json_on_stdout_alone(
    tmp_path: Path, with_tokenizer: Find, calibration_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "q"
    argv = [
        "quantize",
        with_tokenizer("base_llama"),
        out,
        "--calibration",
        calibration_text,
        "--json",
        "--keep",
        "*.o_proj",
    ]
    assert main([str(a) for a in argv]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["out"] == str(out)
    assert len(summary["layers"]) == 12
    assert summary["layers"]["model.layers.0.mlp.up_proj"]["activation"] == "nvfp4"
    assert summary["kept"]["model.layers.0.self_attn.o_proj"] == "the recipe keeps it"
    assert summary["num_bytes"] == (out / "model.safetensors").stat().st_size


def test_quantize_without_calibration_says_what_it_means(
    tmp_path: Path, golden_checkpoint: Find, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "q"
    assert main(["quantize", str(golden_checkpoint("base_llama")), str(out)]) == 0
    captured = capsys.readouterr()
    assert "note: no calibration text: activations stay in 16 bits (W4A16)" in captured.err
    assert "bits per parameter" in captured.out
    assert json.loads((out / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "W4A16_NVFP4"


def test_a_mix_is_calibrated_and_what_it_lacks_is_told(
    tmp_path: Path, with_tokenizer: Find, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, size in (("long", 5000), ("short", 600)):
        (tmp_path / f"{name}.txt").write_text("a b " * (size // 4))
    out = tmp_path / "q"
    texts = [f"{tmp_path}/long.txt:0.5", f"{tmp_path}/short.txt:0.5"]
    argv = ["quantize", with_tokenizer("base_llama"), out, "--calibration-tokens", "4096", "--calibration-seed", "5"]
    assert main([str(a) for a in [*argv, "--calibration", *texts]]) == 0
    assert "note: calibration text short has " in capsys.readouterr().err
    record = json.loads((out / "blockscale.json").read_text())["calibration"]
    assert record["seed"] == 5
    assert [t["name"] for t in record["texts"]] == ["long", "short"]


def test_evaluate_prints_the_contract_keys(
    quantized: Path, with_tokenizer: Find, calibration_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    argv = ["evaluate", quantized, "--reference", with_tokenizer("base_llama"), "--text", calibration_text]
    assert main([str(a) for a in [*argv, "--window", 64, "--max-tokens", 1024, "--json", "--report", page]]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"perplexity", "reference_perplexity", "kl_mean", "top1_agreement", "texts"} <= set(data)
    assert data["texts"][0]["name"] == calibration_text.stem
    assert 0 < data["kl_mean"] < 0.1
    assert len(data["layers"]) == 14
    assert "<html" in page.read_text()


def test_evaluate_gates_set_the_exit_code(
    quantized: Path, with_tokenizer: Find, calibration_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["evaluate", quantized, "--reference", with_tokenizer("base_llama"), "--text", calibration_text]
    argv = [str(a) for a in [*argv, "--window", 64, "--max-tokens", 512]]
    assert main([*argv, "--max-kl", "1", "--max-perplexity-ratio", "2"]) == 0
    assert main([*argv, "--max-kl", "1e-9"]) == 1
    captured = capsys.readouterr()
    assert "limit 1e-09" in captured.err
    assert captured.out.count("same top-1") == 2  # the table came out both times


def test_a_model_against_itself_is_exact(
    with_tokenizer: Find, calibration_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(with_tokenizer("base_llama"))
    argv = ["evaluate", model, "--reference", model, "--text", str(calibration_text), "--window", "64", "--json"]
    assert main([*argv, "--max-tokens", "512", "--max-kl", "0", "--max-perplexity-ratio", "1"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["top1_agreement"] == 1.0
    assert data["perplexity"] == data["reference_perplexity"]


def test_generate_is_deterministic_and_seeded(quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> dict[str, object]:
        assert main(["generate", str(quantized), "ab", "--max-tokens", "8", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    greedy = text()
    assert greedy["num_tokens"] == 8
    assert text() == greedy
    warm = text("--temperature", "5", "--seed", "1")
    assert text("--temperature", "5", "--seed", "1") == warm
    assert text("--temperature", "5", "--seed", "2") != warm


def test_generate_streams_what_json_returns(quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", str(quantized), "ab", "--max-tokens", "8", "--json"])
    expected = json.loads(capsys.readouterr().out)["text"]
    main(["generate", str(quantized), "ab", "--max-tokens", "8"])
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")


def test_chat_answers_until_the_input_ends(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io
    import shutil

    model = tmp_path / "chatty"
    shutil.copytree(quantized, model)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n"))
    assert main(["chat", str(model), "--max-tokens", "4", "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("you> ") == 3
    assert len(captured.out) >= 2


def test_chat_without_a_template_is_refused(
    quantized: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert "no chat template" in fails(capsys, "chat", quantized)


BAD_INPUT = {
    "no verb": ([], "required"),
    "unknown verb": (["frobnicate"], "invalid choice"),
    "missing folder": (["quantize", "/no/such/model", "{out}"], "no such model folder"),
    "hub id offline": (["quantize", "someone/some-model", "{out}"], "hub cannot be reached"),
    "a file, not a folder": (["quantize", "{text}", "{out}"], "a model is a folder"),
    "unknown recipe": (["quantize", "{llama}", "{out}", "--recipe", "nvfp5"], "unknown recipe 'nvfp5'"),
    "pattern without match": (["quantize", "{llama}", "{out}", "--keep", "*.nothing"], "matches no module"),
    "calibration of no weight": (
        ["quantize", "{llama}", "{out}", "--calibration", "en-calibration:0"],
        "the weight of",
    ),
    "calibration seed": (
        ["quantize", "{llama}", "{out}", "--calibration", "{text}", "--calibration-seed", "-1"],
        "calibration seed -1 is out of range",
    ),
    "calibration offline": (["quantize", "{llama}", "{out}", "--calibration", "hf:a/b"], "hf:a/b cannot be read"),
    "calibration missing": (["quantize", "{llama}", "{out}", "--calibration", "/no/text"], "cannot be read"),
    "no tokenizer": (["quantize", "{bare}", "{out}", "--calibration", "{text}"], "no tokenizer"),
    "KV without calibration": (["quantize", "{llama}", "{out}", "--kv-cache", "fp8"], "need calibration text"),
    "no GPU": (["quantize", "{llama}", "{out}", "--device", "cuda:77"], "is not available"),
    "already quantized": (["quantize", "{nvfp4}", "{out}"], "is already quantized (modelopt)"),
    "limit without reference": (["evaluate", "{llama}", "--max-kl", "1"], "needs a reference"),
    "bad window": (["evaluate", "{llama}", "--text", "{text}", "--window", "1"], "make no windows"),
    "bad temperature": (["generate", "{llama}", "x", "--temperature", "-1"], "temperature cannot be -1.0"),
    "empty prompt": (["generate", "{llama}", ""], "the prompt is empty"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gives_one_clear_error(
    case: str,
    tmp_path: Path,
    with_tokenizer: Find,
    golden_checkpoint: Find,
    calibration_text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv, expected = BAD_INPUT[case]
    out = tmp_path / "out"
    places = {
        "{out}": out,
        "{llama}": with_tokenizer("base_llama"),
        "{bare}": golden_checkpoint("base_llama"),
        "{nvfp4}": golden_checkpoint("modelopt_llama_nvfp4"),
        "{text}": calibration_text,
    }
    err = fails(capsys, *[places.get(a, a) for a in argv])
    assert expected in err
    assert "hint: " in err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_not_touched(
    tmp_path: Path, golden_checkpoint: Find, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("mine")
    assert "exists already" in fails(capsys, "quantize", golden_checkpoint("base_llama"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_interrupt_is_one_error_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VERBS["generate"], "run", interrupted)
    assert "interrupted" in fails(capsys, "generate", "model", "prompt")
    assert "--resume" not in fails(capsys, "generate", "model", "prompt")
    monkeypatch.setattr(VERBS["quantize"], "run", interrupted)
    assert "--resume" in fails(capsys, "quantize", "model", "out")


def test_a_long_stage_is_named_where_there_are_no_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter((0.0, 0.5, 2.0, 3.0))
    monkeypatch.setattr("blockscale.cli.output.time.monotonic", lambda: next(now, 9.0))
    with progress_bar() as progress:
        for done in (1, 2, 3):
            progress("calibrating", done, 3)
        progress("quantizing", 1, 1)
    captured = capsys.readouterr()
    assert captured.err == "calibrating ...\n"
    assert captured.out == ""


def test_convert_looks_at_its_target_before_anything_heavy(tmp_path: Path, golden_checkpoint: Find) -> None:
    code = (
        "import sys; from blockscale.cli.main import main; code = main(sys.argv[1:]); "
        "print(code, sorted(m for m in ('torch', 'transformers') if m in sys.modules))"
    )
    (tmp_path / "precious").write_text("mine")
    model = golden_checkpoint("modelopt_llama_nvfp4")
    for target, out, match in (("bf16", tmp_path, "exists already"), ("gguf", tmp_path / "x.gguf", "no tokenizer")):
        run = subprocess.run(
            [sys.executable, "-c", code, "convert", str(model), str(out), "--to", target],
            capture_output=True,
            text=True,
            check=True,
        )
        assert match in run.stderr
        assert "transformers" not in run.stdout
        assert run.stdout.startswith("2 ")


@pytest.mark.slow
def test_demo_goes_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Needs the demo model's package."""
    assert main(["demo", "--out", str(tmp_path / "demo"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["summary"]["layers"]) == 210
    assert [t["name"] for t in data["report"]["texts"]] == ["en-evaluation", "pt-evaluation"]
    assert 1.0 < data["report"]["perplexity_ratio"] < 2.0
    assert Path(data["report_path"]).read_text().startswith("<!DOCTYPE html>")

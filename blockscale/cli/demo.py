"""The whole way on a small model that comes as a package: quantize, lint, evaluate, generate, report.

Uses SmolLM2-135M-Instruct and the package's own texts, and needs no network once the model is installed. The
model's weights come from 4 bits themselves, which makes its loss larger than other models': the figures compare
recipes and make no claim beyond this model.
"""

import argparse
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale.api import Report, Summary
    from blockscale.inspection.findings import LintReport

NAME = "demo"
HELP = "the whole way on a small embedded model"
PROMPT = "A language model is"
CALIBRATION_TOKENS, EVALUATION_TOKENS = 8192, 6144


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="blockscale-demo", metavar="DIR", help="folder for results (blockscale-demo)")
    parser.add_argument("--recipe", default="nvfp4-sweep", help="nvfp4-sweep (default) or any other recipe")
    parser.add_argument(
        "--fetch", action="store_true", help="download the model (98 MB) without asking if it is not here"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> None:
    from blockscale import api
    from blockscale.cli.output import print_json, progress_bar, quiet_libraries
    from blockscale.errors import CheckpointError

    try:
        api.demo_gguf()
    except CheckpointError:
        if not (args.fetch or _wants_fetch()):
            raise
        api.fetch_demo()
    quiet_libraries()
    with progress_bar() as progress:
        result = run_demo(Path(args.out), args.recipe, progress)
    if args.json:
        print_json(result.to_dict())
    else:
        _print_result(result)


@dataclass(frozen=True)
class DemoResult:
    """What the demo made. `seconds` by stage."""

    recipe: str
    checkpoint: Path
    report_path: Path
    summary: "Summary"
    lint: "LintReport"
    report: "Report"
    completion: str
    reference_completion: str
    seconds: Mapping[str, float]

    @property
    def bits_per_linear_parameter(self) -> float:
        """Over the quantized linears alone: embeddings weigh much in a model as small as this one."""
        count = sum(layer.num_parameters for layer in self.report.layers)
        return sum(layer.bits_per_parameter * layer.num_parameters for layer in self.report.layers) / count

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        own = {key: str(value) if isinstance(value, Path) else value for key, value in vars(self).items()}
        told = {name: getattr(self, name).to_dict() for name in ("summary", "lint", "report")}
        return {**own, **told, "prompt": PROMPT}


def run_demo(out: Path, recipe: str, progress: Callable[[str, int, int], None] | None = None) -> DemoResult:
    """Quantizes to `out`/model-RECIPE, lints that, evaluates it against the 16-bit model on the package's English and
    Portuguese texts, generates with both, and writes `out`/report.html. An earlier demo's checkpoint is replaced."""
    from blockscale import api, texts
    from blockscale.conversion.repair.lint import lint

    api.load_recipe(recipe)  # before there is a folder for it
    checkpoint, report_path = out / f"model-{recipe}", out / "report.html"
    if (checkpoint / "blockscale.json").is_file():  # ours, from an earlier run
        shutil.rmtree(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    summary = api.quantize(
        "demo",
        checkpoint,
        recipe,
        calibration=texts.CALIBRATION,
        max_calibration_tokens=CALIBRATION_TOKENS,
        progress=progress,
    )
    middle = time.monotonic()
    findings = lint(checkpoint, source="demo", progress=progress)
    report = api.evaluate(checkpoint, "demo", report=report_path, max_tokens=EVALUATION_TOKENS, progress=progress)
    end = time.monotonic()
    llms = (api.LLM(model, device="cpu") for model in (checkpoint, "demo"))
    text, reference_text = (llm.generate([PROMPT], max_tokens=24)[0].text for llm in llms)
    seconds = {"quantize": middle - begin, "evaluate": end - middle, "generate": time.monotonic() - end}
    return DemoResult(recipe, checkpoint, report_path, summary, findings, report, text, reference_text, seconds)


def _wants_fetch() -> bool:
    import sys

    if not sys.stdin.isatty():
        return False
    print(
        "The demo model (SmolLM2-135M-Instruct, 98 MB, Apache-2.0) is not here. Download it? [y/N] ",
        end="",
        file=sys.stderr,
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_result(result: DemoResult) -> None:
    from blockscale.cli.evaluate import print_report

    summary = result.summary
    print(f"SmolLM2-135M-Instruct, recipe {result.recipe}")
    print(
        f"  quantized  {len(summary.layers)} linear layers, {summary.source_bytes / 1e6:.0f} MB -> "
        f"{summary.num_bytes / 1e6:.0f} MB, {summary.bits_per_parameter:.2f} bits per parameter "
        f"({result.bits_per_linear_parameter:.2f} in the linear layers), {result.seconds['quantize']:.0f} s"
    )
    lint = result.lint
    print(f"  linted     {lint.num_errors} errors, {lint.count('warning')} warnings, compared with its source")
    print(f"  evaluated  {result.seconds['evaluate']:.0f} s")
    print()
    print_report(result.report)
    print()
    print(f"  {PROMPT!r} ->")
    print(f"  16-bit  {result.reference_completion!r}")
    print(f"  {result.recipe}  {result.completion!r}")
    print()
    print(f"checkpoint  {result.checkpoint}")
    print(f"report      {result.report_path}")

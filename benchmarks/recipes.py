"""What each recipe costs on real models and real texts: perplexity, KL and weight error against the 16-bit model.

    python benchmarks/recipes.py --model NAME MODEL --text FILE ... --calibration FILE ... [--recipes ...]

Texts are read from 30 % on, 20480 tokens each in 512-token windows; calibration takes 16384 tokens from the files
given. Writes benchmarks/results/recipes_NAME.json and prints a table.
"""

import argparse
import tempfile
from pathlib import Path

from record import record

from blockscale import api

RECIPES = ("nvfp4-w4a16", "nvfp4-w4a16-sweep", "nvfp4", "nvfp4-sweep", "mxfp4", "fp8")


def weight_error(report: api.Report) -> float:
    """Relative MSE over all quantized weights, each layer's weighted by its parameters."""
    total = sum(layer.num_parameters for layer in report.layers)
    return sum(10 ** (-layer.sqnr_db / 10) * layer.num_parameters for layer in report.layers) / total


def measure(name: str, model: str, recipe: str, args: argparse.Namespace) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "checkpoint"
        summary = api.quantize(model, out, recipe, calibration=args.calibration, max_calibration_tokens=16_384)
        report = api.evaluate(out, model, text=args.text, start=0.3)
    return [
        {
            "model": name,
            "recipe": recipe,
            "text": text.name,
            "tokens": text.num_tokens,
            "perplexity": text.perplexity.value,
            "reference_perplexity": text.reference_perplexity.value,
            "ratio": [text.perplexity_ratio.value, text.perplexity_ratio.low, text.perplexity_ratio.high],
            "kl_mean": [text.kl_mean.value, text.kl_mean.low, text.kl_mean.high],
            "top1_agreement": text.top1_agreement.value,
            "weight_relative_mse": weight_error(report),
            "bits_per_parameter": summary.bits_per_parameter,
        }
        for text in report.texts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=2, required=True, metavar=("NAME", "MODEL"))
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--calibration", nargs="+", required=True)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    args = parser.parse_args()
    name, model = args.model
    rows: list[dict[str, object]] = []
    for recipe in args.recipes:
        measured = measure(name, model, recipe, args)
        rows += measured
        record(f"recipes_{name.lower()}", rows)
        for row in measured:
            print(
                f"{name:14s} {recipe:18s} {row['text']:22s} {row['reference_perplexity']:8.3f} -> "
                f"{row['perplexity']:8.3f}  KL {row['kl_mean'][0]:.4f}  top-1 {row['top1_agreement']:.3f}  "
                f"MSE {row['weight_relative_mse']:.5f}",
                flush=True,
            )
    error = {row["recipe"]: row["weight_relative_mse"] for row in rows}
    if {"nvfp4", "nvfp4-sweep"} <= set(error):
        print(f"{name}: the sweep lowers the weights' MSE by {1 - error['nvfp4-sweep'] / error['nvfp4']:.1%}")


if __name__ == "__main__":
    main()

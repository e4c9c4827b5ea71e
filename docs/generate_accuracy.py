"""Writes docs/concepts/accuracy.md from the figures in benchmarks/results/accuracy_*.json. `--check` only compares."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from generated_page import publish

DOCS = Path(__file__).parent
PAGE = DOCS / "concepts" / "accuracy.md"
RESULTS = DOCS.parent / "benchmarks" / "results"

_INTRO = """# What the recipes win back

Made by `make docs` from `benchmarks/results/accuracy_*.json`, which `benchmarks/accuracy.py` writes.

Round to nearest is what NVFP4 costs if nobody looks at the model's inputs. The *gap closed* is the share of that cost
that a recipe wins back, at the same bits:

    gap closed = 1 - (perplexity - 16-bit perplexity) / (round to nearest - 16-bit perplexity)

100 % would be the 16-bit model, 0 % is round to nearest, less than 0 % is worse than it. Every row is measured in the
same way: 20480 tokens of each text, windows of 512, inputs rounded as the tensor core rounds them (and as
`activation_scale` says: four over six in `nvfp4-best`). Calibration: help texts in English and Portuguese and a Bible
in English, 65536 tokens; none of the texts that are measured, and no code at all. Rows of other tools are made with
the same texts, as many tokens and seeds, at their best settings, and measured by the same code (`benchmarks/peers`).
"""
_READING = """## How to read it

* **Perplexity is judged on text unlike the calibration text.** Python source was in no calibration; its column says
  what a recipe does where it was not asked to look.
* **Seeds** draw other windows of the calibration texts. Values are means over seeds, and the range over them stands
  behind. The interval of a single run (in the JSON, by paired bootstrap over the windows) is about 2 to 4 points wide
  on either side.
* `nvfp4-sweep` minimises the weights' squared error. It lowers that by a quarter or more and still helps perplexity
  little, or harms it: the error that counts is the output's.
* `nvfp4-best` searches an input scale for each site, folds it into the norm or the linear before, and takes for each
  fused group the best of round to nearest, weighted sweep, GPTQ, and GPTQ towards a corrected target, judged on
  windows held back from calibration (`docs/decisions/0013`).
* Without any text `nvfp4-w4a16-best` lets the model write some. It is calibrated on no language and no subject in
  particular: less is won on text like the calibration text of the other rows, and more on code.
* `nvfp4-best-arc` also multiplies the rounding error of 64 input channels once more. It costs bits (the column says
  how many) and only blockscale runs it.
"""
_SCHEMES = {
    "w4a4": "W4A4: weights and activations in NVFP4",
    "w4a16": "W4A16: weights alone",
    "w16a4": "Inputs alone: 16-bit weights, smoothed as the recipe smooths them",
}
# what benchmarks/accuracy.py writes behind a recipe's name
_ADDED = {"self": ", on text that the model writes itself", "inputs": ""}


def load() -> list[dict[str, Any]]:
    """All rows of all models."""
    files = sorted(RESULTS.glob("accuracy_*.json"))
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["figures"]]


def render() -> str:
    rows = load()
    sections = [_INTRO]
    for scheme, title in _SCHEMES.items():
        sections.append(f"## {title}\n\n{_table([row for row in rows if row['scheme'] == scheme])}")
    return "\n".join([*sections, _READING])


def _table(rows: list[dict[str, Any]]) -> str:
    texts = list(dict.fromkeys(row["text"] for row in rows))
    lines = [
        f"| model | recipe | bits a weight | seeds | {' | '.join(texts)} |",
        f"|---|---|---|---|{'---|' * len(texts)}",
    ]
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["model"], row["recipe"]][row["text"]].append(row)
    for (model, recipe), by_text in sorted(groups.items()):
        first = next(iter(by_text.values()))
        bits = first[0]["bits_per_weight"]
        cells = [_cell(by_text[text]) for text in texts]
        shown = "" if bits is None or recipe.endswith("@inputs") else f"{bits:.2f}"
        lines.append(f"| {model} | {_title(recipe)} | {shown} | {len(first)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _title(recipe: str) -> str:
    name, _, added = recipe.partition("@")
    return name + (_ADDED.get(added, f", mixed with FP8 and 16 bits to {added} bits") if added else "")


def _cell(rows: list[dict[str, Any]]) -> str:
    """Mean over seeds, their range, and the perplexity."""
    if not rows:
        return ""
    gaps = [row["gap_closed"][0] for row in rows]
    mean, perplexity = sum(gaps) / len(gaps), sum(row["perplexity"] for row in rows) / len(rows)
    spread = f" ({100 * min(gaps):.0f} to {100 * max(gaps):.0f})" if len(gaps) > 1 else ""
    return f"{100 * mean:.1f} %{spread}, {perplexity:.2f}"


if __name__ == "__main__":
    raise SystemExit(publish(PAGE, render()))

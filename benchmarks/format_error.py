"""What each number format costs in rounding error, on three distributions and on a model's own weights.

    python benchmarks/format_error.py [--model NAME FOLDER] ... [--out FOLDER]

Relative MSE is sum((x - q)^2) / sum(x^2), SQNR is -10 log10 of it. Writes, below --out (default: the repository)

    benchmarks/results/format_error.json   figures, with command, versions, date and machine
    benchmarks/results/format_error.md     the same as tables
    docs/concepts/format-error.svg         error against bits per element
    docs/concepts/format-error.md          the tables between its two markers, where that page is there

FOLDER is a Hugging Face folder in 16 bits; every 2-D `*proj.weight` of its layers counts, pooled over the model.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from record import record
from safetensors import safe_open
from torch import Tensor

from blockscale.formats.mx import ScaleRule
from blockscale.formats.spec import Granularity, get_format
from blockscale.formats.tensor import QuantizedTensor, encode
from blockscale.quantization.weight import quantize_tensor

SEED = 0
SHAPE = (1024, 1024)  # of each synthetic tensor
MARKERS = ("<!-- tables: begin -->", "<!-- tables: end -->")


def rtn(name: str, rule: ScaleRule = ScaleRule.EVEN) -> Callable[[Tensor], QuantizedTensor]:
    """Round to nearest with scales from amax."""
    fmt = get_format(name)
    return lambda x: encode(x, fmt, scale_rule=rule)


def searched(scale: str) -> Callable[[Tensor], QuantizedTensor]:
    """NVFP4 with block scales chosen by the error they give."""
    return lambda x: quantize_tensor(x, "nvfp4", scale)


@dataclass(frozen=True)
class Variant:
    """One row of the table: a format, and how its scales are chosen."""

    label: str
    format: str
    quantize: Callable[[Tensor], QuantizedTensor]

    @property
    def bits(self) -> float:
        return get_format(self.format).bits_per_element

    def fits(self, shape: Iterable[int]) -> bool:
        fmt = get_format(self.format)
        return fmt.granularity is not Granularity.BLOCK or list(shape)[-1] % fmt.block_size == 0


# The one list of what is measured. Another way to choose scales is another line here.
VARIANTS = [
    Variant("nvfp4", "nvfp4", rtn("nvfp4")),
    Variant("nvfp4 (four over six)", "nvfp4", searched("four_over_six")),
    Variant("nvfp4 (sweep)", "nvfp4", searched("sweep")),
    Variant("nvfp4-block32", "nvfp4-block32", rtn("nvfp4-block32")),
    Variant("mxfp4 (floor)", "mxfp4", rtn("mxfp4", ScaleRule.FLOOR)),
    Variant("mxfp4 (even)", "mxfp4", rtn("mxfp4", ScaleRule.EVEN)),
    Variant("mxfp4 (fit)", "mxfp4", rtn("mxfp4", ScaleRule.FIT)),
    Variant("int4-g16", "int4-g16", rtn("int4-g16")),
    Variant("int4-g32", "int4-g32", rtn("int4-g32")),
    Variant("int4-g128", "int4-g128", rtn("int4-g128")),
    Variant("mxfp6-e2m3", "mxfp6-e2m3", rtn("mxfp6-e2m3")),
    Variant("mxfp6-e3m2", "mxfp6-e3m2", rtn("mxfp6-e3m2")),
    Variant("mxfp8 (even)", "mxfp8", rtn("mxfp8")),
    Variant("mxfp8 (fit)", "mxfp8", rtn("mxfp8", ScaleRule.FIT)),
    Variant("mxfp8-e5m2", "mxfp8-e5m2", rtn("mxfp8-e5m2")),
    Variant("fp8", "fp8", rtn("fp8")),
    Variant("fp8-channel", "fp8-channel", rtn("fp8-channel")),
    Variant("fp8-block128", "fp8-block128", rtn("fp8-block128")),
    Variant("fp8-e5m2", "fp8-e5m2", rtn("fp8-e5m2")),
]


def synthetic() -> dict[str, Tensor]:
    """fp32 [1024, 1024] per distribution, from one seed each."""

    def draw(seed: int, degrees: int = 0) -> Tensor:
        return torch.randn((degrees, *SHAPE) if degrees else SHAPE, generator=torch.Generator().manual_seed(seed))

    uniform = torch.rand(SHAPE, generator=torch.Generator().manual_seed(SEED + 1), dtype=torch.float64) - 0.5
    return {
        "Gaussian": draw(SEED),
        "Laplace": (-uniform.sign() * torch.log1p(-2 * uniform.abs())).float(),
        "Student-t(4)": draw(SEED + 2) / (draw(SEED + 3, degrees=4).square().mean(0)).sqrt(),
    }


def model_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each 2-D `*proj.weight` of the decoder layers, one in memory at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            for name in sorted(shard.keys()):
                if re.search(r"\.layers\.\d+\..*proj\.weight$", name) and len(shard.get_slice(name).get_shape()) == 2:
                    yield name, shard.get_tensor(name)


def measure(source: str, tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, object]]:
    """One row a variant: squared error and power summed over all tensors that the format can hold."""
    error, power, elements = ([0.0] * len(VARIANTS) for _ in range(3))
    for _, x in tensors:
        reference = x.double()
        x_power = reference.square().sum().item()
        for i, variant in enumerate(VARIANTS):
            if variant.fits(x.shape):
                error[i] += (variant.quantize(x).dequantize(torch.float32).double() - reference).square().sum().item()
                power[i] += x_power
                elements[i] += x.numel()
    rows: list[dict[str, object]] = []
    for i, variant in enumerate(VARIANTS):
        if power[i] == 0:
            continue
        ratio = error[i] / power[i]
        sqnr_db = -10 * math.log10(ratio) if ratio else math.inf
        row = {"source": source, "label": variant.label, "format": variant.format, "bits_per_element": variant.bits}
        rows.append(row | {"relative_mse": ratio, "sqnr_db": sqnr_db, "elements": int(elements[i])})
    return rows


def index(rows: list[dict[str, object]]) -> dict[str, dict[str, dict[str, object]]]:
    """rows -> source -> label -> row."""
    table: dict[str, dict[str, dict[str, object]]] = {}
    for row in rows:
        table.setdefault(str(row["source"]), {})[str(row["label"])] = row
    return table


def markdown(rows: list[dict[str, object]]) -> str:
    """Two tables: every variant, and what NVFP4 saves against MXFP4."""
    table = index(rows)
    head = "| format | bits | " + " | ".join(table) + " |"
    lines = ["Relative MSE, and SQNR in dB:", "", head, "|---" * (len(table) + 2) + "|"]
    for variant in VARIANTS:
        cells = []
        for by_label in table.values():
            row = by_label.get(variant.label)
            cells.append(f"{row['relative_mse']:.3g} ({row['sqnr_db']:.2f})" if row else "-")
        lines.append(f"| {variant.label} | {variant.bits:.4g} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "How much lower the MSE of `nvfp4` is than that of",
        "",
        head.replace("| format | bits", "| MXFP4 with rule"),
    ]
    lines.append("|---" * (len(table) + 1) + "|")
    for rule in ("floor", "even", "fit"):
        cells = []
        for by_label in table.values():
            ours, theirs = (float(str(by_label[label]["relative_mse"])) for label in ("nvfp4", f"mxfp4 ({rule})"))
            cells.append(f"{100 * (1 - ours / theirs):.0f} %")
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# name in the legend, start of the format's name, colour, marker
FAMILIES = [
    ("NVFP4", "nvfp4", "#4c9a2a", "D"),
    ("MXFP4", "mxfp4", "#c44e52", "o"),
    ("INT4", "int4", "#8c6bb1", "s"),
    ("MXFP6", "mxfp6", "#dd8452", "o"),
    ("MXFP8", "mxfp8", "#937860", "o"),
    ("FP8", "fp8", "#4c72b0", "^"),
]
# label -> what the plot writes beside it, and where (points, alignment)
NOTES: dict[str, tuple[str, tuple[int, int], str]] = {
    "nvfp4": ("block 16", (0, 7), "center"),
    "nvfp4-block32": ("block 32", (-5, 5), "right"),
    "int4-g16": ("g16", (0, -12), "center"),
    "int4-g32": ("g32", (6, -10), "left"),
    "int4-g128": ("g128", (0, -12), "center"),
    "mxfp6-e2m3": ("e2m3", (0, 7), "center"),
    "mxfp6-e3m2": ("e3m2", (0, 7), "center"),
    "fp8": ("e4m3", (-6, 2), "right"),
    "fp8-e5m2": ("e5m2", (-6, -3), "right"),
}


def plot(rows: list[dict[str, object]], path: Path) -> None:
    """One panel a source; higher is better, and a line shows what one more bit is worth."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "blockscale", "font.size": 9})
    table = index(rows)
    columns = len(table) if len(table) <= 3 else 2
    lines = -(-len(table) // columns)
    size = (3.6 * columns if columns == 3 else 4.8 * columns, 3.3 * lines + 0.5)
    figure, panels = plt.subplots(
        lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(table) :]:
        panel.set_visible(False)
    for panel, (source, by_label) in zip(panels.flat, table.items(), strict=False):
        at = {
            label: (float(str(row["bits_per_element"])), float(str(row["sqnr_db"]))) for label, row in by_label.items()
        }
        bits = [4 + i / 50 for i in range(120)]
        worth = [at["nvfp4"][1] + 20 * math.log10(2) * (x - at["nvfp4"][0]) for x in bits]
        panel.plot(bits, worth, color="#bbbbbb", linewidth=1, linestyle="--", zorder=1, label="6 dB a bit")
        for family, prefix, color, marker in FAMILIES:
            points = [at[v.label] for v in VARIANTS if v.format.startswith(prefix) and v.label in at]
            xs, ys = zip(*points, strict=True)
            panel.scatter(xs, ys, s=26, color=color, marker=marker, alpha=0.85, linewidth=0, label=family, zorder=2)
        for label, (note, offset, align) in NOTES.items():
            if label in at:
                panel.annotate(
                    note, at[label], offset, textcoords="offset points", ha=align, fontsize=7, color="#444444"
                )
        panel.set_title(source, fontsize=10)
        panel.set_xscale("log")
        panel.set_xlim(3.95, 8.7)
        panel.set_ylim(12, 34)
        panel.set_xticks([4, 4.5, 5, 6, 7, 8], ["4", "4.5", "5", "6", "7", "8"])
        panel.minorticks_off()
        panel.grid(color="#eeeeee", zorder=0)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[:, 0]:
        panel.set_ylabel("SQNR (dB), higher is better")
    for panel in panels[-1]:
        panel.set_xlabel("bits per element, scales included")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def write_between_markers(page: Path, text: str) -> None:
    """Replaces what stands between the two markers of a page."""
    before, rest = page.read_text().split(MARKERS[0])
    _, after = rest.split(MARKERS[1])
    page.write_text(f"{before}{MARKERS[0]}\n{text}{MARKERS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "FOLDER"),
        help="a Hugging Face folder with 16-bit safetensors, and how tables call it; may be given more than once",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1])
    args = parser.parse_args()

    rows: list[dict[str, object]] = []
    for source, x in synthetic().items():
        rows += measure(source, [(source, x)])
    for name, folder in args.model:
        measured = measure(name, model_weights(Path(folder)))
        if not measured:
            parser.error(f"{folder} holds no 2-D *proj.weight in *.safetensors")
        rows += measured

    results = args.out / "benchmarks" / "results"
    results.mkdir(parents=True, exist_ok=True)
    synthetic_data = {"seed": SEED, "shape": list(SHAPE), "dtype": "float32"}
    record("format_error", {"synthetic": synthetic_data, "rows": rows}, results)
    tables = markdown(rows)
    (results / "format_error.md").write_text(tables)
    plot(rows, args.out / "docs" / "concepts" / "format-error.svg")
    page = args.out / "docs" / "concepts" / "format-error.md"
    if page.exists():
        write_between_markers(page, tables)
    print(tables, end="")


if __name__ == "__main__":
    main()

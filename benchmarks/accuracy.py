"""How much of what round to nearest loses each recipe wins back, over models, texts and calibration seeds.

    python benchmarks/accuracy.py --model NAME MODEL --calibration FILE ... --text FILE ... --recipes nvfp4-best ...
        [--seeds 0 1 2] [--checkpoint LABEL FOLDER ...] [--device cuda:0 cuda:1 --jobs 6]

    gap closed = 1 - (perplexity - reference) / (round to nearest - reference)

against round to nearest of the same scheme (W4A4 or W4A16), with an interval of 95 % over the windows of the text
(paired bootstrap). `--checkpoint` measures a folder that another tool wrote, in the same way. Texts are read from 30 %
on, 20480 tokens each, windows of 512. Writes benchmarks/results/accuracy_NAME.json, row by row.

A recipe may be followed by what else is wanted:

    nvfp4-best@5.0          the mixture of formats that loses least at 5.0 bits a weight, quantized so
    nvfp4-w4a16-best@self   calibrated on what the model writes itself, so without any text
    nvfp4-best@inputs       its rounding of inputs alone, over 16-bit weights (smoothed as it smooths them)
"""

import argparse
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, record

from blockscale import api, texts
from blockscale.algorithms.divergence import score_tokens
from blockscale.checkpoint.reader import open_checkpoint
from blockscale.evaluation.windows import TokenWindows, Window, token_windows
from blockscale.host.linear import PackedLinear
from blockscale.host.model import HostedModel, load_model, load_tokenizer
from blockscale.quantization.layerwise import layer
from blockscale.quantization.search.budget import Budget

BASELINE = {"w4a4": "nvfp4", "w4a16": "nvfp4-w4a16", "w16a4": "nvfp4@inputs"}
_RESAMPLES = 1000
_BATCH = 4  # a vocabulary of 262144 makes 2 GB of fp32 logits of it


@dataclass(frozen=True)
class Task:
    """A recipe to run with a seed, or a folder that is there (`recipe` is then its label)."""

    recipe: str
    seed: int | None
    folder: str | None = None


@dataclass(frozen=True, eq=False)
class Measured:
    """`nll`: text -> float64 [W, 2] as `window_nll`; `scheme`: w4a4, w4a16 or none."""

    task: Task
    nll: dict[str, torch.Tensor]
    scheme: str
    bits_per_parameter: float | None
    seconds: float


def _batched(items: Iterable[Window], size: int) -> Iterator[list[Window]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def window_nll(model: HostedModel, windows: TokenWindows) -> torch.Tensor:
    """float64 [W, 2]: summed negative log-likelihood and number of scored tokens of each window."""
    rows = []
    for _, group in itertools.groupby(windows.windows, key=lambda window: len(window.ids)):
        for batch in _batched(group, _BATCH):
            logits = model.logits(torch.stack([window.ids for window in batch]))
            for one, window in zip(logits, batch, strict=True):
                nll = score_tokens(one[:-1], window.ids[1:]).nll[-window.num_scored :]
                rows.append(torch.tensor([nll.sum().item(), len(nll)], dtype=torch.float64))
    return torch.stack(rows)


def perplexity(nll: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
    """Of windows [W, 2], or of resamples of them: chosen [R, W] -> [R]."""
    picked = nll if chosen is None else nll[chosen]
    total = picked.sum(-2)
    return (total[..., 0] / total[..., 1]).exp()


def gap_closed(own: torch.Tensor, nearest: torch.Tensor, reference: torch.Tensor) -> tuple[float, float, float]:
    """Value and 95 % interval."""
    chosen = torch.randint(len(own), (_RESAMPLES, len(own)), generator=torch.Generator().manual_seed(0))

    def gap(index: torch.Tensor | None) -> torch.Tensor:
        a, b, c = (perplexity(x, index) for x in (own, nearest, reference))
        return 1 - (a - c) / (b - c)

    spread = gap(chosen).sort().values
    return gap(None).item(), spread[int(0.025 * _RESAMPLES)].item(), spread[int(0.975 * _RESAMPLES)].item()


def measure(
    path: str | Path,
    windows: dict[str, TokenWindows],
    device: str,
    kept: tuple[Path, Mapping[str, torch.Tensor]] | None = None,
) -> dict[str, torch.Tensor]:
    """Text -> `window_nll` of a checkpoint. `kept`: see `restore_weights`."""
    model = load_model(Path(path), device=device)
    if kept is not None:
        restore_weights(model, *kept)
    return {name: window_nll(model, one) for name, one in windows.items()}


def text_windows(sources: Iterable[str], path: Path) -> dict[str, TokenWindows]:
    tokenizer = load_tokenizer(path)
    found = (texts.read_text(source) for source in sources)
    return {t.name: token_windows(t.content, tokenizer.encode, 512, None, 0.3, 20_480) for t in found}


def run(task: Task, path: Path, args: argparse.Namespace, device: str) -> Measured:
    """Quantizes if there is something to quantize, and measures."""
    torch.set_num_threads(args.threads)
    windows = text_windows(args.text, path)
    if task.folder is not None:
        return _measured(task, Path(task.folder), windows, device, 0.0)
    recipe, _, more = task.recipe.partition("@")
    how: dict[str, Any] = {
        "calibration": ["self"] if more == "self" else args.calibration,
        "max_calibration_tokens": args.tokens,
        "calibration_seed": task.seed or 0,
        "device": device,
    }
    with tempfile.TemporaryDirectory() as folder, smoothed_weights() as weights:
        start, out = time.monotonic(), Path(folder) / "out"
        mixture = (
            api.search_recipe(path, recipe, budget=Budget(bits=float(more)), **how) if more[:1].isdigit() else recipe
        )
        api.quantize(path, out, mixture, **how)
        seconds = time.monotonic() - start
        return _measured(task, out, windows, device, seconds, (path, weights) if more == "inputs" else None)


@contextmanager
def smoothed_weights() -> Iterator[dict[str, torch.Tensor]]:
    """Fills with the weights that sites are given to round, after folds, by name."""
    found: dict[str, torch.Tensor] = {}
    rounded = layer.quantize_site

    def quantize_site(job: layer.SiteJob) -> layer.SiteResult:
        found.update({name: weight.cpu() for name, weight in job.weights.items()})
        return rounded(job)

    layer.quantize_site = quantize_site
    try:
        yield found
    finally:
        layer.quantize_site = rounded


def restore_weights(model: HostedModel, source: Path, smoothed: Mapping[str, torch.Tensor]) -> None:
    """Puts 16-bit weights into the packed linears: smoothed ones, or the source's."""
    kept = load_model(source, device=str(model.device)).model
    for name, module in model.model.named_modules():
        if isinstance(module, PackedLinear):
            weight, factor = smoothed.get(name), module.linear.weight.global_scale
            weight = kept.get_submodule(name).weight if weight is None else weight
            module.learning = weight.to(factor.device).float().view(module.linear.weight.shape) / factor


def _measured(
    task: Task,
    path: Path,
    windows: dict[str, TokenWindows],
    device: str,
    seconds: float,
    kept: tuple[Path, Mapping[str, torch.Tensor]] | None = None,
) -> Measured:
    quantized = open_checkpoint(path).quantized
    schemes = {linear.scheme.activation for linear in quantized.linears.values()} if quantized else set()
    scheme = "none" if not quantized else "w4a16" if schemes == {None} else "w4a4" if kept is None else "w16a4"
    bits = None
    if quantized:
        linears = quantized.linears.values()
        stored = sum(8 * info.num_bytes for linear in linears for info in linear.tensors.values())
        bits = stored / sum(torch.Size(linear.shape).numel() for linear in linears)
    return Measured(task, measure(path, windows, device, kept), scheme, bits, seconds)


def row(
    found: Measured, nearest: Measured, reference: Measured, text: str, args: argparse.Namespace
) -> dict[str, object]:
    gap = gap_closed(found.nll[text], nearest.nll[text], reference.nll[text])
    own, worst, best = (perplexity(x.nll[text]).item() for x in (found, nearest, reference))
    print(
        f"{args.model[0]:12s} {found.scheme:5s} {found.task.recipe:28s} seed {found.task.seed} {text:20s} {best:8.3f} "
        f"{worst:8.3f} -> {own:8.3f}  {gap[0]:7.1%} ({gap[1]:.1%} to {gap[2]:.1%})  {found.seconds:.0f} s",
        flush=True,
    )
    return {
        "model": args.model[0],
        "scheme": found.scheme,
        "recipe": found.task.recipe.removesuffix(".yaml"),
        "seed": found.task.seed,
        "text": text,
        "perplexity": own,
        "nearest_perplexity": worst,
        "reference_perplexity": best,
        "gap_closed": gap,
        "bits_per_weight": found.bits_per_parameter,
        "seconds": round(found.seconds, 1),
        "calibration_tokens": args.tokens,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=2, required=True, metavar=("NAME", "MODEL"))
    parser.add_argument("--calibration", nargs="+", required=True)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--recipes", nargs="*", default=[])
    parser.add_argument("--checkpoint", nargs=2, action="append", default=[], metavar=("LABEL", "FOLDER"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--device", nargs="+", default=["cpu"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--add", action="store_true", help="keep the rows of an earlier run")
    return parser.parse_args()


def main() -> None:
    args = parse()
    name, path = args.model[0], api.locate(args.model[1])
    is_asked = any(recipe.endswith("@inputs") for recipe in args.recipes)
    nearest = [recipe for recipe in BASELINE.values() if is_asked or not recipe.endswith("@inputs")]
    tasks = [Task("reference", None, str(path)), *(Task(recipe, 0) for recipe in nearest)]
    tasks += [Task(recipe, seed) for seed in args.seeds for recipe in args.recipes]
    tasks += [Task(label, None, folder) for label, folder in args.checkpoint]
    file = RESULTS / f"accuracy_{name.lower()}.json"
    rows = json.loads(file.read_text())["figures"] if args.add and file.is_file() else []
    again = {(task.recipe.removesuffix(".yaml"), task.seed) for task in tasks}
    rows = [one for one in rows if (one["recipe"], one["seed"]) not in again]
    first: dict[str, Measured] = {}  # by scheme: what the others are compared with
    waiting: list[Measured] = []
    devices = itertools.cycle(args.device)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for future in as_completed([pool.submit(run, task, path, args, next(devices)) for task in tasks]):
            if future.exception() is not None:
                print(f"failed: {future.exception()}", flush=True)
                continue
            found = future.result()
            if found.task.recipe == "reference" or found.task.recipe == BASELINE.get(found.scheme):
                first[found.scheme] = found
            waiting.append(found)
            ready = [x for x in waiting if x.scheme in first and "none" in first and x.scheme != "none"]
            waiting = [x for x in waiting if x not in ready and x.scheme != "none"]
            rows += [row(x, first[x.scheme], first["none"], text, args) for x in ready for text in x.nll]
            record(f"accuracy_{name.lower()}", rows)


if __name__ == "__main__":
    main()

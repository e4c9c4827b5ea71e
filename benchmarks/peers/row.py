"""What the peers' scripts share: arguments, the 16-bit model, and what is written beside a peer's checkpoint.

A row is a folder: the checkpoint as the peer's own exporter writes it, and
  peer.json        recipe, versions, seconds, calibration tokens, notes, how much of it blockscale reads, and with
                   --text its figures in the peer's own arithmetic
  peer_logits.npy  fp32 [P, V], the peer's own fake-quantized model on the first P tokens of the first window
The second is what blockscale's reading of the checkpoint is compared with (agreement.py).
"""

import argparse
import json
import platform
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_PROBED = 64
BATCH = 8  # calibration windows that run together: of one length, so none is padded
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
PACKAGES = ("torch", "transformers", "nvidia-modelopt", "llmcompressor", "compressed-tensors", "fouroversix")


class Reads(StrEnum):
    """How much of a row blockscale reads from its checkpoint; what it does not is measured with --text alone."""

    WHOLE = "whole"
    WEIGHTS = "weights"  # not how activations are rounded
    NOTHING = "nothing"


@dataclass(frozen=True)
class Job:
    """One recipe of one peer on one model. `windows` [W, T] int64; `texts` are measured in the peer's arithmetic."""

    model: Path
    windows: Tensor
    out: Path
    recipe: str
    device: str
    dtype: torch.dtype | None
    texts: tuple[str, ...] = ()
    start: float = 0.0
    max_tokens: int = 20_480


def parse(description: str | None, recipes: Sequence[str]) -> list[Job]:
    """The command line of every peer's script: one job a recipe."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a 16-bit model with its tokenizer")
    parser.add_argument("windows", type=Path, help="what windows.py wrote")
    parser.add_argument("out", type=Path, help="folder to make; of several recipes, each in a folder of its name")
    parser.add_argument("--recipe", nargs="+", choices=recipes, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="the model's arithmetic; auto: as it is stored")
    parser.add_argument("--text", nargs="+", default=(), help="also measure the peer's own model on these")
    parser.add_argument("--start", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=20_480)
    args = parser.parse_args()
    outs = [args.out] if len(args.recipe) == 1 else [args.out / name for name in args.recipe]
    for out in outs:
        if out.exists():
            parser.error(f"{out} exists")
    windows = torch.load(args.windows, weights_only=True)
    if not isinstance(windows, Tensor) or windows.dim() != 2 or windows.dtype != torch.int64:
        parser.error(f"{args.windows} holds no int64 tensor [W, T]")
    job = Job(
        args.model,
        windows,
        args.out,
        args.recipe[0],
        args.device,
        DTYPES[args.dtype],
        tuple(args.text),
        args.start,
        args.max_tokens,
    )
    return [replace(job, out=out, recipe=name) for out, name in zip(outs, args.recipe, strict=True)]


def run(jobs: Sequence[Job], make: Callable[[Job], None]) -> None:
    """Makes every row it can; exits 1 with the names of those that it could not."""
    failed = []
    for job in jobs:
        try:
            make(job)
        except Exception:  # whatever a peer raises, the other rows are still wanted
            traceback.print_exc()
            failed.append(job.recipe)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def load_model(job: Job, device: str | None = None) -> Any:
    """The 16-bit model, on `device` instead of the job's."""
    return AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype or "auto").to(device or job.device).eval()


def logits(job: Job, model: Any) -> Callable[[Tensor], Tensor]:
    """int64 [B, T] -> fp32 [B, T, V] on the CPU."""

    @torch.inference_mode()
    def run_model(ids: Tensor) -> Tensor:
        return model(input_ids=ids.to(job.device), use_cache=False).logits.float().cpu()

    return run_model


def calibrate(job: Job) -> Callable[[Any], None]:
    """What runs a model over all windows."""

    def run_model(model: Any) -> None:
        with torch.no_grad():
            for ids in job.windows.split(BATCH):
                model(input_ids=ids.to(job.device), use_cache=False)

    return run_model


def probe(job: Job, model: Any) -> np.ndarray:
    """[P, V] fp32: the model on the beginning of the first window."""
    return logits(job, model)(job.windows[:1, :NUM_PROBED])[0].numpy()


def measure(job: Job, model: Any) -> list[dict[str, object]]:
    """Perplexity and KL of the peer's own model on `job.texts`, by blockscale's evaluator."""
    if not job.texts:
        return []
    from blockscale.evaluation.run import evaluate_text
    from blockscale.evaluation.windows import token_windows
    from blockscale.texts import read_text

    reference = load_model(job)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    rows: list[dict[str, object]] = []
    for source in job.texts:
        text = read_text(source)
        windows = token_windows(text.content, tokenizer.encode, start=job.start, max_tokens=job.max_tokens)
        result = evaluate_text(text.name, windows, logits(job, model), logits(job, reference))
        rows.append(
            {
                "text": result.name,
                "tokens": result.num_tokens,
                "perplexity": result.perplexity.value,
                "reference_perplexity": result.reference_perplexity.value,
                "ratio": [getattr(result.perplexity_ratio, end) for end in ("value", "low", "high")],
                "kl_mean": [getattr(result.kl_mean, end) for end in ("value", "low", "high")],
            }
        )
    return rows


def installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, "python": platform.python_version()}


def finish(
    job: Job,
    peer: str,
    seconds: float,
    probed: np.ndarray,
    texts: Sequence[Mapping[str, object]],
    settings: object,
    notes: Sequence[str] = (),
    reads: Reads = Reads.WHOLE,
) -> None:
    """Writes what lies beside the checkpoint. `seconds`: quantization alone, without loading and export."""
    AutoTokenizer.from_pretrained(job.model).save_pretrained(job.out)
    np.save(job.out / "peer_logits.npy", probed)
    content = {
        "peer": peer,
        "recipe": job.recipe,
        "settings": settings,
        "reads": reads,
        "versions": installed(),
        "device": job.device,
        "dtype": str(job.dtype or "auto").removeprefix("torch."),
        "calibration_tokens": job.windows.numel(),
        "seconds": round(seconds, 1),
        "probe_ids": job.windows[0, :NUM_PROBED].tolist(),
        "texts": list(texts),
        "notes": list(notes),
    }
    (job.out / "peer.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"{job.out}: {peer} {job.recipe}, {seconds:.1f} s")

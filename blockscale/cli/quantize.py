"""Write a 16-bit model as a quantized checkpoint.

examples:
  blockscale quantize meta-llama/Llama-3.1-8B-Instruct llama-nvfp4 --calibration calib.txt
  blockscale quantize model model-best --recipe nvfp4-best --calibration en.txt:0.5 pt.txt:0.5
  blockscale quantize model model-w4a16 --recipe nvfp4-w4a16 --keep "*.layers.0.*"
  blockscale quantize model model-mixed --calibration calib.txt --bits 5.0 --pareto front.svg
"""

import argparse
from typing import Any

from blockscale.cli.search_options import add_search_arguments, print_mixture, read_budget

NAME = "quantize"
HELP = "write a 16-bit model as a quantized checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, a hub id, or demo")
    parser.add_argument("out", metavar="OUT", help="folder to write; it appears whole or not at all")
    parser.add_argument(
        "--recipe",
        default="nvfp4",
        help="nvfp4 (default), nvfp4-sweep, nvfp4-best (the most accurate), nvfp4-gptq, nvfp4-awq, nvfp4-smoothquant, "
        "nvfp4-svdquant, nvfp4-best-arc, nvfp4-learned; nvfp4-w4a16 for weights alone, with the same endings; mxfp4, "
        "fp8; or a .yaml file",
    )
    parser.add_argument(
        "--calibration",
        nargs="+",
        action="extend",
        default=[],
        metavar="TEXT",
        help="what to calibrate on: plain text, .jsonl, a zip of one of them, hf:owner/name[:split[:column]], or "
        "en-calibration, pt-calibration (the package's own), or self (what the model itself writes), each with its "
        "share behind a colon if not equal ones: en.txt:0.7 pt.jsonl:0.3; without any, recipes with a method take "
        "self, and in others NVFP4 activations stay in 16 bits",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="tokens to calibrate on (65536; as many as make those of self on a CPU 16384)",
    )
    parser.add_argument(
        "--calibration-seed",
        type=int,
        default=0,
        metavar="N",
        help="0 takes evenly spaced windows of the texts (default), any other number draws them; self is drawn by it",
    )
    parser.add_argument(
        "--keep", nargs="+", action="extend", default=[], metavar="GLOB", help="modules that stay in 16 bits"
    )
    parser.add_argument("--kv-cache", choices=("fp8", "nvfp4"), help="store scales for a quantized KV cache")
    parser.add_argument("--dialect", choices=("modelopt", "compressed-tensors"), help="default: the recipe's")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")
    parser.add_argument("--strict", action="store_true", help="fail where a weight's shape does not fit its format")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_search_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from blockscale import api
    from blockscale.cli.output import notice, print_json, progress_bar, quiet_libraries

    budget = read_budget(args)
    is_recipe_alone = budget is not None and args.out.endswith((".yaml", ".yml"))
    quiet_libraries()
    texts: dict[str, Any] = {
        "calibration": args.calibration,
        "max_calibration_tokens": args.calibration_tokens,
        "calibration_seed": args.calibration_seed,
    }
    how = {name: getattr(args, name) for name in ("keep", "kv_cache", "dialect")}
    mixture = summary = None
    with progress_bar() as progress:
        if budget is not None:
            mixture = api.search_recipe(
                args.model,
                args.recipe,
                budget=budget,
                out=None if is_recipe_alone else args.out,
                device=args.device,
                strict=args.strict,
                sensitivity=args.sensitivity,
                scores=args.scores,
                pareto=args.pareto,
                save_recipe=args.out if is_recipe_alone else args.save_recipe,
                progress=progress,
                **texts,
                **how,
            )
        if not is_recipe_alone:
            summary = api.quantize(
                args.model,
                args.out,
                mixture or args.recipe,
                device=args.device,
                resume=args.resume,
                strict=args.strict,
                progress=progress,
                **texts,
                **({} if mixture else how),
            )
    notices = (*(mixture.notices if mixture else ()), *(summary.notices if summary else ()))
    for message in dict.fromkeys(notices):
        notice(message)
    if args.json:
        found = {"search": mixture.to_dict()} if mixture else {}
        print_json({**(summary.to_dict() if summary else {}), **found})
        return
    if mixture is not None:
        print_mixture(mixture, with_front=args.pareto is not None)
    if summary is None:
        return
    ratio = summary.source_bytes / summary.num_bytes
    print(f"{summary.out}: {len(summary.layers)} linear layers in {', '.join(summary.formats)}")
    print(
        f"{summary.source_bytes / 1e6:,.1f} MB -> {summary.num_bytes / 1e6:,.1f} MB ({ratio:.2f} x smaller), "
        f"{summary.bits_per_parameter:.2f} bits per parameter"
    )
    if summary.choices:
        print("chosen: " + ", ".join(f"{name} {count}" for name, count in summary.choices.items()))
    if summary.median_gain is not None:
        print(f"on held-back text, {summary.median_gain:.0%} less output error than round to nearest (median)")
    if summary.learning is not None:
        learned = summary.learning
        print(
            f"learned in {learned.steps} steps: divergence on held-back text {learned.kl_before:.4f} -> "
            f"{learned.kl_after:.4f} nats, {learned.num_codes_changed / learned.num_codes:.1%} of the codes moved"
        )
    if summary.worst_layers:
        print("least faithful: " + ", ".join(f"{name} {sqnr:.1f} dB" for name, sqnr in summary.worst_layers))

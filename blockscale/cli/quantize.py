"""Write a 16-bit model as a quantized checkpoint.

examples:
  blockscale quantize meta-llama/Llama-3.1-8B-Instruct llama-nvfp4 --calibration calib.txt
  blockscale quantize model model-w4a16 --recipe nvfp4-w4a16 --keep "*.layers.0.*"
"""

import argparse

NAME = "quantize"
HELP = "write a 16-bit model as a quantized checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, a hub id, or demo")
    parser.add_argument("out", metavar="OUT", help="folder to write; it appears whole or not at all")
    parser.add_argument(
        "--recipe",
        default="nvfp4",
        help="nvfp4 (default), nvfp4-sweep, nvfp4-w4a16, nvfp4-w4a16-sweep, mxfp4, fp8, or a .yaml file",
    )
    parser.add_argument(
        "--calibration",
        nargs="+",
        action="extend",
        default=[],
        metavar="TEXT",
        help="text files, or en-calibration, pt-calibration (the package's own); without any, NVFP4 activations "
        "stay in 16 bits",
    )
    parser.add_argument(
        "--calibration-tokens", type=int, default=65_536, metavar="N", help="tokens to calibrate on (65536)"
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


def run(args: argparse.Namespace) -> None:
    from blockscale import api
    from blockscale.cli.output import notice, print_json, progress_bar, quiet_libraries

    quiet_libraries()
    with progress_bar() as progress:
        summary = api.quantize(
            args.model,
            args.out,
            args.recipe,
            calibration=args.calibration,
            max_calibration_tokens=args.calibration_tokens,
            keep=args.keep,
            kv_cache=args.kv_cache,
            dialect=args.dialect,
            device=args.device,
            resume=args.resume,
            strict=args.strict,
            progress=progress,
        )
    for message in summary.notices:
        notice(message)
    if args.json:
        print_json(summary.to_dict())
        return
    ratio = summary.source_bytes / summary.num_bytes
    print(f"{summary.out}: {len(summary.layers)} linear layers in {', '.join(summary.formats)}")
    print(
        f"{summary.source_bytes / 1e6:,.1f} MB -> {summary.num_bytes / 1e6:,.1f} MB ({ratio:.2f} x smaller), "
        f"{summary.bits_per_parameter:.2f} bits per parameter"
    )
    if summary.worst_layers:
        print("least faithful: " + ", ".join(f"{name} {sqnr:.1f} dB" for name, sqnr in summary.worst_layers))

"""Write a checkpoint in another form: the other dialect, one GGUF file, or plain 16 bits.

examples:
  blockscale convert llama-nvfp4 llama-ct --to compressed-tensors
  blockscale convert llama-nvfp4 llama.gguf --to gguf --kept q8_0
  blockscale convert openai/gpt-oss-20b gpt-oss-nvfp4 --to modelopt
  blockscale convert model-awq model-16bit --to bf16
"""

import argparse
from pathlib import Path

NAME = "convert"
HELP = "write a checkpoint in another dialect, as GGUF or in 16 bits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="a folder, a .gguf file or a hub id")
    parser.add_argument("out", metavar="OUT", help="what to write; it appears whole or not at all")
    parser.add_argument(
        "--to",
        required=True,
        choices=("modelopt", "compressed-tensors", "gguf", "bf16"),
        help="a dialect (same codes and block scales), one file for llama.cpp, or a plain model of the "
        "checkpoint's own 16-bit type",
    )
    parser.add_argument(
        "--format",
        choices=("nvfp4",),
        help="store MXFP4 weights as NVFP4, losslessly where their exponents allow it (always for gpt-oss)",
    )
    parser.add_argument(
        "--kept",
        choices=("bf16", "f16", "q8_0"),
        default="bf16",
        help="gguf: what matrices are stored as that are not quantized (bf16)",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> None:
    from blockscale.checkpoint.target import check_absent

    # before torch and transformers are imported
    check_absent(Path(args.out))
    if args.to == "gguf" and (Path(args.checkpoint) / "config.json").is_file():
        from blockscale.conversion.gguf.vocabulary import check_tokenizer

        check_tokenizer(Path(args.checkpoint))
    from blockscale import api
    from blockscale.cli.output import notice, print_json, progress_bar, quiet_libraries
    from blockscale.pages import size

    quiet_libraries()
    with progress_bar() as progress:
        summary = api.convert(args.checkpoint, args.out, args.to, format=args.format, kept=args.kept, progress=progress)
    for message in summary.notices:
        notice(message)
    if args.json:
        print_json(summary.to_dict())
        return
    values = "all values kept" if summary.exact else f"{len(summary.errors)} of them rounded" if summary.errors else ""
    print(f"{summary.out}: {summary.num_linears} quantized linear layers" + (f", {values}" if values else ""))
    print(f"{size(summary.source_bytes)} -> {size(summary.num_bytes)}")
    if summary.errors:
        print("largest relative errors: " + ", ".join(f"{name} {error:.2g}" for name, error in summary.worst_layers))

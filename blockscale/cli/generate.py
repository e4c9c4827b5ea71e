"""Continue a prompt with a checkpoint, its weights packed in memory.

example:
  blockscale generate model-nvfp4 "The four-bit number" --max-tokens 40
"""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale.api import LLM, Sampling

NAME = "generate"
HELP = "continue a prompt"


def add_sampling_arguments(parser: argparse.ArgumentParser, temperature: float) -> None:
    """The options that generate and chat share."""
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens at most (128)")
    parser.add_argument(
        "--temperature", type=float, default=temperature, metavar="T", help=f"0: the likeliest token ({temperature})"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="share of probability to draw from (1)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="likeliest tokens to draw from (0: all)")
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="least share of the likeliest token's probability (0)"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end there; may be repeated")
    parser.add_argument("--seed", type=int, metavar="S", help="fix what is drawn")
    parser.add_argument("--device", metavar="D", help="cuda, cuda:1 or cpu (default: the GPU, where there is one)")
    parser.add_argument("--kv-cache", metavar="F", help="bf16, fp8 or nvfp4 (default: what the checkpoint says)")
    parser.add_argument(
        "--emulate-activations", action="store_true", help="round activations as FP4 tensor cores would (slower)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CKPT", help="a checkpoint of any dialect, or a 16-bit model")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    add_sampling_arguments(parser, temperature=0.0)
    parser.add_argument("--json", action="store_true", help="print text, num_tokens and finish_reason as JSON")


def load(args: argparse.Namespace) -> "tuple[LLM, Sampling]":
    """The model and the way to sample that the shared options ask for."""
    from blockscale import api
    from blockscale.cli.output import notice, quiet_libraries

    quiet_libraries()
    sampling = api.Sampling(
        args.max_tokens,
        args.temperature,
        args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        stop=tuple(args.stop),
        seed=args.seed,
    )
    llm = api.LLM(args.model, device=args.device, kv_cache=args.kv_cache, emulate_activations=args.emulate_activations)
    for text in llm.notices:
        notice(text)
    return llm, sampling


def run(args: argparse.Namespace) -> None:
    from blockscale.cli.output import print_json

    llm, sampling = load(args)
    if args.json:
        found = llm.stream(args.prompt, sampling, lambda text: None)
        print_json({"text": found.text, "num_tokens": found.num_tokens, "finish_reason": found.finish_reason})
        return
    llm.stream(args.prompt, sampling, lambda text: print(text, end="", flush=True))
    print()

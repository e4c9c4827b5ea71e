"""Continue a prompt with a checkpoint, its weights packed in memory.

example:
  blockscale generate model-nvfp4 "The four-bit number" --max-tokens 40
"""

import argparse

NAME = "generate"
HELP = "continue a prompt"


def add_sampling_arguments(parser: argparse.ArgumentParser, temperature: float) -> None:
    """The options that generate and chat share."""
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens at most (128)")
    parser.add_argument(
        "--temperature", type=float, default=temperature, metavar="T", help=f"0: the likeliest token ({temperature})"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="share of probability to draw from (1)")
    parser.add_argument("--seed", type=int, metavar="S", help="fix what is drawn")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument(
        "--emulate-activations", action="store_true", help="round activations as FP4 tensor cores would (slower)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CKPT", help="a checkpoint of any dialect, or a 16-bit model")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    add_sampling_arguments(parser, temperature=0.0)
    parser.add_argument("--json", action="store_true", help="print text, num_tokens and finish_reason as JSON")


def run(args: argparse.Namespace) -> None:
    import dataclasses

    from blockscale import api
    from blockscale.cli.output import print_json, quiet_libraries

    quiet_libraries()
    llm = api.LLM(args.model, device=args.device, emulate_activations=args.emulate_activations)
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p, "seed": args.seed}
    if args.json:
        print_json(dataclasses.asdict(llm.generate([args.prompt], **sampling)[0]))
        return
    llm.stream(args.prompt, api.Sampling(**sampling), lambda text: print(text, end="", flush=True))
    print()

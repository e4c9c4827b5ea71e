"""Talk to a checkpoint in the terminal, through its chat template. An empty line or Ctrl-D ends it.

example:
  blockscale chat model-nvfp4 --system "Answer in Portuguese."
"""

import argparse

from blockscale.cli.generate import add_sampling_arguments, load

NAME = "chat"
HELP = "talk to a checkpoint in the terminal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CKPT", help="a checkpoint of any dialect, or a 16-bit model")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_arguments(parser, temperature=0.7)


def run(args: argparse.Namespace) -> None:
    import sys

    llm, sampling = load(args)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    while True:
        print("you> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        messages.append({"role": "user", "content": line})
        completion = llm.chat(messages, sampling, lambda text: print(text, end="", flush=True))
        print()
        messages.append({"role": "assistant", "content": completion.text})

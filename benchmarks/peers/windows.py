"""Draws the calibration windows that every peer is given, so that all see the same tokens.

    python benchmarks/peers/windows.py MODEL OUT.pt --text FILE ... [--tokens 65536] [--length 512] [--seed 0]

Every text gives the same number of windows, drawn without overlap and without repetition. OUT.pt holds one tensor
[W, length] int64; each window begins with BOS where the tokenizer adds one. Another seed draws other windows.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockscale.checkpoint.locate import locate
from blockscale.errors import UsageError
from blockscale.host.model import load_tokenizer
from blockscale.texts import Text, encode_text, read_text


def draw(
    texts: Sequence[Text], encode: Callable[[str], Sequence[int]], num_tokens: int, length: int, seed: int
) -> Tensor:
    """[W, length] int64, the texts' windows in the order of the texts. UsageError for a text with too few tokens."""
    share = num_tokens // length // len(texts)
    if share < 1:
        raise UsageError(
            f"{num_tokens} tokens are less than a window of {length} a text", hint="raise --tokens or lower --length"
        )
    generator = torch.Generator().manual_seed(seed)
    windows = []
    for text in texts:
        before, tokens = encode_text(text.content, encode)
        room = length - len(before)
        count = len(tokens) // room
        if count < share:
            raise UsageError(
                f"text {text.name} has {count} windows of {length} tokens, {share} are needed",
                hint="give a longer text or lower --tokens",
            )
        chosen = torch.randperm(count, generator=generator)[:share].sort().values
        windows += [torch.tensor([*before, *tokens[i * room : (i + 1) * room]]) for i in chosen.tolist()]
    return torch.stack(windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = load_tokenizer(locate(args.model))
    windows = draw([read_text(t) for t in args.text], tokenizer.encode, args.tokens, args.length, args.seed)
    torch.save(windows, args.out)
    print(f"{args.out}: {len(windows)} windows of {windows.shape[1]} tokens, seed {args.seed}")


if __name__ == "__main__":
    main()

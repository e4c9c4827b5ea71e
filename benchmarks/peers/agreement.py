"""Whether blockscale reads a peer's checkpoint as the peer means it: its logits beside the peer's own.

    python benchmarks/peers/agreement.py ROW ... --model MODEL [--limit 0.05]

Printed for each row folder, on its probe tokens: the KL divergence of blockscale's logits from the peer's own; that of
the peer's from the 16-bit model, the size of what is measured; and that of blockscale's from themselves when the
embeddings are moved by 2^-16 of themselves, the largest of four draws. A deep W4A4 model multiplies the last bit's
rounding into the third, so its logits say no more than that. Exits 1 where the first is more than `limit` of the second
and twice the third.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from blockscale.host.model import HostedModel, load_model

_NOISE, _DRAWS = 2.0**-16, 4


def divergence(reference: Tensor, other: Tensor) -> float:
    """Mean KL(reference || other) over positions, nats; both fp32 [P, V]."""
    log_p, log_q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


def noise_divergence(hosted: HostedModel, ids: Tensor, logits: Tensor) -> float:
    """The largest KL of `logits` from those with embeddings moved a little."""
    weight = hosted.model.get_input_embeddings().weight
    plain = weight.data
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for _ in range(_DRAWS):
        signs = torch.randint(0, 2, plain.shape, generator=generator) * 2 - 1
        weight.data = plain * (1 + _NOISE * signs)
        largest = max(largest, divergence(logits, hosted.logits(ids)[0]))
    weight.data = plain
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=0.05)
    args = parser.parse_args()
    base = load_model(args.model)
    has_failed = False
    for folder in args.rows:
        peer = json.loads((folder / "peer.json").read_text())
        title = f"{peer['peer']:16s} {peer['recipe']:27s}"
        if peer["reads"] != "whole":
            print(f"{title} not compared: of its checkpoint {peer['reads']} is read")
            continue
        ids = torch.tensor([peer["probe_ids"]])
        own = torch.from_numpy(np.load(folder / "peer_logits.npy"))
        hosted = load_model(folder)
        logits = hosted.logits(ids)[0]
        reading, size = divergence(own, logits), divergence(base.logits(ids)[0], own)
        noise = noise_divergence(hosted, ids, logits)
        is_apart = not (reading <= args.limit * size or reading <= 2 * noise)
        has_failed |= is_apart
        verdict = "APART" if is_apart else "agrees"
        print(f"{title} {verdict:6s} reading {reading:.1e}, row {size:.1e}, noise {noise:.1e}", flush=True)
    sys.exit(int(has_failed))


if __name__ == "__main__":
    main()

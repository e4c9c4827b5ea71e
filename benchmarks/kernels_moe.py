"""Experts in NVFP4 over routed tokens on a GPU, against bf16's grouped products.

    python benchmarks/kernels_moe.py [--tokens 1,8,64] [--record NAME]

Random weights and choices of 128 experts, top 8; layers and choices are used in turn so that weights come from memory.
A time is the whole layer: sort of the choices, gate and up with SiLU, down, weighted sum. `share`: the bytes of the
chosen experts' codes and scales over that time, of the read bandwidth measured in the same run. bf16 is torch's
grouped_mm, the two products alone, over tokens that lie sorted.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from record import record
from torch import Tensor

from blockscale.formats.spec import NVFP4
from blockscale.kernels.bench.clock import COLD_BYTES, median_us, read_bandwidth
from blockscale.kernels.cuda import moe as few
from blockscale.kernels.device import describe
from blockscale.kernels.prepare import Layout, PreparedWeight
from blockscale.kernels.triton import moe as many

NUM_EXPERTS, TOP_K = 128, 8
SHAPES = {"qwen3-30b-a3b": (2048, 768), "qwen3-235b-a22b": (4096, 1536)}  # hidden, intermediate
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)


@dataclass(frozen=True)
class Case:
    """One layer and one batch. weights fp32 [T, top_k]."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: PreparedWeight
    down: PreparedWeight

    @property
    def chosen_bytes(self) -> int:
        """Of the experts that have a token."""
        layer = self.gate_up.num_bytes + self.down.num_bytes
        return layer * self.ids.unique().numel() // NUM_EXPERTS


def random_experts(n: int, k: int, device: str = "cuda") -> PreparedWeight:
    """[E, n, k] of random codes, and scales from 2^-4 to 2^4."""
    packed = torch.empty(NUM_EXPERTS, n, k // 2, dtype=torch.uint8, device=device).random_(0, 256)
    scale = torch.empty(NUM_EXPERTS, n, k // 16, dtype=torch.uint8, device=device).random_(0x18, 0x58)
    global_scale = torch.full((NUM_EXPERTS,), 0.05 / k**0.5, device=device)
    shape = (NUM_EXPERTS, n, k)
    return PreparedWeight(Layout.ROW_MAJOR, packed, scale, global_scale, shape, NVFP4, torch.bfloat16)


def make_cases(hidden: int, intermediate: int, num_tokens: int) -> list[Case]:
    """As many as it takes for none to find its weights in a cache."""
    active = NUM_EXPERTS * (1 - (1 - TOP_K / NUM_EXPERTS) ** num_tokens)
    expert_bytes = 3 * hidden * intermediate * 9 // 16
    layers, cases = [], []
    for _ in range(max(2, min(16, round(COLD_BYTES / (active * expert_bytes))))):
        layers.append((random_experts(2 * intermediate, hidden), random_experts(hidden, intermediate)))
    for i in range(max(len(layers), 4)):
        scores = torch.rand(num_tokens, NUM_EXPERTS, device="cuda")
        ids = scores.topk(TOP_K).indices
        weights = torch.rand(num_tokens, TOP_K, device="cuda")
        x = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16)
        cases.append(Case(x, ids, weights, *layers[i % len(layers)]))
    return cases


def bf16_calls(hidden: int, intermediate: int, cases: list[Case]) -> list[Callable[[], object]]:
    """The products in bf16, with rows sorted and experts' ends known beforehand."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    first = torch.randn(NUM_EXPERTS, 2 * intermediate, hidden, **options).transpose(1, 2)
    second = torch.randn(NUM_EXPERTS, hidden, intermediate, **options).transpose(1, 2)
    calls = []
    for case in cases:
        flat = case.ids.flatten()
        rows = case.x[flat.argsort(stable=True) // TOP_K]
        ends = torch.bincount(flat, minlength=NUM_EXPERTS).cumsum(0).int()

        def call(rows: Tensor = rows, ends: Tensor = ends) -> Tensor:
            gate, up = torch.nn.functional.grouped_mm(rows, first, offs=ends).chunk(2, dim=1)
            return torch.nn.functional.grouped_mm(torch.nn.functional.silu(gate) * up, second, offs=ends)

        calls.append(call)
    return calls


def measure(model: str, num_tokens: int, bandwidth: float) -> dict[str, object]:
    hidden, intermediate = SHAPES[model]
    cases = make_cases(hidden, intermediate, num_tokens)
    device = torch.device("cuda")
    us: dict[str, float] = {}
    for name, kernel in (("cuda", few.moe), ("triton", many.moe)):
        if name == "cuda":
            case = cases[0]
            if few.why_not(case.x, case.ids, case.gate_up, case.down, describe(device)) is not None:
                continue
        us[name] = median_us([lambda c=c, f=kernel: f(c.x, c.ids, c.weights, c.gate_up, c.down) for c in cases], device)
    us["bf16"] = median_us(bf16_calls(hidden, intermediate, cases), device)
    best = min((us[name], name) for name in us if name != "bf16")
    chosen = sum(c.chosen_bytes for c in cases) / len(cases)
    flops = 6 * num_tokens * TOP_K * hidden * intermediate
    return {
        "model": model,
        "num_tokens": num_tokens,
        "kernel": best[1],
        **{f"{name}_us": round(value, 2) for name, value in us.items()},
        "share": round(chosen / (best[0] * 1e-6) / bandwidth, 3),
        "speed_against_bf16": round(us["bf16"] / best[0], 2),
        "tflops": round(flops / best[0] * 1e-6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--record", metavar="NAME", help="write results/NAME.json")
    options = parser.parse_args()
    bandwidth = read_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(f"{'model':18}{'T':>6}{'cuda us':>10}{'triton us':>11}{'bf16 us':>10}{'share':>8}{'x bf16':>8}{'TFLOP/s':>9}")
    figures = []
    for model in SHAPES:
        for num_tokens in map(int, options.tokens.split(",")):
            row = measure(model, num_tokens, bandwidth)
            figures.append(row)
            print(
                f"{model:18}{num_tokens:6}{row.get('cuda_us', '-'):>10}{row['triton_us']:>11}{row['bf16_us']:>10}"
                f"{row['share']:8.0%}{row['speed_against_bf16']:>8}{row['tflops']:>9}",
                flush=True,
            )
    if options.record:
        record(options.record, {"read_tb_per_s": round(bandwidth / 1e12, 3), "rows": figures})


if __name__ == "__main__":
    main()

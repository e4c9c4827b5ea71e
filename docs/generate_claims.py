"""Writes docs/concepts/claims.md: common claims about NVFP4, recomputed with the planner. `--check` only compares."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import claim_figures as figures
from claim_figures import Row
from generated_page import publish

PAGE = Path(__file__).parent / "concepts" / "claims.md"


@dataclass(frozen=True)
class Claim:
    """`said`: the claim and where it is made, in quotation marks where it is quoted; `verdict`: what figures say."""

    key: str
    said: str
    verdict: str
    rows: Callable[[], list[Row]]


CLAIMS = (
    Claim(
        "405b",
        "“Llama 3.1 405B: 140 GB in FP32, 17.5 GB in FP4” (articles)",
        "Wrong by an order of magnitude: 140 GB is the 70B model in BF16.",
        figures.flagship_sizes,
    ),
    Claim(
        "smaller",
        "“3.5 x smaller than FP16, 1.8 x than FP8” (NVIDIA)",
        "True of a quantized matrix. Whole checkpoints keep embedding and head in BF16: large models come close, "
        "small ones do not.",
        figures.smaller,
    ),
    Claim(
        "quarter",
        "“4 x smaller”: 70B in 35 GB, 405B in 202.5 GB (calculators)",
        "Leaves out scales, embedding and head.",
        figures.a_quarter,
    ),
    Claim(
        "eighth",
        "“8 x against FP32, cost 1/8” (a blog)",
        "Nobody serves FP32, and cost follows throughput, not bytes.",
        figures.an_eighth,
    ),
    Claim(
        "twice",
        "NVFP4 is twice as fast as FP8",
        "Not at the same number of requests: KV cache, communication and overhead do not shrink. The gain is in "
        "memory: more sequences, fewer GPUs. On one GPU the planner predicts more than was measured (1.22 to 1.26 x).",
        figures.twice_as_fast,
    ),
    Claim(
        "mxfp4",
        "MXFP4 and NVFP4 are of the same size",
        "NVFP4 has twice as many scales: a quarter of a bit more.",
        figures.same_size,
    ),
    Claim(
        "fifty",
        "“10 J a token on H100, 0.4 on B200, 0.2 on B300” (NVIDIA, a model of 1.8 trillion parameters)",
        "Silicon and format give 2 to 4 x. The rest is large batches at a speed that eight GPUs cannot reach, and "
        "software. At the most throughput, 2.4 x was measured from H200 with a power limit to B200.",
        figures.fifty_times,
    ),
    Claim(
        "fifteen",
        "“15 x more efficient: 93 % less energy” (NVIDIA)",
        "The arithmetic is right; the 15 x holds at one operating point only.",
        figures.fifteen_times,
    ),
    Claim(
        "nvl72",
        "An NVL72 in the place of nine HGX H100 with 83 % less energy",
        "It takes more power. Energy a token falls by 59 to 79 % by published throughput, not by 83 %.",
        figures.nine_servers,
    ),
    Claim(
        "two-70b",
        "Two 70B models where one fitted",
        "Against FP8 on RTX PRO 6000, H200 and B200; not on H100, and an L40S holds none. On RTX PRO 6000 hardly any "
        "cache is left.",
        figures.two_models,
    ),
    Claim(
        "five",
        "B200 in NVFP4 is 5 x its FP8 (a blog)",
        "2 x; 3 x on Blackwell Ultra.",
        figures.five_times_fp8,
    ),
    Claim(
        "rack",
        "A rack of 120 kW, or 1.2 kW a GPU",
        "Both: the rack has CPUs, switches and power supplies, too.",
        figures.rack_power,
    ),
    Claim(
        "spark",
        "DGX Spark runs models of 200 billion parameters",
        "It holds the weights, with little room for cache, at 2 tokens a second if the model is dense.",
        figures.spark,
    ),
    Claim(
        "nameplate",
        "Nameplate power taken as what is drawn",
        "Systems at full load drew 69 to 73 % of it, and 60 % with a power limit.",
        figures.nameplate,
    ),
    Claim(
        "electricity",
        "What electricity is of a token's cost",
        "Little: hardware and its place cost many times as much.",
        figures.electricity,
    ),
    Claim(
        "brazil",
        "What import taxes add in Brazil",
        "More than their sum: ICMS is charged on a price that holds it.",
        figures.import_taxes,
    ),
)

_INTRO = """# Claims, recomputed

Made by `make docs` from `docs/claim_figures.py`; tests hold every figure. Figures in *italics* were measured or
published by others; all others are computed by the planner, those of speed and energy with its defaults.
"""


def render() -> str:
    """A summary of all claims, then a table a claim."""
    summary = ["| claim | what the figures say |", "|---|---|"]
    summary += [f"| [{claim.said}](#{claim.key}) | {claim.verdict} |" for claim in CLAIMS]
    return "\n".join([_INTRO, *summary, "", *map(_section, CLAIMS)])


def _section(claim: Claim) -> str:
    lines = [
        f'<a id="{claim.key}"></a>\n',
        f"## {claim.said}\n",
        f"{claim.verdict}\n",
        "| what | figure |",
        "|---|---|",
    ]
    lines += [f"| {row.name} | {f'*{row.text}*' if row.is_published else row.text} |" for row in claim.rows()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(publish(PAGE, render()))

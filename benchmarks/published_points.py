"""Published measurements of serving as deployments that the planner knows."""

import csv
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blockscale.planning.calibration.measurements import Measurement
from blockscale.planning.hardware.catalogue import Gpu, find_gpu
from blockscale.planning.models.architecture import Architecture, Part, from_config
from blockscale.planning.models.weights import PartWeights, Weights, weights_of
from blockscale.planning.speed.layout import Layout
from blockscale.planning.speed.memory import plan_memory
from blockscale.planning.speed.predict import Workload
from blockscale.planning.speed.roofline import Deployment

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' reading of the validation file

CONFIGS = {
    "MiniMaxAI/MiniMax-M2.5": "MiniMaxAI--MiniMax-M2.5",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen--Qwen3-235B-A22B",
    "Qwen/Qwen3-32B": "Qwen--Qwen3-32B",
    "deepseek-ai/DeepSeek-R1": "deepseek-ai--DeepSeek-R1",
    "deepseek-ai/DeepSeek-V3": "deepseek-ai--DeepSeek-V3",
    "meta-llama/Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama--Meta-Llama-3.1-8B",
    "moonshotai/Kimi-K2.5": "moonshotai--Kimi-K2.5",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama--Meta-Llama-3.1-8B",
    "openai/gpt-oss-120b": "openai--gpt-oss-120b",
    "zhipuai/GLM-5": "zai-org--GLM-5",
}
GPUS = {name: name.removesuffix("_sxm") for name in ("b200_sxm", "h200_sxm", "h100_sxm", "gb200", "b300_sxm", "gb300")}
LONGEST_TTFT_S = 15.0  # longer ones are queues before a full cache, not prefill
LARGEST = 8  # some rows have larger values that contradict their GPUs


@dataclass(frozen=True)
class Point:
    """`sequences` in flight."""

    deployment: Deployment
    sequences: float
    input_tokens: float
    output_tokens: float
    itl_s: float
    ttft_s: float | None
    model: str
    gpu: str
    engine: str
    format: str
    version: str | None
    key: str

    @property
    def group(self) -> tuple[str, ...]:
        return self.model, self.gpu, self.format, self.engine

    @property
    def measurement(self) -> Measurement:
        return Measurement(
            engine=self.engine,
            version=self.version,
            gpu=self.gpu,
            model=self.model,
            layout=self.deployment.layout,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            sequences=self.sequences,
            itl_s=self.itl_s,
            ttft_s=self.ttft_s,
            where="sample",
        )


def read_sample(path: Path, configs: Path) -> tuple[list[Point], Counter[str]]:
    """(points, how many rows are left out and why): prefill and decode on the same GPUs only."""
    models = {
        name: from_config(json.loads((configs / f"{file}_config.json").read_text()), name)
        for name, file in CONFIGS.items()
    }
    points: list[Point] = []
    left_out: Counter[str] = Counter()
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            point = _point(row, models)
            if isinstance(point, str):
                left_out[point] += 1
            else:
                points.append(point)
    return points, left_out


def _point(row: dict[str, str], models: dict[str, Architecture]) -> Point | str:
    if row["mode"] != "agg":
        return "prefill and decode apart"
    if row["model_path"] not in models:
        return "model without a config here"
    tensor, copies = _number(row["tp_size"]), _number(row["attention_dp_size"])
    if max(tensor, copies) > LARGEST:
        return "sizes that contradict the GPUs"
    if row["model_path"].startswith("deepseek") and row["backend"] == "trtllm" and "post3" in row["backend_version"]:
        return "may draft tokens"
    found = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    sequences = float(found[1]) if found else float(row["batch_size"] or 0)
    itl_s, ttft_s = float(row["silicon_tpot_ms"] or 0) / 1e3, float(row["silicon_ttft_ms"] or 0) / 1e3
    if sequences <= 0 or itl_s <= 0:
        return "no concurrency or no time per token"
    if ttft_s > LONGEST_TTFT_S:
        return "a queue"
    architecture, gpu = models[row["model_path"]], find_gpu(GPUS[row["system"]])
    weights, cache = _weights(row, architecture, gpu)
    d = Deployment(architecture, weights, gpu, _layout(row, architecture, tensor, copies), cache)
    # lengths of all but one source are drawn from 0.8 to 1 of the nominal one
    share = 1.0 if "source_file=/Users" in row["silicon_data_source"] else 0.9
    num_input, num_output = float(row["isl"]) * share, float(row["osl"]) * share
    if plan_memory(d, int(num_input + num_output)).max_sequences < sequences:
        return "does not fit, or only some requests at once"
    return Point(
        d,
        sequences,
        num_input,
        num_output,
        itl_s,
        ttft_s or None,
        row["model_path"],
        gpu.key,
        row["backend"],
        row["precision"] or "bf16",
        row["backend_version"] or None,
        row["id"],
    )


def _number(text: str) -> int:
    return max(int(text or 1), 1)


def _layout(row: dict[str, str], a: Architecture, tensor: int, copies: int) -> Layout:
    """Where attention is copied, tp_size counts the GPUs of all copies."""
    is_expert = any(block.is_moe for block in a.blocks) and _number(row["moe_ep_size"]) > 1
    if copies > 1:
        return Layout(tensor=max(tensor // copies, 1), attention_data=copies, is_expert=True)
    return Layout(tensor=tensor, is_expert=is_expert)


def _weights(row: dict[str, str], a: Architecture, gpu: Gpu) -> tuple[Weights, str]:
    """Formats as the recipes behind the rows have them: weights, KV cache."""
    model, precision, engine = row["model_path"], row["precision"], row["backend"]
    is_moe = any(block.is_moe for block in a.blocks)
    if model.startswith("openai"):  # MXFP4 in every row, whatever its label
        parts = dict(weights_of(a, "bf16", {Part.EXPERTS: "mxfp4"}).parts)
        activation = "mxfp8" if "mxfp8" in gpu.native else None
        parts[Part.EXPERTS] = PartWeights("mxfp4", activation, parts[Part.EXPERTS].num_bytes)
        return Weights(parts), "fp8" if "mxfp8" in gpu.native else "bf16"
    if precision == "fp4":
        attention = {Part.ATTENTION: "fp8" if "DeepSeek" in model else "bf16"} if is_moe else {}
        return weights_of(a, "nvfp4", attention), "fp8"
    if precision == "fp8":
        is_small = "Llama-3.1-70B" in model or engine == "trtllm"
        return weights_of(a, "fp8-block128" if is_moe else "fp8"), "fp8" if is_small else "bf16"
    if precision == "int4":
        return weights_of(a, "bf16", {Part.EXPERTS: "int4"}), "bf16"
    return weights_of(a, "bf16"), "bf16"


@cache
def max_load_points() -> list[tuple[Deployment, Workload, float]]:
    """Rows of the validation file that were measured at the most throughput: tokens per second and GPU."""
    from tests.planning.test_predict import VALIDATION, published

    found = []
    for row in csv.DictReader(VALIDATION.open(newline="")):
        if not row["tpot_ms"]:
            workload = Workload(round(float(row["isl_mean"])), round(float(row["osl_mean"])))
            found.append((published(row), workload, float(row["out_tok_s_per_gpu"])))
    return found

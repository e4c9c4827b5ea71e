"""What aiconfigurator predicts for rows of the sample: run in an environment of its own, where it is installed.

    python -m venv peer && peer/bin/pip install aiconfigurator==0.12.0
    peer/bin/python benchmarks/planner_peer.py SAMPLE OUT.csv --rows 200
    python benchmarks/planner_accuracy.py --sample SAMPLE --peer OUT.csv

Its settings are the row's own: lengths as they were on average, formats as the row labels them, FP8 KV cache where the
recipe had it, and the newest of its tables for the engine. A row that it has no data for is tried with other modes of
its database before it is given up.
"""

import argparse
import csv
import logging
import random
import re
from pathlib import Path

from aiconfigurator.cli.api import cli_estimate

logging.disable(logging.CRITICAL)
# of the models that planner_accuracy.py has configs for
OWNERS = ("MiniMaxAI/", "Qwen/Qwen3-", "deepseek-ai/", "meta-llama/", "moonshotai/", "openai/")
DENSE = ("meta-llama/", "Qwen/Qwen3-32B")
# Rows' names, where it has the same architecture under another only; the hub is not asked.
ITS_NAMES = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B",
}
MODES = ("SILICON", "HYBRID", "EMPIRICAL")


def settings(row: dict[str, str]) -> dict[str, object]:
    found = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    copies = int(row["attention_dp_size"] or 1)
    tensor = int(row["tp_size"] or 1)
    share = 1.0 if "source_file=/Users" in row["silicon_data_source"] else 0.9
    result: dict[str, object] = {
        "backend_name": row["backend"],
        "isl": round(float(row["isl"]) * share),
        "osl": round(float(row["osl"]) * share),
        "batch_size": max(round(float(found[1] if found else row["batch_size"]) / copies), 1),
        # attention copied: tp_size counts the GPUs of all copies
        "tp_size": max(tensor // copies, 1) if copies > 1 else tensor,
        "attention_dp_size": copies,
    }
    if not row["model_path"].startswith(DENSE):
        result["moe_tp_size"] = int(row["moe_tp_size"] or 1)
        result["moe_ep_size"] = int(row["moe_ep_size"] or 1)
    blackwell = row["system"].startswith(("b", "g"))
    is_small = "Llama-3.1-70B" in row["model_path"] or row["backend"] == "trtllm"
    if row["model_path"].startswith("openai"):
        result["kvcache_quant_mode"] = "fp8" if blackwell else "bfloat16"
    else:
        if row["gemm_quant_mode"]:
            result["gemm_quant_mode"] = row["gemm_quant_mode"]
        if row["moe_quant_mode"] and "moe_ep_size" in result:
            result["moe_quant_mode"] = row["moe_quant_mode"]
        if row["precision"] == "fp4" or (row["precision"] == "fp8" and is_small):
            result["kvcache_quant_mode"] = "fp8"
    return result


def estimate(row: dict[str, str]) -> tuple[float, float, str]:
    """TTFT and TPOT in ms, and which mode gave them ('' for none)."""
    wanted, model = settings(row), ITS_NAMES.get(row["model_path"], row["model_path"])
    bare = {key: value for key, value in wanted.items() if not key.endswith("quant_mode")}
    for chosen in (wanted, bare):
        for mode in MODES:
            try:
                found = cli_estimate(model, row["system"], database_mode=mode, **chosen)
            except Exception:  # whatever it fails with, another mode may do
                continue
            return found.ttft, found.tpot, mode if chosen is wanted else f"{mode}, own formats"
    return 0.0, 0.0, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sample", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=200, help="so many, drawn at random")
    args = parser.parse_args()
    with args.sample.open(newline="") as file, args.out.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["id", "ttft_ms", "tpot_ms", "mode"])
        rows = [row for row in csv.DictReader(file) if row["mode"] == "agg" and row["model_path"].startswith(OWNERS)]
        chosen = random.Random(0).sample(rows, args.rows)
        # its tables are read once for each of these
        for row in sorted(chosen, key=lambda row: (row["system"], row["backend"], row["model_path"])):
            writer.writerow([row["id"], *estimate(row)])
            out.flush()


if __name__ == "__main__":
    main()

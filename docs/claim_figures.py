"""Figures of docs/concepts/claims.md: what a claim says and what was published about it are literal, the rest is
computed with the planner."""

from dataclasses import dataclass, replace
from statistics import median

from blockscale.planning.hardware.catalogue import Gpu, find_gpu
from blockscale.planning.models.architecture import Architecture, Matrix, Part, from_config
from blockscale.planning.models.model import presets
from blockscale.planning.models.weights import Weights, matrix_bytes, weights_of
from blockscale.planning.money.assumptions import load_assumptions
from blockscale.planning.money.cost import cost, electricity_per_million_tokens, landed_multiplier
from blockscale.planning.money.energy import joules_per_output_token, power, racks
from blockscale.planning.speed.layout import parse_layout
from blockscale.planning.speed.predict import Workload, predict
from blockscale.planning.speed.roofline import Deployment

GB = 1e9


@dataclass(frozen=True)
class Row:
    """One figure. `is_published`: measured or stated by others, not computed here."""

    name: str
    value: float
    unit: str = ""
    digits: int = 2
    is_published: bool = False

    @property
    def text(self) -> str:
        return f"{self.value:,.{self.digits}f} {self.unit}".strip()


def architecture(name: str) -> Architecture:
    return from_config(presets()[name], name)


def weights(name: str, fmt: str, **parts: str) -> Weights:
    return weights_of(architecture(name), fmt, {Part[part.upper()]: f for part, f in parts.items()})


def size(name: str, fmt: str, **parts: str) -> float:
    """GB of a whole checkpoint."""
    return weights(name, fmt, **parts).num_bytes / GB


def bits(fmt: str) -> float:
    """Bits per element of one large matrix, scales included."""
    matrix = Matrix(Part.FEED_FORWARD, 16384, 16384)
    return 8 * matrix_bytes(matrix, fmt) / matrix.num_parameters


def billions(name: str) -> float:
    return architecture(name).num_parameters / 1e9


def deployment(name: str, fmt: str, gpu: str, layout: str) -> Deployment:
    return Deployment(architecture(name), weights(name, fmt), find_gpu(gpu), parse_layout(layout), "fp8")


def wall_joules(d: Deployment, work: Workload) -> float:
    """Predicted J per output token at the wall."""
    p = predict(d, work)
    return joules_per_output_token(power(d, p), p.tokens_per_s_per_gpu, "wall").value


def flagship_sizes() -> list[Row]:
    params = billions("llama-3.1-405b")
    return [
        Row("405B in FP32", 4 * params, "GB", 1),
        Row("405B in BF16", size("llama-3.1-405b", "bf16"), "GB", 1),
        Row("405B, linears in FP8", size("llama-3.1-405b", "fp8"), "GB", 1),
        Row("405B, linears in NVFP4", size("llama-3.1-405b", "nvfp4"), "GB", 1),
        Row("405B, every tensor at 4.5 bits", params * 4.5 / 8, "GB", 1),
        Row("FP32: true over claimed", 4 * params / 140, "x", 1),
        Row("FP4: true over claimed", size("llama-3.1-405b", "nvfp4") / 17.5, "x", 1),
        Row("70B in BF16", size("llama-3.1-70b", "bf16"), "GB", 1),
        Row("what 17.5 GB holds at 4.0 bits", 17.5 * 8 / 4, "billion parameters", 0),
    ]


def smaller() -> list[Row]:
    r1_native = size("deepseek-r1", "fp8-block128")
    rows = [
        Row("one matrix, BF16 over NVFP4", bits("bf16") / bits("nvfp4"), "x", 3),
        Row("one matrix, FP8 over NVFP4", bits("fp8") / bits("nvfp4"), "x", 3),
    ]
    for label, name in (("405B", "llama-3.1-405b"), ("70B", "llama-3.1-70b"), ("8B", "llama-3.1-8b")):
        rows.append(Row(f"{label} in NVFP4", size(name, "nvfp4"), "GB"))
        rows.append(Row(f"{label}, BF16 over NVFP4", size(name, "bf16") / size(name, "nvfp4"), "x"))
    rows += [
        Row("70B, FP8 over NVFP4", size("llama-3.1-70b", "fp8") / size("llama-3.1-70b", "nvfp4"), "x"),
        Row("8B in NVFP4, bits a parameter", 8 * size("llama-3.1-8b", "nvfp4") / billions("llama-3.1-8b"), "", 1),
        Row("DeepSeek-R1 as published, FP8 blocks", r1_native, "GB", 1),
        Row("DeepSeek-R1 in NVFP4, attention in BF16", size("deepseek-r1", "nvfp4", attention="bf16"), "GB", 1),
        Row("the same, FP8 over it", r1_native / size("deepseek-r1", "nvfp4", attention="bf16"), "x"),
        Row("DeepSeek-R1 in NVFP4, all linears", size("deepseek-r1", "nvfp4"), "GB", 1),
    ]
    return rows


def a_quarter() -> list[Row]:
    return [
        Row("NVFP4 over BF16, one matrix", bits("nvfp4") / bits("bf16"), "", 3),
        Row("70B claimed", 35, "GB", 1, True),
        Row("70B in NVFP4", size("llama-3.1-70b", "nvfp4"), "GB", 1),
        Row("405B claimed", 202.5, "GB", 1, True),
        Row("405B in NVFP4", size("llama-3.1-405b", "nvfp4"), "GB", 1),
    ]


def an_eighth() -> list[Row]:
    d = deployment("llama-3.1-70b", "fp8", "b200", "tp1")
    work = Workload(1024, 1024, 64)
    fast = replace(d, weights=weights("llama-3.1-70b", "nvfp4"))
    return [
        Row("FP32 over NVFP4, one matrix", 32 / bits("nvfp4"), "x"),
        Row("FP32 over NVFP4, 405B", 4 * billions("llama-3.1-405b") / size("llama-3.1-405b", "nvfp4"), "x"),
        Row(
            "70B on one B200, 64 requests: energy, FP8 over NVFP4, predicted",
            wall_joules(d, work) / wall_joules(fast, work),
            "x",
        ),
    ]


def gains(gpu: str, layouts: tuple[str, ...]) -> list[float]:
    """ITL in FP8 over ITL in NVFP4, predicted for 70B at the same concurrency, wherever all requests fit."""
    found = []
    for layout in layouts:
        eight, four = (deployment("llama-3.1-70b", fmt, gpu, layout) for fmt in ("fp8", "nvfp4"))
        for work in (Workload(i, o, n) for i, o in ((1024, 1024), (8192, 1024)) for n in (4, 16, 64)):
            slow, fast = predict(eight, work), predict(four, work)
            if slow.waiting == 0 and fast.waiting == 0:
                found.append(slow.itl_s.value / fast.itl_s.value)
    return found


def twice_as_fast() -> list[Row]:
    single, all_found = gains("b200", ("tp1",)), gains("b200", ("tp1", "tp2", "tp4", "tp8"))
    d = deployment("llama-3.1-70b", "fp8", "b200", "tp1")
    eight, four = (
        predict(replace(d, weights=weights("llama-3.1-70b", f)), Workload(8192, 1024)) for f in ("fp8", "nvfp4")
    )
    return [
        Row("peak arithmetic", find_gpu("b200").peak("fp4").value / find_gpu("b200").peak("fp8").value, "x"),
        Row("bytes of weights", size("llama-3.1-70b", "fp8") / size("llama-3.1-70b", "nvfp4"), "x"),
        Row("time between tokens, all layouts, predicted median", median(all_found), "x"),
        Row("the same, least", min(all_found), "x"),
        Row("the same, most", max(all_found), "x"),
        Row("on one GPU, predicted median", median(single), "x"),
        Row("129 matched pairs measured, median", 1.08, "x", 2, True),
        Row("measured, least", 0.89, "x", 2, True),
        Row("measured, most", 1.34, "x", 2, True),
        Row(
            "sequences admitted on one GPU (8k in, 1k out), NVFP4 over FP8",
            four.memory.max_sequences / eight.memory.max_sequences,
            "x",
        ),
    ]


def same_size() -> list[Row]:
    mx, nv = (size("gpt-oss-120b", "bf16", experts=fmt) for fmt in ("mxfp4", "nvfp4"))
    return [
        Row("MXFP4", bits("mxfp4"), "bits", 3),
        Row("NVFP4", bits("nvfp4"), "bits", 3),
        Row("INT4, groups of 128", bits("int4"), "bits", 3),
        Row("FP8, blocks of 128", bits("fp8-block128"), "bits", 3),
        Row("gpt-oss-120b, experts in MXFP4", mx, "GB"),
        Row("the same, bits a parameter", 8 * mx / billions("gpt-oss-120b")),
        Row("gpt-oss-120b, experts in NVFP4", nv, "GB"),
    ]


def per_watt(gpu: Gpu, operand: str) -> float:
    """Dense TFLOP/s per W of TDP."""
    assert gpu.tdp_watts is not None
    return gpu.peak(operand).value / 1e12 / gpu.tdp_watts.value


def bytes_per_joule(gpu: Gpu) -> float:
    assert gpu.tdp_watts is not None
    return gpu.bandwidth.value / gpu.tdp_watts.value


# MLPerf Inference, closed division: output tokens a second and watts at the wall, all GPUs of the system.
H200_70B_FP8 = (25262.1, 6153.0)  # v4.1, 8 x H200 at a limit of 500 W, Llama-2-70B
B200_70B_NVFP4 = (102909.0, 10401.0)  # v5.1, 8 x B200, Llama-2-70B
B200_405B_NVFP4 = (1637.11, 9891.76)  # v5.1, 8 x B200, Llama-3.1-405B, 9,428 tokens in and 652.5 out on average


def fifty_times() -> list[Row]:
    h100, b200, gb300 = (find_gpu(name) for name in ("h100", "b200", "gb300"))
    old, new = H200_70B_FP8[1] / H200_70B_FP8[0], B200_70B_NVFP4[1] / B200_70B_NVFP4[0]
    large = B200_405B_NVFP4[1] / B200_405B_NVFP4[0]
    eight = deployment("deepseek-r1", "fp8-block128", "h200", "dep8")
    four = deployment("deepseek-r1", "nvfp4", "gb300", "dep8")
    work = Workload(1000, 1000)
    return [
        Row("arithmetic a W: B200 NVFP4 over H100 FP8", per_watt(b200, "fp4") / per_watt(h100, "fp8"), "x", 1),
        Row("arithmetic a W: GB300 NVFP4 over H100 FP8", per_watt(gb300, "fp4") / per_watt(h100, "fp8"), "x", 1),
        Row(
            "weights read a J: B200 NVFP4 over H100 FP8",
            bytes_per_joule(b200) / bytes_per_joule(h100) * 8 / 4.5,
            "x",
            1,
        ),
        Row(
            "weights read a J: GB300 NVFP4 over H100 FP8",
            bytes_per_joule(gb300) / bytes_per_joule(h100) * 8 / 4.5,
            "x",
            1,
        ),
        Row("70B on 8 x H200 at 500 W in FP8, wall, measured", old, "J/token", 3, True),
        Row("70B on 8 x B200 in NVFP4, wall, measured", new, "J/token", 3, True),
        Row("measured ratio", old / new, "x", 1, True),
        Row("405B on 8 x B200 in NVFP4, wall, measured", large, "J/token", 2, True),
        Row("the same, over all tokens with the prompts'", large * 652.5 / (9428 + 652.5), "J/token", 2, True),
        Row(
            "DeepSeek-R1, H200 FP8 over GB300 NVFP4 at the most throughput, predicted",
            wall_joules(eight, work) / wall_joules(four, work),
            "x",
            1,
        ),
    ]


def fifteen_times() -> list[Row]:
    eight = deployment("llama-3.1-70b", "fp8", "h100", "tp2")
    four = deployment("llama-3.1-70b", "nvfp4", "b200", "tp1")
    work = Workload(1000, 1000)
    factor = wall_joules(eight, work) / wall_joules(four, work)
    return [
        Row("less energy, if 15 x", 100 * (1 - 1 / 15), "%", 1),
        Row("70B at the most throughput, H100 FP8 over B200 NVFP4, predicted", factor, "x", 1),
        Row("less energy, predicted", 100 * (1 - 1 / factor), "%", 0),
    ]


# Tokens a second and GPU at the most throughput, GB200 over Hopper: TensorRT-LLM's performance overview, MLPerf v5.1.
MEASURED_RATIOS = {
    "Qwen3-235B": 3.19,
    "70B": 3.52,
    "405B": 4.19,
    "DeepSeek-R1 (against H200)": 4.26,
    "gpt-oss-120b": 5.81,
}


def nine_servers() -> list[Row]:
    h100, gb200 = find_gpu("h100"), find_gpu("gb200")
    assert h100.system_kw is not None
    assert h100.all_in_kw is not None
    assert gb200.all_in_kw is not None
    rack = racks(gb200, 72).kw
    nine = 9 * h100.system_kw.value
    all_in = gb200.all_in_kw / h100.all_in_kw
    rows = [
        Row("GPUs of nine servers", 9 * h100.system_gpus, "", 0),
        Row("nine DGX H100, nameplate", nine, "kW", 1),
        Row("NVL72, nameplate, low", rack.low, "kW", 0),
        Row("NVL72, nameplate, high", rack.high, "kW", 0),
        Row("more power, at 120 kW", 100 * (rack.low / nine - 1), "%", 0),
        Row("more power, at 132 kW", 100 * (rack.high / nine - 1), "%", 0),
        Row("times the tokens that 83 % needs, at 120 kW", rack.low / nine / 0.17, "x", 1),
        Row("times the tokens that 83 % needs, at 132 kW", rack.high / nine / 0.17, "x", 1),
    ]
    for name, ratio in MEASURED_RATIOS.items():
        rows.append(Row(f"{name}: tokens a GPU, measured", ratio, "x", 2, True))
        rows.append(Row(f"{name}: less energy a token, by nameplate", 100 * (1 - rack.low / nine / ratio), "%", 0))
        rows.append(Row(f"{name}: less energy a token, by all-in power", 100 * (1 - all_in / ratio), "%", 0))
    return rows


USABLE, OVERHEAD_GB = 0.9, 2.0  # of the memory, as engines do; context, graphs, scratch


def copies(gpu: str, fmt: str) -> int:
    """How many 70B models a GPU holds, by weights."""
    room = find_gpu(gpu).memory_bytes / GB * USABLE - OVERHEAD_GB
    return int(room // size("llama-3.1-70b", fmt))


def two_models() -> list[Row]:
    rows = [
        Row(f"{find_gpu(gpu).name}, {label}", copies(gpu, fmt), "models", 0)
        for gpu in ("l40s", "h100", "rtx-pro-6000", "h200", "b200")
        for label, fmt in (("BF16", "bf16"), ("FP8", "fp8"), ("NVFP4", "nvfp4"))
    ]
    for gpu in ("rtx-pro-6000", "h200"):
        left = find_gpu(gpu).memory_bytes / GB * USABLE - OVERHEAD_GB - 2 * size("llama-3.1-70b", "nvfp4")
        rows.append(Row(f"{find_gpu(gpu).name}: left for KV cache beside two", left, "GB", 1))
        rows.append(Row(f"{find_gpu(gpu).name}: tokens of FP8 cache in it", left * GB / 163_840 / 1e3, "thousand", 0))
    return rows


def five_times_fp8() -> list[Row]:
    def peaks(name: str) -> float:
        gpu = find_gpu(name)
        return gpu.peak("fp4").value / gpu.peak("fp8").value

    return [Row(f"{find_gpu(n).name}, dense", peaks(n), "x", 1) for n in ("b200", "gb200", "b300", "gb300", "rtx-5090")]


def rack_power() -> list[Row]:
    gb200 = find_gpu("gb200")
    assert gb200.system_kw is not None
    assert gb200.tdp_watts is not None
    kw = gb200.system_kw.value
    return [
        Row("rack a GPU", kw / 72, "kW"),
        Row("TDP of the GPU", gb200.tdp_watts.value / 1e3, "kW"),
        Row("1 GWh a year, all the time", 1e6 / 8760, "kW", 0),
        Row("one rack at nameplate, a year", kw * 8760 / 1e6, "GWh"),
        Row("racks of 16 x DGX B200 in air", racks(find_gpu("b200"), 128).num_racks, "", 0),
    ]


def spark() -> list[Row]:
    gpu = find_gpu("dgx-spark")
    held = 200 * 4.5 / 8
    return [
        Row("200 billion parameters in NVFP4", held, "GB", 1),
        Row("visible memory", gpu.memory_bytes / GB, "GB", 1),
        Row("tokens a second at most, if dense", gpu.bandwidth.value / GB / held, "", 1),
    ]


def nameplate() -> list[Row]:
    b200, h200 = find_gpu("b200"), find_gpu("h200")
    assert b200.system_kw is not None
    assert h200.system_kw is not None
    return [
        Row(
            "8 x B200, 70B, measured over nameplate", 100 * B200_70B_NVFP4[1] / b200.system_kw.value / 1e3, "%", 0, True
        ),
        Row(
            "8 x B200, 405B, measured over nameplate",
            100 * B200_405B_NVFP4[1] / b200.system_kw.value / 1e3,
            "%",
            0,
            True,
        ),
        Row(
            "8 x H200 at 500 W, measured over nameplate",
            100 * H200_70B_FP8[1] / h200.system_kw.value / 1e3,
            "%",
            0,
            True,
        ),
    ]


def electricity() -> list[Row]:
    """Of 70B on one B200 at the most throughput: parts of the cost, bought, in the United States."""
    d = deployment("llama-3.1-70b", "nvfp4", "b200", "tp1")
    spent = cost(d, predict(d, Workload(1000, 1000)), load_assumptions(country="US"))
    rows = [
        Row("1 J a token at R$ 0.45/kWh and PUE 1.3", electricity_per_million_tokens(1, 1.3, 0.45), "R$/million", 3)
    ]
    rows += [
        Row(f"70B in NVFP4 on one B200, {name}", part, f"{spent.currency}/million", 4)
        for name, part in spent.parts.items()
    ]
    return [*rows, Row("energy, of the whole", 100 * spent.energy_share, "%", 0)]


def import_taxes() -> list[Row]:
    brazil = load_assumptions(country="BR")
    return [
        Row("PIS/COFINS 11.75 %, ICMS 18 %", landed_multiplier(brazil), "x CIF", 3),
        Row("federal taxes suspended (REDATA)", landed_multiplier(replace(brazil, redata=True)), "x CIF", 3),
        Row("with import duty of 16 %", landed_multiplier(replace(brazil, import_duty_share=0.16)), "x CIF", 3),
        Row("18 % added on top instead", 1.1175 * 1.18, "x CIF", 3),
    ]

"""One configuration's answer. Needs nothing."""

import contextlib
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import blockscale as bs
from blockscale.errors import CheckFailed, UsageError
from blockscale.planning.answer.plan import bounds
from blockscale.planning.answer.result import PlanResult
from blockscale.planning.planner import plan
from blockscale.planning.speed.roofline import Step

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def config(folder: Path, **changes: object) -> Path:
    """A config.json with some fields changed; those that are None are left out."""
    content = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    return file


def test_the_answer_of_a_preset() -> None:
    result = bs.plan("llama-3.1-70b", gpu="b200", format="nvfp4", kv_cache="fp8", concurrency=64)
    assert result.fits
    assert result.weights_bytes == pytest.approx(42.71e9, rel=1e-3)
    assert result.kv_bytes_per_token == 163_840
    assert result.max_sequences > 64
    assert result.sequences == 64
    assert result.limit == "requests"
    for estimate in (result.itl_ms, result.ttft_ms, result.output_tokens_per_s_per_gpu):
        assert estimate is not None
        assert 0 < estimate.low < estimate.value < estimate.high
    assert result.bound == result.decode_bounds[0].name
    with pytest.raises(FrozenInstanceError):
        result.fits = False  # type: ignore[misc]


def test_json_has_the_keys_that_checks_rely_on() -> None:
    data = json.loads(json.dumps(bs.plan("llama-3.1-8b", gpu="h100", concurrency=8).to_dict()))
    assert data["fits"] is True
    assert {"weights_bytes", "kv_bytes_per_token", "max_sequences", "bound"} <= set(data)
    for key in ("ttft_ms", "itl_ms", "output_tokens_per_s_per_gpu", "wall_watts", "joules_per_output_token"):
        assert set(data[key]) == {"value", "low", "high"}
        assert data[key]["low"] <= data[key]["value"] <= data[key]["high"]
    assert data["gpus"] == 1
    assert data["workload"]["concurrency"] == 8


def test_what_does_not_fit_is_an_answer() -> None:
    result = plan("llama-3.1-405b", gpu="h200", format="bf16")
    assert not result.fits
    assert result.missing_bytes > 811e9 - 150.8e9
    assert result.itl_ms is None
    assert result.ttft_ms is None
    assert result.bound is None
    assert result.curve == ()
    assert result.nearest
    for choice in result.nearest:
        near = plan(
            "llama-3.1-405b", gpu="h200", format=choice.format, kv_cache=choice.cache, layout=choice.layout.name
        )
        assert near.fits, choice.name
    assert result.to_dict()["itl_ms"] is None


def test_a_smaller_cache_is_the_nearest_change() -> None:
    result = plan("llama-3.1-70b", gpu="h200", format="fp8", input=120_000, output=4_000, layout="tp1")
    wider = plan("llama-3.1-70b", gpu="h200", format="fp8", input=120_000, output=4_000, kv_cache="fp8", layout="tp1")
    assert result.max_sequences < wider.max_sequences


def test_formats_in_plain_words() -> None:
    (native,) = plan("llama-3.1-8b", gpu="b200", format="nvfp4").formats
    (emulated,) = plan("llama-3.1-8b", gpu="h200", format="nvfp4").formats
    assert (native.is_native, native.operand) == (True, "fp4")
    assert (emulated.is_native, emulated.operand) == (False, "bf16")


def test_weights_only() -> None:
    whole, weights = (plan("llama-3.1-8b", gpu="b200", format=f) for f in ("nvfp4", "nvfp4-w4a16"))
    assert whole.weights_bytes == weights.weights_bytes
    assert weights.formats[0].operand == "bf16"


def test_experts_alone_are_in_4_bits_in_gpt_oss() -> None:
    result = plan("gpt-oss-120b", gpu="b200")
    assert result.choice.format == "mxfp4"
    assert result.weights_bytes == pytest.approx(65.25e9, rel=1e-3)


def test_copies_share_the_requests() -> None:
    one, four = (plan("llama-3.1-8b", gpu="h100", layout=layout, concurrency=64) for layout in ("tp1", "tp1dp4"))
    assert four.max_sequences == 4 * one.max_sequences
    assert four.sequences == one.sequences == 64
    assert one.itl_ms is not None
    assert four.itl_ms is not None
    assert four.itl_ms.value < one.itl_ms.value


def test_gpus_and_layout() -> None:
    assert plan("llama-3.1-70b", gpu="h100", gpus=8, layout="tp4").choice.layout.name == "tp4dp2"
    assert plan("llama-3.1-405b", gpu="h100", gpus=16, format="bf16").choice.layout.name == "tp8pp2"
    with pytest.raises(UsageError, match="takes 4 GPUs"):
        plan("llama-3.1-70b", gpu="h100", gpus=6, layout="tp4")


LAYOUTS_OF_8 = ("tp8", "tp4dp2", "tp2dp4")


@pytest.mark.parametrize("workload", [{}, {"concurrency": 4}, {"rate": 5.0}])
def test_the_layout_of_so_many_gpus_is_the_one_whose_tokens_cost_least(workload: dict) -> None:
    """Of those that no prediction can tell apart, the quickest."""
    chosen = plan("llama-3.1-70b", gpu="h100", gpus=8, format="fp8", **workload)
    said = chosen.notices[0]
    assert said.key in ("notice.layout", "notice.layout_quickest")
    assert chosen.to_dict()["notices"][0].startswith(f"{chosen.choice.layout.name} is chosen for 8 x H100 SXM")
    others = [plan("llama-3.1-70b", gpu="h100", format="fp8", layout=name, **workload) for name in LAYOUTS_OF_8]
    assert not [n for other in others for n in other.notices if n.key.startswith("notice.layout")]
    costs = {other.choice.layout: (cost_of(other), other.itl_ms.value) for other in others if other.itl_ms is not None}
    assert chosen.choice.layout in costs
    least = min(cost for cost, _ in costs.values())
    alike = {layout: itl for layout, (cost, itl) in costs.items() if cost <= 1.05 * least}
    assert chosen.choice.layout == min(alike, key=lambda layout: alike[layout])
    assert (said.key == "notice.layout_quickest") == (len(alike) > 1)


def cost_of(result: PlanResult) -> float:
    assert result.cost_per_million_tokens is not None
    return result.cost_per_million_tokens.value


def test_few_requests_are_spread_wider_than_many() -> None:
    few, most = (
        plan("llama-3.1-70b", gpu="h100", gpus=8, format="fp8", concurrency=n).choice.layout for n in (1, None)
    )
    assert few.tensor > most.tensor


def test_the_layout_of_what_is_compared_is_chosen_likewise() -> None:
    result = plan("llama-3.1-70b", gpu="b200", gpus=8, format="nvfp4", compare=["fp8@h200", "fp8@16xh200", "h200:tp8"])
    same, more, named = result.compared
    assert same.choice.layout == plan("llama-3.1-70b", gpu="h200", gpus=8, format="fp8").choice.layout
    assert more.choice.layout == plan("llama-3.1-70b", gpu="h200", gpus=16, format="fp8").choice.layout
    assert named.choice.layout.name == "tp8"
    kept = plan("llama-3.1-70b", gpu="b200", layout="tp4dp2", format="nvfp4", compare=["fp8@h200"]).compared[0]
    assert kept.choice.layout.name == "tp4dp2"


def test_a_layout_that_alone_serves_the_rate() -> None:
    over = plan("llama-3.1-70b", gpu="h100", gpus=8, format="fp8", rate=500)
    assert over.is_overloaded
    assert over.notices[0].key == "notice.layout_overloaded"
    shares = [
        plan("llama-3.1-70b", gpu="h100", layout=name, format="fp8", rate=500).utilization
        for name in ("tp8", "tp4dp2", "tp2dp4")
    ]
    assert over.utilization == min(share for share in shares if share is not None)


def test_more_requests_than_fit_wait() -> None:
    result = plan("llama-3.1-70b", gpu="h100", format="nvfp4", concurrency=100_000)
    assert result.limit == "memory"
    assert result.sequences == result.max_sequences
    assert result.waiting == 100_000 - result.max_sequences


def test_a_rate_that_is_too_high() -> None:
    result = plan("llama-3.1-70b", gpu="h100", format="nvfp4", rate=1000, ttft_ms=500, layout="tp1")
    assert result.utilization is not None
    assert result.utilization > 1
    assert not result.meets_targets
    assert json.loads(json.dumps(result.to_dict()))["fits"]
    assert result.cost_per_million_tokens is None
    assert result.joules_per_output_token is None
    assert result.wall_watts is not None
    assert not [notice for notice in result.notices if notice.key.startswith("notice.no_price")]
    assert result.enough is not None
    wider, fewer = (
        plan("llama-3.1-70b", gpu="h100", format="nvfp4", rate=1000, layout=f"tp1dp{n}")
        for n in (result.enough.layout.replicas, result.enough.layout.replicas - 1)
    )
    assert fewer.is_overloaded
    assert not wider.is_overloaded


def test_at_a_rate_what_comes_out_is_what_was_asked_for() -> None:
    result = plan("llama-3.1-70b", gpu="b200", format="nvfp4", kv_cache="fp8", layout="tp1", rate=1.0)
    made, most = result.output_tokens_per_s, result.capacity_per_s
    assert made is not None
    assert most is not None
    assert made.low == made.value == made.high == pytest.approx(1024)
    assert most.low < most.value < most.high
    assert result.utilization == pytest.approx(1024 / most.value)
    near = plan(
        "llama-3.1-70b", gpu="b200", format="nvfp4", kv_cache="fp8", layout="tp1", rate=0.95 / result.utilization
    )
    over = plan(
        "llama-3.1-70b", gpu="b200", format="nvfp4", kv_cache="fp8", layout="tp1", rate=1.5 / result.utilization
    )
    assert near.output_tokens_per_s is not None
    assert over.output_tokens_per_s is not None
    assert near.output_tokens_per_s.value == pytest.approx(0.95 * most.value)
    assert near.output_tokens_per_s.low == pytest.approx(most.low)  # if the prediction is too high
    assert over.output_tokens_per_s.value == pytest.approx(most.value)
    assert result.to_dict()["capacity_tokens_per_s"]["value"] == most.value


def test_a_machine_that_idles_is_named() -> None:
    def is_idle(**load: float) -> bool:
        result = plan("llama-3.1-70b", gpu="b200", format="nvfp4", kv_cache="fp8", layout="tp1", **load)
        return "notice.idle" in [notice.key for notice in result.notices]

    assert is_idle(rate=0.2)
    assert not is_idle(rate=3.0)
    assert is_idle(concurrency=2)
    assert not is_idle(concurrency=256)
    assert not is_idle()


def test_a_share_of_a_system_says_what_the_whole_costs() -> None:
    (said,) = [n for n in plan("llama-3.1-70b", gpu="b200", format="nvfp4").notices if "sold_whole" in n.key]
    whole = plan("llama-3.1-70b", gpu="b200", gpus=8, format="nvfp4")
    assert whole.bill.cost is not None
    assert whole.bill.cost.purchase is not None
    assert said.key == "notice.sold_whole_cost"
    assert said.values["cost"] == whole.bill.cost.purchase.total
    assert (said.values["gpus"], said.values["whole"], said.values["used"]) == (8, 8, 1)
    assert not [n for n in whole.notices if "sold_whole" in n.key]
    rack = plan("llama-3.1-70b", gpu="gb200", layout="tp1dp73", format="nvfp4")
    assert [n.values["whole"] for n in rack.notices if "sold_whole" in n.key] == [144]
    for card in ("l40s", "rtx-pro-6000", "dgx-spark"):
        assert not [n for n in plan("llama-3.1-8b", gpu=card, format="nvfp4").notices if "sold_whole" in n.key]


def test_a_gpu_that_nobody_measured_is_named() -> None:
    def keys(gpu: str) -> list[str]:
        return [notice.key for notice in plan("llama-3.1-8b", gpu=gpu, format="nvfp4").notices]

    assert "notice.unmeasured" in keys("mi355x")
    assert "notice.unmeasured" in keys("rtx-5090")
    assert "notice.unmeasured" not in keys("b200")
    assert "notice.unmeasured" not in keys("rubin")  # a banner says more


def test_what_taxes_are_not_in_is_said(tmp_path: Path) -> None:
    def keys(text: str) -> list[str]:
        file = tmp_path / "my.yaml"
        file.write_text(text)
        return [notice.key for notice in plan("llama-3.1-8b", gpu="h200", assumptions=file).notices]

    assert "notice.untaxed_rent" in keys("country: BR\nacquisition: rental\n")
    assert "notice.untaxed_rent" not in keys("country: BR\nacquisition: rental\nrental_tax_share: 0.4\n")
    assert "notice.untaxed_rent" not in keys("country: BR\n")
    assert "notice.redata" in keys("country: BR\nredata: true\n")
    assert "notice.redata" not in keys("country: BR\n")


def test_windows_are_counted_beside_what_a_token_adds() -> None:
    result = plan("gpt-oss-120b", gpu="b200", input=8000, output=2000)
    assert result.kv_bytes_per_token == 36_864  # of 18 layers; the others are full
    assert result.kv_bytes_per_sequence == 36_864 * 128
    longer = plan("gpt-oss-120b", gpu="b200", input=8000, output=2640)
    added = longer.memory.sequence_bytes - result.memory.sequence_bytes
    assert added == pytest.approx(640 * result.kv_bytes_per_token)
    assert plan("llama-3.1-8b", gpu="b200").kv_bytes_per_sequence == 0


def test_bounds_say_how_far_away_the_next_ones_are() -> None:
    weights, cache, compute = bounds(Step(weights=8.0, compute=2.0, cache=4.0, communication=0.0, overhead=0.0))
    assert (weights.name, weights.times_away, weights.share) == ("weights", 1.0, 8 / 12)
    assert (cache.name, cache.times_away, cache.share) == ("KV cache", 2.0, 4 / 12)
    assert (compute.name, compute.times_away, compute.share) == ("compute", 4.0, 0.0)  # hidden behind the weights


def test_the_curve_ends_with_what_is_admitted() -> None:
    result = plan("llama-3.1-70b", gpu="b200", format="nvfp4", kv_cache="fp8")
    sequences = [point.sequences for point in result.curve]
    assert sequences[:3] == [1, 2, 4]
    assert sequences[-1] == min(result.max_sequences, 1024)
    latencies = [point.itl_ms.value for point in result.curve]
    assert latencies == sorted(latencies)


OTHERS = ["fp8@h200", "2xh100:tp2", "l40s"]


def test_side_by_side() -> None:
    result = plan(
        "llama-3.1-70b", gpu="b200", format="nvfp4", concurrency=32, compare=["fp8@h200", "2xh100:tp2", "l40s"]
    )
    fp8, two, small = result.compared
    assert (fp8.choice.format, fp8.choice.gpu.key, fp8.choice.layout.name) == ("fp8", "h200", "tp1")
    assert (two.choice.format, two.num_gpus) == ("nvfp4", 2)
    assert not small.fits
    assert len(result.to_dict()["compared"]) == 3
    with pytest.raises(UsageError, match="no GPU"):
        plan("llama-3.1-70b", gpu="b200", compare=["fp8@h2000"])


def test_targets_of_one_configuration() -> None:
    near = plan("llama-3.1-70b", gpu="b200", format="nvfp4", layout="tp1", concurrency=64, ttft_ms=60_000, itl_ms=1_000)
    assert near.meets_targets
    assert all(target.is_sure for target in near.targets)
    near.check_targets()
    far = plan("llama-3.1-70b", gpu="b200", format="nvfp4", layout="tp1", concurrency=64, itl_ms=0.5)
    assert not far.meets_targets
    with pytest.raises(CheckFailed, match=r"ITL 0\.5 ms"):
        far.check_targets()


def test_roadmap_and_slow_links_are_said() -> None:
    assert "notice.roadmap" in [n.key for n in plan("llama-3.1-8b", gpu="rubin", format="nvfp4").notices]
    assert "notice.no_link" in [n.key for n in plan("llama-3.1-70b", gpu="rtx-5090", gpus=4, format="nvfp4").notices]
    assert "notice.beyond_link" in [n.key for n in plan("llama-3.1-70b", gpu="h100", layout="tp16").notices]


def test_what_is_not_known_of_a_gpu_is_said() -> None:
    result = plan("llama-3.1-8b", gpu="rubin", format="nvfp4")
    assert result.wall_watts is not None
    assert result.cost_per_million_tokens is None
    assert any("purchase_usd_per_gpu: {rubin: ...}" in text for text in result.to_dict()["notices"])


def test_money_is_in_the_currency_of_the_country(tmp_path: Path) -> None:
    options = {"gpu": "h200", "format": "fp8", "concurrency": 32}
    us, br = (plan("llama-3.1-8b", country=code, **options) for code in ("US", "BR"))
    assert us.bill.cost is not None
    assert br.bill.cost is not None
    assert (us.bill.cost.currency, br.bill.cost.currency) == ("USD", "BRL")
    assert br.bill.cost.parts["taxes"] > 0
    assert sum(br.bill.cost.parts.values()) == pytest.approx(br.bill.cost.per_million_tokens.value)
    file = tmp_path / "my.yaml"
    file.write_text("electricity_per_kwh: 0.9\n")
    dear = plan("llama-3.1-8b", assumptions=file, **options)
    assert dear.bill.cost is not None
    assert dear.bill.cost.parts["energy"] == pytest.approx(us.bill.cost.parts["energy"] * 10)
    assert "electricity_per_kwh" in [record["key"] for record in dear.to_dict()["assumptions"]]
    with pytest.raises(UsageError, match="no profile"):
        plan("llama-3.1-8b", country="XX", **options)


def test_a_config_and_a_folder(tmp_path: Path) -> None:
    file = config(tmp_path)
    assert plan(file, gpu="h100").weights_bytes == plan(tmp_path, gpu="h100").weights_bytes
    assert plan(file, gpu="h100").num_parameters == 8_030_261_248


def test_a_gpu_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "memory_bytes = 48000000000\nbandwidth_tb_per_s = 1.0\n"
        "peak_tflops = { fp8 = 400, bf16 = 200 }\nnative = ['fp8']\n"
    )
    result = plan("llama-3.1-8b", gpu=str(file), format="fp8", concurrency=4)
    assert result.itl_ms is not None
    assert result.itl_ms.value > 1e3 * 8e9 / 1e12  # no quicker than the memory gives the weights
    assert result.wall_watts is None
    assert "notice.no_power" in [notice.key for notice in result.notices]
    other = plan("llama-3.1-8b", gpu="h100", format="fp8", compare=[f"FP8@2x{file.rename(tmp_path / 'Mine.toml')}:tp2"])
    assert other.compared[0].choice.gpu.key == "Mine"


def test_a_gpu_of_ones_own_has_a_price_by_its_key(tmp_path: Path) -> None:
    """As the notice says that names the key."""
    file, prices = tmp_path / "laptop.toml", tmp_path / "prices.yaml"
    body = "memory_bytes = 25651314688\nbandwidth_tb_per_s = 0.896\npeak_tflops = { bf16 = 103 }\ntdp_watts = 150\n"
    for text, key in ((body, "laptop"), (f"[gpu.rtx-5090-laptop]\n{body}", "rtx-5090-laptop")):
        file.write_text(text)
        without = plan("llama-3.1-8b", gpu=str(file), concurrency=4)
        assert f"purchase_usd_per_gpu: {{{key}: ...}}" in " ".join(without.to_dict()["notices"])
        prices.write_text(f"purchase_usd_per_gpu: {{{key}: 2500}}\n")
        result = plan("llama-3.1-8b", gpu=str(file), concurrency=4, assumptions=prices)
        assert result.bill.cost is not None
        assert result.bill.cost.purchase is not None
        assert result.bill.cost.purchase.price == pytest.approx(2500 * 1.1)
        beside = plan("llama-3.1-8b", gpu="h100", concurrency=4, assumptions=prices, compare=[f"bf16@{file}"])
        assert beside.compared[0].cost_per_million_tokens is not None
    with pytest.raises(UsageError, match="no GPU 'rtx-5090-laptop'") as caught:
        plan("llama-3.1-8b", gpu="h100", assumptions=prices)
    assert "--gpu my.toml" in caught.value.hint


def test_bytes_of_a_checkpoint_are_its_files(golden_checkpoint) -> None:
    folder = golden_checkpoint("modelopt_qwen3moe_nvfp4")
    result = plan(folder, gpu="b200", input=20, output=20)
    assert result.weights_are_exact
    assert result.choice.format == "nvfp4"
    ends = [end - start for file in folder.glob("*.safetensors") for start, end in offsets(file)]
    assert result.weights_bytes == sum(ends)


def offsets(file: Path) -> list[tuple[int, int]]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    return [tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__"]


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what was fetched before: one error, with presets of a like name. With it: its config."""

    def unreachable(name: str) -> None:
        raise UsageError(f"{name}: the hub cannot be reached", hint="check the network")

    monkeypatch.setattr("blockscale.planning.models.hub.read_hub_model", unreachable)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(UsageError, match="cannot be reached") as caught:
        plan("meta-llama/Llama-3.1-70B", gpu="h200")
    assert "llama-3.1-70b" in caught.value.hint
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(config(tmp_path)))
    assert plan("meta-llama/Llama-3.1-8B", gpu="h200").num_parameters == 8_030_261_248


def test_a_model_without_tokens_is_planned_by_its_weights() -> None:
    assert not plan("flux.1-dev", gpu="rtx-4090").fits
    small = plan("flux.1-dev", gpu="rtx-4090", format="nvfp4")
    assert small.fits
    assert small.itl_ms is None
    assert "notice.no_tokens" in [notice.key for notice in small.notices]


@pytest.mark.parametrize(
    ("options", "says", "hint"),
    [
        ({"model": "llama-3.1-70bb"}, "no model 'llama-3.1-70bb'", "llama-3.1-70b"),
        ({"model": "/no/such/model"}, "no model", "presets"),
        ({"gpu": "h20"}, "no GPU 'h20'", "h200"),
        ({"gpu": "/no/such.toml"}, "cannot be read", ""),
        ({"format": "nvfp5"}, "unknown format 'nvfp5'", "nvfp4"),
        ({"kv_cache": "fp9"}, "unknown KV-cache format", "fp8"),
        ({"engine": "vlllm"}, "unknown engine", "vllm"),
        ({"layout": "tp7"}, "does not divide", "tp8"),
        ({"layout": "dep8"}, "no experts", "tp"),
        ({"layout": "pp999"}, "pipeline stages", ""),
        ({"layout": "zz"}, "layout 'zz' is not known", "tp8"),
        ({"gpus": 0}, "--gpus 0", "positive"),
        ({"input": 0}, "--input 0", "positive"),
        ({"output": -1}, "--output -1", "positive"),
        ({"concurrency": 0}, "--concurrency 0", "positive"),
        ({"rate": 0.0}, "--rate 0.0", "positive"),
        ({"rate": float("nan")}, "--rate nan", "positive"),
        ({"rate": 1.0, "concurrency": 1}, "two workloads", "one of them"),
        ({"ttft_ms": -1.0}, "--ttft-ms -1.0", "positive"),
        ({"itl_ms": 1.0, "objective": "beauty"}, "unknown objective", "cost"),
        ({"input": 200_000}, "131,072 at most", "--input"),
        ({"language": "xx"}, "no texts", "en"),
        ({"compare": ["@"]}, "no configuration", "fp8@h200"),
    ],
)
def test_what_makes_no_sense(options: dict, says: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(**{"model": "llama-3.1-70b", "gpu": "h200", **options})
    assert says in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize("field", [key for key in LLAMA if key not in ("model_type", "tie_word_embeddings")])
def test_a_config_without_a_field_names_it(tmp_path: Path, field: str) -> None:
    file = config(tmp_path, **{field: None})
    if field in ("num_key_value_heads", "intermediate_size"):  # these have a usual value
        assert plan(file, gpu="h200").fits
        return
    with pytest.raises(UsageError, match=field):
        plan(file, gpu="h200")


@pytest.mark.parametrize("field", [key for key in LLAMA if key not in ("model_type", "tie_word_embeddings")])
@pytest.mark.parametrize("value", ["x", 0, -1, 1.5, [], {}, True, 10**12])
def test_fields_of_the_wrong_type_are_one_error(tmp_path: Path, field: str, value: object) -> None:
    file = config(tmp_path, **{field: value})
    with contextlib.suppress(UsageError):  # any other exception fails the test
        assert plan(file, gpu="h200").weights_bytes > 0
    if isinstance(value, str | list | float):
        with pytest.raises(UsageError, match=field):
            plan(file, gpu="h200")


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", "[" * 100_000])
def test_a_broken_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        plan(tmp_path, gpu="h200")


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys, blockscale as bs\n"
        "r = bs.plan('deepseek-r1', gpu='b200', layout='dep8', format='nvfp4', rate=2)\n"
        f"bs.plan('llama-3.1-8b', gpu='b200', report={str(tmp_path / 'page.html')!r})\n"
        "sys.exit(not r.fits or any(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

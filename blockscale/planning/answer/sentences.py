"""A plan in sentences: the answer first, for who signs; then what to know."""

from blockscale.planning.answer.language import Language
from blockscale.planning.answer.result import PlanResult


def title(result: PlanResult, words: Language) -> str:
    return words.text("title", model=result.model, gpus=result.num_gpus, gpu=result.choice.gpu.name)


def subtitle(result: PlanResult, words: Language) -> str:
    choice, workload, image = result.choice, result.workload, result.image_request
    if image is not None:
        return words.text(
            "subtitle.image",
            format=choice.format,
            layout=choice.layout.name,
            width=words.count(image.width),
            height=words.count(image.height),
            steps=words.count(image.steps),
        )
    said = words.text(
        "subtitle",
        format=choice.format,
        cache=choice.cache,
        layout=choice.layout.name,
        input=words.count(workload.input_tokens),
        output=words.count(workload.output_tokens),
    )
    return f"{said}, {load(result, words)}"


def utilization(result: PlanResult, words: Language) -> str:
    """What a rate is of all that can be served; empty without a rate."""
    if result.utilization is None:
        return ""
    key = "figure.load.over" if result.is_overloaded else "figure.load.share"
    return words.text(key, share=words.percentage(result.utilization))


def load(result: PlanResult, words: Language) -> str:
    workload = result.workload
    if workload.rate is not None:
        return words.text("workload.rate", rate=words.short(workload.rate))
    if workload.concurrency is not None:
        return words.text("workload.concurrency", concurrency=words.count(workload.concurrency))
    return words.text("workload.most")


def answer(result: PlanResult, words: Language) -> list[str]:
    """What a reader must know, most important first."""
    gpu, workload = result.choice.gpu.name, result.workload
    if not result.fits:
        missing = words.size(result.missing_bytes)
        said = [words.text("answer.does_not_fit", model=result.model, gpus=result.num_gpus, gpu=gpu, missing=missing)]
        if result.nearest:
            choices = "; ".join(f"{c.name}, KV {c.cache}" for c in result.nearest)
            return [*said, words.text("answer.nearest", choices=choices)]
        return [*said, words.text("answer.no_nearest")]
    key = "answer.fits" if result.max_sequences else "answer.fits_alone"
    said = [
        words.text(
            key,
            model=result.model,
            gpus=result.num_gpus,
            gpu=gpu,
            weights=words.size(result.weights_bytes),
            sequences=words.count(result.max_sequences),
            tokens=words.count(workload.input_tokens + workload.output_tokens),
        )
    ]
    if result.image is not None:
        return [*said, _image(result, words)]
    if result.itl_ms is None:
        return said
    if result.utilization is not None and result.is_overloaded:
        share = words.percentage(result.utilization)
        said.append(words.text("answer.overload", workload=load(result, words), utilization=share))
        if result.enough is not None:
            wider = result.enough.layout
            said.append(words.text("answer.enough", gpus=words.count(wider.num_gpus), layout=wider.name))
    else:
        said.append(_speed(result, words))
    if result.wall_watts is not None:
        said.append(_power(result, words))
    said.append(_bound(result, words))
    if result.targets:
        met, sure = all(t.is_met for t in result.targets), all(t.is_sure for t in result.targets)
        state = "answer.targets_sure" if sure else "answer.targets_met" if met else "answer.targets_missed"
        said.append(words.text(state))
    return said


def _speed(result: PlanResult, words: Language) -> str:
    assert result.ttft_ms is not None
    assert result.itl_ms is not None
    assert result.output_tokens_per_s_per_gpu is not None
    speed = result.itl_ms.inverse().scaled(1e3)
    values = {
        "workload": load(result, words),
        "ttft": f"{words.number(result.ttft_ms.value / 1e3, 2)} s",
        "ttft_range": f"{words.range(result.ttft_ms, 2, 1e-3)} s",
        "speed": words.number(speed.value, 2),
        "speed_range": words.range(speed, 2),
    }
    capacity = result.capacity_per_s
    if capacity is None or result.utilization is None:
        each = result.output_tokens_per_s_per_gpu
        throughput = {"throughput": words.number(each.value, 2), "throughput_range": words.range(each, 2)}
        return words.text("answer.speed", **values, **throughput)
    return words.text(
        "answer.speed_rate",
        **values,
        share=words.percentage(result.utilization),
        capacity=words.number(capacity.value, 2),
        capacity_range=words.range(capacity, 2),
    )


def _image(result: PlanResult, words: Language) -> str:
    image = result.image
    assert image is not None
    return words.text(
        "answer.image",
        steps=words.count(image.request.steps),
        step=f"{words.number(1e3 * image.step_s.value, 2)} ms",
        image=f"{words.number(image.image_s.value, 2)} s",
        image_range=f"{words.range(image.image_s, 2)} s",
        bound=words.word(result.image_bounds[0].name),
    )


def _power(result: PlanResult, words: Language) -> str:
    bill, watts, joules = result.bill, result.wall_watts, result.joules_per_output_token
    assert watts is not None
    values: dict[str, str] = {
        "watts": words.watts(watts.value),
        "watts_range": words.text("range", low=words.watts(watts.low), high=words.watts(watts.high)),
    }
    key = "answer.power_watts"
    if joules is not None:
        values |= {"joules": words.number(joules.value, 2), "joules_range": words.range(joules, 2)}
        key = "answer.power_alone"
    if bill.cost is not None:
        money = bill.cost.per_million_tokens
        key = "answer.power_rent" if bill.cost.purchase is None else "answer.power"
        values["cost"] = words.money(money.value, bill.cost.currency)
        values["cost_range"] = words.range(money, 2)
        values["energy"] = words.percentage(bill.cost.energy_share)
    said = words.text(key, **values)
    if bill.racks is None:
        return said
    one = "answer.racks.one" if bill.racks.num_racks == 1 else "answer.racks"
    needed = words.text(
        one,
        racks=words.count(bill.racks.num_racks),
        kw=words.number(bill.racks.kw.value),
        servers=words.count(bill.racks.num_servers),
        unit=bill.racks.unit,
    )
    return f"{said} {needed}"


def _bound(result: PlanResult, words: Language) -> str:
    first, *others = result.decode_bounds
    if not others:
        return words.text("answer.bound_alone", bound=words.word(first.name))
    times = words.number(others[0].times_away, 2)
    return words.text("answer.bound", bound=words.word(first.name), next=words.word(others[0].name), times=times)


def formats(result: PlanResult, words: Language) -> list[str]:
    """Native or emulated, of each format in the model."""
    return [
        words.text(
            "formats.native" if use.is_native else "formats.emulated",
            format=use.format,
            parts=", ".join(words.word(part) for part in use.parts),
            gpu=result.choice.gpu.name,
            bits=words.number(use.bits, 3),
            operand=use.operand,
        )
        for use in result.formats
    ]


def notices(result: PlanResult, words: Language) -> list[str]:
    """Of all configurations, each once; without what stands in front of everything, as a banner."""
    return _said(result, words, is_banner=False)


def banners(result: PlanResult, words: Language) -> list[str]:
    """What must be read before any figure: that a GPU is announced, and cannot be bought."""
    return _said(result, words, is_banner=True)


_BANNERS = ("notice.roadmap",)


def _said(result: PlanResult, words: Language, *, is_banner: bool) -> list[str]:
    found = [n for one in (result, *result.compared) for n in one.notices if (n.key in _BANNERS) is is_banner]
    return list(dict.fromkeys(words.said(n.key, n.values) for n in found))

"""A plan in sentences: the answer first, for who signs; then what to know."""

from blockscale.planning.language import Language
from blockscale.planning.result import PlanResult


def title(result: PlanResult, words: Language) -> str:
    return words.text("title", model=result.model, gpus=result.num_gpus, gpu=result.choice.gpu.name)


def subtitle(result: PlanResult, words: Language) -> str:
    choice, workload = result.choice, result.workload
    said = words.text(
        "subtitle",
        format=choice.format,
        cache=choice.cache,
        layout=choice.layout.name,
        input=words.number(workload.input_tokens, 6),
        output=words.number(workload.output_tokens, 6),
    )
    return f"{said}, {load(result, words)}"


def load(result: PlanResult, words: Language) -> str:
    workload = result.workload
    if workload.rate is not None:
        return words.text("workload.rate", rate=words.number(workload.rate))
    if workload.concurrency is not None:
        return words.text("workload.concurrency", concurrency=words.number(workload.concurrency, 6))
    return words.text("workload.most")


def answer(result: PlanResult, words: Language) -> list[str]:
    """What a reader must know, most important first."""
    gpu, workload = result.choice.gpu.name, result.workload
    if not result.fits:
        missing = words.gigabytes(result.missing_bytes)
        said = [words.text("answer.does_not_fit", model=result.model, gpus=result.num_gpus, gpu=gpu, missing=missing)]
        if result.nearest:
            choices = "; ".join(f"{c.name}, KV {c.cache}" for c in result.nearest)
            return [*said, words.text("answer.nearest", choices=choices)]
        return [*said, words.text("answer.no_nearest")]
    said = [
        words.text(
            "answer.fits",
            model=result.model,
            gpus=result.num_gpus,
            gpu=gpu,
            weights=words.gigabytes(result.weights_bytes),
            sequences=words.number(result.max_sequences, 6),
            tokens=words.number(workload.input_tokens + workload.output_tokens, 6),
        )
    ]
    if result.utilization is not None and result.utilization >= 1:
        share = words.percentage(result.utilization)
        said.append(words.text("answer.overload", workload=load(result, words), utilization=share))
    else:
        said.append(_speed(result, words))
    said.append(_bound(result, words))
    if result.targets:
        met, sure = all(t.is_met for t in result.targets), all(t.is_sure for t in result.targets)
        state = "answer.targets_sure" if sure else "answer.targets_met" if met else "answer.targets_missed"
        said.append(words.text(state))
    return said


def _speed(result: PlanResult, words: Language) -> str:
    assert result.ttft_ms and result.itl_ms and result.output_tokens_per_s_per_gpu
    speed = result.itl_ms.inverse().scaled(1e3)
    each = result.output_tokens_per_s_per_gpu
    return words.text(
        "answer.speed",
        workload=load(result, words),
        ttft=f"{words.number(result.ttft_ms.value / 1e3, 2)} s",
        ttft_range=f"{words.range(result.ttft_ms, 2, 1e-3)} s",
        speed=words.number(speed.value, 2),
        speed_range=words.range(speed, 2),
        throughput=words.number(each.value, 2),
        throughput_range=words.range(each, 2),
    )


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
    return [words.text(notice.key, **notice.values) for notice in result.notices]

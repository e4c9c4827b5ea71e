"""How long a step takes: a roofline of weights, KV cache, arithmetic, communication and overhead.

    decode step  = max(weights / bandwidth, arithmetic / peak) + cache / bandwidth + communication + overhead
    time between tokens = decode step + what the prefills of the other requests take out of it

Every term has an efficiency; a fit on published measurements gives them and the spread of the prediction.
"""

from dataclasses import dataclass, replace

from blockscale.planning.hardware.catalogue import Gpu
from blockscale.planning.models.architecture import Architecture, Part
from blockscale.planning.models.weights import Weights
from blockscale.planning.speed.layout import Layout

CACHE_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 4.5 / 8}
_DENSE = (Part.ATTENTION, Part.FEED_FORWARD, Part.SHARED_EXPERTS, Part.ROUTER, Part.NORM)


@dataclass(frozen=True)
class Efficiency:
    """What is reached of each ceiling, and the costs that no ceiling explains.

    weights, experts, cache    share of the memory bandwidth, reading each
    compute, prefill           share of the peak, in decode and in prefill
    narrow                     what of `prefill` is left where the matrices of experts are small
    link                       share of the link's bandwidth
    layer_s, expert_layer_s    launches and host work, a layer; more for a layer of experts
    reduce_s, exchange_s       latency of an all-reduce, of an all-to-all
    step_s                     scheduler and sampling, a step
    sequence_s                 sampling and bookkeeping, a sequence and step
    alone                      share of prefill work that does not hide behind the reading of weights
    ahead                      prompts ahead of a new one, as a share of the requests in flight
    """

    weights: float
    experts: float
    cache: float
    compute: float
    prefill: float
    narrow: float
    link: float
    layer_s: float
    expert_layer_s: float
    reduce_s: float
    exchange_s: float
    step_s: float
    sequence_s: float
    alone: float
    ahead: float


@dataclass(frozen=True)
class Deployment:
    """A model on GPUs. `weights`: formats and bytes of the whole model; `cache`: the KV cache's format."""

    architecture: Architecture
    weights: Weights
    gpu: Gpu
    layout: Layout
    cache: str = "bf16"

    def per_gpu(self, part: Part) -> float:
        """Bytes of a part on one GPU of a replica."""
        cut = self.layout.tensor * self.layout.pipeline
        if part is Part.EXPERTS:
            cut *= self.layout.attention_data
        return self.weights.bytes_of(part) / cut


@dataclass(frozen=True)
class Step:
    """Seconds of one step, by what they go to."""

    weights: float
    compute: float
    cache: float
    communication: float
    overhead: float

    @property
    def seconds(self) -> float:
        """Reading weights and arithmetic overlap; the rest adds up."""
        return max(self.weights, self.compute) + self.cache + self.communication + self.overhead


def expert_coverage(num_experts: int, top_k: int, tokens: float) -> float:
    """Share of the experts that `tokens` tokens touch together, routed evenly: 1 - (1 - k/E)^B."""
    return 1 - (1 - top_k / num_experts) ** tokens


def decode_step(d: Deployment, e: Efficiency, sequences: float, context: float) -> Step:
    """One token for each of `sequences` (per replica) of `context` tokens on average."""
    a, layout = d.architecture, d.layout
    batch = max(sequences / layout.pipeline, 1.0)  # stages work on parts of the batch in turn
    own = max(batch / layout.attention_data, 1.0)  # what one attention group decodes
    weights_s, compute_s = _matmul_seconds(d, e, own, batch, e.compute)
    cache_s = _cache_seconds(d, e, own, context)
    communication_s = _communication_seconds(d, e, own)
    overhead_s = e.step_s + e.layer_s * a.num_layers + e.expert_layer_s * _expert_layers(a) + e.sequence_s * own
    return Step(weights_s, compute_s, cache_s, communication_s, overhead_s)


def prefill(d: Deployment, e: Efficiency, tokens: float, before: float = 0.0) -> Step:
    """`tokens` of one prompt at once, behind `before` tokens that are in the cache already."""
    a, layout = d.architecture, d.layout
    weights_s, compute_s = _matmul_seconds(d, e, tokens, tokens, e.prefill)
    products = 0.0
    for block in a.blocks:
        full = tokens * (before + tokens / 2)
        window = block.attention.window
        seen = min(full, tokens * window) if window else full
        products += block.count * block.attention.prefill_products * seen
    attention_s = 2 * products / layout.tensor / (d.gpu.peak("bf16").value * e.prefill)
    communication_s = _communication_seconds(d, e, tokens)
    overhead_s = e.step_s + e.layer_s * a.num_layers + e.expert_layer_s * _expert_layers(a)
    return Step(weights_s, compute_s + attention_s, 0.0, communication_s, overhead_s)


def image_step(d: Deployment, e: Efficiency, tokens: float, linear_flops: float, attention_flops: float) -> Step:
    """One pass of a diffusion transformer over `tokens`; its linears are all in one format."""
    a, cut = d.architecture, d.layout.tensor
    read_s = d.weights.num_bytes / cut / (d.gpu.bandwidth.value * e.weights)
    linear_s = linear_flops / cut / (_peak(d, Part.FEED_FORWARD) * e.prefill)
    attention_s = attention_flops / cut / (d.gpu.peak("bf16").value * e.prefill)
    overhead_s = e.step_s + e.layer_s * a.num_layers
    return Step(read_s, linear_s + attention_s, 0.0, _communication_seconds(d, e, tokens), overhead_s)


def _expert_layers(a: Architecture) -> int:
    return sum(block.count for block in a.blocks if block.is_moe)


def _matmul_seconds(d: Deployment, e: Efficiency, own: float, batch: float, share: float) -> tuple[float, float]:
    """(reading weights, arithmetic), for `own` tokens in attention and `batch` among the experts."""
    layout, gpu = d.layout, d.gpu
    bandwidth = gpu.bandwidth.value
    head = Part.HEAD if Part.HEAD in d.weights.parts else Part.EMBEDDING
    dense = sum(d.weights.bytes_of(p) for p in (*_DENSE, head)) / layout.tensor
    read_s = dense / (bandwidth * e.weights)
    compute_s = 0.0
    for part in (*_DENSE, head):
        if part in d.weights.parts and part is not Part.NORM:
            flops = 2.0 * _parameters(d.architecture, part) * own / layout.tensor
            compute_s += flops / (_peak(d, part) * share)
    spread = layout.tensor * layout.attention_data
    if Part.EXPERTS in d.weights.parts:
        moe = next(block for block in d.architecture.blocks if block.is_moe)
        hit = expert_coverage(moe.num_experts, moe.top_k, batch)
        read_s += d.weights.bytes_of(Part.EXPERTS) / spread * hit / (bandwidth * e.experts)
        active = _parameters(d.architecture, Part.EXPERTS) * moe.top_k / moe.num_experts
        compute_s += 2.0 * active * batch / spread / (_peak(d, Part.EXPERTS) * share * e.narrow)
    return read_s, compute_s


def _peak(d: Deployment, part: Part) -> float:
    stored = d.weights.parts[part]
    operand, _ = d.gpu.compute_format(stored.format, stored.activation)
    return d.gpu.peak(operand).value


def _parameters(a: Architecture, part: Part) -> int:
    return a.parameters_by_part.get(part, 0)


def _cache_seconds(d: Deployment, e: Efficiency, own: float, context: float) -> float:
    a, total = d.architecture, 0.0
    for block in a.blocks:
        heads = min(d.layout.tensor, block.attention.num_kv_heads)
        length = min(context, block.attention.window or context)
        total += block.count * block.attention.cache_elements * length / heads
        total += block.count * block.attention.state_bytes / d.layout.tensor / CACHE_BYTES[d.cache]
    return own * total * CACHE_BYTES[d.cache] / (d.gpu.bandwidth.value * e.cache)


def _communication_seconds(d: Deployment, e: Efficiency, own: float) -> float:
    """Two all-reduces a layer under tensor parallelism; an exchange there and back where experts are spread."""
    a, layout, gpu = d.architecture, d.layout, d.gpu
    link = (gpu.link_bytes_per_s or _PCIE_BYTES_PER_S) * e.link
    seconds = 0.0
    if layout.tensor > 1:
        moved = 2 * (layout.tensor - 1) / layout.tensor * own * a.hidden * 2
        seconds += 2 * a.num_layers * (e.reduce_s + moved / link)
    if layout.attention_data > 1:
        top_k = max(block.top_k for block in a.blocks)
        moved = own * top_k * a.hidden * (1 + 2) * (1 - 1 / layout.attention_data)
        seconds += _expert_layers(a) * (2 * e.exchange_s + moved / link)
    if layout.pipeline > 1:
        seconds += (layout.pipeline - 1) * (e.reduce_s + own * a.hidden * 2 / link)
    return seconds


_PCIE_BYTES_PER_S = 50e9  # Gen5 x16, one direction, as measured transfers reach it


@dataclass(frozen=True)
class Serving:
    """One operating point, per replica. Seconds, tokens a second.

    busy    share of the time that a stage has anything to do: 1, unless there are fewer sequences than stages
    """

    sequences: float
    step: Step
    prefill: Step
    itl_s: float
    ttft_s: float
    busy: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        return self.sequences / self.itl_s


def serve(d: Deployment, e: Efficiency, sequences: float, input_tokens: float, output_tokens: float) -> Serving:
    """Steady state with `sequences` requests in flight per replica, prefill and decode on the same GPUs.

    Each of the other requests is prefilled once in the time that this one decodes `output_tokens`. Stages work on
    different requests at the same time: one request takes the sum of all stages, many take what each stage has to do.
    """
    step = decode_step(d, e, sequences, input_tokens + output_tokens / 2)
    first = prefill(d, e, input_tokens)
    own = sequences / d.layout.attention_data
    # a prompt goes through the stages one after the other, and meanwhile the others have prompts of their own
    stages = min(float(d.layout.pipeline), max(sequences, 1.0))
    # work that each step takes over from prompts, and what of it fits beside the reading of weights
    work = first.compute * own / stages / max(output_tokens, 1.0)
    slack = max(step.weights - step.compute, 0.0)
    hidden = min(work * (1 - e.alone), slack)
    exchanged = first.communication * own / stages / max(output_tokens, 1.0)
    mixed = replace(step, compute=step.compute + work, communication=step.communication + exchanged)
    itl = step.seconds + work - hidden + exchanged
    ttft = first.seconds * (1 + e.ahead * own / stages) + step.seconds
    return Serving(sequences, mixed, first, itl, ttft, stages / d.layout.pipeline)

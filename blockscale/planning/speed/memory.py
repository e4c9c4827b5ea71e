"""What lies in a GPU's memory, and how many sequences are admitted beside it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from blockscale.planning.models.architecture import Architecture, Part
from blockscale.planning.speed.roofline import CACHE_BYTES, Deployment

PAGE_TOKENS = 64  # KV-cache pages hold whole pages of tokens: 16 to 64 in today's engines
_CONTEXT_BYTES = 1.0e9  # CUDA context, cuBLAS workspaces
_GRAPH_BYTES = 1.5e9  # captured CUDA graphs of an engine's usual batch sizes
_LINK_BYTES = 0.39e9  # NCCL's buffers, where GPUs talk
_DEFAULT_SHARE = 0.9  # of the GPU's memory that engines allow themselves
_PREFILL_TOKENS = 8192  # prompt tokens that engines process in one step
_SAMPLED_ROWS = 256  # rows of logits in fp32 at once


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest GPU of a replica. `parts`: name -> bytes, in the order of a report.

    free_bytes        left for the KV cache; negative: by how much it does not fit
    max_sequences     of the workload's length, per replica
    """

    gpu_bytes: int
    usable_bytes: float
    parts: Mapping[str, float]
    free_bytes: float
    sequence_bytes: float
    max_sequences: int

    @property
    def fits(self) -> bool:
        """Whether at least one sequence has room."""
        return self.max_sequences >= 1


def kv_bytes_per_token(architecture: Architecture, cache: str) -> float:
    """What one more token adds to the whole cache, all layers and GPUs together, once windows are full."""
    return architecture.cache_elements_per_token() * CACHE_BYTES[cache]


def kv_bytes_per_sequence(architecture: Architecture, cache: str) -> float:
    """What a sequence takes besides: full windows, and the states of recurrent layers."""
    return sum(
        block.count
        * (
            block.attention.cache_elements * (block.attention.window or 0) * CACHE_BYTES[cache]
            + block.attention.state_bytes
        )
        for block in architecture.blocks
    )


def sequence_bytes(d: Deployment, context: int) -> float:
    """KV cache and state of one sequence of `context` tokens on each GPU that holds it, in whole pages."""
    tokens = math.ceil(context / PAGE_TOKENS) * PAGE_TOKENS
    total = 0.0
    for block in d.architecture.blocks:
        attention = block.attention
        length = min(tokens, attention.window or tokens)
        # more GPUs than heads hold copies; a latent is held whole by each
        cut = min(d.layout.tensor, attention.num_kv_heads)
        total += block.count * attention.cache_elements * length * CACHE_BYTES[d.cache] / cut
        total += block.count * attention.state_bytes / d.layout.tensor
    return total * _largest_stage(d)


def _largest_stage(d: Deployment) -> float:
    """Share of the layers that the stage with the most of them has."""
    layers = d.architecture.num_layers
    return math.ceil(layers / d.layout.pipeline) / layers


def _weights_bytes(d: Deployment) -> float:
    """On the fullest GPU. Of several stages, the first has the embedding and the last the head, each whole."""
    if d.layout.pipeline == 1:
        return sum(d.per_gpu(part) for part in d.weights.parts)
    ends = [d.per_gpu(part) * d.layout.pipeline for part in (Part.EMBEDDING, Part.HEAD)]
    layers = sum(d.per_gpu(part) for part in d.weights.parts if part not in (Part.EMBEDDING, Part.HEAD))
    return layers * d.layout.pipeline * _largest_stage(d) + max(ends)


def plan_memory(
    d: Deployment, context: int, *, share: float = _DEFAULT_SHARE, prefill_tokens: int = _PREFILL_TOKENS
) -> MemoryPlan:
    """Weights, scratch and cache of a deployment whose sequences grow to `context` tokens.

    `share`: of the GPU's memory that the engine may use.
    """
    a, layout = d.architecture, d.layout
    widths = (m.n for m in a.matrices() if m.part in (Part.FEED_FORWARD, Part.EXPERTS, Part.SHARED_EXPERTS))
    widest = max(widths, default=a.hidden)
    activations = prefill_tokens * (2 * widest / layout.tensor + 4 * a.hidden) * 2
    logits = 4.0 * a.vocabulary * _SAMPLED_ROWS / layout.tensor
    parts = {
        "weights": _weights_bytes(d),
        "activations": activations + logits,
        "CUDA graphs and context": _GRAPH_BYTES + _CONTEXT_BYTES,
        "communication": _LINK_BYTES if layout.gpus_per_replica > 1 else 0.0,
    }
    usable = d.gpu.memory_bytes * share
    free = usable - sum(parts.values())
    one = sequence_bytes(d, context)
    admitted = math.floor(free / one) if free > 0 and one > 0 else 0
    return MemoryPlan(d.gpu.memory_bytes, usable, parts, free, one, max(0, admitted) * layout.attention_data)

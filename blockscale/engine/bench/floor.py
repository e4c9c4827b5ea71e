"""The bytes that a decode step cannot do without reading: what its time is measured against."""

from blockscale.planning.models.architecture import Architecture, Part
from blockscale.planning.models.weights import Weights
from blockscale.planning.speed.roofline import expert_coverage

# bytes an element of the KV cache takes, scales included
KV_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16}


def decode_bytes(
    architecture: Architecture, weights: Weights, kv_format: str, sequences: float, context: float
) -> float:
    """Of one step that gives each of `sequences` its next token.

    Every weight once - of experts those that so many tokens touch, routed evenly - and every sequence's cached keys and
    values. The embedding counts only where it is the output head too: of it alone, a row a token is read.

    context  tokens in the cache of each sequence, on average
    """
    total = sum(
        weights.bytes_of(part)
        for part in weights.parts
        if part not in (Part.EMBEDDING, Part.EXPERTS, Part.DRAFT, Part.TOWER)
    )
    if architecture.is_tied:
        total += weights.bytes_of(Part.EMBEDDING)
    experts = [block for block in architecture.blocks if block.is_moe]
    num_expert_layers = sum(block.count for block in experts)
    touched = sum(
        block.count / num_expert_layers * expert_coverage(block.num_experts, block.top_k, sequences)
        for block in experts
    )
    cache = sequences * architecture.cache_elements(round(context)) * KV_BYTES[kv_format]
    return total + touched * weights.bytes_of(Part.EXPERTS) + cache

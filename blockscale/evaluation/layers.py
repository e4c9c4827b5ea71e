"""What quantization did to each weight, against the 16-bit reference."""

from collections.abc import Callable

from blockscale.checkpoint.load import load_linear, plain_values
from blockscale.checkpoint.reader import Checkpoint
from blockscale.evaluation.result import LayerError
from blockscale.formats.error import sqnr


def layer_errors(
    candidate: Checkpoint, reference: Checkpoint, progress: Callable[[int, int], None] | None = None
) -> tuple[LayerError, ...]:
    """One entry per quantized linear that the reference has by the same name and shape; one in memory at a time.

    A low-rank branch counts as part of the weight, and a pre_quant_scale is multiplied back into it. Scales that an
    algorithm folded into neighbouring layers cannot be seen here: such layers show more error than they have.
    """
    if candidate.quantized is None:
        return ()
    errors = []
    for done, (name, stored) in enumerate(candidate.quantized.linears.items(), 1):
        source = reference.kept.get(f"{name}.weight") or reference.kept.get(name)
        if source is not None:
            weight = source.read()
            weight = weight.transpose(-1, -2) if stored.is_transposed else weight
            if tuple(weight.shape) == stored.shape:
                linear = load_linear(stored, candidate.dtype)
                count = weight.numel()
                bits = 8 * linear.num_bytes / count
                errors.append(LayerError(name, linear.scheme.name, sqnr(weight, plain_values(linear)), bits, count))
        if progress:
            progress(done, len(candidate.quantized.linears))
    return tuple(errors)

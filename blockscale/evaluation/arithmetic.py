"""How a candidate's figures are computed: what is rounded, and how."""

from blockscale.algorithms.activation_scale import ActivationScale
from blockscale.errors import UsageError
from blockscale.formats.spec import NVFP4
from blockscale.host.model import HostedModel


def chosen_scale(name: str | None, weights_only: bool) -> ActivationScale | None:
    """How block scales of activations are to be chosen; None: as the checkpoint says.

    UsageError for an unknown name, and where nothing is rounded.
    """
    if name is not None and weights_only:
        raise UsageError("activations are not rounded: there are no block scales to choose", hint="drop weights_only")
    known = [method.value for method in ActivationScale]
    if name is not None and name not in known:
        raise UsageError(f"unknown activation_scale '{name}'", hint="one of " + ", ".join(known))
    return None if name is None else ActivationScale(name)


def arithmetic(hosted: HostedModel, weights_only: bool) -> str:
    """How the figures were computed, as a sentence for reports."""
    dtype = "fp32" if hosted.device.type == "cpu" else str(hosted.checkpoint.dtype).removeprefix("torch.")
    quantized = hosted.checkpoint.quantized
    if quantized is None or weights_only:
        return f"Arithmetic is {dtype}; activations are left as they are."
    is_rounded = any(linear.scheme.activation for linear in quantized.linears.values())
    how = "rounded as the tensor core sees them" if is_rounded else "left as they are"
    is_nvfp4 = any(linear.scheme.activation is NVFP4 for linear in quantized.linears.values())
    if is_nvfp4 and hosted.activation_scale is not ActivationScale.AMAX:
        how += f", block scales chosen by {hosted.activation_scale.value}"
    cache = f"; the KV cache is rounded to {quantized.kv_format}" if quantized.kv_tensors else ""
    return f"Arithmetic is {dtype}; activations are {how}{cache}."

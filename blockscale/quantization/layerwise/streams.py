"""The two streams of hidden states that a layer's job reads, and how windows that it cannot run leave both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from blockscale.quantization.hidden_states import Batches, HiddenStates, batch_dim
from blockscale.quantization.layer_probe import CallLayer
from blockscale.quantization.layerwise.capture import Capture, SiteInputs, watching
from blockscale.quantization.sites import Site
from blockscale.quantization.walk import Keep, Walk, advance
from blockscale.quantization.windows import Windows


@dataclass(frozen=True)
class Streams:
    """Hidden states of the model as quantized so far, and of the 16-bit model.

    probe         a walk over a few tokens of one window
    probe_states  what layers leave for later ones on that walk: lengths must fit
    folder        for a layer's own work
    """

    quantized: HiddenStates
    reference: HiddenStates
    probe: Walk
    probe_states: HiddenStates
    folder: Path

    def leaving_out(self, generation: int, written: Windows, left: Windows) -> "Streams":
        """See HiddenStates."""
        if left is written:
            return self
        quantized, reference = (
            states.leaving_out(generation, written.batches, left.batches) for states in (self.quantized, self.reference)
        )
        return replace(self, quantized=quantized, reference=reference)


def probe_layer(layer: nn.Module, index: int, streams: Streams) -> tuple[CallLayer, Tensor]:
    """The layer with the arguments of a few tokens, and hidden states of their shape."""
    probe = streams.probe
    args, kwargs = probe.call(index, 0, streams.probe_states)

    def call_layer(hidden: Tensor) -> Tensor:
        output = layer(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    hidden = streams.quantized.read(index, 0)
    dim = batch_dim(hidden)
    few = hidden.narrow(dim, 0, 1).narrow(dim + 1, 0, probe.windows.ids.shape[1])
    return call_layer, few.to(probe.device)


def run_reference(
    walk: Walk, index: int, layer: nn.Module, streams: Streams, sites: Sequence[Site]
) -> tuple[Walk, Streams, Mapping[str, SiteInputs]]:
    """Runs the layer, in 16 bits still, and keeps what its sites are given, but for experts: the two models may send a
    token to different ones. Windows that the layer cannot run leave both streams."""
    while True:
        capture = Capture([s for s in sites if not s.is_expert], walk, streams.folder / "references")
        with capture.listening(layer) as watch:
            after = advance(walk, index, layer, streams.reference, watch)
        if after.windows is walk.windows:
            return walk, streams, capture.inputs
        for inputs in capture.inputs.values():
            inputs.clear()
        walk, streams = after, streams.leaving_out(index, walk.windows, after.windows)


def without_faults(walk: Walk, index: int, layer: nn.Module, streams: Streams, sites: Sequence[Site]) -> Walk:
    """The walk without windows on which a half-quantized layer gives NaN or Inf, or is given it inside."""
    with watching(layer, sites) as seen:

        def forget() -> Keep:
            seen.clear()
            return seen.clear

        return advance(walk, index, layer, streams.quantized, forget)


def drop(states: HiddenStates, generation: int, before: Batches, left: Batches) -> None:
    """Takes windows out of a generation that nothing relies on yet."""
    remaining = states.leaving_out(generation, before, left)
    for batch in range(len(left)):
        states.write(generation, batch, remaining.read(generation, batch))

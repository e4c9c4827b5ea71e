"""Activation statistics from calibration text, one decoder layer in memory at a time.

    token windows --embedding--> hidden states --layer 0--> ... --layer n-1-->
                                     each linear's input: largest magnitude kept

The layers' arguments (masks, rotary embeddings) are recorded by one pass through the model with layers that only
listen, so any decoder that transformers runs can be calibrated. A state file, rewritten at most every few seconds,
lets a killed run go on where it was.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from blockscale.checkpoint.groups import expert_set
from blockscale.checkpoint.reader import Checkpoint
from blockscale.checkpoint.target import disk_errors
from blockscale.errors import ModelError, OutputError, RecipeError, UsageError
from blockscale.host.attention import KVTransform
from blockscale.host.linear import KeptLinear, Observer
from blockscale.host.model import check_ids
from blockscale.host.skeleton import build_skeleton, decoder_layers, load_config
from blockscale.host.weights import HostedWeights, host_weights, materialize, materialized_copy
from blockscale.quantization.plan import PlannedLinear
from blockscale.quantization.statistics import ActivationStatistics
from blockscale.texts import Text, encode_text

WINDOW, MIN_WINDOW = 512, 8
BATCH = 8
MAX_TOKENS = 65_536
_SAVE_EVERY_S = 20.0


@dataclass(frozen=True)
class CalibrationData:
    """Token windows [W, T], and a digest of everything they depend on."""

    windows: Tensor
    digest: str

    @property
    def num_tokens(self) -> int:
        return self.windows.numel()


def tokenize(
    texts: Sequence[Text],
    encode: Callable[[str], Sequence[int]],
    max_tokens: int = MAX_TOKENS,
    window: int = WINDOW,
) -> CalibrationData:
    """Windows from every text in equal shares, evenly spaced through it, each with BOS in front where the tokenizer
    adds one. `encode` is the tokenizer's own.

    If the longest text is shorter than a window, it makes the window. UsageError for a text that is shorter still.
    """
    if max_tokens < 1:
        raise UsageError(f"cannot calibrate on {max_tokens} tokens", hint="give 1 or more")
    encoded = [encode_text(text.content, encode) for text in texts]
    longest = max(len(before) + len(tokens) for before, tokens in encoded)
    window = max(MIN_WINDOW, min(window, longest))
    share = max(1, max_tokens // window // len(texts))
    chosen = []
    for text, (before, tokens) in zip(texts, encoded, strict=True):
        length = window - len(before)
        count = len(tokens) // length
        if not count:
            raise UsageError(
                f"calibration text {text.name} has {len(tokens)} tokens: shorter than one window of {window} tokens",
                hint="give more text, or put short texts together in one file",
            )
        step = max(1.0, count / share)
        starts = [int(i * step) * length for i in range(min(share, count))]
        chosen += [torch.tensor(before + tokens[start : start + length]) for start in starts]
    windows = torch.stack(chosen)
    digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()[:16]
    return CalibrationData(windows, digest)


def calibrate(
    checkpoint: Checkpoint,
    data: CalibrationData,
    linears: Mapping[str, PlannedLinear],
    *,
    with_kv: bool,
    device: str = "cpu",
    state_path: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> ActivationStatistics:
    """Runs the 16-bit model over `data` and keeps the largest magnitude of each planned linear's input.

    `state_path`: where unfinished work is kept; a state of the same data is taken up.
    """
    config = load_config(checkpoint.path)
    dtype = torch.float32 if device == "cpu" else checkpoint.dtype
    model = build_skeleton(config, dtype, with_kv_transforms=with_kv)
    weights = host_weights(model, checkpoint, is_emulating=False)
    prefix, layers = decoder_layers(model)
    wanted = [module for module, linear in linears.items() if linear.scheme.needs_input_scale]
    check_ids(data.windows, model)
    state = _load_state(state_path, data.digest) or _State(0, [], {}, {})
    with torch.inference_mode():
        if state.next_layer < len(layers):
            embedded, arguments = _record_arguments(model, weights, prefix, data.windows, device, state.input_amax)
            state.hidden = state.hidden or embedded
            _check_observable(wanted, state.input_amax, prefix, weights)
        last_save = time.monotonic()
        for index in range(state.next_layer, len(layers)):
            layer = materialized_copy(model, weights, f"{prefix}.{index}").to(device)
            _observe(layer, weights, f"{prefix}.{index}", state, with_kv)
            for batch, (args, kwargs) in enumerate(arguments[index]):
                output = layer(state.hidden[batch].to(device), *args, **kwargs)
                state.hidden[batch] = (output[0] if isinstance(output, tuple) else output).cpu()
            _check_finite(state.hidden, index)
            del layer
            state.next_layer = index + 1
            if progress:
                progress("calibrating", index + 1, len(layers))
            if state_path is not None and time.monotonic() - last_save > _SAVE_EVERY_S:
                _save_state(state, state_path, data.digest)
                last_save = time.monotonic()
    if state_path is not None:
        state.hidden.clear()
        _save_state(state, state_path, data.digest)
    input_amax, notices = _fill_gaps(state.input_amax, wanted)
    return ActivationStatistics(input_amax, state.kv_amax, data.num_tokens, notices)


_Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments beside the hidden states


class _Listener(nn.Module):
    """Stands for a decoder layer, writes down what it is called with and passes the hidden states on."""

    def __init__(self, layer: nn.Module, calls: list[_Call], answer: "_Answer") -> None:
        super().__init__()
        self.calls, self.answer = calls, answer
        # models look at attributes of their layers, such as the kind of attention
        for name, value in vars(layer).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.answer(hidden_states, args, kwargs)


class _Answer:
    """Hidden states in the form in which the model's layers return them: alone, or first of a tuple. Looked up once by
    running a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer: nn.Module | None = layer
        self.others: tuple[None, ...] | None = None

    def __call__(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.layer is not None:
            output = self.layer(hidden, *args, **kwargs)
            self.others = (None,) * (len(output) - 1) if isinstance(output, tuple) else None
            self.layer = None
        return hidden if self.others is None else (hidden, *self.others)


def _record_arguments(
    model: Any, weights: HostedWeights, prefix: str, windows: Tensor, device: str, input_amax: dict[str, float]
) -> tuple[list[Tensor], list[list[_Call]]]:
    """The embedded batches [B, T, H], and per layer the other arguments of each batch's call. What linears before the
    first layer are given goes to `input_amax`."""
    decoder_path = prefix.rpartition(".")[0]
    answer = _Answer(materialized_copy(model, weights, f"{prefix}.0").to(device))
    decoder = materialize(model, weights, decoder_path, skip=prefix)
    layers = model.get_submodule(prefix)
    calls: list[list[_Call]] = [[] for _ in layers]
    listeners = nn.ModuleList([_Listener(layer, c, answer) for layer, c in zip(layers, calls, strict=True)])
    owner, leaf = model.get_submodule(decoder_path), prefix.rpartition(".")[2]
    embedded: list[Tensor] = []
    before_layers = [module for module in decoder.modules() if isinstance(module, KeptLinear)]

    def observe(observer: Observer | None) -> None:
        for module in before_layers:
            module.observer = observer

    def begin_layers(_: nn.Module, args: tuple[Any, ...]) -> None:
        observe(None)
        embedded.append(args[0].cpu())

    listeners[0].register_forward_pre_hook(begin_layers)
    setattr(owner, leaf, listeners)
    try:
        decoder.to(device)
        for batch in windows.split(BATCH):
            observe(_keep_input(input_amax))
            decoder(input_ids=batch.to(device), use_cache=False)
    finally:
        observe(None)
        setattr(owner, leaf, layers)
    return embedded, [_without_copies(c) for c in calls]


def _without_copies(calls: list[_Call]) -> list[_Call]:
    """Batches mostly share masks and rotary embeddings: keep the first of equal tensors."""
    first_args, first_kwargs = calls[0]

    def same(new: Any, old: Any) -> Any:
        if isinstance(new, Tensor) and isinstance(old, Tensor) and new.shape == old.shape:
            return old if torch.equal(new, old) else new
        if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
            return tuple(same(n, o) for n, o in zip(new, old, strict=True))
        return new

    return [
        (
            tuple(same(n, o) for n, o in zip(args, first_args, strict=True)),
            {k: same(v, first_kwargs.get(k)) for k, v in kwargs.items()},
        )
        for args, kwargs in calls
    ]


@dataclass
class _State:
    """Progress of a calibration; the only thing that a resumed run needs."""

    next_layer: int
    hidden: list[Tensor]
    input_amax: dict[str, float]
    kv_amax: dict[str, tuple[float, float]]


def _observe(layer: nn.Module, weights: HostedWeights, path: str, state: _State, with_kv: bool) -> None:
    """Sets the layer's linears and attention to report to `state`."""

    for name, module in layer.named_modules():
        if isinstance(module, KeptLinear):
            module.observer = _keep_input(state.input_amax)
        if with_kv and hasattr(module, "k_proj") and hasattr(module, "v_proj"):
            stored = weights.stored[f"{path}.{name}.k_proj"].removesuffix(".k_proj")
            module.kv_transform = _keep_kv(stored, state)


def _keep_input(seen: dict[str, float]) -> Observer:
    def keep(name: str, x: Tensor) -> None:
        if x.numel():
            amax = x.abs().amax().item()
            if not math.isfinite(amax):
                raise _not_finite(f"the input of {name}")
            seen[name] = max(seen.get(name, 0.0), amax)

    return keep


def _keep_kv(name: str, state: _State) -> KVTransform:
    def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        old = state.kv_amax.get(name, (0.0, 0.0))
        state.kv_amax[name] = (max(old[0], key.abs().amax().item()), max(old[1], value.abs().amax().item()))
        return key, value

    return keep


def _check_observable(wanted: Sequence[str], seen: Mapping[str, float], prefix: str, weights: HostedWeights) -> None:
    """Only decoder layers, and what comes before them, are run: RecipeError, before the long work, for a scale that
    could not be found."""
    inside = {stored for hosted, stored in weights.stored.items() if hosted.startswith(prefix + ".")}
    for module in wanted:
        if module not in inside and module not in seen:
            raise RecipeError(
                f"{module}: its input scale cannot be calibrated, for it lies outside the decoder layers",
                hint="store it with 16-bit activations (activation: null), or keep it",
            )


def _check_finite(hidden: Sequence[Tensor], index: int) -> None:
    if not all(torch.isfinite(batch).all() for batch in hidden):
        raise _not_finite(f"the output of decoder layer {index}")


def _not_finite(what: str) -> ModelError:
    return ModelError(
        f"{what} holds NaN or Inf on the calibration text",
        hint="the model is damaged or needs more than its stored precision",
    )


def _fill_gaps(seen: Mapping[str, float], wanted: Sequence[str]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Experts that no token reached get the largest amax of their siblings, flagged; a linear without any is left out
    and so refused later."""
    siblings: dict[tuple[str, str], float] = {}
    for module in wanted:
        if (key := _sibling_key(module)) and module in seen:
            siblings[key] = max(siblings.get(key, 0.0), seen[module])
    result, notices = {}, []
    for module in wanted:
        amax = seen.get(module)
        if not amax and (key := _sibling_key(module)) in siblings:
            why = "no calibration token reached it" if amax is None else "its inputs were all zero"
            amax = siblings[key]
            notices.append(f"{module}: {why}; its input scale is its siblings' largest")
        elif amax == 0.0:
            notices.append(f"{module}: its inputs were all zero; its input scale is 1")
        if amax is not None:
            result[module] = amax
    return result, tuple(notices)


def _sibling_key(module: str) -> tuple[str, str] | None:
    """The layer's experts and the projection; None for a linear that has no siblings."""
    experts = expert_set(module)
    return None if experts is None else (experts, module.rpartition(".")[2])


def _save_state(state: _State, path: Path, digest: str) -> None:
    facts = {"digest": digest, "next_layer": state.next_layer, "input_amax": state.input_amax, "kv_amax": state.kv_amax}
    tensors = {f"{i:06d}": batch.contiguous() for i, batch in enumerate(state.hidden)}
    partial = path.with_suffix(".partial")
    try:
        with disk_errors(path):
            save_file(tensors, partial, metadata={"state": json.dumps(facts)})
            partial.replace(path)
    except SafetensorError as e:
        raise OutputError(f"{path}: cannot be written: {e}", hint="is the disk full? free some space") from e


def _load_state(path: Path | None, digest: str) -> _State | None:
    if path is None or not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["state"])
        if facts["digest"] != digest:
            return None
        hidden = [file.get_tensor(name) for name in sorted(file.keys())]
    kv = {name: (pair[0], pair[1]) for name, pair in facts["kv_amax"].items()}
    return _State(facts["next_layer"], hidden, facts["input_amax"], kv)

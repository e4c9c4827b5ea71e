"""What the sites of a decoder layer are given, over all calibration windows: most to learn from, some held back.

Every eighth window is held back, and of its tokens an even sample judges the candidates. Routed experts see single
tokens of all windows: of those every eighth is held back, and so it is where there is only one window.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockscale.quantization.hidden_states import HiddenStates
from blockscale.quantization.layerwise.tokens import TokenStore, room_bytes
from blockscale.quantization.sites import Site
from blockscale.quantization.walk import Walk, run_until
from blockscale.quantization.windows import Windows, not_finite

_EVERY = 8
_HELD_TOKENS = 2048  # at most, of a site


@dataclass(frozen=True)
class SiteInputs:
    """`train` and `held` hold tensors [T, K], batch by batch."""

    train: TokenStore
    held: TokenStore

    def held_tokens(self) -> Tensor | None:
        """[T, K], or None where no token came."""
        parts = [x for x in self.held if len(x)]
        return torch.cat(parts) if parts else None

    def clear(self) -> None:
        self.train.clear()
        self.held.clear()


class Capture:
    """Collects inputs of sites, by their names, batch by batch."""

    def __init__(self, sites: Sequence[Site], walk: Walk, folder: Path) -> None:
        self.sites = sites
        self._walk = walk
        self._held = held_back(walk.windows)
        room = room_bytes(walk.device, 2 * max(1, len(sites)))

        def store(name: str) -> TokenStore:
            return TokenStore(folder / name, walk.device, room)

        self.inputs = {site.name: SiteInputs(store(f"{i}-train"), store(f"{i}-held")) for i, site in enumerate(sites)}

    @contextmanager
    def listening(self, layer: nn.Module) -> Iterator[Callable[[], Callable[[], None]]]:
        """To the sites' inputs. What it gives is called before a batch, and what that gives after it, to keep what
        came; a batch that fails is begun again."""
        num_batches = 0
        with watching(layer, self.sites) as seen:

            def keep() -> None:
                nonlocal num_batches
                for site in self.sites:
                    self.add(site, num_batches, seen.get(site.name, ()))
                num_batches += 1

            def watch() -> Callable[[], None]:
                seen.clear()
                return keep

            yield watch

    def add(self, site: Site, batch: int, seen: Sequence[Tensor]) -> None:
        """What the site was given on a batch, call by call."""
        inputs, batches = self.inputs[site.name], self._walk.windows.batches
        numbers = batches[batch]
        if self._held and _is_by_window(site, seen, len(numbers)):
            x = seen[0].reshape(len(numbers), -1, seen[0].shape[-1])
            is_held = torch.tensor([number in self._held for number in numbers], device=x.device)
            train, held = x[~is_held].flatten(0, 1), x[is_held].flatten(0, 1)
        else:
            flat = [x.reshape(-1, x.shape[-1]) for x in seen]
            x = torch.cat(flat) if flat else torch.empty(0, site.in_features, device=self._walk.device)
            is_held = torch.arange(len(x), device=x.device) % _EVERY == _EVERY - 1
            train, held = x[~is_held], x[is_held]
        inputs.train.add(train.clone())
        inputs.held.add(held[:: max(1, len(held) * len(batches) // _HELD_TOKENS)].clone())


def _is_by_window(site: Site, seen: Sequence[Tensor], count: int) -> bool:
    """Whether the input's first dimension tells the batch's windows apart."""
    return len(seen) == 1 and not site.is_expert and seen[0].dim() > 2 and seen[0].shape[0] == count


@contextmanager
def watching(layer: nn.Module, sites: Sequence[Site]) -> Iterator[dict[str, list[Tensor]]]:
    """Site name -> what the site is given, call by call, until the caller clears it. NonFiniteError for NaN or Inf.

    The first of its linears to be called speaks for a site: engines may fuse it with one that this model never calls.
    """
    seen: dict[str, list[Tensor]] = {}
    leads: dict[str, str] = {}

    def note(site: Site, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if leads.setdefault(site.name, name) == name:
                x = args[0] if args else next(iter(kwargs.values()))
                if not torch.isfinite(x).all():
                    raise not_finite(f"the input of {site.name}")
                seen.setdefault(site.name, []).append(x)

        return hook

    handles = [
        layer.get_submodule(name).register_forward_pre_hook(note(site, name), with_kwargs=True)
        for site in sites
        for name in site.hosted
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def held_back(windows: Windows) -> frozenset[int]:
    """Numbers of the windows that judge, of those that are not left out."""
    left = [number for batch in windows.batches for number in batch]
    return frozenset(number for place, number in enumerate(left) if is_held_back(place, len(left)))


def is_held_back(window: int, count: int) -> bool:
    """Whether a window judges. Of fewer than eight windows the last does, of one none."""
    return window % _EVERY == _EVERY - 1 if count >= _EVERY else count > 1 and window == count - 1


def capture_stage(
    walk: Walk, index: int, layer: nn.Module, states: HiddenStates, sites: Sequence[Site], folder: Path
) -> Mapping[str, SiteInputs]:
    """Runs the layer over its generation of hidden states, only as far as it must to see what the sites are given."""
    capture = Capture(sites, walk, folder)
    is_single = len(sites) == 1 and not sites[0].is_expert
    with capture.listening(layer) as watch:
        for batch in range(len(walk.windows.batches)):
            hidden, call = states.read(index, batch).to(walk.device), walk.call(index, batch, states)
            keep = watch()
            if is_single:
                run_until(layer, hidden, call, sites[0].hosted[0])
            else:
                layer(hidden, *call[0], **call[1])
            keep()
    return capture.inputs


def sample_inputs(
    walk: Walk, index: int, layer: nn.Module, states: HiddenStates, sites: Sequence[Site], num_tokens: int
) -> dict[str, Tensor]:
    """An even sample of about `num_tokens` of what each site is given, [T, K], from a few batches through the text.
    Tokens that are held back are not in it. Sites that see no token are not in the result."""
    count = len(walk.windows.batches)
    chosen = sorted({round(i * (count - 1) / 3) for i in range(4)})
    held = held_back(walk.windows)
    parts: dict[str, list[Tensor]] = {}
    with watching(layer, sites) as seen:
        for batch in chosen:
            numbers = walk.windows.batches[batch]
            is_train = torch.tensor([number not in held for number in numbers], device=walk.device)
            call = walk.call(index, batch, states)
            layer(states.read(index, batch).to(walk.device), *call[0], **call[1])
            for site in sites:
                calls = seen.pop(site.name, [])
                by_window = _is_by_window(site, calls, len(numbers))
                for x in calls:
                    flat = (x[is_train] if by_window else x).flatten(0, -2)
                    step = max(1, len(flat) * len(chosen) // num_tokens)
                    parts.setdefault(site.name, []).append(flat[::step].clone())
    return {name: torch.cat(found) for name, found in parts.items() if any(len(x) for x in found)}

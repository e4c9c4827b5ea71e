"""What the sites of a decoder layer are given, over all calibration windows: most to learn from, some held back.

Every eighth window is held back, and of its tokens an even sample judges the candidates. Routed experts see single
tokens of all windows: of those every eighth is held back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockscale.quantization.hidden_states import HiddenStates
from blockscale.quantization.layerwise.tokens import TokenStore
from blockscale.quantization.sites import Site
from blockscale.quantization.walk import Walk, run_until

_EVERY = 8
_HELD_TOKENS = 2048  # at most, of a site


@dataclass(frozen=True)
class SiteInputs:
    """`train` and `held` hold tensors [T, K], batch by batch."""

    train: TokenStore
    held: TokenStore

    @property
    def num_batches(self) -> int:
        return len(self.train)

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
        num_held = max(1, len(walk.windows.ids) // _EVERY)
        self._stride = max(1, num_held * walk.windows.ids.shape[1] // _HELD_TOKENS)
        self.inputs = {
            site.name: SiteInputs(
                TokenStore(folder / f"{i}-train", walk.device), TokenStore(folder / f"{i}-held", walk.device)
            )
            for i, site in enumerate(sites)
        }

    @contextmanager
    def listening(self, layer: nn.Module) -> Iterator[Callable[[], Callable[[], None]]]:
        """To the sites' first linears. What it gives is called before a batch, and what that gives after it, to keep
        what came; a batch that fails is begun again."""
        seen: dict[str, list[Tensor]] = {}
        num_batches = 0

        def note(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[name].append(args[0] if args else next(iter(kwargs.values())))

            return hook

        def keep() -> None:
            nonlocal num_batches
            for site in self.sites:
                self.add(site, num_batches, seen[site.name])
            num_batches += 1

        def watch() -> Callable[[], None]:
            seen.update({site.name: [] for site in self.sites})
            return keep

        handles = [
            layer.get_submodule(site.hosted[0]).register_forward_pre_hook(note(site.name), with_kwargs=True)
            for site in self.sites
        ]
        try:
            yield watch
        finally:
            for handle in handles:
                handle.remove()

    def add(self, site: Site, batch: int, seen: Sequence[Tensor]) -> None:
        """What the site was given on a batch, call by call."""
        inputs = self.inputs[site.name]
        numbers = self._walk.windows.batches[batch]
        if len(seen) == 1 and not site.is_expert and seen[0].shape[0] == len(numbers):
            is_held = torch.tensor([is_held_back(n, len(self._walk.windows.ids)) for n in numbers])
            x, stride = seen[0], self._stride
            train, held = x[~is_held.to(x.device)], x[is_held.to(x.device)]
            train, held = train.reshape(-1, x.shape[-1]), held.reshape(-1, x.shape[-1])[::stride]
        else:
            flat = [x.reshape(-1, x.shape[-1]) for x in seen]
            x = torch.cat(flat) if flat else torch.empty(0, site.in_features, device=self._walk.device)
            is_held = torch.arange(len(x), device=x.device) % _EVERY == _EVERY - 1
            train, held = x[~is_held], x[is_held]
        inputs.train.add(train.clone())
        inputs.held.add(held.clone())


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
    parts: dict[str, list[Tensor]] = {}
    seen: dict[str, list[Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.setdefault(name, []).append(args[0] if args else next(iter(kwargs.values())))

        return hook

    handles = [
        layer.get_submodule(site.hosted[0]).register_forward_pre_hook(note(site.name), with_kwargs=True)
        for site in sites
    ]
    try:
        for batch in chosen:
            numbers = walk.windows.batches[batch]
            is_held = torch.tensor([is_held_back(n, len(walk.windows.ids)) for n in numbers])
            call = walk.call(index, batch, states)
            layer(states.read(index, batch).to(walk.device), *call[0], **call[1])
            for site in sites:
                for x in seen.pop(site.name, []):
                    own = x[~is_held.to(x.device)] if x.shape[0] == len(numbers) and not site.is_expert else x
                    flat = own.reshape(-1, own.shape[-1])
                    step = max(1, len(flat) * len(chosen) // num_tokens)
                    parts.setdefault(site.name, []).append(flat[::step].clone())
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(found) for name, found in parts.items() if any(len(x) for x in found)}

"""`LLM`: a checkpoint ready to write text, on the engine, or through transformers where the engine cannot run it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from blockscale.checkpoint.locate import locate
from blockscale.engine import llm
from blockscale.engine.engine import Engine
from blockscale.engine.load import load_engine
from blockscale.engine.options import EngineOptions
from blockscale.engine.request import TokenLogprob
from blockscale.engine.sampling import Sampling
from blockscale.errors import FormatError, ModelError, UsageError
from blockscale.host import generate as host
from blockscale.host.model import HostedModel, load_model, load_tokenizer
from blockscale.kernels.bench.run import default_device

Write = Callable[[str], None]
# Several prompts run together; text goes to `write` where there is one prompt.
Generate = Callable[[Sequence[Sequence[int]], Sampling, Write | None], list["Completion"]]
_OF_TRANSFORMERS = ("max_tokens", "temperature", "top_p", "seed")  # fields of a Sampling that are served there


@dataclass(frozen=True)
class Completion:
    """num_tokens     new tokens, an end token among them
    finish_reason  "stop" (the model ended, a stop string came, a structure is complete) or "length" (max_tokens, or the
                   end of the context)
    logprobs       one a token, where asked for
    """

    text: str
    num_tokens: int
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()


class LLM:
    """A checkpoint ready to generate: `LLM("folder").generate(["2 + 2 ="], max_tokens=8)`.

    Weights stay packed. `emulate_activations` rounds activations as the scheme says; by default only weights are
    quantized, which is what GPUs without FP4 tensor cores compute.

    engine   None where transformers runs the model
    notices  then says why
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str | None = None,
        kv_cache: str | None = None,
        emulate_activations: bool = False,
        tensor_parallel: int = 1,
        options: EngineOptions | None = None,
    ) -> None:
        """device           "cuda", "cuda:1", "cpu"; None: the GPU, where there is one
        kv_cache         see `load_engine`; it needs the engine
        tensor_parallel  GPUs that the model is divided among, from `device` on; it needs the engine
        """
        if tensor_parallel != 1:
            options = replace(options or EngineOptions(), tensor_parallel=tensor_parallel)
        place = default_device() if device is None else device
        how: dict[str, Any] = {"device": place, "emulate_activations": emulate_activations}
        self.engine: Engine | None = None
        self.notices: tuple[str, ...] = ()
        self._generate: Generate
        try:
            self.engine, self.tokenizer = load_engine(model, kv_cache=kv_cache, options=options, **how)
        except (ModelError, FormatError) as e:
            if kv_cache is not None or options is not None:
                raise
            self.notices = (f"{e}: transformers runs it, more slowly",)
        if self.engine is not None:
            self._generate = partial(_by_engine, self.engine)
        else:  # out of the handler, whose error holds what was loaded
            path = locate(model)
            self.tokenizer = load_tokenizer(path)
            self._generate = partial(_by_transformers, load_model(path, **how), self.tokenizer)

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        **more: Any,
    ) -> list[Completion]:
        """One completion a prompt, in order.

        more  other fields of `Sampling`, which the engine serves: top_k, min_p, stop, logprobs, json_schema ...
        """
        if isinstance(prompts, str):
            raise UsageError("prompts is one string", hint="give a list of prompts")
        unknown = more.keys() - {field.name for field in fields(Sampling)}
        if unknown:
            raise UsageError(f"no way to sample is called {', '.join(sorted(unknown))}", hint="see `Sampling`'s fields")
        further = {name: _as_field(name, value) for name, value in more.items()}
        sampling = Sampling(max_tokens, temperature, top_p, seed=seed, **further)
        return self._generate([self.tokenizer.encode(prompt) for prompt in prompts], sampling, None)

    def close(self) -> None:
        """Ends the processes of a model that is divided among several devices, as the end of this process does."""
        if self.engine is not None:
            self.engine.close()

    def stream(self, prompt: str, sampling: Sampling, write: Write) -> Completion:
        """One completion, whose text goes to `write` as it comes."""
        return self._generate([self.tokenizer.encode(prompt)], sampling, write)[0]

    def chat(self, messages: Sequence[dict[str, str]], sampling: Sampling, write: Write | None = None) -> Completion:
        """The assistant's next turn, through the model's chat template; its text also goes to `write`."""
        return self._generate([host.chat_ids(self.tokenizer, messages)], sampling, write)[0]


def _by_engine(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, write: Write | None
) -> list[Completion]:
    outputs = llm.generate(engine, prompts, sampling, None if write is None else lambda _, text: write(text))
    return [Completion(o.text, o.usage.output_tokens, o.finish_reason.value, o.logprobs) for o in outputs]


def _by_transformers(
    hosted: HostedModel, tokenizer: Any, prompts: Sequence[Sequence[int]], sampling: Sampling, write: Write | None
) -> list[Completion]:
    changed = [f.name for f in fields(sampling) if getattr(sampling, f.name) != f.default]
    unserved = [name for name in changed if name not in _OF_TRANSFORMERS]
    if unserved:
        raise UsageError(
            f"{', '.join(unserved)}: only the engine serves that, and transformers runs this model",
            hint=f"served here: {', '.join(_OF_TRANSFORMERS)}",
        )
    own = host.Sampling(*(getattr(sampling, name) for name in _OF_TRANSFORMERS))
    streamer = host.text_streamer(tokenizer, write) if write else None
    found = [host.generate(hosted, tokenizer, ids, own, streamer) for ids in prompts]
    return [Completion(c.text, c.num_tokens, c.finish_reason) for c in found]


def _as_field(name: str, value: Any) -> Any:
    """What a Sampling holds is hashable: lists and mappings become tuples, a schema text."""
    if name == "json_schema" and isinstance(value, Mapping):
        return json.dumps(value)
    if name == "stop" and isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value

"""Requests of mixed lengths against a server, some of which leave and some of which are malformed: is every answer
right, does every stream end as it should, and is anything left behind?

    python benchmarks/server_load.py CKPT [--requests 1000] [--concurrency 24] [--rounds 5] [--pages 32]

Starts `blockscale serve CKPT` on the CPU. Each prompt is first answered alone, and those are the answers that count.
Prompts share beginnings, and the cache is too small for all that run, so that pages are shared, forgotten and taken
from running requests. Memory is the server's resident set after each round. Writes benchmarks/results/server_load.json;
exits with 1 if anything was wrong.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import httpx

CANCELLED, MALFORMED, STREAMED = 0.10, 0.01, 0.7
LEAK_BYTES = 4096  # a request: less than what is kept of one while it runs
SLACK_BYTES = 8 << 20  # an allocator keeps and returns memory in large pieces
START_S, ANSWER_S = 120.0, 300.0


class Kind(Enum):
    WHOLE = "whole"
    STREAM = "stream"
    CANCELLED = "cancelled"
    MALFORMED = "malformed"


@dataclass(frozen=True)
class Ask:
    """One request. `prompt` is an index; `leaves_after` events for those that are cancelled, `fault` for malformed."""

    kind: Kind
    prompt: int
    leaves_after: int = 0
    fault: int = 0


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str
    num_tokens: int


def make_prompts(num: int, vocab_size: int, longest: int, most_tokens: int, seed: int) -> list[Prompt]:
    """Lengths are spread evenly over their logarithms; every third prompt begins as one before it does."""
    chance = random.Random(seed)
    prompts: list[Prompt] = []
    for i in range(num):
        ids = [chance.randrange(1, vocab_size) for _ in range(round(longest ** chance.random()))]
        if i % 3 == 2:
            ids = [*chance.choice(prompts).token_ids, *ids][:longest]
        prompts.append(Prompt(tuple(ids), max(1, round(most_tokens ** chance.random()))))
    return prompts


def make_asks(num: int, num_prompts: int, seed: int) -> list[Ask]:
    """Exactly the shares of the head of this file, in any order."""
    chance = random.Random(seed)
    num_cancelled, num_malformed = round(num * CANCELLED), max(1, round(num * MALFORMED))
    num_streams = round((num - num_cancelled - num_malformed) * STREAMED)
    kinds = [Kind.CANCELLED] * num_cancelled + [Kind.MALFORMED] * num_malformed + [Kind.STREAM] * num_streams
    kinds += [Kind.WHOLE] * (num - len(kinds))
    chance.shuffle(kinds)
    return [Ask(kind, chance.randrange(num_prompts), chance.randrange(4), chance.randrange(1000)) for kind in kinds]


def body_of(model: str, prompt: Prompt) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt.token_ids),
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "skip_special_tokens": False,
    }


def faults(model: str, prompt: Prompt, context: int) -> list[tuple[bytes, int]]:
    """Malformed bodies, and the status each is answered with."""
    body = body_of(model, prompt)
    wrong = [
        ({"temprature": 0}, 400),
        ({"model": "another"}, 404),
        ({"max_tokens": 0}, 400),
        ({"prompt": []}, 400),
        ({"prompt": [1] * (context + 1)}, 400),
        ({"prompt": [2**40]}, 400),
        ({"temperature": "hot"}, 400),
    ]
    bodies = [(json.dumps({**body, **change}).encode(), status) for change, status in wrong]
    whole = json.dumps(body).encode()
    return [
        *bodies,
        (whole[: len(whole) // 2], 400),
        (b'{"model": "\xff\xfe"}', 400),
        (b"[" * 100_000, 400),
        (b"", 400),
    ]


class Load:
    """Drives one server. `wrong` says of every fault what it was."""

    def __init__(self, client: httpx.AsyncClient, model: str, context: int, prompts: Sequence[Prompt]) -> None:
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self._client = client
        self._model = model
        self._context = context
        self._prompts = prompts
        self._alone: list[Answer] = []

    async def answer_alone(self) -> list[Answer]:
        """Every prompt, one after the other."""
        self._alone = [await self._whole(prompt) for prompt in self._prompts]
        return self._alone

    async def run(self, asks: Sequence[Ask], concurrency: int) -> None:
        waiting = iter(asks)

        async def worker() -> None:
            for ask in waiting:
                try:
                    await self._one(ask)
                except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
                    self.wrong.append(f"{ask}: {error!r}")
                self.counts[ask.kind.value] += 1

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    async def _one(self, ask: Ask) -> None:
        prompt = self._prompts[ask.prompt]
        if ask.kind is Kind.MALFORMED:
            await self._malformed(ask, prompt)
            return
        expected = self._alone[ask.prompt]
        if ask.kind is Kind.CANCELLED:
            text = await self._leave(prompt, ask.leaves_after)
            is_right = expected.text.startswith(text)
            found: object = text
        else:
            found = await (self._whole(prompt) if ask.kind is Kind.WHOLE else self._stream(prompt))
            is_right = found == expected
        if not is_right:
            self.wrong.append(f"{ask}: {found!r} and not {expected!r}")

    async def _whole(self, prompt: Prompt) -> Answer:
        response = await self._client.post("/v1/completions", json=body_of(self._model, prompt))
        answer = response.raise_for_status().json()
        choice = answer["choices"][0]
        return Answer(choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"])

    async def _stream(self, prompt: Prompt) -> Answer:
        """ValueError for a stream that does not end as streams do: a reason, then the usage, then [DONE]."""
        events = [data async for data in self._events(prompt)]
        if events[-1] != "[DONE]" or events.count("[DONE]") != 1:
            raise ValueError(f"the stream ends with {events[-1]}")
        *chunks, last = [json.loads(data) for data in events[:-1]]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        if reasons[-1] is None or any(reason is not None for reason in reasons[:-1]):
            raise ValueError(f"reasons to end: {reasons}")
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        return Answer(text, reasons[-1], last["usage"]["completion_tokens"])

    async def _leave(self, prompt: Prompt, num_events: int) -> str:
        """The text that came before the connection was closed; without any event, it is closed at once."""
        text = ""
        events = self._events(prompt)
        try:
            for _ in range(num_events):
                data = await anext(events, "[DONE]")
                if data == "[DONE]":
                    break
                choices = json.loads(data)["choices"]
                text += choices[0]["text"] if choices else ""
        finally:
            await events.aclose()
        return text

    async def _events(self, prompt: Prompt) -> AsyncIterator[str]:
        body = {**body_of(self._model, prompt), "stream": True, "stream_options": {"include_usage": True}}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line:
                    yield line.removeprefix("data: ")

    async def _malformed(self, ask: Ask, prompt: Prompt) -> None:
        bodies = faults(self._model, prompt, self._context)
        content, status = bodies[ask.fault % len(bodies)]
        headers = {"Content-Type": "application/json"}
        response = await self._client.post("/v1/completions", content=content, headers=headers)
        error = response.json()["error"]
        if response.status_code != status or not error["message"] or not error["type"]:
            self.wrong.append(f"{ask}: status {response.status_code} and not {status}: {error}")


async def left_behind(client: httpx.AsyncClient, wait_s: float = 10.0) -> list[str]:
    """What the server still holds when nothing is asked of it any more; requests that were left get a moment to end."""
    deadline = time.monotonic() + wait_s
    while True:
        now = (await client.get("/info")).raise_for_status().json()["now"]
        held = [f"{now[name]} {name}" for name in ("running", "waiting", "pages_held") if now[name]]
        if not held or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.05)


@contextmanager
def served(model: str, pages: int) -> Iterator[tuple[str, int]]:
    """(address, process id) of a server of its own."""
    command = [sys.executable, "-m", "blockscale", "serve", model, "--device", "cpu", "--port", "0"]
    command += ["--num-pages", str(pages), "--max-running", "16"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        address = None
        for line in process.stderr:
            if address := re.search(r"http://\S+", line):
                break
        if address is None:
            raise SystemExit(f"the server did not start: {process.wait()}")
        yield address.group(), process.pid
    finally:
        process.terminate()
        process.wait(START_S)


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return 1024 * int(found.group(1))


async def measure(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=args.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits) as client:
        info = (await client.get("/info")).raise_for_status().json()
        context = info["context"]
        prompts = make_prompts(60, 100, min(200, context // 2), min(64, context // 4), seed=1)
        load = Load(client, info["model"], context, prompts)
        began = time.monotonic()
        await load.answer_alone()
        alone_s = time.monotonic() - began
        asks = make_asks(args.requests, len(prompts), seed=2)
        resident, began = [], time.monotonic()
        for part in range(args.rounds):
            await load.run(asks[part :: args.rounds], args.concurrency)
            load.wrong += await left_behind(client)
            resident.append(resident_bytes(pid))
        seconds = time.monotonic() - began
        now = (await client.get("/info")).json()["now"]
    grown = resident[-1] - resident[0]
    if grown > SLACK_BYTES + LEAK_BYTES * args.requests:
        load.wrong.append(f"the server grew by {grown} bytes")
    return {
        "requests": dict(load.counts),
        "wrong": load.wrong,
        "seconds": round(seconds, 1),
        "seconds_alone": round(alone_s, 1),
        "resident_bytes": resident,
        "engine": {name: now[name] for name in ("finished", "aborted", "failed", "preempted", "cached_tokens")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="CKPT")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pages", type=int, default=32)
    args = parser.parse_args()
    with served(args.model, args.pages) as (url, pid):
        figures = asyncio.run(measure(url, pid, args))
    print(json.dumps(figures, indent=1))
    from record import record  # beside this file, which tests import as well

    record("server_load", figures)
    raise SystemExit(1 if figures["wrong"] else 0)


if __name__ == "__main__":
    main()

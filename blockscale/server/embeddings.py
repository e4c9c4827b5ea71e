"""/v1/embeddings: a vector for each text, from a checkpoint that says how its hidden states become one.

A decoder that was trained to write has no such vector: the mean of its hidden states is one, but distances between
those mean little. So a checkpoint without `modules.json` has its embeddings refused.
"""

import base64
import math
import struct
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from blockscale.engine.sampling import Sampling
from blockscale.errors import BlockscaleError
from blockscale.models.pooling import NOT_TRAINED, Embedding, read_embedding
from blockscale.server.failure import ApiError, wrong_value
from blockscale.server.generation import generate
from blockscale.server.protocol import EmbeddingRequest, texts_or_tokens
from blockscale.server.service import Service
from blockscale.server.stream import until_gone

_AT_ONCE = 64  # texts of one request that are in the engine together


def embedding_of(path: Path) -> Embedding | str:
    """How the model in a folder embeds, or why it does not."""
    try:
        return read_embedding(path) or NOT_TRAINED
    except BlockscaleError as error:
        return str(error)


async def embed(service: Service, request: Request, body: EmbeddingRequest) -> Response:
    service.check_model(body.model)
    how = service.embedding
    if isinstance(how, str):
        raise ApiError(
            f"'{service.name}' has no embeddings: {how}",
            param="model",
            code="embeddings_not_supported",
            hint="serve an embedding model",
        )
    length = _length(how, body.dimensions)
    prompts = await _tokens(service, how, body)
    with service.traffic.admitted(min(len(prompts), _AT_ONCE)):
        vectors = await until_gone(request, _vectors(service, Sampling(pooling=how.pooling), prompts))
    is_packed = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": i, "embedding": _shown(_finished(vector, length, how), is_packed)}
        for i, vector in enumerate(vectors)
    ]
    num_tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JSONResponse({"object": "list", "data": data, "model": service.name, "usage": usage})


def _length(how: Embedding, asked: int | None) -> int:
    if asked is None:
        return how.size
    if asked > how.size:
        raise wrong_value("dimensions", f"dimensions is {asked}: vectors of this model have {how.size}")
    if how.lengths is not None and asked not in (*how.lengths, how.size):
        known = ", ".join(map(str, how.lengths))
        raise wrong_value("dimensions", f"the model was not trained for {asked} dimensions", hint=f"it was for {known}")
    return asked


async def _tokens(service: Service, how: Embedding, body: EmbeddingRequest) -> list[list[int]]:
    """ApiError (400) for too many texts, and for one without tokens or with too many."""
    inputs = texts_or_tokens(body.input)
    most = service.limits.max_inputs
    if not 1 <= len(inputs) <= most:
        raise wrong_value("input", f"{len(inputs)} texts are given", hint=f"from 1 to {most} in a request")
    texts = [one for one in inputs if isinstance(one, str)]
    of_texts = iter(await service.with_tokenizer(lambda t: t(texts)["input_ids"]) if texts else ())
    prompts = [list(next(of_texts)) if isinstance(one, str) else one for one in inputs]
    room = min(how.max_tokens or service.context, service.context)
    for i, prompt in enumerate(prompts):
        service.check_tokens("input", prompt)
        if not prompt:
            raise ApiError(f"text {i} has no tokens", param="input", code="empty_prompt")
        if len(prompt) > room:
            raise ApiError(
                f"text {i} has {len(prompt)} tokens, and the model embeds up to {room}",
                param="input",
                code="context_length_exceeded",
                hint="shorten it, or embed its parts",
            )
    return prompts


async def _vectors(service: Service, sampling: Sampling, prompts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    name = f"embd-{uuid.uuid4().hex}"
    found: list[tuple[float, ...]] = [()] * len(prompts)
    for begin in range(0, len(prompts), _AT_ONCE):
        part = prompts[begin : begin + _AT_ONCE]
        streams = [generate(service, prompt, sampling, f"{name}-{begin + i}") for i, prompt in enumerate(part)]
        async with aclosing(service.streams.interleave(streams)) as chunks:
            async for index, chunk in chunks:
                assert chunk.vector is not None
                found[begin + index] = chunk.vector
    return found


def _finished(vector: Sequence[float], length: int, how: Embedding) -> list[float]:
    """Cut, and then of length 1 where the model's are."""
    cut = list(vector[:length])
    norm = math.sqrt(math.fsum(x * x for x in cut)) if how.is_normalized else 1.0
    return [x / norm for x in cut] if norm > 0 else cut


def _shown(vector: Sequence[float], is_packed: bool) -> Any:
    """float32, as numbers or as their bytes, little endian, in base64."""
    packed = struct.pack(f"<{len(vector)}f", *vector)
    return base64.b64encode(packed).decode() if is_packed else list(struct.unpack(f"<{len(vector)}f", packed))

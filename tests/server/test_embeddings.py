"""/v1/embeddings over a real decoder: the vectors are those of transformers' model. Needs the package `openai`."""

import base64
import concurrent.futures
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from blockscale import api
from blockscale.engine.options import EngineOptions
from blockscale.host import attention
from blockscale.host.model import load_model
from blockscale.server.embeddings import embedding_of
from tests.server.running import Running, decoding

TEXTS = ["a text", "another one, which is longer than a page of the cache", "?", "x" * 150]
FP32 = 1e-4  # sums in another order, and float32 on the way; a key that rounds to the other side of a bfloat16


def embedding_model(source: Path, folder: Path, mode: str = "lasttoken", *, is_normalized: bool = True) -> Path:
    shutil.copytree(source, folder)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if is_normalized else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [{"idx": i, "path": paths[i], "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)]
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 200, "do_lower_case": False}))
    return folder


def hidden_states(path: Path, texts: Sequence[str]) -> list[Tensor]:
    """[T, H] of each text: transformers' model, with keys and values in bfloat16 as the cache has them."""

    def to_bf16(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype)

    model = load_model(path).model
    model.set_attn_implementation(attention.register("eager"))
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):
            module.kv_transform = to_bf16
    with torch.inference_mode():
        ids = [torch.tensor([list(text.encode())]) for text in texts]
        return [model.model(input_ids=i, use_cache=False).last_hidden_state[0].float() for i in ids]


@pytest.fixture(scope="module")
def path(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model(tiny_model("qwen3"), tmp_path_factory.mktemp("embedding") / "model")


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    options = EngineOptions(num_pages=20, max_running=4, max_step_tokens=24, max_context=160)
    with decoding(path, options, embedding=embedding_of(path)) as (it, _):
        yield it


@pytest.fixture(scope="module")
def expected(path: Path) -> Tensor:
    return normalize(torch.stack([hidden[-1] for hidden in hidden_states(path, TEXTS)]), dim=-1)


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def near(found: Sequence[Sequence[float]], expected: Tensor) -> bool:
    return bool((torch.tensor(found) - expected).norm(dim=-1).max() < FP32 * expected.norm(dim=-1).min())


def test_texts_and_tokens(client: openai.OpenAI, expected: Tensor) -> None:
    """The client itself asks for base64 where nothing is said."""
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    assert [one.index for one in answer.data] == [0, 1, 2, 3]
    assert near([one.embedding for one in answer.data], expected)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))
    one = client.embeddings.create(model="tiny", input=TEXTS[1], encoding_format="float")
    assert near([one.data[0].embedding], expected[1:2])
    ids = [list(text.encode()) for text in TEXTS]
    assert near([one.embedding for one in client.embeddings.create(model="tiny", input=ids).data], expected)
    assert near([client.embeddings.create(model="tiny", input=ids[0]).data[0].embedding], expected[:1])


def test_both_encodings_are_the_same_numbers(server: Running) -> None:
    asked = {"model": "tiny", "input": TEXTS[0]}
    packed = server.post("/v1/embeddings", **asked, encoding_format="base64").json()["data"][0]["embedding"]
    numbers = server.post("/v1/embeddings", **asked).json()["data"][0]["embedding"]
    assert list(struct.unpack(f"<{len(numbers)}f", base64.b64decode(packed))) == numbers


def test_shorter_vectors_have_length_1_too(client: openai.OpenAI, expected: Tensor) -> None:
    answer = client.embeddings.create(model="tiny", input=TEXTS, dimensions=16)
    assert near([one.embedding for one in answer.data], normalize(expected[:, :16], dim=-1))


def test_beside_other_requests(server: Running, expected: Tensor) -> None:
    """Prompts come in pieces, for a step has 24 tokens, and there are pages for a few requests only."""

    def ask(i: int) -> Any:
        if i % 2:
            return server.post("/v1/embeddings", model="tiny", input=TEXTS[i // 2 :]).json()
        body = {"model": "tiny", "prompt": "p" * (5 * i + 1), "max_tokens": 20, "temperature": 0}
        return server.post("/v1/completions", **body).json()

    texts = [ask(i)["choices"][0]["text"] for i in range(0, 8, 2)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert [answer["choices"][0]["text"] for answer in answers[::2]] == texts
    for i in range(1, 8, 2):
        assert near([one["embedding"] for one in answers[i]["data"]], expected[i // 2 :])


@pytest.mark.parametrize(("mode", "of"), [("mean_tokens", lambda h: h.mean(0)), ("cls_token", lambda h: h[0])])
def test_other_poolings(
    tiny_model: Callable[[str], Path], tmp_path: Path, mode: str, of: Callable[[Tensor], Tensor]
) -> None:
    path = embedding_model(tiny_model("qwen3"), tmp_path / "model", mode, is_normalized=False)
    options = EngineOptions(num_pages=20, max_running=4, max_step_tokens=24, max_context=160)
    with decoding(path, options, embedding=embedding_of(path)) as (server, _):
        data = server.post("/v1/embeddings", model="tiny", input=TEXTS).json()["data"]
    assert near([one["embedding"] for one in data], torch.stack([of(h) for h in hidden_states(path, TEXTS)]))


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", "empty_prompt"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input", "empty_prompt"),
        ({"input": [[1], []]}, "input", "empty_prompt"),
        ({"input": [128]}, "input", "invalid_value"),
        ({"input": [-1]}, None, "invalid_value"),
        ({"input": "x" * 161}, "input", "context_length_exceeded"),
        ({"input": ["x"] * 2049}, "input", "invalid_value"),
        ({"input": 5}, "input", "invalid_value"),
        ({"dimensions": 65}, "dimensions", "invalid_value"),
        ({"dimensions": 0}, "dimensions", "invalid_value"),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"truncate": True}, "truncate", "unknown_parameter"),
    ],
)
def test_what_is_refused(server: Running, fields: dict[str, Any], param: str | None, code: str) -> None:
    response = server.post("/v1/embeddings", **{"model": "tiny", "input": "a", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == code
    assert param is None or response.json()["error"]["param"] == param


def test_many_texts_in_one_request(server: Running, expected: Tensor) -> None:
    """More than the engine is given at once."""
    data = server.post("/v1/embeddings", model="tiny", input=[TEXTS[0], TEXTS[2]] * 100).json()["data"]
    assert near([one["embedding"] for one in data], torch.stack([expected[0], expected[2]] * 100))


def test_a_quantized_model(path: Path, server: Running, tmp_path: Path) -> None:
    """The steps travel along; the vectors are those of its own weights, which are near the source's."""
    out = tmp_path / "quantized"
    api.quantize(path, out, "nvfp4-w4a16")
    with decoding(out, EngineOptions(num_pages=20), embedding=embedding_of(out)) as (it, _):
        data = it.post("/v1/embeddings", model="tiny", input=TEXTS).json()["data"]
    found = torch.tensor([one["embedding"] for one in data])
    own = normalize(torch.stack([hidden[-1] for hidden in hidden_states(out, TEXTS)]), dim=-1)
    assert near(found.tolist(), own)
    source = torch.tensor(
        [one["embedding"] for one in server.post("/v1/embeddings", model="tiny", input=TEXTS).json()["data"]]
    )
    assert (found * source).sum(-1).min() > 0.9
    assert not torch.equal(found, source)


def test_why_a_model_has_none(path: Path, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    assert "not trained to embed" in str(embedding_of(tiny_model("qwen3")))
    folder = shutil.copytree(path, tmp_path / "model")
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    reason = embedding_of(folder)
    assert "max_tokens" in str(reason)
    with decoding(folder, EngineOptions(num_pages=4), embedding=reason) as (server, _):
        response = server.post("/v1/embeddings", model="tiny", input="a")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "embeddings_not_supported"
    assert "max_tokens" in response.json()["error"]["message"]

"""The page at `/` and what it reads: files, headers, markup and figures. Needs no browser."""

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockscale.engine.vocabulary import read_vocabulary
from blockscale.kernels.paged_cache import KVFormat
from blockscale.models.load import load_decoder
from blockscale.server.facts import ModelFacts, facts_of, read_facts
from blockscale.server.page import FILES, page_router
from blockscale.server.service import Service
from tests.engine.fake_decoder import FakeModel
from tests.server.fake_engine import FakeEngine
from tests.server.running import Running, letters, make_service, running

FOLDER = Path(__file__).parents[2] / "blockscale" / "server" / "page"
MAX_BYTES = 40_000  # of all files: a page to read, and no framework
VOID = {"meta", "link", "input", "br"}


class Markup(HTMLParser):
    """Elements with their attributes; checks nesting as it reads."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in <{tag}>"
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert not self._open or self._open[-1] not in ("script", "style"), "code belongs in files of its own"

    def all(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag in tags]

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


def page_service(**options: object) -> Service:
    tokenizer = letters()
    return make_service(FakeEngine(read_vocabulary(tokenizer)), tokenizer, **options)


@pytest.fixture(scope="module")
def facts(golden_checkpoint: Callable[[str], Path]) -> ModelFacts:
    return read_facts(golden_checkpoint("modelopt_llama_nvfp4_fp8kv"), device="cpu", kv_format=KVFormat.FP8)


@pytest.fixture(scope="module")
def server(facts: ModelFacts) -> Iterator[Running]:
    service = page_service(api_key="secret")
    with running(service, routers=[page_router(service, facts)]) as it:
        yield it


@pytest.fixture(scope="module")
def markup() -> Markup:
    return Markup((FOLDER / "index.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES)
def test_files_come_without_a_key_and_once(server: Running, path: str) -> None:
    answer = server.get(path)
    name, media_type = FILES[path]
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == media_type
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = server.client.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = server.client.head(path)
    assert (head.status_code, head.content) == (200, b"")


def test_the_browser_is_told_to_run_nothing_else(server: Running) -> None:
    policy = dict(part.split(maxsplit=1) for part in server.get("/").headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"


@pytest.mark.parametrize("path", ["/page/", "/page/other.js", "/page/..%2Fpage.py", "/page/index.html"])
def test_no_other_file_is_served(server: Running, path: str) -> None:
    assert server.get(path).status_code == 404


def test_every_file_is_served_and_packaged() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {name for name, _ in FILES.values()}
    packaged = (FOLDER.parents[2] / "pyproject.toml").read_text()
    assert '"server/page/*"' in packaged
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MAX_BYTES


def test_nothing_comes_from_elsewhere(markup: Markup) -> None:
    served = {path.removeprefix("/") for path in FILES} | {"data:,"}
    assert set(markup.values("src") + markup.values("href")) <= served
    for path in FOLDER.iterdir():
        assert not re.search(r"https?:|//[a-z]|@import|url\(", path.read_text(encoding="utf-8")), path.name


def test_text_of_a_model_is_never_markup(markup: Markup) -> None:
    scripts = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js"))
    assert "textContent" in scripts
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|Storage", scripts)
    assert not [name for _, attributes in markup.elements for name in attributes if name.startswith("on")]
    assert not markup.values("style")


def test_every_field_has_a_label_and_every_reference_leads_somewhere(markup: Markup) -> None:
    ids = markup.values("id")
    assert len(ids) == len(set(ids))
    labelled = {attributes["for"] for attributes in markup.all("label")}
    fields = {attributes["id"] for attributes in markup.all("input", "textarea", "select")}
    assert fields == labelled
    assert set(markup.values("aria-describedby")) <= set(ids)
    assert all("type" in attributes for attributes in markup.all("button"))
    assert not markup.values("tabindex") or set(markup.values("tabindex")) == {"0"}
    assert {"log", "alert", "status"} <= set(markup.values("role"))
    script = (FOLDER / "chat.js").read_text(encoding="utf-8")
    assert set(re.findall(r'\$\("([a-z-]+)"\)', script)) <= set(ids)
    assert [a["lang"] for a in markup.all("html")] == ["en"]
    assert any(a.get("name") == "viewport" for a in markup.all("meta"))


def luminance(colour: str) -> float:
    digits = colour if len(colour) == 6 else "".join(c + c for c in colour)
    linear = []
    for i in (0, 2, 4):
        x = int(digits[i : i + 2], 16) / 255
        linear.append(x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_can_be_read_by_day_and_night() -> None:
    """WCAG 2: text 4.5 to 1, borders of fields 3 to 1, on every ground they stand on."""
    style = (FOLDER / "style.css").read_text(encoding="utf-8")
    schemes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(schemes) == 2
    assert "prefers-color-scheme: dark" in style
    for scheme in schemes:
        colours = dict(re.findall(r"--([a-z-]+): #([0-9a-f]+)", scheme))

        def contrast(a: str, b: str, colours: dict[str, str] = colours) -> float:
            low, high = sorted((luminance(colours[a]), luminance(colours[b])))
            return (high + 0.05) / (low + 0.05)

        for ground in ("paper", "panel"):
            for text in ("ink", "soft", "fault"):
                assert contrast(text, ground) >= 4.5, (text, ground)
            assert contrast("line", ground) >= 3, ground
        assert contrast("accent", "on-accent") >= 4.5


def test_info_needs_the_key_and_says_what_is_served(server: Running, golden_checkpoint: Callable[[str], Path]) -> None:
    assert server.get("/info").status_code == 401
    answer = server.client.get("/info", headers={"Authorization": "Bearer secret"})
    assert answer.headers["cache-control"] == "no-store"
    info = answer.json()
    assert (info["model"], info["context"], info["has_chat"]) == ("tiny", 200, True)
    assert (info["is_alive"], info["is_draining"]) == (True, False)
    facts = info["facts"]
    tensors = load_file(golden_checkpoint("modelopt_llama_nvfp4_fp8kv") / "model.safetensors").values()
    num_plain = sum(t.numel() for t in tensors if t.dtype is torch.bfloat16)
    num_packed = 2 * sum(t.numel() for t in tensors if t.dtype is torch.uint8)
    assert {f["format"]: f["num_parameters"] for f in facts["formats"]} == {"bf16": num_plain, "nvfp4": num_packed}
    assert facts["num_parameters"] == num_plain + num_packed
    assert facts["bits_per_parameter"] == pytest.approx(8 * facts["bytes"] / facts["num_parameters"])
    assert (facts["kv_format"], facts["device"]) == ("fp8", "CPU")
    assert {k["op"] for k in facts["kernels"]} == {
        "linear_w4a16",
        "attention_decode",
        "attention_prefill",
        "quantize_kv",
    }
    now = info["now"]
    assert (now["pages"], now["pages_held"], now["pages_kept"], now["page_size"]) == (4, 1, 1, 16)


def test_info_of_a_server_that_cannot_answer_now() -> None:
    service = page_service()
    engine = service.engine
    assert isinstance(engine, FakeEngine)

    async def never() -> None:
        from blockscale.errors import EngineError

        raise EngineError("the engine is gone")

    object.__setattr__(service, "stats", never)
    engine.is_alive = False
    with running(service, routers=[page_router(service)]) as it:
        info = it.get("/info").json()
    assert (info["now"], info["facts"], info["is_alive"]) == (None, None, False)


@pytest.mark.parametrize(
    ("options", "ops"),
    [
        ({}, {"linear_w4a16", "attention_decode", "attention_prefill"}),
        (
            {"emulate_activations": True},
            {"linear_w4a4", "quantize_nvfp4", "attention_decode", "attention_prefill"},
        ),
        ({"is_latent": True, "kv_format": KVFormat.NVFP4}, {"linear_w4a16", "attention_mla", "quantize_kv"}),
    ],
)
def test_facts_name_the_ops_that_weights_and_cache_go_through(
    golden_checkpoint: Callable[[str], Path], options: dict[str, object], ops: set[str]
) -> None:
    given = {"device": "cpu", "kv_format": KVFormat.BITS16, **options}
    facts = read_facts(golden_checkpoint("modelopt_llama_nvfp4"), **given)
    assert {choice.op.value for choice in facts.kernels} == ops
    assert all(choice.reason for choice in facts.kernels)
    json.dumps(facts.to_dict())


def test_facts_of_experts_and_of_16_bits(golden_checkpoint: Callable[[str], Path]) -> None:
    experts = read_facts(golden_checkpoint("modelopt_qwen3moe_nvfp4"), device="cpu", kv_format=KVFormat.BITS16)
    assert "moe_w4a16" in {choice.op.value for choice in experts.kernels}
    plain = read_facts(
        golden_checkpoint("base_llama"), device="cpu", kv_format=KVFormat.BITS16, dtype=torch.float16
    ).to_dict()
    assert plain["kv_format"] == "fp16"
    assert plain["bits_per_parameter"] == 16
    assert [kernel["op"] for kernel in plain["kernels"]] == ["attention_decode", "attention_prefill"]


def test_facts_of_a_loaded_model(golden_checkpoint: Callable[[str], Path]) -> None:
    folder = golden_checkpoint("modelopt_llama_nvfp4_fp8kv")
    facts = facts_of(folder, load_decoder(folder))
    assert facts is not None
    assert facts.kv_format == "fp8"
    assert "quantize_kv" in {choice.op.value for choice in facts.kernels}
    assert facts_of(folder, FakeModel()) is None

"""The page in headless Chromium, used with the keyboard and the mouse. Needs Chromium and the package `playwright`."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockscale.engine.vocabulary import read_vocabulary
from blockscale.errors import ModelError
from blockscale.kernels.paged_cache import KVFormat
from blockscale.server.facts import read_facts
from blockscale.server.page import page_router
from tests.server.fake_engine import FakeEngine
from tests.server.running import Running, letters, make_service, running, wait_for

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
KEY = "a-key"
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>&amp; \\n*b*'
WIDE, SMALL = {"width": 1200, "height": 800}, {"width": 340, "height": 600}
TIMEOUT_MS = 15_000


@pytest.fixture(scope="module")
def server(golden_checkpoint: Callable[[str], Path]) -> Iterator[Running]:
    tokenizer = letters()
    service = make_service(FakeEngine(read_vocabulary(tokenizer)), tokenizer, context=2000, api_key=KEY)
    facts = read_facts(golden_checkpoint("modelopt_llama_nvfp4_fp8kv"), device="cpu", kv_format=KVFormat.FP8)
    with running(service, routers=[page_router(service, facts)]) as it:
        yield it


@pytest.fixture
def engine(server: Running) -> FakeEngine:
    engine = server.service.engine
    assert isinstance(engine, FakeEngine)
    engine.answers, engine.fails_at, engine.is_alive, engine.refuses = [], None, True, None
    engine.asked.clear()
    engine.aborted.clear()
    server.call(engine.gate.set)
    return engine


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    """Open, with the key filled in. Whatever the browser complains of fails the test."""
    context = browser.new_context(viewport=WIDE)
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda asked: faults.append(asked.url) if not asked.url.startswith(server.url) else None)
    page.goto(server.url)
    page.fill("#key", KEY)
    page.press("#key", "Tab")  # leaves the field, and so the server is asked again
    playwright.expect(page.locator("#model")).to_have_text("tiny")
    yield page
    context.close()
    assert [fault for fault in faults if not fault.endswith("data:,")] == []


def say(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def shows(page: Any, selector: str, text: str) -> None:
    playwright.expect(page.locator(selector)).to_contain_text(text)


def prompt_of(engine: FakeEngine) -> str:
    return "".join(map(chr, engine.asked[-1][0]))


def test_a_conversation(page: Any, engine: FakeEngine) -> None:
    engine.answers = ["<think>well</think>Hello\nyou", "Bye"]
    page.fill("#system", "Be brief")
    page.fill("#temperature", "0.25")
    page.fill("#max-tokens", "77")
    page.fill("#prompt", "one")
    page.press("#prompt", "Shift+Enter")
    page.type("#prompt", "two")
    assert engine.asked == []
    page.press("#prompt", "Enter")
    shows(page, "#state", "Done: ")
    assert page.input_value("#prompt") == ""
    assert page.locator("article.assistant > .text").inner_text() == "Hello\nyou"
    assert page.locator("article.assistant .thoughts .text").text_content() == "well"
    assert page.locator("#log").get_attribute("aria-busy") == "false"
    sampling = engine.asked[0][1]
    assert (sampling.temperature, sampling.max_tokens) == (0.25, 77)
    assert prompt_of(engine) == "system:Be brief;user:one\ntwo;assistant:"
    say(page, "and?")
    shows(page, "article.assistant >> nth=1", "Bye")
    shows(page, "#state", "Done: 4 tokens in")
    assert prompt_of(engine) == "system:Be brief;user:one\ntwo;assistant:Hello\nyou;user:and?;assistant:"
    page.click("#clear")
    assert page.locator("article").count() == 0
    say(page, "new")
    shows(page, "#state", "Done: ")
    assert prompt_of(engine) == "system:Be brief;user:new;assistant:"


def test_what_a_model_writes_is_shown_as_text(page: Any, engine: FakeEngine) -> None:
    engine.answers = [HOSTILE]
    say(page, HOSTILE)
    shows(page, "#state", "Done: ")
    for role in ("user", "assistant"):
        assert page.locator(f"article.{role} > .text").text_content() == HOSTILE
    assert page.locator("#log img, #log script").count() == 0
    assert page.title() == "tiny – blockscale"


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_an_answer_comes_as_it_is_written_and_can_be_stopped(
    page: Any, engine: FakeEngine, server: Running, way: str
) -> None:
    engine.answers = ["partial answer", "next"]
    server.call(engine.gate.clear)
    say(page, "go")
    shows(page, "#state", "Waiting for the first token")
    shows(page, "article.user", "go")
    assert page.locator("#log").get_attribute("aria-busy") == "true"
    wait_for(lambda: bool(engine.asked))

    def let_some_through() -> None:
        engine.gate.set()
        server.loop.call_later(0, server.loop.call_later, 0, engine.gate.clear)

    server.call(let_some_through)
    shows(page, "article.assistant > .text", "p")
    shows(page, "#state", "Writing")
    say(page, "typed meanwhile")  # sends nothing, and stays where it is
    assert len(engine.asked) == 1
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    shows(page, "#state", "Stopped.")
    wait_for(lambda: len(engine.aborted) == 1)
    shows(page, "article.assistant", "This answer is not whole.")
    partial = page.locator("article.assistant > .text").text_content()
    assert "partial answer".startswith(partial)
    assert page.input_value("#prompt") == "typed meanwhile"
    server.call(engine.gate.set)
    page.press("#prompt", "Enter")
    shows(page, "#state", "Done: ")
    assert prompt_of(engine) == f"user:go;assistant:{partial};user:typed meanwhile;assistant:"


def test_a_message_without_an_answer_is_not_lost(page: Any, engine: FakeEngine, server: Running) -> None:
    server.call(engine.gate.clear)
    say(page, "go")
    wait_for(lambda: bool(engine.asked))
    page.keyboard.press("Escape")
    shows(page, "#state", "Stopped.")
    assert page.input_value("#prompt") == "go"
    assert page.locator("article").count() == 0
    wait_for(lambda: len(engine.aborted) == 1)


def test_errors_are_shown(page: Any, engine: FakeEngine, server: Running) -> None:
    engine.refuses = ModelError("the cache is full of <b>cats</b>")
    say(page, "hi")
    shows(page, "#error", "the cache is full of <b>cats</b>")
    assert page.input_value("#prompt") == "hi"
    engine.refuses = None
    engine.answers = ["broken off"]
    engine.fails_at = 4
    page.press("#prompt", "Enter")
    shows(page, "#error", "the engine is gone")
    assert "broken off".startswith(page.locator("article.assistant > .text").text_content())
    engine.fails_at, engine.is_alive = None, True
    page.fill("#temperature", "3")
    num_asked = len(engine.asked)
    say(page, "too hot")
    assert page.evaluate("document.activeElement.id") == "temperature"
    assert len(engine.asked) == num_asked
    page.fill("#temperature", "1")
    page.fill("#max-tokens", "9999")
    page.press("#prompt", "Enter")
    shows(page, "#error", "the context holds 2000")
    page.fill("#max-tokens", "")
    page.route("**/v1/**", lambda route: route.abort())
    page.press("#prompt", "Enter")
    shows(page, "#error", "The server cannot be reached.")
    page.unroute("**/v1/**")
    page.press("#prompt", "Enter")
    shows(page, "#state", "Done: ")
    assert page.locator("#error").text_content() == ""


CUT = {
    "ends too soon": (
        'data: {"choices":[{"delta":{"content":"so"}}]}\n\n',
        "The connection ended before the answer did.",
    ),
    "is a proxy's page": ("<html>", "The server answered with status 502."),
}


@pytest.mark.parametrize("case", CUT)
def test_a_stream_that_is_none(page: Any, engine: FakeEngine, case: str) -> None:
    body, message = CUT[case]
    status = 502 if body == "<html>" else 200
    page.route("**/v1/**", lambda route: route.fulfill(status=status, body=body, content_type="text/event-stream"))
    say(page, "hi")
    shows(page, "#error", message)


def test_bytes_may_be_cut_anywhere(page: Any, engine: FakeEngine) -> None:
    """Events, lines and characters of several bytes, in pieces of one byte; comments and CRLF between them."""
    found = page.evaluate(
        """async () => {
            const { ask } = await import("/page/stream.js");
            const text = ': hello\\r\\n\\r\\ndata: {"a":"é🙂"}\\n\\ndata: {"a":\\ndata: 2}\\r\\n\\r\\n'
                + 'data: [DONE]\\n\\n';
            const bytes = new TextEncoder().encode(text);
            const stream = new ReadableStream({
                start(control) { for (const byte of bytes) control.enqueue(new Uint8Array([byte])); control.close(); },
            });
            window.fetch = async () => new Response(stream);
            const seen = [];
            for await (const chunk of ask("x", {}, "", new AbortController().signal)) seen.push(chunk.a);
            return seen;
        }"""
    )
    assert found == ["é🙂", 2]


def test_a_wrong_key_is_asked_for(browser: Any, server: Running, engine: FakeEngine) -> None:
    context = browser.new_context(viewport=SMALL)
    page = context.new_page()
    page.goto(server.url)
    shows(page, "#summary", "the API key is missing or wrong")
    assert not page.locator("#settings-panel").evaluate("panel => panel.open")
    for key in ("", "wrong", "schlüssel"):
        say(page, "hi")
        shows(page, "#error", "key")
        assert page.evaluate("document.activeElement.id") == "key"
        page.fill("#key", key)
    page.fill("#key", KEY)
    page.press("#prompt", "Enter")
    shows(page, "#state", "Done: ")
    assert engine.asked[-1][0] == tuple(map(ord, "user:hi;assistant:"))
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    context.close()


def test_model_and_server_figures(page: Any, engine: FakeEngine) -> None:
    engine.answers = ["abcdefgh"]
    shows(page, "#summary", "BF16 + NVFP4, 8.07 bits a parameter, FP8 cache, on CPU")
    shows(page, "#facts", "NVFP469.0 % of the parameters, 4.51 bits each")
    shows(page, "#facts", "Context2,000 tokens")
    shows(page, "#kernels", "attention_decode")
    say(page, "go")
    shows(page, "#state", "Done: 9 tokens in")
    shows(page, "#first-token", " s")
    shows(page, "#waiting", "0")
    shows(page, "#cache", "25.0 %")
    shows(page, "#server-speed", "tokens/s")


def test_the_keyboard_reaches_everything_in_order(page: Any, engine: FakeEngine) -> None:
    page.evaluate("document.activeElement.blur()")
    page.focus("#log")
    order = []
    for _ in range(12):
        order.append(page.evaluate("document.activeElement.id || document.activeElement.parentElement.id"))
        page.keyboard.press("Tab")
    assert order == [
        *("log", "prompt", "send", "stop", "clear"),
        *("settings-panel", "system", "temperature", "max-tokens", "key"),
        *("speed-panel", "model-panel"),
    ]
    page.focus("#prompt")
    page.fill("#prompt", "by button")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    shows(page, "#state", "Done: ")
    assert page.evaluate("document.activeElement.id") == "send"  # the focus is not lost


def test_fits_small_screens_and_the_dark(page: Any, engine: FakeEngine) -> None:
    engine.answers = ["unbroken" * 40]
    page.set_viewport_size(SMALL)
    say(page, "x" * 300)
    shows(page, "#state", "Done: ")
    assert page.evaluate("document.documentElement.scrollWidth") <= SMALL["width"]
    assert page.locator("#prompt").bounding_box()["width"] > 0.8 * SMALL["width"]
    for button in ("send", "stop", "clear"):
        assert page.locator(f"#{button}").bounding_box()["height"] >= 44
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, light[4:-1].split(","))) > 600
    assert sum(map(int, dark[4:-1].split(","))) < 150


def test_a_reader_who_scrolled_up_is_left_there(page: Any, engine: FakeEngine, server: Running) -> None:
    engine.answers = ["line\n" * 150]
    say(page, "long")
    shows(page, "#state", "Done: ")
    gap = "log => log.scrollHeight - log.scrollTop - log.clientHeight"
    assert page.locator("#log").evaluate(gap) < 2
    server.call(engine.gate.clear)
    say(page, "again")
    shows(page, "#state", "Waiting")
    page.locator("#log").evaluate("log => { log.scrollTop = 0; }")
    server.call(engine.gate.set)
    shows(page, "#state", "Done: ")
    assert page.locator("#log").evaluate("log => log.scrollTop") == 0


def test_a_model_without_a_chat_template_goes_on_from_the_text(browser: Any) -> None:
    tokenizer = letters(template=None)
    engine = FakeEngine(read_vocabulary(tokenizer), answers=["and more"])
    service = make_service(engine, tokenizer)
    with running(service, routers=[page_router(service)]) as it:
        page = browser.new_page()
        page.goto(it.url)
        shows(page, "#summary", "It has no chat template")
        assert page.locator("#system").is_disabled()
        say(page, "once")
        shows(page, "#state", "Done: ")
        assert page.locator("article.assistant > .text").text_content() == "and more"
        page.close()
    assert prompt_of(engine) == "once"
    assert engine.asked[-1][1].max_tokens == 100

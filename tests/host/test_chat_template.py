"""Conversations through a template, by a tokenizer made here."""

from pathlib import Path

import pytest

from blockscale.errors import UsageError
from blockscale.host.chat_template import chat_renderer
from blockscale.host.model import load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)
CHAT = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yo"}]


def tokenizer(folder: Path, *, adds_bos: bool, template: str | None = TEMPLATE):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "?": 1, "a": 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="?")
    made.chat_template = template
    made.save_pretrained(folder)
    return load_tokenizer(folder)


def test_what_the_template_makes_of_it(tmp_path: Path) -> None:
    """BOS is left to whoever puts one before every text."""
    render = chat_renderer(tokenizer(tmp_path / "a", adds_bos=False))
    assert render is not None
    assert render(CHAT) == "<s>[user]hi[assistant]yo"
    render = chat_renderer(tokenizer(tmp_path / "b", adds_bos=True))
    assert render is not None
    assert render(CHAT) == "[user]hi[assistant]yo"


def test_what_the_template_refuses(tmp_path: Path) -> None:
    render = chat_renderer(tokenizer(tmp_path, adds_bos=False))
    assert render is not None
    with pytest.raises(UsageError, match="the chat template refuses it: no system role"):
        render([{"role": "system", "content": "x"}])


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages[7].content }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}"])
def test_templates_that_are_broken(template: str, tmp_path: Path) -> None:
    render = chat_renderer(tokenizer(tmp_path, adds_bos=False, template=template))
    assert render is not None
    with pytest.raises(UsageError, match="the chat template refuses it"):
        render(CHAT)


def test_a_model_without_template(tmp_path: Path) -> None:
    assert chat_renderer(tokenizer(tmp_path, adds_bos=False, template=None)) is None

"""Tokenizers of the kinds that models come with, made from a few words."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = ["Four bits are enough, São Paulo está aqui. 日本語 🙂 naïve", '{"a": [1, 2], "b": "x y"}\n\tdef f(x):\n']


def byte_level() -> Any:
    """Byte-level BPE, as Llama 3, Qwen and gpt-oss have it: any byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def byte_fallback() -> Any:
    """SentencePiece's kind, as Gemma has it: "▁" is a space, <0x0A> a byte."""
    words = ["▁Four", "▁bits", "▁", "▁▁", "F", "o", "u", "r", "S", "ã", ".", "日", "▁are", "e", "nough", ","]
    names = ["<pad>", "</s>", "<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    vocabulary = {name: i for i, name in enumerate(names)}
    merges = [("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def metaspace() -> Any:
    tokenizer = Tokenizer(models.WordLevel({"▁Four": 0, "▁bits": 1, "s": 2, "<unk>": 3}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def words() -> Any:
    """Words without a decoder: spaces were lost when text was cut."""
    tokenizer = Tokenizer(models.WordLevel({"Four": 0, "bits": 1, ".": 2, "<unk>": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def characters() -> Any:
    """A token a character, without a decoder: spaces are tokens."""
    names = [chr(i) for i in range(128)]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(names)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")

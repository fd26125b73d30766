"""Tiny tokenizers in a folder, as a model ships them, for tests that need real files and no download."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('a system message must come first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% for t in tools or [] %}[tool {{ t.function.name }}]{% endfor %}"
    "{% if reasoning_effort %}[effort {{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
"""ChatML; a late system message raises. enable_thinking opens a think block or closes an empty one, default neither."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISIBLE = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def _letters() -> dict[int, str]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE with chat template: every byte, some words and cuts inside characters, special tokens last.

    Writes tokenizer.json and tokenizer_config.json. <|im_end|> ends a turn.
    """
    letter = _letters()
    tokenizer = Tokenizer(_bpe([letter[b] for b in range(256)], _byte_words(letter)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer)
    _save(tokenizer, folder, TEMPLATE)


def make_spaced_tokenizer(folder: Path) -> None:
    """As `make_tokenizer`, in the manner of SentencePiece: words carry a mark for the space, bytes are a fallback."""
    letters = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *map(chr, range(33, 127)), "\n"]
    words = ["\u2581world", "\u2581the", "hello", "\u2581\u2581", "think"]
    tokenizer = Tokenizer(_bpe(letters, words, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    replace, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    _add_tokens(tokenizer)
    _save(tokenizer, folder, TEMPLATE)


def make_metaspace_tokenizer(folder: Path) -> None:
    """Words marked by Metaspace, without a byte fallback and without a template."""
    letters = ["<unk>", "\u2581", *map(chr, range(33, 127)), "\n"]
    tokenizer = Tokenizer(_bpe(letters, ["\u2581world", "hello"], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _add_tokens(tokenizer)
    _save(tokenizer, folder, None)


def _byte_words(letter: dict[int, str]) -> list[str]:
    pieces = [word.encode() for word in ("hello", " world", " the", " and", "ing", "\n\n", "  ", "STOP", "think", "é")]
    pieces += ["aé".encode()[:2], "😀".encode()[:3], "\u200d".encode()[:2], "é".encode()[1:] + b"x"]
    return ["".join(letter[b] for b in piece) for piece in pieces]


def _bpe(letters: list[str], words: list[str], **options: object) -> models.BPE:
    """Each word is merged from left to right, so every beginning of a word is a token too."""
    vocab = {token: i for i, token in enumerate(letters)}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    return models.BPE(vocab=vocab, merges=merges, **options)


def _add_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in VISIBLE])


def _save(tokenizer: Tokenizer, folder: Path, template: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "clean_up_tokenization_spaces": False, "model_max_length": 4096}
    config |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")

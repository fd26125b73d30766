"""A model's tokenizer and chat template: text or messages into tokens, and the spelling of each token.

The folder's tokenizer.json is read as it stands, by transformers' generic fast class. AutoTokenizer would rebuild it
from the class its config names and may lose what the file says; mlx-lm's wrapper would bring MLX into rooms that must
not have it, and its streaming classes trim spaces that decoding keeps.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lisa.errors import DamagedModel, NoTemplate, UnsupportedModel, UsageError
from lisa.text import CLOSE, OPEN, Detokeniser, ReasoningSplit, StopStrings, TextReader, stop_strings
from lisa.types import Message, Messages

MAX_TEMPLATE = 1 << 20
"""Characters of a chat template's source."""
MAX_PROMPT = 1 << 26
"""Characters of a rendered prompt: beyond any context, it bounds what is tokenised."""

_MARKUP = frozenset((OPEN, CLOSE, "<tool_call>", "</tool_call>"))
"""Shown even where a model declares them special: the reasoning split and the tool parser read them."""
_TAIL = 16
"""Prompt tokens looked at for a thinking tag; a tag and the white space after it are fewer."""
_SAMPLE = " Aé 👩\u200d🚀\n  x"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letter for each byte: the byte's own where that prints in Latin-1, else 256 and up, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A fast tokenizer, safe to use from several threads at once. Made by `load_tokenizer`.

    `fast` is the transformers object (it renders), `raw` the tokenizers object inside it (it encodes and decodes:
    transformers' own methods change shared settings on each call). `vocab` is the highest token id + 1, added tokens
    included. `eos` end a turn; `hidden` never show in text: `eos` and control tokens. `stages` are its decoder's steps.
    """

    fast: Any
    raw: Any
    vocab: int
    eos: frozenset[int]
    hidden: frozenset[int]
    stages: frozenset[str]

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids; `special` adds what the model wants round a bare text, such as a beginning-of-text token.

        Raises UsageError for text that has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("the text holds half of a surrogate pair, which is no character: remove it") from None
        ids: list[int] = self.raw.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without the hidden ones."""
        text: str = self.raw.decode([i for i in ids if i not in self.hidden], skip_special_tokens=False)
        return text

    def spell(self, token: int, first: bool) -> bytes | None:
        """The bytes `token` adds to a text; None for a hidden or unknown one (lisa.text.Spell)."""
        written = None if token in self.hidden else self.raw.id_to_token(token)
        if written is None:
            return None
        if "ByteLevel" in self.stages:
            # A token with a letter outside the alphabet was added as plain text.
            return bytes(map(_BYTE_OF.__getitem__, written)) if _BYTE_OF.keys() >= set(written) else written.encode()
        byte = _BYTE_TOKEN.fullmatch(written) if "ByteFallback" in self.stages else None
        if byte and (not first or int(byte[1], 16) > 127):
            return bytes.fromhex(byte[1])
        # Only the decoder knows whether the space in front of a text's first word is dropped.
        shown: str = self.raw.decoder.decode([written]) if first else written.replace("\u2581", " ")
        return shown.encode()

    def reader(
        self, *, stop: str | Sequence[str] | None = None, prompt: Sequence[int] | str = (), reasoning: bool = True
    ) -> TextReader:
        """A fresh reader for one answer to `prompt`, whose end tells whether the template has opened thinking.

        `reasoning` False delivers everything verbatim as the answer (a raw completion). Raises UsageError for a `stop`
        that is empty or no string.
        """
        tail = prompt if isinstance(prompt, str) else self.decode(prompt[-_TAIL:])
        split = ReasoningSplit(tail) if reasoning else None
        return TextReader(Detokeniser(self.spell), split, StopStrings(stop_strings(stop)))

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        effort: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt that asks for the next assistant message, as token ids.

        `thinking` and `effort` reach the template as enable_thinking and reasoning_effort, `extra` under its own names;
        None leaves the template's default. Raises NoTemplate; UsageError for messages that are malformed, that hold
        anything but text, or that the template refuses; DamagedModel for a template that does not parse.
        """
        if not self.fast.chat_template:
            raise NoTemplate("this model has no chat template: use plain completion, or its instruct variant")
        named = {"enable_thinking": thinking, "reasoning_effort": effort}
        options = {name: value for name, value in named.items() if value is not None}
        self._check_names(extra or {}, options)
        plain = [_plain(message) for message in messages]
        return self.encode(self._fill(plain, list(tools or ()) or None, {**options, **(extra or {})}))

    def turns(self, ids: Sequence[int]) -> list[int]:
        """Where the turns of a rendered prompt begin, the first excepted: at the control token that opens its last."""
        opens = next((i for i in reversed(ids) if i in self.hidden and i not in self.eos), None)
        return [at for at, i in enumerate(ids) if at and i == opens]

    def _check_names(self, extra: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """The renderer's own arguments are not for a request to set: one of them is the template itself."""
        taken = {*inspect.signature(self.fast.apply_chat_template).parameters, "messages", *options}
        if clash := sorted(taken & extra.keys()):
            raise UsageError(f"template option {clash[0]!r} is reserved or given twice: leave it out")

    def _fill(self, messages: list[Message], tools: list[Mapping[str, Any]] | None, options: dict[str, Any]) -> str:
        from jinja2 import TemplateSyntaxError

        try:
            prompt: str = self.fast.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **options
            )
        except TemplateSyntaxError as error:
            raise DamagedModel(f"the model's chat template does not parse: {_one_line(error)}") from error
        except Exception as error:  # a template is a program: it can fail in any way
            raise UsageError(f"the model's chat template refused the request: {_one_line(error)}") from error
        if len(prompt) > MAX_PROMPT:
            raise UsageError(f"the prompt has {len(prompt)} characters, more than {MAX_PROMPT}: shorten it")
        return prompt


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder; touches no network and runs no code from the folder.

    A chat template may be in tokenizer_config.json, chat_template.jinja or chat_template.json, or nowhere (then only
    `render` fails). End-of-turn ids are those of the tokenizer, generation_config.json and config.json together. Raises
    DamagedModel for a missing or unreadable file, UnsupportedModel for one whose decoding cannot be streamed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DamagedModel(f"{path} is missing: the download is incomplete, or the folder holds no model")
    generation, config = _json(folder / "generation_config.json"), _json(folder / "config.json")
    _json(folder / "tokenizer_config.json")
    fast_class = _fast_class()
    try:
        fast = fast_class.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        raise DamagedModel(f"{path} is damaged or incomplete: {_one_line(error)}") from error
    fast.chat_template = fast.chat_template or _json(folder / "chat_template.json").get("chat_template")
    text_config = config.get("text_config")
    sources = (generation, config, text_config if isinstance(text_config, dict) else {})
    return _wrap(fast, [i for source in sources for i in _ids(source.get("eos_token_id"))])


def _wrap(fast: Any, eos: Iterable[int]) -> Tokenizer:
    """A transformers fast tokenizer as a Tokenizer; `eos` adds to its own end-of-turn id."""
    raw = fast.backend_tokenizer
    raw.no_truncation()
    raw.no_padding()
    templates = fast.chat_template if isinstance(fast.chat_template, dict) else {"": fast.chat_template or ""}
    if any(not isinstance(template, str) or len(template) > MAX_TEMPLATE for template in templates.values()):
        raise DamagedModel(f"the model's chat template is not text of at most {MAX_TEMPLATE} characters: replace it")
    ends = frozenset(eos) | frozenset(_ids(fast.eos_token_id))
    added = raw.get_added_tokens_decoder().items()
    control = frozenset(i for i, token in added if token.special and token.content not in _MARKUP)
    vocab = max(raw.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    tokenizer = Tokenizer(fast, raw, vocab, ends, ends | control, _stages(raw.decoder))
    _check_streams(tokenizer)
    return tokenizer


def _check_streams(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(_SAMPLE)
    if tokenizer.raw.decoder is not None:
        reader = tokenizer.reader(reasoning=False)
        for token in ids:
            reader.push(token)
        if reader.finish()[0] == tokenizer.decode(ids):
            return
    kinds = ", ".join(sorted(tokenizer.stages)) or "none"
    raise UnsupportedModel(f"tokenizer.json decodes in a way Lisa cannot stream (decoder: {kinds})")


def _stages(decoder: Any) -> frozenset[str]:
    """The kinds of a tokenizers decoder, a Sequence's members instead of itself."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {"decoders": []}
    return frozenset(stage["type"] for stage in state.get("decoders", [state]))


def _fast_class() -> Any:
    """transformers' generic fast tokenizer. On import it announces that PyTorch is absent, which nobody here needs."""
    log = logging.getLogger("transformers")
    log.addFilter(_quiet)
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        log.removeFilter(_quiet)
    return PreTrainedTokenizerFast


def _quiet(record: logging.LogRecord) -> bool:
    return "PyTorch" not in record.getMessage()


def _json(path: Path) -> dict[str, Any]:
    """An optional JSON object; {} where the file is absent. Raises DamagedModel."""
    try:
        data = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedModel(f"{path} is damaged or incomplete: {_one_line(error)}") from error
    if not isinstance(data, dict):
        raise DamagedModel(f"{path} is damaged: a JSON object was expected")
    return data


def _ids(value: Any) -> list[int]:
    """An eos_token_id field: an int, a list of them, or nothing."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def _plain(message: Message) -> Message:
    """A message as templates expect it: content a string, the arguments of tool calls an object."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError("a message must be an object with a role and content")
    plain = {**message, "content": _content(message.get("content"))}
    if isinstance(calls := message.get("tool_calls"), list):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _content(content: Any) -> str:
    """Message content as one string: it may be a string, null, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise UsageError("message content must be a string, null, or a list of text parts")
    return "".join(map(_part, content))


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise UsageError(f"content parts of type {kind!r} are not supported: send text parts")
    if not isinstance(part.get("text"), str):
        raise UsageError("a text part needs a string under 'text'")
    return str(part["text"])


def _call(call: Any) -> Any:
    """Chat APIs carry a call's arguments as JSON text, templates walk them as an object. Anything else passes as is."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}} if isinstance(arguments, dict) else call


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

"""The byte-level BPE of lisa-tiny, learned from its language, and the files of a tokenizer folder."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.tiny import language

SIZE = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTEXT = 4096
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_SEED = 17

# Letters with one mark or space in front, digits singly, other marks with their line ends, white space.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write(folder: Path, samples: int = 20_000) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, the same ones every time."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(SPECIAL) - len(MARKUP),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(samples), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text("utf-8"), "utf-8")


def _texts(samples: int) -> list[str]:
    """Prompts, reasoning and answers without the markup that the template adds as tokens of its own."""
    rng = random.Random(_SEED)
    texts = []
    for sample in islice(language.samples(_SEED, held_out=False), samples):
        texts += [message["content"] for message in sample.messages]
        texts += [json.dumps(tool["function"]) for tool in sample.tools[: rng.randint(0, 2)]]
        texts += [sample.thoughts[rng.choice(language.EFFORTS)] + "\n", *_outside(sample.answer)]
        texts += ["system\nReasoning effort: low", "Reasoning effort: medium", "user\n", "assistant\n", "\n\n"]
        texts += [rng.choice(language.SYSTEMS), "# Tools\n<tools>\n"]
    return texts


def _outside(text: str) -> list[str]:
    for token in MARKUP:
        text = text.replace(token, "\0")
    return text.split("\0")

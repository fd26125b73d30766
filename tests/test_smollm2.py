"""The embedded model, strict arithmetic: it answers, and drafting does not change a token."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tiny import ScriptedDrafter, events, outcome, session

from lisa.drafters.ngram import Ngram
from lisa.drafters.none import Nothing
from lisa.loader import Loaded, load
from lisa.types import Request, Sampling

PROMPTS = [
    "What is the capital of France?",
    "Name three rivers.",
    "Write a haiku about rain.",
    "Translate 'good morning' into Spanish.",
    "What is 12 plus 30?",
    "List the numbers from 1 to 12.",
    "Repeat after me: one two three, one two three, one two three.",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Summarise: The cat sat on the mat. The dog sat on the log. The cat and the dog are friends.",
    "What comes after Tuesday?",
    'Return the JSON {"name": "Ada", "age": 36} with the age increased by one.',
    "Explain what a prime number is.",
    "Count backwards from ten.",
    "Copy this list and sort it: pear, apple, fig, plum, apple.",
    "Tell me a joke about a computer.",
    "Who wrote Romeo and Juliet?",
    "Correct the spelling: teh quick borwn fox",
    "Write a short poem with the word 'word' in every line.",
]


@pytest.fixture(scope="module")
def smollm2() -> Loaded:
    return load("smollm2-135m", drafter="none")


def ids(loaded: Loaded, drafter: Any, request: Request, width: int = 0) -> list[int]:
    return outcome(events(session(loaded.engine.target, drafter, width, chunk=512), request))[0]


def test_it_knows_the_capital_of_france(smollm2: Loaded) -> None:
    prompt = smollm2.tokenizer.render([{"role": "user", "content": PROMPTS[0]}])
    reader = smollm2.tokenizer.reader(prompt=prompt)
    request = Request(tuple(prompt), smollm2.sampling, 24, smollm2.tokenizer.eos, reader=reader)
    _, text, _, reason, _ = outcome(events(session(smollm2.engine.target, Nothing), request))
    assert text == "The capital of France is Paris." and reason == "stop"


@pytest.mark.parametrize("sampling", [Sampling(seed=0), Sampling(temperature=1.0, seed=17)], ids=["T=0", "T=1"])
def test_speculative_text_equals_plain_text_on_twenty_prompts(smollm2: Loaded, sampling: Sampling) -> None:
    rng = random.Random(3)
    for text in PROMPTS:
        prompt = tuple(smollm2.tokenizer.render([{"role": "user", "content": text}]))
        request = Request(prompt, sampling, 14, smollm2.tokenizer.eos)
        plain = ids(smollm2, Nothing, request)
        truth = [*prompt, *plain, *range(20)]

        def mixed(position: int, width: int, truth: list[int] = truth) -> list[int]:
            right = rng.randint(1, width)
            return [t if i < right else 99 for i, t in enumerate(truth[position + 1 : position + 1 + width])]

        assert ids(smollm2, lambda script=mixed: ScriptedDrafter(script, taps=(1, 15)), request, 5) == plain, text
        if "epeat" in text or "Copy" in text:
            assert ids(smollm2, Ngram, request, 7) == plain, text


def test_two_prompts_that_share_any_m_tokens_are_answered_as_by_a_cold_run(smollm2: Loaded) -> None:
    first = tuple(smollm2.tokenizer.render([{"role": "user", "content": PROMPTS[6]}]))
    for m in range(3, len(first) - 1, 5):
        rest = smollm2.tokenizer.encode(" repeat it twice, twice: one two three, one two three")
        request = Request((*first[:m], *rest), Sampling(), max_tokens=8, logprobs=2)
        cold = outcome(events(session(smollm2.engine.target, Ngram, 4, chunk=512), request))
        warm = session(smollm2.engine.target, Ngram, 4, chunk=512)
        outcome(events(warm, Request(first, Sampling(), max_tokens=4)))
        shared = warm.usable(request.tokens)
        assert shared >= m
        for made in (warm.branch(request.tokens), warm):
            *said, stats = outcome(events(made, request))
            assert said == list(cold[:4]) and stats.cached_tokens == shared
            assert (stats.drafted, stats.accepted) == (cold[4].drafted, cold[4].accepted)

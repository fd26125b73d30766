"""python -m bench.tiny.pretrain FOLDER [--minutes 30]: trains lisa-tiny from scratch on a CPU and writes its folder.

A checkpoint is written every two minutes to FOLDER/checkpoint; started again, training goes on from it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lisa import blas

blas.use()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx.optimizers import AdamW, MultiOptimizer, Muon, clip_grad_norm  # noqa: E402
from mlx.utils import tree_flatten, tree_unflatten  # noqa: E402

from bench.tiny import language, vocabulary  # noqa: E402
from bench.tiny.trainable import Trainable, arguments, cross_entropy  # noqa: E402
from lisa.tokenizer import Tokenizer, load_tokenizer  # noqa: E402

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 192,
    "num_hidden_layers": 8,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "rms_norm_eps": 1e-6,
    "vocab_size": vocabulary.SIZE,
    "max_position_embeddings": vocabulary.CONTEXT,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
PEAK, MATRIX_PEAK, WARM_UP, BATCH = 3e-3, 0.02, 40, 1024
"""Learning rates of AdamW and of Muon (the matrices of the layers), steps, and tokens of a batch."""
EARLY, COOL_DOWN = 0.2, 0.35
"""The part of the training that is on short samples, and the last part, in which the learning rates fall."""
LENGTH, OPEN = 256, 24
"""Tokens of a row, and how many rows are filled at once."""
OTHERS = 0.1
"""Weight of the tokens that the assistant does not write."""


@dataclass(frozen=True)
class Batch:
    """tokens int32 [B, T]; weights float32 [B, T], of each token as a label; segments int32 [B, T], the sample."""

    tokens: mx.array
    weights: mx.array
    segments: mx.array


def batches(tokenizer: Tokenizer, seed: int, shares: Mapping[str, float]) -> Iterator[Batch]:
    """Endless batches of full rows, each of several whole samples."""
    rng = random.Random(seed)
    full: list[list[list[int]]] = []
    rows: list[list[list[int]]] = [[] for _ in range(OPEN)]
    for sample in language.samples(seed, held_out=False, shares=shares):
        ids = _row(tokenizer, sample, rng)
        fits = [row for row in rows if sum(map(len, row)) + len(ids) <= LENGTH]
        if fits:
            max(fits, key=lambda row: sum(map(len, row))).append(ids)
        elif len(ids) <= LENGTH:
            full.append(rows.pop(rng.randrange(OPEN)))
            rows.append([ids])
        if len(full) * LENGTH >= BATCH:
            yield _batch(tokenizer, full)
            full = []


def _batch(tokenizer: Tokenizer, rows: list[list[list[int]]]) -> Batch:
    end = tokenizer.raw.token_to_id("<|endoftext|>")
    tokens, weights, segments = [], [], []
    for row in rows:
        padding = LENGTH - sum(map(len, row))
        tokens.append([token for ids in row for token in ids] + [end] * padding)
        weights.append([w for ids in row for w in _weights(tokenizer, ids)] + [0.0] * padding)
        segments.append([i for i, ids in enumerate(row) for _ in ids] + [len(row)] * padding)
    return Batch(mx.array(tokens, mx.int32), mx.array(weights, mx.float32), mx.array(segments, mx.int32))


def _row(tokenizer: Tokenizer, sample: language.Sample, rng: random.Random) -> list[int]:
    """A conversation with its answer, thinking off, low or medium, sometimes with a system message."""
    effort = rng.choice((None, None, "low", "medium"))
    system = rng.choice(language.SYSTEMS) if rng.random() < 0.15 else ""
    messages = language.conversation(sample, effort, system)
    prompt = tokenizer.render(messages, tools=sample.tools or None, thinking=effort is not None, effort=effort)
    return [*prompt, *tokenizer.encode(language.completion(sample, effort) + "<|im_end|>")]


def _weights(tokenizer: Tokenizer, ids: list[int]) -> list[float]:
    """1 for what the assistant writes up to the end of its turn, OTHERS for the rest, 0 for the first token."""
    start, end = (tokenizer.raw.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    role = tokenizer.encode("assistant")
    weights, writing = [0.0], False
    for i, token in enumerate(ids[1:], 1):
        weights.append(1.0 if writing else OTHERS)
        if token in (start, end):
            writing = False
        elif ids[max(0, i - len(role)) : i + 1] == [start, *role]:
            writing = True
    return weights


def new_model(seed: int) -> Trainable:
    mx.random.seed(seed)
    model = Trainable(arguments({"model_type": "qwen3_5", "text_config": TEXT_CONFIG}))
    n = len(model.layers)
    for layer in model.layers:
        if layer.is_linear:
            mixer = layer.linear_attn
            heads = mixer.num_v_heads
            mixer.A_log = mx.log(mx.random.uniform(0.5, 8.0, (heads,)))
            rate = mx.exp(mx.random.uniform(math.log(1e-3), math.log(0.1), (heads,)))
            mixer.dt_bias = rate + mx.log(-mx.expm1(-rate))  # softplus of it is the rate
            outs = [mixer.out_proj, layer.mlp.down_proj]
        else:
            outs = [layer.self_attn.o_proj, layer.mlp.down_proj]
        for out in outs:
            out.weight = out.weight * (2 * n) ** -0.5
    mx.eval(model.parameters())
    return model


def loss(model: Trainable, batch: Batch) -> mx.array:
    hidden = model.hidden(batch.tokens, batch.segments)[:, :-1].reshape(-1, TEXT_CONFIG["hidden_size"])
    labels, weights = batch.tokens[:, 1:].reshape(-1), batch.weights[:, 1:].reshape(-1)
    return (cross_entropy(model.logits(hidden), labels) * weights).sum() / weights.sum()


def _is_matrix(name: str, value: mx.array) -> bool:
    return ".layers." in name and value.ndim == 2 and "in_proj_a" not in name and "in_proj_b" not in name


class Training:
    """The model, its optimiser and how far it is. `seconds` are those spent in steps, so a pause costs nothing."""

    def __init__(self, folder: Path, minutes: float, seed: int):
        self.folder, self.budget, self.seed = folder, minutes * 60, seed
        self.tokenizer = _tokenizer(folder)
        self.model = new_model(seed)
        self.matrices = Muon(MATRIX_PEAK, weight_decay=0.0)
        self.others = AdamW(PEAK, betas=[0.9, 0.98], eps=1e-8, weight_decay=0.01)
        self.optimiser = MultiOptimizer([self.matrices, self.others], [_is_matrix])
        self.optimiser.init(self.model.trainable_parameters())
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self._resume()

    def run(self) -> None:
        step_of = self._compiled()
        said = saved = time.monotonic()
        shown: list[float] = []
        start = self.seed * 1_000_003 + self.step
        early = batches(self.tokenizer, start, language.EARLY_SHARES)
        later = batches(self.tokenizer, -start, language.SHARES)
        while self.seconds < self.budget:
            batch = next(later if self.seconds > EARLY * self.budget else early)
            began = time.monotonic()
            self.matrices.learning_rate, self.others.learning_rate = MATRIX_PEAK * self.rate(), PEAK * self.rate()
            value, gradients = step_of(self.model.trainable_parameters(), batch)
            gradients, _ = clip_grad_norm(gradients, 1.0)
            self.optimiser.update(self.model, gradients)
            mx.eval(self.model.parameters(), self.optimiser.state, value)
            now = time.monotonic()
            self.step, self.tokens = self.step + 1, self.tokens + batch.tokens.size
            self.seconds += min(now - began, 20.0)
            shown.append(value.item())
            if now - said > 15:
                mean = sum(shown) / len(shown)
                speed = batch.tokens.size * len(shown) / (now - said)
                print(f"{self.seconds:.0f} s step {self.step} loss {mean:.4f} {speed:.0f} tokens/s", flush=True)
                shown, said = [], now
            if now - saved > 120:
                self.save()
                saved = now
        self.save()

    def _compiled(self) -> Any:
        """(parameters, batch) -> (loss, gradients) as one graph: fused passes take a third off a step."""
        plain = nn.value_and_grad(self.model, lambda model, *arrays: loss(model, Batch(*arrays)))

        def step(parameters: Any, *arrays: mx.array) -> Any:
            self.model.update(parameters)
            return plain(self.model, *arrays)

        compiled = mx.compile(step)

        def run(parameters: Any, batch: Batch) -> Any:
            value, gradients = compiled(parameters, batch.tokens, batch.weights, batch.segments)
            self.model.update(parameters)  # tracing has left placeholders in the model
            return value, gradients

        return run

    def rate(self) -> float:
        """The part of the peak rates: warm-up by steps, level, then down to 2 % over the last part of the time."""
        left = 1.0 - min(1.0, self.seconds / self.budget)
        return min(1.0, (self.step + 1) / WARM_UP) * max(0.02, min(1.0, left / COOL_DOWN))

    def save(self) -> None:
        """One file, so that a kill leaves the old or the new one."""
        arrays = {f"model.{k}": v for k, v in tree_flatten(self.model.parameters())}
        arrays |= {f"optimiser.{k}": v for k, v in tree_flatten(self.optimiser.state)}
        counts = {"step": self.step, "seconds": self.seconds, "tokens": self.tokens}
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._checkpoint.with_name("fresh.safetensors")
        mx.save_safetensors(str(fresh), arrays, {k: str(v) for k, v in counts.items()})
        fresh.replace(self._checkpoint)

    def _resume(self) -> None:
        if not self._checkpoint.is_file():
            return
        arrays, counts = mx.load(str(self._checkpoint), return_metadata=True)
        mine = {k.removeprefix("model."): v for k, v in arrays.items() if k.startswith("model.")}
        self.model.load_weights(list(mine.items()))
        state = [(k.removeprefix("optimiser."), v) for k, v in arrays.items() if k.startswith("optimiser.")]
        self.optimiser.state = tree_unflatten(state)
        self.step, self.tokens = int(counts["step"]), int(counts["tokens"])
        self.seconds = float(counts["seconds"])
        print(f"going on from step {self.step}, {self.seconds:.0f} s", flush=True)

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint" / "latest.safetensors"


def _tokenizer(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        vocabulary.write(folder)
    return load_tokenizer(folder)


def export(model: Trainable, folder: Path) -> None:
    """config.json, generation_config.json and float16 weights, in the layout mlx-lm reads."""
    weights = {k: v.astype(mx.float16) for k, v in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    ids = load_tokenizer(folder).raw.token_to_id
    ends = [ids("<|im_end|>"), ids("<|endoftext|>")]
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "eos_token_id": ends,
        "text_config": {**TEXT_CONFIG, "layer_types": _layer_types(), "eos_token_id": ends[0]},
    }
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _layer_types() -> list[str]:
    n, every = TEXT_CONFIG["num_hidden_layers"], TEXT_CONFIG["full_attention_interval"]
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    training = Training(given.folder, given.minutes, given.seed)
    training.run()
    export(training.model, given.folder)
    about = {
        "command": f"python -m bench.tiny.pretrain {given.folder.name} --minutes {given.minutes:g} --seed {given.seed}",
        "parameters": sum(value.size for _, value in tree_flatten(training.model.parameters())),
        "steps": training.step,
        "tokens": training.tokens,
        "minutes": round(training.seconds / 60, 1),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, BLAS {blas.use()}",
        "mlx": version("mlx"),
    }
    (given.folder / "training.json").write_text(json.dumps(about, indent=2) + "\n", "utf-8")
    print(json.dumps(about))


if __name__ == "__main__":
    main()

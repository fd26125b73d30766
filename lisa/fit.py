"""Whether a model fits this machine: weights, context, recurrent state, drafter and working memory against the room.

On Metal the room is what the driver recommends a process to keep resident: past it the system compresses and swaps,
and everything slows to a crawl. On a CPU it is most of the memory.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lisa import catalog
from lisa.errors import DoesNotFit
from lisa.memory import Machine, gigabytes

CONTEXT = 8192
"""Tokens of context that should fit beside a model that nobody named, and beside a drafter that nobody named."""

SMALLEST = 1024
"""A model that leaves room for less context than this is refused."""

_CPU_SHARE = 0.9
_WORKING = 0.02  # of the weights: activations of a chunk, logits of a pass; an allowance, unmeasured on a Mac
_WIDER = 2  # float32, the CPU's format, to 16 bits
_UNPACKED = 5.5  # float32 to the embedded model's file of 4 and 8 bits


@dataclass(frozen=True)
class Room:
    """Bytes that may be taken, and what they are called."""

    bytes: int
    name: str


@dataclass(frozen=True)
class Need:
    """Bytes a model takes; `kv` and `drafter_kv` for each token of context."""

    weights: int
    kv: int = 0
    state: int = 0
    drafter: int = 0
    drafter_kv: int = 0

    @property
    def working(self) -> int:
        return int(_WORKING * self.weights)

    def at(self, context: int) -> int:
        """Bytes with that many tokens of context."""
        per_token = self.kv + self.drafter_kv
        return self.weights + self.drafter + self.state + self.working + context * per_token

    def longest(self, room: Room) -> int | None:
        """Tokens of context that fit, 0 when not even the weights do; None when a token costs nothing."""
        left = room.bytes - self.at(0)
        if left < 0:
            return 0
        per_token = self.kv + self.drafter_kv
        return left // per_token if per_token else None

    def fits(self, room: Room, context: int = CONTEXT) -> bool:
        return self.at(context) <= room.bytes

    def alone(self) -> Need:
        """Without its drafter."""
        return replace(self, drafter=0, drafter_kv=0)

    def words(self, context: int) -> str:
        """The sum and what it is made of."""
        parts = [
            ("weights", self.weights),
            ("drafter", self.drafter),
            ("recurrent state", self.state),
            (f"{context} tokens of context", context * (self.kv + self.drafter_kv)),
            ("working memory", self.working),
        ]
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts if size >= 5e7 or name == "weights")
        return f"{gigabytes(self.at(context))} ({listed})"


def room(machine: Machine, recommended: int | None = None) -> Room:
    """What may be taken. `recommended` is the driver's own number, where MLX has been asked for it."""
    if not machine.metal:
        return Room(int(_CPU_SHARE * machine.memory), "nine tenths of the memory")
    return Room(recommended or _wired_limit() or _usual(machine.memory), "Metal's recommended working set")


def _wired_limit() -> int:
    """What the owner of the Mac has set with `sysctl iogpu.wired_limit_mb`, 0 if nothing."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        command = ["sysctl", "-n", "iogpu.wired_limit_mb"]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout) << 20
    return 0


def _usual(memory: int) -> int:
    """Without asking the driver: two thirds of a small memory and three quarters of a large one."""
    return memory * 2 // 3 if memory < 36 << 30 else memory * 3 // 4


def of_entry(
    entry: catalog.Entry, weights: catalog.Weights, machine: Machine, drafter: catalog.Drafter | None = None
) -> Need:
    """From the catalogue's numbers, before anything is fetched."""
    size = weights.bytes
    if weights.wheel is not None and not machine.metal:
        size = int(_UNPACKED * size)
    elif weights.quantisation == "bf16" and not machine.metal:
        size *= _WIDER
    kv = entry.memory.kv_bytes * (1 if machine.metal else _WIDER)
    beside = ((drafter.bytes if drafter else None) or 0) * (1 if machine.metal else _WIDER)
    return Need(size, kv, entry.memory.state_bytes, beside)


def of_config(config: Mapping[str, Any], size: int, machine: Machine, kv_bits: int | None = None) -> Need:
    """From a target's config.json and the `size` of its weight files."""
    text = config.get("text_config", config)
    element = 2 if machine.metal else 4
    if not machine.metal and "quantization" not in config and config.get("dtype") != "float32":
        size *= _WIDER
    per_number = _per_number(element, kv_bits)
    with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):  # a config that lacks these is refused later
        attention, recurrent = _layers(text)
        state = recurrent * _state(text, element) if recurrent else 0
        return Need(size, int(attention * _kv_numbers(text) * per_number), state)
    return Need(size)


def with_drafter(need: Need, config: Mapping[str, Any], size: int, machine: Machine, bits: int | None = None) -> Need:
    """`need` and a drafter of that config.json and `size` at 16 bits, its matrices packed to `bits`."""
    element = 2 if machine.metal else 4
    layer = config.get("transformer_layer_config", config.get("config", config))
    kv = 0
    with suppress(KeyError, TypeError, ZeroDivisionError):
        kv = int(layer["num_hidden_layers"] * _kv_numbers(layer) * element)
    return replace(need, drafter=int(size / 2 * _per_number(element, bits)), drafter_kv=kv)


def _per_number(element: int, bits: int | None) -> float:
    """Bytes of a number: `element` as it is; packed, `bits` and its share of a scale and a bias for 64 numbers."""
    return element if bits is None else bits / 8 + 2 * element / 64


def _layers(text: Mapping[str, Any]) -> tuple[int, int]:
    """Layers with a K/V cache and layers with a recurrent state."""
    layers = int(text["num_hidden_layers"])
    if "linear_num_value_heads" not in text:
        return layers, 0
    attention = layers // int(text.get("full_attention_interval", 4))
    return attention, layers - attention


def _kv_numbers(text: Mapping[str, Any]) -> int:
    """Numbers a layer keeps for each token: K and V of every head."""
    heads = text["num_attention_heads"]
    return 2 * int(text.get("num_key_value_heads", heads)) * int(text.get("head_dim") or text["hidden_size"] // heads)


def _state(text: Mapping[str, Any], element: int) -> int:
    """Bytes of a Gated DeltaNet layer: the state in float32 and the window of its convolution."""
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    window = (text["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
    return int(4 * values * text["linear_key_head_dim"] + element * window)


def check(
    name: str, need: Need, room: Room, entry: catalog.Entry | None = None, machine: Machine | None = None
) -> None:
    """Raises DoesNotFit with the numbers and what would fit, unless `need` and a usable context fit the room."""
    if need.fits(room, SMALLEST):
        return
    offers = ", ".join(offered(need, room, entry, machine))
    advice = f"what fits: {offers}" if offers else "choose a smaller model: lisa models"
    raise DoesNotFit(f"{name} needs {need.words(SMALLEST)}, and {room.name} is {gigabytes(room.bytes)}; {advice}")


def offered(need: Need, room: Room, entry: catalog.Entry | None, machine: Machine | None) -> Iterator[str]:
    """What would fit: the model without its drafter and how much context then, packed smaller, another model."""
    alone = need.alone()
    if need.drafter and alone.fits(room, SMALLEST):
        yield f"--drafter ngram{_up_to(alone, room)}"
    if entry is None or machine is None:
        return
    for weights in entry.weights:
        smaller = of_entry(entry, weights, machine)
        if smaller.weights < need.weights and smaller.fits(room, SMALLEST):
            yield f"--quantisation {weights.quantisation}{_up_to(smaller, room)}"
    for other in reversed(catalog.entries()):
        if other.name != entry.name and of_entry(other, other.weights[0], machine).fits(room):
            yield f"the model {other.name}"
            return


def _up_to(need: Need, room: Room) -> str:
    longest = need.longest(room)
    return "" if longest is None or longest >= CONTEXT else f" with up to {longest} tokens of context"

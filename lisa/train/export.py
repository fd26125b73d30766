"""Writes a drafter folder: SpecForge's layout, or 8-bit without what the target already has, and a card."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from lisa.measure import commit
from lisa.target import Target
from lisa.train import networks
from lisa.train.acceptance import Acceptance
from lisa.train.networks import Draft
from lisa.train.settings import Settings
from lisa.train.steps import Data
from lisa.train.store import Store, write

_GROUP, _BITS = 64, 8


def export(draft: Draft, scale: Any, settings: Settings, card: str) -> None:
    """Write `settings.out`, each file complete or as it was before."""
    weights, config = networks.folded(draft, scale), dict(draft.checkpoint.config)
    weights = {
        name.replace("layer.", "midlayer.", 1) if _of_eagle(draft, name) else name: v for name, v in weights.items()
    }
    if settings.storage == "8bit":
        weights = _packed(weights, draft)
        config["quantization"] = {"group_size": _GROUP, "bits": _BITS}
    else:
        weights = {name: value.astype(mx.float16) for name, value in weights.items()} | _whole(draft)
    mx.eval(weights)
    write(settings.out / "model.safetensors", lambda path: mx.save_safetensors(str(path), weights, {"format": "mlx"}))
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write(settings.out / "config.json", lambda path: path.write_text(text, "utf-8"))
    write(settings.out / "README.md", lambda path: path.write_text(card, "utf-8"))


def _of_eagle(draft: Draft, name: str) -> bool:
    return draft.kind == "eagle" and name.startswith("layer.")


def _whole(draft: Draft) -> dict[str, mx.array]:
    """What SpecForge's layout holds beside the network's own tensors."""
    apart = {name: value for name, value in draft.apart.items() if name == "d2t"}
    return apart if draft.codes is None else {**apart, "transfer_codes": draft.codes.astype(mx.float16)}


def _packed(weights: dict[str, mx.array], draft: Draft) -> dict[str, mx.array]:
    """Matrices at 8 bits. Left out is what the target has: codes that its head makes, and a head that is its rows."""
    rebuilt = "transfer_basis" in draft.apart
    beside = {n: v for n, v in draft.apart.items() if n != "transfer_codes" or not rebuilt}
    packed = {name: v if name == "d2t" else v.astype(mx.float16) for name, v in beside.items()}
    for name, value in weights.items():
        if name == "lm_head.weight" and draft.tied:
            continue
        if value.ndim == 2 and value.shape[1] % _GROUP == 0:
            stem = name.removesuffix(".weight")
            parts = mx.quantize(value.astype(mx.float16), group_size=_GROUP, bits=_BITS)
            packed |= {
                f"{stem}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts, strict=True)
            }
        else:
            packed[name] = value.astype(mx.float16)
    return packed


@dataclass(frozen=True)
class Story:
    """What a card tells of a training that does not change while it runs."""

    settings: Settings
    target: Target
    store: Store
    data: Data
    draft: Draft

    def card(
        self, got: Acceptance, curve: Sequence[tuple[float, int, float]], step: int, seconds: float, anchors: int
    ) -> str:
        s, store = self.settings, self.store
        trained = [self.data.conversation(i) for i in self.data.train]
        reasons = {r: sum(c.reason == r for c in trained) for r in ("stop", "length", "loop")}
        source = "its own, sampled as the user's turn of its chat template" if s.data is None else f"from {s.data.name}"
        head = "full" if s.head == "full" else f"{s.head} (a CPU trains on a sampled vocabulary)"
        lines = {
            "Target": f"{self.target.name}, fingerprint {store.fingerprint} (config and a sample of its weights)",
            "Kind": f"{self.draft.kind}, {_size(self.draft)}, taps {list(self.draft.taps)}",
            "Started from": "random weights" if s.adapt is None else f"the drafter {s.adapt.name}",
            "Prompts": f"{source}; {len(trained)} trained on, {len(self.data.held)} held out by hash",
            "Answers": f"the target's own, {sum(len(c.ids) - c.prompt for c in trained)} tokens; "
            f"{sum(c.drawn for c in trained)} drawn at temperature 1, the others greedy; {reasons['stop']} ended, "
            f"{reasons['length']} cut at {s.answer} tokens, {reasons['loop']} cut because they looped",
            "Training": f"{step} steps, {anchors} anchors, {seconds / 60:.1f} minutes, objective {s.objective}, "
            f"head {head}, AdamW at {s.rate:g} with cosine, "
            f"batch {s.batch} x {s.anchors} anchors, unroll {s.unroll}, seed {s.seed}",
            "Machine": f"{platform.machine()}, {platform.system()}, MLX {version('mlx')} on {_device()}",
            "Accepted length": f"{got.length:.3f} tokens a round at temperature 0 on held-out prompts, the target's "
            f"own included, the best of {len(curve)} measurements",
            "By slot": ", ".join(f"{slot:.2f}" for slot in got.slots),
            "By width": ", ".join(f"{w}: {length:.3f}" for w, length in got.widths.items()),
            "Learning curve": ", ".join(f"{length:.3f} at {minutes:g} min" for minutes, _, length in curve),
            "Commit": commit() or "unknown (not run from a checkout)",
            "Date": datetime.now(timezone.utc).date().isoformat(),
            "Storage": s.storage,
            "Licences": "the weights derive from the target and from text it wrote: its licence applies to them; "
            "the trainer is Apache-2.0",
        }
        rows = "\n".join(f"| {name} | {text} |" for name, text in lines.items())
        front = f"---\nbase_model: {self.target.name}\nlibrary_name: lisa\n---\n"
        return f"{front}# {s.out.name}\n\nA drafter made by `lisa train`.\n\n| | |\n|---|---|\n{rows}\n"


def _size(draft: Draft) -> str:
    if draft.kind == "eagle":
        return f"1 layer, {len(draft.ids)} tokens in its vocabulary"
    return f"{len(draft.network.layers)} layers, block {draft.block}"


def _device() -> str:
    return "the GPU" if mx.default_device() == mx.gpu else "the CPU"

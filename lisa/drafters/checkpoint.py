"""Reads every drafter folder layout into plain values, and says whether a drafter fits a target.

| layout | files |
|---|---|
| DSpine reference | model.safetensors, transfer.safetensors (`codes`), config.json, fields maybe under "config" |
| SpecForge DSpine, DFlash | one set of weights (`transfer_codes` for DSpine), config.json with `dflash_config` |
| SpecForge EAGLE-3 | tensors `midlayer.*`; tap ids count layer outputs |
| vLLM-speculators EAGLE-3 | tensors `layers.0.*`, fields under "transformer_layer_config"; tap ids count layer inputs |

Weights may be sharded (model.safetensors.index.json), of any float dtype, or packed by MLX where config.json has a
"quantization" with bits and group_size. What the target has already may be left out: DSpine's codes where
`transfer_mean` and `transfer_basis` make them from its head, EAGLE-3's `lm_head` where `d2t` names its rows. Shapes
decide sizes. What decides meaning (which layers are tapped, the mask token) is declared by the folder, the catalogue or
the user, and never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import mlx.core as mx

from lisa.errors import BadDrafter, DamagedModel

Kind = Literal["dspine", "dflash", "eagle"]

_ARCHITECTURES: dict[str, Kind] = {
    "DSpineDraftModel": "dspine",
    "DFlashDraftModel": "dflash",
    "LlamaForCausalLMEagle3": "eagle",
    "Eagle3LlamaForCausalLM": "eagle",
    "Eagle3Speculator": "eagle",
    "Eagle3DraftModel": "eagle",
}
_NOT_YET = ("DFlash2", "DSpark", "Domino", "PEagle")
_CORRECT = "correct it with --drafter-config"
_OURS = "choose a DSpine, DFlash or EAGLE-3 drafter, or --drafter none"
_REFERENCE_BLOCK = 16
_UNUSED = re.compile(r"transfer_ready|t2d|verifier_.*|.*rotary_emb\.inv_freq")

# Options that change what the network computes, and the values under which it computes what Lisa does.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_mode": ("gqa", "mha"),
    "attention_modes": (),
    "projector_type": ("dflash", "dspine"),
    "shift_label": (False,),
    "pure_draft_prefix_len": (0,),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "parallel_drafting": (False,),
}


class TargetFacts(Protocol):
    """What a drafter must agree with. `vocab` counts usable token ids, `rows` the embedding's, padding included."""

    name: str
    hidden: int
    layers: int
    vocab: int
    rows: int


@dataclass(frozen=True)
class Checkpoint:
    """A drafter folder as plain values.

    `config` is flat: nested sections are merged, and what came from outside the folder wins. `weights` have the same
    names whatever the layout (EAGLE-3's only layer is `layer.*`). `taps` are the target layers whose outputs are read,
    in order; None stands for EAGLE-3's defaults, which depend on the target's depth. `mask` (token id) and `block`
    (slots, the anchor included) are None for EAGLE-3. `base` is the model the drafter says it was made for, if it says
    so. `provenance` says where each value that decides meaning came from, to be printed.
    """

    name: str
    kind: Kind
    config: Mapping[str, Any]
    weights: Mapping[str, mx.array]
    taps: tuple[int, ...] | None = None
    mask: int | None = None
    block: int | None = None
    base: str | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def vocab(self) -> int | None:
        """The size of the target's vocabulary, as far as the drafter knows it."""
        codes = self.weights.get("transfer_codes")
        return self.config.get("vocab_size") if codes is None else codes.shape[0]

    def taps_on(self, layers: int) -> tuple[int, ...]:
        """The taps on a target of that many layers."""
        return (1, layers // 2 - 1, layers - 4) if self.taps is None else self.taps


def refuse(name: str, why: str, remedy: str = "choose another, or --drafter none") -> NoReturn:
    raise BadDrafter(f"drafter {name} {why}; {remedy}")


def kind_of(folder: Path, name: str = "") -> Kind:
    """What a folder declares itself to be; reads no weights. Raises BadDrafter naming a kind Lisa does not run."""
    name = name or folder.name
    config = _flat(_json(folder / "config.json", name))
    declared = [str(a) for a in config.get("architectures") or ()]
    for architecture in declared:
        family = next((f for f in _NOT_YET if f.lower() in architecture.lower()), None)
        if family is not None:
            refuse(name, f"is of the kind {family} ({architecture}), not supported yet", _OURS)
        if architecture in _ARCHITECTURES:
            return _ARCHITECTURES[architecture]
    if "dspine_config" in config or (folder / "transfer.safetensors").exists():
        return "dspine"
    if "dflash_config" in config:
        return "dflash"
    if config.get("speculators_model_type") == "eagle3" or "eagle_config" in config or "draft_vocab_size" in config:
        return "eagle"
    what = ", ".join(declared) or config.get("speculators_model_type") or config.get("model_type") or "no architecture"
    refuse(name, f"declares {what}, which is no kind of drafter Lisa knows", _OURS)


def read(
    folder: Path, overrides: Mapping[str, Any] | None = None, source: str = "overrides", name: str = ""
) -> Checkpoint:
    """Read a drafter folder. `overrides` are fields that win over config.json; `source` says where they came from.

    Raises BadDrafter for a folder that is no drafter, lacks a required field, or asks for what Lisa does not compute;
    DamagedModel for files that are missing or cut short.
    """
    name = name or folder.name
    kind = kind_of(folder, name)
    fields = _Fields(name, _flat(_json(folder / "config.json", name)), _flat(overrides or {}), source)
    fields.refuse_unknown_options()
    base = fields.get("base_model", "base_model_name_or_path", "target_model_name_or_path") or _base(folder, fields)
    weights = _unpacked(_weights(folder, name), fields)
    if fields.get("rope_theta") is None:
        fields.provenance["rope_theta"] = "default 10000"
    if kind == "eagle":
        taps = _eagle_taps(fields, weights)
        return Checkpoint(name, kind, fields.config, _eagle_names(weights), taps, None, None, base, fields.provenance)
    if (
        kind == "dspine"
        and "transfer_codes" not in weights
        and not {"transfer_mean", "transfer_basis"} <= weights.keys()
    ):
        refuse(name, "has neither transfer_codes nor a transfer.safetensors with codes", "fetch it again")
    taps = fields.taps(fields.required("target_layer_ids"))
    mask = fields.whole("mask_token_id", least=0)
    if (folder / "transfer.safetensors").exists() and "block_size" not in fields.overrides:
        # The reference layout's block_size is not the one its drafters were trained with.
        block, fields.provenance["block_size"] = _REFERENCE_BLOCK, "DSpine reference layout"
    else:
        block = fields.whole("block_size", least=2)
    return Checkpoint(name, kind, fields.config, weights, taps, mask, block, base, fields.provenance)


class _Fields:
    """config.json under the overrides, noting where what is asked for came from."""

    def __init__(self, name: str, config: Mapping[str, Any], overrides: Mapping[str, Any], source: str):
        self.name, self.overrides, self.source = name, overrides, source
        self.config = {**config, **overrides}
        self.provenance: dict[str, str] = {}

    def get(self, *keys: str) -> Any:
        for key in keys:
            if self.config.get(key) is not None:
                self.provenance[keys[0]] = self.source if key in self.overrides else "config.json"
                return self.config[key]
        return None

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            refuse(
                self.name, f"does not say its {key}", "give it with --drafter-config: a guess drafts badly in silence"
            )
        return value

    def whole(self, key: str, least: int) -> int:
        value = self.required(key)
        if type(value) is not int or value < least:
            refuse(self.name, f"has {key} {value!r}, which must be a whole number of at least {least}", _CORRECT)
        return int(value)

    def taps(self, ids: Any, inputs: bool = False) -> tuple[int, ...]:
        """Layer ids as outputs of 0-based layers; `inputs` for ids that count the state entering a layer."""
        layers = self.config.get("num_target_layers")
        if not isinstance(ids, (list, tuple)) or not ids or not all(type(i) is int for i in ids):
            refuse(self.name, f"has target_layer_ids {ids!r}, which must be a list of layer numbers", _CORRECT)
        taps = tuple(i - 1 for i in ids) if inputs else tuple(ids)
        if len(set(taps)) != len(taps) or min(taps) < 0 or (layers is not None and max(taps) >= layers):
            refuse(self.name, f"has a negative, repeated or too large number in target_layer_ids {list(ids)}", _CORRECT)
        return taps

    def refuse_unknown_options(self) -> None:
        for key, plain in _PLAIN.items():
            value = self.config.get(key)
            if value is not None and value not in plain:
                refuse(self.name, f"asks for {key} {value!r}, not supported yet")


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """One level: outer fields win over a wrapping section, a family's own section wins over outer fields."""
    flat = {**(raw.get("transformer_layer_config") or {}), **(raw.get("config") or {}), **raw}
    for section in ("eagle_config", "dflash_config", "dspine_config"):
        flat.update({k: v for k, v in (flat.get(section) or {}).items() if v is not None})
    rope = flat.get("rope_parameters") or flat.get("rope_scaling")
    if isinstance(rope, dict):
        flat["rope_scaling"] = rope
        flat.setdefault("rope_theta", rope.get("rope_theta"))
    return flat


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedModel(
            f"{name} has no {path.name} in {path.parent}: it is no drafter folder, or its download is incomplete"
        ) from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise DamagedModel(f"{path} is damaged or incomplete: fetch {name} again")
    return value


def _weights(folder: Path, name: str) -> dict[str, mx.array]:
    """All tensors by name, without a leading "model." and without those no drafter needs."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set((_json(index, name).get("weight_map") or {}).values()))
    else:
        files = ["model.safetensors"]
    tensors: dict[str, mx.array] = {}
    for file in files:
        tensors |= {key.removeprefix("model."): value for key, value in _load(folder / file, name).items()}
    if (folder / "transfer.safetensors").exists():
        codes = _load(folder / "transfer.safetensors", name)
        tensors |= {"transfer_codes": codes["codes"]} if "codes" in codes else {}
    return {key: value for key, value in tensors.items() if not _UNUSED.fullmatch(key)}


def _unpacked(weights: dict[str, mx.array], fields: _Fields) -> dict[str, mx.array]:
    """Packed matrices as float16: they are packed again, if at all, when a drafter is loaded."""
    how = fields.config.get("quantization")
    if how is None:
        return weights
    packed = {key.removesuffix(".scales") for key in weights if key.endswith(".scales")}
    plain = {key: value for key, value in weights.items() if key.rpartition(".")[0] not in packed}
    try:
        for name in packed:
            weight, scales, biases = (weights[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
            plain[f"{name}.weight"] = mx.dequantize(weight, scales, biases, how["group_size"], how["bits"])
    except (KeyError, TypeError, ValueError) as error:
        refuse(fields.name, f"has packed weights that cannot be read ({error})", "fetch it again")
    return plain


def _load(file: Path, name: str) -> dict[str, mx.array]:
    if not file.exists():
        raise DamagedModel(f"{name} lacks {file.name}: its download is incomplete, fetch it again")
    try:
        tensors: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
    except (RuntimeError, ValueError):
        raise DamagedModel(f"{file} is damaged or incomplete: fetch {name} again") from None
    return tensors


def _eagle_taps(fields: _Fields, weights: Mapping[str, mx.array]) -> tuple[int, ...] | None:
    if "target_layer_ids" in fields.overrides:
        return fields.taps(fields.get("target_layer_ids"))
    ids = fields.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        fields.provenance["eagle_aux_hidden_state_layer_ids"] = "EAGLE-3 default"
        return None
    speculators = "speculators_model_type" in fields.config or any(key.startswith("layers.0.") for key in weights)
    return fields.taps(ids, inputs=speculators)


def _eagle_names(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    return {re.sub(r"^(midlayer|layers\.0)\.", "layer.", key): value for key, value in weights.items()}


def _base(folder: Path, fields: _Fields) -> str | None:
    """The base model of a speculators config or of a model card."""
    verifier = (fields.config.get("speculators_config") or {}).get("verifier") or {}
    if verifier.get("name_or_path"):
        return str(verifier["name_or_path"])
    card = folder / "README.md"
    front = card.read_text(encoding="utf-8", errors="replace").split("---")[1:2] if card.exists() else []
    found = re.search(r"^base_model:\s*(?:-\s*)?[\"']?([\w./-]+)", front[0], re.MULTILINE) if front else None
    return found[1] if found else None


def check_fit(checkpoint: Checkpoint, target: TargetFacts) -> str | None:
    """None for a drafter that fits the target, or a warning when it fits but was made for another model.

    Raises BadDrafter, naming both and the field, when hidden size, vocabulary or layer count rule the pairing out.
    """
    taps = checkpoint.taps_on(target.layers)
    config, fc = checkpoint.config, checkpoint.weights.get("fc.weight")

    def misfit(field: str, ours: Any, theirs: Any) -> NoReturn:
        refuse(checkpoint.name, f"does not fit {target.name}: its {field} is {ours}, the target's {theirs}")

    if fc is not None and fc.shape[1] != len(taps) * target.hidden:
        misfit(f"hidden_size (fc reads {len(taps)} taps)", fc.shape[1] // len(taps), target.hidden)
    if fc is not None and fc.shape[0] != target.hidden and "embed_tokens.weight" not in checkpoint.weights:
        misfit("hidden_size", fc.shape[0], target.hidden)
    declared = config.get("num_target_layers")
    if declared is not None and declared != target.layers:
        misfit("num_target_layers", declared, target.layers)
    if min(taps) < 0 or max(taps) >= target.layers or len(set(taps)) < len(taps):
        misfit("target_layer_ids", list(taps), f"layers are 0 to {target.layers - 1}")
    if checkpoint.vocab is not None and not same_vocabulary(checkpoint.vocab, target):
        misfit("vocab_size", checkpoint.vocab, target.vocab)
    if checkpoint.mask is not None and not 0 <= checkpoint.mask < target.rows:
        misfit("mask_token_id", checkpoint.mask, f"rows are 0 to {target.rows - 1}")
    if checkpoint.base is not None and _plain_name(checkpoint.base) != _plain_name(target.name):
        return (
            f"drafter {checkpoint.name} was made for {checkpoint.base}, not for {target.name}: fewer drafts will be "
            "accepted; `lisa train --adapt` fits it to this target"
        )
    return None


def same_vocabulary(vocab: int, target: TargetFacts) -> bool:
    """Either side may be padded to a round number of rows."""
    return target.vocab <= vocab <= target.rows or abs(vocab - target.vocab) <= min(512, target.vocab // 100)


def _plain_name(name: str) -> str:
    """A model's own name, without owner and without what a conversion appends."""
    own = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"(-(mlx|\d+bit|bf16|fp16|fp8|mxfp[48]|nvfp4|dwq|gguf|q\d\w*))+$", "", own)

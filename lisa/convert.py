"""The embedded model: a pinned llama-family GGUF -> an ordinary model folder that mlx-lm loads.

MLX reads GGUF but is not hardened against hostile files, so only a file whose sha256 the catalogue pins is opened.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lisa import catalog
from lisa.errors import UnsupportedModel

_GROUP = 32  # weights to a scale in Q4_1 and Q8_0, which MLX reads as affine 4 and 8 bits
_CONTROL = 3  # llama.cpp's token type of special tokens

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, out: Path, *, quantised: bool) -> None:
    """Write the folder `out` from `gguf`; nothing to do when it is there.

    `quantised` keeps the packed weights (affine, group 32, float16 scales) for Metal; otherwise they become dense
    float32, the format of the CPU. The folder appears whole or not at all, also when two processes write it at once.
    Raises UnsupportedModel for a file the catalogue does not pin.
    """
    if (out / "config.json").is_file():
        return
    entry = _pinned(gguf)
    loaded: Any = mx.load(str(gguf), format="gguf", return_metadata=True)
    weights, metadata = loaded
    config = _config(metadata, entry)
    tensors = _tensors(weights, config)
    if quantised:
        config |= {"dtype": "float16", "quantization": _quantization(tensors)}
        tensors = {name: t if t.dtype == mx.uint32 else t.astype(mx.float16) for name, t in tensors.items()}
    else:
        config["dtype"] = "float32"
        tensors = _dense(tensors)

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        folder = Path(temporary) / out.name
        folder.mkdir()
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
        _tokenizer(metadata).save(str(folder / "tokenizer.json"))
        _write(folder / "tokenizer_config.json", _tokenizer_config(metadata))
        # No sampling defaults: the catalogue keeps those, and a copy in a cache would outlive a change there.
        _write(folder / "generation_config.json", {"eos_token_id": list(entry.stop)})
        _write(folder / "config.json", config)
        try:
            folder.rename(out)
        except OSError:  # another process was first; its folder is the same
            if not (out / "config.json").is_file():
                raise


def _pinned(gguf: Path) -> catalog.Entry:
    sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()
    for entry in catalog.entries():
        if any(weights.wheel and weights.wheel.sha256 == sha256 for weights in entry.weights):
            return entry
    raise UnsupportedModel(f"{gguf} is not a GGUF that the catalogue pins: give a folder of safetensors instead")


def _config(metadata: dict[str, Any], entry: catalog.Entry) -> dict[str, Any]:
    def field(name: str) -> Any:
        return metadata[f"llama.{name}"].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "vocab_size": field("vocab_size"),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"),
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"].item(),
        "eos_token_id": list(entry.stop),
    }


def _tensors(weights: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """Tensors under mlx-lm's names, the rows of Q and K in its order."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, tensor in weights.items():
        *block, part, leaf = name.split(".")  # "blk.7.attn_q.scales", "token_embd.weight"
        prefix = f"model.layers.{block[1]}" if block else "model"
        tensors[f"{prefix}.{_NAMES[part]}.{leaf}"] = half_split(tensor, heads[part]) if part in heads else tensor
    return tensors


def half_split(rows: mx.array, heads: int) -> mx.array:
    """[heads * D, n] with a rotary pair in adjacent rows (llama.cpp) -> pairs D/2 apart (mlx-lm). Packed rows too."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _bits(tensors: dict[str, mx.array]) -> dict[str, int]:
    """Quantised layer -> bits. With groups of 32 a row has as many words for each scale as a weight has bits."""
    layers = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    return {name: tensors[f"{name}.weight"].shape[1] // tensors[f"{name}.scales"].shape[1] for name in layers}


def _quantization(tensors: dict[str, mx.array]) -> dict[str, Any]:
    """As mlx-lm writes it: one setting for all, then the layers that differ from it (here the 8-bit embedding)."""
    bits = _bits(tensors)
    common = {"group_size": _GROUP, "bits": min(bits.values())}
    return common | {layer: common | {"bits": n} for layer, n in bits.items() if n != common["bits"]}


def _dense(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    dense = {name: t.astype(mx.float32) for name, t in tensors.items() if t.dtype != mx.uint32}
    for layer, bits in _bits(tensors).items():
        packed, scales, biases = tensors[f"{layer}.weight"], dense.pop(f"{layer}.scales"), dense.pop(f"{layer}.biases")
        dense[f"{layer}.weight"] = mx.dequantize(packed, scales, biases, group_size=_GROUP, bits=bits)
    return dense


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """SmolLM's byte-level BPE: digits one by one, no space put in front."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise UnsupportedModel(f"a GGUF with the tokenizer {kind}; only SmolLM's is converted")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    def token(role: str) -> str:
        return str(metadata["tokenizer.ggml.tokens"][metadata[f"tokenizer.ggml.{role}_token_id"].item()])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "model_max_length": metadata["llama.context_length"].item(),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")

"""The sizes that the planner needs, from a transformers `config.json`.  Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ndtp.errors import GridError

# What families of models call the same thing, in the order in which they are looked for.
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
FFN = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "hidden_dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")

# Four times the hidden size where the file names no inner size.
FOURFOLD = ("gpt2", "bloom", "gptj", "gpt_neo", "gpt_bigcode", "codegen", "falcon", "mpt")
UNGATED = (
    "gpt2", "bloom", "gptj", "gpt_neo", "gpt_neox", "gpt_bigcode", "codegen", "falcon", "mpt", "opt", "bert", "roberta",
    "phi", "vit", "starcoder2", "nemotron", "whisper", "electra", "distilbert", "persimmon", "bart",
)  # fmt: skip
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelSizes:
    """Keyword arguments of `ndtp.plan` that describe the layers of a model."""

    hidden: int
    ffn: int
    gated: bool
    heads: int
    kv_heads: int
    head_size: int
    layers: int

    def as_arguments(self) -> dict[str, Any]:
        return asdict(self)


def read_config(path: str | Path) -> ModelSizes:
    """The sizes in a `config.json`, or in the one of a model's folder.

    Raises:
        GridError: no such file, no JSON, a size that is missing, or layers of another kind (experts).
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise GridError(f"model config {path} does not exist; give the path of a transformers config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GridError(f"model config {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise GridError(f"model config {path} holds no JSON object")
    config = {**config, **config.get("text_config", {})}  # models of text and images nest the text part
    if any((config.get(name) or 0) > 1 for name in EXPERTS):
        raise GridError(
            f"model config {path} describes mixture-of-experts layers, which the planner does not weigh\n"
            "  fix: plan one expert's MLP with --hidden and --ffn"
        )
    hidden = _find(config, HIDDEN, path)
    heads = _find(config, HEADS, path)
    kind = str(config.get("model_type", ""))
    ffn = _find(config, FFN, path, 4 * hidden if kind in FOURFOLD else None)
    kv_heads = _find(config, KV_HEADS, path, 1 if config.get("multi_query") else heads)
    head_size = _find(config, ("head_dim", "d_kv"), path, hidden // heads)
    layers = _find(config, LAYERS, path)
    return ModelSizes(hidden, ffn, _is_gated(config, kind), heads, kv_heads, head_size, layers)


def _find(config: dict[str, Any], names: tuple[str, ...], path: Path, default: int | None = None) -> int:
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        wrong = "lacks a size" if value is None else f"has {value!r}"
        raise GridError(f"model config {path} {wrong}; one of {', '.join(names)} must be a positive integer")
    return value


def _is_gated(config: dict[str, Any], kind: str) -> bool:
    """Models since LLaMA have a gate; older families, and those that say so, have none."""
    if "feed_forward_proj" in config:  # T5
        return str(config["feed_forward_proj"]).startswith("gated")
    return kind not in UNGATED and "n_embd" not in config

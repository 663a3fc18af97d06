"""The sizes that the planner needs, from a transformers `config.json`.  Pure."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ndtp.errors import GridError
from ndtp.planner.block_cost import LARGEST_SIZE
from ndtp.planner.fields import Number, read_parsed, shown
from ndtp.planner.request import SIZE

# What families of models call the same thing, in the order in which they are looked for.
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
FFN = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "hidden_dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
HEAD_SIZE = ("head_dim", "d_kv")
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
        GridError: no such file, no JSON, a size that is missing or no size, or layers of another kind (experts).
    """
    path = Path(path)
    path = path / "config.json" if os.path.isdir(path) else path
    what = f"model config {path}"
    config = read_parsed("model config", path, "JSON", json.loads, "give the path of a transformers config.json")
    if not isinstance(config, dict):
        raise GridError(f"{what} holds no JSON object")
    nested = config.get("text_config")  # models of text and images nest the text part
    if nested is not None:
        if not isinstance(nested, dict):
            raise GridError(f"{what}: text_config={shown(nested)}; it must be an object, or null")
        config = {**config, **nested}
    for name in EXPERTS:
        if config.get(name) is not None:
            Number(0, LARGEST_SIZE, integer=True).check(what, name, config[name])
            if config[name] > 1:
                raise GridError(
                    f"{what} describes mixture-of-experts layers ({name}={config[name]}), which the planner does not "
                    "weigh\n  fix: plan one expert's MLP with --hidden and --ffn"
                )
    hidden = _find(config, HIDDEN, what)
    heads = _find(config, HEADS, what)
    kind = str(config.get("model_type", ""))
    ffn = _find(config, FFN, what, 4 * hidden if kind in FOURFOLD else None)
    kv_heads = _find(config, KV_HEADS, what, 1 if config.get("multi_query") is True else heads)
    head_size = _find(config, HEAD_SIZE, what, hidden // heads)
    layers = _find(config, LAYERS, what)
    return ModelSizes(hidden, ffn, _is_gated(config, kind), heads, kv_heads, head_size, layers)


def _find(config: dict[str, Any], names: tuple[str, ...], what: str, default: int | None = None) -> int:
    name, value = next(((name, config[name]) for name in names if config.get(name) is not None), (names[0], default))
    if value is None:
        raise GridError(f"{what} lacks a size; one of {', '.join(names)} must be {SIZE}")
    SIZE.check(what, name, value)
    return int(value)


def _is_gated(config: dict[str, Any], kind: str) -> bool:
    """Models since LLaMA have a gate; older families, and those that say so, have none."""
    if "feed_forward_proj" in config:  # T5
        return str(config["feed_forward_proj"]).startswith("gated")
    return kind not in UNGATED and "n_embd" not in config

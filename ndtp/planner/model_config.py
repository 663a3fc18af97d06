"""The sizes of a model that the planner needs, read from a transformers `config.json`. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ndtp.errors import GridError
from ndtp.planner.fields import Number, read_parsed, shown
from ndtp.planner.model_families import INSTALL, Family, families
from ndtp.planner.model_sizes import Mixture, ModelSizes, Stack
from ndtp.planner.request import SIZE

# What families of models call the same thing, in the order in which they are looked for.
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
FFN = (
    "intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "hidden_dim", "d_inner",
    "dim_ff", "dff",
)  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "depth")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "attention_heads")
HEAD_SIZE = ("head_dim", "d_kv")
KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")
WIDTH = ("embedding_size", "word_embed_proj_dim")  # of an embedding, where it is not that of the layers
# Of an encoder beside a decoder.
ENCODER_FFN = ("encoder_ffn_dim", *FFN)
ENCODER_LAYERS = ("encoder_layers", *LAYERS)
ENCODER_HEADS = ("encoder_attention_heads", *HEADS)
DECODER_LAYERS = ("num_decoder_layers", "decoder_layers", *LAYERS)

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
VOCABULARY = ("vocab_size", "n_vocab")
# Every field that is read: what a file leaves out is what the family's config class takes for it.
READ = frozenset({
    *HIDDEN, *FFN, *LAYERS, *HEADS, *HEAD_SIZE, *KV_HEADS, *WIDTH, *ENCODER_FFN, *ENCODER_LAYERS, *ENCODER_HEADS,
    *DECODER_LAYERS, *EXPERTS, *VOCABULARY, "tie_word_embeddings", "feed_forward_proj", "mlp_ratio", "multi_query",
    "new_decoder_architecture", "decoder_sparse_step", "moe_layer_freq", "first_k_dense_replace", "mlp_only_layers",
    "moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size", "num_experts_per_tok",
})  # fmt: skip
PARTS = ("text_config",)
# Endings of the names of classes that have a head over the vocabulary.
WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")


def read_config(path: str | Path) -> ModelSizes:
    """The sizes in a `config.json`, or in the one of a model's folder.

    Raises:
        GridError: no such file, no JSON, a size that is missing or no size, or a `model_type` that is not known.
    """
    return sizes_of(*read_file(path))


def read_file(path: str | Path) -> tuple[dict[str, Any], str]:
    """Return the contents of a `config.json`, or of the one in a model's folder, and its name for messages.

    Raises:
        GridError: no such file, or no JSON.
    """
    path = Path(path)
    path = path / "config.json" if os.path.isdir(path) else path
    what = f"model config {path}"
    config = read_parsed("model config", path, "JSON", _parsed, "give the path of a transformers config.json")
    if not isinstance(config, dict):
        raise GridError(f"{what} holds no JSON object")
    return config, what


def _parsed(text: str) -> object:
    """Return what JSON says, in which transformers writes infinite numbers as `{"__float__": "Infinity"}`."""
    return json.loads(text, object_hook=lambda found: float(found["__float__"]) if [*found] == ["__float__"] else found)


def with_layers(config: dict[str, Any], layers: int, what: str) -> dict[str, object]:
    """A config with so many layers in each of its stacks; what it lists for each layer is cut, or goes on as it began.

    Raises:
        GridError: it names no number of layers.
    """
    owner = next((name for name in PARTS if isinstance(config.get(name), dict) and config[name]), None)
    part = config if owner is None else config[owner]
    counts = {key: part[key] for key in (*ENCODER_LAYERS, *DECODER_LAYERS) if isinstance(part.get(key), int)}
    if not counts:
        raise GridError(f"{what} names no number of layers, such as {LAYERS[0]}; leave --layers out")
    lists = {key: each for key, each in part.items() if isinstance(each, list) and len(each) in counts.values()}
    cut = {key: (each * (layers // max(1, len(each)) + 1))[:layers] for key, each in lists.items() if "layer" in key}
    changed = part | dict.fromkeys(counts, layers) | cut
    return changed if owner is None else config | {owner: changed}


def sizes_of(
    config: dict[str, Any], what: str = "model config", known: Mapping[str, Family] | None = None
) -> ModelSizes:
    """The sizes in what a `config.json` holds.

    Args:
        known: families by their `model_type`; default those that were compared with transformers' models.

    Raises:
        GridError: as `read_config`.
    """
    known = families() if known is None else known
    outer = config.get("model_type")
    left_out: tuple[str, ...] = ()
    for name in PARTS:  # models of text and images nest the text part
        nested = config.get(name)
        if nested is None:
            continue
        if not isinstance(nested, dict):
            raise GridError(f"{what}: {name}={shown(nested)}; it must be an object, or null")
        if nested:
            if outer is not None:
                _family(config, known, what, around=True).refuse_unread(config, what)
            left_out = tuple(key for key, value in config.items() if key.endswith("_config") and key != name and value)
            config = config | {key: value for key, value in nested.items() if value is not None}
    family = _family(config, known, what)
    family.refuse_unread(config, what)
    config = {**family.defaults, **config}
    if config.get("add_cross_attention"):
        kind = shown(config.get("model_type"))
        raise GridError(f"{what}: add_cross_attention of model_type={kind} is not known by the config alone\n{INSTALL}")
    for name in EXPERTS:
        if config.get(name) is not None:
            Number(0, 10**6, integer=True).check(what, name, config[name])
            if config[name] > 1 and not family.mixture:
                _refuse_experts(config, name, what)
    vocabulary = _find(config, VOCABULARY, what, 0, smallest=0) if family.vocabulary else 0
    tied = config.get("tie_word_embeddings")
    stacks = _stacks(config, family, what)
    return ModelSizes(
        f"{config['model_type']}",
        stacks,
        vocabulary,
        _find(config, WIDTH, what, stacks[-1].hidden),
        bool(vocabulary) and _has_head(config, family, what),
        True if tied is None else bool(tied),
        (*left_out, *["latent attention"] * family.latent),
    )


def _family(config: Mapping[str, Any], known: Mapping[str, Family], what: str, around: bool = False) -> Family:
    """Return the family of a config.

    Args:
        around: whether the config may be one whose text part is another config.
    """
    kind = config.get("model_type")
    found = known.get(kind) if isinstance(kind, str) else None
    if found is not None and found.around == around:
        return found
    if name := next((name for name in EXPERTS if isinstance(config.get(name), int) and config[name] > 1), None):
        _refuse_experts(config, name, what)
    raise GridError(
        f"{what}: model_type={shown(kind)} is no family whose layers are known by the config alone\n"
        f"{INSTALL}; or give the sizes of its MLP with --hidden, --ffn and, if it has a gate, --gated"
    )


def _refuse_experts(config: Mapping[str, object], name: str, what: str) -> None:
    mixtures = ", ".join(kind for kind, family in families().items() if family.mixture)
    raise GridError(
        f"{what} describes mixture-of-experts layers ({name}={shown(config[name])}) of "
        f"model_type={shown(config.get('model_type'))}; those of {mixtures} are known by the config alone\n"
        f"{INSTALL}; or give the sizes of its experts with --hidden, --ffn, --experts and --top-k"
    )


def _stacks(config: Mapping[str, object], family: Family, what: str) -> tuple[Stack, ...]:
    hidden = _find(config, HIDDEN, what)
    gated, inner = family.gated, 4 * hidden if family.fourfold else None
    ratio = config.get("mlp_ratio")  # of models of images
    if inner is None and isinstance(ratio, (int, float)) and 0 < ratio < 1024:
        inner = int(hidden * ratio)
    if isinstance(form := config.get("feed_forward_proj"), str):  # T5 comes with a gate and without
        gated = form.startswith("gated")

    def stack(name: str, layers: Sequence[str], ffn: Sequence[str], heads: Sequence[str], crosses: bool) -> Stack:
        count = _find(config, heads, what)
        kv_heads = _find(config, KV_HEADS, what, count)
        if "multi_query" in config and not config.get("new_decoder_architecture"):  # Falcon names more
            kv_heads = 1 if config["multi_query"] else count
        if count % kv_heads:
            raise GridError(f"{what}: {kv_heads} heads of keys and values do not divide {count} heads of queries")
        names = () if family.even_heads else HEAD_SIZE
        is_given = any(config.get(name) not in (None, hidden // count) for name in names)  # not as a rounded quotient
        if hidden % count and not is_given and not _has_uneven_heads(family):
            raise GridError(
                f"{what}: {count} heads do not divide a hidden size of {hidden}, and nothing gives their size"
            )
        size = _find(config, names, what, max(1, hidden // count))
        return Stack(
            name, _find(config, layers, what), hidden, _find(config, ffn, what, inner), gated, count, kv_heads, size,
            crosses,
        )  # fmt: skip

    if family.mixture:
        plain = stack("layers", LAYERS, FFN, HEADS, False)
        return (replace(plain, mixture=_mixture(config, plain.layers, plain.ffn, what), latent=family.latent),)
    if not family.pair:
        return (stack("layers", LAYERS, FFN, HEADS, False),)
    return (
        stack("encoder", ENCODER_LAYERS, ENCODER_FFN, ENCODER_HEADS, False),
        stack("decoder", DECODER_LAYERS, ("decoder_ffn_dim", *FFN), ("decoder_attention_heads", *HEADS), True),
    )


def _has_uneven_heads(family: Family) -> bool:
    """Return whether a class takes heads that do not divide its hidden size, as its own defaults show."""
    hidden, heads = (
        next((family.defaults[n] for n in names if n in family.defaults), None) for names in (HIDDEN, HEADS)
    )
    return isinstance(hidden, int) and isinstance(heads, int) and hidden % heads > 0


def _mixture(config: Mapping[str, Any], layers: int, ffn: int, what: str) -> Mixture | None:
    """Return the experts of a config, or None where no layer has any."""
    step = _find(config, ("decoder_sparse_step", "moe_layer_freq"), what, 1)
    first = _find(config, ("first_k_dense_replace",), what, 0, smallest=0)
    dense = config.get("mlp_only_layers") or ()
    sparse = sum(i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers))
    count = _find(config, EXPERTS, what, 0, smallest=0)
    if not sparse or count < 2:
        return None
    inner = _find(config, ("moe_intermediate_size",), what, ffn)
    times = _find(config, ("n_shared_experts",), what, 0, smallest=0)
    shared = _find(config, ("shared_expert_intermediate_size",), what, times * inner, smallest=0)
    top_k = _find(config, ("num_experts_per_tok",), what)
    Number(1, count, integer=True).check(what, "num_experts_per_tok", top_k)
    return Mixture(sparse, count, top_k, inner, shared, gate="shared_expert_intermediate_size" in config)


def _has_head(config: Mapping[str, object], family: Family, what: str) -> bool:
    """Return whether the model has a head, as its classes say; without any, it is taken to be trained on its
    vocabulary.
    """
    named = config.get("architectures")
    if not named:
        return not family.headless
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise GridError(f"{what}: architectures={shown(named)}; it must be a list of names, or null")
    if unread := next((name for name in named if name in family.unread_classes), None):
        raise GridError(f"{what}: architectures=[{shown(unread)}] is not known by the config alone\n{INSTALL}")
    return any(name.endswith(WITH_HEAD) for name in named)


def _find(
    config: Mapping[str, Any], names: Sequence[str], what: str, default: int | None = None, *, smallest: int = 1
) -> int:
    missing = (names[0] if names else "", default)
    name, value = next(((name, config[name]) for name in names if config.get(name) is not None), missing)
    if value is None:
        raise GridError(f"{what} lacks a size; one of {', '.join(names)} must be {SIZE}")
    if value != smallest or isinstance(value, bool):
        SIZE.check(what, name, value)
    return int(value)

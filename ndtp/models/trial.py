"""Trials of a model of transformers: a small copy of it is run on a few tokens.

A config does not say whether tokens see those behind them, nor whether longer sequences than it names are an error: the
model's code does.  The copy has the config's class and sizes, with few layers and a small vocabulary.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ndtp.models.counted import quiet

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
VOCABULARY, LENGTH, POSITIONS = 64, 4, 16  # of a copy and of the sequences it is run on
MOST_PARAMETERS = 10**8  # of a copy: a larger one takes long to make, and is not tried
ROUNDING = 1e-5  # how far logits may be apart, relative to the largest


def text_config(config: Any) -> Any:
    """Return the config of the part of a model that reads text."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def named_positions(config: object) -> tuple[str, int] | None:
    """Return the config's field for the length of a sequence, and its value; None where it names none."""
    for name in LENGTHS:
        value = getattr(text_config(config), name, None)
        if isinstance(value, int) and value > 0:
            return getattr(text_config(config), "attribute_map", {}).get(name, name), value
    return None


def sees_later_tokens(kind: type, config: object) -> bool | None:
    """Whether logits of a token depend on tokens behind it; None where it cannot be tried."""
    model = _small_copy(kind, config)
    if model is None:
        return None
    try:
        ids = _ids(model, LENGTH)
        other = ids.clone()
        other[0, -1] = ids[0, 0]
        logits = _logits(model, ids)
        apart = (logits - _logits(model, other)).abs()
    except Exception:
        return None  # it takes other inputs than ids
    return bool(apart[0, :-1].max() > ROUNDING * max(apart.max(), logits.abs().max()))


def most_tokens(kind: type, config: object, needed: int) -> int | None:
    """The longest sequence that a model takes; None where it takes any, or far more than needed, or cannot be tried.

    Tables of positions have an end; rotary and relative positions have not.  How much of a table is used (RoBERTa
    leaves two rows out) is found in a copy whose config names `POSITIONS` positions.
    """
    named = named_positions(config)
    if named is None or needed <= named[1] - POSITIONS // 2:
        return None
    model = _small_copy(kind, config, (named[0], POSITIONS))
    if model is None:
        return None
    for length in range(POSITIONS + 1, POSITIONS // 2, -1):
        with suppress(Exception):  # the index is out of range, the sizes do not match, the length is refused
            _logits(model, _ids(model, length))
            return None if length > POSITIONS else named[1] - POSITIONS + length
    return None


def _small_copy(kind: type, config: Any, positions: tuple[str, int] | None = None) -> Any:
    """Return the model with as few layers as its class takes, or None where it is large all the same."""
    import transformers

    for layers in (1, 2, None):
        small = copy.deepcopy(config)
        with suppress(Exception):
            for part in (text_config(small), small):  # of a config with a decoder the first is a copy
                part.vocab_size = min(part.vocab_size, VOCABULARY)
                if isinstance(getattr(part, "pad_token_id", None), int) and part.pad_token_id >= part.vocab_size:
                    part.pad_token_id = None
                for name in ("num_hidden_layers", "decoder_layers"):
                    if layers is not None and hasattr(part, name):
                        setattr(part, name, layers)
                if positions is not None and hasattr(part, positions[0]):
                    setattr(part, *positions)
            with quiet(transformers), torch.device("meta"):
                if sum(p.numel() for p in kind(copy.deepcopy(small)).parameters()) > MOST_PARAMETERS:
                    continue
            with quiet(transformers), torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                return kind(small).float().eval()
    return None


def _ids(model: Any, length: int) -> Tensor:
    """Token ids that differ, and are none of the first few, which pad, begin or end."""
    size = model.get_input_embeddings().num_embeddings
    return ((torch.arange(length) + size // 4) % size)[None]


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    import transformers

    with quiet(transformers):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits

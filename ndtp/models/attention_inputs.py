"""The arguments of an attention module: which of them are hidden states, and which have a part for each sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.models.frame import Passage
from ndtp.ops.reductions import used_over

HIDDEN = ("hidden_states", "key_value_states", "encoder_hidden_states")
PASSED = ("residual",)  # what is added to the result, which are hidden states again
BIASES = ("alibi", "position_bias")  # of scores: [batch heads or heads, .., ..]
BESIDE = ("mask", "bias", "position", "alibi", "cos", "sin", "embed")  # in names of what is no hidden states


def may_be_hidden(name: str, x: Tensor, features: int) -> bool:
    """Return whether an argument that is no split activation may be hidden states, [batch, sequence, features]."""
    if not isinstance(x, Tensor):
        return False
    if name in HIDDEN:
        return True
    is_alike = x.dim() == 3 and x.shape[-1] == features and x.is_floating_point()
    return is_alike and name not in PASSED and not any(part in name for part in BESIDE)


def part_of_rank(core: Any, name: str, x: Tensor) -> Tensor:
    """Return this rank's sequences and heads of a mask, of positions, or of another argument."""
    batch, frame = core.given.lead[0], core.frame
    if name in BIASES and x.dim() == 3 and x.shape[0] in (core.heads, batch * core.heads):
        return part_of_rank(core, "", x.unflatten(0, (-1, core.heads))).flatten(0, 1)
    padded, local = frame.padded(batch), core.local_heads
    is_of_heads = x.dim() == 4 and x.shape[1] == local  # a bias that the model made of this rank's heads
    if x.requires_grad and not is_of_heads:
        sums = tuple(axis for axis in core.sums if axis not in frame.summed)
        x = used_over(x, Layout(frame.mesh.grid, *[None] * x.dim()), sums, frame.mesh, f"{core.name} {name}")
    if not core.of_tokens and is_batched(name, x, batch) and batch > 1:
        here = Passage(frame, core.inner, (batch,), padded, 1, 1).rows_here
        if padded > batch:
            x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, padded - batch), value=True if x.dtype == torch.bool else 0)
        x = x[here.start : here.stop]
    if x.dim() == 4 and x.shape[1] == core.heads and core.heads > local:
        part = frame.mesh.grid.index(frame.mesh.rank, core.inner.dims[1])
        x = x[:, part * local : (part + 1) * local]
    return x


def kv_heads_of(heads: int, kv_heads: int, part: int, splits: int) -> list[int]:
    """Return the heads of keys and values that the query heads of one of `splits` parts use, as the model's code
    repeats them.
    """
    local, group = heads // splits, heads // kv_heads
    if kv_heads % splits == 0:
        count = kv_heads // splits
        return list(range(part * count, (part + 1) * count))
    used = [head // group for head in range(part * local, (part + 1) * local)]
    return used[:1] if group % local == 0 else used


def is_batched(name: str, x: Tensor, batch: int) -> bool:
    """Return whether an argument has a part for each sequence, as a mask or positions do; not where it is [sequence,
    head_dim].
    """
    return x.dim() >= 2 and x.shape[0] == batch and not (name == "position_embeddings" and x.dim() == 2)


def as_tuple(kind: type, parts: tuple[Any, ...]) -> Any:
    """Parts of a module's result as a tuple of its class, which may give them names."""
    return kind(*parts) if hasattr(kind, "_fields") else parts

"""Layers that are part of no attention, MLP or vocabulary: transforms before a head, poolers, classifiers, positions.

A Linear that takes hidden states takes them as they lie, and gives hidden states again, or features that stay split,
logits of a classifier among them.  A table of hidden size is split by features; what is the same for all sequences, as
learned positions are, every rank looks up for its own features alone.
"""

from __future__ import annotations

import dis
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import nn

from ndtp.algebra.layout import Layout
from ndtp.models.adopted import Adopted
from ndtp.models.forward_code import functions_of, parts_of
from ndtp.models.named_plan import BY_PLAN
from ndtp.models.projections import place_projection
from ndtp.models.roles import features, is_linear, is_wrapper
from ndtp.models.table_settings import setting_against
from ndtp.ops.lookup import LookupPlan

if TYPE_CHECKING:
    from ndtp.models.placing import Placing

NAMES = ("weight", "bias")
FACTS = ("device", "dtype", "shape", "size", "dim", "ndim", "requires_grad")  # of a tensor, which tell no numbers


def place_others(split: Placing, modules: dict[str, nn.Module], cores: Collection[str]) -> None:
    """Put the Linears that take or give hidden states on the grid, and the tables of their size."""
    around = {*cores, *split.kept, *(name for name, module in modules.items() if is_wrapper(module))}
    for name, module in modules.items():
        if isinstance(module, Adopted) or _is_in(name, around):
            continue
        parent = modules[name.rpartition(".")[0]] if name else None
        if is_linear(module) and parent is not None:
            _linear(split, name, module, parent)
        elif isinstance(module, nn.Embedding) and parent is not None and module.embedding_dim in split.widths:
            _table(split, name, module, parent)


def _is_in(name: str, around: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in around for count in range(1, len(parts)))


def _linear(split: Placing, name: str, module: nn.Module, parent: nn.Module) -> None:
    sizes = features(module)
    takes, gives = (size in split.widths for size in sizes)
    if not takes and not gives:
        return
    if split.is_kept(name):
        split.kept[name] = BY_PLAN
        return
    if reads(parent, *NAMES):
        split.kept[name] = f"the code of {type(parent).__name__} may read its weight"
        return
    layer = place_projection(
        module, name, leads_in=takes, gives_hidden=takes and gives,
        pad_to=split.mesh.grid.size(split.tensor_axes), **split.place | {"width": split.widths[sizes[not takes]]},
    )  # fmt: skip
    layer.loud = gives
    split.others.append(layer)
    split.report(layer)


def _table(split: Placing, name: str, module: nn.Embedding, parent: Any) -> None:
    reason = BY_PLAN if split.is_kept(name) else setting_against(name, module, False)
    if reason is not None:
        split.kept[name] = reason
        return
    for reader in (module, parent):
        if type(reader) is not nn.Embedding and reads(reader, "weight"):
            split.kept[name] = f"the code of {type(reader).__name__} may read its weight"
            return
    grid, outside, out = split.mesh.grid, split.frame.outside.dims[0], split.layouts.input
    ids, table = Layout(grid, outside), split.all_features
    same_for_all = LookupPlan(ids, table, out.with_dims(outside, out.dims[1]), name)
    lookup = LookupPlan(ids, table, out, name)
    split.positions.append(split.place_table(module, name, lookup, module.num_embeddings, same_for_all))


def reads(module: object, *names: str) -> bool:
    """Return whether the code of a module's forward, with methods of its own, reads the numbers of an attribute."""
    for function in functions_of(type(module), beside=False):
        for part in parts_of(function.__code__):
            taken = [step.argval for step in dis.get_instructions(part) if step.opname in ("LOAD_ATTR", "LOAD_METHOD")]
            for name, after in zip(taken, (*taken[1:], ""), strict=False):
                if name in names and after not in FACTS:
                    return True
    return False

"""A stock model's own attention code on local heads and whole local sequences.

Its projections hand out what has been multiplied before, and take what it made of it; so rotary embeddings, masks,
caches and attention kernels are the model's own, and know of no grid.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from weakref import ref

from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.errors import LayoutError
from ndtp.models.attention_inputs import HIDDEN, PASSED, as_tuple, kv_heads_of, may_be_hidden, part_of_rank
from ndtp.models.cached_sequences import lay_caches, refuse_filled_cache
from ndtp.models.cut_sequences import as_rows, context_of, in_sequences, of_tokens, row_axes, with_all_heads
from ndtp.models.frame import Frame, Passage
from ndtp.models.fused_order import in_order
from ndtp.models.hidden import Hidden, enter, hidden_in, split
from ndtp.models.local_heads import ConfigOfRank, parts_of
from ndtp.models.looked_at import by_itself, is_looked_at, made_alike, shard_of, standing_for, with_whole_sizes
from ndtp.models.placeholder import Placeholder, placeholder
from ndtp.models.projections import Projection, products
from ndtp.models.shared_input import SharedInput
from ndtp.models.signatures import NamedArguments, Signature
from ndtp.models.whole_rows import (
    are_few,
    is_alone,
    led_back,
    passage_of,
    rows_of_rank,
    whole_products,
    with_all_rows,
    with_rows,
)
from ndtp.ops.products import relayout
from ndtp.runtime.at_work import AT_WORK
from ndtp.runtime.of_turn import OfTurn
from ndtp.split.spec import Spec, layout_of
from ndtp.split.tensor import SplitTensor
from ndtp.split.tensor import enter as put
from ndtp.split.tensor import leave as bare

NO_CACHES = {Tensor, Placeholder, Hidden, SplitTensor, tuple, dict, bool, int, type(None)}


class Running(Protocol):
    """A call that was bound."""

    def projected(self, member: Projection, x: Tensor) -> Tensor | None:
        """Return the result of a projection; None where `Core` is to find it."""


@dataclass(eq=False)
class Core:
    """One attention module on a grid.

    Attributes:
        inner: the layout of what lies between the projections: rows of whole sequences, features of whole heads.
        inputs: projections of hidden states by their role, "q", "k", "v" or "qkv".
        output: leads back to hidden states, if it is a part of the module; else `beside` does.
        order: of heads in a weight that has q, k and v in one, see `ndtp.models.fused_order`.
        normed: projections whose few heads are brought together behind a norm over all of them.
        of_tokens: whether the module's code runs on tokens of every sequence, see `ndtp.models.cut_sequences`; else it
            runs on whole sequences of this rank.
        dense: what of the module's attributes became numbers of one rank, as it was.
        is_whole: whether its code runs on tensors with the sizes of the whole, see `ndtp.models.looked_at`.
        layer: the number of the module's layer in caches.
        config: that of the module, if it has one.
        norms_hidden: whether its code norms hidden states, which then stay split.
        has_whole_rows: whether hidden states are whole on every rank, see `ndtp.models.whole_rows`.
        running: the call of a decode step that runs, see `ndtp.models.bound_attention`.
        parts, cache: the modules that it had when its code was looked at, and the cache that came last.
    """

    frame: Frame
    name: str
    inner: Layout
    heads: int
    kv_heads: int
    head_dim: int
    inputs: Mapping[str, Projection]
    output: Projection | None
    beside: Projection
    order: str = ""
    normed: tuple[Projection, ...] = ()
    dense: Mapping[str, Any] = field(default_factory=dict)
    is_whole = OfTurn(bool)
    norms_hidden: bool = False
    layer: int | None = None
    config: ConfigOfRank | None = None
    parts: tuple[nn.Module, ...] = ()
    cache: Callable[[], Any] = field(default=lambda: None)
    given = OfTurn()
    has_whole_rows = OfTurn(bool)
    groups = OfTurn(dict)
    running: Running | None = None

    def __post_init__(self) -> None:
        self.context = context_of(self.frame)

    @property
    def of_tokens(self) -> bool:
        return bool(self.given.across)

    @property
    def local_heads(self) -> int:
        return self.heads // self.inner.num_splits(1)

    @property
    def kv_per_rank(self) -> list[int]:
        """Return the heads of keys and values that the query heads of this rank use, as the model's code repeats
        them.
        """
        part = self.frame.mesh.grid.index(self.frame.mesh.rank, self.inner.dims[1])
        return kv_heads_of(self.heads, self.kv_heads, part, self.inner.num_splits(1))

    def run(self, module: Any, forward: Any, names: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The model's own forward, on what of its arguments belongs to this rank.

        Args:
            forward: takes the module, or one that stands for it.
            names: of the other arguments.
        """
        is_new = (parts := parts_of(module)) != self.parts
        if is_new and not (is_new := not {*parts} <= {*self.parts}):
            self.parts = parts
        if self.config is not None and self.config.now != self.config.seen:
            self.config.follow()
        before, self.is_whole = self.is_whole, is_new or is_looked_at(module)
        try:
            if not self.is_whole:
                return self._run(partial(forward, module), names.bind(args, kwargs))
            with standing_for(module, self.dense) as stand_in:
                return self._run(partial(forward, stand_in), names.bind(args, kwargs))
        finally:
            self.is_whole = before

    def _run(self, forward: Any, bound: NamedArguments | inspect.BoundArguments) -> Any:
        kept = {name for name, value in bound.arguments.items() if self._is_kept_whole(name, value)}
        named = {n: value if n in kept else self._entered(n, value) for n, value in bound.arguments.items()}
        sources: dict[int, Tensor] = {}
        for name, x in named.items():
            found = [] if name in PASSED else [x] if name in kept else hidden_in(x)
            sources.update((id(each), each) for each in found)
        if not sources:
            raise LayoutError(f"parallelize: '{self.name}' got no hidden states")
        self.given = passage_of(self.frame, next(iter(sources.values())))
        q = self.inputs.get("q")
        ties = [[q], [self.inputs["k"], self.inputs["v"]]] if q and len(sources) > 1 else [list(self.inputs.values())]
        self.groups = {id(x): group for tie in ties for group in [SharedInput(tie)] for x in tie}  # type: ignore
        is_whole, of_tokens = self.is_whole, self.of_tokens
        made_alike(named, self.name, is_whole)
        bound.arguments.update(named)
        summed = self.sums if is_whole else row_axes(self.frame, self.inner) if of_tokens else ()
        if not is_whole:
            local = {n: self._seen_as(value) if n in kept else self._local(n, value) for n, value in named.items()}
            bound.arguments.update(local)
            if self.frame.splits(self.inner) > 1:
                batch = self.given.lead[0]
                lay_caches(bound.arguments, self.frame, self.inner, batch, self.layer, of_tokens)
            for value in () if of_tokens else bound.arguments.values():  # written out: in each layer of each step
                if value.__class__ not in NO_CACHES and hasattr(value, "reorder_cache") and self.cache() is not value:
                    self.cache = ref(value)
                    refuse_filled_cache(value, self.layer, self)
        before, self.frame.summed = self.frame.summed, summed
        self.has_whole_rows = bool(kept)
        AT_WORK.local += not is_whole
        try:
            result = self._outside(forward(*bound.args, **bound.kwargs))
            if isinstance(result, tuple) and len(result) > 1:
                result = as_tuple(type(result), (result[0], *map(self._besides, result[1:])))
            return result
        finally:
            AT_WORK.local -= not is_whole
            self.groups, self.frame.summed, self.has_whole_rows = {}, before, False

    def _entered(self, name: str, value: Any) -> Any:
        """Hidden states that are whole, split."""
        if name in HIDDEN and isinstance(value, Tensor) and not isinstance(value, Hidden):
            plan = next(iter(self.inputs.values())).plan
            return split(value, self.frame, plan.a, next(iter(self.inputs.values())).width, self.name)
        if name in HIDDEN and isinstance(value, Hidden) and len(value.passage.lead) == 2:
            return in_sequences(value, self.name)
        return value

    def _is_kept_whole(self, name: str, value: Any) -> bool:
        """Return whether an argument is hidden states whose rows are whole on every rank, see `whole_rows`."""
        if value.__class__ is not Tensor or self.is_whole or self.norms_hidden:
            return False
        first = next(iter(self.inputs.values()))
        if (weight := first._parameters.get("weight")) is not None and weight.dtype != value.dtype:
            return False
        return may_be_hidden(name, value, first.real_in) and are_few(value, first)

    def seen(self, passage: Passage) -> tuple[int, int]:
        """Return the number of sequences of a rank, and their length."""
        if len(passage.lead) != 2:
            raise LayoutError(f"parallelize: '{self.name}' takes [batch, sequence, features], its input is {passage}")
        if passage.across:
            return passage.lead  # type: ignore[return-value]
        length = passage.lead[1]
        return passage.rows // self.frame.splits(self.inner) // max(length, 1), length

    def _features_seen(self, passage: Passage) -> int:
        """Return the number of features that the model's code expects, where heads have as many features as hidden
        states.
        """
        width = self.heads * self.head_dim
        return self.local_heads * self.head_dim if passage.features == width else passage.features

    def _seen_as(self, x: Tensor) -> Tensor:
        """Return hidden states as the module's code gets them."""
        passage = passage_of(self.frame, x)
        return placeholder(x, (*self.seen(passage), self._features_seen(passage)))

    def _local(self, name: str, value: Any) -> Any:
        if name in PASSED:
            return value
        if isinstance(value, Hidden):
            return self._seen_as(value)
        if isinstance(value, SplitTensor) and value.dim() == 4 and value.spec.dims[1:] == (self.head_axes, (), ()):
            return bare(value)  # what an earlier attention gave of this rank's heads
        if isinstance(value, Tensor):
            return part_of_rank(self, name, value.gathered() if isinstance(value, SplitTensor) else value)
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(self._local(name, each) for each in value)
        if type(value) is list:
            return [self._local(name, each) for each in value]
        if type(value) is dict:  # what a forward takes as **kwargs
            return {key: self._local(key, each) for key, each in value.items()}
        return value

    @property
    def sums(self) -> tuple[str, ...]:
        """Axes over which ranks use whole tensors each for heads and sequences of its own."""
        rows = self.inner.dims[0][len(self.frame.outside.dims[0]) :]
        return self.frame.mesh.grid.nontrivial((*rows, *self.inner.dims[1]))

    def projected(self, member: Projection, x: Tensor) -> Tensor:
        """Return the result of a projection of this module when the model's code calls it."""
        if (bound := self.running) is not None and (y := bound.projected(member, x)) is not None:
            return y
        if member.adapts is not None:
            return self._adapted(member, member.adapts, x)
        if not self.groups or (self.is_whole and tuple(x.shape[:-1]) != self.given.lead):
            return by_itself(self, member, x)
        if member is self.output:
            if self.has_whole_rows:
                return led_back(self._rows(x), member, self.given, self.inner)
            rows = self._inside(x)
            (y,) = products([member], rows)
            return enter(y.view_as(y), member.passage(rows.passage))
        if self.is_whole:
            x = x if isinstance(x, Hidden) else member.taken(x)
            return with_whole_sizes(self, member, self.groups[id(member)].result(member, x), x.passage)
        if not isinstance(x, Placeholder):
            raise LayoutError(
                f"parallelize: '{member.name}' of '{self.name}' takes hidden states, and got {tuple(x.shape)}"
            )
        source, is_split = x.source, isinstance(x.source, Hidden)
        passage = passage_of(self.frame, source)
        group = self.groups[id(member)]
        make = None if is_split else whole_products
        y = (
            (make or member.product)([member], source)[0]
            if is_alone(member) and not is_split
            else group.result(member, source, make)
        )
        y = y if is_split else rows_of_rank(y, member, passage, self.inner)
        return self._handed(self._as_wanted(member, y), passage)

    def _handed(self, y: Tensor, passage: Passage) -> Tensor:
        """Return rows of this rank's heads as the model's code gets them, [sequences, length, features]."""
        if passage.across:
            return of_tokens(y, passage, self.inner, self.context, self.name)
        return y.unflatten(0, self.seen(passage))

    def _inside(self, x: Tensor) -> Hidden:
        """Return as hidden states what the model's code made of the heads of this rank."""
        if self.is_whole:
            rows = shard_of(self, x.reshape(*self.given.lead, x.shape[-1]), self.inner)
        else:
            rows = self._rows(x)
        width = self.heads * self.head_dim
        given = replace(
            self.given, layout=self.inner, features=width, width=width, sections=1, came_from=self.name, loud=True
        )
        return enter(rows.view_as(rows), given)

    def _rows(self, x: Tensor) -> Tensor:
        """Return [sequences, length, features] of this rank's heads as rows."""
        return as_rows(x, self.given, self.inner, self.context) if self.of_tokens else x.reshape(-1, x.shape[-1])

    def _check_samples(self, x: Tensor) -> None:
        """Refuse some of the samples, where an adapter behind the heads takes all of them."""
        lead = self.given.lead if self.is_whole else self.seen(self.given)
        if math.prod(x.shape[:-1]) != math.prod(lead) and not self.of_tokens:
            raise LayoutError(
                f"parallelize: what leads back from the heads of '{self.name}' takes {tuple(x.shape)}, and all of its "
                f"samples are {tuple(lead)}\n  fix: a call for each part of them: with peft's adapter_names=, one for "
                "each adapter, or no adapter behind the heads"
            )

    def _adapted(self, member: Projection, base: Projection, x: Tensor) -> Tensor:
        """Return the result of one of an adapter's two layers, beside a projection of this module."""
        if isinstance(x, Placeholder):
            x = x.source
        elif not isinstance(x, Hidden) and self.groups:
            self._check_samples(x)
            x = self._inside(x)
        (y,) = products([member], x := member.taken(x))
        if not member.gives_features:
            return enter(y.view_as(y), member.passage(x.passage))
        if self.is_whole or not self.groups:
            return with_whole_sizes(self, base, y, x.passage)
        return self._handed(self._as_wanted(base, y), x.passage)

    def _as_wanted(self, member: Projection, y: Tensor) -> Tensor:
        """Return a projection's result with the heads of keys and values that this rank's query heads use."""
        if member in self.normed:
            return y
        if member in (self.inputs.get("k"), self.inputs.get("v")):
            return self.shared_heads(y)
        if member is not self.inputs.get("qkv") or self.kv_heads % self.inner.num_splits(1) == 0:
            return y
        splits = self.inner.num_splits(1)
        sizes = [count * self.head_dim // splits for count in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = y.split(sizes, dim=1)
        k, v = (self.shared_heads(each.contiguous()) for each in (k, v))
        return in_order(self.order, (q, k, v), self.head_dim)

    def shared_heads(self, y: Tensor) -> Tensor:
        """Key or value heads of this rank's query heads, where there are too few to split."""
        if self.kv_heads % self.inner.num_splits(1) == 0:
            return y
        mesh, axes = self.frame.mesh, self.inner.dims[1]
        bare = self.inner.with_dims(self.inner.dims[0], None)
        shared = mesh.grid.nontrivial(axes)
        y = relayout(y, self.inner, bare, mesh, f"{self.name} key heads", grad_partial=shared, kind="activations")
        heads = y.unflatten(1, (self.kv_heads, self.head_dim))
        return heads[:, self.kv_per_rank].flatten(1)

    def _outside(self, result: Any) -> Any:
        """Return the module's result: where its output projection is elsewhere, the context as split hidden states."""
        if self.output is not None or isinstance(result, Hidden):
            return result
        if isinstance(result, Tensor):
            splits = 1 if self.is_whole else self.inner.num_splits(1)
            if result.dim() != 3 or result.shape[2] * splits != self.heads * self.head_dim:
                return result
            return self._all_rows(result) if self.has_whole_rows else self._inside(result)
        if isinstance(result, tuple) and result:
            return as_tuple(type(result), (self._outside(result[0]), *result[1:]))
        return result

    def _all_rows(self, context: Tensor) -> Hidden:
        """Return what ranks made of their heads, with whole rows, for an output projection elsewhere."""
        rows, axes = with_all_rows(self._rows(context), self.beside, self.given, self.inner)
        width = self.heads * self.head_dim
        lies = {"layout": with_rows(self.frame, axes), "rows": len(rows), "features": width, "width": width}
        return enter(rows.view_as(rows), replace(self.given, **lies, across=0, came_from=self.name, loud=True))

    @property
    def head_axes(self) -> tuple[str, ...]:
        return self.frame.mesh.grid.nontrivial(self.inner.dims[1])

    def _besides(self, x: Any) -> Any:
        """Attention weights and the like, of this rank's heads and sequences, with the sizes of the whole."""
        if self.is_whole:
            return x
        rows, lead = row_axes(self.frame, self.inner), self.given.lead
        if self.of_tokens and isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] == self.local_heads:
            if isinstance(x, SplitTensor):
                return with_all_heads(x, self.heads, self.head_axes, self.name)
            rows, lead = (), (x.shape[0],)
        if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1] != self.local_heads or not (rows or self.head_axes):
            return x
        mine = x.shape[0] * self.frame.mesh.grid.size(rows)
        is_batch = x.shape[0] > 1 or mine == self.frame.padded(lead[0])
        dims = [rows if is_batch else (), self.head_axes, (), ()]
        sizes = (lead[0] if is_batch else x.shape[0], self.heads, *x.shape[2:])
        padded = (mine if is_batch else x.shape[0], self.heads, *x.shape[2:])
        return put(x.view_as(x), Spec(self.context, sizes, layout_of(self.frame.mesh, dims), padded, (), self.name))

"""Decode steps of an attention: what was found of the arguments of a call holds for calls of the same form.

A step calls each attention with hidden states of one shape, a cache and a few tensors beside it.  `Core.run` finds
which of them are hidden states, what of the others belongs to this rank, and how results of projections get to its
heads.  A `BoundCall` keeps this for the next call, and looks only at what may be otherwise then: the form of the
arguments, the modules inside of the attention and their hooks, the parameters, the cache.  Where any of it is,
`Core.run` runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

from torch import Tensor, nn

from ndtp.models.adopted import class_of
from ndtp.models.attention_core import Core
from ndtp.models.attention_inputs import HIDDEN, PASSED, as_tuple, part_of_rank
from ndtp.models.cached_sequences import CacheOfRank, Sequences
from ndtp.models.local_heads import parts_of, take_heads
from ndtp.models.looked_at import GLOBAL, is_looked_at
from ndtp.models.placeholder import Placeholder, placeholder
from ndtp.models.projections import Projection
from ndtp.models.settled import MOST_SETTLED, now_of
from ndtp.models.shared_input import SharedInput
from ndtp.models.signatures import NamedArguments, signature_of
from ndtp.models.whole_rows import bound_rows, is_alone, led_back, whole_products
from ndtp.runtime.at_work import AT_WORK
from ndtp.runtime.versions import version_of
from ndtp.split.tensor import SplitTensor

PLAIN = (NoneType, bool, int, float, str)
OTHER = object()  # what has another form
# Of an argument: its class; of a tensor its dtype, the number of its dims and the sizes that count, of a tuple the
# forms of its parts; what this rank takes of such an argument, None for all of it.
ArgumentForm = tuple[type, Any, Callable[..., object] | None]


class BoundCall:
    """Calls of one form, of an attention whose hidden states have whole rows.

    Attributes:
        forms: of the arguments; None where calls cannot be bound.
        x, results, then: the hidden states of the call that runs, the results of projections that it has not asked for,
            and what the input and the weights of these were like when they were computed.
    """

    def __init__(
        self, core: Core, module: nn.Module, bound: NamedArguments, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        self.core, self.given, self.inner, self.forms = core, core.given, core.inner, None
        self.names = tuple(kwargs)
        self.children = [*module._modules.values()]
        self.members, self.output = [*core.inputs.values()], core.output
        x = args[0] if args else kwargs.get("hidden_states")
        projections = (*self.members, self.output)
        is_known = all(each is not None and each.core is core and each.adapts is None for each in projections)
        is_simple = all(child is not None and not child._modules for child in self.children)
        if not (is_known and is_simple and x.__class__ is Tensor and not core.given.across):
            return
        self.key, self.seen = (x.shape, x.dtype), core.seen(core.given)
        self.as_hidden = partial(placeholder, seen=(*self.seen, core._features_seen(core.given)))
        self.sequences = Sequences(core.frame, core.inner, core.given.lead[0])
        self.is_split, self.is_alone = core.frame.splits(core.inner) > 1, is_alone(self.members[0])
        self.place = {member: place for place, member in enumerate(self.members)}
        self.handed = [self._handed_by(member) for member in self.members]
        self.groups = {id(member): group for group in [SharedInput(self.members)] for member in self.members}
        self.x: Tensor | None = None
        self.results: list[Tensor | None] = []
        self.then: list[object] = []
        self.held: object = None
        top = bound._form.by_place, set(bound._form.by_name)
        values = [*zip(top[0], args, strict=True), *kwargs.items()]
        forms = [self._form(name, value, name in top[1] or i < len(args), i) for i, (name, value) in enumerate(values)]
        hidden = [value for (_, value), form in zip(values, forms, strict=True) if form and form[2] is self.as_hidden]
        if None not in forms and len(hidden) == 1 and hidden[0] is x:
            self.forms = forms

    def _handed_by(self, member: Projection) -> Callable[[Tensor], Tensor]:
        """Return the function from a projection's result to what the model's code gets."""
        core, taken = self.core, bound_rows(member, self.given, self.inner)
        is_as_it_is = (
            member in core.normed or core.kv_heads % core.inner.num_splits(1) == 0 or member is core.inputs.get("q")
        )
        if is_as_it_is:
            return lambda y: (rows := taken(y)).view(*self.seen, rows.shape[1])
        return lambda y: core._as_wanted(member, taken(y)).unflatten(0, self.seen)

    def _form(self, name: str, value: object, is_named: bool, place: int) -> ArgumentForm | None:
        """Return the form of an argument.

        Args:
            is_named: whether the code has a parameter of this name.
        """
        if name in PASSED or (name in HIDDEN and value is not None and not is_named):
            return None
        if value.__class__ is Tensor:
            if is_named and self.core._is_kept_whole(name, value):
                return (Tensor, _facts(value), self.as_hidden)
            if name in HIDDEN or value.requires_grad:
                return None
            taken = None if part_of_rank(self.core, name, value) is value else partial(part_of_rank, self.core, name)
            return Tensor, _facts(value), taken
        if value.__class__ is tuple:
            forms = [self._form(name, each, False, place) for each in value]
            return None if None in forms or name in HIDDEN else (tuple, forms, None)
        if isinstance(value, PLAIN):
            return type(value), None, None
        if value is self.core.cache() and hasattr(value, "layers") and self.core.layer is not None:
            return type(value), None, self._cache
        return None

    def _cache(self, cache: CacheOfRank) -> object:
        """Let a cache hold this rank's sequences, as `lay_caches` does."""
        if cache is not self.core.cache():
            return OTHER
        if self.is_split:
            number, own = self.core.layer, cache.__dict__
            known = own.get("ndtp_layers", ())
            if not isinstance(cache, CacheOfRank) or not (known is None or number in known):
                return OTHER
            for layer in cache.layers[number : number + 1]:  # type: ignore[operator]
                if SplitTensor in set(map(type, layer.__dict__.values())):
                    return OTHER
            own["ndtp_sequences"] = self.sequences
        return cache

    def taken(self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object] | None:
        """Return what this rank takes of the arguments of a call; None where it is to be looked at anew."""
        core, forms, children = self.core, self.forms, self.children
        if tuple(kwargs) != self.names or len(args) + len(kwargs) != len(forms) or any(GLOBAL):  # type: ignore[arg-type]
            return None
        if self.members[0].training or len(module._modules) != len(children) or core.__dict__.get("is_whole"):
            return None
        if core.config is not None and core.config.now != core.config.seen:
            return None
        for child, known in zip(module._modules.values(), children, strict=True):
            if child is not known:
                return None
            own = child.__dict__
            if (
                own["_modules"] or "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]
                or own["_backward_hooks"] or own["_backward_pre_hooks"]
            ):  # fmt: skip
                return None
        core.__dict__["given"] = self.given
        return _taken((*args, *kwargs.values()), forms)  # type: ignore[arg-type]

    def run(self, forward: Callable[..., object], local: list[object]) -> object:
        """Run the model's own code on what `taken` gave."""
        core, count = self.core, len(local) - len(self.names)
        own, frame = core.__dict__, core.frame.__dict__
        before = frame.get("summed", ())
        own["groups"], own["has_whole_rows"], own["is_whole"], own["running"] = self.groups, True, False, self
        frame["summed"] = ()
        AT_WORK.local += 1
        try:
            result = forward(*local[:count], **dict(zip(self.names, local[count:], strict=True)))
            if isinstance(result, tuple) and any(isinstance(x, Tensor) for x in result[1:]):
                result = as_tuple(type(result), (result[0], *map(core._besides, result[1:])))
            return result
        finally:
            AT_WORK.local -= 1
            own["groups"], own["has_whole_rows"], own["running"], frame["summed"] = {}, False, None, before
            self.x, self.results, self.then, self.held = None, [], [], None

    def projected(self, member: Projection, x: Tensor) -> Tensor | None:
        """Return the result of a projection that the model's code calls; None where it is to be looked at anew."""
        is_back = member is self.output
        if is_back:
            if x.__class__ is not Tensor or x.shape[:-1] != self.seen:
                return None
            return led_back(x.reshape(-1, x.shape[-1]), member, self.given, self.inner)
        place = self.place.get(member)
        if place is None or x.__class__ is not Placeholder:
            return None
        source: Tensor = x.source  # type: ignore[attr-defined]
        if self.is_alone:
            return self.handed[place](whole_products((member,), source)[0])
        if self.x is source:
            y, self.results[place] = self.results[place], None
            return None if y is None or self._state(place, source) != self.then[place] else self.handed[place](y)
        self.results = [*whole_products(self.members, source)]
        self.x = source
        y, self.results[place] = self.results[place], None
        self.then = [None if y is None else self._state(i, source) for i, y in enumerate(self.results)]
        self.held = [member._parameters.copy() for member in self.members]  # so that nothing else gets their ids
        return self.handed[place](y)  # type: ignore[arg-type]

    def _state(self, place: int, x: Tensor) -> tuple[object, ...]:
        """Return what changes where the input, or a projection's weights, are no longer those of the product."""
        own = self.members[place]._parameters
        weight, bias = own.get("weight"), own.get("bias")
        return (
            version_of(x), id(weight), id(bias), weight is None or now_of(weight), bias is None or now_of(bias)
        )  # fmt: skip


def _facts(x: Tensor) -> tuple[object, ...]:
    # Masks of [batch, heads, queries, keys] grow with the keys.
    return x.dtype, x.dim(), x.shape[:2] if x.dim() == 4 else x.shape


def _taken(values: Sequence[Any], forms: Sequence[ArgumentForm]) -> list[object] | None:
    """Return what this rank takes of values; None where one of them has another form."""
    found: list[object] = []
    for value, (kind, facts, taken) in zip(values, forms, strict=True):
        mine, own = value, value.__class__
        if own is not kind:
            return None
        if kind is Tensor:
            dtype, dims, sizes = facts
            shape: tuple[int, ...] = value.shape
            if value.dtype is not dtype or len(shape) != dims or value.requires_grad:
                return None
            if (shape[:2] if dims == 4 else shape) != sizes:
                return None
        elif kind is tuple:
            if len(value) != len(facts) or (parts := _taken(value, facts)) is None:
                return None
            mine = tuple(parts)
        if taken is not None and (mine := taken(mine)) is OTHER:
            return None
        found.append(mine)
    return found


class AttentionModule(nn.Module):
    """The class of an attention module on a grid; see `Core`."""

    ndtp_core: Core
    ndtp_calls: BoundCalls

    def forward(self, *args: object, **kwargs: object) -> object:
        core, calls = self.ndtp_core, self.ndtp_calls
        decodes = core.frame.decodes()
        bound = calls.of(args, kwargs) if calls and decodes else None
        if bound is not None and (local := bound.taken(self, args, kwargs)) is not None:
            return bound.run(super().forward, local)
        # Of another module of the class, where that stands for this one.
        forward, names = lambda module, *a, **k: super().forward(*a, **k), signature_of(super().forward)
        result = core.run(self, forward, names, args, kwargs)
        if decodes and parts_of(self) == core.parts and not is_looked_at(self):
            calls.add(core, self, names.bind(args, kwargs), args, kwargs)
        return result


class BoundCalls(dict[object, BoundCall]):
    """The bound calls of an attention, by shape and dtype of its hidden states; a copy begins without any."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return BoundCalls, ()

    def add(
        self, core: Core, module: nn.Module, bound: object, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Bind a call that has run, where it can be.

        Args:
            bound: its arguments by their names.
        """
        if isinstance(bound, NamedArguments):
            made = BoundCall(core, module, bound, args, kwargs)
            if made.forms is not None:
                if len(self) >= MOST_SETTLED:
                    self.clear()
                self[made.key] = made

    def of(self, args: Sequence[object], kwargs: Mapping[str, object]) -> BoundCall | None:
        x = args[0] if args else kwargs.get("hidden_states")
        return self.get((x.shape, x.dtype)) if isinstance(x, Tensor) and x.__class__ is Tensor else None


def place_core(module: nn.Module, core: Core) -> None:
    """Let an attention module run on this rank's heads and sequences."""
    module.__class__ = class_of(AttentionModule, type(module))
    module.ndtp_core, module.ndtp_calls = core, BoundCalls()  # type: ignore[assignment]
    core.layer = getattr(module, "layer_idx", None)
    for member in (*core.inputs.values(), *([core.output] if core.output is not None else [])):
        member.core = core
    for member in core.inputs.values():
        member.leads_into, member.is_last = core.inner, False
    core.parts = parts_of(module)
    before = dict(vars(module))
    core.config = take_heads(module, core, core.local_heads, len(core.kv_per_rank))
    core.dense = {name: value for name, value in before.items() if vars(module).get(name) is not value}

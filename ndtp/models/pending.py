"""`Pending`: what a projection of a model will give, before anybody needs its numbers.

A model's own code calls a projection, makes something of what it gives, and hands that to the next: `down(act(up(x)))`,
`cross_entropy(head(x), labels)`.  On a grid the two are one program, whose parts overlap, or which goes through its
rows in chunks.  So the first projection gives a `Pending`, which notes what is made of it element by element; the next
one reads the note.  Whoever wants anything else of it gets the tensor itself, computed then, as it was when it was
called for: the same grad mode, autocast and weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.compute.constants import indices_on
from ndtp.compute.torch_calls import Arguments, AutogradContext, Keywords, TorchFunction
from ndtp.errors import LayoutError
from ndtp.models.between import DROPOUTS, KNOWN, SIZES, is_dropout_off
from ndtp.models.hidden import PARTS, RESHAPES, Hidden, for_every_row, leave
from ndtp.models.rows import picked_rows
from ndtp.models.same_hooks import compare_hooks
from ndtp.models.waiting import Call
from ndtp.split.copies import version_of as version_of_split
from ndtp.split.tensor import getters, in_torchs_words, mapped, writes
from ndtp.split.whole_views import WholeView

if TYPE_CHECKING:
    from ndtp.models.frame import Passage
    from ndtp.models.projections import Projection

# What the numbers have no part in.
STATIC = {
    *getters("device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_nested", "is_quantized", "is_sparse", "layout"),
    *getters("requires_grad"),
    Tensor.__hash__, Tensor.__repr__, Tensor.__format__, Tensor.get_device, Tensor.is_complex,
    Tensor.is_floating_point, torch.is_complex, torch.is_floating_point,
} | SIZES  # fmt: skip


MOST_TRIALS = 256


class Pending(Hidden):
    """See the module; made by `pending`.

    Attributes:
        leaf: (of a projection itself) which one of the call, and which part of its features, or None for all of them.
        func, args, kwargs: (of anything else) how it is made of others.
        rows: the rows of the call's input that it has, if not all of them.
        key: what tells two formulas apart; None where it is not known.
        version: of the result, when it was computed.
    """

    call: Call
    leaf: tuple[int, int | None] | None
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Any, ...]
    rows: Tensor | None
    key: Any
    result: Hidden | None
    version: tuple[int, int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> object:
        kwargs = in_torchs_words(func, kwargs)
        if func in STATIC:
            return super().__torch_function__(func, types, args, kwargs)
        if WholeView in types:
            return NotImplemented  # it calls the function again with a plain tensor
        result = _noted(func, args, kwargs)
        if result is NotImplemented:
            compare_hooks(func, args)
            result = func(*_now(args), **_now(kwargs))
        return result

    def now(self) -> Any:
        if self.result is None:
            with self.call.as_then():
                if self.leaf is None:
                    is_view = self.func not in KNOWN
                    given = _now if is_view else _as_noted
                    self.result = self.func(*given(self.args), **given(self.kwargs))
                    self.version = version_of_split(self.result)
                else:
                    index, part = self.leaf
                    self.result = _part(self.call.value(self.call.members[index]), part)
        return self.result

    @property
    def is_unwritten(self) -> bool:
        """Return whether its numbers are those that it had when other formulas were noted of it."""
        if self.leaf is not None:
            return self.call.is_unwritten(self.leaf[0])
        if self.result is not None and version_of_split(self.result) != self.version:
            return False
        return self.func in KNOWN or all(x.is_unwritten for x in self.args if isinstance(x, Pending))

    def as_noted(self) -> object:
        """Return what it was when other formulas were noted of it, whatever was written to it since."""
        if self.is_unwritten:
            return self.now()
        with self.call.as_then():
            if self.leaf is not None:
                return _part(self.call.as_given(self.leaf[0]), self.leaf[1])
            return self.func(*_as_noted(self.args), **_as_noted(self.kwargs))

    def formula(self, leaves: Mapping[Any, Tensor], seen: dict[int, Tensor] | None = None) -> Tensor:
        """Return the formula's value on the given projections, or on some of their rows."""
        seen = {} if seen is None else seen
        if self.leaf is not None:
            return leaves[self.leaf]
        if id(self) not in seen:
            given = [x.formula(leaves, seen) if isinstance(x, Pending) else x for x in self.operands]
            named = {k: x.formula(leaves, seen) if isinstance(x, Pending) else x for k, x in self.kwargs.items()}
            seen[id(self)] = self.func(*given, **named) if self.func in KNOWN else given[0]
        return seen[id(self)]

    @property
    def is_open(self) -> bool:
        """Return whether the result is still to be computed, in any way."""
        return self.result is None and self.call.values is None

    @property
    def sizes_of_targets(self) -> tuple[int, ...] | None:
        """Return the sizes of the targets of a loss of it; None where it takes none."""
        return self.passage.lead if len(self.passage.lead) == 1 else None

    def laid_targets(self, target: Tensor, ignored: int) -> Tensor:
        """Return targets of all rows of the call, as its input has them; those of rows nobody picked are ignored."""
        given = self.call.source.passage
        if self.rows is None:
            return given.laid(target, ignored)
        mine = target.new_full((given.rows,), ignored)
        mine[indices_on(given.row_of(self.rows), target.device)] = target
        return mine


def pending(call: Call, member: Projection) -> Pending:
    """Return the pending result of a projection of a call."""
    index = call.members.index(member)
    call.asked.add(index)
    return _made(call, member.passage(call.source.passage), call.dtype, leaf=(index, None), key=("leaf", index, None))


def _made(call: Call, passage: Passage, dtype: torch.dtype, **attributes: object) -> Pending:
    shape = (passage.rows // passage.layout.num_splits(0), passage.width // passage.layout.num_splits(1))
    with torch._C.DisableTorchFunctionSubclass():
        x: Any
        if call.state[0]:
            weights = [p for p in call._weights() if p.requires_grad][:1]
            with torch.enable_grad():
                x = NotComputed.apply(leave(call.source), dtype, shape, call.members[0].name, *weights)  # type: ignore[no-untyped-call]
        else:
            x = call.source.new_full((), torch.nan, dtype=dtype).expand(shape)
    x.__class__ = Pending
    x.passage, x.call, x.result = passage, call, None
    defaults: dict[str, object] = {"leaf": None, "func": None, "args": (), "kwargs": {}, "operands": (), "rows": None}
    for name, value in {**defaults, **attributes}.items():
        setattr(x, name, value)
    return x  # type: ignore[no-any-return]


class NotComputed(torch.autograd.Function):
    """The memory that code sees when it looks past torch's functions: it has no numbers and no gradient."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, dtype: torch.dtype, shape: Sequence[int], name: str, *weights: Any
    ) -> Tensor:
        ctx.name = name
        return x.new_full((), torch.nan, dtype=dtype).expand(shape)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Any) -> Any:
        raise LayoutError(
            f"'{ctx.name}': an autograd.Function took what it gives, which is not computed until a function of torch "
            "asks for it\n  fix: parallelize(..., fuse=False)"
        )


def _part(x: Hidden, part: int | None) -> Hidden:
    return x if part is None else x.chunk(x.passage.sections, dim=-1)[part]  # type: ignore[return-value]


def _now(x: object) -> Any:
    return mapped(x, Pending.now, Pending)


def _as_noted(x: object) -> Any:
    return mapped(x, Pending.as_noted, Pending)


# ------------------------------------------------------------------------------------------------------------- noting


def _noted(func: TorchFunction, args: Arguments, kwargs: Keywords) -> object:
    """Return the formula after one more operation, where nothing is to be computed for it."""
    mine = [x for x in (*args, *kwargs.values()) if isinstance(x, Pending)]
    # Elsewhere than where it was called for: under `no_grad`, or in an autograd.Function.
    if not mine or any(x.call is not mine[0].call or not x.is_open for x in mine) or not mine[0].call.is_now:
        return NotImplemented
    if func is F.cross_entropy:
        loss = mine[0].call.loss
        return NotImplemented if loss is None else loss(*args, **kwargs)
    if func in DROPOUTS and args[0] is mine[0] and is_dropout_off(*args[1:], **kwargs):
        return args[0]
    if func in KNOWN:
        return _elementwise(func, mine, args, kwargs)
    if args[0] is not mine[0] or len(mine) > 1:
        return NotImplemented
    if func in RESHAPES:
        return _reshaped(func, args, kwargs)
    if func in PARTS:
        return _parts(func, args, kwargs)
    if func is Tensor.__getitem__:
        return _picked(func, args)
    return NotImplemented


def _elementwise(func: Any, mine: Sequence[Pending], args: Any, kwargs: Any) -> Any:
    first = mine[0]
    passage = first.passage
    is_plain = all(x is None or isinstance(x, (int, float, bool, str, torch.dtype, torch.device, Tensor))
                   for x in (*args, *kwargs.values()))  # fmt: skip
    if writes(func) or kwargs.get("inplace") or kwargs.get("out") is not None or not is_plain:
        return NotImplemented
    if any(x.passage != passage or x.rows is not first.rows for x in mine):
        return NotImplemented
    if any(isinstance(x, Tensor) and not isinstance(x, Pending) for x in kwargs.values()):
        return NotImplemented
    operands = []
    for x in args:
        if isinstance(x, Tensor) and not isinstance(x, Pending):
            x = for_every_row(x, passage)
            if x is None:
                return NotImplemented
        operands.append(x)
    key = key_of(Pending, func, args, kwargs)
    known = None if key is None else (key, passage.shape, *[x.dtype for x in mine])
    trials = passage.frame.trials
    dtype = trials[known] if known is not None and known in trials else _tried(func, args, kwargs, passage)
    if known is not None:
        if len(trials) >= MOST_TRIALS:
            trials.clear()
        trials[known] = dtype
    if dtype is None:
        return NotImplemented
    first.call.is_noted = True
    return _made(
        first.call, passage, dtype, func=func, args=args, kwargs=kwargs, operands=tuple(operands), rows=first.rows,
        key=key,
    )  # fmt: skip


def _tried(func: TorchFunction, args: Arguments, kwargs: Keywords, passage: Passage) -> torch.dtype | None:
    """Return the dtype of what a function gives, by a trial without numbers; None for other sizes than its input's."""
    meta = lambda x: torch.empty(passage.shape, dtype=x.dtype, device="meta") if isinstance(x, Pending) else x  # noqa: E731
    bare = lambda x: x.to("meta") if isinstance(x, Tensor) and not x.is_meta else x  # noqa: E731
    trial = func(*[bare(meta(x)) for x in args], **{name: bare(meta(x)) for name, x in kwargs.items()})
    return trial.dtype if isinstance(trial, Tensor) and tuple(trial.shape) == passage.shape else None


def key_of(kind: type[Tensor], func: TorchFunction, args: Arguments, kwargs: Keywords) -> object:
    """Return what tells a formula apart whose operands are of a kind; None where it is not known."""
    parts: list[object] = [func]
    for name, x in (*enumerate(args), *sorted(kwargs.items())):
        if isinstance(x, Tensor) and (not isinstance(x, kind) or vars(x)["key"] is None):
            return None
        parts.append((name, vars(x)["key"] if isinstance(x, kind) else (type(x), repr(x))))
    return tuple(parts)


def _like(
    x: Pending, passage: Passage, func: TorchFunction, args: Arguments, kwargs: Keywords, **changes: object
) -> Pending:
    """Return a pending tensor with the same numbers in another form."""
    same = {"operands": (x,), "rows": x.rows, "key": x.key, "func": func, "args": args, "kwargs": kwargs}
    return _made(x.call, passage, x.dtype, **{**same, **changes})


def _reshaped(func: TorchFunction, args: Arguments, kwargs: Keywords) -> object:
    x: Pending = args[0]
    shape = tuple(func(torch.empty(x.passage.shape, device="meta"), *args[1:], **kwargs).shape)
    if len(shape) < 2 or shape[-1] != x.passage.features:
        return NotImplemented
    return _like(x, replace(x.passage, lead=shape[:-1]), func, args, kwargs)


def _picked(func: Any, args: Any) -> Any:
    """Rows of what a head gives, `logits[:, :-1]`: their loss is that of all rows, of which others are ignored."""
    x, key = args
    keys = key if isinstance(key, tuple) else (key,)
    ids = picked_rows(x.passage, key)
    if ids is None or not all(k is None or k is Ellipsis or isinstance(k, (int, slice)) for k in keys):
        return NotImplemented
    rows = ids.flatten() if x.rows is None else x.rows[ids.flatten()]
    lead = tuple(ids.shape)
    return _like(x, replace(x.passage, lead=lead), func, args, {}, rows=rows)


def _parts(func: TorchFunction, args: Arguments, kwargs: Keywords) -> Any:
    """Gate and up of one projection."""
    x: Pending = args[0]
    passage, count = x.passage, x.passage.sections
    if x.leaf is None or count == 1:
        return NotImplemented
    each = passage.features // count
    trial = func(torch.empty(passage.shape, device="meta"), *args[1:], **kwargs)
    if [tuple(part.shape) for part in trial] != [(*passage.lead, each)] * count:
        return NotImplemented
    part, index = replace(passage, features=each, width=passage.width // count, sections=1), x.leaf[0]
    return tuple(_made(x.call, part, x.dtype, leaf=(index, i), key=("leaf", index, i)) for i in range(count))

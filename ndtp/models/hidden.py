"""`Hidden`: a split activation that a model's own code takes for the whole one.

Its sizes are those of the whole, [.., features]; what a rank has of it is a shard [rows, features] in some layout.
Code of a stock model adds residuals, drops out, scales, picks rows, takes the loss: what acts element by element, or
on rows alone, is done on shards.  Anything else gets the whole tensor, gathered, which is right wherever it is used,
and is noted, since it moves what nobody wanted moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.compute.constants import constant_on, inverse_on
from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.errors import LayoutError
from ndtp.models.between import DROPOUTS, FACTS, GRADIENTS, KNOWN, SIZES, is_dropout_off, is_in_backward
from ndtp.models.frame import Frame, Passage
from ndtp.models.rows import broadcasts, is_brought, rows_of
from ndtp.nn.dropout import drop
from ndtp.nn.padding import RowBlocks
from ndtp.ops.products import relayout
from ndtp.ops.reductions import used_over
from ndtp.runtime.arrival import is_plain, plain_of
from ndtp.split.copies import Tie, share_memory, version_of, written
from ndtp.split.functions import OTHER_KINDS
from ndtp.split.gathered_operands import GatheredOperands
from ndtp.split.spec import ShardForm
from ndtp.split.tensor import Linked, SplitTensor, answer, in_torchs_words, writes
from ndtp.split.whole_views import WholeView, entered

OWN = FACTS | {Tensor.is_contiguous}
SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten}
FORMS: dict[Any, Callable[..., Any]] = {}  # functions that know how an activation lies, see `hidden_forms`
PLAIN = (int, float, NoneType, str, torch.dtype, torch.device)
CHANGING = {func for func in KNOWN if writes(func)}
PARTS = {Tensor.chunk, torch.chunk, Tensor.split, torch.split}


class Hidden(Linked):
    """A shard of an activation; its sizes are those of the whole.

    Attributes:
        strides: those of the dense activation, which tell which reshapes are views of it; None where it is contiguous.
    """

    passage: Passage
    strides: tuple[int, ...] | None = None

    @property
    def writes(self) -> dict[int, int]:
        return self.passage.frame.writes

    @property
    def rows_differ(self) -> tuple[Any, tuple[str, ...]]:
        """Return the grid, and along which of its axes ranks have rows of their own."""
        return self.passage.frame.mesh, self.passage.frame.outside.dims[0]

    def now(self) -> Hidden:
        """Itself; of one that is still to be computed, what it is."""
        return self

    def gathered(self) -> Tensor:
        """The whole of it, on every rank (of its own dp rows); a collective."""
        return whole(self)

    def form(self) -> ShardForm:
        """The way in which the activation lies, for a gradient of its own."""
        return ShardForm(partial(enter, passage=self.passage), partial(_shard, passage=self.passage))

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> object:
        kwargs = in_torchs_words(func, kwargs) if kwargs else {}
        if WholeView in types:
            return NotImplemented  # it calls the function again with a plain tensor
        if func in GRADIENTS:
            return GRADIENTS[func](func, *args, **kwargs)
        if func in OWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in SIZES and args:
            shape = torch.Size(args[0].passage.shape)
            return shape if func is SHAPE else func(torch.empty(shape, device="meta"), *args[1:], **kwargs)
        if "out" in kwargs and kwargs["out"] is not None:  # what acts on shards gives new tensors
            return _on_whole(func, args, kwargs)
        if func in FORMS:
            result = answer(FORMS[func], args, kwargs)
            if result is not NotImplemented:
                return result
        if func in DROPOUTS and args and isinstance(args[0], Hidden):
            return _dropout(func, *args, **kwargs)
        if func in KNOWN:
            result = _elementwise(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _on_whole(func, args, kwargs)


def enter(shard: Tensor, passage: Passage) -> Hidden:
    """`shard` [rows, features], which nobody else has, as an activation of the model."""
    if type(shard) is not Hidden:
        shard.__class__ = Hidden
    shard.passage = passage  # type: ignore[attr-defined]
    return shard  # type: ignore[return-value]


def alias(shard: Tensor, passage: Passage, of: Hidden, strides: tuple[int, ...] | None = None) -> Hidden:
    """A view of the memory of an activation; what that stands for, it stands for."""
    made = enter(shard, passage)
    if of.link is not None:
        made.link = of.link
    if strides is not None:
        made.strides = strides
    return made


def like(x: Hidden) -> Tensor:
    """A tensor without memory that has the sizes and strides of the dense activation."""
    if x.strides is None:
        return torch.empty(x.passage.shape, device="meta")
    return torch.empty_strided(x.passage.shape, x.strides, device="meta")


def leave(x: Tensor) -> Tensor:
    """The shard, as a plain tensor."""
    x = x.now() if type(x) is not Hidden and isinstance(x, Hidden) else x
    if type(x) is Hidden and x.link is not None:
        x.link.fresh()
    with torch._C.DisableTorchFunctionSubclass():
        return x.view_as(x)


def whole(x: Tensor) -> Tensor:
    """The whole activation [.., features] (of its dp rows), on every rank; a collective.  Another tensor as it is."""
    if not isinstance(x, Hidden):
        return x
    passage = x.passage
    y = relayout(leave(x), passage.layout, passage.frame.outside, passage.frame.mesh, f"{passage.came_from} whole")
    if (order := passage.order) is not None:
        y = y[:, inverse_on(order, y.device)]
    y = passage.in_order(y)[:, : passage.features].reshape(passage.shape).contiguous()
    return passage.frame.mesh.step.made_whole(y)  # type: ignore[no-any-return]


def _shard(x: Tensor, passage: Passage) -> Tensor:
    """This rank's part of another tensor of the same sizes, split or whole, to lie so."""
    if isinstance(x, Hidden) and x.passage == passage:
        return leave(x)
    return _cut(x.gathered() if isinstance(x, (Hidden, SplitTensor)) else x, passage)


def split(x: Tensor, frame: Frame, layout: Layout, width: int, came_from: str = "") -> Hidden:
    """A whole activation [.., features], which every rank has, as a split one."""
    x = x.gathered() if isinstance(x, SplitTensor) else x  # from a user's hook
    if not x.dim():
        raise LayoutError(f"'{came_from}': an activation {tuple(x.shape)} has no rows to split")
    lead, features = tuple(x.shape[:-1]), x.shape[-1]
    rows, across = frame.rows_of(lead)
    passage = Passage(frame, layout, lead, rows, features, width, across=across, came_from=came_from)
    return enter(_cut(x, passage), passage)


def _cut(x: Tensor, passage: Passage) -> Tensor:
    frame = passage.frame
    if (order := passage.order) is not None:
        x = x.index_select(-1, constant_on(order, x.device))
    x = F.pad(passage.laid(x.reshape(-1, x.shape[-1])), (0, passage.width - x.shape[-1]))
    y = relayout(x, frame.outside, passage.layout, frame.mesh, passage.came_from or "split")
    return y.view_as(y)


def _elementwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply an element-wise function to shards; the other operands are split alike, or can be brought to lie so."""
    operands = (*args, *kwargs.values())
    passage = None if func in CHANGING else _lying_alike(args)
    if passage is not None and (
        not kwargs or all(isinstance(x, PLAIN) for x in kwargs.values())
    ):  # by far the most frequent
        return _on_shards(func, args, kwargs, passage)
    if writes(func) and not (args and isinstance(args[0], Hidden)):
        return NotImplemented
    mine = [x for x in operands if isinstance(x, Hidden)]
    if is_in_backward() and len(mine) < sum(isinstance(x, Tensor) for x in operands):
        return _beside_gradients(func, args, kwargs, mine)
    into = args[0] if writes(func) else None
    order = lambda x: (math.prod(x.passage.lead), x.passage.layout.num_splits(0))  # noqa: E731
    target = (max(mine, key=order) if into is None else into).passage
    if any(not broadcasts(x.shape, target.shape) for x in operands if isinstance(x, Tensor)):
        return NotImplemented
    if any(x.passage != target and not is_brought(x.passage, target) for x in mine):
        return NotImplemented
    bring = lambda x: brought(x, target) if isinstance(x, Tensor) else x  # noqa: E731
    shards, named = [bring(x) for x in args], {name: bring(x) for name, x in kwargs.items()}
    if any(isinstance(x, (list, tuple)) and any(isinstance(y, Tensor) for y in x) for x in operands):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*shards, **named)
        for shard, operand in zip(shards, args, strict=True):
            if result is shard:  # in place, or nothing to do
                if isinstance(operand, Hidden):
                    if into is not None or is_in_place(args, kwargs):
                        written(operand)
                    is_copy = func is Tensor.contiguous and operand.strides is not None
                    return enter(shard.clone(), target) if is_copy else operand
                return NotImplemented
    if not isinstance(result, Tensor) or result.shape != leave(mine[0]).shape:
        return NotImplemented
    is_view = mine[0].link is not None and share_memory(result, mine[0])
    return alias(result, target, mine[0], mine[0].strides) if is_view else enter(result, target)


def is_in_place(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether a call is one of `F.relu(x, inplace=True)` or `F.relu(x, True)`."""
    return kwargs.get("inplace") is True or args[-1] is True


def _lying_alike(operands: Sequence[object]) -> Passage | None:
    """Return how operands lie which are split alike, or numbers; None where there are any others."""
    passage = None
    for x in operands:
        if type(x) is Hidden:
            if x.link is not None:
                return None
            if passage is None:
                passage = x.passage
            elif not passage.is_like(x.passage):
                return None
        elif not isinstance(x, PLAIN):
            return None
    return passage


def _on_shards(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], passage: Passage) -> Any:
    """Apply an element-wise function to the shards of operands that lie alike."""
    # Autograd must keep plain tensors, since backward uses them where nothing of this holds.
    bare = torch.is_grad_enabled()
    shards = [leave(x) if type(x) is Hidden else x for x in args] if bare else args
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*shards, **kwargs)
        like = None
        for shard, operand in zip(shards, args, strict=True):
            if result is shard:  # in place, or nothing to do
                if is_in_place(args, kwargs):
                    written(operand)
                return operand
            like = shard if like is None and isinstance(shard, Tensor) else like
        if like is None or not isinstance(result, Tensor) or result.shape != like.shape:
            return NotImplemented
        return enter(result, passage)


def _beside_gradients(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mine: Sequence[Hidden]) -> Any:
    """Apply a function in backward of the model's own `autograd.Function`, where gradients are plain shards."""
    others = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not isinstance(x, Hidden)]
    shape = leave(mine[0]).shape
    if any(leave(x).shape != shape for x in mine) or any(x.shape not in (shape, ()) for x in others):
        return NotImplemented
    bare = lambda x: leave(x) if isinstance(x, Hidden) else x  # noqa: E731
    return func(*map(bare, args), **{name: bare(x) for name, x in kwargs.items()})


def brought(x: Tensor, passage: Passage) -> Tensor:
    """Return the part of an operand, whole on every rank or smaller in some dims, that belongs to the shard."""
    if isinstance(x, Hidden):
        return leave(x) if x.passage == passage else _rows_brought(x, passage)
    if isinstance(x, SplitTensor) or not is_plain(x):
        x = x.gathered() if isinstance(x, SplitTensor) else plain_of(x)
    if x.dim() == 0 and not x.requires_grad:
        return x
    frame, layout, shape = passage.frame, passage.layout, passage.shape
    mesh, inner = frame.mesh, layout.dims[0][len(frame.outside.dims[0]) :]
    x = x.reshape((1,) * (len(shape) - x.dim()) + tuple(x.shape))
    if tuple(x.shape[:-1]) == passage.lead and x.shape[-1] == passage.features:
        return _cut(x, passage)
    lead, features = tuple(x.shape[:-1]), x.shape[-1]
    rows = x.reshape(-1, features)
    bare, by_feature = Layout(mesh.grid, None, None), Layout(mesh.grid, None, layout.dims[1])
    if features == passage.features and features != 1:
        order = passage.order
        rows = rows if order is None else rows[:, constant_on(order, rows.device)]
        rows = F.pad(rows, (0, passage.width - features))
        rows = relayout(rows, bare, by_feature, mesh, "operand")
        rows = used_over(rows, by_feature, inner, mesh, "operand")
    else:
        rows = used_over(rows, bare, (*inner, *layout.dims[1]), mesh, "operand")
    return rows_of(rows, lead, passage)


def _rows_brought(x: Hidden, passage: Passage) -> Tensor:
    """Return the rows of a split activation, smaller in some leading dims, that go with the rows of this rank."""
    frame, given = passage.frame, x.passage
    mesh, outside = frame.mesh, frame.outside.dims[0]
    all_rows = Layout(mesh.grid, outside, passage.layout.dims[1])
    rows = given.in_order(relayout(leave(x), given.layout, all_rows, mesh, "operand"))
    rows = used_over(rows, all_rows, passage.layout.dims[0][len(outside) :], mesh, "operand")
    return rows_of(rows, (1,) * (len(passage.lead) - len(given.lead)) + given.lead, passage)


def for_every_row(x: Tensor, passage: Passage) -> Tensor | None:
    """Return [1, features / y] of an operand that is the same for all rows, without a gradient, or None."""
    lead = tuple(x.shape[:-1])
    if isinstance(x, Hidden) or x.requires_grad or lead != (1,) * len(lead) or len(lead) > len(passage.lead):
        return None
    return x if x.dim() == 0 else brought(x, passage)


def _dropout(func: TorchFunction, x: Hidden, p: float = 0.5, *args: object, **kwargs: object) -> Hidden:
    """This rank's part of one mask for the whole."""
    inplace = (*args, *kwargs.values(), False, False)[1]
    if is_dropout_off(p, *args, **kwargs):
        return x
    passage = x.passage
    blocks = RowBlocks(math.prod(passage.lead) or 1, passage.rows or 1, passage.across)
    dropped = drop(leave(x), p, passage.layout, passage.frame.mesh, passage.features, blocks)
    if inplace or func is torch.dropout_:
        with torch._C.DisableTorchFunctionSubclass():
            x.copy_(dropped)
        written(x)
        return x
    return enter(dropped, passage)


def _on_whole(func: object, args: Any, kwargs: Any) -> Any:
    """Run a function as the dense model does, on whole tensors."""
    name = str(getattr(func, "__name__", func)).strip("_")
    for x in hidden_in((*args, *kwargs.values())):
        x.passage.frame.note(name, x.passage)
    return GatheredOperands(Hidden, _as_dense, _cut_like, leave, _view).run(func, args, kwargs)


def _in_function(on_whole: Any, on_shards: Any, args: Arguments, kwargs: Keywords) -> object:
    """Run an `autograd.Function` of somebody else, on shards where a rule says that it acts element by element."""
    if not hidden_in((*args, *kwargs.values())):
        return NotImplemented
    result = NotImplemented if on_shards is None else _elementwise(on_shards, args, kwargs)
    return _on_whole(on_whole, args, kwargs) if result is NotImplemented else result


OTHER_KINDS.append(_in_function)


def _as_dense(x: Hidden) -> Tensor:
    """The whole of an activation, which lies in memory as the dense one does."""
    made = whole(x)
    if x.strides is None:
        return made.contiguous()
    return torch.empty_strided(made.shape, x.strides, dtype=made.dtype, device=made.device).copy_(made)


def _cut_like(x: Hidden, made: Tensor) -> Tensor:
    return _cut(made, x.passage)


def _view(result: Tensor, made: Tensor, x: Hidden) -> Tensor:
    """A view of a gathered activation as one of the activation itself."""
    if share_memory(made, x):
        return result if x.link is None else entered(result, x.link)
    return entered(result, _Gathered(x, made, version_of(x)))


class _Gathered(Tie):
    """The link of a whole activation."""

    def again(self) -> Tensor:
        return whole(self.base)

    def bring_back(self) -> bool:
        shard = _cut(self.gathered, self.base.passage)
        with torch._C.DisableTorchFunctionSubclass():
            leave(self.base).copy_(shard)
        return False


def hidden_in(x: object) -> list[Hidden]:
    """Return the split activations among arguments, in their order."""
    found, waiting = list[Hidden](), [x]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, Hidden):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            waiting[:0] = each
        elif not isinstance(each, (Tensor, *PLAIN)) and isinstance(each, Mapping):
            waiting[:0] = each.values()
    return found

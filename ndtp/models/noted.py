"""`Noted`: the result of a layer of an observed model, before anybody needs its numbers.

It is a split tensor whose policy is to note what is made of it, as `ndtp.models.pending` does for recognised layers:
element by element, or with its rows in another form.  A layer that follows, or a loss, reads the note and makes one
program of both.  Whoever wants anything else gets the tensor itself: the object becomes the split tensor that it stands
for, computed as it was when it was called for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ndtp.compute.constants import indices_on
from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.models.between import DROPOUTS, KNOWN
from ndtp.models.hidden import PARTS, is_dropout_off
from ndtp.models.observed_chains import FORMS, TURNS
from ndtp.models.pending import STATIC, NotComputed, key_of
from ndtp.models.same_hooks import compare_hooks
from ndtp.models.split_layers import ObservedLinear, Rows
from ndtp.models.waiting import Call
from ndtp.split.tensor import SHAPE, SIZES, SplitTensor, enter, in_torchs_words, writes


@dataclass(eq=False)
class NotedCall(Call):
    """Layers of one input, and how things stood when they were called.

    Attributes:
        rows: how the leading dims of their input became rows.
    """

    rows: Rows = None  # type: ignore[assignment]

    @property
    def losses(self) -> Any:
        return self.members[0].context.losses  # type: ignore[union-attr]

    def given_by(self, member: Any, y: Tensor) -> Any:
        return member.given(y, self.rows)

    def value(self, member: Any) -> Any:
        with member.at_work():
            return super().value(member)


class Noted(SplitTensor):
    """See the module; made by `noted_result`.

    Attributes:
        sample: a tensor without memory of the whole's sizes.
        leaf: (of a layer's result itself) which one of the call, and which part of its features, or None for all.
        func, args, kwargs: (of anything else) how it is made of others.
        is_same: whether its rows are those of the layer's result, in the same form.
        is_turned: whether its features are its second dim, as losses of several dims take them.
        key: what tells two formulas apart.
    """

    call: NotedCall
    sample: Tensor
    leaf: tuple[int, int | None] | None
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_same: bool
    is_turned: bool
    key: Any

    # Code that looks at how it lies wants the tensor.
    spec = property(lambda self: vars(self.now())["spec"])  # type: ignore[assignment]
    link = property(lambda self: self.now().link)  # type: ignore[assignment]
    strides = property(lambda self: self.now().strides)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = in_torchs_words(func, kwargs)
        if func in SHAPE or func in SIZES:
            return func(args[0].sample, *args[1:], **kwargs)
        if func in STATIC:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        result = _noted(func, args, kwargs)
        if result is not NotImplemented:
            return result
        compare_hooks(func, args)
        for x in _noted_in((args, kwargs)):
            x.now()
        return func(*args, **kwargs)

    def now(self) -> Any:
        """The object itself, which is the tensor from now on."""
        if type(self) is not Noted:
            return self
        with self.call.as_then():
            if self.leaf is None:
                for x in _noted_in((self.args, self.kwargs)):
                    x.now()
                made = self.func(*self.args, **self.kwargs)
            else:
                index, part = self.leaf
                made = self.call.value(self.call.members[index])
                made = made if part is None else made.chunk(2, dim=-1)[part]
            with torch._C.DisableTorchFunctionSubclass():
                fresh: Any = made.view_as(made)
            if isinstance(made, SplitTensor):
                enter(fresh, made.spec)
                fresh.link, fresh.strides = made.link, made.strides
        with torch._C.DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(self, fresh)
        return self

    @property
    def is_open(self) -> bool:
        """Return whether the result is still to be computed, in any way."""
        return type(self) is Noted and self.call.values is None

    @property
    def operands(self) -> Arguments:
        return self.args

    def formula(self, leaves: Mapping[Any, Tensor], seen: dict[int, Tensor] | None = None) -> Tensor:
        """Return the formula's value on the given results of layers, or on some of their rows."""
        seen = {} if seen is None else seen
        if self.leaf is not None:
            return leaves[self.leaf]
        if id(self) not in seen:
            given = [x.formula(leaves, seen) if isinstance(x, Noted) else x for x in self.args]
            is_made = self.func in KNOWN and self.func is not Tensor.contiguous
            seen[id(self)] = self.func(*given, **self.kwargs) if is_made else given[0]
        return seen[id(self)]

    @property
    def sizes_of_targets(self) -> tuple[int, ...] | None:
        """Return the sizes of the targets of a loss of it; None where it takes none."""
        sizes = tuple(self.sample.shape)
        return (sizes[0], *sizes[2:]) if self.is_turned else sizes[:1] if len(sizes) == 2 else None

    def laid_targets(self, target: Tensor, ignored: int) -> Tensor:
        """Return targets of all rows of the call, as its input has them; those of rows nobody picked are ignored."""
        spec, dim = self.call.rows.spec, self.call.rows.dim
        lead, size = spec.sizes[:-1], spec.padded[dim]
        mine = target.new_full((torch.Size(lead).numel(),), ignored)
        mine[indices_on(self.row_ids(), target.device)] = target
        mine = F.pad(mine.view(lead), [0, 0] * (len(lead) - 1 - dim) + [0, size - lead[dim]], value=ignored)
        return mine.movedim(dim, 0).flatten()

    def row_ids(self) -> Tensor:
        """Return which of the layer's rows it has, in the form of its leading dims."""
        if self.leaf is not None:
            return torch.arange(self.sample.shape[:-1].numel(), device="cpu").view(self.sample.shape[:-1])
        source = next(x for x in self.args if isinstance(x, Noted))
        ids = source.row_ids()
        if self.func is Tensor.__getitem__:
            wide = ids.unsqueeze(-1).expand(*ids.shape, source.sample.shape[-1])
            return wide[self.args[1]][..., 0]
        return ids if self.is_same or self.is_turned else ids.reshape(self.sample.shape[:-1])


def noted_result(call: NotedCall, member: ObservedLinear, lead: Sequence[int]) -> Noted:
    """Return the noted result of a layer of a call, whose input has the leading dims `lead`."""
    index = call.members.index(member)  # type: ignore[arg-type]
    call.asked.add(index)
    form = torch.empty((*lead, member.real_out), dtype=call.dtype, device="meta")
    return _made(call, form, leaf=(index, None), key=("leaf", index, None), is_same=True)


def _made(call: NotedCall, form: Tensor, **attributes: object) -> Noted:
    weights = [p for p in call._weights() if p.requires_grad][:1]
    source, name = call.source, call.members[0].name
    with torch._C.DisableTorchFunctionSubclass(), torch.set_grad_enabled(call.state[0]):
        x = NotComputed.apply(source.view_as(source), form.dtype, tuple(form.shape), name, *weights)  # type: ignore[no-untyped-call]
    x.__class__ = Noted
    x.call, x.sample = call, form
    bare: dict[str, object] = {"leaf": None, "func": None, "args": (), "kwargs": {}, "is_turned": False}
    for name, value in {**bare, **attributes}.items():
        setattr(x, name, value)
    return x  # type: ignore[no-any-return]


def _noted_in(x: object) -> Iterator[Noted]:
    return (each for each in tree_leaves(x) if isinstance(each, Noted))


def settle(results: object) -> None:
    """Compute what a model gives, unless it is what its loss was made of."""
    for x in _noted_in(results):
        if not (x.is_open and x.call.feeds_loss):
            x.now()


# ------------------------------------------------------------------------------------------------------------- noting


def _noted(func: TorchFunction, args: Arguments, kwargs: Keywords) -> object:
    """Return the formula after one more operation, where nothing is to be computed for it."""
    mine = [x for x in (*args, *kwargs.values()) if isinstance(x, Noted)]
    if not mine or any(x.call is not mine[0].call or not x.is_open for x in mine) or not mine[0].call.is_now:
        return NotImplemented
    if func is F.cross_entropy:
        loss = mine[0].call.loss
        return NotImplemented if loss is None else loss(*args, **kwargs)
    first = mine[0]
    if any(x.is_turned for x in mine):
        return NotImplemented
    if func in TURNS and args[0] is first and len(mine) == 1:
        return _turned(first, func, args, kwargs)
    if func in DROPOUTS and args[0] is first and is_dropout_off(*args[1:], **kwargs):
        return first
    others = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not isinstance(x, Noted)]
    if others or writes(func) or kwargs.get("inplace") or kwargs.get("out") is not None or args[0] is not first:
        return NotImplemented
    if func in PARTS:
        return _parts(first, func, args, kwargs)
    is_form = func in FORMS and (func is not Tensor.__getitem__ or _is_of_rows(args[1]))
    if (func not in KNOWN and not is_form) or any(isinstance(x, Noted) for x in kwargs.values()):
        return NotImplemented
    try:
        form = func(*[x.sample if isinstance(x, Noted) else x for x in args], **kwargs)
    except (NotImplementedError, RuntimeError):  # what takes more than a form, such as the name of a device
        return NotImplemented
    if not isinstance(form, Tensor) or not form.dim() or form.shape[-1] != first.sample.shape[-1]:
        return NotImplemented
    is_alike = form.shape == first.sample.shape and func is not Tensor.__getitem__
    if len(mine) > 1 and not (is_alike and all(x.is_same for x in mine)):
        return NotImplemented
    if form.is_floating_point() != first.sample.is_floating_point() or form.device.type != "meta":
        return NotImplemented
    return _made(
        first.call, form, func=func, args=tuple(args), kwargs=dict(kwargs), is_same=first.is_same and is_alike,
        key=key_of(Noted, func, args, kwargs),
    )  # fmt: skip


def _turned(x: Noted, func: TorchFunction, args: Arguments, kwargs: Keywords) -> object:
    """Features as the second dim, and all others in their order."""
    if x.sample.dim() < 3:
        return NotImplemented
    sample, wanted = func(x.sample.contiguous(), *args[1:], **kwargs), x.sample.contiguous().movedim(-1, 1)
    if sample.shape != wanted.shape or sample.stride() != wanted.stride():
        return NotImplemented
    return _made(
        x.call, sample, func=func, args=tuple(args), kwargs=dict(kwargs), is_same=False, is_turned=True, key=None
    )


def _is_of_rows(key: object) -> bool:
    keys = key if isinstance(key, tuple) else (key,)
    return all(k is None or k is Ellipsis or isinstance(k, slice) or type(k) is int for k in keys)


def _parts(x: Noted, func: TorchFunction, args: Arguments, kwargs: Keywords) -> Any:
    """Gate and up of one layer."""
    member = x.call.members[x.leaf[0]] if x.leaf is not None else None
    if member is None or x.leaf[1] is not None:  # type: ignore[index]
        return NotImplemented
    is_one = not member.sections and member.plan.out.num_splits(1) == 1 and member.out_width == member.real_out
    if len(member.sections) != 2 and not is_one:
        return NotImplemented
    forms = func(x.sample, *args[1:], **kwargs)
    half = (*x.sample.shape[:-1], x.sample.shape[-1] // 2)
    if [tuple(form.shape) for form in forms] != [half, half]:
        return NotImplemented
    index = x.leaf[0]  # type: ignore[index]
    return tuple(
        _made(x.call, form, leaf=(index, i), key=("leaf", index, i), is_same=True) for i, form in enumerate(forms)
    )

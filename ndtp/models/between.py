"""The tensor between the two layers of a pair that `ndtp.parallelize` made, while the model's own code has it.

That code was written for the whole activation and gets a shard of it, [rows, features], whose rows come from all of the
leading dims and may be padded.  What acts element by element gives on shards the shards of what it gives on the whole;
anything else would give wrong numbers.  So the first layer returns a `Between`, which does what is known to be element
by element, draws dropout as the whole tensor would, and refuses the rest by name; the second layer takes nothing else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.errors import LayoutError
from ndtp.nn.dropout import drop
from ndtp.nn.padding import RowBlocks
from ndtp.ops.products import relayout
from ndtp.runtime.arrival import tensors_in
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.split.elementwise import named
from ndtp.split.hooked_gradients import gradient, gradients, hooked
from ndtp.split.spec import ShardForm
from ndtp.split.tensor import FACTS as OF_ANY
from ndtp.split.tensor import getters, name_of

# By name, see `ndtp.split.elementwise.named`.
ELEMENTWISE = (
    "abs", "absolute", "bfloat16", "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone", "contiguous", "cos",
    "detach", "double", "elu", "erf", "exp", "expm1", "float", "gelu", "half", "hardshrink", "hardsigmoid",
    "hardswish", "hardtanh", "leaky_relu", "log", "log1p", "logsigmoid", "mish", "nan_to_num", "neg", "negative",
    "ones_like", "pos", "positive", "reciprocal", "relu", "relu6", "rsqrt", "selu", "sigmoid", "sign", "silu", "sin",
    "softplus", "softshrink", "softsign", "sqrt", "square", "tanh", "tanhshrink", "threshold", "to", "type", "type_as",
    "zeros_like",
    # Of two, each of which is a number or lies between the same pair.
    "add", "div", "divide", "eq", "ge", "gt", "le", "lt", "masked_fill", "maximum", "minimum", "mul", "multiply", "ne",
    "pow", "rsub", "sub", "subtract", "true_divide", "truediv", "view_as", "where",
)  # fmt: skip
KNOWN = set(named(ELEMENTWISE))
DROPOUTS = {F.dropout, torch.dropout, torch.dropout_}
CASTS = set(named(("bfloat16", "double", "float", "half", "to", "type_as")))
# What does not depend on the numbers, nor on how they lie.
FACTS = OF_ANY | {*getters("_grad", "grad"), Tensor.as_subclass}
GRADIENTS: dict[Any, Callable[..., Any]] = {
    Tensor.register_hook: hooked,
    **dict.fromkeys(getters("grad", "_grad"), gradient),
    torch.autograd.grad: gradients,
}
SIZES = {*getters("ndim", "shape"), Tensor.__len__, Tensor.dim, Tensor.numel, Tensor.size, torch.numel}


@dataclass(frozen=True)
class PairPassage:
    """One activation on its way from the first layer of a pair to the second, whole in `lead` and `features`.

    Attributes:
        came_from: the name of the layer that gave it.
        layout: how its shard [rows, features] lies.
        outside: how rows lie outside of the pair.
        features: how many of them are no padding.
        lead: the leading dims outside.
        rows: of those that enter on one rank, how many are no padding.
    """

    came_from: str = field(compare=False)
    layout: Layout
    outside: Layout
    mesh: ProcessGrid
    features: int
    lead: tuple[int, ...]
    rows: RowBlocks

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, self.features)

    def refuse(self, what: str) -> NoReturn:
        raise LayoutError(
            f"parallelize: {what} follows '{self.came_from}', the first layer of a pair: of the whole, {self.shape}, "
            f"a rank has a shard, {self.layout}\n  fix: element-wise operations and dropout alone between the layers "
            "of a pair, or leave them out of the plan; x.gathered() gives the whole of it, x.as_subclass(torch.Tensor) "
            "the shard"
        )


class Between(Tensor):
    """A shard of an activation between the layers of a pair; its sizes are those of the whole."""

    passage: PairPassage

    def gathered(self) -> Tensor:
        """The whole of it, on every rank (of its own dp rows); a collective."""
        passage = self.passage
        y = relayout(leave(self), passage.layout, passage.outside, passage.mesh, f"{passage.came_from} whole")
        return y[: math.prod(passage.lead), : passage.features].reshape(passage.shape).contiguous()

    def form(self) -> ShardForm:
        """The way in which the activation lies, for a gradient of its own."""
        shard = leave(self)
        return ShardForm(
            partial(enter, passage=self.passage), partial(_shard, passage=self.passage, width=shard.shape[-1])
        )

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        mine = [tensor for tensor in tensors if type(tensor) is cls]
        passage = mine[0].passage
        if func in FACTS and func not in GRADIENTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in SIZES:
            return func(torch.empty(passage.shape, device="meta"), *args[1:], **kwargs)
        if func is Tensor.__repr__ or func is Tensor.__format__:
            return f"Between(from '{passage.came_from}', {passage.shape} as {passage.layout})"
        if func in GRADIENTS:
            return GRADIENTS[func](func, *args, **kwargs)
        if func in DROPOUTS:
            return _dropout(func, passage, *args, **kwargs)
        if func not in KNOWN:
            passage.refuse(f"{name_of(func)}, which is not known to act element by element,")
        is_mixed = len(mine) != len(tensors)
        if is_mixed and not is_in_backward():
            passage.refuse(f"{name_of(func)} with a tensor from elsewhere")
        for other in mine:
            if other.passage != passage:
                passage.refuse(f"{name_of(func)} with what '{other.passage.came_from}' gave, {other.passage.shape},")
        # On plain tensors: what autograd keeps of them is used in backward, where nothing of this holds.
        shards = [leave(operand) if type(operand) is cls else operand for operand in args]
        named = {name: leave(operand) if type(operand) is cls else operand for name, operand in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*shards, **named)
            for shard, operand in zip(shards, args, strict=True):
                if result is shard:  # in place, or nothing to do
                    return operand
            if not isinstance(result, Tensor) or result.shape != mine[0].shape:
                passage.refuse(f"{name_of(func)}, which gives another shape,")
        return result if is_mixed else enter(result, passage)


def is_dropout_off(p: float = 0.5, *args: object, **kwargs: object) -> bool:
    """Return whether one of `DROPOUTS` returns its input unchanged."""
    is_on = (*args, *kwargs.values(), True)[0]
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p={p} is not in [0, 1]")
    return not is_on or p == 0.0


def is_in_backward() -> bool:
    """Return whether a user's own `autograd.Function` is in backward, where gradients are plain shards."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def enter(shard: Tensor, passage: PairPassage) -> Between:
    """`shard`, which nobody else has, as what lies between the layers of a pair."""
    if "torch._dynamo" in sys.modules:
        from ndtp.models.between_compiled import make_known

        make_known(Between)

    if torch.compiler.is_compiling():
        shard = shard.as_subclass(Between)
    elif type(shard) is not Between:
        shard.__class__ = Between  # in place, as torch does with lazy parameters: no alias, no node of autograd
    shard.passage = passage  # type: ignore[attr-defined]
    return shard  # type: ignore[return-value]


def leave(x: Tensor) -> Tensor:
    """The shard, as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.view_as(x)


def _shard(x: Tensor, passage: PairPassage, width: int) -> Tensor:
    """This rank's part of another tensor of the same sizes, which lies between the same layers or is whole."""
    if isinstance(x, Between):
        if x.passage != passage:
            passage.refuse(f"a gradient as what '{x.passage.came_from}' gave, {x.passage.shape},")
        return leave(x)
    features = width * passage.layout.num_splits(1)
    rows = x.reshape(-1, passage.features)
    rows = F.pad(rows, (0, features - passage.features, 0, passage.rows.padded - passage.rows.real))
    return relayout(rows, passage.outside, passage.layout, passage.mesh, f"{passage.came_from} gradient")


def _dropout(
    func: TorchFunction, passage: PairPassage, x: Between, p: float = 0.5, *args: object, **kwargs: object
) -> Between:
    """`F.dropout` and `torch.dropout`, with this rank's part of one mask for the whole."""
    inplace = (*args, *kwargs.values(), False, False)[1]
    if is_dropout_off(p, *args, **kwargs):
        return x
    shard = leave(x)
    dropped = drop(shard, p, passage.layout, passage.mesh, passage.features, passage.rows)
    if inplace or func is torch.dropout_:
        with torch._C.DisableTorchFunctionSubclass():
            x.copy_(dropped)
        return x
    return enter(dropped, passage)

"""`Mapped`: a tensor whose dims have names and lie over the axes of a grid; and `einsum` of such tensors.

A thin class: this rank's shard, the names, a `Layout` and a `ProcessGrid`.  Every operation makes a plan of
`ndtp.algebra`, which knows what moves and counts it, and runs torch's own operation on the shards in between.

Source of the notion: Mesh-TensorFlow (Shazeer et al. 2018), which maps named dims of tensors to dims of a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ndtp.algebra.einsum import EinsumPlan, ExtremePlan, elementwise, names_of, parse
from ndtp.algebra.einsum_products import ProductForm, product_form
from ndtp.algebra.layout import Layout
from ndtp.errors import LayoutError
from ndtp.ops.elements import ELEMENTWISE, ElementArithmetic
from ndtp.ops.loop_nests import applied, contracted, extreme
from ndtp.ops.placed import NamedSplit, Placed, layout_of

NOT_MAPPED = "a tensor that is not mapped among mapped ones\n  fix: ndtp.Mapped.shard(x, ...)"


class Mapped(Placed, ElementArithmetic):
    """A tensor with named dims, of which this rank has a shard.

        x = ndtp.Mapped.shard(dense, "b m k", {"m": ("z", "y"), "k": "x"}, mesh)
        y = ndtp.einsum("b m k, k n -> b m n", x, weight)

    Operations align dims by their names.  The gradient of a tensor lies as the tensor does; where that replicates,
    every rank has the same full gradient.  So what is computed of mapped tensors alone has dense gradients: all ranks
    together differentiate a loss that each of them has, `loss.backward()`.

    Args:
        local: this rank's shard.
        names: of the dims, `"b m k"` or a sequence.
        split: a `Layout`, or name -> the axes that split it.

    Attributes:
        local, names, layout, mesh: what it is made of.

    Raises:
        LayoutError: names that are none, or not one a dim; an axis or name that is not there.
    """

    __slots__ = ()

    # ------------------------------------------------------------------------------------------------------ reductions

    def sum(self, names: str | None = None, split: NamedSplit | None = None) -> Mapped:
        """The sum over dims, `x.sum("m k")`; default: over all.

        Args:
            split: how the result is to be split; default: as what is left of the dims.
        """
        return einsum(f"{' '.join(self.names)} -> {' '.join(self._left(names))}", self, out=split, name="sum")

    def mean(self, names: str | None = None, split: NamedSplit | None = None) -> Mapped:
        left = self._left(names)
        count = 1
        for name, size in self.sizes.items():
            count *= 1 if name in left else size
        return self.sum(names, split) / count

    def amax(self, names: str | None = None) -> Mapped:
        """The largest elements over dims."""
        return self._extreme(names, True)

    def amin(self, names: str | None = None) -> Mapped:
        return self._extreme(names, False)

    def softmax(self, names: str) -> Mapped:
        """Return the softmax over `dims`, split or not.

        Split dims take two reductions, of one number for each row.
        """
        powers = Mapped.apply(torch.exp, self - self.detach().amax(names))
        return powers / powers.sum(names)  # type: ignore[no-any-return]

    def astype(self, dtype: torch.dtype) -> Mapped:
        return self._like(self.local.to(dtype))

    # ----------------------------------------------------------------------------------------------------- underneath

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """torch's functions of elements, such as `torch.exp(x)` or `torch.where(mask, x, 0.0)`."""
        if func not in ELEMENTWISE:
            raise TypeError(
                f"{getattr(func, '__name__', func)} is no function of elements that Mapped knows\n  fix: einsum and "
                "methods of Mapped where dims matter, Mapped.apply for a function of elements of your own"
            )
        return cls.apply(func, *args, **(kwargs or {}))

    @staticmethod
    def apply(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Mapped:
        """A function of elements on mapped tensors, and numbers, as its arguments: dims are aligned by their names.

        The result has the dims of the first operand that has all of them; if none has, those of each in turn.

        Raises:
            LayoutError: operands of different grids, or that the role rule cannot bring together.
            TypeError: a tensor that is not mapped.
        """
        operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Mapped)]
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and x.dim():
                raise TypeError(NOT_MAPPED)

        def of_shards(*tensors: Tensor) -> Tensor:
            given = iter(tensors)
            placed = [next(given) if isinstance(x, Mapped) else x for x in args]
            return function(*placed, **{k: next(given) if isinstance(x, Mapped) else x for k, x in kwargs.items()})

        if len(operands) == 1:
            return operands[0]._like(of_shards(operands[0].local))
        name = getattr(function, "__name__", "function")
        plan = plan_of(elementwise([x.names for x in operands]), *operands, name=name)
        mesh = operands[0].mesh
        return Mapped(applied(plan, of_shards, [x.local for x in operands], mesh), plan.result, plan.out, mesh)

    def _apply(self, function: Callable[..., Tensor], *args: Any) -> Mapped:
        return Mapped.apply(function, *args)

    def _left(self, names: str | None) -> list[str]:
        gone = self.names if names is None else names_of(names)
        self._check_names(gone, "reduction")
        return [name for name in self.names if name not in gone]

    def _extreme(self, names: str | None, largest: bool) -> Mapped:
        expression = f"{' '.join(self.names)} -> {' '.join(self._left(names))}"
        plan = plan_of(expression, self, name="amax" if largest else "amin")
        return Mapped(extreme(self.local, ExtremePlan(plan), self.mesh, largest), plan.result, plan.out, self.mesh)


def einsum(
    expression: str,
    *operands: Mapped,
    out: NamedSplit | None = None,
    roles: Mapping[str, str] | None = None,
    chunks: int | str = 0,
    name: str = "",
) -> Mapped:
    """`torch.einsum` of mapped tensors, by names of dims: `ndtp.einsum("b m k, k n -> b m n", x, weight)`.

    The letters of the expression name the dims of the operands in turn, and those of the result; operands may call
    theirs otherwise.  Letters that come out are kept; others are summed, whichever operands have them.  A dim of size
    1 is broadcast.  Which axis splits which letter, and so what moves, follows from how the operands lie by the role
    rule of products; `plan_of` of the same arguments tells it beforehand, and counts the bytes.

    Differentiable: gradients lie as the operands do.  More than two operands are multiplied from left to right.

    Args:
        out: name -> the axes that split it in the result.  Default: the mirror, as of products.
        roles: axis -> letter, for axes that shall not follow the rule.
        chunks: of a product of matrices, batched or not, in how many parts its communication overlaps its products,
            or "auto"; see `ndtp.MatMulPlan`.
        name: what errors and profiles call it.

    Raises:
        LayoutError: an expression that the operands do not fit, sizes that do not divide, or layouts that the rule
            cannot multiply, with the nearest that it can; the same on every rank, before anything moves.
    """
    names, result = parse(expression)
    if len(operands) > 2 and len(names) == len(operands):
        first, second, *others = names
        wanted = {*result, *(letter for other in others for letter in other)}
        between = [letter for letter in dict.fromkeys((*first, *second)) if letter in wanted]
        own = {axis: letter for axis, letter in (roles or {}).items() if letter in (*first, *second)}
        product = einsum(
            f"{' '.join(first)}, {' '.join(second)} -> {' '.join(between)}", *operands[:2], roles=own, chunks=chunks
        )
        rest = ", ".join(map(" ".join, (between, *others)))
        own = {axis: letter for axis, letter in (roles or {}).items() if letter in {*between, *wanted}}
        return einsum(
            f"{rest} -> {' '.join(result)}", product, *operands[2:], out=out, roles=own, chunks=chunks, name=name
        )
    plan = plan_of(expression, *operands, out=out, roles=roles, name=name)
    mesh, form = operands[0].mesh, _product(plan, chunks)
    return Mapped(contracted(plan, [x.local for x in operands], mesh, form), plan.result, plan.out, mesh)


def plan_of(
    expression: str,
    *operands: Mapped,
    out: NamedSplit | None = None,
    roles: Mapping[str, str] | None = None,
    name: str = "",
) -> EinsumPlan:
    """Return the plan of an `einsum` of one or two operands: `plan_of(...).volume()` is its traffic in elements.

    Raises:
        LayoutError: as `einsum`.
    """
    if not operands:
        raise LayoutError(f"einsum '{expression}': give an operand")
    if any(not isinstance(x, Mapped) for x in operands):
        raise TypeError(f"einsum '{expression}': {NOT_MAPPED}")
    mesh = operands[0].mesh
    for x in operands:
        if x.mesh is not mesh and (x.mesh.grid, x.mesh.global_ranks) != (mesh.grid, mesh.global_ranks):
            raise LayoutError(
                f"einsum '{expression}': operands on two process grids, {mesh!r} and {x.mesh!r}\n"
                "  fix: `to` brings a tensor to another process grid"
            )
    target = None if out is None else layout_of(parse(expression)[1], out, mesh)
    given = None if not roles else tuple(roles.items())
    return _plan(expression, tuple(x.layout for x in operands), tuple(x.shape for x in operands), target, given, name)


@lru_cache(maxsize=4096)
def _product(plan: EinsumPlan, chunks: int | str) -> ProductForm | None:
    return product_form(plan, chunks)


@lru_cache(maxsize=4096)
def _plan(
    expression: str,
    layouts: tuple[Layout, ...],
    shapes: tuple[tuple[int, ...], ...],
    out: Layout | None,
    roles: tuple[tuple[str, str], ...] | None,
    name: str,
) -> EinsumPlan:
    return EinsumPlan(expression, layouts, shapes, out, dict(roles or ()), name)

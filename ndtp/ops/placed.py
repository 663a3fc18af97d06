"""The base of `Mapped`: its fields, and its moves from and to other tensors and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ndtp.algebra.einsum import Names, names_of
from ndtp.algebra.layout import DimSpec, Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.algebra.resharding import ReshardPlan
from ndtp.algebra.steps import is_legal
from ndtp.errors import GridError, LayoutError
from ndtp.ops.reductions import reduce
from ndtp.ops.resharding import resharded, seats_of
from ndtp.runtime.arrival import local_shard, stored_shape

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike

NamedSplit = Mapping[str, DimSpec]  # name -> the axes that split it, major to minor; what is not named is whole
Self = TypeVar("Self", bound="Placed")


class Placed:
    """A tensor with named dims, of which this rank has a shard; see `ndtp.Mapped`, which can compute as well."""

    __slots__ = ("layout", "local", "mesh", "names")

    def __init__(self, local: Tensor, names: str | Sequence[str], split: Layout | NamedSplit, mesh: GridLike) -> None:
        self.local, self.mesh = local, mesh
        self.names: Names = names_of(names if isinstance(names, str) else " ".join(names))
        self.layout = split if isinstance(split, Layout) else layout_of(self.names, split, mesh)
        if len(set(self.names)) < len(self.names) or not len(self.names) == local.dim() == self.layout.ndim:
            raise LayoutError(
                f"Mapped '{' '.join(self.names)}': a shard of {local.dim()} dims as {self.layout}; each dim takes a "
                "name of its own"
            )
        if self.layout.grid != mesh.grid:
            raise LayoutError(
                f"Mapped '{' '.join(self.names)}': {self.layout} lies on grid {self.layout.grid}, the process grid is "
                f"{mesh.grid}"
            )

    # ------------------------------------------------------------------------------------- to and from other tensors

    @classmethod
    def shard(cls: type[Self], dense: Tensor, names: str | Sequence[str], split: NamedSplit, mesh: GridLike) -> Self:
        """Return this rank's shard of a tensor that every rank has whole.

        Differentiable: the gradient of the whole is gathered from all ranks.  Of a tensor that needs none it is a copy.

        Raises:
            LayoutError: a size that its axes do not divide; as the constructor.
        """
        whole = cls(dense, names, {}, mesh)
        layout = layout_of(whole.names, split, mesh)
        layout.shard_shape(dense.shape)
        if dense.requires_grad and torch.is_grad_enabled():
            return whole.relayout(split)
        return cls(layout.shard(dense, mesh.rank).clone(memory_format=torch.contiguous_format), names, layout, mesh)

    def to_dense(self) -> Tensor:
        """The whole tensor, on every rank: gathered forward, cut backward."""
        return self.relayout({}).local

    @classmethod
    def from_dtensor(cls: type[Self], x: Tensor, names: str | Sequence[str], mesh: GridLike) -> Self:
        """A DTensor on the mesh of `mesh` (`mesh.device_mesh`), parameters too: its shard, not a copy.

        Raises:
            LayoutError: another mesh, a partial placement, or sizes that do not divide.
        """
        given: Any = x
        if given.device_mesh != mesh.device_mesh:
            raise LayoutError(
                f"Mapped.from_dtensor: it lies on {given.device_mesh}, the process grid on {mesh.device_mesh}\n"
                "  fix: ndtp.ProcessGrid.from_mesh makes a process grid of a mesh"
            )
        layout = Layout.from_placements(mesh.grid, mesh.mesh_axes, given.placements, len(stored_shape(given)))
        layout.shard_shape(given.shape)
        return cls(local_shard(x), names, layout, mesh)

    def to_dtensor(self) -> Tensor:
        """Return the same shard as a DTensor on `mesh.device_mesh`, without a copy.

        Raises:
            GridError: a grid of one rank, which has no DeviceMesh.
            LayoutError: an order of axes that the mesh does not express.
        """
        from torch.distributed.tensor import DTensor

        if self.mesh.device_mesh is None:
            raise GridError("Mapped.to_dtensor: a grid of one rank has no DeviceMesh\n  fix: `local` is all of it")
        placements = self.layout.placements_on(self.mesh.mesh_axes)
        stride = torch.empty(self.shape, device="meta").stride()
        made: Tensor = DTensor.from_local(
            self.local, self.mesh.device_mesh, placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )
        return made

    # --------------------------------------------------------------------------------------------------- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(size * self.layout.num_splits(dim) for dim, size in enumerate(self.local.shape))

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, self.shape, strict=True))

    @property
    def split(self) -> dict[str, tuple[str, ...]]:
        """Name -> the axes that split it, for the dims that are split."""
        return {name: axes for name, axes in zip(self.names, self.layout.dims, strict=True) if axes}

    @property
    def ndim(self) -> int:
        return len(self.names)

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def grad(self: Self) -> Self | None:
        return None if self.local.grad is None else self._like(self.local.grad)

    def requires_grad_(self: Self, wanted: bool = True) -> Self:
        self.local.requires_grad_(wanted)
        return self

    def detach(self: Self) -> Self:
        return self._like(self.local.detach())

    def item(self) -> float:
        """The number that a tensor without dims is."""
        return self.local.item()

    def backward(self) -> None:
        """Differentiate a number that every rank has, such as a loss; all ranks call it together."""
        self.local.backward()  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return f"Mapped[{self.layout.label(self.names)}]({self.shape}, {self.dtype}, grid {self.mesh.grid})"

    # ------------------------------------------------------------------------------------------- by names and layouts

    def rename(self: Self, **names: str) -> Self:
        """Other names for dims: `x.rename(s="t")`."""
        self._check_names(names, "rename")
        return type(self)(self.local, [names.get(name, name) for name in self.names], self.layout, self.mesh)

    def transpose(self: Self, names: str) -> Self:
        """Return the tensor with its dims in another order, `x.transpose("k m b")`; nothing moves."""
        order = names_of(names)
        if sorted(order) != sorted(self.names):
            raise LayoutError(f"transpose of {self!r}: '{names}' is no order of its dims")
        dims = [self.names.index(name) for name in order]
        layout = self.layout.with_dims(*(self.layout.dims[dim] for dim in dims))
        return type(self)(self.local.permute(dims), order, layout, self.mesh)

    def expand(self: Self, **sizes: int) -> Self:
        """Return the tensor repeated along further dims, which come last and are whole: `x.expand(n=8)`; nothing
        moves.
        """
        if twice := [name for name in sizes if name in self.names]:
            raise LayoutError(f"expand of {self!r}: it has a dim {twice[0]}")
        local = self.local.reshape(*self.local.shape, *[1] * len(sizes)).expand(*self.local.shape, *sizes.values())
        layout = self.layout.with_dims(*self.layout.dims, *[()] * len(sizes))
        return type(self)(local, (*self.names, *sizes), layout, self.mesh)

    def relayout_plan(self, split: NamedSplit) -> RelayoutPlan | ReshardPlan:
        """Return the plan of `relayout`: collectives along axes, or one exchange where the order of axes forbids
        these.
        """
        target = layout_of(self.names, split, self.mesh)
        target.shard_shape(self.shape)
        if is_legal(self.mesh.grid, self.layout.dims, target.dims):
            return RelayoutPlan(self.layout, target, name="relayout")
        return ReshardPlan(self.layout, target, self.shape, name="relayout")

    def relayout(self: Self, split: NamedSplit) -> Self:
        """Return the tensor in another split; any split can become any other."""
        plan = self.relayout_plan(split)
        if isinstance(plan, RelayoutPlan):
            local = reduce(self.local, plan, self.mesh)
        else:
            local = resharded(self.local, plan, self.mesh, self.mesh)
        return type(self)(local, self.names, plan.target, self.mesh)

    def to(self: Self, mesh: GridLike, split: NamedSplit) -> Self:
        """Return the tensor on another grid of the same ranks; see `ndtp.reshard`."""
        target = layout_of(self.names, split, mesh)
        target.shard_shape(self.shape)
        plan = ReshardPlan(self.layout, target, self.shape, target_ranks=seats_of(self.mesh, mesh), name="to")
        return type(self)(resharded(self.local, plan, self.mesh, mesh), self.names, target, mesh)

    def slice_plan(self, where: Mapping[str, slice | int]) -> ReshardPlan:
        """Return the plan of `slice`: each rank receives the part of the window that it wants and lacks."""
        self._check_names(where, "slice")
        start, shape, dims = [], [], []
        for name, size, axes in zip(self.names, self.shape, self.layout.dims, strict=True):
            asked = where.get(name, slice(None))
            first, stop, step = (asked if isinstance(asked, slice) else _one(asked, size, name)).indices(size)
            if step != 1:
                raise LayoutError(f"slice of {self!r}: {name} in steps of {step}; a slice has neighbours, steps of 1")
            start.append(first)
            shape.append(max(stop - first, 0))
            dims.append(axes if isinstance(asked, slice) else ())
        target = self.layout.with_dims(*dims)
        target.shard_shape(shape)
        zeros = (0,) * self.ndim
        return ReshardPlan(self.layout, target, self.shape, tuple(shape), zeros, tuple(start), name="slice")

    def slice(self: Self, **where: slice | int) -> Self:
        """A part of the tensor: `x.slice(m=slice(4, 8), b=0)`.  A number takes the dim away.

        Dims stay split as they are; elements go where the new blocks lie.

        Raises:
            LayoutError: a name that is not there, a step, or a size that the dim's axes do not divide.
        """
        local = resharded(self.local, self.slice_plan(where), self.mesh, self.mesh)
        gone = [dim for dim, name in enumerate(self.names) if isinstance(where.get(name), int)]
        kept = [dim for dim in range(self.ndim) if dim not in gone]
        layout = self.layout.with_dims(*(self.layout.dims[dim] for dim in kept))
        return type(self)(local.squeeze(gone), [self.names[dim] for dim in kept], layout, self.mesh)

    def _like(self: Self, local: Tensor) -> Self:
        if local.shape != self.local.shape:
            raise LayoutError(
                f"{self!r}: a function of elements gave {tuple(local.shape)} for a shard of {tuple(self.local.shape)}"
            )
        return type(self)(local, self.names, self.layout, self.mesh)

    def _check_names(self, names: Any, what: str) -> None:
        for name in names:
            if name not in self.names:
                raise LayoutError(f"{what} of {self!r}: no dim is called {name!r}; dims: {', '.join(self.names)}")


def layout_of(names: Sequence[str], split: NamedSplit, mesh: GridLike) -> Layout:
    """A layout of dims by their names.

    Raises:
        LayoutError: a name or an axis that is not there.
    """
    for name in split:
        if name not in names:
            raise LayoutError(f"Mapped '{' '.join(names)}': {dict(split)} splits {name!r}, which is none of its dims")
    return Layout(mesh.grid, *(split.get(name) for name in names))


def _one(index: int, size: int, name: str) -> slice:
    if not -size <= index < size:
        raise LayoutError(f"slice: {name} has the size {size}, and no element {index}")
    return slice(index % size, index % size + 1)

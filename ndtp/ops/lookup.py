"""`look_up`: the rows of a table that is split over a grid, as the hidden states of the layers behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.cached import cached_property
from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import ExchangePlan, RelayoutPlan
from ndtp.algebra.steps import Step
from ndtp.collectives.streams import has_streams
from ndtp.compute.lookup import rows_of
from ndtp.errors import LayoutError, RangeError
from ndtp.ops import compiled_layers
from ndtp.ops.moving import enter, moved, taken, way_of
from ndtp.ops.reductions import reduce, sum_over

if TYPE_CHECKING:
    from ndtp.runtime.grid_like import GridLike

ID_BYTES = 8


@dataclass(frozen=True)
class LookupPlan:
    """The plan of `H[M, K] = table[ids[M]]`.

    Args:
        ids: the layout of the ids, [M].
        table: of the table, [V, K].
        out: of the rows, [M, K].
        name: what errors and profiles call it.

    Ids are gathered over the axes that split the table: each of their ranks looks up its part of all rows.  Where that
    is features, the rows then go where they are wanted; where it is rows of the table, they are sums of which a rank
    has one part, too.

    Raises:
        LayoutError: ids that are gathered over an axis which is not the minor one, or rows that cannot go there.
    """

    ids: Layout
    table: Layout
    out: Layout
    name: str = "embedding"

    def __post_init__(self) -> None:
        self.gather, self.rows  # noqa: B018  # they check

    @cached_property
    def held(self) -> Layout:
        """The layout of the table while rows are looked up."""
        kept = tuple(axis for axis in self.ids.dims[0] if axis not in self.table.axes)
        return Layout(self.ids.grid, kept, self.table.dims[1])

    @cached_property
    def gather(self) -> RelayoutPlan:
        """The relayout that gathers the ids."""
        return RelayoutPlan(self.ids, Layout(self.ids.grid, self.held.dims[0]), name=self.name)

    @cached_property
    def exchange(self) -> tuple[tuple[str, ...], ...]:
        """Axes of features that go to rows all together, in the order of the table and in that of the grid; or none."""
        grid, found = self.ids.grid, self.held
        before, after = (grid.nontrivial(layout.dims[0]) for layout in (found, self.out))
        stay, split = (grid.nontrivial(layout.dims[1]) for layout in (self.out, found))
        leaving, arriving = split[len(stay) :], after[len(before) :]
        in_order = tuple(axis for axis in grid if axis in leaving)
        if (
            len(leaving) > 1
            and not grid.nontrivial(self.table.dims[0])
            and (split[: len(stay)], after[: len(before)]) == (stay, before)
            and arriving == in_order
        ):
            return leaving, in_order
        return ()

    @cached_property
    def rows(self) -> RelayoutPlan:
        """The relayout of the rows that were found; their columns are in the order of the grid where all axes of
        features move.
        """
        if self.exchange:
            stay = self.out.dims[1]
            source = self.held.with_dims(self.held.dims[0], (*stay, *self.exchange[1]))
            return ExchangePlan(source, self.out, name=self.name, kind="activations")
        return RelayoutPlan(self.held, self.out, self.table.dims[0], name=self.name, kind="activations")

    @cached_property
    def parameter(self) -> RelayoutPlan:
        """The relayout of the table's gradient, since each rank uses the table for rows of its own."""
        used = self.ids.grid.nontrivial(self.held.dims[0])
        return RelayoutPlan(self.table, self.table, (), used, self.name, "weights")

    @cached_property
    def check(self) -> tuple[Step, ...]:
        """The steps that sum the number of ids that are out of range."""
        axes = [axis for axis in self.ids.grid.nontrivial(self.ids.grid.names) if axis in self.held.dims[0]]
        return (Step("all_reduce", tuple(axes)),) if axes else ()


def look_up(
    ids: Tensor,
    table: Tensor,
    plan: LookupPlan,
    mesh: GridLike,
    size: int,
    padding_idx: int | None = None,
    checks: bool = True,
) -> Tensor:
    """Rows of a table, one an id.

        ids      [M / dp]               this rank's shard of ids[M_dp]
        table    [V, K / (x y z)]       of table[V, K_xyz]
        returns  [M / (dp z y), K / x]  of H[M_(dp z y), K_x]

        forward  H = A2A_zy( table[ids] )        wgrad  dtable = AR_dp( rows of A2A_zy(dH), by ids ), late

    Shapes are those of a table whose features are split over everything.  In the layout of a head, table[V_y, K_xz],
    each rank finds the rows that it has, and these are summed over y: H = RS_y( A2A_z( .. ) ).

    Args:
        size: the number of the table's rows that are no padding.
        padding_idx: a row that gets no gradient.
        checks: whether ids are looked at before they are used.

    Raises:
        LayoutError: ids that do not divide.
        RangeError: ids that are no row of the table; the same on every rank, wherever they are.  On a GPU, where
            looking at them would have the host wait, the device asserts it.
    """
    is_compiling = torch.compiler.is_compiling()
    enter(mesh, plan, table)
    if ids.is_floating_point() or ids.dim() != 1:
        raise LayoutError(f"'{plan.name}': ids are {ids.dtype}, {tuple(ids.shape)}; they are whole numbers, one a row")
    shape = plan.gather.global_shape(ids.shape)
    plan.out.shard_shape((*shape, plan.out.num_splits(1)))
    if is_compiling:
        ids = reduce(ids.long(), plan.gather, mesh)
        if checks:
            axes, wrong = plan.ids.grid.nontrivial(plan.held.dims[0]), ((ids < 0) | (ids >= size)).sum().view(1)
            wrong = sum_over(wrong, Layout(plan.ids.grid, None), axes, mesh, plan.name) if axes else wrong
            compiled_layers.check_rows(wrong[0], f"Embedding '{plan.name}': ids that are no row of the table")
    else:
        ids = moved(ids.long(), plan.gather.steps, mesh, plan.name, "forward")
    if checks and not is_compiling:
        wrong = moved(((ids < 0) | (ids >= size)).sum().view(1), plan.check, mesh, plan.name, "forward")
        if has_streams(wrong.device.type):  # where looking would have the host wait
            compiled_layers.check_rows(wrong, f"Embedding '{plan.name}': ids that are no row of the table")
        elif not wrong.is_meta and int(wrong):
            raise RangeError(
                f"Embedding '{plan.name}': {int(wrong)} of {shape[0]} ids are not among the {size} rows of the table\n"
                f"  fix: ids from 0 to {size - 1}"
            )
    table = (compiled_layers.taken if is_compiling else taken)(table, plan.parameter, mesh)
    start = mesh.grid.index(mesh.rank, plan.table.dims[0]) * table.shape[0]
    return _in_order(reduce(rows_of(table, ids, start, padding_idx), plan.rows, mesh), plan, mesh)


def bound_look_up(
    ids: Tensor, shard: Tensor, plan: LookupPlan, mesh: GridLike, size: int
) -> Callable[..., Tensor] | None:
    """Return `look_up` of few ids of one shape, without gradients: a function of ids and of this rank's shard.

    Returns:
        None where ids move, or where torch does not tell by itself, on every rank, that there is no such row.
    """
    is_whole = plan.table.num_splits(0) == 1 and shard.shape[0] == size and ids.device.type == "cpu"
    if plan.gather.steps or plan.check or not is_whole or ids.dtype not in (torch.int64, torch.int32):
        return None
    late, steps = mesh.step.late, plan.rows.steps
    way = way_of(F.embedding(ids, shard), steps, mesh, plan.name, "forward") if steps else None

    def rows(ids: Tensor, shard: Tensor) -> Tensor:
        late.enter()
        try:
            found = torch.embedding(shard, ids)
        except IndexError:
            return look_up(ids, shard, plan, mesh, size)  # which says where and what
        return _in_order(found if way is None else way.carried(found), plan, mesh)

    return rows


def _in_order(rows: Tensor, plan: LookupPlan, mesh: GridLike) -> Tensor:
    """Put columns, which came in the order of the ranks that sent them, in the order of the features."""
    if not plan.exchange or plan.exchange[0] == plan.exchange[1]:
        return rows
    stored, sent = plan.exchange
    blocks = rows.unflatten(1, (*(mesh.grid[axis] for axis in sent), -1))
    order = [1 + sent.index(axis) for axis in stored]
    return blocks.permute(0, *order, blocks.dim() - 1).flatten(1)

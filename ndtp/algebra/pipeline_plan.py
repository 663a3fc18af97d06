"""`PipelinePlan`: stages of a model on grids of their own ranks, and what moves from one to the next.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.resharding import ReshardPlan
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.volume import Traffic, Volume
from ndtp.algebra.wire import Wire, message_bytes
from ndtp.dtypes import Dtype, name_of, size_of
from ndtp.errors import GridError, LayoutError

AXIS = "pp"  # what traffic between stages is called
PASSED = {"forward": "activations", "dgrad": "activation_gradients"}  # the kind of what passes between stages
Shape = tuple[int, ...]


@dataclass(frozen=True)
class PipelinePlan:
    """Stages one behind the other, each on a grid of any shape, and the exact moves between them.

    What a stage gives lies on its grid as its output layout says; the next one takes it as its own input layout says,
    on a grid of other ranks, as many or not.  Each rank receives every element of its shard once, from a rank that has
    it, and replicas share the sending: `crossings` say who sends what to whom.  Gradients go the same way back.

    Args:
        grids: of the stages, in order.
        shape: the global shape of what passes from stage to stage, of one micro-batch: [rows, features].  Or one shape
            for each stage, where their grids pad it differently: what is added is zeros, what is cut off padding.
        scheme: of the activations, see `ndtp.nn.MLP`; one for all stages, or one for each.
        layouts: (input, output) of each stage instead.
        ranks: torch's ranks of each stage's grid, in its order.  Two stages have the same ranks, or none in common.
            Default: the next ones that are free, stage by stage.
        groups: into so many sets of ranks, where that is fewer than stages: stage i is on set i % groups, for
            interleaved schedules.  Default: as many as there are stages.

    Raises:
        GridError: ranks that stages share in part, or that are not as many as a grid has, or descend along an axis.
        LayoutError: a layout of another grid, or of a tensor of other dims, or shapes that its axes do not divide.
    """

    grids: Sequence[Grid]
    shape: Shape | Sequence[Shape]
    scheme: str | Sequence[str] = "3d"
    layouts: Sequence[tuple[Layout, Layout]] | None = None
    ranks: Sequence[Sequence[int]] | None = None
    groups: int | None = None

    def __post_init__(self) -> None:
        count = len(self.grids)
        if count < 1:
            raise GridError("pipeline: no stages\n  fix: one grid for each, grids=[...]")
        schemes = [self.scheme] * count if isinstance(self.scheme, str) else list(self.scheme)
        shapes: list[Any] = list(self.shape)
        if all(isinstance(size, int) for size in shapes):
            shapes = [tuple(shapes)] * count
        layouts = self.layouts
        if layouts is None:
            blocks = [block_layouts(grid, scheme) for grid, scheme in zip(self.grids, schemes, strict=False)]
            layouts = [(block.input, block.output) for block in blocks]
        for what, given in (("scheme", schemes), ("shape", shapes), ("layouts", layouts), ("ranks", self.ranks)):
            if given is not None and len(given) != count:
                raise LayoutError(f"pipeline: {count} stages and {len(given)} of {what}\n  fix: one for each stage")
        for name, value in (
            ("grids", tuple(self.grids)),
            ("shape", tuple(map(tuple, shapes))),
            ("scheme", tuple(schemes)),
            ("layouts", tuple(map(tuple, layouts))),
            ("ranks", tuple(tuple(map(int, each)) for each in self._placed())),
        ):
            object.__setattr__(self, name, value)
        self._check()
        _ = self.crossings  # whose own checks come here, under `python -O`, too

    def _placed(self) -> Sequence[Sequence[int]]:
        if self.ranks is not None:
            return self.ranks
        groups = len(self.grids) if self.groups is None else self.groups
        if groups < 1 or len(self.grids) % groups:
            raise GridError(f"pipeline: {len(self.grids)} stages on groups={groups} sets of ranks, as many on each")
        found: list[range] = []
        for i, grid in enumerate(self.grids):
            if i < groups:
                first = found[-1].stop if found else 0
                found.append(range(first, first + grid.num_ranks))
            else:
                found.append(found[i % groups])
        return found

    def _check(self) -> None:
        for i, (grid, ranks) in enumerate(zip(self.grids, self.ranks_of, strict=True)):
            if len(ranks) != grid.num_ranks or len(set(ranks)) != len(ranks):
                raise GridError(
                    f"pipeline: stage {i} on grid {grid} has {grid.num_ranks} ranks, not {_some(ranks)}\n"
                    "  fix: a rank for each place of the grid, all different"
                )
            for axis in grid:
                lines = ([ranks[each] for each in grid.group(place, (axis,))] for place in range(len(ranks)))
                if any(line != sorted(line) for line in lines):
                    raise GridError(
                        f"pipeline: stage {i} has ranks {_some(ranks)}, which descend along axis {axis} of grid "
                        f"{grid}; torch's groups order them ascending\n  fix: ranks that ascend along every axis"
                    )
            for j in range(i):
                common = set(ranks) & set(self.ranks_of[j])
                if common and common != set(ranks) | set(self.ranks_of[j]):
                    raise GridError(
                        f"pipeline: stages {j} and {i} share ranks {_some(sorted(common))}, and have others beside: "
                        f"{_some(self.ranks_of[j])} and {_some(ranks)}\n"
                        "  fix: the same ranks for both, in a schedule that gives a rank several stages, or none twice"
                    )
        for i, (grid, shape) in enumerate(zip(self.grids, self.shapes, strict=True)):
            for what, layout in zip(("takes", "gives"), self.stage_layouts[i], strict=True):
                ends = (what == "takes" and i == 0) or (what == "gives" and i == len(self.grids) - 1)
                if layout.grid != grid:
                    raise LayoutError(
                        f"pipeline: stage {i} is on grid {grid}; what it {what}, {layout}, on {layout.grid}"
                    )
                if ends:
                    continue
                try:
                    layout.shard_shape(shape)
                except LayoutError as error:
                    raise LayoutError(f"pipeline: what stage {i} {what}, {shape} as {layout}: {error}") from None

    # ---------------------------------------------------------------------------------------------------- what it says

    @property
    def num_stages(self) -> int:
        return len(self.grids)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of the hidden states on each stage, with the stage's padding."""
        return self.shape  # type: ignore[return-value]

    @property
    def stage_layouts(self) -> tuple[tuple[Layout, Layout], ...]:
        return self.layouts  # type: ignore[return-value]

    @property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        return self.ranks  # type: ignore[return-value]

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The set of ranks that each stage runs on, numbered in order of appearance: torch's schedules call this
        number a rank.
        """
        order: dict[frozenset[int], int] = {}
        return tuple(order.setdefault(frozenset(ranks), len(order)) for ranks in self.ranks_of)

    @property
    def all_ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for ranks in self.ranks_of for rank in ranks}))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank has a part of."""
        return tuple(i for i, ranks in enumerate(self.ranks_of) if rank in ranks)

    @cached_property
    def crossings(self) -> tuple[ReshardPlan, ...]:
        """The moves of hidden states from each stage, the last one excepted, to the next stage.

        Between stages on the same ranks what a rank holds already stays, as ever.
        """
        return tuple(
            ReshardPlan(
                self.stage_layouts[i][1], self.stage_layouts[i + 1][0], self.shapes[i], self.shapes[i + 1],
                ranks=self.ranks_of[i], target_ranks=self.ranks_of[i + 1], name=f"stage {i} to {i + 1}",
            )
            for i in range(self.num_stages - 1)
        )  # fmt: skip

    def volume(
        self, rank: int, micro_batches: int, dgrad: bool = True, dtype: Dtype = "float32", wire: Wire | None = None
    ) -> Volume:
        """The exact traffic between stages in a step, in bytes that `rank` receives.

        Args:
            dgrad: whether gradients go back.
            dtype: of what passes.
            wire: as which it travels.
        """
        found = []
        for plan in self.crossings:
            for phase, way in (("forward", plan), ("dgrad", plan.back))[: 1 + dgrad]:
                form, itemsize = None if wire is None else wire.format(PASSED[phase]), size_of(dtype)
                shapes = [[stop - start for start, stop in message.box] for message in way.receives(rank)]
                num_bytes = micro_batches * sum(message_bytes(shape, itemsize, form) for shape in shapes)
                count, calls = micro_batches * way.received(rank), micro_batches * len(shapes)
                name = name_of(dtype) if form is None or num_bytes == count * itemsize else form.name
                found.append(Traffic(phase, "receive", (AXIS,), num_bytes, count, way.name, name, calls))
        return Volume.of(found)

    def bubble(self, micro_batches: int) -> float:
        """The part of a step in which a rank waits for others: (G - 1) / (M + G - 1), for G stages and M micro-batches.

        Where every set of ranks has v stages in turns (interleaved), (G - 1) / (v M + G - 1).

        Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "Efficient large-scale language model training
        on GPU clusters using Megatron-LM", SC 2021.
        """
        groups = max(self.places) + 1
        return (groups - 1) / (micro_batches * (self.num_stages // groups) + groups - 1)

    def rows(self, whole: Any, micro_batches: int, layout: Layout, rank: int) -> list[Any]:
        """A rank's part of every micro-batch of a batch, in the order in which torch's schedules cut it.

        A micro-batch is a part of the batch's dim 0, and a tensor like any other, split as `layout` says.

        Args:
            whole: the batch, a NumPy array or a torch tensor; dims that `layout` does not name are whole.
            layout: on the grid of a stage.
            rank: on that grid.

        Raises:
            LayoutError: a batch that does not divide into micro-batches, or these not as `layout` says.
        """
        count = len(whole)
        if micro_batches < 1 or count % micro_batches:
            raise LayoutError(
                f"pipeline: {micro_batches} micro-batches do not divide a batch of {count}\n"
                f"  fix: a batch of {-(-count // max(micro_batches, 1)) * max(micro_batches, 1)}"
            )
        each, rest = count // micro_batches, whole.shape[layout.ndim :]
        shape = (each, *whole.shape[1 : layout.ndim])
        part = (*layout.slices(rank, shape), *[slice(None)] * len(rest))
        return [whole[i * each : (i + 1) * each][part] for i in range(micro_batches)]

    def __str__(self) -> str:
        return "; ".join(
            f"stage {i}: {grid} on ranks {_some(ranks)}, {layouts[0]} -> {layouts[1]}"
            for i, (grid, ranks, layouts) in enumerate(zip(self.grids, self.ranks_of, self.stage_layouts, strict=True))
        )


def _some(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{min(ranks)} to {max(ranks)} ({len(ranks)} of them)"

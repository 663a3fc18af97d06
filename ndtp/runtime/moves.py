"""A tensor on its way through the steps of a relayout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ndtp.algebra.steps import Step
from ndtp.collectives.handles import Route

if TYPE_CHECKING:
    from ndtp.algebra.matmul_plan import MatMulPlan
    from ndtp.collectives.collectives import Collectives
    from ndtp.collectives.handles import Handle, Shape


Feed = Callable[[Tensor, Route, int], Tensor]


class Cut(NamedTuple):
    """A step that takes this rank's part of a dim."""

    dim: int
    start: int
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(*self)


class Transposed:
    """A step from a matrix to its transpose, which is a view."""

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.mT


class Way:
    """The steps of a tensor, bound to its shape.

    The operands and results of a product of matrices go by columns without a copy: an operand that is gathered along
    its last dim arrives as blocks of columns [p, rows, columns / p], and a result that is scattered along it leaves so.
    Where no product takes blocks, the columns of a weight and of its gradient go as the rows of their transposes, whose
    parts are in line as they come.

    Args:
        op: what errors and profiles call it, such as ("mlp.up", "A").
        phase: "forward", "dgrad" or "wgrad".
        shape: of the tensor before the first step, whole: not as blocks.
        part: which chunk of how many, such as "2/4", for profiles.
        blocks: "arrive" or "leave" if the tensor does, where its last step or first step is such; "transpose" if its
            columns go as rows.
        kind: for the wire; default: what `op` says, see `ndtp.algebra.wire.KINDS`.

    Attributes:
        legs: cuts, transposes and collectives; a step may take several of these.
        last_route: the place of the last collective among the legs; -1 if there is none.
        shape: of the tensor after the last leg.
        is_coded: whether it travels by a codec, so that what arrives of this rank's own part is another than the part.
        feeds_back: whether what rounding takes from a gradient on its way is added to the next one.
        is_one_sum: whether it is one all-reduce, whose result has the shape of the tensor.
        gathers_in_order: whether it is one gather, whose parts lie behind one another in its result.
    """

    def __init__(
        self,
        collectives: Collectives,
        steps: Sequence[Step],
        op: tuple[str, ...],
        phase: str,
        shape: Shape,
        dtype: torch.dtype,
        *,
        part: str = "",
        blocks: str = "",
        kind: str = "",
    ) -> None:
        self.collectives, self.steps, self.blocks = collectives, tuple(steps), blocks
        self.op, self.phase, self.kind = op, phase, kind
        grid, rank = collectives.groups.grid, collectives.groups.rank
        legs: list[Cut | Transposed | Route] = []
        for i, step in enumerate(steps):
            dim, ranks = step.dim or 0, grid.size(step.axes)
            if step.kind == "slice":
                cut = Cut(dim, grid.index(rank, step.axes) * (shape[dim] // ranks), shape[dim] // ranks)
                shape = (*shape[:dim], cut.size, *shape[dim + 1 :])
                legs.append(cut)
                continue
            if blocks == "transpose" and (gathers_columns(step) or scatters_columns(step)):
                transposed = collectives.routes(
                    replace(step, dim=0), op, phase, shape[::-1], dtype, part=part, kind=kind
                )
                legs += [Transposed(), *transposed, Transposed()]
                shape = transposed[-1].shape[::-1]
                continue
            leaves = blocks == "leave" and i == 0 and scatters_columns(step)
            arrives = blocks == "arrive" and i + 1 == len(steps) and gathers_columns(step)
            given = (ranks, shape[0], shape[1] // ranks) if leaves else shape
            legs += collectives.routes(step, op, phase, given, dtype, part=part, blocks=leaves or arrives, kind=kind)
            shape = legs[-1].shape  # type: ignore[union-attr]
        self.legs, self.shape = tuple(legs), shape
        routes = [(i, leg) for i, leg in enumerate(legs) if isinstance(leg, Route)]
        self.last_route, self.takes_several = routes[-1][0] if routes else -1, len(routes) > 1
        self.is_coded = any(leg.codec is not None for _, leg in routes)
        arrives = blocks == "arrive" and len(steps) == 1 and gathers_columns(steps[0])
        in_order = len(steps) == 1 and steps[0].kind == "all_gather" and (arrives or not steps[0].dim)
        self.gathers_in_order = in_order and not self.is_coded
        self.is_one_sum = len(legs) == 1 == len(routes) and routes[0][1].kind == "all_reduce" and not self.is_coded
        wire = collectives.wire
        self.feeds_back = wire is not None and wire.error_feedback and self.is_coded
        last = legs[-1] if legs else None
        if isinstance(last, Route) and collectives.keeps(last) and (arrives or not steps[-1].dim):
            last.keeps_code = True

    def is_like(self, other: Way) -> bool:
        """Return whether a tensor that goes this way arrives as if it had gone the other way."""
        return self.steps == other.steps and self.blocks == other.blocks

    def __str__(self) -> str:
        return ", ".join(
            f"{leg.kind}[{' '.join(leg.axes)}]" if isinstance(leg, Route) else "a copy"
            for leg in self.legs
            if not isinstance(leg, Transposed)
        )

    def start(self, tensor: Tensor, *, ahead: bool = False) -> Move:
        return Move(self, tensor, ahead=ahead).start()

    def carried(self, tensor: Tensor, is_own: bool = False) -> Tensor:
        """Return a tensor at the end of the way, where nothing is done meanwhile.

        Args:
            is_own: whether the tensor is needed no more, so that an all-reduce may leave its sum there; contiguous.
        """
        run = self.collectives.run
        if is_own and self.is_one_sum:
            return run(self.legs[0], tensor, tensor)  # type: ignore[arg-type]
        for leg in self.legs:
            tensor = run(leg, tensor) if isinstance(leg, Route) else leg.of(tensor)
        return tensor


class Move:
    """`start` sends a tensor off as far as it goes without waiting; `wait` brings it home.

    Args:
        out: where the last leg puts its result.
        hold: stop before an all-reduce, until `release_hold`.
        ahead: it is started for a product yet to come.
        feed: what each of its collectives sends, see `ndtp.runtime.residuals`.
    """

    __slots__ = ("_ahead", "_taken", "feed", "handle", "hold", "out", "tensor", "way")

    def __init__(
        self,
        way: Way,
        tensor: Tensor,
        out: Tensor | None = None,
        hold: bool = False,
        ahead: bool = False,
        feed: Feed | None = None,
    ) -> None:
        self.feed = feed
        self.tensor: Tensor | None = tensor
        self.way, self.out, self.hold, self._ahead = way, out, hold, ahead
        self._taken = 0
        self.handle: Handle | None = None

    def start(self) -> Move:
        """Take the local steps and start the first collective."""
        legs = self.way.legs
        while self.handle is None and self._taken < len(legs) and not self.is_held:
            leg, tensor = legs[self._taken], self.tensor
            assert tensor is not None
            self._taken += 1
            out = self.out if self._taken == len(legs) else None
            if not isinstance(leg, Route):
                self.tensor = leg.of(tensor) if out is None else out.copy_(leg.of(tensor))
            else:
                self.tensor = None  # the collective holds what it needs of it
                if self.feed is not None:
                    tensor = self.feed(tensor, leg, self._taken)
                self.handle = self.way.collectives.launch(leg, tensor, out, self._ahead)
                self._ahead = False  # further ones follow where it is waited for
        return self

    def wait(self) -> Tensor:
        """Run all steps that are left, up to one that is held back, and return the tensor."""
        while self.start().handle is not None:
            handle, self.handle = self.handle, None
            self.tensor = handle.wait()  # type: ignore[union-attr]
        assert self.tensor is not None
        return self.tensor

    def start_next(self) -> None:
        """Wait for the collective under way and start the next one, if there is one and it is not held back."""
        if self.handle is not None and self._taken <= self.way.last_route:
            handle, self.handle = self.handle, None
            self.tensor = handle.wait()
            self.start()

    @property
    def is_under_way(self) -> bool:
        """Whether the move waits for a collective, or is held back."""
        return self.handle is not None or self.is_held

    @property
    def is_held(self) -> bool:
        """Whether the next step is an all-reduce that is held back."""
        if not self.hold or self._taken == len(self.way.legs):
            return False
        leg = self.way.legs[self._taken]
        return isinstance(leg, Route) and leg.kind == "all_reduce" and not leg.follows

    @property
    def held_steps(self) -> tuple[Step, ...]:
        """The all-reduce that is held back, and the steps behind it."""
        steps = self.way.steps
        return steps[next(i for i, step in enumerate(steps) if step.kind == "all_reduce") :]

    def rest_of(self, part: Tensor) -> Move:
        """Return the move of a part of what is held back, from here on."""
        way, shape = self.way, tuple(part.shape)
        rest = Way(way.collectives, self.held_steps, way.op, way.phase, shape, part.dtype, kind=way.kind)
        return Move(rest, part, hold=True)

    def add(self, other: Tensor, dtype: torch.dtype | None = None) -> None:
        """Add to what is held back; the sum is rounded to `dtype`, if there is one."""
        total = self.wait() + other
        self.tensor = total if dtype is None else total.to(dtype)

    def take(self) -> Tensor:
        """`wait`, and keep no reference to the result: who gets it may be the only one to have it."""
        tensor, self.tensor = self.wait(), None
        return tensor

    def resume(self, tensor: Tensor) -> Move:
        """Go on with another tensor from where `take` left off."""
        self.tensor = tensor
        return self

    def release_hold(self) -> Move:
        self.hold = False
        return self


class Pieces(Move):
    """A gradient on its way in pieces of rows, each of which lands where it belongs in the whole.

    Args:
        is_deferred: pieces that go nowhere are yet to be multiplied.
    """

    __slots__ = ("is_deferred", "moves")

    def __init__(self, whole: Tensor, is_deferred: bool = False) -> None:
        self.moves: list[Move] = []
        self.is_deferred = is_deferred
        self.tensor, self.hold, self.handle, self.feed = whole, False, None, None

    def add_piece(self, way: Way, piece: Tensor, rows: slice) -> None:
        assert self.tensor is not None
        self.moves.append(Move(way, piece, self.tensor[rows]).start())
        self.handle = self.moves[0].handle

    @property
    def is_under_way(self) -> bool:
        return self.is_deferred or super().is_under_way

    def wait(self) -> Tensor:
        self.start_next()
        for move in self.moves:
            move.wait()
        self.handle = None
        assert self.tensor is not None
        return self.tensor

    def start_next(self) -> None:
        for move in self.moves:
            move.start_next()


def is_matrix(plan: MatMulPlan) -> bool:
    """Return whether a product has no batch dims."""
    return len(plan.c_letters) == 2


def gathers_columns(step: Step) -> bool:
    """Return whether a step of a matrix is a gather along its last dim."""
    return step.kind == "all_gather" and step.dim == 1


def scatters_columns(step: Step) -> bool:
    """Return whether a step of a matrix is a reduce-scatter along its last dim."""
    return step.kind == "reduce_scatter" and step.dim == 1


def blocks_of_result(plan: MatMulPlan, name: str) -> int:
    """Return the number of blocks of columns into which a product falls for the scatter that follows it."""
    steps = plan.relayouts[name]
    return plan.grid.size(steps[0].axes) if is_matrix(plan) and steps and scatters_columns(steps[0]) else 1

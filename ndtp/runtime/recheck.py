"""`Recheck`: one in so many products is computed again by another rank, from the same operands.

A processor that computes wrong in silence is found by comparing what it gives with what another one gives.  Each rank
keeps a product of its own now and then: operands and result.  At the end of the chain of products it hands them to
the next rank, which computes the product anew.  Results that differ by more than rounding are compared with the product
in double precision, which tells who of the two is wrong.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from ndtp.algebra.grid import Grid
from ndtp.collectives.backends import backend_of
from ndtp.collectives.cross_check import gather_texts
from ndtp.collectives.labels import ASIDE, LABEL, Label
from ndtp.collectives.watch import Watch
from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.errors import CorruptionError, GridError

if TYPE_CHECKING:
    from ndtp.collectives.axis_groups import AxisGroups

aten = torch.ops.aten
# Products by the operations of torch that give them: how many of their arguments are operands, and how to multiply.
PRODUCTS: dict[Any, tuple[str, int]] = {
    **dict.fromkeys((aten.mm.default, aten.mm.out), ("mm", 2)),
    **dict.fromkeys((aten.bmm.default, aten.bmm.out), ("bmm", 2)),
    **dict.fromkeys((aten.addmm.default, aten.addmm.out, aten.addmm_.default), ("addmm", 3)),
    **dict.fromkeys((aten.baddbmm.default, aten.baddbmm.out, aten.baddbmm_.default), ("baddbmm", 3)),
}
PHASES = {"dA": "dgrad", "dB": "wgrad"}  # of results; others belong to forward
_TAG = 2**28  # below those of `ndtp.collectives.conversation`
_SLACK = 8.0  # times the rounding of a sum in the worst order


class Sample(NamedTuple):
    """A product that a rank has kept: the operation, what it belongs to, its operands and its result."""

    operation: str
    module: str
    phase: str
    operands: list[Tensor]
    result: Tensor

    def header(self) -> list[Any]:
        """Return what says how the tensors are sent."""
        forms = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in (*self.operands, self.result)]
        return [self.operation, self.module, self.phase, forms]


class Recheck:
    """The state of the probe on one rank of a grid.

    Args:
        groups: of the grid.
        fraction: of all products, that are computed again; from 0, none, to 1, all.

    Attributes:
        products: how many of ndtp's products have run, counted alike on all ranks.
        checked: how many products of other ranks this one has computed again.
        received_bytes: of their operands and results.
        seconds: what it took.
    """

    def __init__(self, groups: AxisGroups, fraction: float) -> None:
        self.groups, self.fraction = groups, fraction
        self.products = self.checked = self.received_bytes = 0
        self.seconds = 0.0
        self._draw = random.Random(groups.rank)  # each rank keeps what it draws itself
        self._found: dict[int, int] = {}  # how many products there were in a chain, by its own count

    def __str__(self) -> str:
        return (
            f"computed {self.checked} products of another rank again, in a run of {self.products}: "
            f"{self.received_bytes} bytes received, {self.seconds:.3g} s"
        )

    def due(self, products: int) -> int:
        """Count the products of a chain that is about to run; how many of them are to be kept, the same on every rank.

        Args:
            products: as all ranks count them.
        """
        before, self.products = self.products, self.products + products
        return int(self.products * self.fraction) - int(before * self.fraction)

    @contextmanager
    def looking(self, wanted: int, products: int) -> Iterator[Looking]:
        """Keep some of the products inside, and have them computed again at the end.  A collective of the grid.

        Raises:
            CorruptionError: on every rank; names the one that was wrong, the module and the phase.
        """
        begin = time.perf_counter()
        number = self._found.get(products, products)
        keep = range(2**31) if self.fraction >= 1 else set(self._draw.sample(range(number), min(wanted, number)))
        with Looking(keep) as look:
            yield look
        self._found[products] = max(look.count, 1)
        try:
            self._compare(look.samples)
        finally:
            self.seconds += time.perf_counter() - begin

    # ---------------------------------------------------------------------------------------------------- with others

    def _compare(self, samples: Sequence[Sample]) -> None:
        grid, global_ranks = self.groups.grid, self.groups.global_ranks
        axes = grid.nontrivial(grid.names)
        group = self.groups.group(axes)
        members = dist.get_process_group_ranks(group)
        label = Label(("recheck",), "check", "exchange", axes)

        def said_by_all(mine: object) -> dict[int, Any]:
            texts = gather_texts(group, self.groups.device_type, json.dumps(mine), self.groups.describe, label)
            return {rank: json.loads(text) for rank, text in zip(members, texts, strict=True)}

        token = LABEL.set(ASIDE)
        try:
            headers = said_by_all([each.header() for each in samples])
            order = sorted(members)
            me = order.index(dist.get_rank())
            before, after = order[me - 1], order[(me + 1) % len(order)]
            received: list[Sample] = []
            with Watch(self.groups.describe, label, members):
                for turn in range(max(map(len, headers.values()))):
                    theirs = headers[before][turn : turn + 1]
                    received += _passed_on(
                        group, samples[turn : turn + 1], theirs, before, after, self.groups.device_type
                    )
            verdicts: list[Any] = []
            for sample in received:
                self.checked += 1
                self.received_bytes += sum(x.nbytes for x in (*sample.operands, sample.result))
                if found := differing(sample):
                    by = dist.get_rank()
                    wrong = [rank for rank, is_wrong in zip((before, by), found[0], strict=True) if is_wrong]
                    verdicts.append([wrong, sample.module, sample.phase, found[1], by])
            every = [each for _, found in sorted(said_by_all(verdicts).items()) for each in found]
        finally:
            LABEL.reset(token)
        if every:
            raise _error(every, grid, [0] if global_ranks is None else global_ranks)


class LookedAt:
    """A multiplier of experts (`ndtp.compute.grouped`), some of whose products are computed again.

    Args:
        module: whose products these are.
    """

    def __init__(self, grouped: Any, recheck: Recheck, module: str) -> None:
        self._by, self._recheck, self._module, self._is_forward = grouped, recheck, module, True

    def grouped(self, x: Tensor, b: Tensor, groups: Any) -> Tensor:
        phase, self._is_forward = "forward" if self._is_forward else "dgrad", False
        return self._look(phase, self._by.grouped, x, b, groups)

    def grouped_outer(self, grad: Tensor, x: Tensor, groups: Any) -> Tensor:
        return self._look("wgrad", self._by.grouped_outer, grad, x, groups)

    def _look(self, phase: str, multiply: Callable[..., Tensor], *operands: object) -> Tensor:
        with looking_at(self._recheck, self._module, phase):
            return multiply(*operands)


@contextmanager
def looking_at(recheck: Recheck | None, module: str, phase: str = "forward") -> Iterator[None]:
    """A product of a module runs inside, on all ranks of the grid."""
    if recheck is None or not (wanted := recheck.due(1)):
        yield
        return
    with recheck.looking(wanted, 1) as look:
        look.title = module, phase
        yield


class Looking(TorchDispatchMode):
    """Keeps products that run inside.

    Args:
        keep: which of them, by their numbers.

    Attributes:
        title: what is running: (module, phase).
        count: of the products so far.
    """

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.keep, self.count, self.samples = keep, 0, list[Sample]()
        self.title = ("", "forward")

    def __torch_dispatch__(
        self, func: TorchFunction, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        known = PRODUCTS.get(func)
        if known is None or not args[0].is_floating_point() or args[0].is_meta:
            return func(*args, **kwargs)
        operation, count = known
        number, self.count = self.count, self.count + 1
        scaled = len(args) > count or kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1
        if number not in self.keep or scaled or not all(x.numel() for x in args[:count]):
            return func(*args, **kwargs)
        operands = [x.clone() for x in args[:count]]  # before: one of them may be what the sum is added to
        result = func(*args, **kwargs)
        self.samples.append(Sample(operation, *self.title, operands, result.clone()))
        return result


def _passed_on(
    group: ProcessGroup, sent: Sequence[Sample], theirs: Sequence[Any], before: int, after: int, device_type: str
) -> list[Sample]:
    """Send this rank's sample to the next one, and receive that of the one before, whose header is known."""
    operations: list[Any] = []
    where = "cpu" if backend_of(group).runs_in_host else device_type
    for sample in sent:
        for x in (*sample.operands, sample.result):
            raw = x.contiguous().flatten().view(torch.uint8).to(where)
            operations.append(dist.P2POp(dist.isend, raw, after, group, _TAG + len(operations)))
    received, first = list[tuple[tuple[str, str, str], list[Tensor]]](), len(operations)
    for operation, module, phase, forms in theirs:
        if operation not in {name for name, _ in PRODUCTS.values()}:
            raise RuntimeError(f"recheck: {operation!r} is no product")
        tensors = [torch.empty(shape, dtype=getattr(torch, name), device=where) for name, shape in forms]
        for x in tensors:
            raw = x.view(-1).view(torch.uint8)
            operations.append(dist.P2POp(dist.irecv, raw, before, group, _TAG + len(operations) - first))
        received.append(((operation, module, phase), tensors))
    works = dist.batch_isend_irecv(operations) if operations else []
    for work in works:
        work.wait()
    moved = [(title, [x.to(device_type) for x in tensors]) for title, tensors in received]
    return [Sample(*title, operands, result) for title, (*operands, result) in moved]


def differing(sample: Sample) -> tuple[tuple[bool, bool], str] | None:
    """Compute a product again: None where it is the same up to rounding.

    Returns:
        Whether the result that came is wrong, and whether the one that was computed here is; and where they differ.
    """
    multiply: Callable[..., Tensor] = getattr(torch, sample.operation)
    again = multiply(*sample.operands)
    if torch.equal(again, sample.result):
        return None
    exact = [x.double() for x in sample.operands]
    expected = multiply(*exact)
    low = sample.result.dtype in (torch.float16, torch.bfloat16)
    reduced = sample.result.is_cuda and torch.backends.cuda.matmul.allow_tf32
    sums = torch.finfo(torch.float32 if low else sample.result.dtype).eps if not reduced else 2.0**-10
    inner = exact[-2].shape[-1]
    size = multiply(*[x.abs() for x in exact])
    rounded = size if low and sample.result.is_cuda else expected.abs()  # GPUs may round parts of a sum
    bound = _SLACK * sums * (inner + 1) * size + 2 * torch.finfo(sample.result.dtype).eps * rounded
    bound += torch.finfo(sample.result.dtype).tiny
    largest = torch.finfo(sample.result.dtype).max
    beyond = ~expected.isfinite() | (size > largest)  # what overflows says nothing

    def is_off(x: Tensor) -> Tensor:
        x = x.double()
        return ~beyond & ~((x - expected).abs() <= bound)

    theirs, mine = is_off(sample.result), is_off(again)
    if not bool(theirs.any() | mine.any()):
        return None
    off = theirs | mine
    place = tuple(int(i) for i in off.nonzero()[0])
    given, made, right = (f"{float(x[place]):.9g}" for x in (sample.result, again, expected))
    where = (
        f"element {place} is {given} there and {made} when computed again, {right} in double precision; "
        f"{int(off.sum())} of {off.numel()} elements differ"
    )
    return (bool(theirs.any()), bool(mine.any())), where


def _error(found: Sequence[Any], grid: Grid, global_ranks: Sequence[int]) -> CorruptionError:
    lines, wrong = [], dict.fromkeys(rank for ranks, *_ in found for rank in ranks)

    def named(rank: int) -> str:
        here = global_ranks.index(rank)
        return f"rank {rank} ({', '.join(f'{axis}={at}' for axis, at in grid.coordinate(here).items())})"

    for ranks, module, phase, where, by in found:
        who = " or ".join(map(named, ranks))
        lines.append(f"a product of {module} ({phase}) by {who}, looked at by rank {by}: {where}")
    error = CorruptionError(
        "silent corruption: " + "\n  ".join(lines) + "\n  fix: go on from an earlier checkpoint without this machine"
    )
    error.ranks, error.module, error.phase = tuple(wrong), found[0][1], found[0][2]
    return error


def recheck_on(groups: AxisGroups, step: Any, fraction: float) -> None:
    """Have a fraction of a grid's products computed again from now on; the same on all ranks.

    Raises:
        GridError: a fraction that is none.
    """
    if not 0 <= fraction <= 1:
        raise GridError(f"recheck={fraction}: it must be a fraction of all products, from 0 to 1, such as 1/1000")
    is_alone = groups.grid.num_ranks == 1 or groups.global_ranks is None or not groups.kind.has_peers
    step.recheck = Recheck(groups, float(fraction)) if fraction and not is_alone else None

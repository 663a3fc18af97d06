"""Every layout of small grids, and random ones of larger: exact forward and backward, or a LayoutError with a fix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from random import Random

import legal
import pytest
from simulate import assert_exact

from ndtp.algebra.binding import bind
from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.errors import LayoutError

Dims = legal.Dims
TRANSPOSES = list(product((False, True), repeat=2))


def shapes(sizes: Mapping[str, int], ta: bool, tb: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes that every layout divides, with M, K and N all different."""
    m, k, n = (factor * prod(sizes.values()) for factor in (1, 2, 3))
    return ((k, m) if ta else (m, k)), ((n, k) if tb else (k, n))


@cache
def exact(plan: MatMulPlan, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    """Once for a plan: fixes lead to the plans of other cases."""
    assert_exact(plan, a_shape, b_shape)


class Case:
    """One product: what the design says of it, and what `MatMulPlan` makes of it."""

    def __init__(
        self,
        grid: Grid,
        a: Dims,
        b: Dims,
        ta: bool = False,
        tb: bool = False,
        out: Dims | None = None,
        roles: Mapping[str, str] | None = None,
        batch: Sequence[int] = (),
        units: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        self.grid, self.roles, self.out, self.units = grid, roles or {}, out, units
        self.batch = list(batch)
        self.arguments = {
            "a": Layout(grid, *a),
            "b": Layout(grid, *b),
            "out": None if out is None else Layout(grid, *out),
            "roles": roles,
            "transpose_a": ta,
            "transpose_b": tb,
        }
        sizes = dict(zip(grid.names, grid.shape, strict=True))
        a_last, b_last = shapes(sizes, ta, tb)
        self.a_shape = (*self._batch_of(a, units[0]), *a_last)
        self.b_shape = (*self._batch_of(b, units[1]), *b_last)
        self.of_a = legal.letters(len(batch), len(a), "km" if ta else "mk", units[0])
        self.of_b = legal.letters(len(batch), len(b), "nk" if tb else "kn", units[1])
        self.of_c = legal.letters(len(batch), len(batch) + 2, "mn")
        self.tensors = {"A": (a, self.of_a), "B": (b, self.of_b)}
        if out is not None:
            self.tensors["C"] = (out, self.of_c)
        self.sizes = sizes
        self.of_axis = legal.roles(sizes, self.tensors["A"], self.tensors["B"], self.roles)
        self.legal = legal.is_legal(sizes, self.of_axis, list(self.tensors.values()))

    def _batch_of(self, dims: Dims, units: Sequence[int]) -> list[int]:
        own = self.batch[len(self.batch) - (len(dims) - 2) :] if len(dims) > 2 else []
        return [1 if dim in units else size for dim, size in enumerate(own)]

    def plan(self, **changes: object) -> MatMulPlan:
        """Plan, and bind to the shards' shapes, so that broadcast dims are found."""
        plan = MatMulPlan(**{**self.arguments, **changes})
        if any(self.units):
            shards = (plan.a.shard_shape(self.a_shape), plan.b.shard_shape(self.b_shape))
            bound, _ = bind(plan, *shards)
            assert bound.out == plan.out and bound.roles == plan.roles
            return bound
        return plan

    def check(self) -> bool:
        """True if the plan is legal and exact, False if it is refused with a fix that works.  Nothing else passes."""
        try:
            plan = self.plan()
        except LayoutError as error:
            assert not self.legal, f"legal by the design, yet refused: {error}"
            self.check_fix(error)
            return False
        exact(plan, tuple(self.a_shape), tuple(self.b_shape))
        if self.legal:  # what is accepted beyond the design's legal set only has to be exact
            self.check_structure(plan)
        return True

    def check_structure(self, plan: MatMulPlan) -> None:
        """Roles, the output layout and the collectives are those that the design's tables name."""
        assert {g: r for g, r in plan.roles.items() if self.sizes[g] > 1} == {
            g: r for g, r in self.of_axis.items() if self.sizes[g] > 1
        }
        if self.out is not None:
            assert plan.out.dims == self.out
        elif not any(self.units):
            expected = legal.mirror(self.sizes, self.of_axis, *self.tensors.values(), self.of_c)
            if expected is not None:
                assert [[g for g in split if self.sizes[g] > 1] for split in plan.out.dims] == expected, plan
        stored = {"A": self.tensors["A"], "B": self.tensors["B"], "C": (plan.out.dims, self.of_c)}
        for tensor, (dims, of) in stored.items():
            for steps, to_product in ((tensor, tensor != "C"), (f"d{tensor}", tensor == "C")):
                expected_moves = legal.table(self.sizes, self.of_axis, (dims, of), to_product)
                found = [(step.kind, axis) for step in plan.relayouts[steps] for axis in step.axes]
                if expected_moves is not None:
                    assert len(found) == len(set(found)) and set(found) == expected_moves, (steps, plan)
                kinds = [step.kind for step in plan.relayouts[steps]]
                if "all_reduce" in kinds and "reduce_scatter" in kinds:
                    assert kinds.index("all_reduce") > max(i for i, k in enumerate(kinds) if k == "reduce_scatter")

    def check_fix(self, error: LayoutError) -> None:
        """Follow the fixes until one is accepted: it must read as a layout, and lead to an exact product."""
        changes: dict[str, object] = {}
        seen = set()
        for _ in range(8):
            found = re.search(r"\n  fix: ([ABC]) as '([^']*)'$", str(error))
            assert found, error
            assert found.group(0) not in seen, f"the fixes go in a circle: {error}"
            seen.add(found.group(0))
            changes[{"A": "a", "B": "b", "C": "out"}[found.group(1)]] = Layout.parse(self.grid, found.group(2))
            try:
                plan = self.plan(**changes)
            except LayoutError as another:
                error = another
                continue
            exact(plan, tuple(self.a_shape), tuple(self.b_shape))
            return
        raise AssertionError(f"no end of fixes: {error}")


def sweep(cases: list[Case]) -> Counter:
    verdicts = Counter(case.check() for case in cases)
    assert verdicts[True] and sum(verdicts.values()) == len(cases)
    return verdicts


TWO_AXES = [Grid(x=2, y=3), Grid(x=3, y=2), Grid(x=2, y=2), Grid(x=1, y=2), Grid(x=3, y=1), Grid(x=1, y=1)]


TRANSPOSED = [*product(TWO_AXES, TRANSPOSES[:1]), *product((TWO_AXES[0], TWO_AXES[4]), TRANSPOSES[1:])]


@pytest.mark.parametrize(("grid", "transposes"), TRANSPOSED, ids=str)
def test_all_layouts_of_two_axes(grid: Grid, transposes: tuple[bool, bool]) -> None:
    layouts = list(legal.all_dims(grid.names, 2))
    assert len(layouts) == 11
    sweep([Case(grid, a, b, *transposes) for a, b in product(layouts, layouts)])


@pytest.mark.parametrize("grid", [Grid(x=2, y=3), Grid(x=2, y=1)], ids=str)
def test_all_output_layouts_of_two_axes(grid: Grid) -> None:
    layouts = list(legal.all_dims(grid.names, 2))
    sweep([Case(grid, a, b, out=out) for a, b, out in product(layouts, layouts, layouts)])


@pytest.mark.parametrize("letters", list(product((None, "m", "n", "k"), repeat=2)), ids=str)
def test_all_role_overrides_of_two_axes(letters: tuple[str | None, str | None]) -> None:
    grid = Grid(x=2, y=3)
    layouts = list(legal.all_dims(grid.names, 2))
    roles = {axis: letter for axis, letter in zip("xy", letters, strict=True) if letter}
    sweep([Case(grid, a, b, roles=roles) for a, b in product(layouts, layouts)])


def test_all_layouts_of_three_axes() -> None:
    grid = Grid(z=2, x=2, y=2)
    layouts = list(legal.all_dims(grid.names, 2))
    assert len(layouts) == 49
    verdicts = sweep([Case(grid, a, b) for a, b in product(layouts, layouts)])
    assert verdicts[False]


@pytest.mark.parametrize("grid", [Grid(x=2, y=3), Grid(x=2, y=1)], ids=str)
def test_all_batched_layouts_of_two_axes(grid: Grid) -> None:
    layouts = list(legal.all_dims(grid.names, 3))
    plain = list(legal.all_dims(grid.names, 2))
    batch = [grid.num_ranks]
    sweep([Case(grid, a, b, batch=batch) for a, b in product(layouts, layouts)])
    sweep([Case(grid, a, b, tb=True, batch=batch) for a, b in product(layouts, plain)])
    sweep([Case(grid, a, b, ta=True, batch=batch) for a, b in product(plain, layouts)])


@pytest.mark.parametrize("units", [((0,), ()), ((), (0,)), ((0,), (0,))], ids=str)
def test_all_broadcast_batch_layouts_of_two_axes(units: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """A batch dim of size 1 in one operand is broadcast; in both it is a batch dim of one product."""
    grid = Grid(x=2, y=3)
    both = all(units)
    a_layouts, b_layouts = (
        [dims for dims in legal.all_dims(grid.names, 3) if not (unit and dims[0])] for unit in units
    )
    cases = []
    for a, b in product(a_layouts, b_layouts):
        case = Case(grid, a, b, batch=[1 if both else grid.num_ranks], units=((), ()) if both else units)
        cases.append(case)
    sweep(cases)


def test_two_batch_dims() -> None:
    grid = Grid(x=2, y=2)
    batch = [4, 4]
    four = [dims for dims in legal.all_dims(grid.names, 4) if sum(map(bool, dims)) != 1 or dims[0] or dims[1]]
    three = list(legal.all_dims(grid.names, 3))
    sweep([Case(grid, a, b, batch=batch) for a, b in product(four, four[::2])])
    sweep([Case(grid, a, b, batch=batch) for a, b in product(four[::2], three)])
    no_first = [dims for dims in four if not dims[0]]
    no_second = [dims for dims in four if not dims[1]]
    sweep([Case(grid, a, b, batch=batch, units=((0,), (1,))) for a, b in product(no_first, no_second)])


# ------------------------------------------------------------------------------------------------------- random


def random_case(rng: Random) -> Case:
    """Random grids of up to four axes and 24 ranks, layouts, batch dims, transposes, outputs and overrides.

    Every dim is a multiple of the number of ranks, so that each batch dim multiplies the work of what is simulated.
    """
    num_batch = rng.choice((0, 0, 0, 1, 1, 2))
    sizes = [0]
    while not 0 < prod(sizes) <= (24, 12, 8)[num_batch]:
        sizes = rng.choices((1, 2, 2, 2, 3, 4), k=rng.randint(1, 4))
    names = rng.sample(("x", "y", "z", "dp"), len(sizes))
    grid = Grid(dict(zip(names, sizes, strict=True)))

    def dims(ndim: int, units: Sequence[int] = ()) -> Dims:
        open_dims = [dim for dim in range(ndim) if dim not in units]
        split: list[list[str]] = [[] for _ in range(ndim)]
        for axis in rng.sample(names, len(names)):
            where = rng.choice((None, *open_dims, *open_dims))
            if where is not None:
                split[where].append(axis)
        return tuple(map(tuple, split))

    whole = prod(sizes)
    batch = [rng.choice((whole, 2 * whole)) if num_batch == 1 else whole for _ in range(num_batch)]
    ndims = [num_batch + 2, rng.randint(2, num_batch + 2)]
    if rng.random() < 0.5:
        ndims.reverse()
    units = [[dim for dim in range(ndim - 2) if rng.random() < 0.25] for ndim in ndims]
    for letter in range(num_batch):  # one operand has the dim in full
        offsets = [letter - (num_batch + 2 - ndim) for ndim in ndims]
        if all(offset < 0 or offset in unit for offset, unit in zip(offsets, units, strict=True)):
            side = next(i for i, offset in enumerate(offsets) if offset >= 0)
            units[side].remove(offsets[side])
    letters = ["m", "n", "k", *(letter for letter in legal.letters(num_batch, num_batch + 2, "mn")[:-2])]
    return Case(
        grid,
        dims(ndims[0], units[0]),
        dims(ndims[1], units[1]),
        rng.random() < 0.5,
        rng.random() < 0.5,
        out=dims(num_batch + 2) if rng.random() < 1 / 3 else None,
        roles={rng.choice(names): rng.choice(letters)} if rng.random() < 0.25 else None,
        batch=batch,
        units=(units[0], units[1]),
    )


def test_random_products_are_exact_or_refused_with_a_fix() -> None:
    verdicts = Counter(random_case(Random(seed)).check() for seed in range(1200))
    assert min(verdicts[True], verdicts[False]) > 120


def refusal(plan: MatMulPlan, shape: Sequence[int]) -> str:
    try:
        plan.volume(shape)
    except LayoutError as error:
        return str(error)
    return ""


def test_random_sizes_divide_or_are_refused() -> None:
    """Sizes that the layouts do not divide are refused before anything is cut, and the others are exact."""
    verdicts: Counter = Counter()
    for seed in range(500):
        rng = Random(seed)
        case, sizes = random_case(rng), rng.choices(range(1, 25), k=3)
        if case.legal and not any(case.units):
            verdicts[check_sizes(case, sizes)] += 1
    assert min(verdicts[True], verdicts[False]) > 10


def check_sizes(case: Case, sizes: Sequence[int]) -> bool:
    """Whether they divide."""
    plan = case.plan()
    m, k, n = sizes
    a_last, b_last = (k, m) if plan.transpose_a else (m, k), (n, k) if plan.transpose_b else (k, n)
    needs = {"m": m, "n": n, "k": k}
    divides = all(
        needs.get(letter, 0) % plan.grid.size(split) == 0
        for dims, letters in (
            (plan.a.dims, plan.a_letters),
            (plan.b.dims, plan.b_letters),
            (plan.out.dims, plan.c_letters),
            (plan.need(plan.a_letters), plan.a_letters),
            (plan.need(plan.b_letters), plan.b_letters),
        )
        for split, letter in zip(dims, letters, strict=True)
    )
    if divides:
        assert_exact(plan, (*case.a_shape[:-2], *a_last), (*case.b_shape[:-2], *b_last))
        return True
    padded = dict(needs)
    while refused := refusal(plan, (*case.batch, padded["m"], padded["k"], padded["n"])):
        fix = r"does not divide \d+\.\n.*\n  fix: .* in \{1[,}].*, or pad ([KMN]) to (\d+) with pad=True$"
        found = re.search(fix, refused)
        assert found, refused
        letter, size = found.group(1).lower(), int(found.group(2))
        # A letter is padded once at most: what the refusal says is enough for every tensor, and no more.
        assert padded[letter] == needs[letter] < size < needs[letter] + plan.granularity(letter)
        padded[letter] = size
    assert padded != needs
    try:
        shards = (
            plan.a.shard_shape((*case.a_shape[:-2], *a_last)),
            plan.b.shard_shape((*case.b_shape[:-2], *b_last)),
        )
    except LayoutError:
        return False
    with pytest.raises(LayoutError, match="does not divide"):
        bind(plan, *shards)
    return False


@pytest.mark.parametrize("regather", [(), ("a",), ("b",), ("a", "b")], ids=str)
def test_regathering_repeats_the_forward_gathers(regather: tuple[str, ...]) -> None:
    grid = Grid(z=2, x=2, y=3)
    kept = MatMulPlan(Layout(grid, ("z", "y"), "x"), Layout(grid, ("x", "z"), "y"))
    again = replace(kept, out=None, roles=None, regather=regather)
    shape = (12, 24, 36)
    more = again.volume(shape).elements - kept.volume(shape).elements
    a_gathered, b_gathered = 12 * 24 // 4, 24 * 36 // 6
    expected = {"a": a_gathered * 2 // 3, "b": b_gathered // 2}
    assert more == sum(expected[operand] for operand in regather)
    assert again.volume(shape).forward == kept.volume(shape).forward
    only_dgrad = again.volume(shape, wgrad=False).by("phase", "elements")
    assert only_dgrad["dgrad"] == 12 * 36 // 6 // 2 + a_gathered * 2 // 3 + expected["b"] * ("b" in regather)


@pytest.mark.parametrize(
    ("wanted", "backward"),
    [
        ({}, "dgrad dC, dgrad B, dgrad dA, wgrad A, wgrad dB"),
        ({"wgrad": False}, "dgrad dC, dgrad B, dgrad dA"),
        ({"dgrad": False}, "wgrad dC, wgrad A, wgrad dB"),
        ({"dgrad": False, "wgrad": False}, ""),
        ({"dgrad": False, "bias": True}, "wgrad dC, wgrad A, wgrad dB, wgrad dbias"),
        ({"wgrad": False, "bias": True}, "dgrad dC, dgrad B, dgrad dA, wgrad dbias"),
        ({"dgrad": False, "wgrad": False, "bias": True}, "wgrad dC, wgrad dbias"),
        ({"dgrad": False, "wgrad": False, "bias": True, "bias_grad": False}, ""),
    ],
)
def test_what_moves_in_which_phase(wanted: dict[str, bool], backward: str) -> None:
    """dC moves once, in the first product of backward that is wanted, and operands where they are multiplied again."""
    grid = Grid(z=2, x=2, y=2)
    plan = MatMulPlan(Layout(grid, ("z", "y"), "x"), Layout(grid, ("x", "z"), "y"), regather=("a", "b"))
    moves = plan.moves(**wanted)
    first = "forward A, forward B, forward C" + ", forward bias" * wanted.get("bias", False)
    assert ", ".join(f"{move.phase} {move.tensor}" for move in moves) == first + f", {backward}" * bool(backward)
    assert all(move.steps == plan.relayouts[move.tensor] for move in moves)
    if wanted.get("bias"):  # N = 12 over y=2, as it is stored, before the rows' sum over z and x leaves or joins it
        assert {plan.start_shape(name, {"m": 8, "n": 12, "k": 16}) for name in ("bias", "dbias")} == {(6,)}


def test_a_plan_under_another_name():
    grid = Grid(x=2, y=2)
    first = MatMulPlan(Layout(grid, "x", "y"), Layout(grid, "y", None), name="first")
    text, second = str(first), first.named("second")
    assert second.name == "second" and first.name == "first" and str(second) == text
    assert second is not first and second.relayouts is first.relayouts
    with pytest.raises(LayoutError, match="MatMul 'second'"):
        second.sizes((1, 2))

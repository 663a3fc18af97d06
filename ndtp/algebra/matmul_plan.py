"""`MatMulPlan`: which collectives a product of two laid-out tensors needs, forward and backward.  Pure.

Every axis splits one *letter* of the loop nest (batch, m, n or k) or none, by the rule of `ndtp.algebra.roles`.  The
same role map serves `C = A.B`, `dA = dC.B^T` and `dB = A^T.dC`, and every tensor goes from how it is stored to what its
roles ask, or back, by the table of `ndtp.algebra.steps`.  No scheme is named here: 1D, 2D, 3D, data parallelism and
FSDP all follow.

Sources: Agarwal et al. 1995 for the 3D algorithm; MindSpore's high-dimension tensor parallel for the layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm, prod

from ndtp.algebra import refusals
from ndtp.algebra import roles as rule
from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.roles import Letters, Stored
from ndtp.algebra.steps import Dims, Journey, PlanMove, PlanStep, Step, is_legal, phase_of, relayout_steps
from ndtp.algebra.volume import Volume, traffic
from ndtp.errors import LayoutError


@dataclass(frozen=True, eq=False, init=False)
class MatMulPlan:
    """The plan of `C[.., M, N] = A[.., M, K] . B[.., K, N]` for operands that lie as `a` and `b` say.

    Args:
        a, b: layouts of the operands as they are stored; leading dims are batch dims, aligned from the right.
        out: layout in which C is wanted.  Default: the mirror.  Where A gave up an axis by gathering, C takes the
            axes of K, as minors (on M if A gave it up there, else on a batch dim, else on N); where A gathered
            nothing, C is all-reduced.
        roles: letters ("m", "n", "k", "batch") for axes that shall not follow the rule.
        transpose_a, transpose_b: the operand's two last dims are swapped, as `torch.matmul(a, b.mT)` would have it.
        regather: the operands ("a", "b") that backward gathers again instead of keeping them gathered since forward.
        chunks: the number of chunks of rows whose communication and GEMMs overlap, or "auto": chosen where the product
            first runs, by `ndtp.runtime.chunk_count`; `ProcessGrid.chunks_chosen` tells.  Default: what the layout of A
            asks for (`interleaved_parallel`), else 1.
            Fewer are used where the rows do not divide, or an all-reduce would send more in chunks.
        name: what errors and profiles call the product.
        a_units, b_units: batch dims of an operand that have size 1 and are broadcast; `bind` finds them from shapes.

    Attributes:
        out: the layout of C.
        roles: axis -> letter, for the axes that have one.
        orders: letter -> the axes that split it, major to minor.
        stored: "A", "B", "C" -> its layout, and the letters of its dims.
        steps: every collective and slice, in the order of the phases.

    Raises:
        LayoutError: a product that the rule cannot compute, with the nearest legal layout.
    """

    a: Layout
    b: Layout
    out: Layout
    roles: Mapping[str, str]
    transpose_a: bool
    transpose_b: bool
    regather: tuple[str, ...]
    chunks: int | str
    name: str
    a_units: tuple[int, ...]
    b_units: tuple[int, ...]
    orders: Mapping[str, tuple[str, ...]] = field(init=False, repr=False)
    stored: Mapping[str, Stored] = field(init=False, repr=False)
    chunks_text: str = field(init=False, repr=False)

    def __init__(
        self,
        a: Layout,
        b: Layout,
        out: Layout | None = None,
        roles: Mapping[str, str] | None = None,
        transpose_a: bool = False,
        transpose_b: bool = False,
        regather: tuple[str, ...] = (),
        chunks: int | str = 0,
        name: str = "matmul",
        a_units: tuple[int, ...] = (),
        b_units: tuple[int, ...] = (),
    ) -> None:
        where = f"MatMul '{name}'"
        _check_layouts(where, a, b, out)
        batch = rule.batch_letters(max(a.ndim, b.ndim) - 2)
        c_letters = (*batch, "m", "n")
        _check_roles(where, a.grid, (*c_letters, "k"), roles or {})
        _check_options(where, regather, chunks)
        of_a = Stored("A", a, rule.letters_of(batch, a.ndim, a_units, ("k", "m") if transpose_a else ("m", "k")))
        of_b = Stored("B", b, rule.letters_of(batch, b.ndim, b_units, ("n", "k") if transpose_b else ("k", "n")))
        given = [of_a, of_b] + ([Stored("C", out, c_letters)] if out is not None else [])
        assigned = rule.assign(of_a, of_b, roles or {})
        orders = {letter: rule.order(name, letter, assigned, given) for letter in (*c_letters, "k")}
        out = rule.mirror(of_a, c_letters, assigned, orders) if out is None else out
        if not chunks:
            chunks = a.chunks[1] if a.chunks and of_a.letters[a.chunks[0]] == "m" else 1
        vars(self).update(
            a=a,
            b=b,
            out=out,
            roles=assigned,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            regather=regather,
            chunks=chunks,
            name=name,
            a_units=a_units,
            b_units=b_units,
            orders=orders,
            stored={"A": of_a, "B": of_b, "C": Stored("C", out, c_letters)},
            # For compiled code: a number that differs between calls becomes a symbol there, which has no text.
            chunks_text=str(chunks),
        )
        for tensor in self.stored.values():
            if not is_legal(a.grid, tensor.layout.dims, self.need(tensor.letters)):
                need = self.need(tensor.letters)
                raise refusals.contiguity(name, self.operands, tensor.name, tensor.layout, need)

    # ------------------------------------------------------------------------------------------------- structure

    @property
    def grid(self) -> Grid:
        return self.a.grid

    @cached_property
    def batch_letters(self) -> tuple[str, ...]:
        return rule.batch_letters(self.out.ndim - 2)

    @property
    def letters(self) -> tuple[str, ...]:
        return (*self.batch_letters, "m", "n", "k")

    @property
    def a_letters(self) -> Letters:
        """The letter of each dim of A; None for a dim of size 1 that is broadcast."""
        return self.stored["A"].letters

    @property
    def b_letters(self) -> Letters:
        return self.stored["B"].letters

    @property
    def c_letters(self) -> Letters:
        return self.stored["C"].letters

    def need(self, letters: Letters) -> Dims:
        """How a tensor with these letters is held while it is multiplied."""
        return tuple(self.orders[letter] if letter else () for letter in letters)

    @property
    def bias(self) -> Layout:
        """The layout in which a bias[N] is stored."""
        return Layout(self.grid, self.orders["n"])

    # ----------------------------------------------------------------------------------------------------- moves

    @cached_property
    def journeys(self) -> Mapping[str, Journey]:
        """How every tensor lies before and after its steps, by name: A, B, C, dC, dA, dB, bias, dbias.

        Operands go from stored to held, results back, and gradients the other way; what a result lacks a letter of is
        a partial sum over the axes of that letter.

        The bias of C is the product `ones[M, 1] . b[1, N]` under the same roles: it is stored as the n axes split it,
        cut to what C stores, and its gradient is a partial sum over the axes that split rows.
        """
        found = {}
        for name, tensor in self.stored.items():
            letters, lies, need = tensor.letters, tensor.layout.dims, self.need(tensor.letters)
            partial = tuple(axis for axis, letter in self.roles.items() if letter not in letters)
            to, back = (name, f"d{name}") if name != "C" else ("dC", "C")
            found[to] = Journey(letters, lies, need)
            found[back] = Journey(letters, need, lies, partial)
        n = (self.orders["n"],)
        rows = tuple(axis for axes in self.need(self.c_letters)[:-1] for axis in axes)
        return found | {"bias": Journey(("n",), n, self.out.dims[-1:]), "dbias": Journey(("n",), n, n, rows)}

    @cached_property
    def relayouts(self) -> Mapping[str, tuple[Step, ...]]:
        """The steps of every tensor, by the names of `journeys`."""
        return {
            name: relayout_steps(self.grid, journey.begin, journey.end, journey.partial)
            for name, journey in self.journeys.items()
        }

    @cached_property
    def gathers_b(self) -> bool:
        return any(step.kind == "all_gather" for step in self.relayouts["B"])

    def moves(
        self, dgrad: bool = True, wgrad: bool = True, bias: bool = False, bias_grad: bool | None = None
    ) -> tuple[PlanMove, ...]:
        """What moves in which phase, in order, and by which steps.

        Args:
            dgrad, wgrad: whether A and B need a gradient.
            bias: whether a bias is added; it is gathered where C is.
            bias_grad: whether the bias needs a gradient; default: if there is one.
        """
        forward = ["A", "B", "C"] + ["bias"] * bias
        backward = [*["B"] * ("b" in self.regather), "dA"] if dgrad else []
        backward += [*["A"] * ("a" in self.regather), "dB"] if wgrad else []
        backward += ["dbias"] * (bias if bias_grad is None else bias_grad)
        found = [("forward", tensor) for tensor in forward]
        found += [(phase_of(tensor, True, dgrad), tensor) for tensor in ["dC"] * bool(backward) + backward]
        return tuple(PlanMove(phase, tensor, self.relayouts[tensor]) for phase, tensor in found)

    @cached_property
    def steps(self) -> tuple[PlanStep, ...]:
        return tuple(PlanStep(move.phase, move.tensor, step) for move in self.moves() for step in move.steps)

    def volume(
        self,
        shape: Sequence[int],
        dgrad: bool = True,
        wgrad: bool = True,
        bias: bool = False,
        bias_grad: bool | None = None,
    ) -> Volume:
        """The exact traffic of the product, in elements received per rank.

        An all-gather or reduce-scatter whose gathered size is V over p ranks takes V (p-1)/p, an all-to-all of a local
        V the same, an all-reduce twice that.

        Args:
            shape: `(*batch, M, K, N)`, the global sizes.
            dgrad, wgrad, bias, bias_grad: as for `moves`.

        Raises:
            LayoutError: sizes that the layouts do not divide.
        """
        sizes = self.sizes(shape)
        return Volume.of(
            entry
            for move in self.moves(dgrad, wgrad, bias, bias_grad)
            for entry in traffic(self.grid, move.steps, self.start_shape(move.tensor, sizes), move.phase)
        )

    # --------------------------------------------------------------------------------------------------- shapes

    def start_shape(self, tensor: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Every rank's part of a tensor, by its name in `journeys`, before its first step.

        Args:
            sizes: letter -> global size.
        """
        journey = self.journeys[tensor]
        return self._local(journey.letters, journey.begin, sizes)

    def held_shape(self, letters: Letters, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Every rank's part of a tensor with these letters while it is multiplied."""
        return self._local(letters, self.need(letters), sizes)

    def _local(self, letters: Letters, dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
        split = zip(letters, dims, strict=True)
        return tuple((sizes[letter] if letter else 1) // self.grid.size(axes) for letter, axes in split)

    def shard_shape(self, tensor: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of every rank's shard of "A", "B" or "C"."""
        stored = self.stored[tensor]
        return stored.layout.shard_shape(stored.shape(sizes))

    def gemm_shape(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        """Each rank's local product: (batch, M, K, N)."""
        *batch, m, k, n = self.held_shape((*self.batch_letters, "m", "k", "n"), self.sizes(shape))
        return prod(batch), m, k, n

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Letter -> global size, from `(*batch, M, K, N)`; checks that every size divides.

        Raises:
            LayoutError: a size that its axes do not divide, with the sizes that would.
        """
        count = len(self.batch_letters)
        if len(shape) != count + 3:
            raise LayoutError(f"MatMul '{self.name}': give {count} batch sizes and M, K, N, not {tuple(shape)}")
        sizes = dict(zip((*self.batch_letters, "m", "k", "n"), shape, strict=True))
        self.check_divides(sizes)
        return sizes

    def check_divides(self, sizes: Mapping[str, int]) -> None:
        """
        Raises:
            LayoutError: a size, of those by letter, that its axes do not divide, with the sizes that would.
        """
        for tensor, letter, axes in self._splits():
            size = sizes[letter] if letter else 1
            if size % self.grid.size(axes):
                split = {axis: self.grid[axis] for axis in axes}
                whole, shape = self.granularity(letter or "1"), tensor.shape(sizes)
                raise refusals.size(self.name, self.operands, tensor.name, shape, letter or "1", size, split, whole)

    def granularity(self, letter: str) -> int:
        """What the size of a letter has to be a multiple of."""
        return lcm(*(self.grid.size(axes) for _, own, axes in self._splits() if own == letter))

    def _splits(self) -> Iterator[tuple[Stored, str | None, tuple[str, ...]]]:
        """Every way in which a dim of a tensor is split, as it is stored and as it is multiplied."""
        for name in "BAC":  # weights first
            tensor = self.stored[name]
            for letter, *splits in zip(tensor.letters, tensor.layout.dims, self.need(tensor.letters), strict=True):
                yield from ((tensor, letter, axes) for axes in splits)

    # -------------------------------------------------------------------------------------------------- printing

    def __str__(self) -> str:
        moves = [str(s) for s in self.steps if s.phase == "forward"]
        waits = "; chunks: auto, chosen where it first runs" if self.chunks == "auto" else ""
        return f"{self.equation}: {', '.join(moves) if moves else 'no communication'}{waits}"

    @property
    def equation(self) -> str:
        """`A[M_zy, K_x] . B[K_xz, N_y] -> C[M_zx, N_y]`"""
        return "{} . {} -> {}".format(*self.stored.values())

    @property
    def operands(self) -> str:
        """`A[M_zy, K_x] . B[K_xz, N_y] on grid z=2 x=2 y=2`"""
        return rule.operands(list(self.stored.values()))


def _check_layouts(where: str, a: Layout, b: Layout, out: Layout | None) -> None:
    for tensor, layout in (("A", a), ("B", b), ("C", out)):
        if layout is None:
            continue
        if layout.grid != a.grid:
            raise LayoutError(f"{where}: {tensor} lies on grid {layout.grid}, A on grid {a.grid}; use one grid")
        least = max(a.ndim, b.ndim) if tensor == "C" else 2
        if layout.ndim < least or (tensor == "C" and layout.ndim != least):
            raise LayoutError(f"{where}: the layout of {tensor}, {layout}, has {layout.ndim} dims; {least} are needed")


def _check_roles(where: str, grid: Grid, letters: Sequence[str], roles: Mapping[str, str]) -> None:
    for axis, role in roles.items():
        if axis not in grid or role not in letters:
            raise LayoutError(
                f"{where}: roles={{{axis!r}: {role!r}}} does not give an axis of grid {grid} "
                f"one of the letters {', '.join(letters)}"
            )


def _check_options(where: str, regather: Sequence[str], chunks: int | str) -> None:
    if chunks != "auto" and (isinstance(chunks, str) or chunks < 0):
        raise LayoutError(f"{where}: chunks={chunks!r} is neither a number of chunks nor 'auto'")
    if set(regather) - {"a", "b"}:
        raise LayoutError(f"{where}: regather={regather!r} may name 'a' and 'b' only")

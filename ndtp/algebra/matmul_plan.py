"""`MatMulPlan`: which collectives a product of two laid-out tensors needs, forward and backward.  Pure.

Every axis splits one *letter* of the loop nest (batch, m, n or k) or none, by the rule of `ndtp.algebra.roles`.  The
same role map serves `C = A.B`, `dA = dC.B^T` and `dB = A^T.dC`, and every tensor goes from how it is stored to what its
roles ask, or back, by the table of `ndtp.algebra.steps`.  No scheme is named here: 1D, 2D, 3D, data parallelism and
FSDP all follow.

Sources: Agarwal et al. 1995 for the 3D algorithm; MindSpore's high-dimension tensor parallel for the layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import prod

from ndtp.algebra import html
from ndtp.algebra import roles as rule
from ndtp.algebra.cached import cached_property
from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.loop_nest import LoopNest
from ndtp.algebra.steps import Journey, PlanMove, PlanStep, phase_of
from ndtp.algebra.stored import Letters, Stored
from ndtp.algebra.volume import Volume
from ndtp.algebra.wire import Wire
from ndtp.dtypes import Dtype
from ndtp.errors import LayoutError


@dataclass(frozen=True, eq=False, init=False)
class MatMulPlan(LoopNest):
    """The plan of `C[.., M, N] = A[.., M, K] . B[.., K, N]` for operands that lie as `a` and `b` say.

    Args:
        a, b: layouts of the operands as they are stored; leading dims are batch dims, aligned from the right.
        out: layout in which C is wanted.  Default: the mirror.  Where A gave up an axis by gathering, C takes the
            axes of K, as minors (on M if A gave it up there, else on a batch dim, else on N); where A gathered
            nothing, C is all-reduced.
        roles: letters ("m", "n", "k", "batch") for axes that shall not follow the rule.
        transpose_a, transpose_b: the operand's two last dims are swapped, as `torch.matmul(a, b.mT)` would have it.
        regather: the operands ("a", "b") that backward gathers again instead of keeping them gathered since forward.
        chunks: the number of chunks of rows whose communication and GEMMs overlap; default: what the layout of A asks
            for (`interleaved_parallel`), else 1.  Or "auto": what the layout of A asks for, else chosen where the
            product first runs, by `ndtp.runtime.chunk_count`; `ProcessGrid.chunks_chosen` tells.
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
        of_c = None if out is None else Stored("C", out, c_letters)
        classes = dict.fromkeys(batch, "batch") | {"m": "m", "n": "n", "k": "k"}
        assigned = rule.assign((of_a, of_b), classes, roles or {})
        orders = {letter: rule.order(where, letter, assigned, (of_a, of_b), of_c) for letter in (*c_letters, "k")}
        out = rule.mirror(of_a, c_letters, classes, assigned, orders) if out is None else out
        if not chunks or chunks == "auto":
            chunks = a.chunks[1] if a.chunks and of_a.letters[a.chunks[0]] == "m" else chunks or 1
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
        self.check_order()

    # ------------------------------------------------------------------------------------------------- structure

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

    @property
    def bias(self) -> Layout:
        """The layout in which a bias[N] is stored."""
        return Layout(self.grid, self.orders["n"])

    # ----------------------------------------------------------------------------------------------------- moves

    def _journeys(self) -> dict[str, Journey]:
        """The bias of C is the product `ones[M, 1] . b[1, N]` under the same roles: it is stored as the n axes split
        it, cut to what C stores, and its gradient is a partial sum over the axes that split rows.
        """
        n = (self.orders["n"],)
        rows = tuple(axis for axes in self.need(self.c_letters)[:-1] for axis in axes)
        bias = {"bias": Journey(("n",), n, self.out.dims[-1:]), "dbias": Journey(("n",), n, n, rows)}
        return super()._journeys() | bias

    @cached_property
    def gathers_b(self) -> bool:
        return any(step.kind == "all_gather" for step in self.relayouts["B"])

    def moves(
        self, dgrad: bool = True, wgrad: bool = True, bias: bool = False, bias_grad: bool | None = None
    ) -> tuple[PlanMove, ...]:
        """List the tensors that move, with their phases and steps, in the order in which they move.

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
        self, shape: Sequence[int], dtype: Dtype = "float32", wire: Wire | None = None, **wanted: bool | None
    ) -> Volume:
        """The exact traffic of the product, in bytes received per rank.

        Args:
            shape: `(*batch, M, K, N)`, the global sizes.
            dtype: in which the product computes: a name such as "bf16", or torch's.
            wire: the dtypes in which its tensors travel instead; scales are counted.
            wanted: `dgrad`, `wgrad`, `bias` and `bias_grad`, as for `moves`.

        Raises:
            LayoutError: sizes that the layouts do not divide.
        """
        return self.volume_of(self.moves(**wanted), self.sizes(shape), dtype, wire)  # type: ignore[arg-type]

    # --------------------------------------------------------------------------------------------------- shapes

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

    def named(self, name: str) -> MatMulPlan:
        """Return a copy of the plan under another name, with all that was derived from it so far."""
        other = copy(self)
        vars(other)["name"] = name
        return other

    # -------------------------------------------------------------------------------------------------- printing

    def _repr_html_(self) -> str:
        tensors = (("A", self.a), ("B", self.b), ("C", self.out))
        pictures = [html.layout_picture(layout, name) for name, layout in tensors]
        steps = [(step.phase, str(step)) for step in self.steps]
        return html.table(("phase", "moves"), steps, f"{self.equation} on grid {self.grid}") + "".join(pictures)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        moves = [str(s) for s in self.steps if s.phase == "forward"]
        return f"{self.equation}: {', '.join(moves) if moves else 'no communication'}"


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

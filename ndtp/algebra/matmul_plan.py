"""`MatMulPlan`: which collectives a product of two laid-out tensors needs, forward and backward.  Pure.

Every axis splits one *letter* of the loop nest (batch, m, n or k) or none; the operands decide by one rule.  The same
role map serves `C = A.B`, `dA = dC.B^T` and `dB = A^T.dC`, and every tensor goes from how it is stored to what its
roles ask, or back, by `relayout`.  No scheme is named here: 1D, 2D, 3D, data parallelism and FSDP all follow.

Sources: Agarwal et al. 1995 for the 3D algorithm; MindSpore's high-dimension tensor parallel for the layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm, prod
from typing import TYPE_CHECKING

from ndtp.algebra import refusals
from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.refusals import shown
from ndtp.algebra.steps import Dims, PlanStep, Step, is_legal, relayout
from ndtp.algebra.volume import Volume, traffic
from ndtp.errors import LayoutError

Letters = tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
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
        steps: every collective and slice, in the order of the phases.

    Raises:
        LayoutError: a product that the rule cannot compute, with the nearest legal layout.
    """

    a: Layout
    b: Layout
    out: Layout = None  # type: ignore[assignment]  # None is replaced by the mirror rule's
    roles: Mapping[str, str] = None  # type: ignore[assignment]  # overrides, replaced by all roles
    transpose_a: bool = False
    transpose_b: bool = False
    regather: tuple[str, ...] = ()
    chunks: int | str = 0
    name: str = "matmul"
    a_units: tuple[int, ...] = ()
    b_units: tuple[int, ...] = ()
    requested: tuple[Layout | None, Mapping[str, str]] = field(init=False, repr=False)
    orders: Mapping[str, tuple[str, ...]] = field(init=False, repr=False)
    chunks_text: str = field(init=False, repr=False)

    if TYPE_CHECKING:  # what may be passed, where the attributes are never None

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
        ) -> None: ...

    def __post_init__(self) -> None:
        self._check_arguments()
        set_field = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        overrides = dict(self.roles or {})
        set_field("requested", (self.out, overrides))
        set_field("roles", self._assign_roles(overrides))
        set_field("orders", {})
        set_field("orders", {letter: self._order(letter) for letter in self.letters})
        if self.out is None:
            set_field("out", self._mirror())
        if not self.chunks:
            asked = self.a.chunks
            set_field("chunks", asked[1] if asked and self.a_letters[asked[0]] == "m" else 1)
        # For compiled code: a number that differs between calls becomes a symbol there, which has no text.
        set_field("chunks_text", str(self.chunks))
        for tensor, layout, need in self._sides():
            if not is_legal(self.grid, layout.dims, need):
                raise refusals.contiguity(self.name, self.operands, tensor, layout, need)

    # ------------------------------------------------------------------------------------------------- structure

    @property
    def grid(self) -> Grid:
        return self.a.grid

    @cached_property
    def batch_letters(self) -> tuple[str, ...]:
        count = max(self.a.ndim, self.b.ndim) - 2
        return ("batch",) if count == 1 else tuple(f"batch{i}" for i in range(count))

    @property
    def letters(self) -> tuple[str, ...]:
        return (*self.batch_letters, "m", "n", "k")

    @cached_property
    def a_letters(self) -> Letters:
        """The letter of each dim of A; None for a dim of size 1 that is broadcast."""
        return self._letters_of(self.a, self.a_units, ("k", "m") if self.transpose_a else ("m", "k"))

    @cached_property
    def b_letters(self) -> Letters:
        return self._letters_of(self.b, self.b_units, ("n", "k") if self.transpose_b else ("k", "n"))

    @cached_property
    def c_letters(self) -> Letters:
        return (*self.batch_letters, "m", "n")

    def _letters_of(self, layout: Layout, units: tuple[int, ...], last: tuple[str, str]) -> Letters:
        batch = self.batch_letters[len(self.batch_letters) - (layout.ndim - 2) :]
        return (*(None if dim in units else letter for dim, letter in enumerate(batch)), *last)

    def need(self, letters: Letters) -> Dims:
        """How a tensor with these letters is held while it is multiplied."""
        return tuple(self.orders[letter] if letter else () for letter in letters)

    def _sides(self) -> tuple[tuple[str, Layout, Dims], ...]:
        return (
            ("A", self.a, self.need(self.a_letters)),
            ("B", self.b, self.need(self.b_letters)),
            ("C", self.out, self.need(self.c_letters)),
        )

    # ---------------------------------------------------------------------------------------------- the role rule

    def _assign_roles(self, overrides: Mapping[str, str]) -> dict[str, str]:
        roles = {}
        for axis in self.grid:
            in_a = self._letter_of(self.a, self.a_letters, axis)
            in_b = self._letter_of(self.b, self.b_letters, axis)
            ranked = ("n" if in_b == "n" else None, "m" if in_a == "m" else None)
            batch = tuple(letter for letter in (in_a, in_b) if letter in self.batch_letters)
            role = overrides.get(axis) or next((r for r in (*ranked, *batch, in_a, in_b) if r), None)
            if role is not None:
                roles[axis] = role
        return roles

    @staticmethod
    def _letter_of(layout: Layout, letters: Letters, axis: str) -> str | None:
        dim = layout.dim_of(axis)
        return None if dim is None else letters[dim]

    def _order(self, letter: str) -> tuple[str, ...]:
        """The axes that split a letter, major to minor: the order in which the tensors store them."""
        wanted = [axis for axis in self.grid if self.roles.get(axis) == letter]
        stored = []
        for tensor, layout, letters in self._stored():
            axes = layout.dims[letters.index(letter)] if letter in letters else ()
            stored.append((tensor, tuple(axis for axis in axes if axis in wanted)))
        # Axes of one rank stand in no order: the sequence to agree with is the one with the most axes that split.
        _, longest = max(stored, key=lambda entry: (len(self.grid.nontrivial(entry[1])), len(entry[1])))
        for tensor, axes in stored:
            lead = self.grid.nontrivial(axes)
            if lead != self.grid.nontrivial(longest)[: len(lead)]:
                layout, letters = next((lay, let) for name, lay, let in self._stored() if name == tensor)
                fixed = (*longest, *(axis for axis in axes if axis not in longest))
                rest = [axis for axis in layout.dims[letters.index(letter)] if axis not in fixed]
                dims = [
                    (*fixed, *rest) if let == letter else tuple(axis for axis in ax if axis not in fixed)
                    for let, ax in zip(letters, layout.dims, strict=True)
                ]
                raise refusals.order(self.name, self.operands, tensor, letter, layout.with_dims(*dims))
        return (*longest, *(axis for axis in wanted if axis not in longest))

    def _stored(self) -> list[tuple[str, Layout, Letters]]:
        sides = [("A", self.a, self.a_letters), ("B", self.b, self.b_letters), ("C", self.out, self.c_letters)]
        return [side for side in sides if side[1] is not None]

    def _mirror(self) -> Layout:
        dims = [list(self.orders[letter]) if letter else [] for letter in self.c_letters]
        gave = set()
        for axes, letter in zip(self.a.dims, self.a_letters, strict=True):
            if any(self.roles.get(axis) not in self.a_letters for axis in axes):
                gave.add("n" if letter == "k" else letter)
        target = next((letter for letter in ("m", *self.batch_letters, "n") if letter in gave), None)
        if target is not None:
            dims[self.c_letters.index(target)] += self.orders["k"]
        return Layout(self.grid, *dims)

    # ---------------------------------------------------------------------------------------------------- steps

    @cached_property
    def relayouts(self) -> Mapping[str, tuple[Step, ...]]:
        """The steps of every tensor, by name: A, B, C, dC, dA, dB, bias, dbias.

        The bias of C is the product `ones[M, 1] . b[1, N]` under the same roles: it is stored as the n axes split it,
        cut to what C stores, and its gradient is a partial sum over the axes that split rows.
        """
        (_, a, need_a), (_, b, need_b), (_, c, need_c) = self._sides()
        grid, last = self.grid, (self.orders["n"],)
        return {
            "A": relayout(grid, a.dims, need_a),
            "B": relayout(grid, b.dims, need_b),
            "C": relayout(grid, need_c, c.dims, self.orders["k"]),
            "dC": relayout(grid, c.dims, need_c),
            "dA": relayout(grid, need_a, a.dims, self._contracted(self.a_letters)),
            "dB": relayout(grid, need_b, b.dims, self._contracted(self.b_letters)),
            "bias": relayout(grid, last, c.dims[-1:]),
            "dbias": relayout(grid, last, last, [axis for axes in need_c[:-1] for axis in axes]),
        }

    @cached_property
    def gathers_b(self) -> bool:
        return any(step.kind == "all_gather" for step in self.relayouts["B"])

    def _contracted(self, letters: Letters) -> list[str]:
        return [axis for axis, letter in self.roles.items() if letter not in letters]

    @property
    def bias(self) -> Layout:
        """The layout in which a bias[N] is stored."""
        return Layout(self.grid, self.orders["n"])

    @cached_property
    def steps(self) -> tuple[PlanStep, ...]:
        return tuple(
            PlanStep(phase, tensor, step)
            for phase, tensors in self.phases(bias=False).items()
            for tensor in tensors
            for step in self.relayouts[tensor]
        )

    def phases(
        self, dgrad: bool = True, wgrad: bool = True, bias: bool = False, bias_grad: bool | None = None
    ) -> dict[str, tuple[str, ...]]:
        """The tensors that each phase moves.  dC is gathered once, by the first phase that needs it."""
        phases: dict[str, tuple[str, ...]] = {"forward": ("A", "B", "C", *(("bias",) if bias else ()))}
        if dgrad:
            phases["dgrad"] = ("dC", *(("B",) if "b" in self.regather else ()), "dA")
        if wgrad:
            phases["wgrad"] = ("dC",) * (not dgrad) + (("A",) if "a" in self.regather else ()) + ("dB",)
        if bias if bias_grad is None else bias_grad:
            phases["wgrad"] = (*phases.get("wgrad", ("dC",) * (not dgrad)), "dbias")
        return phases

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
            dgrad, wgrad: whether A and B need a gradient.
            bias: whether a bias is added; it is gathered where C is.
            bias_grad: whether the bias needs a gradient; default: if there is one.

        Raises:
            LayoutError: sizes that the layouts do not divide.
        """
        sizes = self.sizes(shape)
        starts = {name: self.shard_shape(name[-1], sizes) for name in ("A", "B", "dC")}
        for name, letters in (("C", self.c_letters), ("dA", self.a_letters), ("dB", self.b_letters)):
            need = zip(letters, self.need(letters), strict=True)
            starts[name] = tuple((sizes[let] if let else 1) // self.grid.size(axes) for let, axes in need)
        starts["bias"] = starts["dbias"] = starts["C"][-1:]
        return Volume.of(
            entry
            for phase, tensors in self.phases(dgrad, wgrad, bias, bias_grad).items()
            for tensor in tensors
            for entry in traffic(self.grid, self.relayouts[tensor], starts[tensor], phase)
        )

    def gemm_shape(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        """Each rank's local product: (batch, M, K, N)."""
        sizes = self.sizes(shape)
        m, k, n = (sizes[letter] // self.grid.size(self.orders[letter]) for letter in "mkn")
        return prod(sizes[letter] // self.grid.size(self.orders[letter]) for letter in self.batch_letters), m, k, n

    # --------------------------------------------------------------------------------------------------- shapes

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
        for tensor, letter, axes in self._splits():
            size = sizes[letter] if letter else 1
            if size % self.grid.size(axes):
                letters = {"A": self.a_letters, "B": self.b_letters, "C": self.c_letters}[tensor]
                shape = tuple(sizes[let] if let else 1 for let in letters)
                split = {axis: self.grid[axis] for axis in axes}
                whole = self.granularity(letter or "1")
                raise refusals.size(self.name, self.operands, tensor, shape, letter or "1", size, split, whole)

    def granularity(self, letter: str) -> int:
        """What the size of a letter has to be a multiple of."""
        return lcm(*(self.grid.size(axes) for _, own, axes in self._splits() if own == letter))

    def _splits(self) -> Iterator[tuple[str, str | None, tuple[str, ...]]]:
        """Every way in which a dim of a tensor is split, as it is stored and as it is multiplied."""
        letters_of = {"A": self.a_letters, "B": self.b_letters, "C": self.c_letters}
        for tensor, layout, need in sorted(self._sides(), key=lambda side: side[0] != "B"):  # weights first
            for letter, *splits in zip(letters_of[tensor], layout.dims, need, strict=True):
                yield from ((tensor, letter, axes) for axes in splits)

    def shard_shape(self, tensor: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of every rank's shard of "A", "B" or "C"."""
        layout, letters = {"A": (self.a, self.a_letters), "B": (self.b, self.b_letters)}.get(
            tensor, (self.out, self.c_letters)
        )
        return layout.shard_shape([sizes[letter] if letter else 1 for letter in letters])

    # -------------------------------------------------------------------------------------------------- printing

    def __str__(self) -> str:
        moves = [str(s) for s in self.steps if s.phase == "forward"]
        waits = "; chunks: auto, chosen where it first runs" if self.chunks == "auto" else ""
        return f"{self.equation}: {', '.join(moves) if moves else 'no communication'}{waits}"

    @property
    def equation(self) -> str:
        """`A[M_zy, K_x] . B[K_xz, N_y] -> C[M_zx, N_y]`"""
        a, b, c = self._labels()
        return f"{a} . {b} -> {c}"

    @property
    def operands(self) -> str:
        """`A[M_zy, K_x] . B[K_xz, N_y] on grid z=2 x=2 y=2`, which a plan that is refused has, too."""
        a, b, *_ = self._labels()
        return f"{a} . {b} on grid {self.grid}"

    def _labels(self) -> list[str]:
        return [
            f"{tensor}[{layout.label([shown(letter) for letter in letters])}]"
            for tensor, layout, letters in self._stored()
        ]

    # ---------------------------------------------------------------------------------------------------- errors

    def _check_arguments(self) -> None:
        where = f"MatMul '{self.name}'"
        for tensor, layout in (("A", self.a), ("B", self.b), ("C", self.out)):
            if layout is None:
                continue
            if layout.grid != self.a.grid:
                raise LayoutError(
                    f"{where}: {tensor} lies on grid {layout.grid}, A on grid {self.a.grid}; use one grid"
                )
            least = max(self.a.ndim, self.b.ndim) if tensor == "C" else 2
            if layout.ndim < least or (tensor == "C" and layout.ndim != least):
                raise LayoutError(
                    f"{where}: the layout of {tensor}, {layout}, has {layout.ndim} dims; {least} are needed"
                )
        for axis, role in (self.roles or {}).items():
            if axis not in self.grid or role not in self.letters:
                raise LayoutError(
                    f"{where}: roles={{{axis!r}: {role!r}}} does not give an axis of grid {self.grid} "
                    f"one of the letters {', '.join(self.letters)}"
                )
        if self.chunks != "auto" and (isinstance(self.chunks, str) or self.chunks < 0):
            raise LayoutError(f"{where}: chunks={self.chunks!r} is neither a number of chunks nor 'auto'")
        if set(self.regather) - {"a", "b"}:
            raise LayoutError(f"{where}: regather={self.regather!r} may name 'a' and 'b' only")

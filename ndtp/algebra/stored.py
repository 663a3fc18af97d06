"""`Stored`: a tensor of a product as it is stored: its layout, and which letter of the loop nest each dim is.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ndtp.algebra.layout import Layout

Letters = tuple[str | None, ...]


def shown(letter: str | None) -> str:
    """A letter as the notation has it: `M`, `B`, `B1`; `1` for a dim that is broadcast."""
    if letter is None:
        return "1"
    return letter.upper() if len(letter) == 1 else letter.replace("batch", "B", 1)


@dataclass(frozen=True)
class Stored:
    """A tensor of a product as it is stored.

    Attributes:
        name: "A", "B" or "C".
        letters: of its dims; None for a dim of size 1 that is broadcast.
        named: its letters are names that a user has given, and its layout is told by them.
    """

    name: str
    layout: Layout
    letters: Letters
    named: bool = False

    def letter_of(self, axis: str) -> str | None:
        """The letter that an axis splits here."""
        dim = self.layout.dim_of(axis)
        return None if dim is None else self.letters[dim]

    def axes_of(self, letter: str) -> tuple[str, ...]:
        """The axes that split a letter here, major to minor."""
        return self.layout.dims[self.letters.index(letter)] if letter in self.letters else ()

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The global shape, from the global size of every letter."""
        return tuple(sizes[letter] if letter else 1 for letter in self.letters)

    def shown(self, letter: str | None) -> str:
        """A letter as errors have it."""
        return letter if self.named and letter is not None else shown(letter)

    def dim_text(self, dim: int) -> str:
        """A dim as errors have it."""
        return self.shown(self.letters[dim]) if self.named else str(dim)

    def written(self, layout: Layout) -> str:
        """Another layout of it, as a user would write it."""
        if not self.named:
            return str(layout)
        split = zip(self.letters, layout.dims, strict=True)
        return str({letter: axes[0] if len(axes) == 1 else axes for letter, axes in split if letter and axes})

    def __str__(self) -> str:
        return f"{self.name}[{self.layout.label([self.shown(letter) for letter in self.letters])}]"


def equation(operands: Sequence[Stored]) -> str:
    """Return the operands with their layouts: `A[M_zy, K_x] . B[K_xz, N_y]`."""
    return " . ".join(map(str, operands))

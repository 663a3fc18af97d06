"""The choices of `chunks="auto"` on a process grid, and the measurements that they rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ndtp.schedule.chunk_choice import SETTLED, Speeds

if TYPE_CHECKING:
    from ndtp.algebra.grid import Grid
    from ndtp.algebra.matmul_plan import MatMulPlan

ChunkChoice = tuple[int, str]  # the number of chunks, and why
MOST = 1024  # numbers of rows may differ from step to step
SHOWN = 2


class ChunkChoices:
    """The choices of chunks, the same on every rank.

    Speeds are those of the slowest rank, and everything else is given to all ranks alike.

    Attributes:
        measured: speeds by grid and dtype; a grid and its refinements share what they have in common.
        profile: (grid, dtype) -> the speeds by which to choose instead, or None where it does not know.
        crowd: how many processors the ranks share with nobody to spare; 0: others, or None: not known yet.
    """

    def __init__(self) -> None:
        self.measured: dict[tuple[str, str], Speeds] = {}
        self.profile: Callable[[Grid, str], Speeds | None] | None = None
        self.crowd: int | None = None
        self._kept: dict[tuple[str, str], Speeds] = {}
        self._made: dict[str, ChunkChoice] = {}
        self._of_plan: WeakKeyDictionary[MatMulPlan, dict[int, ChunkChoice]] = WeakKeyDictionary()

    @property
    def standing(self) -> str:
        """Return in words the measurements on which the next choice rests."""
        given = "a profile" if self.profile else "a checkpoint" if self._kept else ""
        by = given or ("speeds measured" if self.measured else "nothing measured")
        return by + ", deterministic" * torch.are_deterministic_algorithms_enabled()

    def given(self, grid: Grid, dtype: str, name: str = "") -> Speeds | None:
        """Speeds that a profile or a checkpoint knows.

        Args:
            name: of dtype and wire together; default: there is no wire.
        """
        speeds = None if self.profile is None else self.profile(grid, dtype)
        return speeds or self._kept.get((str(grid), name or dtype))

    def find(self, key: str, trains: bool) -> ChunkChoice | None:
        """Return the choice for a key; without gradients, else the choice with them."""
        return self._made.get(key) if trains else self._made.get(f"{key}, forward") or self._made.get(key)

    def add(self, key: str, trains: bool, plans: Sequence[MatMulPlan], rows: int, choice: ChunkChoice) -> None:
        _put(self._made, key if trains else f"{key}, forward", choice)
        for plan in plans:
            found = self._of_plan.setdefault(plan, {})
            if trains or rows not in found:
                _put(found, rows, choice)

    def of_plan(self, plan: MatMulPlan) -> dict[int, ChunkChoice]:
        """Rows -> what was chosen."""
        return dict(self._of_plan.get(plan, {}))

    def by_name(self) -> dict[str, str]:
        """Name of a product -> what was chosen by speeds, in words."""
        every = ((plan.name, in_words(found, by_speeds=True)) for plan, found in sorted_by_name(self._of_plan))
        return {name: text for name, text in every if text}

    def to_json(self) -> dict[str, Any]:
        """Return the choices as JSON, with which another run on the same grid makes the same choices."""
        speeds = self.measured | self._kept
        return {
            "speeds": [[*key, each.to_json()] for key, each in speeds.items()],
            "made": {key: list(choice) for key, choice in self._made.items() if choice[1] not in SETTLED},
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Restore choices of another run; earlier choices of this run stay, because programs are bound to them."""
        self._kept |= {(grid, dtype): Speeds.from_json(each) for grid, dtype, each in kept["speeds"]}
        for key, (count, why) in kept["made"].items():
            self._made.setdefault(str(key), (int(count), str(why)))


def in_words(found: Mapping[int, ChunkChoice], by_speeds: bool = False) -> str:
    """`4 chunks of 4096 rows: why`, of the last numbers of rows."""
    chosen = [(rows, *choice) for rows, choice in found.items() if not by_speeds or choice[1] not in SETTLED]
    more = [f"and {len(chosen) - SHOWN} other numbers of rows"] if len(chosen) > SHOWN else []
    texts = [f"{count} chunk{'s' * (count > 1)} of {rows} rows: {why}" for rows, count, why in chosen[-SHOWN:]]
    return "; ".join(texts + more)


def sorted_by_name(found: Mapping[MatMulPlan, object]) -> list[tuple[MatMulPlan, Any]]:
    return sorted(found.items(), key=lambda item: item[0].name)


def _put(table: dict[Any, ChunkChoice], key: Any, choice: ChunkChoice) -> None:
    table.pop(key, None)
    table[key] = choice
    if len(table) > MOST:
        del table[next(iter(table))]

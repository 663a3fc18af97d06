"""Sets of activations that must lie alike, which grow together while a model is observed."""

from __future__ import annotations

from collections.abc import Sequence


class Kinds:
    """Activations that must lie alike, as sets that grow together."""

    def __init__(self) -> None:
        self.parent: list[int] = []

    def new(self) -> int:
        self.parent.append(len(self.parent))
        return len(self.parent) - 1

    def find(self, kind: int) -> int:
        while self.parent[kind] != kind:
            self.parent[kind] = self.parent[self.parent[kind]]
            kind = self.parent[kind]
        return kind

    def join(self, kinds: Sequence[int]) -> int:
        roots = [self.find(kind) for kind in kinds]
        for root in roots[1:]:
            self.parent[root] = roots[0]
        return roots[0]

"""`Label`: what a collective is for."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Label:
    """The purpose of a collective, which ndtp knows and the dispatcher does not. There is one object a collective.

    `part` says which of how many chunks it moves, such as "2/4"; traffic does not tell chunks apart.  `ahead` are the
    bytes received of a collective that is started for a product yet to come; None once that has come, and of others.
    One that `follows` ends what another one began: both are one call.
    """

    op: tuple[str, ...]
    phase: str
    collective: str
    axes: tuple[str, ...]
    part: str = ""
    ahead: int | None = None
    follows: bool = False

    @property
    def title(self) -> str:
        """Return the name of the collective for profilers, such as "all_gather[y] 2/4 mlp.up A"."""
        return " ".join(filter(None, (f"{self.collective}[{' '.join(self.axes)}]", self.part, *self.op)))


# What ranks tell each other beside their tensors: no traffic of these.
ASIDE = Label(("compared",), "check", "receive", ())

# Names the collectives that are started in this context.
LABEL: ContextVar[Label | None] = ContextVar("ndtp_label", default=None)

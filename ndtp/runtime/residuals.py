"""`Residuals`: error feedback, what rounding takes from a weight's gradient on its way, added to the next one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from ndtp.collectives.handles import Route
    from ndtp.runtime.moves import Feed


class Residuals:
    """The parts of gradients that a wire's rounding has kept back on this rank, by parameter.

    A gradient that is sent as q(g) leaves g - q(g) behind.  Sent with the next one it is late, not lost: so the sum of
    all that was sent differs from the sum of all gradients by one rounding, however many steps there are (Seide et al.,
    "1-bit stochastic gradient descent", 2014).  Each residual has the size of what a rank sends: the gradient of the
    weight as it was gathered, and beside it its own part of the sum where that is rounded again.
    """

    def __init__(self) -> None:
        self._of = WeakIdKeyDictionary()

    def feed(self, leaf: Tensor | None, key: Hashable) -> Feed | None:
        """Return what adds to each tensor that a gradient's collectives send what was left of the last one.

        Args:
            leaf: the parameter whose gradient it is; None: it is none of a parameter.
            key: which of the parameter's gradients, where several products use it.
        """
        if leaf is None:
            return None
        of_it = self._of.setdefault(leaf, {})

        def fed(x: Tensor, route: Route, leg: int) -> Tensor:
            if route.rounded is None:
                return x
            place = key, leg, x.shape, x.dtype
            before = of_it.get(place)
            x = x if before is None else x + before
            # What is not finite is told by what arrives; it must not come back in the next step.
            of_it[place] = (x - route.rounded(x)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            return x

        return fed

    def discard(self) -> None:
        """Drop all of them, as where weights are loaded."""
        self._of.clear()

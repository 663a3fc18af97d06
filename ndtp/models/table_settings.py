"""Settings of an `nn.Embedding` that a table split over ranks does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ndtp.errors import LayoutError
from ndtp.models.computed import is_computed


def setting_against(name: str, table: Any, is_shared: bool) -> str | None:
    """Return the reason why an embedding stays whole, if one of its settings is one.

    Raises:
        LayoutError: each look-up changes rows of a table whose weight another layer has as well, or gives a sparse
            gradient of it.
    """
    for key, what, without in (("max_norm", "changes rows", None), ("sparse", "has a sparse gradient", False)):
        if getattr(table, key) and is_shared:
            raise LayoutError(
                f"parallelize: '{name}' has {key}={getattr(table, key)}, by which each look-up {what} of a weight that "
                f"it shares with another layer\n  fix: {key}={without}, or a weight of its own"
            )
    if is_computed(table):
        return "its weight is computed from other parameters"
    odd = odd_settings(table)
    return f"it has {odd[0]}={getattr(table, odd[0])}" if odd else None


def odd_settings(table: object) -> list[str]:
    """Return the settings of an embedding by which a look-up changes rows, or its gradient is of another kind."""
    return [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(table, key, None)]


def refuse_own_rows(name: str, table: object, axes: Sequence[str]) -> None:
    """Refuse a setting that goes by all rows of a batch, of which each rank along `axes` has its own.

    Raises:
        LayoutError: names it.
    """
    odd = [key for key in odd_settings(table) if key != "sparse"]
    if odd and axes:
        raise LayoutError(
            f"parallelize: '{name}' has {odd[0]}={getattr(table, odd[0])}, which goes by all ids of a batch, and ranks "
            f"along {', '.join(axes)} have ids of their own\n  fix: a grid without {', '.join(axes)}, or an embedding "
            f"without {odd[0]}"
        )


def refused_setting(table: Any) -> LayoutError:
    """The error of a table on the grid that was given such a setting since."""
    reason = setting_against(table.name, table, False)
    return LayoutError(
        f"Embedding '{table.name}': {reason}, which a table that is split over ranks does not have\n"
        "  fix: set it before parallelize, which leaves the table whole then"
    )

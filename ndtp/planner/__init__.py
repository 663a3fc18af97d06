"""Which grid, and why: searched among all of them.  Pure, without torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndtp.planner.search import GridPlan, Request, plan

__all__ = ["GridPlan", "Request", "plan"]


def __getattr__(name: str) -> Any:
    """Imported when it is first used: a hardware profile needs no search."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ndtp.planner.search"), name)

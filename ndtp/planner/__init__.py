"""The planner: it weighs every grid, and says why it chose one. Pure, without torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndtp.planner.block_cost import Block
    from ndtp.planner.grid_plan import GridPlan
    from ndtp.planner.hardware import Hardware
    from ndtp.planner.request import Request
    from ndtp.planner.search import plan
    from ndtp.planner.sequence import GridSequence, plan_sequence

_HOME = {
    "Block": "block_cost",
    "GridPlan": "grid_plan",
    "GridSequence": "sequence",
    "Hardware": "hardware",
    "Request": "request",
    "plan": "search",
    "plan_sequence": "sequence",
}

__all__ = ["Block", "GridPlan", "GridSequence", "Hardware", "Request", "plan", "plan_sequence"]


def __getattr__(name: str) -> Any:
    """Imported when it is first used: a hardware profile needs no search."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ndtp.planner.{_HOME[name]}"), name)

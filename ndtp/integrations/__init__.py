"""Programs of other libraries on a grid: transformers' Trainer and accelerate's Accelerator.

from ndtp.integrations import Trainer            # transformers.Trainer, with ndtp_grid="z=2,x=2,y=2"
from ndtp.integrations import Accelerator        # accelerate.Accelerator, the same

Nothing is imported before it is used: each of them needs its own library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndtp.integrations.accelerator import Accelerator
    from ndtp.integrations.trainer import GridTrainerMixin, Trainer

_HOME = {"Accelerator": "accelerator", "GridTrainerMixin": "trainer", "Trainer": "trainer"}

__all__ = ["Accelerator", "GridTrainerMixin", "Trainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ndtp.integrations' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"ndtp.integrations.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

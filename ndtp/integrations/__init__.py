"""Programs of other libraries on a grid: transformers' Trainer, accelerate's Accelerator, Lightning's strategy.

from ndtp.integrations import Trainer            # transformers.Trainer, with ndtp_grid="z=2,x=2,y=2"
from ndtp.integrations import Accelerator        # accelerate.Accelerator, the same
from ndtp.integrations import GridStrategy       # lightning.Trainer(strategy=GridStrategy("z=2,x=2,y=2"))
from ndtp.integrations import count_rows_once    # metrics of torchmetrics outside of Lightning

Nothing is imported before it is used: each of them needs its own library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndtp.integrations.accelerator import Accelerator
    from ndtp.integrations.lightning import GridStrategy
    from ndtp.integrations.rows_once import count_rows_once
    from ndtp.integrations.trainer import GridTrainerMixin, Trainer

_HOME = {"Accelerator": "accelerator", "GridStrategy": "lightning", "GridTrainerMixin": "trainer", "Trainer": "trainer",
         "count_rows_once": "rows_once"}  # fmt: skip

__all__ = ["Accelerator", "GridStrategy", "GridTrainerMixin", "Trainer", "count_rows_once"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ndtp.integrations' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"ndtp.integrations.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

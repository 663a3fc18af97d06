"""The errors that ndtp raises, and its warnings. Bad input is a `ValueError`; a peer that fails is a `RuntimeError`.

Messages name the op, the tensor, the sizes and the fix.  They depend on global facts only, so every rank says the same.
"""

from __future__ import annotations

import os
import sys
import warnings

_OWN = os.path.dirname(__file__) + os.sep


class GridError(ValueError):
    """A process grid that cannot exist, or does not fit the ranks at hand."""


class LayoutError(ValueError):
    """A layout, or a product of layouts, that cannot be computed, or a shape that does not follow from it."""


class MismatchError(ValueError):
    """Ranks disagree on plan, shapes, dtypes or the table of kernels; names the ranks that deviate."""


class CommunicationError(RuntimeError):
    """A collective failed: a peer died, stalled past the timeout, or the connection broke.

    Attributes:
        how: "gone", "raised" or "ended" (by itself) of a rank that left; "stopped", "silent" or "absent" of one that
            does not answer; "behind" of one that is alive and did not come; "apart" of one that is in another
            collective at the same place; "link" where a connection broke between ranks that are all alive, of which
            none is to blame; "unknown".
        ranks: of the world, that are to blame.
    """

    how: str = "unknown"
    ranks: tuple[int, ...] = ()


class CorruptionError(RuntimeError):
    """A rank has computed a wrong product in silence, which another one has found (`ndtp.recheck`).

    Attributes:
        ranks: of the world, that computed wrong.
        module, phase: whose product it was, and of which phase: "forward", "dgrad" or "wgrad".
    """

    ranks: tuple[int, ...] = ()
    module: str = ""
    phase: str = ""


class CaptureError(RuntimeError):
    """A step that cannot be captured in a CUDA graph as it is; names what stands in the way, and where."""


class RangeError(ValueError, IndexError):
    """Ids or targets that are none of the rows of a table, or of the classes."""


class CheckpointError(ValueError):
    """Files that cannot be loaded into a model: not there, cut short, or of another model."""


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line that runs: the first one outside of ndtp and torch, a user's or that of a library's model."""
    torch = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or _OWN) + os.sep
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OWN, torch)):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)

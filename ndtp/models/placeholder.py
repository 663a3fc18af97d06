"""`Placeholder`: hidden states as the code of an attention module sees them, sizes without numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.errors import LayoutError
from ndtp.models.between import CASTS, DROPOUTS, FACTS, SIZES
from ndtp.models.hidden import SHAPE, Hidden


class Placeholder(Tensor):
    """Hidden states as an attention module sees them: of the sequences of this rank, to be projected, nothing else."""

    source: Tensor
    seen: tuple[int, ...]

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if func is SHAPE:
            return torch.Size(args[0].seen)
        if func in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in SIZES:
            return func(torch.empty(args[0].seen, device="meta"), *args[1:], **(kwargs or {}))
        mine = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Placeholder))
        return mine.used_by(func, args, kwargs or {})

    def used_by(self, func: TorchFunction, args: Arguments, kwargs: Keywords) -> object:
        """Return what a function gives that does more with hidden states than to ask for their sizes."""
        if (func in CASTS or func in DROPOUTS) and isinstance(args[0], Placeholder):  # in front of an adapter
            return placeholder(func(args[0].source, *args[1:], **kwargs), args[0].seen)
        # A residual, added to what the module gives.
        if any(isinstance(x, Hidden) for x in args) or self.is_added_to(args):
            return func(*[x.source if isinstance(x, Placeholder) else x for x in args], **kwargs)
        name = str(getattr(func, "__name__", func)).strip("_")
        lies = self.source.passage if isinstance(self.source, Hidden) else tuple(self.source.shape)
        raise LayoutError(
            f"parallelize: an attention module computes {name} of its hidden states before it projects them, which are "
            f"split: {lies}\n  fix: leave its projections whole, by keep=; of adapters that were "
            "put on since, parallelize(model) once more"
        )

    def is_added_to(self, args: Arguments) -> bool:
        """Return whether hidden states with whole rows meet what has their sizes: what the module gives."""
        others = [x for x in args if isinstance(x, Tensor) and not isinstance(x, Placeholder)]
        return len(others) > 0 and all(x.shape == self.source.shape for x in others)


def placeholder(source: Tensor, seen: tuple[int, ...]) -> Tensor:
    x = torch.empty((), dtype=source.dtype, device=source.device)
    x.__class__ = Placeholder
    x.source, x.seen = source, seen  # type: ignore[attr-defined]
    return x

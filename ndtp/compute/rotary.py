"""`Rotary`: position embeddings by rotation, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ndtp.errors import LayoutError


@dataclass(frozen=True)
class Rotary:
    """Rotate pairs of a head's features by angles that grow with the position.

    Args:
        theta: the base of the wavelengths.
        dims: how many of a head's features are rotated, from the first on; default: all.
        interleaved: pairs are neighbours (GPT-J); else feature i goes with feature i + dims / 2 (GPT-NeoX, Llama).
        scale: positions are divided by it (linear scaling of longer contexts).

    Raises:
        LayoutError: `dims`, or the features of a head, are odd.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """

    theta: float = 10000.0
    dims: int | None = None
    interleaved: bool = False
    scale: float = 1.0

    def check(self, features: int) -> None:
        """Check that heads of so many features can be rotated.

        Raises:
            LayoutError: the features to be rotated are no pairs, or more than a head has.
        """
        dims = features if self.dims is None else self.dims
        if dims % 2 or not 0 < dims <= features:
            most = features - features % 2
            fix = f"dims={most}, or an even number of features" if most else "more features of a head"
            raise LayoutError(
                f"Rotary: dims={dims} of the {features} features of a head make no pairs to turn\n  fix: {fix}"
            )

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [rows, heads, d] by the angles of positions [rows], computed in fp32 or wider."""
        self.check(x.shape[-1])
        dims = x.shape[-1] if self.dims is None else self.dims
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        steps = torch.arange(0, dims, 2, dtype=wide, device=x.device) / dims
        angles = (positions.to(wide) / self.scale)[:, None] * self.theta**-steps
        cosine, sine = (f(angles)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
        turned, rest = x[..., :dims], x[..., dims:]
        if self.interleaved:
            one, other = turned[..., 0::2], turned[..., 1::2]
            pairs = (one * cosine - other * sine, other * cosine + one * sine)
            rotated = torch.stack(pairs, -1).flatten(-2)
        else:
            one, other = turned.chunk(2, -1)
            rotated = torch.cat((one * cosine - other * sine, other * cosine + one * sine), -1)
        return rotated if dims == x.shape[-1] else torch.cat((rotated, rest), -1)

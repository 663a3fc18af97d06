"""`Wire`: in which dtype the operands and results of products travel, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ndtp.collectives.codecs import CODECS, Codec
from ndtp.errors import GridError

if TYPE_CHECKING:
    import torch

# What a product calls its tensors -> of which kind they are.
_KINDS = {
    "A": "activations", "C": "activations", "B": "weights", "bias": "weights", "dA": "activation_gradients",
    "dC": "activation_gradients", "dB": "weight_gradients", "dbias": "weight_gradients", "gradient": "weight_gradients",
}  # fmt: skip
_GRADIENTS = ("activation_gradients", "weight_gradients")


@dataclass(frozen=True)
class Wire:
    """The dtypes in which tensors travel; None: the one in which they are computed.

    Gathers quantise once, at the owner, whose own part is quantised like all others: every rank has the same numbers.
    Sums are never of quantised numbers: the parts are exchanged, widened, and added up in fp32 in the order of the
    ranks, as ZeRO++ does (Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
    Training", 2023).  An all-reduce is such a sum and a gather.

    Attributes:
        weights, activations, activation_gradients, weight_gradients: "bf16", "fp16", "fp8_e4m3", "fp8_e5m2" or "int8".
            The last three have a scale of fp32 for each row.
    """

    weights: str | None = None
    activations: str | None = None
    activation_gradients: str | None = None
    weight_gradients: str | None = None

    @classmethod
    def of(cls, wire: Wire | str | Mapping[str, str | None] | None) -> Wire | None:
        """Return the wire that a user has written.

        Args:
            wire: a name for all kinds; "fp8" is e4m3 for weights and activations and e5m2 for gradients.  Or names by
                kind, of which "gradients" stands for both of theirs.

        Raises:
            GridError: a kind or a dtype that is none.
        """
        if wire is None or isinstance(wire, Wire):
            return wire
        kinds = [field.name for field in fields(cls)]
        asked: Mapping[str, str | None] = dict.fromkeys(kinds, wire) if isinstance(wire, str) else wire
        if not isinstance(asked, Mapping):
            raise _refusal(wire, "is neither a dtype nor a dict of dtypes by kind")
        found: dict[str, str | None] = {}
        for kind, name in asked.items():
            if kind not in (*kinds, "gradients"):
                raise _refusal(wire, f"names {kind!r}, which is none of {', '.join(kinds)}, gradients")
            for each in _GRADIENTS if kind == "gradients" else (kind,):
                found[each] = ("fp8_e5m2" if each in _GRADIENTS else "fp8_e4m3") if name == "fp8" else name
                if name is not None and found[each] not in CODECS:
                    raise _refusal(wire, f"has {name!r}, which is none of {', '.join(CODECS)}, fp8")
        return cls(**found)

    def codec(self, op: tuple[str, ...], dtype: torch.dtype) -> Codec | None:
        """Return the codec by which a tensor of a product travels; None: it travels as it is.

        Args:
            op: what errors call it: the name of the product, and what that calls the tensor.
        """
        name = getattr(self, _KINDS[op[1]]) if len(op) > 1 and op[1] in _KINDS else None
        codec = None if name is None else CODECS[name]
        return codec if codec is not None and codec.fits(dtype) else None


def _refusal(wire: object, why: str) -> GridError:
    return GridError(f"wire={wire!r} {why}\n  fix: wire='bf16', or wire={{'weights': 'fp8', 'gradients': 'bf16'}}")

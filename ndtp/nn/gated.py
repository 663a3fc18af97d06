"""`GatedMLP`: (gate, up) -> act(gate) * up -> down on a grid of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.algebra.schemes import BlockLayouts
from ndtp.compute.epilogues import ACTIVATIONS, GATES
from ndtp.errors import LayoutError
from ndtp.nn.in_turns import InTurns
from ndtp.nn.mlp import MLP
from ndtp.runtime.given_mesh import GivenWire
from ndtp.runtime.process_grid import ProcessGrid

TURNS = InTurns("up", ("gate", "up"), "down")
GATED = {gate: name for name, gate in GATES.items()}


class GatedMLP(MLP):
    """`down(dropout(activation(gate(x)) * up(x)))`, the block of LLaMA, Mistral, Gemma and others, on a grid.

        x        [tokens, hidden]  as `in_layout`     returns the same as `out_layout`
        up       weight [2 inner, hidden]             down    weight [hidden, inner]

    Gate and up are one product, so that x is gathered once.  The rows of `up.weight` (and of `up.bias`) take turns: row
    2j is that of the gate's feature j, row 2j + 1 that of up's.  So every split of the features, over any axes, keeps
    the two of a feature together.  `from_dense` and `to_dense` convert, and `state_dict` has the dense `gate` and `up`.

    Args:
        hidden, inner: features outside and inside of the block.
        activation: of the gate, by name: silu (SwiGLU), gelu, gelu_tanh (GeGLU), relu (ReGLU), sigmoid (GLU), or
            any other of `ndtp.nn.MLP`.
        bias, dropout, device, dtype: as for `ndtp.nn.MLP`, whose other arguments are taken too.

    Raises:
        LayoutError: as `ndtp.nn.MLP`.
        ValueError: another activation.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        activation: str = "silu",
        bias: bool = False,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: ProcessGrid,
        scheme: str = "3d",
        axes: Sequence[str] | None = None,
        layouts: BlockLayouts | None = None,
        pad: bool | int = False,
        regather: tuple[str, ...] = (),
        chunks: int | str = "auto",
        wire: GivenWire = None,
        seed: int | None = None,
        name: str = "mlp",
    ) -> None:
        if activation not in GATED:
            raise ValueError(f"GatedMLP: activation {activation!r} of the gate is not one of {', '.join(GATED)}")
        super().__init__(
            hidden, inner, GATED[activation], bias, dropout, device, dtype, mesh=mesh, scheme=scheme, axes=axes,
            layouts=layouts, pad=pad, regather=regather, chunks=chunks, wire=wire, seed=seed, name=name,
        )  # fmt: skip

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the state dict of the dense block, with `gate`, `up` and `down`; shards are views of this block's."""
        state = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        TURNS.split(state, args[1] if len(args) > 1 else prefix)
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        TURNS.join(self, state_dict, prefix, rest[2], rest[4])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @classmethod
    def from_dense(  # type: ignore[override]
        cls,
        gate: nn.Linear,
        up: nn.Linear,
        down: nn.Linear,
        activation: str = "silu",
        *,
        mesh: ProcessGrid,
        **arguments: Any,
    ) -> GatedMLP:
        """The block of three `nn.Linear`, on a grid; further arguments as for the constructor.

        Raises:
            LayoutError: layers that do not make a block, or of which some have a bias, or train, and others do not.
        """
        sizes = [(layer.in_features, layer.out_features) for layer in (gate, up, down)]
        if not sizes[0] == sizes[1] == sizes[2][::-1]:
            raise LayoutError(
                "GatedMLP.from_dense: "
                + ", ".join(f"{n} is {i} -> {o}" for n, (i, o) in zip(("gate", "up", "down"), sizes, strict=True))
                + "; gate and up lead to where down begins, and down back\n  fix: three ndtp.nn.Linear"
            )
        arguments = {"device": up.weight.device, "dtype": up.weight.dtype, "seed": 0, **arguments}
        block = cls(up.in_features, up.out_features, activation, up.bias is not None, mesh=mesh, **arguments)
        block.up.load_dense(_in_turns(gate, up))
        block.down.load_dense(down)
        return block

    def to_dense(self) -> DenseGatedMLP:  # type: ignore[override]
        """A module of `gate`, `up` and `down`, on every rank; a collective."""
        return DenseGatedMLP(self)


class DenseGatedMLP(nn.Module):
    """The dense block of three whole `nn.Linear` that `GatedMLP.to_dense` returns."""

    def __init__(self, block: GatedMLP) -> None:
        super().__init__()
        both = block.up.to_dense()
        self.gate, self.up = (_every_other(both, first) for first in (0, 1))
        self.gate_activation = GATES[str(block.activation_name)]
        self.dropout = nn.Dropout(block.dropout.p)
        self.down = block.down.to_dense()
        self.train(block.training)

    def forward(self, x: Tensor) -> Tensor:
        gate = ACTIVATIONS[self.gate_activation].forward(self.gate(x))
        return self.down(self.dropout(gate * self.up(x)))


def _in_turns(gate: nn.Linear, up: nn.Linear) -> nn.Linear:
    both = nn.Linear(up.in_features, 2 * up.out_features, up.bias is not None, device="meta")
    for name in ("weight", "bias"):
        one, other = getattr(gate, name), getattr(up, name)
        wants = [None if parameter is None else parameter.requires_grad for parameter in (one, other)]
        if wants[0] != wants[1]:
            raise LayoutError(
                f"GatedMLP.from_dense: gate and up are one product, but requires_grad of their {name} is "
                f"{wants[0]} and {wants[1]}\n  fix: a {name} for both, frozen for both or for none"
            )
        if one is not None:
            turns = torch.stack((one.detach(), other.detach()), 1).flatten(0, 1)
            setattr(both, name, nn.Parameter(turns, one.requires_grad))
    return both


def _every_other(both: nn.Linear, first: int) -> nn.Linear:
    half = nn.Linear(both.in_features, both.out_features // 2, both.bias is not None, device="meta")
    for name, parameter in both.named_parameters():
        setattr(half, name, nn.Parameter(parameter.detach()[first::2].clone(), parameter.requires_grad))
    return half

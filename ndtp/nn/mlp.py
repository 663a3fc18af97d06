"""`MLP`: MatMul -> activation -> MatMul on a grid of processes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.algebra.schemes import BlockLayouts, block_layouts
from ndtp.algebra.volume import Volume
from ndtp.compute.activations import ActivationFunction, activation_named, width_of
from ndtp.errors import LayoutError
from ndtp.nn.dropout import Dropout
from ndtp.nn.hooks import runs_alone
from ndtp.nn.linear import Linear, memory_options
from ndtp.nn.padding import (
    RowBlocks,
    as_rows,
    pad_rows,
    padded_tokens,
    pair_multiples,
    row_multiple,
    with_leading_dims,
    zero_padding,
    zero_padding_rows,
)
from ndtp.nn.random import draw_seed, given_or_drawn
from ndtp.nn.sharded import BlockModule, volume_of
from ndtp.ops.memory import Memory, memory
from ndtp.ops.products import mlp
from ndtp.runtime.given_mesh import GivenWire, given_mesh
from ndtp.runtime.process_grid import ProcessGrid


class MLP(BlockModule):
    """`down(dropout(activation(up(x))))`, where both products and what lies between stay on the grid.

        x        [tokens, hidden]  as `in_layout`     returns the same as `out_layout`
        up       weight [inner, hidden]               down     weight [hidden, inner]

    Under a named scheme the block ends in the layout in which it began.  Keys and shapes of the state dict are those of
    a dense pair called `up` and `down`.

    Args:
        hidden, inner: features outside and inside of the block.
        activation: a name (gelu, gelu_tanh, quick_gelu, relu, squared_relu, leaky_relu, relu6, silu, hardswish, mish,
            tanh, sigmoid, identity), or a callable that acts element by element.  A gated one (swiglu, geglu,
            geglu_tanh, reglu, glu, or gated_ with one of the other names) makes `up` twice as wide, with gate and up
            in turns: see `ndtp.nn.GatedMLP`.
        bias, device, dtype: as for `nn.Linear`.
        dropout: probability for the activations; the mask is the same on every grid, see `ndtp.nn.Dropout`.
        mesh: the process grid.
        scheme: "1d", "1d-sp", "2d", "2d-features" or "3d", see `ndtp.algebra.schemes.block_layouts`.
        axes: the axes that the scheme uses.
        layouts: explicit layouts instead of a scheme.
        pad: pad features that do not divide, see `ndtp.nn.Linear`; rows that do not divide inside the block too.
        regather: "a" and/or "b": operands of both products that backward gathers again instead of keeping.
        chunks, wire: as for `ndtp.nn.Linear`.
        seed: default: drawn from torch's generator, which must be seeded alike on every rank.
        name: what errors, profiles and the initialisation call this block.

    Raises:
        LayoutError: layouts that make no block, or sizes that do not divide.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        activation: str | ActivationFunction = "gelu",
        bias: bool = True,
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
        super().__init__()
        mesh = given_mesh(mesh, name, wire=wire)
        layouts = layouts or block_layouts(mesh.grid, scheme, axes)
        plans = layouts.plans(name)
        # Both products must agree on the padded inner size, and the block on the hidden one at both ends.
        enters, inside, leaves = pair_multiples(*plans, pad)
        at_ends = math.lcm(enters, leaves)
        shared: dict[str, Any] = {
            "mesh": mesh,
            "regather": regather,
            "chunks": chunks,
            "device": device,
            "dtype": dtype,
        }
        seed = draw_seed() if seed is None and not _is_meta(device) else seed
        self.hidden, self.inner, self.mesh, self.layouts, self.name = hidden, inner, mesh, layouts, name
        self.activation_name = activation if isinstance(activation, str) else None
        self.activation, width = activation_named(activation), width_of(activation)
        self._named = self.activation  # what the name stands for, should somebody put another one in its place
        self.up = Linear(
            hidden, width * inner, bias, in_layout=layouts.input, weight_layout=layouts.up_weight,
            out_layout=layouts.hidden, pad=(at_ends, width * inside), seed=seed, name=f"{name}.up", **shared,
        )  # fmt: skip
        self.dropout = Dropout(dropout, layouts.hidden, mesh, inner)
        self.down = Linear(
            inner, hidden, bias, in_layout=layouts.hidden, weight_layout=layouts.down_weight,
            out_layout=layouts.output, pad=(inside, at_ends), seed=seed, name=f"{name}.down", **shared,
        )  # fmt: skip
        self.padded_inner = self.down.padded_in
        # Else padding rows of a shard would end up among the rows of other shards.
        ends_alike = layouts.input.dims[0] == layouts.output.dims[0]
        self.row_multiple = row_multiple(plans, layouts.input) if pad and ends_alike else 1

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all parameters anew; the same values on every grid."""
        seed = given_or_drawn(seed, self.up.seed)
        self.up.reset_parameters(seed)
        self.down.reset_parameters(seed)

    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(x, f"{self.name}.up")
        count, rows = rows.shape[0], pad_rows(rows, self.row_multiple)
        if self._is_one_schedule():
            up, down = self.up, self.down
            (up_weight, up_bias), (down_weight, down_bias) = up.operands(rows), down.operands(rows)
            weights, plans, biases = (up_weight, down_weight), (up.plan, down.plan), (up_bias, down_bias)
            y = mlp(rows, weights, plans, self.mesh, str(self.activation_name), biases, (up, down))
            y = down.without_padding(y)
        else:
            blocks = RowBlocks.of(count, rows)
            h = self.activation(zero_padding_rows(self.up(rows), self.layouts.hidden, self.mesh, blocks))
            # In its place there may be a dropout that knows nothing of rows.
            h = self.dropout(h, blocks=blocks) if isinstance(self.dropout, Dropout) else self.dropout(h)
            h = zero_padding_rows(h, self.layouts.hidden, self.mesh, blocks)
            if self.padded_inner != self.inner:
                # An activation need not be zero at zero; its padding must be, or the weight's padding gets a gradient.
                h = zero_padding(h, self.layouts.hidden, self.mesh, self.inner)
            y = self.down(h)
        y = y[:count] if count != rows.shape[0] else y
        return with_leading_dims(y, x.shape[:-1], f"MLP '{self.name}'")

    def _is_one_schedule(self) -> bool:
        """Whether one schedule can run the block: only the activation lies between the products, and the parts have
        no hooks.
        """
        if self.activation_name is None or self.activation is not self._named or self.padded_inner != self.inner:
            return False
        are_plain = runs_alone(self.up, Linear) and runs_alone(self.down, Linear) and runs_alone(self.dropout, Dropout)
        return are_plain and not (self.training and self.dropout.p > 0)

    def volume(self, tokens: int, dgrad: bool = True) -> Volume:
        """The exact traffic of a forward and backward of `tokens` rows, in bytes received per rank.

        Args:
            dgrad: whether the input of the block needs a gradient.
        """
        shape = self.in_layout.shard_shape(
            (padded_tokens(tokens, self.row_multiple, self.in_layout), self.up.padded_in)
        )
        x = torch.empty(shape, dtype=self.up.weight.dtype, device="meta", requires_grad=dgrad)
        return volume_of(self, self.mesh, (x,))

    def memory(self, tokens: int, dgrad: bool = True, backend: str | None = None) -> Memory:
        """Bytes that a forward and backward of `tokens` rows need beside input and parameters; see `ndtp.ops.memory`.

        Args:
            dgrad: whether the input of the block needs a gradient.
            backend: "gloo" or "nccl"; default: that of the mesh.

        Raises:
            LayoutError: a block that is not one schedule: what lies between its products is not ndtp's.
        """
        if not self._is_one_schedule():
            raise LayoutError(
                f"MLP '{self.name}': with dropout, padding inside, an activation of your own, or hooks and the like on "
                "its parts the block is no one schedule, these run one by one\n  fix: up.memory and down.memory, or "
                "eval() where dropout alone is in the way"
            )
        tokens = padded_tokens(tokens, self.row_multiple, self.in_layout)
        up, down = self.up, self.down
        shape = (tokens, up.padded_in, down.padded_in, down.padded_out)
        options = memory_options(up, down, backend=backend)
        return memory((up.plan, down.plan), shape, activation=str(self.activation_name), dgrad=dgrad, **options)

    @classmethod
    def from_dense(
        cls,
        up: nn.Linear,
        down: nn.Linear,
        activation: str | ActivationFunction = "gelu",
        *,
        mesh: ProcessGrid,
        **arguments: Any,
    ) -> MLP:
        """The block of two `nn.Linear`, on a grid; further arguments as for the constructor.

        Raises:
            LayoutError: layers that do not make a block, or of which one has a bias and the other none.
        """
        width = width_of(activation)
        if (up.in_features, up.out_features) != (down.out_features, width * down.in_features):
            raise LayoutError(
                f"MLP.from_dense: up is {up.in_features} -> {up.out_features} and down {down.in_features} -> "
                f"{down.out_features}; a block leads back to where it began"
                + f", and {activation} takes {width} features for each that it gives" * (width > 1)
                + "\n  fix: two ndtp.nn.Linear"
            )
        arguments = {"device": up.weight.device, "dtype": up.weight.dtype, "seed": 0, **arguments}
        block = cls(up.in_features, down.in_features, activation, up.bias is not None, mesh=mesh, **arguments)
        block.up.load_dense(up)
        block.down.load_dense(down)
        return block

    def to_dense(self) -> nn.Sequential:
        """A dense `nn.Sequential` of `up`, `activation`, `dropout` and `down`, on every rank; a collective."""
        return nn.Sequential(
            OrderedDict(
                up=self.up.to_dense(),
                activation=_Elementwise(self.activation),
                dropout=nn.Dropout(self.dropout.p),
                down=self.down.to_dense(),
            )
        ).train(self.training)


class _Elementwise(nn.Module):
    def __init__(self, function: ActivationFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _is_meta(device: Device) -> bool:
    return device is not None and torch.device(device).type == "meta"

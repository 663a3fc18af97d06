"""`Linear`: `nn.Linear` on a grid of processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.volume import Volume
from ndtp.errors import LayoutError
from ndtp.nn.padding import as_rows, feature_multiple, padded_to, with_leading_dims, zero_padding
from ndtp.nn.parameters import fill_uniform
from ndtp.nn.random import given_or_drawn
from ndtp.nn.sharded import Sharded, volume_of
from ndtp.ops.memory import Memory, memory
from ndtp.ops.products import chain
from ndtp.runtime.chunk_choices import in_words
from ndtp.runtime.dry_grid import dry_backend
from ndtp.runtime.given_mesh import GivenWire
from ndtp.runtime.process_grid import ProcessGrid


class Linear(Sharded):
    """`y = x W^T + b`, with x, W, b and y laid out on a grid.

        x        [tokens, in]  as `in_layout`          returns [tokens, out] as `out_layout`
        weight   [out, in]     as `weight_layout`      bias [out] as the weight's first dim

    Weight and bias are DTensors with the keys and shapes of `nn.Linear`.  Further leading dims of x count as rows, of
    which the first is the one that is split.  The same seed gives the same global weights on every grid.

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`.
        mesh: the process grid.
        scheme: a named scheme, see `ndtp.algebra.schemes.block_layouts`.
        position: "up" for the first product of the scheme's block, "down" for the second.
        axes: the axes that the scheme uses.
        in_layout, weight_layout, out_layout: layouts of x, W (as [out, in]) and y instead of a scheme; the default of
            `out_layout` is the plan's mirror rule.
        pad: where a feature dim does not divide, store the weight padded with zeros to the next size that does.  x and
            y are then shards of padded tensors; results and gradients are those of the unpadded problem.  A pair of
            integers pads `in` and `out` to multiples of these, so that one checkpoint fits many grids.
        regather: "a" and/or "b": operands that backward gathers again instead of keeping.
        chunks: the number of chunks of rows whose communication and GEMMs overlap.  Default: what the layout of x asks
            for, else as many as pay (`ndtp.runtime.chunk_count`); where that is worth a measurement all ranks of the
            grid measure together, once, where a product first runs.
        wire: the dtypes in which its tensors travel, such as "bf16", see `ndtp.Wire`.  Default: those of the mesh.
        seed: default: drawn from torch's generator, which must be seeded alike on every rank.
        name: what errors, profiles and the initialisation call this layer.

    Raises:
        LayoutError: layouts that make no product, or sizes that do not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: ProcessGrid,
        scheme: str = "3d",
        position: str = "up",
        axes: Sequence[str] | None = None,
        in_layout: Layout | None = None,
        weight_layout: Layout | None = None,
        out_layout: Layout | None = None,
        pad: bool | tuple[int, int] = False,
        regather: tuple[str, ...] = (),
        chunks: int | str = "auto",
        wire: GivenWire = None,
        seed: int | None = None,
        name: str = "linear",
    ) -> None:
        super().__init__(mesh, seed, name, wire)
        if position not in ("up", "down"):
            raise LayoutError(f"Linear '{name}': position={position!r} is neither 'up' nor 'down'")
        if (in_layout is None) != (weight_layout is None) or (out_layout is not None and in_layout is None):
            raise LayoutError(f"Linear '{name}': give in_layout and weight_layout together, or a scheme")
        if in_layout is not None and weight_layout is not None:
            a, b, out = in_layout, weight_layout, out_layout
        else:
            named = block_layouts(mesh.grid, scheme, axes)
            up = (named.input, named.up_weight, named.hidden)
            a, b, out = up if position == "up" else (named.hidden, named.down_weight, named.output)
        plan = MatMulPlan(a, b, out, transpose_b=True, regather=regather, chunks=chunks, name=name)
        self.in_features, self.out_features = in_features, out_features
        self.plan = plan
        pad_in, pad_out = pad if isinstance(pad, tuple) else (pad, pad)
        multiples = feature_multiple("k", plan, pad_in), feature_multiple("n", plan, pad_out)
        self.padded_in, self.padded_out = map(padded_to, (in_features, out_features), multiples)
        # Tokens are not known yet; features must divide now, identically on every rank.
        plan.check_divides({"m": 0, "k": self.padded_in, "n": self.padded_out})
        stored = (self.padded_out, self.padded_in)
        self.add("weight", (out_features, in_features), plan.b, device, dtype, stored)
        if bias:
            self.add("bias", (out_features,), plan.bias, device, dtype, stored[:1])
        else:
            self.register_parameter("bias", None)
        if not self.weight.is_meta:
            self.reset_parameters()

    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def in_layout(self) -> Layout:
        return self.plan.a

    @property
    def weight_layout(self) -> Layout:
        return self.plan.b

    @property
    def out_layout(self) -> Layout:
        return self.plan.out

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw weight and bias from U(-1/sqrt(in), 1/sqrt(in)), the distribution of `nn.Linear`.

        Values are keyed by (seed, parameter name, global index); every rank draws its own shard.
        """
        seed = given_or_drawn(seed, self.seed)
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for name in self.parameter_names():
            lies = self.lies[name]
            fill_uniform(getattr(self, name), lies.layout, self.mesh, bound, lies.real, seed, f"{self.name}.{name}")

    def forward(self, x: Tensor) -> Tensor:
        rows = as_rows(x, self.name)
        weight, bias = self.operands(rows)
        y = chain(rows, (weight,), (bias,), (self.plan,), (None,), self.mesh, (self,))
        return with_leading_dims(self.without_padding(y), x.shape[:-1], f"Linear '{self.name}'")

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, to be used with `x`.

        Raises:
            LayoutError: a parameter that was put in the place of what this layer made and is no shard of it, or that
                is still on the meta device.
        """
        return self.needed("weight", x), self.own("bias", x)

    def without_padding(self, y: Tensor) -> Tensor:
        """This rank's shard of y [.., out] with the columns that lie beyond `out_features` set to zero."""
        is_padded = self.padded_out != self.out_features
        return zero_padding(y, self.out_layout, self.mesh, self.out_features) if is_padded else y

    def volume(self, tokens: int, dgrad: bool = True) -> Volume:
        """The exact traffic of a forward and backward of `tokens` rows, in bytes received per rank.

        Args:
            dgrad: whether the rows need a gradient.
        """
        shape = self.in_layout.shard_shape((tokens, self.padded_in))
        x = torch.empty(shape, dtype=self.weight.dtype, device="meta", requires_grad=dgrad)
        return volume_of(self, self.mesh, (x,))

    def memory(self, tokens: int, dgrad: bool = True, backend: str | None = None) -> Memory:
        """Bytes that a forward and backward of `tokens` rows need beside input and parameters; see `ndtp.ops.memory`.

        Args:
            backend: "gloo" or "nccl"; default: that of the mesh.
        """
        return memory(
            (self.plan,),
            (tokens, self.padded_in, self.padded_out),
            dgrad=dgrad,
            **memory_options(self, backend=backend),
        )

    @torch.no_grad()
    def load_dense(self, dense: nn.Linear) -> Linear:
        """Take over the values of an `nn.Linear`; every rank copies its shard.

        Raises:
            LayoutError: other sizes, or a bias that one of the two lacks.
        """
        theirs = (dense.in_features, dense.out_features, dense.bias is not None)
        ours = (self.in_features, self.out_features, self.bias is not None)
        if theirs != ours:
            raise LayoutError(f"Linear '{self.name}': (in, out, bias) is {ours}, of the dense layer {theirs}")
        shapes = [tuple(p.shape) for p in (dense.weight, dense.bias) if p is not None]
        if shapes != [(self.out_features, self.in_features), (self.out_features,)][: len(shapes)]:
            raise LayoutError(
                f"Linear '{self.name}': the dense layer is {dense.in_features} -> {dense.out_features}, its parameters "
                f"have the shapes {', '.join(map(str, shapes))}"
            )
        for name in self.parameter_names():
            self.take_over(name, getattr(dense, name))
        return self

    @classmethod
    def from_dense(cls, dense: nn.Linear, *, mesh: ProcessGrid, **arguments: Any) -> Linear:
        """Make a Linear with the weights of an `nn.Linear`; further arguments are the constructor's."""
        arguments = {"device": dense.weight.device, "dtype": dense.weight.dtype, "seed": 0, **arguments}
        parallel = cls(dense.in_features, dense.out_features, dense.bias is not None, mesh=mesh, **arguments)
        return parallel.load_dense(dense)

    def to_dense(self) -> nn.Linear:
        """An `nn.Linear` with the same values, on every rank; a collective."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        for name in self.parameter_names():
            setattr(dense, name, self.dense(name))
        return dense

    def extra_repr(self) -> str:
        chosen = in_words(self.mesh.chunks_chosen(self.plan), by_speeds=True)
        chunks = f"; {chosen}" if chosen else ""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.plan}{chunks}"


def memory_options(*linears: Linear, backend: str | None) -> dict[str, Any]:
    """Return the arguments of `ndtp.ops.memory.memory` for the layers of a chain."""
    return {
        "dtype": linears[0].weight.dtype,
        "wgrad": [linear.weight.requires_grad for linear in linears],
        "bias": [linear.bias is not None for linear in linears],
        "bias_grad": [linear.bias is not None and linear.bias.requires_grad for linear in linears],
        "backend": backend or dry_backend(linears[0].mesh.backend),
        "mesh": linears[0].mesh,
    }

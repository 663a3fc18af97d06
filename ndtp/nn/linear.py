"""`Linear`: `nn.Linear` on a grid of processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.volume import Volume
from ndtp.errors import LayoutError
from ndtp.nn.padding import as_rows, feature_multiple, with_leading_dims, zero_padding
from ndtp.nn.parameters import check_own, empty_parameter, fill_from_dense, fill_uniform, full, taken
from ndtp.nn.random import draw_seed
from ndtp.ops.memory import Memory, memory
from ndtp.ops.products import chain
from ndtp.runtime.process_grid import ProcessGrid


class Linear(nn.Module):
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
        chunks: the number of chunks of rows whose communication and GEMMs overlap, or "auto"; default: one.
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
        device: Any = None,
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
        chunks: int | str = 0,
        seed: int | None = None,
        name: str = "linear",
    ) -> None:
        super().__init__()
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
        self.plan, self.mesh, self.name, self.seed = plan, mesh, name, seed
        pad_in, pad_out = pad if isinstance(pad, tuple) else (pad, pad)
        multiples = feature_multiple("k", plan, pad_in), feature_multiple("n", plan, pad_out)
        self.padded_in, self.padded_out = (
            -(-size // multiple) * multiple
            for size, multiple in zip((in_features, out_features), multiples, strict=True)
        )
        self._create_parameters(bias, device, dtype)

    def _create_parameters(self, bias: bool, device: Any, dtype: torch.dtype | None) -> None:
        plan, mesh = self.plan, self.mesh
        # Tokens are not known yet; features must divide now, identically on every rank.
        plan.check_divides({"m": 0, "k": self.padded_in, "n": self.padded_out})
        shape = (self.padded_out, self.padded_in)
        self._shards = plan.b.shard_shape(shape), plan.bias.shard_shape(shape[:1])
        self.weight = empty_parameter(shape, plan.b, mesh, device, dtype)
        self.bias = empty_parameter(shape[:1], plan.bias, mesh, device, dtype) if bias else None
        if not self.weight.is_meta:
            self.reset_parameters()

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
        seed = next((s for s in (seed, self.seed) if s is not None), None)
        seed = draw_seed() if seed is None else seed
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        real = (self.out_features, self.in_features)
        fill_uniform(self.weight, self.plan.b, self.mesh, bound, real, seed, f"{self.name}.weight")
        if self.bias is not None:
            fill_uniform(self.bias, self.plan.bias, self.mesh, bound, real[:1], seed, f"{self.name}.bias")

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
        weight, bias = self.weight, self.bias
        check_own(weight, (self.padded_out, self.padded_in), self._shards[0], x, f"Linear '{self.name}': weight")
        if bias is not None:
            check_own(bias, (self.padded_out,), self._shards[1], x, f"Linear '{self.name}': bias")
        return weight, bias

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """As torch does, which copies or assigns what has the shape of the parameter: here that is a dense tensor."""
        shape = (self.out_features, self.in_features)
        for name, layout, real in (("weight", self.plan.b, shape), ("bias", self.plan.bias, shape[:1])):
            own, value = self._parameters.get(name), state_dict.get(prefix + name)
            if own is None or not isinstance(value, Tensor):
                continue
            try:
                mine = taken(value, own, layout, self.mesh, real)
            except LayoutError as error:
                error_msgs.append(f"{prefix}{name}: {error}")
                mine = own  # stays as it is
            state_dict = {**state_dict, prefix + name: mine}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def without_padding(self, y: Tensor) -> Tensor:
        """This rank's shard of y [.., out] with the columns that lie beyond `out_features` set to zero."""
        is_padded = self.padded_out != self.out_features
        return zero_padding(y, self.out_layout, self.mesh, self.out_features) if is_padded else y

    def volume(self, tokens: int, dgrad: bool = True) -> Volume:
        """The exact traffic of a forward and backward of `tokens` rows, in elements received per rank."""
        shape = (tokens, self.padded_in, self.padded_out)
        return self.plan.volume(
            shape,
            dgrad=dgrad,
            wgrad=self.weight.requires_grad,
            bias=self.bias is not None,
            bias_grad=self.bias is not None and self.bias.requires_grad,
        )

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
        fill_from_dense(self.weight, self.plan.b, self.mesh, dense.weight)
        if self.bias is not None:
            fill_from_dense(self.bias, self.plan.bias, self.mesh, dense.bias)
        for ours_, theirs_ in ((self.weight, dense.weight), (self.bias, dense.bias)):
            if ours_ is not None:
                ours_.requires_grad_(theirs_.requires_grad)
        return self

    @classmethod
    def from_dense(cls, dense: nn.Linear, *, mesh: ProcessGrid, **arguments: Any) -> Linear:
        """The same layer as an `nn.Linear`, on a grid; further arguments as for the constructor."""
        arguments = {"device": dense.weight.device, "dtype": dense.weight.dtype, "seed": 0, **arguments}
        parallel = cls(dense.in_features, dense.out_features, dense.bias is not None, mesh=mesh, **arguments)
        return parallel.load_dense(dense)

    def to_dense(self) -> nn.Linear:
        """An `nn.Linear` with the same values, on every rank; a collective."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        shape = (self.out_features, self.in_features)
        dense.weight = nn.Parameter(full(self.weight, self.plan.b, self.mesh, shape), self.weight.requires_grad)
        if self.bias is not None:
            dense.bias = nn.Parameter(full(self.bias, self.plan.bias, self.mesh, shape[:1]), self.bias.requires_grad)
        return dense

    def extra_repr(self) -> str:
        chosen = self.mesh.chunks_chosen(self.plan).items()
        chunks = "".join(f"; {count} chunk{'s' * (count > 1)} of {m} rows: {why}" for m, (count, why) in chosen)
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.plan}{chunks}"


def memory_options(*linears: Linear, backend: str | None) -> dict[str, Any]:
    """What `ndtp.ops.memory.memory` asks of the layers of a chain."""
    return {
        "dtype": linears[0].weight.dtype,
        "wgrad": [linear.weight.requires_grad for linear in linears],
        "bias": [linear.bias is not None for linear in linears],
        "bias_grad": [linear.bias is not None and linear.bias.requires_grad for linear in linears],
        "backend": backend or linears[0].mesh.backend or "gloo",
        "mesh": linears[0].mesh,
    }

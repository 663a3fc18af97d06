"""`LayerNorm` and `RMSNorm` on rows whose features are split over a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.types import Device

from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.volume import Volume
from ndtp.errors import LayoutError
from ndtp.nn.padding import padded_to
from ndtp.nn.parameters import expressible, fill_from_dense
from ndtp.nn.sharded import Sharded, memory_of, volume_of
from ndtp.ops.memory import Memory
from ndtp.ops.norms import NormPlan, default_eps, norm, with_eps
from ndtp.runtime.process_grid import ProcessGrid

Self = TypeVar("Self", bound="_Norm")


class _Norm(Sharded):
    centred: bool

    def __init__(
        self,
        features: int,
        eps: float | None,
        affine: bool,
        bias: bool,
        device: Device,
        dtype: torch.dtype | None,
        *,
        mesh: ProcessGrid,
        scheme: str,
        axes: Sequence[str] | None,
        layout: Layout | None,
        pad: bool | int,
        offset: float,
        name: str,
    ) -> None:
        super().__init__(mesh, None, name)
        layout = layout or block_layouts(mesh.grid, scheme, axes).input
        splits = layout.num_splits(-1)
        multiple = splits if pad is True else int(pad) or 1
        width = padded_to(features, multiple)
        if width % splits:
            raise LayoutError(
                f"{type(self).__name__} '{name}': {features} features lie as {layout}, and {splits} does not divide "
                f"them\n  fix: pad=True, or a multiple of {splits}"
            )
        dtype = dtype or torch.get_default_dtype()
        eps = default_eps(dtype) if eps is None else eps
        self.features, self.eps, self.offset = features, eps, offset
        stored = expressible(layout.dims[-1], mesh)
        self.plan = NormPlan(layout, features, width, self.centred, eps, name, stored)
        kept = self.plan.parameter.source
        for parameter, exists in (("weight", affine), ("bias", bias)):
            if exists:
                self.add(parameter, (features,), kept, device, dtype, (width,))
            else:
                self.register_parameter(parameter, None)
        if not any(p.is_meta for p in self.parameters()):
            self.reset_parameters()

    @property
    def in_layout(self) -> Layout:
        """The layout of the [tokens, features] rows that it takes and returns."""
        return self.plan.layout

    out_layout = in_layout

    def reset_parameters(self, seed: int | None = None) -> None:
        """The gain that changes nothing, and no bias."""
        for name, value in (("weight", 1.0 - self.offset), ("bias", 0.0)):
            own = getattr(self, name)
            if own is not None:
                fill_from_dense(own, self.lies[name].layout, self.mesh, torch.full((self.features,), value))

    def forward(self, x: Tensor) -> Tensor:
        rows, plan = x.flatten(0, -2), self.plan
        plan = plan if self.eps == plan.eps else with_eps(plan, self.eps, x.dtype)  # which somebody has set since
        y = norm(rows, self.own("weight", x), self.own("bias", x), plan, self.mesh, self.offset)
        return y.view(x.shape)

    def volume(self, tokens: int, dgrad: bool = True, dtype: torch.dtype | None = None) -> Volume:
        """The exact traffic of a forward and backward of `tokens` rows, in bytes received per rank.

        Args:
            dgrad: whether the rows need a gradient.
            dtype: theirs; default: that of the parameters.  Statistics are fp32 at least.
        """
        return volume_of(self, self.mesh, (self._rows(tokens, dgrad, dtype),))

    def memory(self, tokens: int, dgrad: bool = True, backend: str | None = None) -> Memory:
        """Bytes that a forward and backward of `tokens` rows need, as of `ndtp.nn.Linear`; see `ndtp.ops.memory`."""
        x = self._rows(tokens, dgrad)
        return memory_of(self, self.mesh, (x,), x.shape, backend)

    def _rows(self, tokens: int, dgrad: bool, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's rows, without memory."""
        first = next(self.parameters(), None)
        dtype = first.dtype if dtype is None and first is not None else dtype
        shape = self.in_layout.shard_shape((tokens, self.plan.width))
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dgrad)

    def _load_dense(self: Self, dense: nn.Module) -> Self:
        for name in ("weight", "bias"):
            theirs = getattr(dense, name, None)
            if (theirs is None) != (self._parameters[name] is None):
                raise LayoutError(f"{type(self).__name__} '{self.name}': one of the two layers has no {name}")
            if theirs is not None:
                self.take_over(name, theirs)
        return self

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}, [{self.in_layout.label('MK')}]"


class LayerNorm(_Norm):
    """`nn.LayerNorm` over the last dim of rows that lie on a grid.

        x        [tokens, features]  as `in_layout`     returns the same
        weight, bias  [features], split as the features are

    The mean and variance of a row are centred on every rank and merged over the axes that split the features: two
    numbers a row, as many bytes as an all-reduce of them, and as many again in backward.  Gradients of weight and bias
    are summed over the axes that split rows, late.  Statistics are fp32 at least; y has the dtype of x.

    Args:
        features: of a row; one number.
        eps, elementwise_affine, bias, device, dtype: as for `nn.LayerNorm`.
        mesh: the process grid.
        scheme: the named scheme of the blocks around it; rows lie as these take and return them.
        axes: the axes that the scheme uses.
        layout: the layout of the rows instead of a scheme.
        pad: rows are those of a tensor padded with zero features, to the next size that divides or to a multiple of
            `pad`; padding has no part in the statistics and stays zero.
        name: what errors and profiles call it.

    Raises:
        LayoutError: features that do not divide.
    """

    centred = True

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: ProcessGrid,
        scheme: str = "3d",
        axes: Sequence[str] | None = None,
        layout: Layout | None = None,
        pad: bool | int = False,
        name: str = "norm",
    ) -> None:
        super().__init__(
            features, eps, elementwise_affine, elementwise_affine and bias, device, dtype, mesh=mesh, scheme=scheme,
            axes=axes, layout=layout, pad=pad, offset=0.0, name=name,
        )  # fmt: skip

    @classmethod
    def from_dense(cls, dense: nn.LayerNorm, *, mesh: ProcessGrid, **arguments: Any) -> LayerNorm:
        """Make a norm with the weights of an `nn.LayerNorm` over one dim; further arguments are the constructor's."""
        shape = tuple(dense.normalized_shape)
        if len(shape) != 1:
            raise LayoutError(f"LayerNorm.from_dense: over the dims {shape}; a grid splits one\n  fix: flatten them")
        arguments = {**_like(dense), **arguments}
        affine, bias = dense.weight is not None, getattr(dense, "bias", None) is not None
        return cls(shape[0], dense.eps, affine, bias, mesh=mesh, **arguments)._load_dense(dense)

    def to_dense(self) -> nn.LayerNorm:
        """An `nn.LayerNorm` with the same values, on every rank; a collective."""
        affine, bias = self.weight is not None, self.bias is not None
        dense = nn.LayerNorm(self.features, self.eps, affine, bias, device="meta")
        for name in self.parameter_names():
            setattr(dense, name, self.dense(name))
        return dense.train(self.training)


class RMSNorm(_Norm):
    """`nn.RMSNorm` over the last dim of rows that lie on a grid; one number a row is summed each way.

    Arguments are those of `ndtp.nn.LayerNorm`, and

    Args:
        eps: as for `nn.RMSNorm`: None is that of the dtype, or of fp32 where that is wider.
        offset: is added to the weight before it multiplies: 1 in models whose weights are stored around zero.
    """

    centred = False

    def __init__(
        self,
        features: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: ProcessGrid,
        scheme: str = "3d",
        axes: Sequence[str] | None = None,
        layout: Layout | None = None,
        pad: bool | int = False,
        offset: float = 0.0,
        name: str = "norm",
    ) -> None:
        super().__init__(
            features, eps, elementwise_affine, False, device, dtype, mesh=mesh, scheme=scheme,
            axes=axes, layout=layout, pad=pad, offset=offset, name=name,
        )  # fmt: skip

    @classmethod
    def from_dense(cls, dense: nn.Module, *, mesh: ProcessGrid, **arguments: Any) -> RMSNorm:
        """Make a norm from an `nn.RMSNorm`, or from a module with the same `weight` and `eps` (or
        `variance_epsilon`).

        Further arguments as for the constructor.
        """
        weight = getattr(dense, "weight", None)
        shape = tuple(getattr(dense, "normalized_shape", None) or weight.shape)  # type: ignore[union-attr]
        if len(shape) != 1:
            raise LayoutError(f"RMSNorm.from_dense: over the dims {shape}; a grid splits one\n  fix: flatten them")
        eps = getattr(dense, "eps", getattr(dense, "variance_epsilon", None))
        arguments = {**_like(dense), **arguments}
        return cls(shape[0], eps, weight is not None, mesh=mesh, **arguments)._load_dense(dense)

    def to_dense(self) -> nn.RMSNorm:
        """An `nn.RMSNorm` with the same values (the offset added to its weight), on every rank; a collective."""
        dense = nn.RMSNorm(self.features, self.eps, self.weight is not None, device="meta")
        for name in self.parameter_names():
            parameter = self.dense(name)
            dense.weight = nn.Parameter(parameter.detach() + self.offset, parameter.requires_grad)
        return dense.train(self.training)


def _like(dense: nn.Module) -> dict[str, object]:
    first = next(dense.parameters(), None)
    return {} if first is None else {"device": first.device, "dtype": first.dtype}

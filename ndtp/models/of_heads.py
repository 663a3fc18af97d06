"""The other parts of an attention module: norms of q and k over all heads, and parameters of each head.

A norm whose features are the heads' sums one or two numbers a row over the ranks that have them.  Of a parameter with a
number or a row a head (sinks, gains, biases of positions) a rank has those of its heads.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.errors import LayoutError
from ndtp.models.adopted import SplitNorm, adopt
from ndtp.models.attention_core import Core
from ndtp.models.hidden import Hidden
from ndtp.models.looked_at import of_shard, shard_of
from ndtp.models.placeholder import Placeholder
from ndtp.models.replicated import OfHeads
from ndtp.models.roles import AttentionRole, NormRole, norm_role
from ndtp.models.signatures import input_by_name
from ndtp.nn.parameters import expressible
from ndtp.ops.norms import NormPlan, norm
from ndtp.split.tensor import SplitTensor, enter, leave

if TYPE_CHECKING:
    from ndtp.models.placing import Placing

OF_QUERIES = re.compile(r"(^|_)(q|query)(_|$)")
OF_KEYS = re.compile(r"(^|_)(k|key)(_|$)")
SINKS = ("sinks",)  # one number a head, where a head has as many features as there are heads


@dataclass(frozen=True)
class Beside:
    """A module inside attention: a norm of `features`, or one some of whose parameters go by heads.

    Attributes:
        by_heads: of such a parameter the dim that goes by heads, and how many there are.
    """

    norm: NormRole | None = None
    features: int = 0
    by_heads: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def beside(role: AttentionRole, name: str, child: nn.Module, hidden: int) -> Beside | str:
    """Return the role of a module inside attention that has parameters, or the reason why it cannot be split."""
    own = {key: p for key, p in child._parameters.items() if p is not None}
    shapes = {tuple(p.shape) for p in own.values()}
    sizes = {role.heads * role.head_dim, role.kv_heads * role.head_dim, hidden}
    if len(shapes) == 1 and (shape := next(iter(shapes))) != (role.head_dim,) and len(shape) == 1 and shape[0] in sizes:
        found = norm_role(child, shape[0])
        if isinstance(found, NormRole):
            return Beside(found, shape[0])
    by_heads = {}
    for key, parameter in own.items():
        dim = _dim_of_heads(role, name, child, key, tuple(parameter.shape))
        if dim is None:
            return f"{name}.{key}, {tuple(parameter.shape)}, is a parameter over all of its heads"
        if dim >= 0:
            by_heads[key] = (dim, parameter.shape[dim])
    return Beside(by_heads=by_heads)


def _dim_of_heads(role: AttentionRole, name: str, child: nn.Module, key: str, shape: tuple[int, ...]) -> int | None:
    """The dim of a parameter that goes by heads, -1 where all heads use it alike, None where that cannot be told."""
    counts, is_own = (role.heads, role.kv_heads), name == role.name
    if is_own and key in SINKS and shape == (role.heads,):
        return 0
    if shape in ((role.head_dim,), ()):
        return -1
    if isinstance(child, nn.Embedding):
        return 1 if shape[1] == role.heads else None
    long = [dim for dim, size in enumerate(shape) if size != 1]
    if is_own and len(long) == 1 and shape[long[0]] in counts:
        return long[0]
    if len(long) == 2 and shape[long[0]] in counts and shape[long[1]] == role.head_dim and len(shape) == 2:
        return 0 if is_own or _is_by_heads(child, shape) else None
    return None


@torch.no_grad()
def _is_by_heads(child: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether a module treats each head of [heads, features] independently, by a trial."""
    trial = copy.deepcopy(child).to_empty(device="cpu").double()
    generator = torch.Generator().manual_seed(0)
    for parameter in trial.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(1, 2, *shape, generator=generator).double()
    other = torch.cat((x[:, :, :1], x[:, :, 1:] * 2.0 + 1.0), 2)
    try:
        one, two = trial(x), trial(other)
    except Exception:  # its code wants something else: what cannot be tried is left alone
        return False
    return one.shape == x.shape and torch.equal(one[:, :, 0], two[:, :, 0])


def reason_against(
    role: AttentionRole, module: nn.Module, skipped: Callable[[str], bool], hidden: int, width: int, splits: int
) -> str | None:
    """Return the reason why the parts of attention besides its projections cannot be split, if there is one.

    Args:
        skipped: whether a module of that name is a projection or an adapter.
        width: of hidden states, with padding.
        splits: into how many parts heads are split.
    """
    for name, child in module.named_modules(prefix=role.name):
        is_list = isinstance(child, nn.ModuleList) and len(child) in (role.heads, role.kv_heads)
        if is_list and splits > 1 and next(child.parameters(), None) is not None:
            return f"{name}, a list of {len(list(child.children()))} modules, may have one for each head"
        for key, buffer in child._buffers.items():
            if buffer is not None and buffer.dim() > 2 and max(buffer.shape) == buffer.numel() == role.heads > 1:
                return f"{name}.{key}, {tuple(buffer.shape)}, is a buffer over all of its heads"
        if skipped(name) or not child._parameters:
            continue
        found = beside(role, name, child, hidden)
        if isinstance(found, str):
            return found
        if found.norm is not None:
            own = name.rpartition(".")[2]
            inner, keys = role.heads * role.head_dim, role.kv_heads * role.head_dim
            if found.features == hidden != inner and width != hidden:
                return f"{name} is a norm of {hidden} features, which {splits} parts do not divide"
            is_shared = found.features == keys != inner and role.kv_heads % splits
            if is_shared and not (OF_KEYS.search(own) and "k" in role.inputs):
                return f"{name} is a norm over {role.kv_heads} heads, which {splits} parts do not divide"
    return None


class HeadNorm(SplitNorm):
    """A norm in an attention module: of the features of all heads, or of hidden states, as its code calls it.

    Attributes:
        norm_plan: the plan of its last call; what it is named tells of the first.
        of_heads, of_hidden: one for each kind of input.
        core: the attention, and whether the norm `gathers` its key heads, where there are too few to split: they are
            normed before.
    """

    of_heads: NormPlan | None
    of_hidden: NormPlan | None
    core: Core
    gathers: bool

    def forward(self, x: Any = None, **named: Any) -> Tensor:
        if named:
            x = input_by_name(self, x, named)
        is_hidden = isinstance(x, Hidden)
        if self.core.is_whole and not is_hidden:
            return self._of_whole(x)
        plan = self.of_hidden if is_hidden else self.of_heads
        local = 0 if plan is None else plan.width // plan.layout.num_splits(1)
        if plan is None or isinstance(x, Placeholder) or (not is_hidden and x.shape[-1] != local):
            raise LayoutError(
                f"parallelize: '{self.name}' is a norm of {self.lies['weight'].real[0]} features in an attention "
                f"module, and got {tuple(x.shape)}, which are neither its heads nor what it gives\n"
                f"  fix: leave that attention whole, keep=['{self.name.rpartition('.')[0]}']"
            )
        self.norm_plan = plan
        if is_hidden:
            return super().forward(x)
        spec = x.spec if isinstance(x, SplitTensor) else None
        x = leave(x) if isinstance(x, SplitTensor) else x
        plan = self.plan_now(plan, x.dtype)
        gain, bias = self.own("weight", x), self.own("bias", x)
        y = self._as_dense(norm(x.reshape(-1, local), gain, bias, plan, self.mesh, self.offset), x.dtype)
        y = self.core.shared_heads(y) if self.gathers else y
        y = y.unflatten(0, x.shape[:-1])
        if spec is None:
            return y
        features = y.shape[-1]
        made = replace(spec, sizes=(*spec.sizes[:-1], features), padded=(*spec.padded[:-1], features))
        return enter(y.view_as(y), made)

    def _of_whole(self, x: Tensor) -> Tensor:
        """Return the norm of the features of all heads, or of hidden states, of a tensor with the whole's sizes."""
        plan = next((p for p in (self.of_heads, self.of_hidden) if p is not None and p.features == x.shape[-1]), None)
        if plan is None:
            raise LayoutError(f"parallelize: '{self.name}' is a norm of other features than {tuple(x.shape)} has")
        plan = self.plan_now(plan, x.dtype)
        rows = shard_of(self.core, x, plan.layout)
        gain, bias = self.own("weight", rows), self.own("bias", rows)
        y = self._as_dense(norm(rows, gain, bias, plan, self.mesh, self.offset), rows.dtype)
        return of_shard(self.core, y, plan.layout, tuple(x.shape), self.name)


def place_beside(
    split: Placing, role: AttentionRole, core: Core, skipped: Callable[[str], bool]
) -> Iterator[tuple[str, HeadNorm]]:
    """Put what an attention module has beside its projections on the grid; its norms are returned."""
    module, inner = split.model.get_submodule(role.name), core.inner
    mesh, sums = split.mesh, (*split.frame.outside.dims[0], *core.sums)
    axes = inner.dims[1]
    for name, child in list(module.named_modules(prefix=role.name)):
        if skipped(name) or not child._parameters:
            continue
        found = beside(role, name, child, split.hidden)
        assert isinstance(found, Beside)
        if found.norm is not None:
            yield name, _place_norm(split, role, core, name, child, found)
            continue
        parts = {}
        for key, (dim, count) in found.by_heads.items():
            used: list[Any] = [None] * child._parameters[key].dim()  # type: ignore[union-attr]
            if count % inner.num_splits(1):
                parts[key] = OfHeads(Layout(mesh.grid, *used), Layout(mesh.grid, *used), dim, core.kv_per_rank)
                continue
            stored = [*used]
            used[dim], stored[dim] = axes, expressible(axes, mesh)
            parts[key] = OfHeads(Layout(mesh.grid, *stored), Layout(mesh.grid, *used), dim)
        split.replicate(child, name, sums, parts)
        child.ndtp_beside = core  # type: ignore[assignment]


def _place_norm(
    split: Placing, role: AttentionRole, core: Core, name: str, child: nn.Module, found: Beside
) -> HeadNorm:
    assert found.norm is not None
    inner, size, own = core.inner, found.features, name.rpartition(".")[2]
    stored = expressible(inner.dims[1], split.mesh)
    form: dict[str, Any] = {"centred": found.norm.centred, "eps": found.norm.eps, "name": name, "stored": stored}
    is_key = size == role.kv_heads * role.head_dim != role.heads * role.head_dim
    layer: HeadNorm = adopt(child, HeadNorm, split.frame, name)
    layer.of_heads = layer.of_hidden = None
    layer.core, layer.gathers = core, False
    if size in (role.heads * role.head_dim, role.kv_heads * role.head_dim):
        layer.of_heads = NormPlan(inner, size, size, **form)
    if size == split.hidden == split.width:
        layer.of_hidden = NormPlan(split.layouts.input, size, size, **form)
    if is_key and role.kv_heads % inner.num_splits(1):
        layer.gathers, core.normed = True, (core.inputs["k"],)
    first = layer.of_heads if OF_QUERIES.search(own) or OF_KEYS.search(own) else layer.of_hidden
    core.norms_hidden |= first is layer.of_hidden is not None
    plan = first or layer.of_heads or layer.of_hidden
    assert plan is not None
    layer.norm_plan, layer.offset, layer.eps_name = plan, found.norm.offset, found.norm.eps_name
    for key in ("weight", "bias"):
        if key in layer._parameters:
            layer.placed(key, plan.parameter.source, (size,), (size,))
    return layer

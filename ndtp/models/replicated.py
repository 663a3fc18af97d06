"""`Replicated`: a module left as it is, whose own parameters are DTensors that its code reads as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.compute.constants import numbers_on
from ndtp.compute.traces import is_in_transform
from ndtp.models.adopted import class_of, gathered, is_placed
from ndtp.models.code_reads import CodeReads, note_read
from ndtp.models.frame import Frame
from ndtp.models.standing_in import fits, lying, of_other_sizes, take_place
from ndtp.nn.computed_weights import as_computed
from ndtp.nn.parameters import put_on_grid
from ndtp.nn.parameters import taken as taken_from
from ndtp.nn.sharded import Lies
from ndtp.ops.moving import taken
from ndtp.runtime.arrival import is_plain, stored_shape
from ndtp.runtime.halves import dense_part
from ndtp.runtime.memories import stands_for


class PartOfParameter(Protocol):
    """The part that a rank takes of a parameter that a module's code reads; it is stored as `stored`, and used as
    `used`.
    """

    @property
    def stored(self) -> Layout: ...

    @property
    def used(self) -> Layout: ...

    def of(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class OfHeads:
    """A parameter with a number or a row a head, of which a rank uses those of its heads.

    Attributes:
        stored, used: how it lies, and what of it a rank takes.
        dim: which goes by heads.
        picked: the heads that a rank takes of all, where these are too few to split.
    """

    stored: Layout
    used: Layout
    dim: int
    picked: list[int] | None = None

    def of(self, x: Tensor) -> Tensor:
        if self.picked is None:
            return x
        return x.index_select(self.dim, numbers_on(self.picked, x.device))


class Replicated(nn.Module):
    """A module left as it is, whose own parameters are DTensors: every rank has them whole, but for `ndtp_parts`.

    While its forward runs, or that of another such module which uses its parameters, reading one gives the plain
    tensor, whose gradient is summed over `ndtp_sums`.  Autograd does not see a DTensor's changes on that tensor: what
    was read is compared when backward comes to what the forward gave.
    """

    ndtp_frame: Frame
    ndtp_name: str
    ndtp_sums: tuple[str, ...]
    ndtp_parts: Mapping[str, PartOfParameter] = {}
    ndtp_lies: Mapping[str, Lies] = {}
    ndtp_beside: Any = None  # the attention of which it is a part, a `ndtp.models.attention_core.Core`

    def ndtp_plan(self, name: str, lies: Layout, part: PartOfParameter | None) -> RelayoutPlan:
        """The way of a parameter, or of what was computed in its place, to where this module's code reads it."""
        frame = self.ndtp_frame
        used = Layout(frame.mesh.grid, *[None] * lies.ndim) if part is None else part.used
        sums = tuple(axis for axis in self.ndtp_sums if axis not in used.axes and axis not in frame.summed)
        return RelayoutPlan(lies, used, (), sums, f"{self.ndtp_name}.{name}")

    def _part(self, name: str) -> PartOfParameter | None:
        beside = self.__dict__.get("ndtp_beside")
        is_whole = beside is not None and beside.is_whole  # an attention's code runs on all heads
        return None if is_whole else self.ndtp_parts.get(name)

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        running = self.ndtp_frame.running
        if name in self.__dict__["_parameters"] and running and running[-1] is not None and value is not None:
            part, lies = self._part(name), self.ndtp_lies.get(name)
            is_computed = is_plain(value) or not isinstance(value, nn.Parameter)
            if is_computed and not is_placed(value) and self.ndtp_frame.mesh.device_mesh is not None:
                if is_functorch_wrapped_tensor(value):
                    return value  # of a transform, whose function computes with it
                # Computed, and put in its place by `torch.func.functional_call`.
                where = f"{self.ndtp_name}.{name}"
                value = as_computed(gathered(value), self.ndtp_frame.mesh, f"'{where.removeprefix('.')}'")
                lies = self.ndtp_lies[name]
                if not fits(value, lies) and not isinstance(part, OfHeads):
                    lies, part = of_other_sizes(value, self.ndtp_frame.mesh), None
                value = lying(value, lies, self.ndtp_frame.mesh, where)
            # One that was moved has no attributes, and what is left of a weight norm has no place of its own.
            layout: Any = getattr(value, "ndtp_layout", None) or (lies and lies.layout)
            plan = self.ndtp_plan(name, layout, part)
            reads, known = note_read(running, value, f"'{plan.name.removeprefix('.')}'")
            if known is not None and part is None and not is_in_transform():
                return known
            with temporarily_clear_interpreter_stack() if is_in_transform() else nullcontext():
                plain = taken(value, plan, self.ndtp_frame.mesh)
            # One that is shared with a layer on the grid is split, and may be padded.
            real = getattr(value, "ndtp_real", plain.shape)
            if part is not None:
                plain = part.of(plain)
                if isinstance(value, nn.Parameter):
                    stands_for(plain, value)
            else:
                plain = dense_part(plain, real)
            return plain if is_in_transform() else reads.stands_for(plain, value)
        if name in self.__dict__["_buffers"] and running and running[-1] is not None and value is not None:
            return value if is_plain(value) else value.full_tensor()  # made of a parameter, as the mask of a pruning
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        reads = CodeReads()
        self.ndtp_frame.running.append(reads)
        try:
            given = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.ndtp_frame.running.pop()
        if reads.read:
            reads.watch(given)
        return given

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """A dense one is put on the grid, and stays the same object."""
        own: Any = self._parameters.get(name)
        mesh, full_name = self.ndtp_frame.mesh, f"{self.ndtp_name}.{name}"
        if own is not None and param is not None and is_placed(own):
            take_place(param, Lies.of(own.ndtp_layout, stored_shape(own), own.ndtp_real), mesh, full_name)
        elif own is None and param is not None and not is_placed(param):
            if not is_plain(param):  # computed of those on the grid, as what is left of a weight norm that is removed
                param = nn.Parameter(param.detach().full_tensor(), param.requires_grad)  # type: ignore[attr-defined]
            put_on_grid(param, Layout(mesh.grid, *[None] * param.dim()), mesh, full_name)
        super().register_parameter(name, param)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        mesh = self.ndtp_frame.mesh
        for name, own in self._parameters.items():
            value = state_dict.get(prefix + name)
            if own is not None and isinstance(value, Tensor):
                if is_plain(value):
                    mesh.step.note_loaded(prefix + name, value)
                layout: Any = own.ndtp_layout  # type: ignore[attr-defined]
                state_dict = {
                    **state_dict,
                    prefix + name: taken_from(value, own, layout, mesh, getattr(own, "ndtp_real", own.shape)),
                }
        super()._load_from_state_dict(state_dict, prefix, *rest)


def replicate(
    module: nn.Module, frame: Frame, name: str, sums: Sequence[str], parts: Mapping[str, PartOfParameter]
) -> None:
    """The own parameters of a module as DTensors that every rank has whole, but for those that go by heads."""
    if not isinstance(module, Replicated):
        module.__class__ = class_of(Replicated, type(module), False)
    module.ndtp_frame, module.ndtp_name, module.ndtp_sums = frame, name, tuple(sums)  # type: ignore[assignment]
    if parts:
        module.ndtp_parts = parts  # type: ignore[assignment]
    for key, own in module._parameters.items():
        if own is not None and not is_placed(own):
            bare = Layout(frame.mesh.grid, *[None] * own.dim())
            layout = parts[key].stored if key in parts else bare
            put_on_grid(own, layout, frame.mesh, f"{name}.{key}", getattr(parts.get(key), "shape", None))
    placed: list[tuple[str, Any]] = [(k, p) for k, p in module._parameters.items() if p is not None and is_placed(p)]
    lies: Any = {k: Lies.of(p.ndtp_layout, stored_shape(p), p.ndtp_real) for k, p in placed}
    module.ndtp_lies = lies

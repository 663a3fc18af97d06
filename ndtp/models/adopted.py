"""Modules of a stock model that take part in a split one: the same objects, of a class that knows of the grid.

A module keeps its identity, its attributes, its hooks and its place in the model; its class becomes one that derives
from its own, and its parameters DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.matmul_plan import MatMulPlan
from ndtp.compute.norms import bound_on_one_rank
from ndtp.errors import LayoutError
from ndtp.models.frame import Frame, Passage, led_to
from ndtp.models.hidden import Hidden, enter, leave, split, whole
from ndtp.models.made_classes import made_class
from ndtp.models.names_of_both import keep_theirs
from ndtp.models.settled import Settled, Settlements, Use, uses_of
from ndtp.models.signatures import input_by_name
from ndtp.models.standing_in import lying, take_place
from ndtp.models.table_settings import refused_setting
from ndtp.models.whole_rows import are_few
from ndtp.nn.computed_weights import as_computed
from ndtp.nn.padding import zero_padding
from ndtp.nn.parameters import check_own, put_on_grid
from ndtp.nn.sharded import Lies, Sharded
from ndtp.ops.few_rows import is_inference
from ndtp.ops.lookup import LookupPlan, bound_look_up, look_up
from ndtp.ops.norms import NormPlan, bound_norm, norm, with_eps
from ndtp.runtime.arrival import is_plain, stored_shape
from ndtp.runtime.eagerly import WHY_EAGER, eagerly
from ndtp.runtime.halves import laid_sizes
from ndtp.runtime.of_turn import OfTurn

NAMES = ("weight", "bias")


def is_placed(parameter: Tensor) -> bool:
    return hasattr(parameter, "ndtp_layout")


_made: Callable[..., type] = cache(lambda name, bases, module: made_class(name, bases, {"__module__": module}))


def class_of(mine: Any, theirs: Any, behind: bool = False) -> type:
    """A class that derives from both, made once.

    Args:
        behind: what `theirs` does comes first, and calls `mine` by `super()`.
    """
    bases: tuple[object, ...] = (theirs, mine) if behind and theirs is not nn.Embedding else (mine, theirs)
    bases = (mine,) if issubclass(mine, theirs) else bases
    return _made(theirs.__name__, bases, theirs.__module__)


class Adopted(Sharded):
    """A module of a stock model; never constructed, see `adopt`.

    Attributes:
        dense_class: the class of the model's own code.
        settled: what it does with rows of decode steps.
    """

    frame: Frame
    lies: dict[str, Lies]
    settled: Settlements
    dense_class: type[nn.Module]

    def __init_subclass__(cls, **named: object) -> None:
        super().__init_subclass__(**named)
        if "forward" in vars(cls):
            cls.forward = eagerly(WHY_EAGER)(cls.forward)

    def placed(
        self,
        name: str,
        layout: Layout,
        shape: Sequence[int] | None = None,
        real: Sequence[int] = (),
    ) -> None:
        """Put the parameter `name` on the grid, as `shape` where that is padded; once, wherever it is shared.

        Args:
            real: the shape without padding of one that the layer may lack, and which is to lie so if it comes later.

        Raises:
            LayoutError: it is shared with a module that wants it to lie otherwise.
        """
        own: Any = self._parameters[name]
        if own is None:
            self.lies[name] = Lies.of(layout, shape or real, real)
            return
        if not is_placed(own):
            put_on_grid(own, layout, self.mesh, f"{self.name}.{name}", shape)
        is_same = own.ndtp_layout == layout
        stored = laid_sizes(stored_shape(own), layout.ndim) if is_same else ()
        if not is_same or stored != tuple(shape or own.ndtp_real):
            raise LayoutError(
                f"'{self.name}': {name} is shared with another module, which wants it as {own.ndtp_layout}, not "
                f"{layout}"
            )
        self.lies[name] = Lies.of(layout, stored, own.ndtp_real)

    def own(self, name: str, x: Tensor | None) -> Tensor | None:
        """Return the parameter of the layer, or the tensor that hooks or a parametrization have put in its place."""
        value = self.held(name)
        return None if value is None else self.checked(name, value, x)

    def checked(self, name: str, value: Tensor | None, x: Tensor | None) -> Tensor | None:
        """Return what `held` gave, which is to be used with `x`: what a parametrization computes is asked for once."""
        if value is None:
            return None
        if value is not self._parameters.get(name):
            lies = self.lies[name]
            beside = value if x is None else x
            check_own(value, lies.shape, lies.shard, beside, f"{type(self).__name__} '{self.name}': {name}")
            return value
        return super().own(name, x)

    def held(self, name: str) -> Tensor | None:
        """A parameter, or what was computed in its place, to lie as that."""
        own = self._parameters
        if name not in self.lies:
            return None
        if name in own and ((found := own[name]) is None or is_placed(found) or not _is_computed(found)):
            return found  # type: ignore[no-any-return]
        value = getattr(self, name, None)
        if value is None:
            return None
        value = as_computed(gathered(value), self.mesh, f"{type(self).__name__} '{self.name}': {name}")
        return lying(value, self.lies[name], self.mesh, f"{self.name}.{name}")  # type: ignore[no-any-return]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """A dense one is put on the grid, and stays the same object."""
        lies = vars(self).get("lies", {}).get(name)
        if lies is not None and param is not None:
            if not is_plain(param) and not is_placed(param):  # computed, as what is left of a weight norm
                param = nn.Parameter(param.detach().full_tensor(), param.requires_grad)  # type: ignore[attr-defined]
            take_place(param, lies, self.mesh, f"{self.name}.{name}")
        super().register_parameter(name, param)


def _is_computed(x: Tensor) -> bool:
    """Return whether something in the place of a parameter was computed, as `torch.func.functional_call` puts it."""
    return x.grad_fn is not None or not isinstance(x, nn.Parameter)


def gathered(x: Any) -> Any:
    return x.gathered() if hasattr(x, "gathered") else x


def adopt(module: nn.Module, kind: type[Adopted], frame: Frame, name: str, behind: bool = False) -> Any:
    """`module`, of a class that derives from its own and from `kind`.

    Args:
        behind: what its own class does comes first, and calls `kind` by `super()`.
    """
    theirs = type(module)
    module.__class__ = class_of(kind, theirs, behind)
    if not issubclass(theirs, Adopted):
        keep_theirs(module)
    module.frame, module.mesh, module.name, module.lies, module.seed = frame, frame.mesh, name, {}, None  # type: ignore[assignment]
    module.dense_class, module.settled = theirs, Settlements()  # type: ignore[assignment]
    return module


class SplitNorm(Adopted):
    """A layer norm or RMS norm over the features of hidden states.

    Attributes:
        eps_name: of the attribute where the model's own code finds its epsilon, in each call.
    """

    norm_plan: NormPlan
    offset: float
    eps_name: str = ""

    def forward(self, x: Any = None, **named: Any) -> Tensor:
        if named:
            x = input_by_name(self, x, named)
        plan, own = self.norm_plan, self.__dict__
        if own.get(self.eps_name, plan.eps) != plan.eps:
            plan = self.plan_now(plan, x.dtype)
        if are_few(x, self) and x.shape[-1] == plan.features:
            settled = self.settled.found((x.dtype, id(plan)))
            if settled is not None:
                return settled(x)  # type: ignore[no-any-return]
            return self._of_whole_rows(x, plan)
        given = (x.passage.features,) if isinstance(x, Hidden) else x.shape[-1:]
        if given != (plan.features,) and not any(p is not None for p in self._parameters.values()):
            return super().forward(whole(x))  # type: ignore[misc, no-any-return]  # of whatever it is given
        x = lying_as(x, self.frame, plan.layout, plan.width, self.name)
        passage = x.passage
        rows = leave(x)
        # A settled operation holds its plan, whose id is therefore nobody else's while the key is there.
        key = (rows.shape, rows.dtype, id(plan), self.mesh.collectives)
        settled = self.settled.found(key) if is_inference(rows, self.mesh) else None
        y = self._normed(rows, plan, key) if settled is None else settled(rows)
        y = self._as_dense(y, rows.dtype)
        return enter(y.view_as(y), led_to(self, passage, self._led_to))

    def _as_dense(self, y: Tensor, given: torch.dtype) -> Tensor:
        """Return a norm of what was `given` in the dtype in which the model's own code gives it, where its parameters
        are of another one: T5's takes rows of 32 bits to 16.
        """
        own = next((p.dtype for p in self._parameters.values() if p is not None), given)
        return y if own is given or torch.is_autocast_enabled(y.device.type) else y.to(self._dtype_of(own, given))

    def _dtype_of(self, own: torch.dtype, given: torch.dtype) -> torch.dtype:
        """Return the dtype of what the model's own code gives, by a trial of one row."""
        known = vars(self).setdefault("ndtp_dtypes", {})
        if (own, given) not in known:
            trial, size = object.__new__(self.dense_class), self.norm_plan.features
            vars(trial).update(vars(self))
            with torch.device("cpu"), torch.no_grad():
                parameters = {name: None if p is None else torch.ones(size, dtype=p.dtype)
                              for name, p in self._parameters.items()}  # fmt: skip
                vars(trial)["_parameters"] = parameters
                try:
                    known[own, given] = self.dense_class.forward(trial, torch.ones(1, size, dtype=given)).dtype
                except RuntimeError:  # torch's own norms take no two dtypes
                    known[own, given] = given
        return known[own, given]  # type: ignore[no-any-return]

    def _of_whole_rows(self, x: Tensor, plan: NormPlan) -> Tensor:
        """Return the norm of rows that are whole, and few, on this rank, as the model's own code gives it."""
        found = self.own("weight", x), self.own("bias", x)
        own, frame, layout = uses_of(self, NAMES, found), self.frame, plan.parameter.source
        uses = own or [Use(self, name, value) for name, value in zip(NAMES, found, strict=True)]
        dtypes = [None if use.local is None else use.local.dtype for use in uses]
        run = bound_on_one_rank(plan.features, dtypes, x.dtype, plan.centred, plan.eps, self.offset)
        is_split, gains = layout.num_splits(0) > 1, frame.gains

        def run_now(x: Tensor, shards: Any) -> Tensor:
            if is_split:
                is_in_forward = own is not None and frame.is_in_forward
                shards = [None if use.local is None else gains.of(use, layout, is_in_forward) for use in uses]
            return run(x, *shards)

        is_as_dense = next((dtype for dtype in dtypes if dtype is not None), x.dtype) is x.dtype
        as_dense = run_now if is_as_dense else lambda x, shards: self._as_dense(run_now(x, shards), x.dtype)
        settled = Settled(uses, as_dense, held=plan)
        return (settled if own is None else self.settled.add((x.dtype, id(plan)), settled))(x)  # type: ignore

    def _led_to(self, given: Passage) -> Passage:
        return replace(given, came_from=self.name)

    def plan_now(self, plan: NormPlan, dtype: torch.dtype) -> NormPlan:
        """Return a plan of this norm with the epsilon that the module has now."""
        eps = vars(self).get(self.eps_name, plan.eps)
        return plan if eps == plan.eps else with_eps(plan, eps, dtype)

    def _normed(self, rows: Tensor, plan: NormPlan, key: Hashable) -> Tensor:
        """Return the rows normalised; what was found on the way is settled where they are rows of a decode step."""
        mesh = self.mesh
        gain, bias = self.own("weight", rows), self.own("bias", rows)
        y = norm(rows, gain, bias, plan, mesh, self.offset)
        if plan.parameter.steps or not is_inference(rows, mesh):
            return y
        uses = uses_of(self, ("weight", "bias"), (gain, bias))
        if uses is not None:
            run = bound_norm(rows, plan, mesh, self.offset)
            self.settled.add(key, Settled(uses, lambda rows, shards: run(rows, *shards)))
        return y


class SplitEmbedding(Adopted, nn.Embedding):
    """The table of a vocabulary, or of positions; a class of the model's own may scale what it gives.

    Attributes:
        for_all: (of positions) the plan for ids that are the same in all sequences: each rank has all rows.
        is_for_all: whether its last ids were.
    """

    lookup: LookupPlan
    for_all: LookupPlan | None
    is_for_all = OfTurn(bool)
    padded_dim: int

    def forward(self, ids: Any = None, **named: Any) -> Tensor:  # type: ignore[override]
        if named:
            ids = input_by_name(self, ids, named)
        if self.max_norm or self.scale_grad_by_freq or self.sparse:
            raise refused_setting(self)
        frame = self.frame
        key = ids.shape, ids.dtype, self.num_embeddings, self.mesh.collectives
        if not self.training and frame.decodes() and (settled := self.settled.found(key)) is not None:
            self.__dict__["is_for_all"] = self.for_all is not None and (ids.dim() < 2 or ids.shape[0] == 1)
            return settled(ids)  # type: ignore[no-any-return]
        if are_few(ids.unsqueeze(-1), self):
            return self._whole_rows(ids, key)
        lead, plan = tuple(ids.shape), self.lookup
        rows, across = frame.rows_of(lead)
        self.is_for_all = self.for_all is not None and (len(lead) < 2 or lead[0] == 1)
        if self.for_all is not None and self.is_for_all:
            rows, across, plan = ids.numel(), 0, self.for_all
        passage = Passage(
            frame, plan.out, lead, rows, self.embedding_dim, self.padded_dim, across=across, came_from=self.name
        )
        flat, weight = passage.laid(ids.flatten()), self.needed("weight", None)
        y = look_up(flat, weight, plan, self.mesh, self.num_embeddings, self.padding_idx)  # type: ignore[arg-type]
        last: object = vars(self).get("ndtp_last")
        if last is None or last != passage:
            last = vars(self)["ndtp_last"] = passage
        return enter(y.view_as(y), last)  # the same object where inputs are alike: what follows looks no closer

    def _whole_rows(self, ids: Tensor, key: Hashable) -> Tensor:
        """Return few rows of the table, whole on every rank."""
        plan = vars(self).get("ndtp_whole_lookup")
        if plan is None:
            plan = vars(self)["ndtp_whole_lookup"] = replace(self.lookup, out=self.frame.outside)
        self.is_for_all = self.for_all is not None and (ids.dim() < 2 or ids.shape[0] == 1)
        weight, features = self.needed("weight", None), self.embedding_dim
        uses = uses_of(self, ("weight",), (weight,))
        if uses is not None and uses[0].local is not None:
            run = bound_look_up(ids.flatten(), uses[0].local, plan, self.mesh, self.num_embeddings)
            if run is not None:

                def rows(ids: Tensor, shards: Sequence[Tensor]) -> Tensor:
                    return run(ids.flatten(), shards[0])[:, :features].reshape(*ids.shape, features)

                return self.settled.add(key, Settled(uses, rows))(ids)  # type: ignore[no-any-return]
        y = look_up(ids.flatten(), weight, plan, self.mesh, self.num_embeddings, self.padding_idx)  # type: ignore
        return y[:, :features].reshape(*ids.shape, features)


def lying_as(x: Tensor, frame: Frame, layout: Layout, width: int, name: str) -> Hidden:
    """Hidden states as `layout` says; those that lie otherwise are gathered and split anew."""
    if isinstance(x, Hidden) and (x.passage.layout != layout or x.passage.width != width or x.passage.sections > 1):
        frame.note(f"'{name}', which takes [{layout.label('MK')}],", x.passage)
        x = whole(x)
    return x if isinstance(x, Hidden) else split(x, frame, layout, width, name)


def as_projection_input(x: Tensor, frame: Frame, plan: MatMulPlan, width: int, name: str) -> Hidden:
    """Return hidden states in the layout that a product takes, with zeros for padding."""
    x = lying_as(x, frame, plan.a, width, name)
    passage = x.passage
    if passage.width == passage.features:
        return x
    return enter(zero_padding(leave(x), passage.layout, frame.mesh, passage.features), passage)

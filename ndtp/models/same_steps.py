"""Do all ranks take the same steps?  What optimizers do, and what weights and gradients are between their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count as count_up
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from ndtp.compute.traces import unrecorded
from ndtp.errors import MismatchError
from ndtp.models.replicas import brought_together, may_drift
from ndtp.models.same_gradients import GradientChanges, told
from ndtp.models.same_optimizers import OptimizerSettings, Settings
from ndtp.models.same_parts import Numbered, Parts, numbers_of, walk
from ndtp.nn.sharded import Sharded
from ndtp.runtime.arrival import is_plain, local_of
from ndtp.runtime.facts import SUMMARY, Fact, Fingerprint, digest, hash_of_content, is_strided, projection_of
from ndtp.runtime.points import Point, compare_facts, compare_once
from ndtp.runtime.versions import Version, Versions
from ndtp.runtime.writes import writes

_trains, _wants = itemgetter("training"), attrgetter("requires_grad")
_grad: Any = vars(torch._C.TensorBase)["grad"].__get__
_is_none = partial(is_, None)
_ASKED = 2  # parameters whose gradient is asked for whether it was there before: `zero_grad` is called for all of them
_FIRST = _APART = 8  # steps that are looked at whole: the first ones, and one of so many later ones


class Steps:
    """The steps and changes of the weights of one model since its last call.

    Args:
        calls: the `SameCalls` of the model.

    Attributes:
        taken: steps of optimizers that have some of its weights.
        due: whether all weights are to be compared at the next call.
        looks: whether weights and gradients are looked at one by one, from a call to the steps behind it; else modules
            and parameters tell whether they train.
    """

    def __init__(self, calls: Any) -> None:
        self._calls = calls
        self.taken = 0
        self._done: list[Settings] = []
        self._seen: list[Any] | None = None  # versions of the weights after their last known change
        self._written: dict[int, int] = {}  # as in `Parts`, before steps of optimizers
        self._looked_at: list[Version] = []  # versions of the weights when they were looked at last
        self._gradients: dict[int, Any] = {}  # and of gradients after the last step, by the number of the parameter
        self._parts = Parts()
        self._numbers: Numbered | None = None  # those that ranks had when they were compared last
        self._contents: list[int] | None = None  # hashes of the weights after the last step that was looked at
        self._noted: tuple[nn.Parameter, ...] = ()  # whose weights these are
        self.due, self.looks, self._writes = True, True, 0
        self._looks_next, self._has_stepped, self._rounds = True, False, 0  # of steps: those between two calls are one
        self._is_late = calls.mesh.device_type != "cpu"  # what an accelerator has computed is compared before each step
        self.between = GradientChanges()

    # ------------------------------------------------------------------------------------------------------ the state

    def state_of(self, model: nn.Module, anew: bool = True) -> Parts:
        """All modules and parameters of a model, and how they are.

        Args:
            anew: whether to look which modules, hooks and parameters there are; else those of the last time are asked.
        """
        parts = self._parts
        if self._has_stepped:
            self.looks, self._has_stepped = self._looks_next, False
        if anew := anew or not parts.owns:
            parts = Parts()
            walk(model, parts, is_root=True)
            parts.named = digest(parts.names)
            parts.counts = Versions(parts.parameters, self._calls.thorough)
        parameters = parts.parameters
        # By functions in C alone: it is done at every call, when nothing of it is in a cache of the processor.
        try:
            parts.trains = bytes(map(_trains, parts.owns))
        except KeyError:  # of TorchScript
            parts.trains = bytes(module.training for module in model.modules())
        with torch._C.DisableTorchFunctionSubclass():  # as in `Versions.now`
            parts.wants = bytes(map(_wants, parameters))
            parts.is_part = not (anew or self.looks)
            if parts.is_part:
                return parts
            parts.lacks = bytes(map(_is_none, map(_grad, parameters)))
        seen, now = self._seen, parts.counts.now()
        if seen is None:  # a copy that is called first: torch counts the writes to one from zero
            seen = parts.counts.of_new(now)
        elif len(seen) != len(now):
            seen = now
        parts.numbers = [*map(dict.get, parts.keepers, parts.keys)]
        parts.stale, parts.written, self._written = (), self._written, {}
        if self._gradients:
            # What has gone does not come back: a later gradient may lie where it lay, on one rank and not on another.
            there = {i: before for i, before in self._gradients.items() if i < len(parameters) and not parts.lacks[i]}
            parts.stale = tuple(i for i, before in there.items() if _state_of(parameters[i]) == before)
            self._gradients = {i: there[i] for i in parts.stale}
        if now != seen:
            parts.written = parts.counts.changed(seen, now, parts.written)
        parts.in_all, self._looked_at = parts.counts.between(self._looked_at, now), now
        if parts.written:
            self._writes += 1
            self.due |= self._writes == 1 or self._writes % self._calls.every == 0
        self._parts, self._seen = parts, now
        return parts

    def told(self) -> tuple[object, ...]:
        """Return what all ranks have alike of the state that was looked at last."""
        parts, before = self._parts, self._numbers
        if parts.is_part:
            return parts.trains, parts.wants
        self._numbers = parts.keepers, parts.keys, parts.numbers
        return parts.told(before)

    @property
    def is_new(self) -> bool:
        """Whether nobody has looked at the model yet: it is a copy that was not called before."""
        return self._seen is None

    def details(self) -> list[Fact]:
        """The state by names."""
        parts, model = self._parts, self._calls.model
        facts: list[Fact] = []
        places = count_up()
        for (name, module), trains, hooked in zip(
            model.named_modules(remove_duplicate=False), parts.trains, parts.hooked, strict=True
        ):
            where = f" of '{name}'" * bool(name)
            facts += [Fact(f"training{where}", bool(trains)), Fact(f"hooks{where}", "some" if hooked else "none")]
            made = f" '{module.name}', seed {module.seed}" if isinstance(module, Sharded) else ""
            facts.append(Fact(f"module{where}", type(module).__name__ + made))
            for (key, value), place in zip(numbers_of(module).items(), places, strict=False):
                since = None if parts.changed is None else "changed" if place in parts.changed else "as it was"
                facts.append(Fact(f"number {key}{where}" + " since the last call" * bool(since), since or value))
        for i, (name, _) in enumerate(_in_order(model)):
            facts.append(Fact(f"requires_grad of '{name}'", bool(parts.wants[i])))
            kind = "one that was there before the last step" if i in parts.stale else "one"
            facts.append(Fact(f"gradient of '{name}' when it was called", "none" if parts.lacks[i] else kind))
            count = parts.written.get(i)
            how = f"written to {count} times" if count else "as it was" if count is None else "other memory or dtype"
            facts.append(Fact(f"weight '{name}' since the last call", how))
            facts.append(Fact(f"{SUMMARY}the writes to '{name}' since it was last looked at", parts.in_all[i]))
        return facts

    def changed_gradients(self, changed: Mapping[int, int]) -> list[Fact]:
        """Return, by names, how gradients were changed between backward and the last step."""
        facts = []
        for i, (name, _) in enumerate(_in_order(self._calls.model)):
            what = told(changed[i]) if i in changed else "as backward left it"
            facts.append(Fact(f"changed gradient of '{name}' between backward and the optimizer", what))
        return facts

    def taken_settings(self) -> list[Settings]:
        """Return the settings of the optimizer steps since the last call."""
        done, self._done = self._done, []
        return done

    # ------------------------------------------------------------------------------------------------------ optimizers

    def before_step(self) -> None:
        self._calls.compare_late()
        if not self.looks:
            return
        self.between.before_step(self._parts.parameters)
        seen, now = self._seen or [], self._parts.counts.now()
        if now != seen and len(now) == len(seen):
            self._written, self._seen = self._parts.counts.changed(seen, now, self._written), now

    @property
    def is_told(self) -> bool:
        """Whether this is to be told when a step begins."""
        return self.looks or self._is_late

    def after_step(self, settings: Callable[[], OptimizerSettings]) -> None:
        """Count a step of an optimizer, and see what it has left."""
        self.taken = taken = self.taken + 1
        if self.looks:
            self._done.append((taken, *settings()))
        if not self._has_stepped:
            self._has_stepped, self._rounds = True, self._rounds + 1
            self._looks_next = self._calls.thorough or self._rounds < _FIRST or self._rounds % _APART == 0
        is_due = self._calls.thorough or taken == 1 or taken % self._calls.every == 0
        self._looks_next |= is_due
        self._gradients, self._seen = {}, []
        if self._looks_next:
            parameters, self._seen = self._parts.parameters, self._parts.counts.now()
            apart = 1 if self._calls.thorough else max(1, len(parameters) // _ASKED)
            states = ((i, _state_of(parameters[i])) for i in range(0, len(parameters), apart))
            self._gradients = {i: state for i, state in states if state is not None}
        if is_due:
            self.note_weights()

    def note_gradients(self) -> None:
        """Note gradients at the end of backward, to see what becomes of them until the step."""
        if self.looks:
            self.between.after_backward(self._parts.parameters)

    # --------------------------------------------------------------------------------------------------------- weights

    def note_weights(self) -> None:
        """Remember what weights hold, to see whether they hold it when the model is called next."""
        if not self._parts.parameters:
            self._seen = []
            self.state_of(self._calls.model)
        self._contents = _contents(self._parts.parameters)
        self._noted = tuple(self._parts.parameters)
        writes.watch(self)
        self.due = True

    def compare_weights(self, what: str) -> None:
        """Compare all weights: those that several ranks hold, and which were changed by nobody known.

        At the first call, after a step that was noted (each one, where all is looked at), and where they were first
        written to by others than optimizers.
        """
        if not self.due:
            return
        self.due = False
        parameters, now = self._parts.parameters, _contents(self._parts.parameters)
        begin = writes.begin(self)
        is_known = begin is not None and not self._parts.written
        before = dict(zip(map(id, self._noted), self._contents or (), strict=True)) if is_known else {}
        self._contents, self._noted = None, ()
        mesh = self._calls.mesh
        # A shard may stay as it was where an operation has written to others: that it ran is what ranks have in common.
        changed = [
            "" if id(p) not in before else "written to" if writes.since(begin, local_of(p))
            else "changed" if x != before[id(p)] else "as it was" for p, x in zip(parameters, now, strict=True)
        ]  # fmt: skip
        every = mesh.mesh_axes
        axes = [_split_over(p, every) for p in parameters]
        topics = sorted(set(axes))
        facts = [
            Fact(f"all of the weights split over {' '.join(topic) or 'nothing'}",
                 digest([x for x, own in zip(now, axes, strict=True) if own == topic]), topic)
            for topic in topics
            if set(topic) != set(every)
        ]  # fmt: skip
        changes = Fact("all of the weights that were changed by nobody known", digest(changed))

        def details() -> list[Fact]:
            found = []
            for (name, _), x, own, how in zip(_in_order(self._calls.model), now, axes, changed, strict=True):
                if set(own) != set(every):
                    found.append(Fact(f"weight '{name}'", f"hash {x:016x}", own))
                found.append(Fact(f"weight '{name}' since the last step", how or "as it was"))
            return found

        self._compare_buffers(f"buffers before {what}")
        what = f"weights before {what}"
        if not self.taken or not may_drift(mesh.device_type):
            compare_facts(mesh, what, [*facts, changes], details)
            return
        compare_facts(mesh, what, [changes], details)
        try:
            compare_facts(mesh, what, facts, details)
        except MismatchError:
            if not brought_together(mesh, [*_in_order(self._calls.model)], axes):
                raise
            self._seen = self._parts.counts.now()

    def _compare_buffers(self, what: str) -> None:
        """Compare the buffers that a model's state has: integers by hashes, real numbers up to rounding."""
        numbers: dict[str, Fingerprint] = {}
        of_rows: list[tuple[str, Any]] = []
        for name, x in kept_buffers(self._calls.model):
            topic = f"buffer '{name}'"
            if x.is_floating_point() or x.is_complex():
                real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
                found = projection_of(real.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0), len(numbers))  # a mask's
                numbers[topic] = found if isinstance(found, Fingerprint) else Fingerprint(*found.tolist())
            else:
                of_rows.append((topic, f"hash {int(hash_of_content(x)):x}"))
        rows = tuple(self._calls.rows)
        if numbers or of_rows:
            facts = [Fact(*each, rows) for each in of_rows]
            compare_once(self._calls.mesh, Point(what, None, of_rows, numbers, facts=lambda: facts), rows)


def kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a model that its state has and every rank has whole, in one block of memory, by name."""
    for prefix, module in model.named_modules():
        for key, x in module._buffers.items():
            is_kept = x is not None and key not in module._non_persistent_buffers_set
            if is_kept and is_plain(x) and is_strided(x) and not (x.is_meta or x.is_quantized or is_fake(x)):
                yield f"{prefix}.{key}" if prefix else key, x


def _in_order(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by names, in the order of `walk`."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, p in module._parameters.items():
            if isinstance(p, nn.Parameter):  # or it was computed, for this call
                yield f"{prefix}.{key}" if prefix else key, p


def _state_of(parameter: nn.Parameter) -> tuple[int, int, int] | None:
    """Return what changes when other gradients come, or these are written to; None without any."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: Any = _grad(parameter)
        if grad is None:
            return None
        local = getattr(grad, "_local_tensor", grad)
        return id(grad), grad._version + local._version, 0 if local.is_sparse else local.data_ptr()


def _split_over(parameter: Tensor, every: Sequence[str]) -> tuple[str, ...]:
    """The axes over which a parameter is split: ranks that differ on these alone hold other parts of it."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return ()
    names = parameter.device_mesh.mesh_dim_names or every  # type: ignore[attr-defined]
    return tuple(axis for axis, placement in zip(names, placements, strict=True) if not placement.is_replicate())


@torch.no_grad()
def _contents(parameters: Sequence[nn.Parameter]) -> list[int]:
    """A hash of what each parameter holds on this rank; one transfer from an accelerator."""
    with unrecorded():
        found = [hash_of_content(local_of(parameter)) for parameter in parameters]
    there = [x for x in found if isinstance(x, Tensor)]
    seen = iter(torch.stack([x.to(there[0].device) for x in there]).tolist() if there else ())
    mask = (1 << 63) - 1
    return [(next(seen) if isinstance(x, Tensor) else x) & mask for x in found]

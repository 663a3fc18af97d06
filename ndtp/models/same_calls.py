"""Do all ranks call a split model alike?  Each call, and each backward of one, is compared before it sends anything.

What a rank has of a call: the modes of torch, which modules train and have hooks, which parameters want gradients and
have them, what was written to weights, what optimizers did since the last call, and the inputs: their forms, a hash of
what are integers, and a projection of what are not.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.compute.traces import refuse_batched, refuse_traces
from ndtp.models.code_reads import wants_gradients
from ndtp.models.noted import Noted
from ndtp.models.own_losses import warn_of_own_losses
from ndtp.models.pending import Pending
from ndtp.models.same_inputs import facts_of, inputs_of, settings_of
from ndtp.models.same_optimizers import settings_by_name, watch_steps
from ndtp.models.same_steps import Steps
from ndtp.models.unequal_uses import MAY_DIFFER, WaitingBackward, facts_of_uses, reduce_held, warn_of
from ndtp.runtime.eagerly import eagerly
from ndtp.runtime.facts import (
    COARSE,
    FINE,
    GENERATORS,
    Fact,
    Fingerprint,
    bytes_of,
    drawn_since,
    form_of,
    hash_of,
    leaves_of,
    modes,
    projection_of,
    random_states,
    thread_facts,
)
from ndtp.runtime.of_turn import of_turn
from ndtp.runtime.points import Point, Speaking, compare
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.runtime.reads import facts_of_reads, reads_since
from ndtp.runtime.region import may_compare

_NUMBERS = count()  # models that ranks split in the same order have the same
_name = itemgetter(0)
SELDOM = 16  # calls without gradients for each that looks at all modules
_DRAWS = 64  # calls for each that looks at generators from which the one before has not drawn


class SameCalls:
    """Hooks around the calls of one model.

    Args:
        rows: the axes along which ranks have rows of their own.
        made_by: what decided how the model was split, in words.
        check: whether anything is compared; None: unless the grid says no, and hooks, the tree of modules and the
            gradients of all parameters at every sixteenth call only.
        every: optimizer steps from one comparison of all weights to the next one.
        whole_inputs: whether inputs are whole on every rank, but for those rows.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ProcessGrid,
        rows: Sequence[str] = (),
        made_by: str = "",
        check: bool | None = None,
        every: int = 100,
        whole_inputs: bool = True,
    ) -> None:
        self.mesh, self.rows, self.made_by, self.every = mesh, tuple(rows), made_by, every
        self._rows = self.rows or ("",)  # an axis of no grid: facts of rows where no axis has others
        self._all_axes = set(mesh.grid.nontrivial(tuple(mesh.grid))) - set(self.rows)
        self.check, self.thorough, self.whole_inputs = check, check is True, whole_inputs
        self.name = type(model).__name__
        self._model = ref(model)
        self.calls = self.backwards = 0
        self.late: list[tuple[Fact, Tensor]] = []  # hashes on their way from an accelerator
        self.late_numbers: dict[str, Tensor] = {}
        self.of_last: list[Fact] = []  # what is known of the last call since it began
        self.steps = Steps(self)
        self.tolerance = FINE  # of real numbers
        self._operands: list[tuple[str, Any]] = []  # of losses that code outside of the model has made since its call
        self.draws: Sequence[str] = ()  # the generators from which the last call drew
        self._task, self.number = -1, next(_NUMBERS)
        self._has_warned = False  # of layers that not all ranks use
        self._knows_losses = not self.rows  # whether a backward has shown what losses of ranks' own rows are divided by

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    @property
    def held(self) -> nn.Module | None:
        """The model, which whoever asks holds from then on; None where it has gone."""
        return self._model()

    @property
    def is_on(self) -> bool:
        mesh = self.mesh
        asked = mesh.check is not False if self.check is None else self.check
        return asked and mesh.device_mesh is not None and may_compare(mesh.device_type)

    def __deepcopy__(self, memo: dict[int, object]) -> SameCalls:
        made = copy.copy(self)
        memo[id(self)] = made
        made.mesh = copy.deepcopy(self.mesh, memo)
        made._model = ref(copy.deepcopy(self.model, memo))
        made.late, made.late_numbers, made.of_last, made._operands, made.steps = [], {}, [], [], Steps(made)
        made.number = next(_NUMBERS)
        for name in ("depth", "drawn", "at_work"):
            vars(made).pop(name, None)
        if made.is_on:
            made._tell_of_steps()
        return made

    # --------------------------------------------------------------------------------------------------------- hooks

    def watch(self, entries: Sequence[nn.Module]) -> SameCalls:
        """Put hooks on the modules by which a model is called; one that is called inside of another counts no more."""
        names = {id(module): name for name, module in self.model.named_modules()}
        for module in entries:
            vars(module)["ndtp_called_as"] = names[id(module)]
            module.register_forward_pre_hook(self.begin, with_kwargs=True, prepend=True)
            module.register_forward_hook(self.end, with_kwargs=True, always_call=True)
        self._tell_of_steps()
        if self.is_on and self.mesh.groups.conversation() is not None:
            self.mesh.step.loaded, self.mesh.step.uses = [], []
            self._reads()  # those of an earlier grid
            self.steps.note_weights()
        return self

    def _tell_of_steps(self) -> None:
        """Be told of optimizer steps, and have the grid know the model's parameters."""
        watch_steps(self)
        self.mesh.step.watched.add(self)
        if self.is_on:
            self.mesh.step.reduce_held = reduce_held

    def begin(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        refuse_traces(self.name, exports=False)
        if torch.compiler.is_compiling() or not self.is_on:
            return
        own = of_turn(self)
        own["depth"] = depth = own.get("depth", 0) + 1
        if depth == 1 and (conversation := self.mesh.groups.conversation()) is not None:
            at_work = Speaking(conversation, f"call {self.calls + 1} of {self.name}")
            at_work.begin()
            own["at_work"] = at_work
            self._compare_call(conversation, own, module, args, kwargs)

    def end(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> None:
        own = of_turn(self)
        depth = own.get("depth", 0)
        if not depth or torch.compiler.is_compiling():
            return
        own["depth"] = depth - 1
        at_work = own.get("at_work")
        if depth > 1 or at_work is None:
            return
        at_work.end()
        own["at_work"] = None
        before = own.get("drawn")
        drawn = drawn_since(before, self.mesh.device_type, self._rows) if before else {}
        self.draws = tuple(drawn)
        self.of_last += drawn.values()
        if torch.is_grad_enabled():
            self._expect_backward(output)

    # --------------------------------------------------------------------------------------------------------- calls

    @eagerly("ndtp: what ranks tell each other of a call is no part of a graph")
    def _compare_call(
        self, conversation: Any, own: dict[str, object], module: nn.Module, args: Arguments, kwargs: Keywords
    ) -> None:
        self.calls = number = self.calls + 1
        model, steps, device_type = self.model, self.steps, self.mesh.device_type
        what = f"call {number} of {self.name}"
        if module is not model:
            what += f", of its {type(module).__name__} '{vars(module)['ndtp_called_as']}'"
        last, numbers = self._of_last() if self.of_last or self.late or self.late_numbers else ([], {})
        inputs = inputs_of(type(module), args, kwargs) if self.whole_inputs else []
        found, optimizers = modes(device_type), steps.taken_settings()
        of_rows: list[object] = [fact[:2] for fact in last] if last else []
        self._look_at(inputs, of_rows, numbers)
        accumulates, backwards, taken = self.mesh.step.partial_sums.depth, self.backwards, steps.taken
        (factor, changed), loaded, self._operands = steps.between.taken(), self.mesh.step.taken_loaded(), []
        has_leaf = wants_gradients(args, kwargs)
        done = [(step, kind, repr(groups), count) for step, kind, groups, count in optimizers]
        alike: list[Any] = [has_leaf, found, accumulates, backwards, taken, done, changed, loaded]
        is_seen, config = torch.is_grad_enabled() or (number - 1) % SELDOM == 0 or steps.is_new, {}
        order = [*set(kwargs.get("adapter_names") or ())]  # by which peft goes, and which Python draws for each process
        reads = self._reads()
        of_rows += (order, *reads)
        if is_seen:
            config = settings_of(model, (number - 1) % self.every == 0)
            steps.state_of(model, self.thorough or (number - 1) % SELDOM == 0)
            alike += (self.made_by, steps.told(), config)

        def facts() -> list[Fact]:
            made = [*thread_facts(found, device_type), *facts_of(inputs, self._rows), *last]
            made.append(Fact("accumulating gradients", accumulates > 0))
            made += [Fact("backward passes so far", backwards), Fact("optimizer steps so far", taken)]
            made += [Fact("leaf that wants a gradient", has_leaf), Fact("order of a set of names", order, self._rows)]
            made += [fact for each in optimizers for fact in settings_by_name(*each)]
            made += facts_of_reads(reads, self._rows)
            made += steps.changed_gradients(dict(changed))
            made += [Fact(f"weight '{name}' as it was loaded", f"hash {seen:016x}") for name, seen in loaded]
            if is_seen:
                made.append(Fact("how it was split", self.made_by))
                made += [Fact(topic, value) for topic, value in config.items()]
                made += steps.details()
            return made

        point = Point(what, alike, of_rows, numbers, factor, facts, self.tolerance)
        compare(self.mesh, conversation, point, self.rows)
        if is_seen and steps.due:
            steps.compare_weights(what)
        asked = GENERATORS if self.thorough or number < 3 or number % _DRAWS == 0 else self.draws
        own["drawn"] = random_states(device_type, asked) if asked and model.training else {}

    def _reads(self) -> list[tuple[int, str]]:
        """Return what was read since the last point of tensors of which all ranks with the same rows have parts."""
        return reads_since(self.mesh.device_mesh, self._all_axes)

    def _look_at(
        self, inputs: Sequence[tuple[str, object]], of_rows: list[object], numbers: dict[str, Fingerprint]
    ) -> None:
        """Add what is compared of inputs; what an accelerator computes of them is compared at a later point."""
        real: list[tuple[str, Tensor]] = []
        for name, value in inputs:
            of_rows.append(name)
            if not isinstance(value, Tensor):
                of_rows.append(value)
                continue
            dtype, where = value.dtype, "cpu" if value.is_cpu else value.device.type
            of_rows += (tuple(value.shape), str(dtype), where)
            if where == "meta" or (type(value) is not Tensor and type(value) is not nn.Parameter):
                continue
            if dtype.is_floating_point or dtype.is_complex:
                real.append((name, value))
            elif value.layout is torch.strided and not value.is_quantized:
                if where == "cpu":
                    of_rows.append(crc32(bytes_of(value)))
                else:
                    seen: Any = hash_of(value)
                    self.late.append((Fact(f"input {name} of the last call: values", "", self._rows), seen))
        # Each has a place of its own by its name, in whatever order they are given: two that are exchanged are seen.
        for place, (name, value) in enumerate(sorted(real, key=_name), len(numbers)):
            if value.dtype.itemsize < 4:
                self.tolerance = COARSE
            found = projection_of(value, place)
            if isinstance(found, Fingerprint):
                numbers[f"input {name}"] = found
            else:
                self.late_numbers[f"input {name} of the last call"] = found

    def _of_last(self) -> tuple[list[Fact], dict[str, Fingerprint]]:
        """Return what is known of the last call since it began, and what an accelerator has computed since then."""
        last, self.of_last = self.of_last, []
        facts, numbers = self._taken_late()
        return last + facts, numbers

    def _taken_late(self) -> tuple[list[Fact], dict[str, Fingerprint]]:
        """Return what an accelerator was to compute at an earlier point; the call waits for it."""
        facts = []
        if self.late:
            for (fact, _), seen in zip(self.late, torch.stack([x for _, x in self.late]).tolist(), strict=True):
                facts.append(fact._replace(value=f"hash {seen & (1 << 63) - 1:016x}"))
        numbers = {topic: Fingerprint(*x.tolist()) for topic, x in self.late_numbers.items()}
        self.late, self.late_numbers = [], {}
        return facts, numbers

    # ------------------------------------------------------------------------------------------------------ backward

    @eagerly("ndtp: what ranks compare of a backward is no part of a graph")
    def _expect_backward(self, output: object) -> None:
        self.mesh.step.expect_backward = self._expect_outside
        self.mesh.step.end_call()
        if type(output) is Tensor:
            found = [output] if output.requires_grad else []
        else:
            tensors = [x for _, x in leaves_of(output) if isinstance(x, Tensor)]
            found = [x for x in tensors if x.requires_grad and not isinstance(x, (Pending, Noted))]
        for index, x in enumerate(found):
            is_first = index == 0 and (len(found) == 1 or not x.dim())
            self._hook(x, self.calls, is_first and type(x) is Tensor and self.whole_inputs)

    def _expect_outside(self, made: Tensor, operands: object) -> None:
        """A whole tensor that code outside of the model has made of what the model gave, and of what else."""
        if not of_turn(self).get("depth", 0) and not torch.compiler.is_compiling():
            self._hook(made, self.calls, self.whole_inputs)
            if operands and self.whole_inputs:
                named = leaves_of(operands, "of the loss outside of the model")
                self._operands += [(name, x) for name, x in named if not isinstance(x, Tensor) or type(x) is Tensor]

    def _hook(self, x: Tensor, number: int, is_looked_at: bool) -> None:
        begun: Any = partial(self._compare_backward, number, is_looked_at)
        begun.__torch_unserializable__ = True  # and nobody misses it in a saved tensor
        if type(x) is Tensor and x._backward_hooks is None and (node := x.grad_fn) is not None:
            # As `register_hook` does, which takes several times as long, by what nobody needs here.
            x._backward_hooks = OrderedDict({0: begun})
            node._register_hook_dict(x)
            return
        with torch._C.DisableTorchFunctionSubclass():
            _ = x.grad_fn  # of a view that another view changed; torch's own hook on a stale one ends the process
            x.register_hook(begun)

    def _compare_backward(self, number: int, is_looked_at: bool, grad: Tensor) -> None:
        """Compare ranks once a backward, where it begins."""
        task = torch._C._current_graph_task_id()
        if task == self._task or torch.compiler.is_compiling() or not self.is_on:
            return
        conversation = self.mesh.groups.conversation()
        if conversation is None:
            return
        self._task, self.backwards = task, self.backwards + 1
        what = f"backward of call {number} of {self.name}"
        refuse_batched(grad, what)
        if not self._knows_losses and not grad.dim():
            self._knows_losses = True
            warn_of_own_losses(self.model, self.mesh.grid.size(self.rows), grad)
        last, numbers = self._of_last() if self.of_last or self.late or self.late_numbers else ([], {})
        accumulates, creates = self.mesh.step.partial_sums.depth, torch.is_grad_enabled()
        uses = self.mesh.step.taken_uses()
        of_rows: list[object] = [fact[:2] for fact in last] if last else []
        reads = self._reads()
        of_rows += reads
        operands, self._operands = self._operands, []
        self._look_at(operands, of_rows, numbers)
        form = None
        if is_looked_at and not grad.is_meta:
            form = tuple(grad.shape), str(grad.dtype), "cpu" if grad.is_cpu else grad.device.type
            of_rows.append(form)
            found = projection_of(grad)
            if isinstance(found, Fingerprint):
                numbers["factor of the loss: the gradient that backward begins with"] = found
            else:
                self.late_numbers["factor of the loss: the gradient that the last backward began with"] = found

        def facts() -> list[Fact]:
            made = [*last, Fact("accumulating gradients", accumulates > 0), Fact("create_graph", creates)]
            made += [*facts_of(operands, self._rows), *facts_of_reads(reads, self._rows)]
            made += facts_of_uses(uses, self.model, self.mesh)
            return made if form is None else [*made, Fact("input gradient", form_of(grad), self._rows)]

        at_work = Speaking(conversation, what)
        at_work.begin()
        try:
            alike = accumulates, creates, crc32("\n".join(uses).encode())
            point = Point(what, alike, of_rows, numbers, facts=facts, tolerance=self.tolerance, apart=MAY_DIFFER)
            is_apart = compare(self.mesh, conversation, point, self.rows)
            # A backward that begins without new uses is one of what was used before.
            self.mesh.step.uses_differ = is_apart or (self.mesh.step.uses_differ and not any(uses))
            waits = self.mesh.step.uses_differ and not accumulates  # else the sums wait anyway, and for later ones
            waiting = WaitingBackward(self.mesh, conversation) if waits else None
        except BaseException:
            at_work.end()
            self.mesh.step.partial_sums.discard()  # other ranks may have none
            raise
        # Twice: behind what the first ones of this backward still have to end.
        engine = Variable._execution_engine
        engine.queue_callback(partial(engine.queue_callback, partial(self._ended, at_work, waiting)))

    def _ended(self, at_work: Speaking, waiting: WaitingBackward | None) -> None:
        try:
            name = "" if waiting is None else waiting.end()
            if name and not self._has_warned:
                self._has_warned = True
                warn_of(name, self.name, self.rows)
        finally:
            at_work.end()
        self.steps.note_gradients()

    def compare_late(self) -> None:
        """Compare what an accelerator has computed since the last point, before an optimizer uses it."""
        if self.mesh.device_type == "cpu" or not self.is_on:
            return
        if (conversation := self.mesh.groups.conversation()) is not None:
            what = f"optimizer step after call {self.calls} of {self.name}"
            facts, numbers = self._taken_late()
            with Speaking(conversation, what):
                of_rows = [fact[:2] for fact in facts]
                compare(self.mesh, conversation, Point(what, None, of_rows, numbers, facts=lambda: facts), self.rows)

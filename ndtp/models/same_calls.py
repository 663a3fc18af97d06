"""Do all ranks call a split model alike?  Each call, and each backward of one, is compared before it sends anything.

What a rank has of a call: the modes of torch, which modules train and have hooks, which parameters want gradients and
have them, what was written to weights, what optimizers did since the last call, and the inputs: their forms, a hash of
what are integers, and a projection of what are not.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ndtp.models.noted import Noted
from ndtp.models.pending import Pending
from ndtp.models.same_steps import Steps, settings_by_name, watch_steps
from ndtp.runtime.facts import (
    Fact,
    Fingerprint,
    digest,
    form_of,
    hash_of,
    leaves_of,
    modes,
    projection_of,
    random_state,
    short,
    thread_facts,
)
from ndtp.runtime.of_turn import OfTurn
from ndtp.runtime.points import SUMMARY, Point, Speaking, compare
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.runtime.region import may_compare

_NUMBERS = count()  # models that ranks split in the same order have the same
# What `save_pretrained` leaves in the config of the rank that saves.
SAVED = {"architectures", "transformers_version", "dtype", "torch_dtype", "auto_map", "name_or_path"}
SELDOM = 16  # calls without gradients for each that looks at all modules


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

    depth = OfTurn(int)
    drawn = OfTurn(bytes)
    at_work = OfTurn()

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
        self.check = check
        self.thorough = check is True
        self.whole_inputs = whole_inputs
        self.name = type(model).__name__
        self._model = ref(model)
        self.calls = self.backwards = 0
        self.late: list[tuple[Fact, Tensor]] = []  # hashes on their way from an accelerator
        self.late_numbers: dict[str, Tensor] = {}
        self.of_last: list[Fact] = []  # what is known of the last call since it began
        self.steps = Steps(self)
        self.draws = False  # whether the last call drew random numbers
        self._task, self.number = -1, next(_NUMBERS)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    @property
    def is_alive(self) -> bool:
        return self._model() is not None

    @property
    def is_on(self) -> bool:
        asked = self.mesh.check is not False if self.check is None else self.check
        return asked and self.mesh.device_mesh is not None and may_compare(self.mesh.device_type)

    def __deepcopy__(self, memo: dict[int, Any]) -> SameCalls:
        made = copy.copy(self)
        memo[id(self)] = made
        made.mesh = copy.deepcopy(self.mesh, memo)
        made._model = ref(copy.deepcopy(self.model, memo))
        made.late, made.late_numbers, made.of_last, made.steps = [], {}, [], Steps(made)
        made.depth, made.number = 0, next(_NUMBERS)
        if made.is_on:
            watch_steps(made)
        return made

    # --------------------------------------------------------------------------------------------------------- hooks

    def watch(self, entries: Sequence[nn.Module]) -> SameCalls:
        """Put hooks on the modules by which a model is called; one that is called inside of another counts no more."""
        for module in entries:
            module.register_forward_pre_hook(self.begin, with_kwargs=True, prepend=True)
            module.register_forward_hook(self.end, with_kwargs=True, always_call=True)
        watch_steps(self)
        if self.is_on and self.mesh.backend != "fake":
            self.steps.note_weights()
        return self

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self.is_on:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:  # whose tensors have no numbers to compare
            return
        self.depth += 1
        if self.depth == 1:
            conversation = self.mesh.groups.conversation()
            if conversation is not None:
                at_work = Speaking(conversation, f"call {self.calls + 1} of {self.name}")
                at_work.begin()
                self.at_work = at_work
                self._compare_call(module, args, kwargs)

    def end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.depth:
            return
        self.depth -= 1
        if self.depth or self.at_work is None:
            return
        self.at_work.end()
        self.at_work = None
        self.draws = bool(self.drawn) and random_state(self.mesh.device_type) != self.drawn
        if self.draws:
            self.of_last.append(Fact("random numbers of torch before the last call", short(self.drawn), self._rows))
        if torch.is_grad_enabled():
            self._expect_backward(output)

    # --------------------------------------------------------------------------------------------------------- calls

    @property
    def _rows(self) -> tuple[str, ...]:
        return self.rows or ("",)  # an axis of no grid: facts of rows where no axis has others

    def _compare_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls += 1
        model, number = self.model, self.calls
        by = "" if module is model else f", of its {type(module).__name__}"
        what = f"call {number} of {self.name}{by}"
        inputs, numbers = self._inputs({**_named(type(module), args), **kwargs})
        device_type = self.mesh.device_type
        found = modes(device_type)
        facts = [Fact(f"{SUMMARY}modes of torch", found), *inputs, *self.of_last]
        facts.append(Fact("accumulating gradients", self.mesh.step.partial_sums.is_accumulating))
        facts.append(Fact("backward passes so far", self.backwards))
        facts += self.steps.facts()
        optimizers = self.steps.taken_settings()
        facts.append(Fact(f"{SUMMARY}settings of optimizers", optimizers))
        wants = torch.is_grad_enabled()
        is_seen = wants or (number - 1) % SELDOM == 0
        if is_seen:
            facts.append(Fact("how it was split", self.made_by))
            facts += self._settings(number)
            parts = self.steps.state_of(model, self.thorough or (number - 1) % SELDOM == 0)
            facts.append(Fact("all of the modules and parameters", digest(bytes(parts.flags), parts.names)))

        def details() -> list[Fact]:
            settings = [fact for each in optimizers for fact in settings_by_name(*each)]
            return thread_facts(found, device_type) + settings + (self.steps.details() if is_seen else [])

        self.of_last = []
        factor = self.steps.taken_factor()
        compare(self.mesh, Point(what, facts, numbers, factor, details), self.rows)
        if is_seen:
            self.steps.compare_weights(what)
        looks = self.thorough or self.draws or (number - 1) % SELDOM < 2
        self.drawn = random_state(device_type) if model.training and looks else b""

    def _settings(self, number: int) -> list[Fact]:
        """Return the settings of a model of transformers: its attention kernel, and its config, which is compared
        rarely.
        """
        config: Any = getattr(self.model, "config", None)
        facts = [Fact("setting of attention", getattr(config, "_attn_implementation", None))]
        if hasattr(config, "to_dict") and (number - 1) % self.every == 0:
            plain = _settings_in(config.to_dict())
            facts += [Fact(f"setting {key} of its config", repr(value)) for key, value in sorted(plain.items())]
        return facts

    def _inputs(self, given: Any) -> tuple[list[Fact], dict[str, Fingerprint]]:
        """Facts of what the model is called with; hashes on an accelerator are compared at a later point."""
        facts, numbers = self._taken_late()
        if not self.whole_inputs:
            return facts, numbers
        for place, (name, value) in enumerate(leaves_of(given)):
            if not isinstance(value, Tensor):
                facts.append(Fact(f"input {name}", value, self._rows))
                continue
            facts.append(Fact(f"input {name}", form_of(value), self._rows))
            if value.is_meta or type(value) not in (Tensor, nn.Parameter):
                continue
            if value.is_floating_point() or value.is_complex():
                found = projection_of(value, place)
                if isinstance(found, Fingerprint):
                    numbers[f"input {name}"] = found
                else:
                    self.late_numbers[f"input {name} of the last call"] = found
            elif not value.is_quantized and value.layout is torch.strided:
                seen = hash_of(value)
                if isinstance(seen, int):
                    facts.append(Fact(f"input {name}: values", f"hash {seen:016x}", self._rows))
                else:
                    self.late.append((Fact(f"input {name} of the last call: values", "", self._rows), seen))
        return facts, numbers

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

    def _expect_backward(self, output: Any) -> None:
        number = self.calls
        self.mesh.step.expect_backward = self._expect_outside
        found = [x for _, x in _tensors_of(output) if x.requires_grad and not isinstance(x, (Pending, Noted))]
        for index, x in enumerate(found):
            is_first = index == 0 and (len(found) == 1 or not x.dim())
            self._hook(x, number, is_first and type(x) is Tensor and self.whole_inputs)

    def _expect_outside(self, made: Tensor) -> None:
        """A whole tensor that code outside of the model has made of what the model gave."""
        if not self.depth and not torch.compiler.is_compiling():
            self._hook(made, self.calls, self.whole_inputs)

    def _hook(self, x: Tensor, number: int, is_looked_at: bool) -> None:
        def begun(grad: Tensor) -> None:
            self._compare_backward(number, grad if is_looked_at else None)

        with torch._C.DisableTorchFunctionSubclass():
            _ = x.grad_fn  # of a view that another view changed; torch's own hook on a stale one ends the process
            x.register_hook(begun)

    def _compare_backward(self, number: int, grad: Tensor | None) -> None:
        """Compare ranks once a backward, where it begins."""
        task = torch._C._current_graph_task_id()
        if task == self._task or torch.compiler.is_compiling() or not self.is_on:
            return
        conversation = self.mesh.groups.conversation()
        if conversation is None:
            return
        self._task = task
        self.backwards += 1
        what = f"backward of call {number} of {self.name}"
        facts, numbers = self.of_last, {}
        self.of_last = []
        facts.append(Fact("accumulating gradients", self.mesh.step.partial_sums.is_accumulating))
        facts.append(Fact("create_graph", torch.is_grad_enabled()))
        if grad is not None and not grad.is_meta:
            facts.append(Fact("input gradient", form_of(grad), self._rows))
            found = projection_of(grad)
            if isinstance(found, Fingerprint):
                numbers["factor of the loss: the gradient that backward begins with"] = found
            else:
                self.late_numbers["factor of the loss: the gradient that the last backward began with"] = found
        at_work = Speaking(conversation, what)
        with at_work:
            compare(self.mesh, Point(what, facts, numbers), self.rows)
            at_work.begin()
        # Twice: behind what the first ones of this backward still have to end.
        engine: Any = Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(lambda: self._ended(at_work)))

    def _ended(self, at_work: Speaking) -> None:
        at_work.end()
        self.steps.note_gradient()

    def compare_late(self) -> None:
        """Compare what an accelerator has computed since the last point, before an optimizer uses it."""
        if not self.is_on or self.mesh.device_type == "cpu":
            return
        if (conversation := self.mesh.groups.conversation()) is not None:
            what = f"optimizer step after call {self.calls} of {self.name}"
            with Speaking(conversation, what):
                compare(self.mesh, Point(what, *self._taken_late()), self.rows)


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(kind.forward).parameters.values()
    return tuple(each.name for each in parameters if each.kind in positional)[1:]


def _named(kind: Any, args: Sequence[Any]) -> dict[str, Any]:
    """Positional arguments of a module's forward, by their names."""
    names = _names_of(kind)
    return {names[i] if i < len(names) else f"argument {i}": value for i, value in enumerate(args)}


def _settings_in(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without the entries that a rank writes when it saves the model."""
    kept = {key: value for key, value in config.items() if not key.startswith("_") and key not in SAVED}
    return {key: _settings_in(value) if isinstance(value, dict) and key.endswith("config") else value
            for key, value in kept.items()}  # fmt: skip


def _tensors_of(output: Any) -> list[tuple[str, Tensor]]:
    return [(name, x) for name, x in leaves_of(output) if isinstance(x, Tensor)]


def entries_of(model: nn.Module) -> list[nn.Module]:
    """The modules by which a model is called: itself, and models of transformers inside, such as an encoder."""
    inner = [m for m in model.modules() if any(k.__name__ == "PreTrainedModel" for k in type(m).__mro__)]
    return [model, *(m for m in inner if m is not model)]


def compare_calls(
    model: nn.Module,
    mesh: ProcessGrid,
    rows: Sequence[str] = (),
    scheme: str = "",
    check: bool | None = None,
    every: int = 100,
) -> None:
    """Compare every call of a model between ranks from now on, see `SameCalls`; once for a model.

    Args:
        rows: the axes along which ranks have rows of their own.
        scheme: by which it was split.
        check: whether they compare at all.

    Raises:
        ValueError: `every` is no positive number.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"parallelize: check_every={every!r} is not an integer of at least 1")
    hooked = [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]
    if check is False or any(isinstance(each, SameCalls) for each in hooked):
        return
    report = vars(model).get("ndtp_report")
    how = [f"{name} {what}" for name, what in getattr(report, "replaced", {}).items()]
    made_by = f"scheme {scheme!r} on grid {mesh.grid} ({digest(how):016x})" + f", {mesh.wire}" * bool(mesh.wire)
    nontrivial = mesh.grid.nontrivial(tuple(rows))
    SameCalls(model, mesh, nontrivial, made_by, check, every).watch(entries_of(model))

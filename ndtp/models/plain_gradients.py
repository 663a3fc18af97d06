"""Parameters that every rank has whole, which a model's code takes for plain tensors, and their gradients.

What `parallelize` left as it is becomes one of the grid, too: one kind of parameter for optimizers and norms.  Code
that reads it gets what a plain tensor gives (see `ndtp.runtime.grid_tensor`), so its gradient comes as a plain tensor,
which is made one of the grid here.

Where ranks have rows of their own, each rank's gradient is that of its rows.  As its gradient comes, it is set aside
and nothing is added to `.grad`; when backward ends, all that were set aside are summed in the order of the model's
parameters, in few collectives, and added.  So neither the order in which they come on a rank matters, nor whether one
comes there at all.

Code outside of layers computes with parameters, too: a penalty in the loss, a scale, prototypes.  What it gives of a
parameter is this rank's, also of a split one, whose layer gives the sum of all ranks.  The two must not be added up
before the first is summed: from then on what the layer gives is set aside, and added behind the sums.
Source: the buckets of Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import reduction_volume
from ndtp.algebra.volume import Volume
from ndtp.errors import LayoutError, warn
from ndtp.models.data_loss import DataLoss
from ndtp.models.hooks_of_gradients import hook_first, is_seen
from ndtp.models.left_alone import is_foreign
from ndtp.models.replicated import Replicated
from ndtp.nn.parameters import put_on_grid
from ndtp.nn.sharded import Sharded
from ndtp.ops.gradients import all_reduce
from ndtp.runtime.arrival import is_plain, local_of, no_second_sum, real_of, wrapped
from ndtp.runtime.at_work import at_work
from ndtp.runtime.eagerly import as_it_is
from ndtp.runtime.grid_parts import full_of, part_of
from ndtp.runtime.handed_out import is_sum, refuse_within_backward, set_aside
from ndtp.runtime.of_turn import OfTurn
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.runtime.wide_gradients import add_to_gradient

BUCKET = 2**23  # elements that are summed in one collective, or those of one parameter


_registered = [0]  # how often any module of the program was given a parameter, or another module


@functools.cache
def _count_registered() -> None:
    def count(*_: Any) -> None:
        _registered[0] += 1

    register_module_module_registration_hook(count)
    register_module_parameter_registration_hook(count)


class PlainGradients:
    """Brings gradients that come as plain tensors to the grid, summed over axes that split rows.

    Args:
        axes: those that split rows, `dp`.
        whose_loss: the model whose loss is the mean over the rows of all ranks; "" where each rank has its own.
    """

    # What came of each parameter, by the backward that is going on: there may be one within another.
    _came = OfTurn(dict)
    _summed = OfTurn(dict)  # what layers gave meanwhile

    def __init__(self, mesh: ProcessGrid, axes: Sequence[str], whose_loss: str = "") -> None:
        self.mesh, self.axes, self.whose_loss = mesh, mesh.grid.nontrivial(axes), whose_loss
        mesh.step.row_axes = mesh.step.row_axes or self.axes
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._split: dict[int, tuple[str, Any]] = {}
        self._seen = _registered[0]
        self._hooked: set[int] = set()  # their identities, and those of these parameters
        self._outside: set[int] = set()  # those with which code outside of forwards has computed

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainGradients:
        made = PlainGradients(self.mesh, self.axes, self.whose_loss)
        memo[id(self)] = made
        for name, parameter in self._split.values():
            copied = copy.deepcopy(parameter, memo)
            made._watch_split(name, copied)
            if hasattr(parameter, "ndtp_summed_over") and not is_plain(copied):
                copied.ndtp_summed_over = parameter.ndtp_summed_over
        for name, parameter in self._parameters:  # hooks of parameters are not copied with these
            made._watch_whole(name, copy.deepcopy(parameter, memo))
            if "ndtp_set_aside" in vars(parameter):
                made._hand_out(made._parameters[-1][1])
        return made

    def watch_new(self, model: nn.Module, *_: Any) -> None:
        """Take all parameters where the program has put some into a module since; runs before each forward."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return  # hooks of a parameter that were made here would be none of those that train
        if self._seen != _registered[0]:
            self._seen, known = _registered[0], len(self._parameters)
            self.watch(model)
            for parameter in [parameter for _, parameter in self._parameters[known:]]:
                if not is_plain(parameter):  # no layer computes with it, so all that comes is this rank's
                    self._hand_out(parameter)

    def watch(self, model: nn.Module, *_: Any) -> None:
        """Take all parameters that the model has whole by now; runs before each of its forwards."""
        if torch.compiler.is_compiling():
            return
        if torch._C._current_graph_task_id() == -1:  # type: ignore[attr-defined]
            self._came.clear()  # of a backward that was broken off
            self._summed.clear()
        for name, parameter in model.named_parameters():
            is_known = ("ndtp_hand_out" if self.axes else "ndtp_of_model") in vars(parameter)
            if not is_known and not is_plain(parameter):
                self._watch_split(name, parameter)
            if not hasattr(parameter, "ndtp_summed_over") and _may_have_gradient(parameter):
                owner = model.get_submodule(name.rpartition(".")[0])
                own = vars(owner).get("lies")  # what else somebody put onto a layer is none of its own
                is_of_layer = isinstance(owner, Sharded) and (own is None or name.rpartition(".")[2] in own)
                if is_of_layer or _makes_weight(model, name):
                    # Gradients of it come as they lie.
                    parameter.ndtp_summed_over = ()  # type: ignore[attr-defined]
                    continue
                of_torch = type(parameter) is nn.Parameter and parameter.layout is torch.strided
                if of_torch and not is_foreign(owner):
                    bare = Layout(self.mesh.grid, *[None] * parameter.dim())
                    put_on_grid(parameter, bare, self.mesh, name)
                if not isinstance(owner, Replicated):
                    parameter.ndtp_is_read = True  # type: ignore[attr-defined]
                self._watch_whole(name, parameter)

    def _watch_split(self, name: str, parameter: Any) -> None:
        parameter.ndtp_of_model = True
        if self.axes:
            self._split[id(parameter)] = name, parameter
            parameter.ndtp_hand_out = partial(self._hand_out_to_code, parameter)

    def _watch_whole(self, name: str, parameter: Any) -> None:
        hook_first(parameter, partial(self._take, len(self._parameters)))
        self._hooked.add(id(parameter))
        self._parameters.append((name, parameter))
        parameter.ndtp_summed_over = self.axes
        if not is_plain(parameter):
            parameter.ndtp_of_model = True
            if self.axes:
                parameter.ndtp_hand_out = partial(self._hand_out_to_code, parameter)

    def _hand_out_to_code(self, parameter: nn.Parameter) -> None:
        if at_work() is None:
            self._outside.add(id(parameter))
        self._hand_out(parameter)

    def _hand_out(self, parameter: Any) -> None:
        """Sum what code outside of layers gives of a parameter, from now on."""
        set_aside(parameter, partial(self._set_aside, id(parameter), parameter.ndtp_name))
        if id(parameter) not in self._hooked:
            self._hooked.add(id(parameter))
            hook_first(parameter, partial(self._take_of_split, id(parameter)))
        else:
            parameter._backward_hooks = parameter._backward_hooks  # as above

    def _set_aside(self, parameter: int, name: str, summed: Any) -> Any:
        """Keep what a layer gives of a parameter; a zero for autograd, once in a backward."""
        refuse_within_backward(name, self.axes)
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        found = self._summed.setdefault(task, {}).setdefault(parameter, [])
        found.append(summed)
        if len(found) > 1:
            return None
        nothing = local_of(summed).new_zeros(()).expand(local_of(summed).shape)
        zero = wrapped(nothing, summed._spec, vars(summed).get("ndtp_real"))  # a number's, too
        zero.ndtp_is_nothing = True
        return zero

    def _taken_up(self, parameter: Tensor) -> Any:
        """Return what layers gave of a parameter in this backward; None where they gave nothing."""
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        of_task = self._summed.get(task, {})
        found = of_task.pop(id(parameter), None)
        if not of_task:
            self._summed.pop(task, None)
        return None if found is None else functools.reduce(torch.add, found)

    def volume(self) -> Volume:
        """Bytes that a rank receives in a backward."""
        form = None if self.mesh.wire is None else self.mesh.wire.format("weight_gradients")
        total = Volume()
        for bucket in self._buckets():
            elements = sum(1 + parameter.numel() for _, _, parameter in bucket)
            total += reduction_volume(self.mesh.grid, self.axes, (elements,), "wgrad", bucket[0][2].dtype, form)
        return total

    def _take(self, place: int, gradient: Tensor | None) -> Tensor | None:
        """The hook of a parameter; the gradient that autograd goes on with."""
        name, parameter = self._parameters[place]
        summed = self._taken_up(parameter)
        if gradient is None or getattr(gradient, "ndtp_is_nothing", False):  # autograd has none of what no loss needs
            return summed  # type: ignore[no-any-return]
        if not is_plain(gradient):
            if is_sum(gradient) or "ndtp_set_aside" not in vars(parameter):
                return None if summed is None else gradient + summed  # what a compiled layer gives is the sum
            self._refuse_graph(name, gradient)
            gradient = full_of(gradient)
        if not self.axes:
            return _on_grid(gradient, parameter)
        self._refuse_graph(name, gradient)
        return self._to_be_summed(name, parameter, place, gradient, summed)

    def _take_of_split(self, place: int, gradient: Any) -> Any:
        """The hook of a split parameter with which code outside of layers computes."""
        name, parameter = self._split[place]
        summed = self._taken_up(parameter)
        if gradient is None or getattr(gradient, "ndtp_is_nothing", False):  # as above
            return summed
        if is_sum(gradient) or "ndtp_set_aside" not in vars(parameter):  # no more, since `model.to` moved it
            return None if summed is None else gradient + summed
        self._refuse_graph(name, gradient)
        if not is_plain(gradient) and _lies_alike(gradient, parameter):
            gradient = gradient._local_tensor
        else:
            gradient = part_of(gradient if is_plain(gradient) else full_of(gradient), parameter._dtensor)
        return self._to_be_summed(name, parameter, place, gradient, summed)

    def _to_be_summed(self, name: str, parameter: Any, place: int, gradient: Tensor, summed: Any) -> Any:
        """Return the gradient that autograd goes on with.

        Args:
            place: of the parameter: its number, or the identity of a split one.
            gradient: this rank's shard of it.
            summed: what is already the sum of all ranks.
        """
        if self.whose_loss and id(parameter) in self._outside:
            self._warn(name)
        if gradient.is_sparse or is_seen(parameter):
            gradient = gradient.clone()
            all_reduce([(name, gradient)], self.mesh, self.axes)
            gradient = _on_grid(gradient, parameter)
            return gradient if summed is None else gradient + summed
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        if task not in self._came:
            self._came[task] = {}
            Variable._execution_engine.queue_callback(partial(self._finish, task))  # type: ignore[attr-defined]
        self._came[task][place] = gradient
        return _on_grid(torch.zeros_like(gradient), parameter) if summed is None else summed

    def _warn(self, name: str) -> None:
        ranks, axes = self.mesh.grid.size(self.axes), ", ".join(self.axes)
        warn(
            f"ndtp: code outside of {self.whose_loss} computes with '{name}', as a penalty of weights does: the "
            f"gradients of that are summed over the {ranks} ranks along {axes}, while the loss of {self.whose_loss} is "
            f"the mean over the rows of all of them; divide such a term by {ranks}, loss + term / {ranks}"
        )
        self.whose_loss = ""  # once is enough

    def _refuse_graph(self, name: str, gradient: Tensor) -> None:
        if getattr(gradient, "ndtp_has_sum", False):
            raise LayoutError(
                f"parallelize: '{name}' {tuple(gradient.shape)} gets gradients of a compiled layer, which has summed "
                f"them over {', '.join(self.axes)}, and of code outside of it, such as a penalty, whose are not\n"
                "  fix: compute the penalty in the model's forward, or do not compile the model"
            )
        if gradient.requires_grad:
            raise no_second_sum(name, gradient.shape, self.axes)

    @torch.no_grad()
    def _finish(self, task: int) -> None:
        came = self._came.pop(task)
        self.mesh.step.late.finish()  # theirs come first on every rank
        for bucket in self._buckets():
            is_here = [place in came for place, _, _ in bucket]
            zero = torch.zeros((), dtype=bucket[0][2].dtype, device=bucket[0][2].device)
            parts = [came.get(place, zero).expand(parameter.shape) for place, _, parameter in bucket]
            flat = torch.cat([parts[0].new_tensor(is_here), *(part.reshape(-1) for part in parts)])
            all_reduce([("parameters left as they are", flat)], self.mesh, self.axes)
            counts, *sums = flat.split([len(bucket), *(part.numel() for part in parts)])
            is_anywhere = is_here if all(is_here) else (counts != 0).tolist()
            for (_, _, parameter), total, has_come in zip(bucket, sums, is_anywhere, strict=True):
                if not has_come:
                    continue
                if parameter.grad is None:  # it came on other ranks alone
                    parameter.grad = torch.zeros_like(parameter)
                add_to_gradient(parameter, total.view(parameter.shape))
        self._finish_split([(self._split[place][1], x) for place, x in came.items() if place in self._split])

    def _finish_split(self, came: list[tuple[Any, Tensor]]) -> None:
        places = {place: number for number, place in enumerate(self._split)}
        came.sort(key=lambda each: places[id(each[0])])
        for dtype in dict.fromkeys(x.dtype for _, x in came):
            mine = [(parameter, x) for parameter, x in came if x.dtype is dtype]
            flat = torch.cat([x.reshape(-1) for _, x in mine])
            all_reduce([("parameters outside of layers", flat)], self.mesh, self.axes)
            for (parameter, x), total in zip(mine, flat.split([x.numel() for _, x in mine]), strict=True):
                add_to_gradient(parameter, total.view(x.shape))

    def _buckets(self) -> Iterator[list[tuple[int, str, nn.Parameter]]]:
        """Parameters that are summed together, in the order of the model: of one dtype, on one device."""
        bucket: list[tuple[int, str, nn.Parameter]] = []
        for place, (name, parameter) in enumerate(self._parameters):
            if not parameter.requires_grad:
                continue
            elements = parameter.numel() + sum(each.numel() for _, _, each in bucket)
            alike = bucket and (bucket[0][2].dtype, bucket[0][2].device) == (parameter.dtype, parameter.device)
            if bucket and (not alike or elements > BUCKET):
                yield bucket
                bucket = []
            bucket.append((place, name, parameter))
        if bucket:
            yield bucket


for _hook in (
    PlainGradients._take,
    PlainGradients._take_of_split,
    inspect.unwrap(PlainGradients._finish),
):  # a compiled step calls them in backward
    as_it_is(_hook)


def _makes_weight(model: nn.Module, name: str) -> bool:
    """Return whether a layer on the grid, which sums gradients, computes its weight from this parameter."""
    path, _, key = name.rpartition(".")
    layer, is_parametrized, of = f".{path}".rpartition(".parametrizations.")
    owner: object = model.get_submodule(layer.removeprefix(".") if is_parametrized else path)
    weight = of if is_parametrized else key.rpartition("_")[0]
    return isinstance(owner, Sharded) and weight in (vars(owner).get("lies") or ())


def _may_have_gradient(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, nn.Parameter) or parameter.is_inference():
        return False  # one that somebody else put in its place for a while
    if not is_plain(parameter) and not (hasattr(parameter, "ndtp_layout") and not parameter.ndtp_layout.axes):
        return False
    return parameter.is_floating_point() or parameter.is_complex()


def _lies_alike(gradient: Any, parameter: Any) -> bool:
    """Return whether a gradient is split as its parameter is, with the same padding."""
    is_split_alike = gradient.placements == parameter.placements
    return is_split_alike and local_of(gradient).shape == local_of(parameter).shape  # type: ignore[no-any-return]


def _on_grid(gradient: Tensor, parameter: Any) -> Tensor:
    """A gradient that is the same on every rank, of the kind of its parameter."""
    if is_plain(parameter) or gradient.is_sparse:
        return gradient
    if gradient.requires_grad:
        return DTensor.from_local(gradient, parameter.device_mesh, parameter.placements, run_check=False)
    return wrapped(gradient, parameter._spec, real_of(parameter))  # type: ignore[no-any-return]


def sum_plain_gradients_of(
    model: nn.Module, mesh: ProcessGrid, axes: Sequence[str], watches: bool = True
) -> PlainGradients | None:
    """Put what a model has whole on the grid, gradients summed over axes that split rows; None on a grid of one rank.

    Once a model: a second call takes what is plain still.

    Args:
        watches: whether each forward looks at all parameters, which `model.to` may have moved; else at those that came
            since, where ranks have rows of their own.
    """
    sums: PlainGradients | None = vars(model).get("ndtp_plain_gradients")
    if sums is None:
        if mesh.device_mesh is None:
            return None
        averages = any(isinstance(hook, DataLoss) for hook in model._forward_hooks.values())
        whose_loss = type(model).__name__ if averages else ""
        sums = model.ndtp_plain_gradients = PlainGradients(mesh, axes, whose_loss)  # type: ignore[assignment]
        if watches:
            model.register_forward_pre_hook(sums.watch, prepend=True)
        elif sums.axes:
            _count_registered()
            model.register_forward_pre_hook(sums.watch_new, prepend=True)
    sums.watch(model)
    return sums

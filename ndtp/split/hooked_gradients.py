"""Gradients as hooks and `autograd.grad` hand them out: with the sizes of the whole, as the tensor that they are of.

Autograd knows shards alone.  A user's hook, of a tensor or of a module's backward, gets the gradient's shard in the
form of the tensor whose gradient it is; what it returns in its place, split or whole, is brought to lie so again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import has_torch_function_unary

from ndtp.collectives.torch_patches import replaced
from ndtp.compute.torch_calls import Arguments, TorchFunction
from ndtp.compute.traces import refuse_batched
from ndtp.errors import LayoutError
from ndtp.runtime.arrival import is_plain, tensors_in, wrapped
from ndtp.runtime.grid_parts import part_of
from ndtp.split.moving import cut, moved
from ndtp.split.spec import ShardForm, Spec
from ndtp.split.tensor import FORM, TABLE, SplitTensor, enter, getters, leave, rule
from ndtp.split.whole import whole


def form_of(x: Any) -> ShardForm | None:
    """Return the form of a tensor that is split; None for anything else."""
    form = getattr(type(x), "form", None)
    return None if form is None else form(x)  # type: ignore[no-any-return]


def entered(grad: Tensor | None, form: ShardForm | None) -> Tensor | None:
    """Return a gradient's shard as a tensor with the sizes of the whole; a plain tensor's gradient as it is."""
    return grad if grad is None or form is None else form.enter(grad.view_as(grad))


def taken_back(given: Any, form: ShardForm | None) -> Any:
    """Return the shard of the gradient that a hook gives in the place of the one that it got."""
    if not isinstance(given, Tensor):
        return given
    if form is None:  # of a tensor that is whole
        return given.gathered() if hasattr(given, "gathered") else given
    return form.shard(given)


@rule(FORM)
def _form(x: SplitTensor) -> ShardForm:
    return ShardForm(partial(enter, spec=x.spec), partial(_shard, spec=x.spec))


def _shard(x: Tensor, spec: Spec) -> Tensor:
    if isinstance(x, SplitTensor):
        if x.spec.sizes == spec.sizes and x.spec.sections == spec.sections:
            return leave(moved(x, spec.dims, spec.padded))
        x = whole(x)
    return cut(x.gathered() if hasattr(x, "gathered") else x, spec)


def _parameter_of(x: Any) -> Any:
    """Return the parameter for which a tensor stands; None where it stands for itself."""
    return getattr(x, "stands_for", None)


@rule(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
def hooked(func: TorchFunction, x: Tensor, hook: Callable[[Any], Any]) -> object:
    """Register a user's hook on the gradient of a split tensor, or on that of the parameter for which it stands."""
    if (of := _parameter_of(x)) is not None:
        return func(of, hook)
    form = form_of(x)

    def on_shard(grad: Tensor) -> Tensor | None:
        if grad is x:  # where a gradient has been accumulated, the hook gets the tensor itself
            hook(x)
            return None
        result: Tensor | None = taken_back(hook(entered(grad, form)), form)
        return result

    with torch._C.DisableTorchFunctionSubclass():
        return func(x, on_shard)


@rule(*getters("grad", "_grad"))
def gradient(func: TorchFunction, x: Tensor) -> Tensor | None:
    """Return the gradient that a split tensor has kept, or that of the parameter for which it stands."""
    if (of := _parameter_of(x)) is not None:
        return of.grad  # type: ignore[no-any-return]
    with torch._C.DisableTorchFunctionSubclass():
        grad = func(x)
    return entered(grad, form_of(x))


@rule(vars(torch._C.TensorBase)["grad"].__set__)
def set_gradient(func: TorchFunction, x: SplitTensor, grad: Tensor | None) -> None:
    """Put a gradient, whole or split, in the place of the one that a tensor has."""
    if (of := _parameter_of(x)) is not None:
        if isinstance(grad, Tensor) and is_plain(grad) and not is_plain(of):
            grad = wrapped(part_of(whole(grad).detach(), of._dtensor), of._spec, of.ndtp_real)
        of.grad = grad
        return
    with torch._C.DisableTorchFunctionSubclass():
        func(x, None if grad is None else _shard(grad, x.spec).detach())


def edge_of(x: Any) -> Any:
    """The place in the graph where the gradient of a tensor with rules of its own enters; anything else as it is.

    A backward that is given places instead of such tensors has no rule to go by, and runs with torch's functions as
    they are outside: hooks, and checkpoints that compute again, meet split tensors in it.
    """
    if not isinstance(x, Tensor) or not has_torch_function_unary(x):
        return x
    if (link := getattr(x, "link", None)) is not None:
        link.fresh()
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(x) if x.requires_grad else x.as_subclass(Tensor)


@rule(torch.autograd.grad)
def gradients(
    func: TorchFunction,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    *args: Any,
    materialize_grads: bool = False,
    **kwargs: Any,
) -> Any:
    """`torch.autograd.grad`: gradients by tensors that are split lie as these do."""
    refuse_batched(
        grad_outputs, "torch.autograd.grad of a split tensor", kwargs.get("is_grads_batched", any(args[4:5]))
    )
    asked = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    asked = [x if (of := _parameter_of(x)) is None else of for x in asked]
    given = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if grad_outputs is not None:
        grad_outputs = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs)
        grad_outputs = [taken_back(grad, form_of(x)) for grad, x in zip(grad_outputs, given, strict=True)]
    found = func([*map(edge_of, given)], [*map(edge_of, asked)], grad_outputs, *args, **kwargs)
    if materialize_grads:
        with torch._C.DisableTorchFunctionSubclass():
            found = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(asked, found, strict=True)]
    return tuple(entered(grad, form_of(x)) for x, grad in zip(asked, found, strict=True))


@rule(torch.autograd.backward, Tensor.backward)
def _backward(func: TorchFunction, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Run backward with gradients that lie as the tensors do, as autograd hands them to a checkpoint, or are whole."""
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    grads: list[Any] = [grad_tensors]
    if isinstance(grad_tensors, (list, tuple)):
        grads = list(grad_tensors)
    with torch._C.DisableTorchFunctionSubclass():
        if len(grads) != len(given) or any(g is None for g in grads):
            return NotImplemented
        for i, (x, g) in enumerate(zip(given, grads, strict=True)):
            if type(g) is Tensor and isinstance(x, SplitTensor) and g.shape != x.shape and g.shape == x.spec.sizes:
                grads[i] = cut(g, x.spec)
        if any(g.shape != x.shape for x, g in zip(given, grads, strict=True)):
            return NotImplemented
        bare = [leave(g) if isinstance(g, SplitTensor) else g for g in grads]
    return torch.autograd.backward([*map(edge_of, given)], bare, *args, **kwargs)


# ------------------------------------------------------------------------------------------------ hooks of modules


def _alias(func: TorchFunction, *tensors: Any) -> object:
    """Link the gradients of a module's inputs or outputs, as torch does for its hooks; nothing is computed."""
    forms = [form_of(x) for x in tensors]
    with torch._C.DisableTorchFunctionSubclass():
        given = func(*[x if form is None else x.view_as(x) for x, form in zip(tensors, forms, strict=True)])
    made = [x if form is None else form.enter(x) for x, form in zip(given, forms, strict=True)]
    for x, of in zip(made, tensors, strict=True):
        for name in ("strides", "link"):
            if name in vars(of):
                setattr(x, name, getattr(of, name))
    return tuple(made)


def _now(args: object) -> Any:
    """Arguments or results with those computed that were still to be."""
    return type(args)(x.now() if hasattr(type(x), "now") else x for x in args) if type(args) is tuple else args


def _with_forms(given: Callable[[Any, Any], object]) -> Callable[[Any, Any], Any]:
    def setup_input_hook(self: Any, args: Any) -> object:
        args = _now(args)
        self.ndtp_inputs = [form_of(x) for x in args]
        return given(self, args)

    return setup_input_hook


def _with_forms_out(given: Callable[[Any, Any], object]) -> Callable[[Any, Any], Any]:
    def setup_output_hook(self: Any, args: Any) -> Any:
        args = _now((args,))[0] if isinstance(args, Tensor) else _now(args)
        inputs, outputs = self.ndtp_inputs, [form_of(x) for x in (args if isinstance(args, tuple) else (args,))]
        if any(inputs) or any(outputs):
            self.user_hooks = [partial(_called, hook, inputs, outputs) for hook in self.user_hooks]
            self.user_pre_hooks = [partial(_called_before, hook, outputs) for hook in self.user_pre_hooks]
        return given(self, args)

    return setup_output_hook


ShardForms = Sequence[ShardForm | None]


def _called(
    hook: Any, inputs: ShardForms, outputs: ShardForms, module: Any, grad_input: Any, grad_output: Any
) -> object:
    given = hook(module, _each(entered, grad_input, inputs), _each(entered, grad_output, outputs))
    return _each(taken_back, given, inputs)


def _called_before(hook: Any, outputs: ShardForms, module: Any, grad_output: Any) -> object:
    return _each(taken_back, hook(module, _each(entered, grad_output, outputs)), outputs)


def _each(change: Callable[[Any, Any], object], values: object, forms: ShardForms) -> object:
    if not isinstance(values, (tuple, list)) or len(values) != len(forms):
        return values  # which torch refuses, if a hook gave it
    return tuple(change(x, form) for x, form in zip(values, forms, strict=True))


def _refusing(given: Callable[..., None]) -> Callable[..., None]:
    """Refuse a hook of `register_backward_hook` on a split result; torch calls this where it has registered one."""

    def _maybe_warn_non_full_backward_hook(module: object, args: Arguments, result: object, grad_fn: object) -> None:
        if any(form_of(x) is not None for x in tensors_in(result)):
            raise LayoutError(
                f"register_backward_hook on {type(module).__name__}: such a hook gets the gradients of the last "
                "operation inside of the module, which on a grid is another one, on one rank's shard\n"
                "  fix: register_full_backward_hook (or torch's register_module_full_backward_hook), which gets the "
                "gradients of the module's inputs and outputs, with the sizes of the whole"
            )
        given(module, args, result, grad_fn)

    return _maybe_warn_non_full_backward_hook


def guard_backward_hooks() -> None:
    """Let the hooks of a module's backward, registered before or after, get gradients with the sizes of the whole.

    torch makes a `BackwardHook` for each call of a module that has such hooks; its two methods are wrapped once.
    Hooks of the deprecated `register_backward_hook` are refused where a result is split.
    """
    TABLE[BackwardHookFunction] = _alias
    replaced("torch.nn.Module._maybe_warn_non_full_backward_hook", _refusing)
    replaced("torch.utils.hooks.BackwardHook.setup_input_hook", _with_forms)
    replaced("torch.utils.hooks.BackwardHook.setup_output_hook", _with_forms_out)

"""Modes of torch in which a tensor holds no numbers that ranks could send or compare, and which are refused by name.

Also a graph of autograd that hooks around it do not see, and torch's profiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey  # type: ignore[attr-defined]
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import _CloneArgBeforeMutateMode, saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ndtp.errors import LayoutError

TORCHSCRIPT = (
    "this model is split over ranks, and TorchScript would hold this rank's part of it\n"
    "  fix: torch.compile(model); or the dense model, with the weights of save_pretrained() or state_dict()"
)
_SELECTIVE = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")  # of torch.utils.checkpoint
_modes_on = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]


class TransformedError(LayoutError):
    """The model's code multiplies under a transform of torch.func."""

    def __init__(self) -> None:
        super().__init__(
            "parallelize: the model's own code multiplies under a transform of torch.func (vmap, grad, ..), which "
            "looks past the shards of a split model\n  fix: a loop in the place of vmap; torch.autograd.grad with "
            "create_graph=True in the place of torch.func.grad; or the dense model"
        )


def is_in_transform() -> bool:
    """Whether code runs within a transform of `torch.func`."""
    return torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined]


def refuse_traces(what: str, exports: bool = True) -> None:
    """Refuse a transform of torch.func, a trace by torch.jit or make_fx, a selective checkpoint, and tensors without
    values.

    torch.compile has a way of its own, and a layer of `ndtp.nn` is one operation of what torch.export makes.

    Args:
        what: the layer, model or collective that is asked for.
        exports: whether torch.export may take it.

    Raises:
        LayoutError: names `what` and the mode; the same on every rank, before anything is sent.
    """
    if torch.compiler.is_compiling():
        if not exports and torch.compiler._is_exporting_flag:  # torch 2.11 traces is_exporting() as True, always
            raise LayoutError(
                f"{what}: torch.export would write down this rank's part of a split model as if it were the whole\n"
                "  fix: export the dense model; save_pretrained() and state_dict() give its weights"
            )
        return
    if torch._C._get_tracing_state() is not None:  # of torch.jit.trace, and of ONNX without dynamo
        raise LayoutError(f"{what}, in torch.jit: {TORCHSCRIPT}")
    if peek_interpreter_stack() is not None:
        raise LayoutError(
            f"{what}: torch.func transforms look past the shards of a split model\n  fix: loss.backward(), or "
            "torch.autograd.grad(loss, list(model.parameters())); or the dense model"
        )
    if forward_ad._current_level >= 0:
        raise LayoutError(
            f"{what}: layers on a grid have no forward-mode derivatives\n  fix: reverse mode, loss.backward() or "
            "torch.autograd.grad; or the dense model"
        )
    if not _modes_on():
        return
    if _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None:
        raise LayoutError(
            f"{what}: make_fx would record this rank's collectives as if they were operations on whole tensors\n"
            "  fix: torch.compile(model), or trace the dense model"
        )
    if _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None:
        raise LayoutError(
            f"{what}: tensors of FakeTensorMode have no values that ranks could send\n"
            "  fix: the dense model; for the bytes of a split one ndtp.plan, or `ndtp bench volume --model`"
        )
    stack = _get_current_dispatch_mode_stack()
    if any(type(mode).__name__ in _SELECTIVE for mode in stack):
        raise LayoutError(
            f"{what}: a selective checkpoint (context_fn=) keeps results of single operations, whose memory a layer on "
            "a grid uses again\n  fix: a checkpoint of the whole layer, without context_fn="
        )
    if any(isinstance(mode, _CloneArgBeforeMutateMode) for mode in stack):
        raise LayoutError(
            f"{what}: allow_mutation_on_saved_tensors() puts copies in the place of what a layer on a grid writes its "
            "results into\n  fix: run the model outside of it"
        )


def refuse_second(name: str, op: str = "") -> None:
    """Refuse double backward at the first backward, since autograd would not see all that is computed.

    Raises:
        RuntimeError: the same on every rank, before any collective.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}'{name}': its gradient cannot be differentiated again, and create_graph=True asks for that\n"
            "  fix: parallelize(..., double_backward=True), or a call of the model with a leaf that wants a gradient, "
            "x.requires_grad_(); elsewhere create_graph=False, or dense layers (keep=, to_dense())"
        )


def refuse_batched(grad: object, what: str, asked: object = False) -> None:
    """Refuse gradients that torch computes several of at once.

    Args:
        asked: whether torch is asked for them here.

    Raises:
        LayoutError: names `what`; the same on every rank, before anything is sent.
    """
    if asked or (isinstance(grad, Tensor) and is_legacy_batchedtensor(grad)):
        raise LayoutError(
            f"{what}: its collectives send one gradient, and is_grads_batched=True or vectorize=True asks for several\n"
            "  fix: one torch.autograd.grad after the other; or the dense model"
        )


def is_autocast_on(device_type: str) -> bool:
    """Return whether autocast casts what is computed on a kind of devices; a dry run, on "meta", has no autocast."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def own_graph() -> saved_tensors_hooks:
    """Return the context of a graph that is used up where it is made: hooks of whoever is around see nothing of it.

    A checkpoint would run all of its function again for each backward, and another hook would send its tensors to the
    host and back.
    """
    return saved_tensors_hooks(_same, _same)


def _same(x: Tensor) -> Tensor:
    return x


@contextmanager
def unrecorded() -> Iterator[None]:
    """A context in which torch's profiler records nothing: with `record_shapes` it holds each tensor that an operation
    gets, and torch exchanges the memory of none that is held.
    """
    if not torch.autograd._profiler_enabled():
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)

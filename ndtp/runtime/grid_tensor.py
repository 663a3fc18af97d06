"""`GridTensor`: a parameter that became one of a grid, of which a rank has a shard, and stayed the same object.

To torch and to whoever asks `isinstance` it is a DTensor.  It is none in memory: a Python object cannot grow, a DTensor
has two slots that a Parameter has not, and so `torch.utils.swap_tensors` refuses the two.  It holds the DTensor
instead, and each operation of torch runs on that (see `ndtp.runtime.grid_operations`).

Its sizes are those of the whole.  Where they do not divide, the DTensor has padding behind them, which is zero and
which nobody sees: a mean, a saved state or a dense weight that is assigned know nothing of it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ndtp.collectives.torch_patches import in_place, replaced
from ndtp.errors import LayoutError
from ndtp.runtime.dtensor_rules import PHYSICAL
from ndtp.runtime.eagerly import as_it_is
from ndtp.runtime.gradient_ends import end_of
from ndtp.runtime.grid_autograd import Moved, TakenWhole, ToLocal
from ndtp.runtime.grid_operations import operate
from ndtp.runtime.grid_parts import boxes_of, dense_of, full_of, lying_as, part_of
from ndtp.runtime.handed_out import note_mixed, note_use
from ndtp.runtime.loaded_states import watch_loaded_states
from ndtp.runtime.memories import given_memory, note_given
from ndtp.runtime.reads import NamedRead
from ndtp.runtime.waiting_calls import note_data_read

CLASS = vars(object)["__class__"]
GRAD = vars(torch._C.TensorBase)["grad"]
ADD = torch.ops.aten.add.Tensor
OF_MEMORY = {"_dtensor", "ndtp_real", "ndtp_memories"}  # not of the object that has it
# Hooks, and what stands for one, are not copied.
KEPT = ("_dtensor", "ndtp_memories", "ndtp_summed_over", "ndtp_waiting", "ndtp_is_handed", "ndtp_hand_out",
        "ndtp_set_aside", "ndtp_wide_gradient")  # fmt: skip


class GridTensor(torch.Tensor):
    """See the module; made by `become`, and by operations on such.

    Attributes:
        _dtensor: the DTensor, outside of autograd.
        ndtp_real: its shape; that of the DTensor may have padding.
        ndtp_name: what errors call it.
        ndtp_is_read: whether a model's own code takes it for a plain tensor, so that its gradient is one.
        ndtp_view: (of a view) what it is a view of, and how it was made where it shares no memory with that.
        ndtp_of_model: whether it is, or was made of, a parameter of a split model, or a gradient of one.
        ndtp_is_handed: whether code outside of the layers computes with it, whose gradient may be a plain tensor.
        ndtp_is_sum: (of a gradient) whether a compiled layer gives it, which has summed it over all ranks.
        ndtp_has_sum: (of a gradient) whether autograd has added such a one and another.
        ndtp_hand_out: what is called when it first does, where ranks have other rows; see `plain_gradients`.
        ndtp_set_aside: what takes the gradients that layers give of it from then on.
    """

    _dtensor: Any
    ndtp_real: Any
    ndtp_name: str
    ndtp_is_read: bool
    ndtp_view: Any
    ndtp_memories: Any = None  # see `ndtp.runtime.memories`
    ndtp_is_handed: bool
    ndtp_of_model: bool = False
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, dtensor: Any, requires_grad: bool = False, real: Sequence[int] | None = None) -> Any:
        shape = dtensor.shape
        is_padded = real is not None and tuple(real) != tuple(shape)
        if real is None or not is_padded:
            real = shape
        strides = torch.empty(real, device="meta").stride() if is_padded else dtensor.stride()
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(real), strides=strides, dtype=dtensor.dtype, device=dtensor.device,
            layout=dtensor.layout, requires_grad=requires_grad,
        )  # fmt: skip
        made._dtensor, made.ndtp_real, made.ndtp_name = dtensor, torch.Size(real), ""
        return made

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return DTensor

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        if kind is not DTensor:  # which `swap_tensors` has read of another one
            CLASS.__set__(self, kind)

    _local_tensor = property(lambda self: self._dtensor._local_tensor, lambda self, x: self._take_slot("local", x))
    _spec = property(lambda self: self._dtensor._spec, lambda self, x: self._take_slot("spec", x))
    placements = property(lambda self: self._dtensor.placements)
    device_mesh = property(lambda self: self._dtensor.device_mesh)
    is_padded = property(lambda self: self.ndtp_real != self._dtensor.shape)
    # Names, not a `__getattr__`, which the compiler does not see through.
    _raise_if_contains_partial_placements = DTensor._raise_if_contains_partial_placements

    @property
    def grad(self) -> Any:  # type: ignore[override]
        """A gradient is one of the grid, too: torch's compiler gives a DTensor, whose sums are those of a rank."""
        grad = GRAD.__get__(self)
        if type(grad) is DTensor and not grad.requires_grad:
            grad = GridTensor(grad, False, self.ndtp_real)
            GRAD.__set__(self, grad)
        if type(grad) is GridTensor and not grad.ndtp_name:
            grad.ndtp_name = f"gradient of {self.ndtp_name}"
            grad.ndtp_of_model = self.ndtp_of_model
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        GRAD.__set__(self, None if value is None else dense_of(value))

    @property
    def data(self) -> Any:  # type: ignore[override]
        note_data_read(self)
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        """A dense tensor, of which this rank takes its part; or one of the grid, with its memory if that lies alike."""
        note_data_read(self)
        lies_alike = isinstance(value := dense_of(value), DTensor) and _lies(value) == _lies(self)
        note_given(self, value, is_copied=not lies_alike)
        value = value.detach()
        if lies_alike:
            local = value._local_tensor  # type: ignore[attr-defined]
        else:
            local = part_of(full_of(value) if isinstance(value, DTensor) else value, self._dtensor)
        if (local.dtype, local.device) == (self.dtype, self.device):
            given_memory(self, local)
        else:
            become(self, lying_as(local, self._dtensor), self.ndtp_name, self.ndtp_real)

    def to_local(self, *, grad_placements: object = None) -> Tensor:
        """This rank's shard, with padding."""
        if sys._getframe(1).f_code.co_name == "_get_in_out_features":
            # peft asks how many features a layer takes and gives: here these are those of the whole.
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        is_layers = grad_placements is not None  # of a compiled one, which gives the sum of all ranks
        if not torch.is_grad_enabled() or (is_layers and not self.is_padded):
            return DTensor.to_local(self, grad_placements=grad_placements)  # type: ignore[arg-type]
        if not is_layers:
            note_use(self)
        return ToLocal.apply(self, is_layers)  # type: ignore[no-any-return, no-untyped-call]

    def redistribute(self, *args: object, **kwargs: object) -> Any:
        note_use(self)
        wanted = kwargs.get("placements") or (args[1] if len(args) > 1 else None)
        with nullcontext() if wanted == self.placements else NamedRead(self, "redistribute", self.ndtp_name):
            if self.is_padded or not torch.compiler.is_compiling():
                return Moved.apply(self, args, kwargs)  # type: ignore[no-untyped-call]
            return DTensor.redistribute(self, *args, **kwargs)  # type: ignore[arg-type]

    def numpy(self, *, force: bool = False) -> Any:  # type: ignore[override]
        """The whole, as of a dense tensor; a collective."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return full_of(self).numpy(force=force)

    def tolist(self) -> Any:
        """The whole, as of a dense tensor; a collective."""
        return full_of(self).tolist()

    def share_memory_(self) -> object:
        raise LayoutError(
            "ndtp: share_memory() of a model that is split over ranks would share this rank's shards alone\n"
            "  fix: share the dense model; or start a rank for each process, as ndtp.testing.run does"
        )

    __tensor_flatten__ = DTensor.__tensor_flatten__  # to the letter, as the compiler of torch checks

    @staticmethod
    def __tensor_unflatten__(inner: object, given: Any, size: Any, stride: Any) -> object:
        meta, real = getattr(given[0], "tensor_meta", given[1]), None  # torch 2.11 gives a spec, which holds it
        if tuple(size) != tuple(meta.shape):  # it has padding
            real, size, stride = size, meta.shape, meta.stride
        of_torch: Any = DTensor.__tensor_unflatten__(inner, given, size, stride)
        own = DTensor(of_torch._local_tensor, of_torch._spec, requires_grad=False)
        made = GridTensor(own, of_torch.requires_grad, real)
        made.ndtp_is_sum = True
        return made

    def _stable_hash_for_caching(self) -> str:
        """Keep graphs that take it out of the compiler's cache on disk: their operations belong to this grid's groups.

        Without it the compiler tries to pickle the grid, and prints a traceback.
        """
        from torch._inductor.codecache import BypassFxGraphCache

        raise BypassFxGraphCache("ndtp: a graph that takes parameters of a grid is in no cache")

    # What a distributed checkpoint of torch asks for; padding is in none.

    def __create_chunk_list__(self) -> object:
        if not self.is_padded:
            return DTensor.__create_chunk_list__(self)  # type: ignore[arg-type]
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(start), x.shape) for start, x in self._boxes()]

    def __create_write_items__(self, fqn: str, object: object) -> object:
        (item,) = DTensor.__create_write_items__(self._dtensor, fqn, object)
        if not self.is_padded:
            return [item]
        from dataclasses import replace

        made = []
        for start, box in self._boxes():
            chunk = replace(item.tensor_data.chunk, offsets=torch.Size(start), sizes=box.shape)
            given = replace(item.tensor_data, chunk=chunk, size=self.ndtp_real)
            made.append(replace(item, index=replace(item.index, offset=chunk.offsets), tensor_data=given))
        return made

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return next(box for start, box in self._boxes() if index.offset is None or tuple(index.offset) == start)

    def _boxes(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return the parts of the whole that this rank has, without padding: where each begins, and its memory."""
        return boxes_of(self._dtensor, self._local_tensor.detach(), self.ndtp_real)

    def _take_slot(self, name: str, value: object) -> None:
        """A slot of a DTensor that `torch.utils.swap_tensors` gives; that of one of these has come with `__dict__`."""
        own = vars(self)
        if "_dtensor" in own:
            return
        own[f"_slot_{name}"] = value
        if "_slot_local" in own and "_slot_spec" in own:
            local, spec = own.pop("_slot_local"), own.pop("_slot_spec")
            own["_dtensor"] = DTensor(local, spec, requires_grad=False)
            own.setdefault("ndtp_real", spec.shape)
            own.setdefault("ndtp_name", "")

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """The whole of it without padding, on every rank; a collective."""
        note_use(self)
        with NamedRead(self, "full_tensor", self.ndtp_name):
            if grad_placements is not None and not self.is_padded:
                return DTensor.full_tensor(self, grad_placements=grad_placements)  # type: ignore[arg-type]
            return TakenWhole.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def storage(self) -> Any:
        """Refuse the memory of the whole, which no rank has; safetensors asks for it."""
        which = f"no rank has the memory of {self.ndtp_name or 'a tensor'} {tuple(self.shape)}"
        raise LayoutError(f"ndtp: {which}\n  fix: ndtp.checkpoint, or p.full_tensor() of each parameter, on every rank")

    def __format__(self, spec: str) -> str:
        return format(full_of(self), spec) if not self.dim() else super().__format__(spec)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return repr(self._dtensor)

    def __deepcopy__(self, memo: Any) -> object:
        if id(self) in memo:
            return memo[id(self)]
        made = GridTensor(copy.deepcopy(self._dtensor, memo), self.requires_grad, self.ndtp_real)
        memo[id(self)] = made
        for name in vars(self).keys() - {*KEPT}:
            setattr(made, name, copy.deepcopy(vars(self)[name], memo))
        if self.grad is not None and not isinstance(self, nn.Parameter):  # torch copies no parameter's gradient
            made.grad = self.grad.clone()
        return made

    def __copy__(self) -> object:
        made = GridTensor(self._dtensor, self.requires_grad, self.ndtp_real)
        made.ndtp_name = self.ndtp_name
        if getattr(self, "_is_param", False):
            vars(made)["_is_param"] = True
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle has the whole tensor in host memory, as the dense one's; gathering it is a collective."""
        whole = full_of(self, "pickle").cpu()
        if getattr(self, "_is_param", False):
            return nn.Parameter(whole, self.requires_grad).__reduce_ex__(protocol)
        return whole.requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:  # type: ignore[override]
        made = operate(cls, PHYSICAL.get(func, func), args, kwargs or {})
        if func is ADD:
            note_mixed(args, made)
        return made


KINDS = (GridTensor, DTensor)  # the compiler goes by the class itself, not by what a tensor says of it


def _lies(x: GridTensor | DTensor) -> tuple[Any, ...]:
    """Return how a tensor of a grid lies, with its padding."""
    return x.placements, x.device_mesh, x._local_tensor.shape


OPERATE: Any = GridTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
as_it_is(OPERATE)  # a compiled step calls it in backward


def _as_operated(find: Callable[[Any, type], Any]) -> Callable[[Any, type], Any]:
    """Wrap torch's look-up of the rule that a class has for an operation, which comes before all else."""

    def found(holder: Any, kind: type) -> Any:
        return OPERATE if kind is GridTensor else find(holder, kind)

    as_it_is(found)
    return found


replaced("torch._library.simple_registry.GenericTorchDispatchRuleHolder.find", _as_operated)


for _types in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
    in_place(f"{_types}._foreach_supported_types").append(GridTensor)


def parameter_of(dtensor: Tensor) -> Any:
    """A parameter, which trains."""
    replaced("torch.utils.swap_tensors", _keeping_hooks_of_moved)
    made = GridTensor(dtensor, True)
    vars(made)["_is_param"] = True
    return made


def become(parameter: Any, dtensor: Any, name: str, real: Sequence[int]) -> None:
    """Make a parameter, a plain one or one on the grid, the same object on the grid: what holds it, holds that then.

    Its hooks with their handles, its attributes and weak references to it stay.  What of autograd was recorded of it
    before cannot run any more, and says so.
    """
    replaced("torch.utils.swap_tensors", _keeping_hooks_of_moved)
    own = dtensor._dtensor if type(dtensor) is GridTensor else dtensor  # or each operation would be dispatched twice
    made = GridTensor(own, parameter.requires_grad, real)
    if made.is_padded:
        watch_loaded_states()
    vars(parameter).update(vars(made), ndtp_name=name, ndtp_memories=None, _is_param=True)
    exchange(parameter, made)


def exchange(parameter: Any, other: Any) -> None:
    """Let two tensors change memory and kind; the first keeps its attributes and hooks, and loses its gradient."""
    parameter.grad = None
    of_gradient, accumulated = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    if parameter.requires_grad and parameter.is_leaf:
        end_of(parameter).register_prehook(_refuse_backward)
    kind, its = type(parameter), type(other)
    if kind is not its:
        CLASS.__set__(parameter, its)
        CLASS.__set__(other, kind)
    torch.clear_autocast_cache()  # it refers to weights that it has cast, and torch exchanges none of those
    torch._C._swap_tensor_impl(parameter, other)  # type: ignore[attr-defined]
    # Who looks after hooks is the tensor itself, whose memory has gone.
    if of_gradient is not None:
        parameter._backward_hooks = of_gradient
    if accumulated is not None:
        parameter._post_accumulate_grad_hooks = accumulated


def _keeping_hooks_of_moved(swap: Callable[[Any, Any], None]) -> Callable[[object, object], None]:
    """Wrap `torch.utils.swap_tensors`, by which `model.to` moves a parameter of a grid.

    The parameter stays the same object, with all that code has put on it, and gets other memory.  It is the memory that
    calls hooks: those of before would never be called again, nor those that are registered later.
    """

    @wraps(swap)
    def swapped(t1: object, t2: object) -> None:
        known = []
        for x in (t1, t2):
            if type(x) is GridTensor:
                known.append((x, {*(x._backward_hooks or ())}, {**vars(x)}))
                vars(x).pop("ndtp_hand_out", None)
                x.ndtp_is_handed = True  # or torch, which computes with it here, would be code outside of layers
        swap(t1, t2)
        for x, own, attributes in known:
            memory = dict.fromkeys(OF_MEMORY) | {key: vars(x)[key] for key in OF_MEMORY & vars(x).keys()}
            x.__dict__ = attributes | memory
            hooks: Any = x._backward_hooks
            for key in [key for key in hooks or () if key not in own]:
                del hooks[key]  # ndtp's, which came since torch computes with the parameter to swap it
            x._backward_hooks = hooks or None
            if x._post_accumulate_grad_hooks is not None:  # an empty one takes those that come later
                x._post_accumulate_grad_hooks = x._post_accumulate_grad_hooks

    return swapped


def _refuse_backward(*_: object) -> None:
    raise LayoutError(
        "parallelize: backward of what was computed before the model was split, of parameters that are on a grid now"
        "\n  fix: backward first, or compute it again; where the first call splits it, parallelize(..., example=...)"
    )

"""`GridTensor`: a parameter that became one of a grid, of which a rank has a shard, and stayed the same object.

To torch and to whoever asks `isinstance` it is a DTensor.  It is none in memory: a Python object cannot grow, a DTensor
has two slots that a Parameter has not, and so `torch.utils.swap_tensors` refuses the two.  It holds the DTensor
instead, and each operation of torch runs on that.  Beside plain tensors it goes by three rules:

- one that every rank has whole counts as a plain tensor, and so does what comes of it;
- into a plain tensor that is written (`ema.lerp_(p, 0.1)`) goes the whole of it, gathered, without padding;
- element by element, a plain tensor beside a split one is one that every rank has: a rank takes its part.

A number made of it (`p.pow(2).sum()`) is a plain number, the same on every rank.  What draws (`nn.init`) draws what it
would of the dense tensor, from torch's generator, of which a rank keeps its part.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ndtp.errors import LayoutError

NEW = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_ones", "new_full")
SAME = ("detach", "clone", "_to_copy", "alias", "empty_like")
DRAWS = (
    "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_",
)  # fmt: skip
CLASS: Any = vars(object)["__class__"]


class GridTensor(torch.Tensor):
    """See the module; made by `become`, and by operations on such.

    Attributes:
        _dtensor: the DTensor, outside of autograd.
        ndtp_real: the shape without padding.
        ndtp_name: what errors call it.
        ndtp_is_read: whether a model's own code takes it for a plain tensor, so that its gradient is one.
    """

    _dtensor: Any
    ndtp_real: Any
    ndtp_name: str
    ndtp_is_read: bool
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, dtensor: Any, requires_grad: bool = False) -> Any:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, dtensor.shape, strides=dtensor.stride(), dtype=dtensor.dtype, device=dtensor.device,
            layout=dtensor.layout, requires_grad=requires_grad,
        )  # fmt: skip
        made._dtensor, made.ndtp_real, made.ndtp_name = dtensor, dtensor.shape, ""
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
    to_local, redistribute = DTensor.to_local, DTensor.redistribute
    __tensor_flatten__ = DTensor.__tensor_flatten__
    # Names, not a `__getattr__`, which the compiler does not see through.
    _raise_if_contains_partial_placements = DTensor._raise_if_contains_partial_placements
    __create_chunk_list__ = DTensor.__create_chunk_list__
    __create_write_items__ = DTensor.__create_write_items__
    __get_tensor_shard__ = DTensor.__get_tensor_shard__

    @staticmethod
    def __tensor_unflatten__(inner: Any, given: Any, size: Any, stride: Any) -> Any:
        made: Any = DTensor.__tensor_unflatten__(inner, given, size, stride)
        return GridTensor(DTensor(made._local_tensor, made._spec, requires_grad=False), made.requires_grad)

    def _take_slot(self, name: str, value: Any) -> None:
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

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole of it without padding, on every rank; a collective."""
        whole = DTensor.full_tensor(self, grad_placements=grad_placements)  # type: ignore[arg-type]
        return whole if whole.shape == self.ndtp_real else whole[tuple(map(slice, self.ndtp_real))]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._dtensor)

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        made = GridTensor(copy.deepcopy(self._dtensor, memo), self.requires_grad)
        memo[id(self)] = made
        for name, value in vars(self).items():
            if name not in ("_dtensor", "ndtp_summed_over"):  # hooks are not copied
                setattr(made, name, copy.deepcopy(value, memo))
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = {name: value for name, value in vars(self).items() if name not in ("_dtensor", "ndtp_summed_over")}
        return _rebuilt, (self._dtensor, self.requires_grad, own)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        flat, tree = tree_flatten((args, kwargs))
        mine = [x for x in flat if type(x) is cls]
        written = _written(func, name, args, kwargs)
        if name in DRAWS and type(args[0]) is cls:
            return _drawn(func, args, kwargs)
        if any(is_whole_tensor(x) for x in flat):
            return _beside_plain(func, name, flat, tree, written)
        args, kwargs = tree_unflatten([x._dtensor if type(x) is cls else x for x in flat], tree)
        made = func(*args, **kwargs)
        if written is not None:
            return None if made is None else written
        if name in NEW:
            return made
        of = mine[0]
        return tree_map(lambda x: _taken(x, of, name) if isinstance(x, DTensor) else x, made)


KINDS = (DTensor, GridTensor)  # the compiler goes by the class itself, not by what a tensor says of it


def is_whole_tensor(x: Any) -> bool:
    """A plain tensor that is no number."""
    return isinstance(x, Tensor) and x.dim() > 0 and not isinstance(x, DTensor)


def _written(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return the tensors that an operation writes into, and returns."""
    if "out" in kwargs:
        return kwargs["out"]
    is_in_place = name.endswith("_") and not name.endswith("__")
    return args[0] if is_in_place and func._schema.is_mutable and args else None


def _rebuilt(dtensor: Any, requires_grad: bool, own: Any) -> Any:
    made = GridTensor(dtensor, requires_grad)
    for name, value in own.items():
        setattr(made, name, value)
    return made


def _taken(made: Any, of: GridTensor, name: str) -> Any:
    """Return an operation's result; a number has its sums finished, and is plain."""
    if made.dim() == 0:
        return made.full_tensor()
    result = GridTensor(made)
    result.ndtp_name = of.ndtp_name
    if hasattr(of, "ndtp_is_read"):
        result.ndtp_is_read = of.ndtp_is_read
    if made.shape == of.shape:
        result.ndtp_real = of.ndtp_real
        if name in SAME and hasattr(of, "ndtp_layout"):
            result.ndtp_layout = of.ndtp_layout
    return result


def part_of(dense: Tensor, like: Any) -> Tensor:
    """This rank's shard of a tensor that every rank has, with padding or without, to lie as a DTensor does."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    inside = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
    mine = dense[inside]
    if mine.shape == torch.Size(shape):
        return mine
    whole = dense.new_zeros(shape)
    whole[tuple(map(slice, mine.shape))] = mine
    return whole


def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    own = args[0]
    if own.is_meta:
        return own
    whole = torch.empty(own.ndtp_real, dtype=own.dtype, device=own.device)
    func(whole, *args[1:], **kwargs)
    own._local_tensor.copy_(part_of(whole, own))
    return own


def _beside_plain(func: Any, name: str, flat: Sequence[Any], tree: Any, written: Any) -> Any:
    into = written if isinstance(written, (list, tuple)) else [written]
    is_split = False
    if any(is_whole_tensor(x) for x in into):
        given = [full_of(x) if isinstance(x, DTensor) else x for x in flat]
    elif all(_is_plain_beside(x, flat) for x in flat if isinstance(x, DTensor)):
        given = [x._local_tensor if isinstance(x, DTensor) else x for x in flat]
    else:
        split = next(x for x in flat if isinstance(x, DTensor) and not _is_plain_beside(x, flat))
        if torch.Tag.pointwise not in func.tags and name != "copy_" and "foreach" not in name:
            raise refused(name, split, flat)
        given = [_beside(x, split, name, flat) if is_whole_tensor(x) else x for x in flat]
        is_split = True
    args, kwargs = tree_unflatten(given, tree)
    made = func(*args, **kwargs)
    if written is not None and made is not None:
        return written
    if not is_split or isinstance(made, GridTensor):
        return made
    of = next(x for x in flat if type(x) is GridTensor)
    return tree_map(lambda x: _taken(x, of, name) if isinstance(x, DTensor) else x, made)


def _is_plain_beside(x: Any, flat: Sequence[Any]) -> bool:
    """Return whether a DTensor beside plain tensors becomes plain, too: every rank has it whole, and code reads it.

    A term of the loss that is made of a layer's parameter alone goes on as one of the grid, as its gradient does.
    """
    if not all(placement.is_replicate() for placement in x.placements):
        return False
    if getattr(x, "ndtp_is_read", False):
        return True
    return any(is_whole_tensor(y) and not _fits(y, x.shape) for y in flat)


def _fits(x: Tensor, shape: Any) -> bool:
    try:
        return torch.broadcast_shapes(x.shape, shape) == shape
    except RuntimeError:
        return False


def full_of(x: Any) -> Tensor:
    return x.full_tensor() if type(x) is GridTensor else DTensor.full_tensor(x)


def _beside(x: Tensor, split: Any, name: str, flat: Sequence[Any]) -> Any:
    """A plain tensor as one that every rank has, in the place of the split one's whole."""
    real = getattr(split, "ndtp_real", split.shape)
    if x.shape == real and real != split.shape:
        sizes = [size for have, want in zip(reversed(real), reversed(split.shape), strict=True)
                 for size in (0, want - have)]  # fmt: skip
        x = torch.nn.functional.pad(x, sizes)
    if not _fits(x, split.shape):
        raise refused(name, split, flat)
    return DTensor.from_local(x, split.device_mesh, [Replicate()] * split.device_mesh.ndim, run_check=False)


def refused(what: str, split: Any, flat: Sequence[Any]) -> LayoutError:
    """Return the error about an operation on a split parameter and plain tensors."""
    name, (code, where) = getattr(split, "ndtp_name", ""), _reader()
    owner, what_it_is = name.rpartition(".")[0], f"'{name}'" if name else "a parameter"
    shapes = ", ".join(str(tuple(x.shape)) for x in flat if is_whole_tensor(x))
    others = f"tensors that are not, {shapes}" if shapes else "tensors that are not"
    keep = f"; or parallelize(..., keep=['{owner}']), which leaves it whole" if name else ""
    return LayoutError(
        f"ndtp: {code} reads {what_it_is} {tuple(split.shape)}, which is split over ranks, in {what} beside {others}\n"
        f"  at {where}\n"
        f"  fix: call the layer that has it; or take the whole of it, p.full_tensor(), a collective{keep}"
    )


def _reader() -> tuple[str, str]:
    """Return the code that reads a parameter, and its place: the innermost frame outside of torch and ndtp."""
    frame: Any = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "ndtp"):
        frame = frame.f_back
    own = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
    code = f"the code of {type(own).__name__}" if isinstance(own, torch.nn.Module) else frame.f_code.co_name
    return code, f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def parameter_of(dtensor: Any) -> Any:
    """A parameter, which trains."""
    made = GridTensor(dtensor, True)
    vars(made)["_is_param"] = True
    return made


def become(parameter: Any, dtensor: Any, name: str, real: Sequence[int]) -> None:
    """Make a parameter, a plain one or one on the grid, the same object on the grid: what holds it, holds that then.

    Its hooks with their handles, its attributes and weak references to it stay.  What of autograd was recorded of it
    before cannot run any more, and says so.
    """
    made = GridTensor(dtensor, parameter.requires_grad)
    vars(parameter).update(vars(made), ndtp_real=torch.Size(real), ndtp_name=name, _is_param=True)
    exchange(parameter, made)


def exchange(parameter: Any, other: Any) -> None:
    """Let two tensors change memory and kind; the first keeps its attributes and hooks, and loses its gradient."""
    parameter.grad = None
    of_gradient, accumulated = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    if parameter.requires_grad and parameter.is_leaf:
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(_refuse_backward)
    kind, its = type(parameter), type(other)
    if kind is not its:
        CLASS.__set__(parameter, its)
        CLASS.__set__(other, kind)
    torch._C._swap_tensor_impl(parameter, other)  # type: ignore[attr-defined]
    # Who looks after hooks is the tensor itself, whose memory has gone.
    if of_gradient is not None:
        parameter._backward_hooks = of_gradient
    if accumulated is not None:
        parameter._post_accumulate_grad_hooks = accumulated


def _refuse_backward(*_: Any) -> None:
    raise LayoutError(
        "parallelize: backward of what was computed before the model was split, of parameters that are on a grid now"
        "\n  fix: backward first, or compute it again"
    )

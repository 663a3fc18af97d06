"""`SplitTensor`: a tensor with the sizes of the whole, of which a rank has a shard.

A model's own code gets it in the place of an activation and calls torch's functions on it.  Each function has a rule in
one table: what it does with each dim tells where the operands must lie and how the result lies.  A function without a
rule gets the whole tensor, gathered: right, counted, and reported.  There is no way on which code sees a shard and
takes it for the whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.compute.traces import is_in_transform
from ndtp.errors import LayoutError
from ndtp.runtime.arrival import tensors_in
from ndtp.runtime.eagerly import as_it_is
from ndtp.split.spec import ShardForm, Spec

Rule = Callable[..., Any]
TABLE: dict[Any, Rule] = {}
# Keys of the rules for what has none, for the whole tensor, and for the way in which a tensor lies.
NO_RULE, GATHERED, FORM, IN_TRANSFORM = "no rule", "gathered", "form", "in a transform"


def rule(*functions: object) -> Callable[[Rule], Rule]:
    """Put a rule into the table.  It is called as `rule(func, *args, **kwargs)`, and may give `NotImplemented`."""

    def put(made: Rule) -> Rule:
        TABLE.update(dict.fromkeys(functions, made))
        return made

    return put


def getters(*names: str) -> list[object]:
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


# Facts that depend on neither the numbers nor on how they lie.
FACTS = {
    *getters(
        "_backward_hooks", "_version", "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta",
        "is_nested", "is_quantized", "is_sparse", "layout", "output_nr", "requires_grad", "is_mps", "is_xpu",
        "is_mkldnn", "is_sparse_csr", "is_mtia", "itemsize", "names", "retains_grad",
    ),
    *[getattr(Tensor, name).__set__ for name in ("requires_grad", "_backward_hooks")],
    Tensor.__hash__, Tensor.get_device, Tensor.is_complex, Tensor.is_floating_point, Tensor.is_signed,
    torch.is_complex, torch.is_floating_point, torch.is_tensor, Tensor.requires_grad_, Tensor.retain_grad,
    Tensor.element_size, Tensor.is_inference, torch.is_inference,
}  # fmt: skip
SHAPE = {*getters("shape")}
SIZES = {
    *getters("ndim", "nbytes"), Tensor.__len__, Tensor.dim, Tensor.numel, Tensor.size, torch.numel, Tensor.nelement,
    Tensor.ndimension, Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset,
}  # fmt: skip

# Of these, what a tensor that stands for a parameter has of that.
OF_A_LEAF = {*getters("is_leaf"), Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined]


def _part(name: str) -> property:
    """`z.real` and `z.imag`, which torch sets without asking `__torch_function__`: a write to the view."""

    def put(z: Tensor, value: object) -> None:
        getattr(z, name).copy_(value)

    return property(getattr(Tensor, name).__get__, put)


class Linked(Tensor):
    """A shard whose sizes are those of the whole.

    Attributes:
        link: of a view for which dims were gathered, what ties it to the tensor of which the dense one is a view.
    """

    link: Any = None  # a `ndtp.split.copies.Tie`

    def __init_subclass__(cls) -> None:
        """Have compilers run what its rules do as it is.

        Libraries of arrays, which go by the module of a class, take it for a tensor of torch's.
        """
        super().__init_subclass__()
        cls.__module__ = Tensor.__module__
        as_it_is(cls.__torch_function__.__func__)  # type: ignore[attr-defined]

    @property
    def writes(self) -> dict[int, int]:
        """Return how often memory was changed by writes that torch may not count, as those of inference mode."""
        raise NotImplementedError


class SplitTensor(Linked):
    """A shard; its sizes are those of the whole, `spec.sizes`.

    Attributes:
        strides: those of the dense tensor; None where it is contiguous.  They tell which reshapes are views of it.
        repeats: of a copy that has each entry of a dim several times, what it repeats; see `ndtp.split.repeated`.
        stands_for: (of what code gets that reads a layer's parameter) that parameter, whose gradient and hooks it has.
    """

    spec: Spec
    strides: tuple[int, ...] | None = None
    repeats: Any = None
    stands_for: Any = None

    @property
    def writes(self) -> dict[int, int]:
        return self.spec.context.writes

    @property
    def rows_differ(self) -> tuple[Any, tuple[str, ...]]:
        """Return the grid, and along which of its axes ranks have rows of their own."""
        return self.spec.mesh, self.spec.context.data

    real, imag = _part("real"), _part("imag")

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> object:
        given, kwargs = kwargs or {}, in_torchs_words(func, kwargs)
        if func in SHAPE:
            return torch.Size(args[0].spec.sizes)
        if func in FACTS:
            of = vars(args[0]).get("stands_for") if func in OF_A_LEAF else None
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs) if of is None else func(of, *args[1:], **kwargs)
        if func in SIZES and args:
            return func(like(args[0]), *args[1:], **kwargs)
        if len(types) > 1 and any(kind is not cls and hasattr(kind, "gathered") for kind in types):
            args, given = mapped(args, _gathered, Tensor), mapped(given, _gathered, Tensor)
            kwargs = in_torchs_words(func, given)
        if others := _on_other_grids(args, kwargs):
            change = lambda x: x.gathered() if id(x.spec.mesh) in others else x  # noqa: E731
            args, given, kwargs = mapped(args, change), mapped(given, change), mapped(kwargs, change)
        found = TABLE.get(func)
        if is_in_transform():
            return func(*mapped(args, TABLE[IN_TRANSFORM], Tensor), **mapped(kwargs, TABLE[IN_TRANSFORM], Tensor))
        if found is not None and ("out" not in kwargs or kwargs["out"] is None):  # rules give new tensors
            result = answer(found, (func, *args), kwargs)
            if result is not NotImplemented:
                is_scalar = type(result) is Tensor and not result.dim() and result.requires_grad
                if not is_scalar:
                    return result
                return split_in([*args, *kwargs.values()])[0].spec.mesh.step.made_whole(result, (args, kwargs))
        return TABLE[NO_RULE](func, args, given)

    def gathered(self) -> Tensor:
        """The whole tensor, on every rank (of its data-parallel rank); a collective."""
        result: Tensor = TABLE[GATHERED](self)
        return result

    def form(self) -> ShardForm:
        """The way in which the tensor lies, for a gradient of its own."""
        result: ShardForm = TABLE[FORM](self)
        return result


# NumPy's words, which torch's own functions take as well.
NUMPYS = {"axis": "dim", "keepdims": "keepdim"}
OF_TORCH = (type(torch.sum), type(Tensor.sum))


def in_torchs_words(func: TorchFunction, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Name the arguments as torch does, `dim` for `axis`: rules know these names alone."""
    if not kwargs:
        return {}
    if isinstance(func, OF_TORCH) and not NUMPYS.keys().isdisjoint(kwargs):
        return {NUMPYS.get(name, name): value for name, value in kwargs.items()}
    return dict(kwargs)


class NotStridedError(LayoutError):
    """A rule would cut a part out of a tensor that is sparse or nested."""

    def __init__(self) -> None:
        super().__init__("ndtp: ranks have no parts of a tensor that is sparse or nested\n  fix: x.to_dense()")


def answer(rule: Rule, args: Arguments, kwargs: Keywords) -> Any:
    """Return what a rule makes of arguments; `NotImplemented` where it does not know them by these names, or cannot cut
    them.
    """
    try:
        return rule(*args, **kwargs)
    except NotStridedError:
        return NotImplemented
    except TypeError:
        try:
            inspect.signature(rule).bind(*args, **kwargs)
        except TypeError:
            return NotImplemented
        raise


def like(x: SplitTensor) -> Tensor:
    """A tensor without memory that has the sizes of the whole."""
    with torch._C.DisableTorchFunctionSubclass():
        if x.strides is not None:
            return torch.empty_strided(x.spec.sizes, x.strides, dtype=x.dtype, device="meta")
        return torch.empty(x.spec.sizes, dtype=x.dtype, device="meta")


def strides_of(x: SplitTensor) -> tuple[int, ...] | None:
    """The strides of a new tensor that is computed of x element by element: dims in the order of those of x."""
    if x.strides is None:
        return None
    made = torch.empty_like(like(x))
    return None if made.is_contiguous() else made.stride()


def enter(shard: Tensor, spec: Spec) -> SplitTensor:
    """`shard`, which nobody else has, as a tensor of the whole's sizes."""
    if type(shard) is not SplitTensor:
        shard.__class__ = SplitTensor
    shard.spec = spec  # type: ignore[attr-defined]
    return shard  # type: ignore[return-value]


def leave(x: Tensor) -> Tensor:
    """The shard, as a plain tensor."""
    link = x.link  # type: ignore[attr-defined]
    if link is not None:
        link.fresh()
    with torch._C.DisableTorchFunctionSubclass():
        return x.view_as(x)


def split_in(x: object) -> list[SplitTensor]:
    """The split tensors among the operands of a function, in lists, tuples and mappings as well."""
    return [found for found in tensors_in(x) if isinstance(found, SplitTensor)]


def mapped(x: Any, change: Callable[[Any], Any], kind: Any = SplitTensor) -> Any:
    """Operands with `change` applied to each split tensor, or to each of another kind."""
    if isinstance(x, kind):
        return change(x)
    if isinstance(x, dict):
        return {name: mapped(value, change, kind) for name, value in x.items()}
    if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
        made = [mapped(value, change, kind) for value in x]
        return type(x)(*made) if hasattr(x, "_fields") else type(x)(made)
    return x


def _gathered(x: Tensor) -> Tensor:
    """The whole of a tensor that is split by other rules; anything else as it is."""
    is_other = not isinstance(x, SplitTensor) and hasattr(type(x), "gathered")
    return x.gathered() if is_other else x  # type: ignore[attr-defined, no-any-return]


IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


def _on_other_grids(args: Arguments, kwargs: Keywords) -> set[int]:
    """Return the identities of meshes whose ranks lie otherwise than those of the first split tensor."""
    given = (*args, *kwargs.values()) if kwargs else args
    mine = [x for x in given if isinstance(x, (SplitTensor, list, tuple))]
    if len(mine) == 1 and isinstance(mine[0], SplitTensor):  # most functions have one
        return set()
    meshes = [x.spec.mesh for x in split_in(mine)]
    lies = lambda mesh: (mesh.grid, mesh.device_mesh)  # noqa: E731
    return {id(mesh) for mesh in meshes if mesh is not meshes[0] and lies(mesh) != lies(meshes[0])}


def integers(given: Any) -> list[int]:
    """An integer of any library, or several, as those of Python."""
    try:
        return [index(given)]
    except TypeError:  # no number
        return [*map(index, given)]


def dims_given(dim: object, count: int) -> list[int]:
    """The dims of `count` that an argument names, from the first one on; none where it names none.

    Raises:
        IndexError: torch's, of one that there is not.
    """
    found = [] if dim is None or isinstance(dim, bool) else integers(dim)
    for d in found:
        if not -count <= d < count:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-count}, {count - 1}], but got {d})"
            )
    return [d % count for d in found]


def name_of(func: Any) -> str:
    """`softmax`; of an attribute that is read, its own name."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        name = "." + str(getattr(func.__self__, "__name__", "attribute"))
    return name.strip("_") or name


def writes(func: object) -> bool:
    """Return whether a function of torch changes its first operand, by its name."""
    name = str(getattr(func, "__name__", ""))
    return name in ("__setitem__", "__set__") or name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))

"""The behaviour of a model's layers, learned by running the model once on tensors without memory.

The run tells what shares an input (one gather), which activations are added or multiplied (they must lie alike), and
which layers lead from one of them to another.  Nothing moves, and all ranks see the same.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ndtp.compute.traces import TransformedError, is_in_transform
from ndtp.models.kept_parameters import parameters_kept
from ndtp.models.made_up_inputs import guesses
from ndtp.models.observed_chains import Chains, Kinds
from ndtp.models.opened_attention import open_to_see
from ndtp.models.roles import features, is_linear
from ndtp.models.run_eagerly import compiled_parts_run_eagerly
from ndtp.models.state_beside import kept_beside, random_kept, silent
from ndtp.nn.parameters import computed_in
from ndtp.split.elementwise import NAMES, named
from ndtp.split.tensor import getters

TOGETHER = set(named(NAMES)) | {
    Tensor.expand,
    Tensor.unsqueeze,
    Tensor.expand_as,
    F.mse_loss,
    torch.cat,
    torch.stack,
    torch.concat,
}
PARTS = {torch.chunk, Tensor.chunk, torch.split, Tensor.split, torch.tensor_split, Tensor.tensor_split}
SHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten}
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum}
NORMS = {F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm}
# What makes another form of a parameter, whose last dim stays: its use is that of the parameter.
VIEWS = {Tensor.expand, Tensor.to, Tensor.float, Tensor.unsqueeze, Tensor.expand_as, Tensor.type_as, Tensor.contiguous}
PLAIN = {*getters("data", "T"), Tensor.size, Tensor.dim, Tensor.numel}
IGNORED = {*getters("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda", "layout", "grad_fn")}


TRANSFORMED = {F.linear, *PRODUCTS}


@dataclass
class Observation:
    """The facts seen in one run.

    Attributes:
        edges: for each layer that multiplies, the kinds of activations that it takes and gives.
        groups: layers that were called with one and the same tensor.
        sections: for each layer, where its features are taken apart: sizes of consecutive parts, or none.
        order: the layers as they were called first.
        chains: layers of one input and the layer that follows them, with functions of each element alone in between.
        heads: layers whose results, in another form, a loss is taken of, or are what the model gives.
        feeds: of parameters that are no layer's and go with activations element by element alone, what these are.
        twice: layers whose gradients the model's own code takes in such a way that they have gradients themselves.
    """

    edges: dict[str, tuple[int, int]] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    sections: dict[str, tuple[int, ...]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    feeds: dict[str, int] = field(default_factory=dict)
    twice: set[str] = field(default_factory=set)
    chains: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    heads: set[str] = field(default_factory=set)


class _Watch(TorchFunctionMode):
    """Follows activations from function to function."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = Kinds()
        self.kind_of: dict[int, int] = {}
        self.made_by: dict[int, tuple[str, ...]] = {}  # the layers whose features a tensor has, in their order
        self.cuts: dict[str, set[int]] = {}
        self.alive: list[Tensor] = []
        self.inside = 0  # of a layer that multiplies
        self.names: dict[int, str] = {}  # of parameters
        self.feeds: dict[str, list[int]] = {}
        self.read: set[str] = set()  # those that are read by other functions than element-wise ones
        self.chains = Chains()
        self.differentiated: list[str] = []  # the layers that ran since gradients are on
        self.twice: set[str] = set()

    def kind(self, x: Tensor) -> int:
        if id(x) not in self.kind_of:
            self.kind_of[id(x)] = self.kinds.new()
            self.alive.append(x)
        return self.kind_of[id(x)]

    def set_kind(self, x: Tensor, kind: int) -> None:
        self.kind_of[id(x)] = kind
        self.alive.append(x)

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if is_in_transform():
            if func in TRANSFORMED and any(isinstance(x, nn.Parameter) for x in args):
                raise TransformedError
            return func(*args, **kwargs)  # of what is whole then
        if func is torch.autograd.grad and kwargs.get("create_graph"):
            self.twice |= set(self.differentiated)
        result = func(*args, **kwargs)
        if func in IGNORED or self.inside:
            return result
        outs = [x for x in _tensors(result) if x.is_floating_point()]
        given = [x for x in _tensors([*args, *kwargs.values()]) if x.is_floating_point()]
        if outs and given:
            self._follow(func, args, kwargs, given, outs)
            self._parameters(func, given, outs[0])
            self.chains.follow(func, args, given, outs)
        return result

    def _parameters(self, func: Any, given: list[Tensor], out: Tensor) -> None:
        for x in given:
            name = self.names.get(id(x))
            if name is None or func in PLAIN:
                continue
            if (func in TOGETHER or func in NORMS) and out.dim() and x.dim() and x.shape[-1] == out.shape[-1]:
                self.feeds.setdefault(name, []).append(self.kind_of[id(out)])
                if func in VIEWS:
                    self.names[id(out)] = name
            else:
                self.read.add(name)

    def _follow(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], outs: list[Tensor]) -> None:
        if func in TOGETHER:
            width = outs[0].shape[-1] if outs[0].dim() else 1
            alike = [x for x in given if x.dim() and x.shape[-1] == width and width > 1] or given[:1]
            kind = self.kinds.join([self.kind(x) for x in alike])
        elif func in NORMS:
            kind = self.kind(given[0])
        elif func is F.scaled_dot_product_attention:
            kind = self.kinds.join([self.kind(x) for x in given[:3]])
        elif func in PRODUCTS and len(given) > 1:
            kind = self.kind(given[1])
        else:
            kind = self.kind(given[0])
        for out in outs:
            if id(out) not in self.kind_of:
                self.set_kind(out, kind)
        self._sections(func, args, kwargs, given[0], outs)

    def _sections(self, func: Any, args: Any, kwargs: Any, x: Tensor, outs: list[Tensor]) -> None:
        """Note where the features of a layer are taken apart."""
        layers = self.made_by.get(id(x))
        if layers is None or not x.dim():
            return
        width = x.shape[-1]
        if func in PARTS:
            at = 0
            if all(out.dim() == x.dim() and out.shape[:-1] == x.shape[:-1] for out in outs):
                for out in outs:
                    at += out.shape[-1]
                    self._cut(layers, at)
            return
        if func is Tensor.__getitem__:
            key = args[1][-1] if isinstance(args[1], tuple) and args[1] else None
            first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            if isinstance(key, slice) and (first is Ellipsis or len(args[1]) == x.dim()):
                start, stop, step = key.indices(width)
                if step == 1 and (start, stop) != (0, width):
                    self._cut(layers, start)
                    self._cut(layers, stop)
                    return
        for out in outs:
            if not out.dim():
                continue
            if out.shape[-1] == width and out.dim() > 1:
                self.made_by.setdefault(id(out), layers)
                self.alive.append(out)
            elif func in SHAPES and x.shape[:-1].numel() == _lead_of(out, width):
                parts = _tail_of(out, width)
                if len(parts) > 2 and parts[0] < parts[1]:  # (3, heads, features)
                    for count in range(1, parts[0]):
                        self._cut(layers, count * width // parts[0])

    def _cut(self, layers: tuple[str, ...], at: int) -> None:
        for layer in layers:
            self.cuts.setdefault(layer, set()).add(at)


def _tail_of(out: Tensor, width: int) -> list[int]:
    """The last dims that make `width` together."""
    parts: list[int] = []
    total = 1
    for size in reversed(out.shape):
        if total == width and parts:
            break
        parts.insert(0, size)
        total *= size
    return parts if total == width else []


def _lead_of(out: Tensor, width: int) -> int:
    parts = _tail_of(out, width)
    return out.shape[: out.dim() - len(parts)].numel() if parts else -1


def _lent(given: Any, mode: Any, device: torch.device | None) -> Any:
    """Return what a model is called with for a run beside the call, which must not write into it (a cache of keys).

    Args:
        mode: makes tensors without memory; other ones are copied.
        device: where tensors without memory go to, if all are on the CPU.
    """
    memo: dict[int, Any] = {}
    stays = device is None or any(x.device.type != "cpu" for x in _tensors(given))

    def lent(x: object) -> object:
        if isinstance(x, Tensor):
            if not isinstance(mode, FakeTensorMode):
                return x.detach().clone()
            with mode:
                return mode.from_tensor(x) if stays else mode.from_tensor(x).to(device)
        try:
            return copy.deepcopy(x, memo)
        except Exception:  # what cannot be copied is lent as it is
            return x

    return tree_map(lent, given)


def _tensors(x: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def observe(model: nn.Module, example: object = None) -> Observation | None:
    """Return the facts that a run of a model shows; None where no inputs are known with which it runs.

    Args:
        example: what the model is called with: a tensor, a tuple of positional ones, or a mapping of named ones.

    Raises:
        TransformedError: the model cannot be split, whatever it is called with.
    """
    given = [*_tensors(example), *model.parameters()]
    device = next((x.device for x in given if x.device.type not in ("cpu", "meta")), torch.device("cpu"))
    for args, kwargs in [_call_of(example)] if example is not None else guesses(model):
        for where in dict.fromkeys((device, torch.device("cpu"))):  # there, where some inputs have to be on the CPU
            try:
                return _observed(model, args, kwargs, where)
            except TransformedError:
                raise
            except Exception:  # whatever a model's code raises on such inputs: the next ones are tried
                continue
    return None


def _call_of(example: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


def observe_call(model: nn.Module, args: Any, kwargs: Any) -> Observation | None:
    """Return the facts that a call of a dense model shows, which then still is to be made.

    The run is on tensors without memory; where the code asks for numbers it computes, on a copy of all but parameters.
    """
    for is_fake in (True, False):
        try:
            return _observed(model, args, kwargs, None if is_fake else REAL)
        except TransformedError:
            raise
        except Exception:  # as above: if it is an error of the model's own, the call itself raises it
            continue
    return None


REAL = object()  # in the place of a device: with numbers


def _observed(model: nn.Module, args: Any, kwargs: Any, device: object) -> Observation:
    """Run a copy of a model, and watch; with gradients only where its code asks for some of its own.

    Args:
        device: of tensors without memory; None: the one that each has.  `REAL`: with the numbers that there are.
    """
    try:
        return _watched(model, args, kwargs, device, torch.no_grad())
    except RuntimeError as error:
        if "grad" not in str(error):
            raise
        return _watched(model, args, kwargs, device, torch.enable_grad())


def _watched(model: nn.Module, args: Any, kwargs: Any, device: Any, gradients: Any) -> Observation:
    mode: Any = nullcontext() if device is REAL else FakeTensorMode(allow_non_fake_inputs=True)
    devices = {p.device for p in model.parameters() if p.is_cuda} if device is REAL else set()
    with kept_beside(model), random_kept(devices), parameters_kept(model.parameters() if device is REAL else ()):
        memo: dict[int, Any] = {id(p): p for p in model.parameters()}
        memo[id(vars(model).get("ndtp_waiting"))] = None
        if device is not REAL:
            with mode:
                for p in model.parameters():
                    bare = torch.empty(p.shape, dtype=p.dtype, device=device or p.device)
                    memo[id(p)] = nn.Parameter(bare, p.requires_grad)
                for x in computed_in(model):
                    memo[id(x)] = torch.empty(x.shape, dtype=x.dtype, device=device or x.device)
        args, kwargs = _lent((args, dict(kwargs)), mode, None if device is REAL else device)
        for part in model.modules():  # hooks of a user's are called in the call itself, once
            memo |= {id(part._forward_hooks): OrderedDict(), id(part._forward_pre_hooks): OrderedDict()}
        shadow = copy.deepcopy(model, memo)
        compiled_parts_run_eagerly(shadow)
        open_to_see(shadow)
        found, watch = Observation(), _Watch()
        hooks = list(_hooked(shadow, watch, found))
        watch.names = {id(p): name for name, p in shadow.named_parameters(remove_duplicate=False)}
        with mode, watch, silent(), gradients:
            out = shadow(*args, **kwargs)
            watch.chains.end(out, shadow)
        for hook in hooks:
            hook.remove()
    found.chains, found.heads, found.twice = watch.chains.chains, watch.chains.heads, watch.twice
    found.edges = {name: (watch.kinds.find(a), watch.kinds.find(b)) for name, (a, b) in found.edges.items()}
    found.feeds = {
        name: watch.kinds.find(kinds[0])
        for name, kinds in watch.feeds.items()
        if name not in watch.read and len({watch.kinds.find(kind) for kind in kinds}) == 1
    }
    for name, points in watch.cuts.items():
        width = _width_of(shadow.get_submodule(name))
        points |= {0, width}
        at = sorted(points)
        found.sections[name] = tuple(b - a for a, b in pairwise(at))
    return found


def _width_of(module: nn.Module) -> int:
    return features(module)[1]


def _hooked(model: nn.Module, watch: _Watch, found: Observation) -> Iterator[Any]:
    inputs: dict[tuple[int, int], list[str]] = {}

    def before(name: str) -> Any:
        def hook(_: object, args: Any) -> None:
            watch.inside += 1

        return hook

    def after(name: str) -> Any:
        def hook(_: object, args: Any, out: Tensor) -> None:
            watch.inside -= 1
            if torch.is_grad_enabled():
                watch.differentiated.append(name)
            x = args[0]
            kind = watch.kinds.new()
            watch.set_kind(out, kind)
            watch.made_by[id(out)] = (name,)
            watch.chains.passed(name, x, out)
            if name not in found.edges:
                found.edges[name] = (watch.kind(x), kind)
                found.order.append(name)
                group = inputs.setdefault((id(x), x._version), [])
                if not group:
                    found.groups.append(group)
                group.append(name)
            else:  # called again: what it takes and gives lies as before
                watch.kinds.join([found.edges[name][0], watch.kind(x)])
                watch.kinds.join([found.edges[name][1], kind])
            watch.alive.append(x)

        return hook

    for name, module in model.named_modules():
        if is_linear(module, casts=True):
            yield module.register_forward_pre_hook(before(name))
            yield module.register_forward_hook(after(name))

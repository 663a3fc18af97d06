"""Is an attention module's code a function of single heads and sequences?  Found by a trial, never by its name.

On a grid that code runs on the heads and sequences of one rank, and must make of them what it makes of them among all.
So it runs here on random queries, keys and values, with all that a model calls it with: once on the whole, and on the
share of each rank.  Code that mixes heads (in pairs, in groups, by norms over all of them, by what a head's number is)
gives other numbers, or an error; such a module is left whole, with that as the reason.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.models.attention_inputs import BIASES, HIDDEN, PASSED, is_batched, kv_heads_of
from ndtp.models.between import CASTS, DROPOUTS
from ndtp.models.fused_order import heads_in_order
from ndtp.models.local_heads import take_heads
from ndtp.models.of_heads import Beside, beside
from ndtp.models.placeholder import Placeholder
from ndtp.models.rehearsal import SeenCall, bare, seeded, with_tensors
from ndtp.models.roles import AttentionRole

CLOSE = 1e-3  # relative: what other heads give is as large as a result
MOST = 16  # ranks' shares that are tried


class Mixes(Exception):
    """An error: a module's code is not a function of single heads and sequences."""


class IsHidden(Exception):
    """An argument that its code projects, by its name."""


class Unread(Placeholder):
    """Hidden states of a trial: to be projected, nothing else."""

    def used_by(self, func: TorchFunction, args: Arguments, kwargs: Keywords) -> object:
        if func in CASTS | DROPOUTS and isinstance(args[0], Unread):
            return args[0]
        back = next((x for x in args if isinstance(x, LedBack)), None)
        if back is not None:  # a residual
            return back
        name = str(getattr(func, "__name__", func)).strip("_")
        raise Mixes(f"its code computes {name} of its hidden states before it projects them")


class LedBack(Tensor):
    """The result of a trial's last projection, and what the code makes of it: hidden states, which are split."""


def unread(seen: Sequence[int]) -> Tensor:
    x = torch.empty(())
    x.__class__ = Unread
    x.seen = tuple(seen)  # type: ignore[attr-defined]
    return x


@dataclass(frozen=True)
class Share:
    """The share of one rank: its sequences, and its heads by number; `part` of `splits`."""

    role: AttentionRole
    rows: slice
    part: int
    splits: int

    @property
    def heads(self) -> list[int]:
        count = self.role.heads // self.splits
        return list(range(self.part * count, (self.part + 1) * count))

    @property
    def kv_heads(self) -> list[int]:
        return kv_heads_of(self.role.heads, self.role.kv_heads, self.part, self.splits)

    def of_heads(self, heads: Sequence[int]) -> Tensor:
        size = self.role.head_dim
        return torch.tensor([head * size + i for head in heads for i in range(size)])

    def features(self, kind: str) -> Tensor:
        """Return the features that this rank's code gets of a projection's result, in its order."""
        role = self.role
        if kind != "qkv":
            return self.of_heads(self.heads if kind == "q" else self.kv_heads)
        at = {head: place for place, head in enumerate(heads_in_order(role.order, role.heads, role.kv_heads) or ())}
        own = [*self.heads, *(role.heads + h for h in self.kv_heads)]
        own += [role.heads + role.kv_heads + h for h in self.kv_heads]
        local = heads_in_order(role.order, len(self.heads), len(self.kv_heads))
        if local is None:
            raise Mixes(f"its code takes q, k and v apart by {role.order}, which {len(self.heads)} heads do not have")
        return self.of_heads([at[own[head]] for head in local])

    def argument(self, name: str, x: Any, batch: int) -> Any:
        """Return an argument as `Core` cuts masks, positions and the like."""
        role = self.role
        if isinstance(x, Tensor):
            if name in BIASES and x.dim() == 3 and x.shape[0] in (role.heads, batch * role.heads):
                return self.argument("", x.unflatten(0, (-1, role.heads)), batch).flatten(0, 1)
            if is_batched(name, x, batch):
                x = x[self.rows]
            return x[:, self.heads] if x.dim() == 4 and x.shape[1] == role.heads else x
        if isinstance(x, (list, tuple)) and type(x) in (list, tuple):
            return type(x)(self.argument(name, each, batch) for each in x)
        if type(x) is dict:
            return {key: self.argument(key, each, batch) for key, each in x.items()}
        if hasattr(x, "__dict__") and "ache" in type(x).__name__:
            return with_tensors(copy.copy(x), lambda each: self.cached(each, batch))
        return x

    def cached(self, x: Tensor, batch: int) -> Tensor:
        """Keys and values of a cache: [sequences, heads, ..]."""
        if x.dim() != 4 or x.shape[0] != batch:
            return x
        if x.shape[1] == self.role.kv_heads:
            return x[self.rows][:, self.kv_heads]
        return x[self.rows][:, self.heads] if x.shape[1] == self.role.heads else x


@dataclass
class Trial:
    """One run of a module's code: random numbers for its projections, and what it hands to the last one."""

    role: AttentionRole
    share: Share | None
    drawn: dict[Any, Tensor]
    hidden: int
    given: list[Tensor] = field(default_factory=list)
    plain: dict[int, str] = field(default_factory=dict)  # arguments that are no hidden states, as far as is known

    def projected(self, kind: str, width: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
            if id(x) in self.plain:
                raise IsHidden(self.plain[id(x)])
            if not isinstance(x, Unread):
                raise Mixes("its code projects what are no hidden states")
            lead = self.whole_lead(x)
            key = (kind, *lead)
            if key not in self.drawn:
                self.drawn[key] = torch.randn(*lead, width)
            y = self.drawn[key]
            return y if self.share is None else y[self.share.rows][..., self.share.features(kind)]

        return forward

    def whole_lead(self, x: Any) -> tuple[int, ...]:
        lead: tuple[int, ...] = x.seen[:-1]
        return lead if self.share is None else (x.batch, *lead[1:])

    def led_back(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        self.given.append(x)
        return torch.zeros(*x.shape[:-1], self.hidden).as_subclass(LedBack)

    def normed(self, size: int) -> Callable[[Tensor], Tensor]:
        """Return the effect on a single head of a norm over all heads, whose sums move between ranks."""
        role, share = self.role, self.share
        gain = self.drawn.setdefault(("norm", size), torch.randn(size))
        local = gain
        if share is not None and size in (role.heads * role.head_dim, role.kv_heads * role.head_dim):
            local = gain[share.of_heads(share.heads if size == role.heads * role.head_dim else share.kv_heads)]
        return lambda x: x if isinstance(x, LedBack) else x * local


def why_not(role: AttentionRole, module: nn.Module, calls: Sequence[SeenCall], hidden: int, splits: int) -> str | None:
    """Return the reason why the code of an attention module cannot run on a share of its heads and sequences, if
    any.
    """
    tried = Tried(role, module, hidden, [*_others(role, module, hidden)])
    for training in (False, True):
        for call in calls or [_usual_call(role, module, hidden)]:
            try:
                _compare(tried, call, training, splits)
            except Mixes as reason:
                return str(reason)
    return None


@dataclass
class Tried:
    """A module on trial, and what it has beside projections."""

    role: AttentionRole
    module: nn.Module
    hidden: int
    others: list[tuple[str, Beside]]


def _compare(tried: Tried, call: SeenCall, training: bool, splits: int) -> None:
    role, drawn = tried.role, {}  # type: AttentionRole, dict[Any, Any]
    tried.module.train(training)
    parts = min(splits, MOST)
    chosen = sorted({part * splits // parts for part in range(parts)})
    halves = [slice(0, 1), slice(1, call.batch)]
    shares = [Share(role, halves[i % 2], part, splits) for i, part in enumerate(chosen if splits > 1 else (0, 0))]
    whole, given = _tried(tried, call, None, drawn, "could not be tried")
    for share in shares:
        what = f"{len(share.heads)} of its {role.heads} heads" if splits > 1 else "some of its sequences"
        result, mine = _tried(tried, call, share, drawn, f"does not run on {what}")
        _same(given, mine, lambda x, s=share: x[s.rows][..., s.of_heads(s.heads)], what)  # type: ignore[misc]
        for key, x in whole.items():
            if key not in result:
                raise Mixes(f"its code gives other results on {what}")
            shape = result[key].shape
            _same([x], [result[key]], lambda x, s=share, to=shape: _taken(x, to, s), what)  # type: ignore[misc]


def _tried(
    tried: Tried, call: SeenCall, share: Share | None, drawn: dict[Any, Any], what: str
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Run the code; an error of its own is one that says what it cannot do."""
    try:
        return _run(tried, call, share, drawn)
    except Mixes:
        raise
    except Exception as error:
        raise Mixes(f"its code {what}: {type(error).__name__}: {_line(error)}") from error


def _same(whole: Sequence[Tensor], share: Sequence[Tensor], take: Callable[[Tensor], Tensor | None], what: str) -> None:
    if len(whole) != len(share):
        raise Mixes(f"its code gives other results on {what}")
    for x, mine in zip(whole, share, strict=True):
        expected = take(x)
        if expected is None or expected.shape != mine.shape:
            raise Mixes(f"its code gives {tuple(mine.shape)} on {what}, which is no part of {tuple(x.shape)}")
        both = (expected.float(), mine.float())
        if both[0].numel() and not torch.allclose(*both, rtol=CLOSE, atol=CLOSE * _scale(both[0]), equal_nan=True):
            raise Mixes(f"its code mixes heads or sequences: {what} give other numbers by themselves than among all")


def _scale(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return max(float(finite.abs().max()), 1e-6) if finite.numel() else 1.0


def _taken(x: Tensor, shape: torch.Size, share: Share) -> Tensor | None:
    """Return a share's part of another result: sequences in front, and heads in the first dim that is smaller."""
    if x.dim() != len(shape):
        return None
    if x.dim() and x.shape[0] != shape[0]:
        x = x[share.rows]
    for dim in range(1, x.dim()):
        if x.shape[dim] != shape[dim]:
            heads = share.heads if x.shape[dim] == share.role.heads else share.kv_heads
            if x.shape[dim] == share.role.heads * share.role.head_dim:
                return x.index_select(dim, share.of_heads(share.heads))
            return x.index_select(dim, torch.tensor(heads)) if x.shape[dim] > max(heads) else None
    return x


def _run(
    tried: Tried, call: SeenCall, share: Share | None, drawn: dict[Any, Any]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Run the code; return its results besides hidden states, by place, and what it hands to the last projection."""
    role, hidden = tried.role, tried.hidden
    trial, code = Trial(role, share, drawn, hidden), copy.deepcopy(tried.module)
    local = role.heads if share is None else len(share.heads)
    _stub(code, tried, trial)
    take_heads(code, role, local, role.kv_heads if share is None else len(share.kv_heads))
    bound = inspect.signature(code.forward).bind(*bare(call.args), **bare(call.kwargs))
    names = list(bound.arguments)
    first = next((name for name in names if isinstance(bound.arguments[name], Tensor)), "")
    projected: set[str] = drawn.setdefault("hidden", {first, *HIDDEN})
    tokens: list[int] = []
    seen = local * role.head_dim if hidden == role.heads * role.head_dim else hidden

    def entered(name: str, x: Any) -> Any:
        if isinstance(x, Tensor) and name in projected and x.is_floating_point():
            if x.dim() != 3:
                raise Mixes(f"it takes hidden states {tuple(x.shape)}, which are not [batch, sequence, features]")
            rows = x if share is None else x[share.rows]
            made: Any = unread((*rows.shape[:-1], seen if x.shape[-1] == hidden else x.shape[-1]))
            made.batch = x.shape[0]
            tokens.append(rows.shape[:-1].numel())
            return made
        if name in PASSED:
            return x if share is None or not isinstance(x, Tensor) else x[share.rows]
        if type(x) is dict:
            return {key: entered(key, each) for key, each in x.items()}
        if isinstance(x, Tensor):
            trial.plain[id(x)] = name
        return x if share is None else share.argument(name, x, call.batch)

    bound.arguments.update({name: entered(name, bound.arguments[name]) for name in names})
    try:
        with seeded(1):
            result = code(*bound.args, **bound.kwargs)
    except IsHidden as found:
        projected.add(str(found))
        return _run(tried, call, share, drawn)
    if role.inside and not isinstance(result, (tuple, list)):
        rest: Sequence[object] = ()
    else:
        context, *rest = result if isinstance(result, (tuple, list)) else (result,)
        trial.given += [] if role.inside else [context]
    if not trial.given:
        raise Mixes("its code hands nothing to its last projection")
    for x in trial.given:
        if tokens and x.shape[:-1].numel() != tokens[0]:
            raise Mixes(f"its code hands {tuple(x.shape[:-1])} tokens to its last projection, and takes {tokens[0]}")
    flat, _ = tree_flatten_with_path(tuple(rest))
    return {str(key): x for key, x in flat if isinstance(x, Tensor)}, trial.given


def _others(role: AttentionRole, module: nn.Module, hidden: int) -> Iterator[tuple[str, Beside]]:
    around = {_own(role, name) for name in (*role.inputs.values(), role.output)}
    for name, child in module.named_modules():
        if child._parameters and not any(name == each or name.startswith(f"{each}.") for each in around):
            full = f"{role.name}.{name}" if name and role.name else name or role.name
            found = beside(role, full, child, hidden)
            assert isinstance(found, Beside)  # `of_heads.reason_against` has refused others
            yield name, found


def _own(role: AttentionRole, name: str) -> str:
    """The name of a projection in its module; of the wrapper, where it has one."""
    return name.removeprefix(role.name).removeprefix(".").removesuffix(".base_layer")


def _stub(code: nn.Module, tried: Tried, trial: Trial) -> None:
    """Projections and norms over all heads that answer as the trial says, and of parameters by heads a share's own."""
    role, share = tried.role, trial.share
    sizes = {"q": role.heads * role.head_dim, "qkv": (role.heads + 2 * role.kv_heads) * role.head_dim}
    for kind, name in role.inputs.items():
        layer = code.get_submodule(_own(role, name))
        layer.forward = trial.projected(kind, sizes.get(kind, role.kv_heads * role.head_dim))
    if role.inside:
        last = code.get_submodule(_own(role, role.output))
        last.forward = trial.led_back
    for name, found in tried.others:
        child: Any = code.get_submodule(name)
        if found.norm is not None:
            child.forward = trial.normed(found.features)
        for key, (dim, count) in found.by_heads.items() if share is not None else ():
            heads = torch.tensor(share.heads if count == role.heads else share.kv_heads)  # type: ignore[union-attr]
            child._parameters[key] = nn.Parameter(child._parameters[key].index_select(dim, heads), False)


def _usual_call(role: AttentionRole, module: nn.Module, hidden: int) -> SeenCall:
    """Return the call of a module that no trial of its model reached: the call of others of its kind."""
    takes = inspect.signature(type(module).forward).parameters
    given: dict[str, object] = {}
    batch, length = 3 if role.heads == 2 else 2, 6
    for i, (name, parameter) in enumerate(list(takes.items())[1:]):
        if i == 0 or name in HIDDEN:
            given[name] = torch.randn(batch, length, hidden)
        elif name == "position_embeddings":
            angles = torch.randn(batch, length, role.head_dim)
            given[name] = (angles.cos(), angles.sin())
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            given[name] = None
    return SeenCall((), given, batch)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0][:120]

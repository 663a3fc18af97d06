"""A stock model run once on a few tokens with made-up products: what its attention modules are called with.

Masks, positions, rotary tables, biases of scores and caches are those that the model's own code makes.  Large weights
are neither copied nor read: what is computed of them is random numbers of the right shape.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.models.between import FACTS, SIZES
from ndtp.models.part_settings import PartSettings
from ndtp.models.roles import features, is_linear, vocabulary_of
from ndtp.models.state_beside import random_kept
from ndtp.nn.parameters import computed_in

BATCH, LENGTH = (2, 3, 5), (5, 6, 7, 11)  # the first that is no number of heads or the like
FEW = 512  # numbers of a parameter that is copied as it is in size; of larger ones only the shape is
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class SeenCall:
    """One call of an attention module in a model: its arguments, as they were before it.

    Attributes:
        batch: how many sequences there were.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int


@dataclass
class Rehearsal:
    """The calls that a rehearsal saw, by the names of modules, and the modules whose heads others read."""

    calls: dict[str, list[SeenCall]] = field(default_factory=dict)
    leaks: dict[str, str] = field(default_factory=dict)


class Invented(TorchFunctionMode):
    """A mode in which functions of tensors without memory give random results."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func in SIZES or func in FACTS or not any(x.is_meta for x in given) or all(x.is_meta for x in given):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            bare = lambda x: x.as_subclass(Tensor).to("meta") if isinstance(x, Tensor) else x  # noqa: E731
            return tree_map(_made_up, func(*tree_map(bare, args), **tree_map(bare, kwargs)))


def _made_up(x: Tensor) -> Any:
    if not isinstance(x, Tensor) or not x.is_meta:
        return x
    return torch.randn(x.shape).to(x.dtype) if x.is_floating_point() else torch.zeros(x.shape, dtype=x.dtype)


class MarkedHeads(Tensor):
    """Queries, keys or values, and what is computed of them; it knows of which attention module."""

    owner: str
    watch: HeadsWatch

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        mine = [x for x in tree_leaves((args, kwargs)) if isinstance(x, MarkedHeads)]
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in SIZES or func in FACTS or not mine:
            return result
        owner, watch = mine[0].owner, mine[0].watch
        for x in mine:
            watch.read(x.owner)
        for x in tree_leaves(result):
            if isinstance(x, MarkedHeads):
                x.owner, x.watch = owner, watch
        return result


class HeadsWatch:
    """A mode that notes which attention module runs, and which code reads what belongs to another."""

    def __init__(self, seen: Rehearsal) -> None:
        self.seen, self.running = seen, [""]
        self.copied: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.settings = PartSettings()
        self.known: dict[Any, SeenCall] = {}  # calls that are alike, whichever module of a kind was called so

    def read(self, owner: str) -> None:
        if self.running[-1] != owner:
            self.seen.leaks.setdefault(owner, self.running[-1] or "code outside of it")

    def mark(self, x: object, owner: str) -> object:
        if not isinstance(x, Tensor):
            return x
        marked = x.as_subclass(MarkedHeads)
        marked.owner, marked.watch = owner, self
        return marked


def bare(x: Any, copied: dict[tuple[int, int], tuple[Tensor, Tensor]] | None = None) -> Any:
    """A copy of an argument or result: plain tensors, and caches with such.

    Args:
        copied: tensors and their copies, by what and which version they are: each is copied once.
    """
    if isinstance(x, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            key = (id(x), x._version)
            if copied is None or key not in copied:
                made = x.detach().as_subclass(Tensor).clone()
                if copied is None:
                    return made
                copied[key] = (x, made)
            return copied[key][1]
    if isinstance(x, (list, tuple)) and type(x) in (list, tuple):
        return type(x)(bare(each, copied) for each in x)
    if type(x) is dict:
        return {key: bare(each, copied) for key, each in x.items()}
    if x is None or isinstance(x, (bool, int, float, str, torch.dtype, torch.device)):
        return x
    return with_tensors(copy.copy(x), lambda each: bare(each, copied)) if hasattr(x, "__dict__") else x


def with_tensors(x: object, change: Callable[[Any], object], depth: int = 0) -> Any:
    """A cache, all of whose tensors are what `change` makes of them; its objects are copies."""
    for key, value in list(vars(x).items()):
        if isinstance(value, Tensor):
            vars(x)[key] = change(value)
        elif isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            vars(x)[key] = type(value)(_changed(each, change, depth) for each in value)
        elif isinstance(value, dict):
            vars(x)[key] = {name: _changed(each, change, depth) for name, each in value.items()}
        elif "ache" in type(value).__name__ and depth < 3:
            vars(x)[key] = with_tensors(copy.copy(value), change, depth + 1)
    return x


def _changed(x: object, change: Callable[[Any], object], depth: int) -> object:
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, (list, tuple)) and type(x) in (list, tuple):
        return type(x)(_changed(each, change, depth) for each in x)
    is_object = hasattr(x, "__dict__") and not isinstance(x, (type, nn.Module)) and not callable(x)
    return with_tensors(copy.copy(x), change, depth + 1) if is_object and depth < 3 else x


def forms(given: object) -> str:
    """Return the forms of a module's arguments, without numbers and a cache's contents; masks are counted."""
    flat, _ = tree_flatten_with_path(given, is_leaf=lambda x: "ache" in type(x).__name__)
    is_mask = lambda x: x.dtype == torch.bool or not x.is_floating_point()  # noqa: E731
    return str([(str(key), (x.shape, int(x.sum()) if is_mask(x) and not x.is_meta else 0) if isinstance(x, Tensor)
                 else type(x)) for key, x in flat])  # fmt: skip


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Draw the same random numbers each time, on the CPU, where torch makes what code says no device for.

    The program's own numbers go on afterwards as if nothing had been drawn.
    """
    with random_kept(), torch.no_grad(), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed all devices
        random.seed(seed)
        np.random.seed(seed)
        yield


def skeleton(module: nn.Module, unread: Sequence[str] = ()) -> Any:
    """A copy on the CPU in fp32, without hooks and dropout; large parameters have a shape and no numbers.

    Args:
        unread: names of modules whose numbers nobody reads.
    """
    memo: dict[int, Any] = {}
    none = {id(x) for name in unread for x in module.get_submodule(name).parameters()}
    for x in module.parameters():
        is_few = (x.numel() <= FEW or x.dim() < 2) and id(x) not in none
        made = torch.randn(x.shape) if is_few else torch.empty(x.shape, device="meta")
        memo[id(x)] = nn.Parameter(made if x.is_floating_point() else torch.zeros(x.shape, dtype=x.dtype), False)
    memo |= {id(x): torch.randn(x.shape) for x in computed_in(module)}
    for buffer in module.buffers():
        known = _made_up(buffer) if buffer.is_meta else buffer.detach().cpu()
        memo[id(buffer)] = known.float() if known.is_floating_point() else known
    for part in module.modules():  # handles of hooks cannot be copied once their hooks have gone
        for value in vars(part).values():
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, RemovableHandle):
                    memo[id(each)] = each
    copied = copy.deepcopy(module, memo)
    for each in copied.modules():
        for name in HOOKS:
            getattr(each, name).clear()
        without_dropout(each)
    return copied


def without_dropout(module: nn.Module) -> None:
    """Turn off the dropout of a module and of its config, whatever that is, and choose kernels that a CPU has."""
    config = module.__dict__.get("config")
    kernels = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    for owner in (vars(module), kernels):
        for name, value in list(owner.items()):
            if type(value) is float and ("drop" in str(name) or (name == "p" and "Dropout" in type(module).__name__)):
                owner[name] = 0.0
    for name in ("_attn_implementation_internal", "_experts_implementation_internal"):
        if kernels.get(name) not in (None, "eager", "sdpa"):
            kernels[name] = "eager"


def rehearse(
    model: Any,
    names: Sequence[str],
    projections: Mapping[str, Sequence[str]],
    avoid: set[int],
    long: Callable[[int, int], int] = lambda batch, length: 0,
) -> Rehearsal:
    """Call a model, and those in it that have not been reached then, each twice: on a few tokens, and with its cache.

    Args:
        names: of attention modules.
        projections: of each those of queries, keys and values.
        avoid: sizes that no batch and no length should have.
        long: gives for a batch and a length the number of tokens of a third call, or 0 for none.
    """
    seen = Rehearsal()
    batch = next(size for size in BATCH if size not in avoid)
    length = next(size for size in LENGTH if size not in avoid)
    with seeded(), Invented():
        copied = skeleton(model, [each for name in names for each in projections[name]]).eval()
        modules = dict(copied.named_modules())
        for part in modules.values():
            if any(p is not None and p.dim() == 3 for p in part._parameters.values()) and not list(part.children())[1:]:
                part.forward = lambda x, *_, **__: torch.randn(
                    x.shape
                )  # experts: by which numbers tokens go is no matter
            head = vocabulary_of(part, "get_output_embeddings")
            if is_linear(head, casts=True):  # logits are the largest that there is, and nobody reads them
                head.forward = _without_numbers(features(head)[1])
        watch = HeadsWatch(seen)
        for name in names:
            _watch(modules, name, projections[name], watch, batch)
        for prefix, part in modules.items():
            waiting = [name for name in names if name not in seen.calls and name.startswith(prefix)]
            if not waiting or not any(kind.__name__ == "PreTrainedModel" for kind in type(part).__mro__):
                continue
            with contextlib.suppress(Exception):  # what is not reached is tried otherwise
                out = part(**few_inputs(part, batch, length))
                cache = out.get("past_key_values") if hasattr(out, "get") else None
                if cache is not None:
                    again = {**few_inputs(part, batch, 1), "past_key_values": cache}
                    if "encoder_outputs" in inspect.signature(part.forward).parameters:
                        again["encoder_outputs"] = (out.get("encoder_last_hidden_state"),)
                    part(**again)
            watch.running[1:] = []
        tokens = long(batch, length)
        if tokens:
            with contextlib.suppress(Exception):  # a model that takes no more tokens
                copied(**few_inputs(copied, batch, next(n for n in range(tokens, tokens + 99) if n not in avoid)))
            watch.running[1:] = []
        watch.copied.clear()
    return seen


def _without_numbers(size: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.empty(*x.shape[:-1], size, device="meta")


def _watch(modules: Mapping[str, Any], name: str, projections: Sequence[str], watch: HeadsWatch, batch: int) -> None:
    kind = (type(modules[name]), str(watch.settings.of(modules[name], name)))

    def enters(_: object, args: Any, kwargs: Any) -> None:
        watch.running.append(name)
        calls = watch.seen.calls.setdefault(name, [])
        if len(calls) < 4:
            form = (kind, len(calls), forms((args, kwargs)))
            if form not in watch.known:
                watch.known[form] = SeenCall(bare(args, watch.copied), bare(kwargs, watch.copied), batch)
            calls.append(watch.known[form])

    def leaves(_: object, __: object, result: object) -> Any:
        watch.running.pop()
        return tree_map(lambda x: x.as_subclass(Tensor) if isinstance(x, MarkedHeads) else x, result)

    modules[name].register_forward_pre_hook(enters, with_kwargs=True)
    modules[name].register_forward_hook(leaves)
    for each in projections:
        modules[each].register_forward_hook(lambda _, __, result: watch.mark(result, name))


def few_inputs(model: Any, batch: int, length: int) -> dict[str, Any]:
    """Return few inputs of a stock model, by what its class takes: ids, an image or a sound."""
    takes, config = inspect.signature(model.forward).parameters, model.config
    main = getattr(model, "main_input_name", "input_ids")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids = torch.randint(3, max(min(getattr(text, "vocab_size", 0) or 0, 1000), 5), (batch, length))
    given: dict[str, Any]
    if main == "pixel_values":
        size = getattr(config, "image_size", 32)
        sides = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        given = {main: torch.randn(batch, getattr(config, "num_channels", 3), *sides)}
    elif main == "input_features":
        mels: Any = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 8)
        given = {main: torch.randn(batch, mels, 2 * getattr(config, "max_source_positions", 16))}
    elif main == "input_values":
        given = {main: torch.randn(batch, 1000)}
    else:
        given = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        given["decoder_input_ids"] = ids
    if "use_cache" in takes:
        given["use_cache"] = True
    return given

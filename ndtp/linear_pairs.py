"""Find `Linear -> activation -> Linear` pairs in a model, by tracing, or by the names that its owner gives."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

from ndtp.errors import LayoutError

ELEMENTWISE_MODULES = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.Mish, nn.ReLU,
    nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh,
)  # fmt: skip
ELEMENTWISE_FUNCTIONS = {
    F.celu, F.elu, F.gelu, F.hardsigmoid, F.hardswish, F.leaky_relu, F.mish, F.relu, F.relu6, F.selu, F.silu,
    F.sigmoid, F.softplus, F.tanh, torch.relu, torch.sigmoid, torch.square, torch.tanh,
}  # fmt: skip
ELEMENTWISE_METHODS = {"relu", "sigmoid", "square", "tanh", "contiguous"}
HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
# These take a second operand, which must be a number.
WITH_NUMBER = {operator.mul, operator.pow, operator.truediv, torch.mul, torch.pow, torch.div}


@dataclass(frozen=True)
class Pair:
    """Names of the two layers, and of the dropouts between them."""

    up: str
    down: str
    dropouts: tuple[str, ...] = ()


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def find_pairs(model: nn.Module) -> tuple[list[Pair], dict[str, str]]:
    """The pairs of a model, and for each other `nn.Linear` the reason why it is in none."""
    linears = {name for name, module in model.named_modules(remove_duplicate=False) if type(module) is nn.Linear}
    reasons = dict.fromkeys(sorted(linears), "no nn.Linear follows it through element-wise operations alone")
    unfit = _unfit(model, linears)
    reasons |= unfit
    pairs: list[Pair] = []
    taken: set[str] = set()
    for prefix, parent in model.named_modules():
        if type(parent) is nn.Linear or not any(type(child) is nn.Linear for child in parent.modules()):
            continue
        try:
            graph = _Tracer().trace(parent)
        except Exception as error:  # a forward may do anything under tracing, and raise anything
            for name, child in parent.named_children():
                if type(child) is nn.Linear:
                    reasons[_join(prefix, name)] = (
                        f"the forward of {prefix or 'the model'} cannot be traced ({type(error).__name__}); "
                        "name the pair in the plan"
                    )
            continue
        calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        for node in graph.nodes:
            name = _join(prefix, str(node.target))
            if node.op != "call_module" or name not in linears or name in taken or name in unfit:
                continue
            if calls[node.target] > 1:
                reasons[name] = "it is used more than once"
                continue
            pair, reason = _follow(node, parent, prefix, calls)
            if pair is None:
                reasons[name] = reason or reasons[name]
            elif pair.down in unfit:
                reasons[name] = f"{pair.down}, which follows, cannot be replaced: {unfit[pair.down]}"
            elif pair.down not in taken:
                pairs.append(pair)
                taken |= {pair.up, pair.down}
    return pairs, {name: reason for name, reason in reasons.items() if name not in taken}


def _follow(node: Any, parent: nn.Module, prefix: str, calls: Mapping[Any, int]) -> tuple[Pair | None, str | None]:
    """Walk from a Linear through what acts element by element to the next Linear."""
    up = _join(prefix, str(node.target))
    dropouts: list[str] = []
    while True:
        if len(node.users) != 1:
            return None, "its result is used more than once" if node.users else None
        node = next(iter(node.users))
        if node.op == "call_module":
            module = parent.get_submodule(node.target)
            if type(module) is nn.Linear:
                if calls[node.target] > 1:
                    return None, f"{_join(prefix, node.target)}, which follows, is used more than once"
                return Pair(up, _join(prefix, node.target), tuple(dropouts)), None
            if type(module) is nn.Dropout:
                if calls[node.target] > 1:
                    return None, f"the dropout {_join(prefix, node.target)} between the pair is used elsewhere too"
                dropouts.append(_join(prefix, node.target))
            elif not isinstance(module, ELEMENTWISE_MODULES):
                return None, f"{type(module).__name__} ({_join(prefix, node.target)}) follows it"
        elif node.op == "output":
            return None, None
        elif not _is_elementwise(node):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            return None, f"{name} follows it, which is not known to act element by element"


def _is_elementwise(node: Any) -> bool:
    if node.op == "call_method":
        return node.target in ELEMENTWISE_METHODS
    # One tensor goes in, by position or by name, so any other operand is a number.
    known = node.target in ELEMENTWISE_FUNCTIONS or node.target in WITH_NUMBER
    return node.op == "call_function" and known and len(node.all_input_nodes) == 1


def _unfit(model: nn.Module, linears: set[str]) -> dict[str, str]:
    """Layers that cannot be swapped alone: for a parameter that another one shares, or hooks of the user's own."""
    hooked = {
        name
        for name in sorted(linears)
        for module in [model.get_submodule(name)]
        if any(getattr(module, f"_{kind}") for kind in HOOKS)
    }
    named = list(model.named_parameters(remove_duplicate=False))
    counts = Counter(id(parameter) for _, parameter in named)
    owners = {name.rpartition(".")[0] for name, parameter in named if counts[id(parameter)] > 1}
    return {
        **dict.fromkeys(sorted(hooked), "it has hooks, which a new layer would lose"),
        **dict.fromkeys(sorted(owners & linears), "it shares a parameter with another layer"),
    }


def pairs_by_name(model: nn.Module, plan: Mapping[str, str]) -> list[Pair]:
    """Pairs from `{"encoder.*.fc1": "up", "encoder.*.fc2": "down"}`: the n-th "up" goes with the n-th "down".

    Raises:
        LayoutError: a pattern that matches no `nn.Linear`, another word than "up" and "down", or counts that differ.
    """
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    found: dict[str, list[str]] = {"up": [], "down": []}
    for pattern, position in plan.items():
        matches = [name for name in linears if fnmatchcase(name, pattern)]
        if position not in found or not matches:
            raise LayoutError(
                f"parallelize: {{{pattern!r}: {position!r}}} matches {len(matches)} layers; give a name or pattern of "
                f"an nn.Linear and 'up' or 'down'\n  the model has: {', '.join(linears) or 'no nn.Linear'}"
            )
        found[position] += matches
    refuse_unfit(model, [name for matches in found.values() for name in matches])
    ups, downs = ([name for name in linears if name in found[position]] for position in ("up", "down"))
    if len(ups) != len(downs) or set(ups) & set(downs):
        raise LayoutError(f"parallelize: up names {ups} and down names {downs}; every up needs a down of its own")
    for up, down in zip(ups, downs, strict=True):
        inner = model.get_submodule(up).out_features, model.get_submodule(down).in_features
        if inner[0] != inner[1]:
            raise LayoutError(f"parallelize: {up} gives {inner[0]} features, {down}, paired with it, takes {inner[1]}")
    return [Pair(up, down) for up, down in zip(ups, downs, strict=True)]


def refuse_unfit(model: nn.Module, names: Sequence[str]) -> None:
    """Layers that were asked for by name, and cannot be swapped.

    Raises:
        LayoutError: names the first of them, and why.
    """
    for name, reason in _unfit(model, set(names)).items():
        raise LayoutError(f"parallelize: {name} cannot be replaced: {reason}")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name

"""Find `Linear -> activation -> Linear` pairs in a model, by tracing, or by the names that its owner gives.

A gated pair has two Linears in the place of the first: `down(act(gate(x)) * up(x))`.
"""

from __future__ import annotations

import copy
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
from ndtp.models.kept_random import random_kept
from ndtp.nn.hooks import OF_A_MODULE
from ndtp.nn.parameters import computed_in

ELEMENTWISE_MODULES = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.Mish, nn.ReLU,
    nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh,
)  # fmt: skip
ELEMENTWISE_FUNCTIONS = {
    F.celu, F.elu, F.gelu, F.hardsigmoid, F.hardswish, F.leaky_relu, F.mish, F.relu, F.relu6, F.selu, F.silu,
    F.sigmoid, F.softplus, F.tanh, torch.relu, torch.sigmoid, torch.square, torch.tanh,
}  # fmt: skip
ELEMENTWISE_METHODS = {"relu", "sigmoid", "square", "tanh", "contiguous"}
# These take a second operand, which must be a number.
WITH_NUMBER = {operator.mul, operator.pow, operator.truediv, torch.mul, torch.pow, torch.div}


@dataclass(frozen=True)
class Pair:
    """Names of the two layers, and of the layer that gates the first."""

    up: str
    down: str
    gate: str | None = None

    @property
    def ups(self) -> tuple[str, ...]:
        """The layers that the input of the pair enters."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


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
    try:  # what its code notes of a call, in buffers or anywhere, it notes in the copy
        traced = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *computed_in(model))})
    except Exception:  # a model may hold anything; then what it notes in itself is taken back
        traced = model
    for prefix, parent in traced.named_modules():
        if type(parent) is nn.Linear or not any(type(child) is nn.Linear for child in parent.modules()):
            continue
        before = dict(vars(parent))
        try:
            with random_kept():
                graph = _Tracer().trace(parent)
        except Exception as error:  # a forward may do anything under tracing, and raise anything
            for name, child in parent.named_children():
                if type(child) is nn.Linear:
                    reasons[_join(prefix, name)] = (
                        f"the forward of {prefix or 'the model'} cannot be traced ({type(error).__name__}); "
                        "name the pair in the plan"
                    )
            continue
        finally:
            for key in vars(parent).keys() - before:
                del vars(parent)[key]
            vars(parent).update(before)
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
            elif bad := [other for other in (*pair.ups, pair.down) if other in unfit]:
                reasons[name] = f"{bad[0]}, which belongs to it, cannot be replaced: {unfit[bad[0]]}"
            elif pair.down not in taken:
                pairs.append(pair)
                taken |= {*pair.ups, pair.down}
    return pairs, {name: reason for name, reason in reasons.items() if name not in taken}


def _follow(node: Any, parent: nn.Module, prefix: str, calls: Mapping[Any, int]) -> tuple[Pair | None, str | None]:
    """Walk from a Linear through what acts element by element, and a gate at most, to the next Linear."""
    first = node
    ups: tuple[str, ...] = (_join(prefix, str(node.target)),)
    while True:
        if len(node.users) != 1:
            return None, "its result is used more than once" if node.users else None
        before, node = node, next(iter(node.users))
        if node.op == "call_module":
            module = parent.get_submodule(node.target)
            if type(module) is nn.Linear:
                if calls[node.target] > 1:
                    return None, f"{_join(prefix, node.target)}, which follows, is used more than once"
                gate = ups[0] if len(ups) == 2 else None
                return Pair(ups[-1], _join(prefix, node.target), gate), None
            if type(module) is not nn.Dropout and not isinstance(module, ELEMENTWISE_MODULES):
                return None, f"{type(module).__name__} ({_join(prefix, node.target)}) follows it"
        elif node.op == "output":
            return None, None
        elif _is_product(node) and len(ups) == 1:
            other = _walk_back(next(each for each in node.all_input_nodes if each is not before), parent)
            if other is None or other.args != first.args or calls[other.target] > 1:
                return None, "mul follows it, whose other factor does not come from an nn.Linear of the same input"
            both = (first, other) if before is not first else (other, first)  # the gate is activated
            ups = tuple(_join(prefix, str(each.target)) for each in both)
        elif not _is_elementwise(node):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            return None, f"{name} follows it, which is not known to act element by element"


def _is_elementwise(node: Any) -> bool:
    if node.op == "call_method":
        return node.target in ELEMENTWISE_METHODS
    # One tensor goes in, by position or by name, so any other operand is a number.
    known = node.target in ELEMENTWISE_FUNCTIONS or node.target in WITH_NUMBER
    return node.op == "call_function" and known and len(node.all_input_nodes) == 1


def _is_product(node: Any) -> bool:
    """Return whether a node multiplies two tensors element by element."""
    is_mul = node.target in (operator.mul, torch.mul) if node.op == "call_function" else node.target == "mul"
    return is_mul and node.op in ("call_function", "call_method") and len(node.all_input_nodes) == 2


def _walk_back(node: Any, parent: nn.Module) -> Any:
    """The Linear from which operations that act element by element lead here and nowhere else."""
    while len(node.users) == 1:
        if node.op == "call_module":
            module = parent.get_submodule(node.target)
            if type(module) is nn.Linear:
                return node
            if not isinstance(module, ELEMENTWISE_MODULES):
                return None
        elif not _is_elementwise(node):
            return None
        node = node.all_input_nodes[0]
    return None


def _unfit(model: nn.Module, linears: set[str]) -> dict[str, str]:
    """Layers that cannot be swapped alone: for a parameter that another one shares, or hooks of the user's own."""
    hooked = {
        name
        for name in sorted(linears)
        for module in [model.get_submodule(name)]
        if any(getattr(module, kind) for kind in OF_A_MODULE) or "forward" in module.__dict__
    }
    named = list(model.named_parameters(remove_duplicate=False))
    counts = Counter(id(parameter) for _, parameter in named)
    owners = {name.rpartition(".")[0] for name, parameter in named if counts[id(parameter)] > 1}
    return {
        **dict.fromkeys(sorted(hooked), "it has hooks or a forward of its own, which a new layer would lose"),
        **dict.fromkeys(sorted(owners & linears), "it shares a parameter with another layer"),
    }


def pairs_by_name(model: nn.Module, plan: Mapping[str, str]) -> list[Pair]:
    """Pairs from `{"encoder.*.fc1": "up", "encoder.*.fc2": "down"}`: the n-th "up" goes with the n-th "down".

    Where there are "gate"s, the n-th goes with both.

    Raises:
        LayoutError: a pattern that matches no `nn.Linear`, another word than "gate", "up" and "down", or counts that
            differ.
    """
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    found: dict[str, list[str]] = {"gate": [], "up": [], "down": []}
    for pattern, position in plan.items():
        matches = [name for name in linears if fnmatchcase(name, pattern)]
        if position not in found or not matches:
            raise LayoutError(
                f"parallelize: {{{pattern!r}: {position!r}}} matches {len(matches)} layers; give a name or pattern of "
                f"an nn.Linear and 'gate', 'up' or 'down'\n  the model has: {', '.join(linears) or 'no nn.Linear'}"
            )
        found[position] += matches
    refuse_unfit(model, [name for matches in found.values() for name in matches])
    gates, ups, downs = ([name for name in linears if name in each] for each in found.values())
    if len(ups) != len(downs) or set(ups) & set(downs):
        raise LayoutError(f"parallelize: up names {ups} and down names {downs}; every up needs a down of its own")
    if gates and (len(gates) != len(ups) or set(gates) & {*ups, *downs}):
        raise LayoutError(
            f"parallelize: gate names {gates} and up names {ups}; every gated up needs a gate of its own\n"
            "  fix: call parallelize once for the gated pairs, and once for the others"
        )
    pairs = [Pair(up, down, gate) for gate, up, down in zip(gates or [None] * len(ups), ups, downs, strict=True)]
    for pair in pairs:
        for up in pair.ups:
            inner = model.get_submodule(up).out_features, model.get_submodule(pair.down).in_features
            if inner[0] != inner[1]:
                raise LayoutError(
                    f"parallelize: {up} gives {inner[0]} features, {pair.down}, paired with it, takes {inner[1]}"
                )
    return pairs


def refuse_unfit(model: nn.Module, names: Sequence[str]) -> None:
    """Layers that were asked for by name, and cannot be swapped.

    Raises:
        LayoutError: names the first of them, and why.
    """
    for name, reason in _unfit(model, set(names)).items():
        raise LayoutError(f"parallelize: {name} cannot be replaced: {reason}")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name

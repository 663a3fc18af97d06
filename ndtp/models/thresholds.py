"""The numbers on which an attention's code may depend: a trial of fewer tokens would miss what it does beyond them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence

from torch import nn

from ndtp.models.forward_code import function_below, parts_of
from ndtp.models.local_heads import FEATURES, HEADS, KV_HEADS

SIZES = {*HEADS, *KV_HEADS, *FEATURES, "head_dim", "attention_head_size", "num_key_value_groups", "layer_idx"}
SCORES, DRAWN = 2**23, 2**29  # numbers that the scores of a trial, and the results of all products, may have


def tokens_beyond(model: nn.Module, attention: Sequence[tuple[nn.Module, int]], batch: int, fewest: int) -> int:
    """Return a number of tokens beyond all numbers in the code of attention (windows, chunks) that a trial can reach; 0
    where there is none from `fewest` on.

    Args:
        attention: modules of the model, with their numbers of heads.
    """
    drawn = batch * sum(p.shape[0] for p in model.parameters() if p.dim() == 2)
    found = [0]
    for module, heads in attention:
        most = min(DRAWN // max(drawn, 1), int((SCORES / max(batch * heads, 1)) ** 0.5))
        found += [n + 2 for part in module.modules() for n in _numbers(part) if fewest <= n < most - 1]
    return max(found)


def _numbers(module: nn.Module) -> Iterator[int]:
    """Yield the integers that the code of a module's forward has in it, or reads of the module and its config."""
    own, config = vars(module), vars(module).get("config")
    waiting = [inspect.getattr_static(type(module), "forward", None)]
    seen = set()
    while waiting:
        method = function_below(waiting.pop())
        if method is None or method in seen or str(method.__module__).startswith("torch."):
            continue
        seen.add(method)
        waiting += [cell.cell_contents for cell in method.__closure__ or () if _is_filled(cell)]
        for code in parts_of(method.__code__):
            values = [x for each in code.co_consts for x in (each if isinstance(each, tuple) else (each,))]
            for name in set(code.co_names) - SIZES:
                values += [own.get(name), getattr(config, name, None)]
                function = function_below(method.__globals__.get(name))
                is_beside = function is not None and function.__module__ == method.__module__
                waiting += [inspect.getattr_static(type(module), name, None), *([function] if is_beside else [])]
            yield from (x for x in values if type(x) is int)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, types.FunctionType)
    except ValueError:  # of a name that has no value yet
        return False

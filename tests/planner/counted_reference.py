"""What `ndtp.models.counted` says of a model, against torch's own count of what the model's code multiplies.

The code runs on tensors without memory, under torch's `FlopCounterMode`.  What it tells is independent of how ndtp
finds layers: products of each Linear, and the heads whose scores go through a softmax.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ndtp.models.counted import weights_of
from ndtp.models.dry_step import OfWholeBatches, usual_inputs
from ndtp.models.roles import is_linear, vocabulary_of
from ndtp.planner.model_sizes import CountedModel

BATCH, LENGTH = 3, 32


class Heads(TorchFunctionMode):
    """How many heads each softmax of scores had: dim 1 or 2 of [batch, heads, queries, keys] as code orders them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("softmax", "scaled_dot_product_attention"):
            scores = args[0] if args else None
            if isinstance(scores, Tensor) and scores.dim() == 4 and scores.shape[0] == BATCH:
                self.found.update(scores.shape[1:3])
        return func(*args, **(kwargs or {}))


def difference(model: Any, counted: CountedModel) -> str:
    """What the count and the model disagree about; nothing where its code does not run without numbers."""
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    if total != counted.parameters:
        return f"{counted.parameters} parameters instead of {total}"
    told = run(model)
    if told is None:
        return ""
    flops, heads, rows, of_head = told
    routers = {(block.experts, block.hidden) for block in counted.found if block.experts}
    _, planned = weights_of(model, "")
    names = {
        name
        for name, module in model.named_modules()
        if is_linear(module, casts=True) and id(module.weight) in planned and tuple(module.weight.shape) not in routers
    }
    real = sum(flops.get(name, 0) for name in names)
    if any(not flops.get(name) for name in names):
        return ""  # a part of the model that this call does not use
    blocks = [block for block in counted.blocks(rows) if not block.experts and block.name != "vocabulary"]
    blocks += [block for block in counted.blocks(of_head) if block.name == "vocabulary"]
    wanted = sum(2 * block.times * m * k * n for block in blocks for m, k, n in block.bounds)
    if real != wanted:
        return f"{wanted} floating-point operations of planned products instead of {real}"
    own = {block.heads[0] for block in counted.found if block.heads}
    if heads and not own <= heads.keys():
        return f"{sorted(own)} heads, its softmaxes have {sorted(heads)}"
    return ""


def run(model: Any) -> tuple[dict[str, int], Counter[int], int, int] | None:
    """Operations of each Linear in a forward, heads of its softmaxes, and the rows of most Linears and of the head."""
    counter, heads, rows = FlopCounterMode(display=False), Heads(), Counter[nn.Module]()
    count = lambda module, args: rows.update({module: args[0].numel() // args[0].shape[-1]})  # noqa: E731
    hooks = [module.register_forward_pre_hook(count) for module in model.modules() if is_linear(module, casts=True)]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = usual_inputs(model, BATCH, LENGTH, None)
            with heads, OfWholeBatches(), counter:
                model(**given)
    except Exception:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    counts = counter.get_flop_counts()
    prefix = f"{type(model).__name__}."
    flops = {name.removeprefix(prefix): sum(each.values()) for name, each in counts.items()}
    of_most = Counter(rows.values()).most_common(1)
    most = of_most[0][0] if of_most else 0
    return flops, heads.found, most, rows.get(vocabulary_of(model, "get_output_embeddings"), most)

"""torch's own transformer layers on a grid: attention, MLPs and norms split, hidden states split from end to end.

What stands alone in a model, `nn.MultiheadAttention` or a whole `nn.TransformerEncoder`, takes and gives whole
activations; inside of it they stay split.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import BlockLayouts
from ndtp.algebra.volume import Volume
from ndtp.errors import LayoutError
from ndtp.models.adopted import class_of
from ndtp.models.computed import is_computed
from ndtp.models.frame import Frame
from ndtp.models.hidden import Hidden, split, whole
from ndtp.models.named_plan import BY_PLAN
from ndtp.models.roles import MLPRole, join
from ndtp.models.run_eagerly import run_eagerly
from ndtp.models.torch_attention import place_multihead, reason_against
from ndtp.models.transformer import Split
from ndtp.nn.sharded import volume_of
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.process_grid import ProcessGrid

LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
STACKS = (nn.TransformerEncoder, nn.TransformerDecoder, *LAYERS, nn.MultiheadAttention)
# What of the arguments of a stack is hidden states.
STATES = ("src", "tgt", "memory", "query", "key", "value")


def find_stacks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost of torch's transformer modules in a model whose layers have parameters as they are, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{other}.") or not other for other in found)
        if type(module) in STACKS and not is_inside and not any(map(is_computed, module.modules())):
            found[name] = module
    return found


class TorchSplit(Split):
    """One stack on its way to the grid."""

    def __init__(
        self, name: str, stack: nn.Module, mesh: ProcessGrid, layouts: BlockLayouts, keep: Collection[str] = (),
        **options: Any,
    ) -> None:  # fmt: skip
        attention = [module for module in stack.modules() if isinstance(module, nn.MultiheadAttention)]
        super().__init__(stack, mesh, layouts, keep, hidden=attention[0].embed_dim, **options)
        self.name, self.attention = name, attention

    def run(self) -> None:
        modules = dict(self.model.named_modules(prefix=self.name))
        for name, module in modules.items():
            if isinstance(module, nn.MultiheadAttention):
                self._multihead(name, module)
        for name, module in modules.items():
            if type(module) in LAYERS:
                self._mlp(MLPRole(name, (join(name, "linear1"),), join(name, "linear2")), modules)
        for name, module in modules.items():
            if isinstance(module, nn.LayerNorm):
                self._norm(name, module)
        for module in modules.values():
            if isinstance(module, LAYERS):
                module.activation_relu_or_gelu = 0  # "an activation that the fast path does not have"
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False
        # An attention that stays as it is reads the weights of its parts by itself.
        whole = [name for name, module in modules.items() if type(module) is nn.MultiheadAttention]
        self._others({n: m for n, m in modules.items() if not any(f"{n}.".startswith(f"{each}.") for each in whole)})
        if self.replaced:
            place_stack(self.model, self.name, self.frame, self.layouts.input, self.width)
            run_eagerly(self.model)

    def _multihead(self, name: str, module: nn.MultiheadAttention) -> None:
        reason = BY_PLAN if self.is_kept(name, f"{name}.out_proj") else reason_against(module, self.layouts)
        if reason is None and module.embed_dim != self.hidden:
            reason = f"{module.embed_dim} features, others of '{self.name}' have {self.hidden}"
        if reason:
            self.kept[name] = reason
            return
        out = place_multihead(
            module, name, self.frame, self.layouts, width=self.width, **self.options
        )  # fmt: skip
        adopted: Any = module
        self.replaced[f"{name}.in_proj"] = str(adopted.plan)
        self.report(out)

    def volume(self, batch: int, length: int) -> Volume:
        """Bytes of a step of so many sequences of one dp rank, and as many that a decoder sees."""
        like = next(self.model.parameters())
        shape = (batch, length) if self.attention[0].batch_first else (length, batch)
        given = [
            torch.empty(*shape, self.hidden, dtype=like.dtype, device="meta", requires_grad=True)
            for _ in _arguments(self.model)
        ]
        leave = vars(self.model).get("ndtp_report")
        return volume_of(self.model, self.frame.mesh, given, lambda y: y[0] if isinstance(y, tuple) else y, leave=leave)


def _arguments(stack: nn.Module) -> tuple[str, ...]:
    """The names of the hidden states that a module of torch's takes first."""
    if isinstance(stack, nn.MultiheadAttention):
        return "query", "key", "value"
    return ("tgt", "memory") if isinstance(stack, (nn.TransformerDecoder, nn.TransformerDecoderLayer)) else ("src",)


class TorchStack(nn.Module):
    """The class of a module of torch's that takes and gives whole activations, and has them split inside."""

    ndtp_enter: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        frame, layout, width, name = self.ndtp_enter
        attention = next(module for module in self.modules() if isinstance(module, nn.MultiheadAttention))
        signature = _arguments(self)
        named = dict(zip(signature, args, strict=False)) | {key: kwargs.pop(key) for key in signature if key in kwargs}
        rest = args[len(signature) :]
        first = named[signature[0]]
        if isinstance(first, Tensor) and first.is_nested:
            raise LayoutError(
                f"'{name}' takes sequences of one length, and got a nested tensor\n  fix: pad them, with a mask"
            )
        is_batched, turned = first.dim() == 3, first.dim() == 3 and not attention.batch_first
        if not is_batched and kwargs.get("key_padding_mask") is not None:
            kwargs["key_padding_mask"] = kwargs["key_padding_mask"][None]
        made: dict[int, Hidden] = {}
        given = []
        for x in named.values():
            if id(x) not in made:
                states = whole(x) if is_plain(x) else x.full_tensor()  # type: ignore[attr-defined]
                states = states.transpose(0, 1) if turned else states if is_batched else states[None]
                made[id(x)] = split(states, frame, layout, width, name)
            given.append(made[id(x)])
        result = super().forward(*given, *rest, **kwargs)

        def outside(x: Tensor) -> Tensor:
            x = whole(x)
            return x.transpose(0, 1) if turned else x if is_batched else x[0]

        if not isinstance(result, tuple):
            return outside(result)
        y, weights = result
        return outside(y), weights if weights is None or is_batched else weights[0]


def place_stack(stack: nn.Module, name: str, frame: Frame, layout: Layout, width: int) -> None:
    stack.__class__ = class_of(TorchStack, type(stack))
    stack.ndtp_enter = (frame, layout, width, name)  # type: ignore[assignment]

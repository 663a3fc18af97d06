"""The load-balancing loss of a model's routers in stages: sums over layers, which each stage adds to and passes on.

The loss is E sum_e f_e p_e, where f_e is the part of the choices, and p_e the mean probability, of expert e over the
tokens of all layers: a product of two means, so no stage can take it of its own layers.  Of both, the sums over layers
are enough, 2 E numbers a micro-batch.  Where tokens are split over ranks, these add up, too.  What comes back is the
gradient of the sum of probabilities, the same for every layer.

Source: Fedus et al., "Switch Transformers", 2021, (4) to (6); over all layers at once as transformers has it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.compute.torch_calls import Arguments
from ndtp.errors import LayoutError
from ndtp.models.data_loss import FORMULA
from ndtp.pipelines.without_numbers import runnable

RECORDED = "_can_record_outputs"  # transformers: of which modules the router logits are an output


@dataclass(frozen=True)
class Balance:
    """The loss of one model.

    Attributes:
        router, position: the class of the modules whose outputs have the logits, and where in these.
        within: what their names have in them.
        experts, top_k: of a layer, and of a token.
        coefficient: of the loss, beside that of the labels.
    """

    router: type[nn.Module]
    position: int
    within: str
    experts: int
    top_k: int
    coefficient: float

    @property
    def shape(self) -> tuple[int, int]:
        return 2, self.experts

    def routers(self, model: nn.Module) -> list[nn.Module]:
        return [m for name, m in model.named_modules() if isinstance(m, self.router) and self.within in name]

    def sums(self, logits: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Return [2, experts]: choices and probabilities, summed over these layers in fp32 as transformers has it.

        Args:
            logits: of each layer, [tokens, experts].
            mask: [sequences, length], zero where a token does not count.
        """
        device = logits[0].device if logits else None
        total = torch.zeros(self.shape, device=device)
        weight = None if mask is None else mask.reshape(-1).to(torch.float32)
        for each in logits:
            probabilities = each.softmax(-1)
            chosen = probabilities.topk(self.top_k, -1).indices.flatten()
            times = torch.ones_like(chosen, dtype=torch.float32)
            parts = probabilities.float()
            if weight is not None:
                times, parts = weight.repeat_interleave(self.top_k), parts * weight.unsqueeze(-1)
            choices = torch.zeros(self.experts, device=device).scatter_add_(0, chosen, times)
            total = total + torch.stack((choices, parts.sum(0)))
        return total

    def loss(self, sums: Tensor) -> Tensor:
        """Return the loss from the sums of all layers."""
        choices, probabilities = sums[0].detach(), sums[1]
        tokens = choices.sum() / self.top_k
        return (choices / tokens * (probabilities / tokens)).sum() * self.experts


def balance_of(model: nn.Module) -> Balance:
    """Return the auxiliary loss (load balancing) that a model adds to its loss.

    Raises:
        LayoutError: it computes it in another way than transformers' common function, or nobody knows of what.
    """
    own = model
    recorded = (getattr(module, RECORDED, None) or {} for module in model.modules())
    named = next((each["router_logits"] for each in recorded if "router_logits" in each), None)
    found = Balance(
        router=getattr(named, "target_class", None) or nn.Module,
        position=getattr(named, "index", 0),
        within=getattr(named, "layer_name", None) or "",
        experts=getattr(own, "num_experts", 0),
        top_k=getattr(own, "num_experts_per_tok", 0),
        coefficient=getattr(own, "router_aux_loss_coef", 0.0),
    )
    formula = getattr(sys.modules[type(model).__module__], FORMULA, None)
    if found.router is nn.Module or formula is None or not found.experts or not found.top_k:
        raise _refused(model, f"not from {FORMULA} and the outputs of one class of routers")
    if not _is_common(formula, found) or not _is_added(own, found):
        raise _refused(model, f"not as transformers' {FORMULA} of all layers")
    return found


def _refused(model: nn.Module, why: str) -> LayoutError:
    return LayoutError(
        f"pipeline: {type(model).__name__} adds aux_loss to its loss, of the routers of all layers, {why}; stages pass "
        "on the sums of that alone, and it would be lost\n  fix: config.output_router_logits = False"
    )


@torch.no_grad()
def _is_common(formula: Any, balance: Balance) -> bool:
    """Return whether a model's function is the common one, by a trial on two layers with padding and without."""
    draw = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, balance.experts, generator=draw, device="cpu") for _ in range(2))
    for mask in (None, torch.tensor([[1, 1, 1], [1, 0, 0]], device="cpu")):
        theirs = formula(logits, balance.experts, balance.top_k, mask)
        mine = balance.loss(balance.sums(logits, mask))
        if not isinstance(theirs, Tensor) or not torch.allclose(mine, theirs, rtol=1e-5):
            return False
    return True


@torch.no_grad()
def _is_added(model: Any, balance: Balance) -> bool:
    """Return whether the model's loss is its labels' loss and this one, by a run; a model on meta has no numbers to
    try.
    """
    device = next(model.parameters()).device
    ids = torch.arange(8, device=device).remainder(model.config.vocab_size).unsqueeze(0)
    logits: list[Tensor] = []
    handles = [each.register_forward_hook(taking(balance, logits)) for each in balance.routers(model)]
    try:
        with torch.random.fork_rng(), runnable(model):
            out = model(input_ids=ids, labels=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if device.type == "meta":
        return bool(logits)
    mine = balance.loss(balance.sums(logits, None))
    plain = model.loss_function(logits=out.logits, labels=ids, vocab_size=model.config.vocab_size)
    whole = plain + balance.coefficient * mine
    return torch.allclose(mine, out.aux_loss.to(mine), rtol=1e-4) and torch.allclose(whole, out.loss, rtol=1e-6)


def taking(balance: Balance, logits: list[Tensor]) -> Any:
    """A forward hook of a router."""

    def take(module: nn.Module, args: Arguments, output: Any) -> None:
        logits.append(output[balance.position] if isinstance(output, (tuple, list)) else output)

    return take

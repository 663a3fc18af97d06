"""Routers: which experts a token goes to, and with which weights.  In fp32 at least, on every grid the same.

| name | scores | choice | capacity | keeps balance by |
|---|---|---|---|---|
| `mixtral` | softmax | top k, weights add up to one | dropless | a loss (Switch's, of k choices) |
| `qwen` | softmax | top k, weights as they are | dropless | the same |
| `switch` | softmax | top 1 | tokens / experts x 1.25 | a loss |
| `gshard` | softmax | top 2, the second one by chance | tokens / experts x 2, in groups | a loss |
| `noisy` | logits and learnt noise | top k, softmax over these | dropless | losses of importance and load |
| `deepseek` | sigmoid | top k of score + bias, weights add up to one | dropless | the bias, without a loss |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ndtp.compute.grouped import tally
from ndtp.errors import LayoutError
from ndtp.nn.router import Router, Routing
from ndtp.nn.token_rows import TokenRows


class Mixtral(Router):
    """Jiang et al. 2024, "Mixtral of Experts": softmax of the logits of the top k."""


class Qwen(Router):
    """Qwen2-MoE, and many others: weights are probabilities among all experts."""

    defaults: ClassVar[dict[str, Any]] = {"normalize": False}


class Switch(Router):
    """Fedus, Zoph and Shazeer 2021, "Switch Transformers": one expert a token, by its probability."""

    defaults: ClassVar[dict[str, Any]] = {"top_k": 1, "normalize": False, "capacity": 1.25, "balance": 0.01}


class GShard(Router):
    """Lepikhin et al. 2020, "GShard": two experts a token, the second one with twice its weight as its probability.

    Groups have their own capacity, and the loss `1/E sum_e c_e/S m_e`, of first choices c_e and mean scores m_e, is
    their mean.  In evaluation the second expert is always asked.
    """

    defaults: ClassVar[dict[str, Any]] = {"top_k": 2, "capacity": 2.0, "balance": 0.01}
    drops = True

    def choose(self, logits: Tensor, around: TokenRows) -> Routing:
        routing = super().choose(logits, around)
        if self.training and self.top_k > 1:
            drawn = around.uniform("second", self.top_k - 1, logits.device)
            routing.kept = torch.ones_like(routing.experts, dtype=torch.bool)
            routing.kept[:, 1:] = 2 * routing.gates.detach()[:, 1:] > drawn
        return routing

    def terms(self, routing: Routing, around: TokenRows) -> dict[str, Tensor]:
        found = super().terms(routing, around)
        if "choices" in found:
            size, experts = around.group_size(self.groups), self.num_experts
            group = (torch.arange(around.here, device=routing.scores.device) + around.first) // size
            cell = group * experts + routing.experts[:, 0]
            firsts = tally(cell, self.groups * experts).view(-1, experts).to(routing.scores.dtype)
            scores = torch.zeros_like(firsts).index_add(0, group, routing.scores)
            if around.knows_groups(self.groups):
                del found["scores"]
                found["choices"] = (firsts * scores).sum()
            else:
                found["choices"], found["scores"] = firsts, scores
        return found

    def losses(self, sums: dict[str, Tensor], around: TokenRows) -> dict[str, Tensor]:
        total = None
        if "choices" in sums:
            choices = sums.pop("choices")
            total = (choices * sums.pop("scores")).sum() if "scores" in sums else choices
        found = super().losses(sums, around)
        if total is not None:
            scale = self.num_experts * self.groups * around.group_size(self.groups) ** 2
            found["balance"] = self.balance * total / scale
        return found


class Noisy(Router):
    """Shazeer et al. 2017, "Outrageously Large Neural Networks": the top k of logits with learnt noise.

    Losses are the squared coefficients of variation of importance (sums of weights) and of load, the expected number of
    tokens; both times `balance`.  In evaluation there is no noise.
    """

    defaults: ClassVar[dict[str, Any]] = {"balance": 0.01}

    def __init__(self, hidden: int, experts: int, top_k: int, **options: Any) -> None:
        super().__init__(hidden, experts, top_k, **options)
        lies = self.lies["weight"]
        self.add("noise", lies.real, lies.layout, self.weight.device, self.weight.dtype)
        if not self.weight.is_meta:
            self.reset_parameters()

    def logits(self, rows: Tensor) -> Tensor:
        clean = super().logits(rows)
        if not self.training:
            return clean
        spread = nn.functional.softplus(self.wide_product(rows, "noise"))
        return torch.cat([clean, spread], -1)

    def choose(self, logits: Tensor, around: TokenRows) -> Routing:
        if not self.training:
            return self._among(logits, logits)
        clean, spread = logits.chunk(2, -1)
        drawn = around.uniform("noise", 2 * self.num_experts, logits.device).to(clean.dtype)
        radius, angle = drawn.chunk(2, -1)
        normal = (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)
        noisy = clean + normal * spread
        routing = self._among(noisy, clean)
        if self.balance:
            routing.losses["load"] = self._load(noisy, clean, spread)
        return routing

    def _among(self, noisy: Tensor, clean: Tensor) -> Routing:
        best, experts = noisy.topk(self.top_k, dim=-1)
        gates = best.softmax(-1)
        scores = torch.zeros_like(clean).scatter(-1, experts, gates)
        return Routing(experts, gates * self.scale, None, clean, scores)

    def _load(self, noisy: Tensor, clean: Tensor, spread: Tensor) -> Tensor:
        """Return, as [experts], the probability that each expert would be chosen with its noise drawn anew, summed
        over rows.
        """
        if self.top_k == self.num_experts:
            return torch.ones_like(clean).sum(0)
        best = noisy.topk(self.top_k + 1, dim=-1).values
        is_in = noisy >= best[:, -2:-1]
        threshold = torch.where(is_in, best[:, -1:], best[:, -2:-1])
        return torch.special.ndtr((clean - threshold) / spread).sum(0)

    def terms(self, routing: Routing, around: TokenRows) -> dict[str, Tensor]:
        found = super().terms(routing, around)
        if self.balance:
            found["choices"] = routing.losses.pop("load")
        return found

    def losses(self, sums: dict[str, Tensor], around: TokenRows) -> dict[str, Tensor]:
        if "choices" not in sums:
            return super().losses(sums, around)
        importance, load = sums.pop("scores"), sums.pop("choices")
        found = super().losses(sums, around)
        return {
            "importance": self.balance * variation(importance), "load": self.balance * variation(load), **found
        }  # fmt: skip


class DeepSeek(Router):
    """DeepSeek-AI 2024, "DeepSeek-V3": sigmoid scores, chosen by score + bias, which `update_bias` moves.

    An expert that had more tokens than the mean loses `speed` of its bias, one that had fewer gains it (Wang et al.
    2024, "Auxiliary-loss-free load balancing strategy").  With `expert_groups`, choices come from the `top_groups`
    groups of experts whose two best add up to most.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        speed: float = 0.001,
        expert_groups: int = 1,
        top_groups: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(hidden, experts, top_k, **options)
        if experts % expert_groups or not 1 <= top_groups <= expert_groups:
            raise LayoutError(
                f"Router '{self.name}': {top_groups} of {expert_groups} groups of {experts} experts\n"
                "  fix: groups of one size, and no more of them than there are"
            )
        self.speed, self.expert_groups, self.top_groups = speed, expert_groups, top_groups
        self.register_buffer("bias_of_choice", torch.zeros(experts, device=self.weight.device, dtype=torch.float32))
        self.register_buffer(
            "load", torch.zeros(experts, device=self.weight.device, dtype=torch.float32), persistent=False
        )

    bias_of_choice: Tensor
    load: Tensor

    def choose(self, logits: Tensor, around: TokenRows) -> Routing:
        scores = logits.sigmoid()
        by = scores.detach() + self.bias_of_choice.to(scores.dtype)
        if self.expert_groups > 1:
            grouped = by.unflatten(-1, (self.expert_groups, -1))
            best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            chosen = torch.zeros_like(best).scatter(-1, best.topk(self.top_groups, dim=-1).indices, 1.0)
            by = torch.where(chosen.unsqueeze(-1) > 0, grouped, -math.inf).flatten(-2)
        experts = by.topk(self.top_k, dim=-1).indices
        routing = Routing(experts, self.weighted(scores.gather(-1, experts)), None, logits, scores)
        if self.training:
            self.load += self.chosen(routing)
        return routing

    def weighted(self, gates: Tensor) -> Tensor:
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20) if self.normalize else gates
        return gates * self.scale

    def terms(self, routing: Routing, around: TokenRows) -> dict[str, Tensor]:
        found = super().terms(routing, around)
        if "scores" in found:  # the loss of each sequence in the paper, over the batch: of scores that add up to one
            found["scores"] = (routing.scores / routing.scores.sum(-1, keepdim=True)).sum(0)
        return found

    @torch.no_grad()
    def update_bias(self) -> None:
        """Update the bias once a step, after the optimizer's step; a collective over the axes that split rows."""
        load = TokenRows(self.mesh, self.in_layout, 0, self.name).sum(self.load)
        self.bias_of_choice += self.speed * torch.sign(load.mean() - load)
        self.load.zero_()


def variation(x: Tensor) -> Tensor:
    """The squared coefficient of variation."""
    return x.var(unbiased=False) / x.mean().square()


ROUTERS: dict[str, Callable[..., Router]] = {
    "mixtral": Mixtral,
    "qwen": Qwen,
    "switch": Switch,
    "gshard": GShard,
    "noisy": Noisy,
    "deepseek": DeepSeek,
}

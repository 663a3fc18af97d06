"""`Router`: logits of a token's experts, in fp32 at least; the choice, capacity and losses that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.types import Device

from ndtp.algebra.layout import Layout
from ndtp.algebra.volume import Volume
from ndtp.algebra.wire import Wire
from ndtp.compute.grouped import tally
from ndtp.errors import LayoutError
from ndtp.nn.linear import Linear
from ndtp.nn.padding import as_rows
from ndtp.nn.sharded import volume_of
from ndtp.nn.token_rows import TokenRows
from ndtp.ops.products import chain
from ndtp.runtime.arrival import local_shard
from ndtp.runtime.process_grid import ProcessGrid


@dataclass
class Routing:
    """A router's decision about the rows of this rank.

    Attributes:
        experts: [rows, k], of all experts of the layer.
        gates: [rows, k], their weights, through which the router learns.
        kept: [rows, k]: which choices found room; None if all did.
        logits: [rows, experts].
        scores: [rows, experts], what the router makes of them.
        losses: by name, of the whole batch and times their coefficients: the same on every rank.
    """

    experts: Tensor
    gates: Tensor
    kept: Tensor | None
    logits: Tensor
    scores: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)


class Router(Linear):
    """`logits = x W^T` with the weight [experts, hidden] of a dense gate, and the choice of `top_k` experts by them.

        x  [tokens, hidden]  as `in_layout`;  logits [tokens, experts], whole on every rank of a row

    Its arithmetic is in fp32 where the model's is in less, autocast or not.  Parts of the logits are summed over the
    axes that split features, the weight's gradient over those that split rows.

    Args:
        hidden, experts: features of a token, and how many experts there are.
        top_k: experts a token.
        tokens: the layout of [tokens, hidden].
        capacity: rows that an expert takes at most, as a multiple of tokens / experts; later choices are dropped, those
            of later tokens first.  None: dropless.
        groups: runs of tokens with capacities (and losses) of their own.
        normalize: whether a token's weights add up to one.
        scale: what they are multiplied with in the end.
        balance: coefficient of the loss that spreads tokens over experts.
        z_loss: coefficient of the mean of logsumexp(logits)^2 (Zoph et al. 2022, "ST-MoE").

    Raises:
        LayoutError: features that do not divide, more choices than experts.
    """

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        tokens: Layout,
        mesh: ProcessGrid,
        capacity: float | None = None,
        groups: int = 1,
        normalize: bool = True,
        scale: float = 1.0,
        balance: float = 0.0,
        z_loss: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
        name: str = "router",
    ) -> None:
        if not 1 <= top_k <= experts:
            raise LayoutError(f"Router '{name}': top_k={top_k} of {experts} experts\n  fix: 1 to {experts}")
        for option, value in (("capacity", capacity), ("groups", groups)):
            if value is not None and value <= 0:
                raise LayoutError(f"Router '{name}': {option}={value} is not positive")
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        grid, (rows, features) = tokens.grid, tokens.dims
        super().__init__(
            hidden, experts, False, device, wide, mesh=mesh, in_layout=tokens,
            weight_layout=Layout(grid, None, features), out_layout=Layout(grid, rows, None), wire=Wire(), seed=seed,
            name=name,
        )  # fmt: skip
        self.top_k, self.capacity, self.groups = top_k, capacity, groups
        self.normalize, self.scale, self.balance, self.z_loss = normalize, scale, balance, z_loss

    @property
    def num_experts(self) -> int:
        return self.out_features

    @property
    def drops(self) -> bool:
        """Whether a choice may be dropped."""
        return self.capacity is not None

    # ------------------------------------------------------------------------------------------------------- routing

    def forward(self, x: Tensor) -> Routing:  # type: ignore[override]
        rows = as_rows(x, self.name)
        around = TokenRows(self.mesh, self.in_layout, rows.shape[0], self.name)
        with torch.autocast(rows.device.type if not rows.is_meta else "cpu", enabled=False):
            logits = self.logits(rows)
            return self.route(logits, around)

    def logits(self, rows: Tensor) -> Tensor:
        return self.wide_product(rows, "weight")

    def wide_product(self, rows: Tensor, name: str) -> Tensor:
        """Multiply [rows, hidden] by a weight [experts, hidden] of this module, in fp32 or wider."""
        weight = self.needed(name, rows)
        wide = torch.promote_types(torch.promote_types(rows.dtype, weight.dtype), torch.float32)
        weight = weight if weight.dtype == wide else local_shard(weight).to(wide)
        return chain(rows.to(wide), (weight,), (None,), (self.plan,), (None,), self.mesh, (self,))

    def route(self, logits: Tensor, around: TokenRows) -> Routing:
        """Choice, capacity and losses, from the logits of this rank's rows."""
        routing = self.choose(logits, around)
        terms = self.terms(routing, around) if self.training else {}
        if terms:
            sums = around.sum(torch.cat([term.flatten() for term in terms.values()]))
            parts = sums.split([term.numel() for term in terms.values()])
            shaped = {name: part.view(term.shape) for (name, term), part in zip(terms.items(), parts, strict=True)}
            routing.losses = self.losses(shaped, around)
        if self.capacity is not None:
            wanted = routing.kept
            routing.kept = around.within_capacity(routing.experts, wanted, self.num_experts, self.capacity, self.groups)
        return routing

    def choose(self, logits: Tensor, around: TokenRows) -> Routing:
        """Softmax, and the most probable ones."""
        scores = logits.softmax(-1)
        gates, experts = scores.topk(self.top_k, dim=-1)
        return Routing(experts, self.weighted(gates), None, logits, scores)

    def weighted(self, gates: Tensor) -> Tensor:
        gates = gates / gates.sum(-1, keepdim=True) if self.normalize else gates
        return gates * self.scale if self.scale != 1.0 else gates

    # -------------------------------------------------------------------------------------------------------- losses

    def terms(self, routing: Routing, around: TokenRows) -> dict[str, Tensor]:
        """Return this rank's terms of the losses, to be summed over all rows."""
        found = {}
        if self.balance:
            found["choices"] = self.chosen(routing)
            found["scores"] = routing.scores.sum(0)
        if self.z_loss:
            found["z"] = routing.logits.logsumexp(-1).square().sum()
        return found

    def chosen(self, routing: Routing) -> Tensor:
        """Return how often each expert was chosen, [experts], before any choice is dropped."""
        return tally(routing.experts, self.num_experts).to(routing.scores.dtype)

    def losses(self, sums: dict[str, Tensor], around: TokenRows) -> dict[str, Tensor]:
        """Return the losses from the sums over all rows.

        Balance: `experts * sum_i f_i P_i`, where f_i is how often a token chooses expert i, and P_i the mean of its
        probability (Fedus et al. 2021, eq. 4; with k choices as transformers' Mixtral has it).
        """
        found = {}
        if "choices" in sums:
            f, p = sums["choices"] / around.total, sums["scores"] / around.total
            found["balance"] = self.balance * self.num_experts * (f * p).sum()
        if "z" in sums:
            found["z"] = self.z_loss * sums["z"] / around.total
        return found

    # -------------------------------------------------------------------------------------------------------- volume

    def volume(self, tokens: int, dgrad: bool = True) -> Volume:
        """The exact traffic, in bytes received per rank: of the product, of losses, and of a capacity's counts."""
        x = torch.empty(
            self.in_layout.shard_shape((tokens, self.padded_in)), dtype=self.weight.dtype, device="meta",
            requires_grad=dgrad,
        )  # fmt: skip
        return volume_of(self, self.mesh, (x,), lambda routing: sum(routing.losses.values(), routing.gates.sum()))

    def extra_repr(self) -> str:
        room = "dropless" if self.capacity is None else f"capacity={self.capacity}, groups={self.groups}"
        return f"{self.in_features}, experts={self.num_experts}, top_k={self.top_k}, {room}"

"""A weight that the first and the last stage share: each has it as its grid wants it, and they add their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.algebra.pipeline_plan import AXIS
from ndtp.algebra.resharding import ReshardPlan
from ndtp.algebra.volume import Volume
from ndtp.collectives.uneven_exchange import landing_in, part_of
from ndtp.pipelines.messages import exchange, receive_op, send_op
from ndtp.pipelines.pipeline import Pipeline
from ndtp.pipelines.stage import PipelineStage


class TiedWeight:
    """One weight on the grids of two stages, of which this rank has a shard of one, or of both.

    Its gradient is the sum of what the two have: each part goes once to every rank of the other side that lacks it.
    a + b and b + a are the same number, so what equal optimizers make of it stays equal to the last bit.

    Args:
        plan: from the shards of the first stage to those of the last.
        where: this rank's stages that have it, and by which name; by whether it is the last one.
    """

    def __init__(self, plan: ReshardPlan, pipeline: Pipeline, where: Mapping[bool, tuple[PipelineStage, str]]) -> None:
        self.plan, self.pipeline, self.where = plan, pipeline, where
        self.rank = dist.get_rank()
        self._steps: dict[bool, int] = {}
        self._before: dict[bool, Any] = {}  # gradients of earlier steps, which both sides have

    @property
    def own(self) -> dict[bool, nn.Parameter]:
        """This rank's parameters; one that was on the meta device is another when it has values."""
        return {is_last: stage.model.get_parameter(name) for is_last, (stage, name) in self.where.items()}

    @property
    def trains(self) -> bool:
        return any(weight.requires_grad for weight in self.own.values())

    @property
    def volume(self) -> Volume:
        """The exact traffic of a step, in bytes that this rank receives."""
        if not self.trains:
            return Volume()
        dtype = next(iter(self.own.values())).dtype
        ways = (self.plan if is_last else self.plan.back for is_last in self.where)
        found = (way.traffic("wgrad", "receive", self.rank, dtype) for way in ways)
        return Volume.of(replace(each, axes=(AXIS,)) for each in found)

    def begin(self, is_last: bool, step: int) -> None:
        """Put the gradient of earlier steps aside, once a step: the other side has it, too."""
        if self._steps.get(is_last) != step:
            self._steps[is_last], weight = step, self.own[is_last]
            self._before[is_last], weight.grad = weight.grad, None

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Both stages' at once; what is on its way of one is waited for when that of the other is, too."""
        ops: list[dist.P2POp] = []
        own, group = self.own, self.pipeline.group
        sums = {is_last: (_gradient(weight), torch.zeros_like(_gradient(weight))) for is_last, weight in own.items()}
        late: list[tuple[Tensor, Tensor]] = []
        # One way after the other on every rank: messages of two ranks that have both stages are told apart by order.
        for way, from_last in ((self.plan, False), (self.plan.back, True)):
            if from_last in own:
                held = way.held(self.rank)
                assert held is not None
                for message in way.sends(self.rank):
                    part = part_of(sums[from_last][0], message.box, held)
                    ops.append(send_op(part, message.receiver, group, self.plan.name, "wgrad"))
            if (not from_last) not in own:
                continue
            gradient, theirs = sums[not from_last]
            there = self.plan if from_last else self.plan.back
            wanted, kept, other = there.held(self.rank), way.kept(self.rank), way.held(self.rank)
            assert wanted is not None
            for message in way.receives(self.rank):
                room, landing = landing_in(theirs, message.box, wanted)
                late += [(room, landing)] * (landing is not room)
                ops.append(receive_op(landing, message.sender, group, self.plan.name, "wgrad"))
            if kept is not None and other is not None:
                landing_in(theirs, kept, wanted)[0].copy_(part_of(sums[from_last][0], kept, other))
        exchange(ops)
        for room, landing in late:
            room.copy_(landing)
        for gradient, theirs in sums.values():
            gradient += theirs
        for is_last, weight in own.items():
            if (before := self._before.pop(is_last, None)) is not None:
                before += weight.grad
                weight.grad = before

    @torch.no_grad()
    def copy(self) -> None:
        """The first stage's values to the last one, for weights that were made where they lie."""
        ops: list[dist.P2POp] = []
        late: list[tuple[Tensor, Tensor]] = []
        plan, own, group = self.plan, self.own, self.pipeline.group
        held, wanted, kept = plan.held(self.rank), plan.wanted(self.rank), plan.kept(self.rank)
        if held is not None:
            mine = _local(own[False])
            for message in plan.sends(self.rank):
                ops.append(send_op(part_of(mine, message.box, held), message.receiver, group, plan.name, "copy"))
        if wanted is not None:
            for message in plan.receives(self.rank):
                room, landing = landing_in(_local(own[True]), message.box, wanted)
                late += [(room, landing)] * (landing is not room)
                ops.append(receive_op(landing, message.sender, group, plan.name, "copy"))
        exchange(ops)
        for room, landing in late:
            room.copy_(landing)
        if kept is not None and held is not None and wanted is not None:
            landing_in(_local(own[True]), kept, wanted)[0].copy_(part_of(mine, kept, held))


def _local(weight: Any) -> Tensor:
    weight = weight.detach()
    return weight.to_local() if hasattr(weight, "to_local") else weight  # type: ignore[no-any-return]


def _gradient(weight: Tensor) -> Tensor:
    """This rank's shard of it; zeros where nothing came."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad.to_local() if hasattr(weight.grad, "to_local") else weight.grad  # type: ignore[no-any-return]


def tie(stages: Sequence[PipelineStage], pipeline: Pipeline, names: Sequence[tuple[str, str]]) -> list[TiedWeight]:
    """Have the first and the last stage add the gradients of weights that they share, at the end of every step.

    A collective of all ranks of the pipeline, which tell each other how the weights lie.

    Args:
        stages: those of this rank.
        names: of each weight, in the first stage's model and in the last one's.
    """
    last = pipeline.num_stages - 1
    ends = {stage.is_last: stage for stage in stages if stage.is_first or stage.is_last}
    where = [{end: (stage, pair[end]) for end, stage in ends.items()} for pair in names]
    own: list[dict[bool, Any]] = [
        {end: stage.model.get_parameter(name) for end, (stage, name) in each.items()} for each in where
    ]
    lies = [{end: (weight.ndtp_layout.dims, tuple(weight.shape)) for end, weight in each.items()} for each in own]
    said = pipeline.gather(lies, "tied weights")
    by_rank = dict(zip(pipeline.all_ranks, said, strict=True))
    found = []
    for i, (first_name, _) in enumerate(names):
        (dims, shape), (last_dims, last_shape) = (
            by_rank[pipeline.ranks_of[index][0]][i][index == last] for index in (0, last)
        )
        plan = ReshardPlan(
            Layout(pipeline.grids[0], *dims), Layout(pipeline.grids[last], *last_dims), shape, last_shape,
            ranks=pipeline.ranks_of[0], target_ranks=pipeline.ranks_of[last], name=first_name,
        )  # fmt: skip
        found.append(TiedWeight(plan, pipeline, where[i]))
    if True in ends:
        ends[True].known_as |= {theirs: first for first, theirs in names}
    _at_the_end(stages, found)
    return found


def _at_the_end(stages: Sequence[PipelineStage], tied: Sequence[TiedWeight]) -> None:
    """Sum gradients of tied weights when this rank's last stage is done, since no other rank waits for this one
    then.
    """
    left: list[int] = []

    def finish() -> None:
        left.append(1)
        if len(left) == len(stages):
            left.clear()
            for weight in tied:
                if weight.trains:
                    weight.add_gradients()

    for stage in stages:
        stage.finishing.append(finish)
        for is_last in (end for end in (False, True) if (stage.is_last if end else stage.is_first)):
            stage.beginning += [partial(weight.begin, is_last) for weight in tied if is_last in weight.where]

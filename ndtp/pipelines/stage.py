"""`PipelineStage`: torch's, for a module on a grid of its own; what moves to the next stage is what a plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ndtp.algebra.layout import Layout
from ndtp.algebra.pipeline_plan import AXIS, PASSED, PipelinePlan
from ndtp.algebra.resharding import Box, ReshardPlan, volume_of
from ndtp.algebra.volume import Volume
from ndtp.algebra.wire import Wire
from ndtp.checkpoints.pieces import Piece, Whole
from ndtp.collectives.groups import shared_group
from ndtp.collectives.uneven_exchange import cut, landing_in, part_of, sendable
from ndtp.errors import GridError, LayoutError
from ndtp.models.state_entries import mesh_of_model
from ndtp.pipelines.as_torch_wants import as_it_was, no_view
from ndtp.pipelines.in_parts import IN_PARTS, whole_backward
from ndtp.pipelines.messages import decode_into, encoded, exchange, receive_op, send_op
from ndtp.pipelines.pipeline import Pipeline
from ndtp.runtime.crew import Crew
from ndtp.runtime.given_mesh import GivenWire

if TYPE_CHECKING:
    from ndtp.collectives.codecs import Codec


class PipelineStage(torch_pipelining.PipelineStage):
    """A stage of a pipeline, for any of torch's schedules, which know nothing of grids.

    The module takes and gives this rank's shard of one tensor, or of several: as the plan's layouts of the stage say,
    of the shape that the plan has.  Shards move by point-to-point messages between the ranks of two grids, see
    `ndtp.algebra.resharding.ReshardPlan`: each rank receives each element of its shard once.  Nothing is inferred in
    a first run: what moves is settled by the plan.

    Micro-batches accumulate: gradients of weights that `dp` replicates are reduced with the last of them.

    Args:
        module: on `pipeline.mesh(index)`.
        index: default: the only stage of this rank.
        dtype: of what passes between stages.  Default: torch's default dtype.
        wire: the dtypes in which that and its gradients travel, the same for all stages.  Default: those of the mesh.
        also: what passes beside, as it is computed, if modules take and give several tensors: of each further one the
            plan, of the same stages on the same ranks, and its dtype.
        dw_builder: as for torch's.

    Attributes:
        pipeline, index, mesh: where it is.
        beginning: called before each backward with the number of the step.
        finishing: called when this rank has its gradients of a step, in order; see `ndtp.pipelines.tied`.
        known_as: of what the first stage has, too: the name in this stage's model -> that in the first one's.
        settling: called when parameters have got their first values where they lie, in order.

    Raises:
        GridError: this rank has no part of the stage, or of several and no index is given; a plan in `also` that has
            the stages on other ranks.
    """

    shares_names = False  # with other stages: of the same tensors

    def __init__(
        self,
        module: nn.Module,
        pipeline: Pipeline,
        index: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        wire: GivenWire = None,
        also: Sequence[tuple[PipelinePlan, torch.dtype]] = (),
        dw_builder: Callable[[], Callable[..., None]] | None = None,
    ) -> None:
        index = pipeline.own_stage(index)
        for plan, _ in also:
            if plan.ranks_of != pipeline.ranks_of:
                raise GridError(f"pipeline: also= has {plan}, the pipeline {pipeline}\n  fix: the same ranks=")
        self.mesh = mesh = pipeline.mesh(index)
        where = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
        # torch wants a group with a rank of every stage, which unequal grids have not: what it would say is set below.
        alone, device = ((dist.get_rank(),),), torch.device(mesh.device_type, *where)
        group = shared_group(alone, "alone in its stage", True, dict)
        super().__init__(module, index, pipeline.num_stages, device, group=group, dw_builder=dw_builder)
        self.group = pipeline.group
        self.group_rank, self.group_size = pipeline.places[index], max(pipeline.places) + 1
        self.stage_index_to_group_rank = dict(enumerate(pipeline.places))
        self.pipeline, self.index, self.rank = pipeline, index, dist.get_rank()
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.passing = ((pipeline, self.dtype), *also)
        self.wire, self._collectives = mesh.sending(Wire.of(wire)).wire, mesh.sending(Wire.of(wire)).collectives
        self.beginning: list[Callable[[int], None]] = []
        self.finishing: list[Callable[[], None]] = []
        self.known_as: dict[str, str] = {}
        self.settling: list[Callable[[], None]] = []
        self._runtime_validate, self.steps = False, 0  # of metadata that is not there
        self._arriving: dict[tuple[str, int, int], tuple[Tensor, list[Callable[[], Any]]]] = {}
        self._agreed: set[str] = set()

    # ---------------------------------------------------------------------------------------------------- what it knows

    @property
    def model(self) -> nn.Module:
        """The module with the names of the whole model, by which a checkpoint of all stages is written."""
        return self.submod  # type: ignore[no-any-return]

    def whole(self, stages: Sequence[PipelineStage]) -> Whole:
        """The stages of this rank as parts of one model that is written or read by `ndtp.checkpoint`."""
        pipeline = self.pipeline
        pieces = [
            Piece(each.model, mesh_of_model(each.model) or each.mesh, each.index, each.known_as, each.shares_names)
            for each in sorted(stages, key=lambda stage: stage.index)
        ]
        crew = Crew(pipeline.group, pipeline.all_ranks, self.mesh.device_type, (AXIS,))
        settling = list(dict.fromkeys(each for stage in stages for each in stage.settling))
        return Whole(pieces, crew, pipeline.num_stages, settling)

    @property
    def in_layout(self) -> Layout:
        return self.pipeline.stage_layouts[self.index][0]

    @property
    def out_layout(self) -> Layout:
        return self.pipeline.stage_layouts[self.index][1]

    def volume(self, micro_batches: int) -> Volume:
        """The exact traffic between stages in a step, all stages of this rank together, in bytes that it receives."""
        parts = (
            plan.volume(self.rank, micro_batches, _has_gradient(dtype), dtype, None if i else self.wire)
            for i, (plan, dtype) in enumerate(self.passing)
        )
        return sum(parts, Volume())

    def _ways(self, at: int, phase: str) -> list[tuple[int, ReshardPlan, torch.dtype]]:
        """Return the tensors that pass between a stage and the next one, by the stage's number: (number, plan,
        dtype).
        """
        every = [(i, plan.crossings[at], dtype) for i, (plan, dtype) in enumerate(self.passing)]
        if phase == "forward":
            return every
        return [(i, plan.back, dtype) for i, plan, dtype in every if self.has_backward and _has_gradient(dtype)]

    def rows(self, whole: Tensor, micro_batches: int, layout: Layout | None = None) -> Tensor:
        """This rank's part of every micro-batch, one behind the other: what `schedule.step` takes and cuts again.

            schedule.step(stage.rows(x, 4)) if stage.is_first else schedule.step(target=stage.rows(y, 4))

        Args:
            whole: the batch; micro-batches are parts of its dim 0, and tensors like any other.
            layout: default: that of what the first stage takes, and of what the last one gives.

        Raises:
            LayoutError: it does not divide.
        """
        if layout is None:
            layout = self.in_layout if self.is_first else self.out_layout
        return torch.cat(self.pipeline.rows(whole, micro_batches, layout, self.mesh.rank))

    # ------------------------------------------------------------------------------------------------ settled up front

    def _prepare_forward_infra(self, num_microbatches: int, args: Any, *rest: Any, **more: Any) -> Any:
        places = dict(enumerate(self.pipeline.places))
        if self.stage_index_to_group_rank != places:
            raise GridError(
                f"pipeline: the schedule has stages on ranks {self.stage_index_to_group_rank} of its own, the pipeline "
                f"has them on {places}\n  fix: groups=, or ranks= of every stage, as the schedule has them: "
                "one behind the other, in turns, or there and back"
            )
        self.chunks = num_microbatches
        self.args_recv_info = {}.fromkeys(range(num_microbatches), ())
        meta: Any = getattr(self, "_stage_meta", None)
        if meta is not None:
            taken = len(args) if isinstance(args, tuple) else 1
            meta.inputs = (None,) * (taken if self.is_first else len(self.passing))
        wants = ", with gradients" * self.has_backward
        tensors = ", ".join(f"{plan.shapes} of {dtype}" for plan, dtype in self.passing)
        wire = f", {self.wire}" * bool(self.wire)
        what = f"{num_microbatches} micro-batches{wants}; {self.pipeline}, {tensors}{wire}"
        first = self.pipeline.stages_of(self.rank)[0] == self.index
        if first and what not in self._agreed:
            self._agreed.add(what)
            self.pipeline.agree(what)
        return None

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        return None

    def _warmup_forward_vote(self, *args: object, **kwargs: object) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    _warmup_backward_result = _warmup_forward_vote

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _validate_fwd_input(self, *args: object) -> None:  # torch before 2.13
        pass

    _validate_fwd_outputs = _validate_fwd_input

    # --------------------------------------------------------------------------------------------------------- messages

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_first else self._receive_all(self.index - 1, "forward", fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_last else self._receive_all(self.index, "dgrad", bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        before = getattr(self, "fwd_cache", None)  # torch 2.15 keeps outputs elsewhere
        now: Any = self
        given = now._forward_chunk_states[fwd_chunk_id].live_outputs if before is None else before[fwd_chunk_id][0]
        outputs = self._passed_on(given, self.index)
        ways = self._ways(self.index, "forward")
        return [op for i, plan, _ in ways for op in self._send(plan, outputs[i], ("forward", i, fwd_chunk_id))]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        grads = self.bwd_cache.pop(bwd_chunk_id)
        ways = self._ways(self.index - 1, "dgrad")
        given = ((i, plan, self._gradient(grads[i], plan, dtype)) for i, plan, dtype in ways)
        return [op for i, plan, grad in given for op in self._send(plan, grad, ("dgrad", i, bwd_chunk_id))]

    def _receive_all(self, at: int, phase: str, micro_batch: int) -> list[dist.P2POp]:
        ways = self._ways(at, phase)
        return [op for i, plan, dtype in ways for op in self._receive(plan, dtype, (phase, i, micro_batch))]

    def _receive(self, plan: ReshardPlan, dtype: torch.dtype, key: tuple[str, int, int]) -> list[dist.P2POp]:
        """Receive the part of a shard that this rank lacks, into a new shard."""
        wanted, kept = plan.wanted(self.rank), plan.kept(self.rank)
        assert wanted is not None
        messages = plan.receives(self.rank)
        held = sum(map(volume_of, (*(message.box for message in messages), *([kept] if kept else []))))
        made = torch.zeros if held < volume_of(wanted) else torch.empty
        result = made(_shape(wanted), dtype=dtype, device=self.device)
        late: list[Callable[[], object]] = []
        ops = []
        for message in messages:
            room, landing = landing_in(result, message.box, wanted)
            if (codec := self._codec(room, key)) is not None:
                landing = room.new_empty(codec.num_bytes(tuple(room.shape)), dtype=torch.uint8)
                late.append(partial(decode_into, room, codec, landing))
            elif landing is not room:
                late.append(partial(room.copy_, landing))
            where = message.sender, self.pipeline.group, plan.name, key[0], _part(key[2])
            ops.append(receive_op(sendable(landing), *where))
        self._arriving[key] = result, late
        return ops

    def _send(self, plan: ReshardPlan, x: Tensor, key: tuple[str, int, int]) -> list[dist.P2POp]:
        mine = plan.held(self.rank)
        assert mine is not None
        where = self.pipeline.group, plan.name, key[0], _part(key[2])
        ops = []
        for message in plan.sends(self.rank):
            part = part_of(x, message.box, mine)
            if (codec := self._codec(part, key)) is not None:
                part = encoded(part, codec)
            ops.append(send_op(sendable(part), message.receiver, *where))
        return ops

    def _codec(self, x: Tensor, key: tuple[str, int, int]) -> Codec | None:
        """Return the codec by which a message goes; None: as it is, as what passes beside hidden states does."""
        return None if key[1] else self._collectives.codec(tuple(x.shape), x.dtype, PASSED[key[0]])

    def _passed_on(self, outputs: object, at: int) -> list[Tensor]:
        """Return the results of the module of stage `at` for a micro-batch.

        Raises:
            LayoutError: these are no tensors of the shapes and dtypes that the plans have.
        """
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        ways = self._ways(at, "forward")
        held = [(_shape(plan.held(self.rank)), dtype) for _, plan, dtype in ways]
        found = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in outputs]
        if found != held:
            shards = ", and ".join(
                f"{shape}, {dtype}, of {plan.shape} as {plan.source}"
                for (shape, dtype), (_, plan, _) in zip(held, ways, strict=True)
            )
            raise LayoutError(
                f"pipeline, {ways[0][1].name}: the module gave {', '.join(map(str, found))}; rank {self.rank} passes "
                f"on its shard{'s' * (len(held) > 1)} {shards}\n  fix: {_counted(len(held))} for each micro-batch, of "
                "the pipeline's shape=, cut as rows() does, and dtype=; what passes beside has a plan in also="
            )
        return [x.detach() for x in outputs]

    def _gradient(self, grad: Tensor | None, plan: ReshardPlan, dtype: torch.dtype) -> Tensor:
        """Return the gradient of an arrived tensor, to go back by `plan`; zeros where the module does not use the
        tensor.
        """
        if grad is not None:
            return grad.detach()
        return torch.zeros(_shape(plan.held(self.rank)), dtype=dtype, device=self.device)

    def _taken(self, phase: str, i: int, micro_batch: int) -> Tensor:
        """Return the tensors that have arrived for a micro-batch, each in its place."""
        result, late = self._arriving.pop((phase, i, micro_batch))
        for land in late:
            land()
        return result

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        wants = self.has_backward and torch.is_grad_enabled()
        return tuple(
            self._taken("forward", i, fwd_chunk_id).requires_grad_(wants and _has_gradient(dtype))
            for i, (_, dtype) in enumerate(self.passing)
        )

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        coming = {i for i, *_ in self._ways(self.index, "dgrad")}
        return tuple(self._taken("dgrad", i, bwd_chunk_id) if i in coming else None for i in range(len(self.passing)))

    # ---------------------------------------------------------------------------- from stage to stage of the same ranks

    def set_local_fwd_input(self, prev_stage_outputs: object, mb_index: int) -> None:
        outputs = self._passed_on(prev_stage_outputs, self.index - 1)
        for i, plan, dtype in self._ways(self.index - 1, "forward"):
            self._arriving["forward", i, mb_index] = self._moved(plan, outputs[i], dtype, "forward", i), []

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        for i, plan, dtype in self._ways(self.index, "dgrad"):
            grad = self._gradient(next_stage_bwd_outputs[i], plan, dtype)
            self._arriving["dgrad", i, mb_index] = self._moved(plan, grad, dtype, "dgrad", i), []

    def _moved(self, plan: ReshardPlan, x: Tensor, dtype: torch.dtype, phase: str, number: int) -> Tensor:
        """Move a tensor at once, since all ranks of both stages come here together."""
        if plan.is_local:
            return cut(x, plan, self.rank)
        held, wanted, kept = plan.held(self.rank), plan.wanted(self.rank), plan.kept(self.rank)
        assert held is not None and wanted is not None
        key = (phase, number, -1)
        exchange([*self._receive(plan, dtype, key), *self._send(plan, x, key)])
        result = self._taken(*key)
        if kept is not None:
            landing_in(result, kept, wanted)[0].copy_(part_of(x, kept, held))
        return result

    # ---------------------------------------------------------------------- errors, which torch wraps in one of its own

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> object:
        with as_it_was():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> object:
        for begin in self.beginning:
            begin(self.steps)
        with as_it_was():
            return super().backward_one_chunk(*args, **kwargs)

    def forward_maybe_with_nosync(self, *args: object, **kwargs: object) -> object:
        made = super().forward_maybe_with_nosync(*args, **kwargs)
        return made if self.is_last else tree_map_only(Tensor, no_view, made)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if not IN_PARTS and backward_type != "full":
            if backward_type == "weight":
                return (), None  # they came with those of the inputs
            backward_type, bwd_kwargs, last_backward = "full", whole_backward(bwd_kwargs), True
        with nullcontext() if last_backward else self.mesh.accumulate():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        for finish in self.finishing:
            finish()

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.steps += 1
        self._arriving.clear()


def _shape(box: Box | None) -> tuple[int, ...]:
    assert box is not None
    return tuple(stop - start for start, stop in box)


def _part(micro_batch: int) -> str:
    return "" if micro_batch < 0 else f"of micro-batch {micro_batch}"


def _has_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _counted(tensors: int) -> str:
    return "one tensor" if tensors == 1 else f"{tensors} tensors"

"""`pipeline_stages`: a causal language model of transformers, cut by layers into stages on grids of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.pipeline_plan import PipelinePlan, Shape
from ndtp.algebra.schemes import BlockLayouts, block_layouts
from ndtp.algebra.volume import Volume
from ndtp.algebra.wire import Wire
from ndtp.errors import LayoutError
from ndtp.models.frame import Frame, Passage
from ndtp.models.hidden import Hidden, enter, leave
from ndtp.models.parallelize import parallelize
from ndtp.models.roles import hidden_size
from ndtp.nn.padding import row_multiple
from ndtp.ops.reductions import sum_over
from ndtp.pipelines.balance import Balance, taking
from ndtp.pipelines.cuts import Anatomy, Arrived, Traveller, anatomy_of, part_of_model
from ndtp.pipelines.pipeline import Pipeline
from ndtp.pipelines.stage import PipelineStage
from ndtp.pipelines.tied import TiedWeight, tie


def pipeline_stages(
    model: nn.Module,
    grids: Sequence[Grid],
    batch: int,
    length: int,
    *,
    scheme: str | Sequence[str] = "3d",
    layers: Sequence[int] | None = None,
    ranks: Sequence[Sequence[int]] | None = None,
    groups: int | None = None,
    mesh_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[ModelStage]:
    """The stages of this rank of a model of transformers: its layers cut into parts, each split over a grid of its own.

        stages = ndtp.pipeline_stages(model, [Grid(dp=2, x=2), Grid(x=2)], batch=8, length=512, scheme="1d-sp")
        schedule = Schedule1F1B(stages[0], n_microbatches=4, loss_fn=stages[0].loss)

    The first stage has the embedding, the last one what stands behind the layers, the head and the loss.  Names of
    parameters stay those of the dense model.  A weight that both ends share is on both: the two add their gradients at
    the end of a step, so equal optimizers keep it equal.  `model` stays as it is; drop it to give its memory back.

    Args:
        model: causal, dense, the same on every rank.
        batch, length: sequences of a micro-batch, on all ranks of a stage together, and tokens of each.
        scheme, ranks, groups: as for `ndtp.Pipeline`.
        layers: how many each stage has.  Default: as many each, the first stages one more where that leaves some.
        mesh_options: as for `ndtp.ProcessGrid`.
        options: as for `ndtp.parallelize`.

    Raises:
        LayoutError: a model that cannot be cut between its layers; layers, or sizes of a micro-batch, that do not fit.
        GridError: as `ndtp.Pipeline`.
    """
    anatomy = anatomy_of(model)
    parts = _parts(anatomy, len(grids), layers)
    schemes = [scheme] * len(grids) if isinstance(scheme, str) else list(scheme)
    blocks = [block_layouts(grid, each) for grid, each in zip(grids, schemes, strict=True)]
    cuts, shapes = _shapes(blocks, hidden_size(model), batch, length)
    layouts = [(block.input, block.output) for block in blocks]
    pipeline = Pipeline(grids, shapes, layouts=layouts, ranks=ranks, groups=groups)
    also = [] if anatomy.balance is None else [(_passed_whole(pipeline, anatomy.balance.shape), torch.float32)]
    stages = []
    for i in pipeline.stages_of(dist.get_rank()):
        traveller = Traveller()
        part = part_of_model(model, anatomy, parts[i], traveller)
        mesh = pipeline.mesh(i, **(mesh_options or {}))
        part.ndtp_stage = i  # type: ignore[assignment]  # hidden states come from another stage in the form of recognised layers
        part.ndtp_cuts_sequences = cuts  # type: ignore[assignment]
        parallelize(part, mesh, scheme=schemes[i], **options)
        data = blocks[i].input.dims[0][: _data_axes(blocks[i])]
        module = StageModule(part, traveller, (batch, length), Layout(grids[i], data), mesh.rank, takes_ids=i == 0)
        module.balance_with(anatomy.balance)
        wire = Wire.of(options.get("wire"), options.get("recipe"))
        dtype = next(model.parameters()).dtype
        stages.append(ModelStage(module, pipeline, i, dtype=dtype, wire=wire, also=also))
    tied = tie(stages, pipeline, anatomy.shared) if anatomy.shared and len(grids) > 1 else []
    for stage in stages:
        stage.tied, stage.settling = tied, [*stage.settling, *(weight.copy for weight in tied)]
    return stages


def _parts(anatomy: Anatomy, count: int, layers: Sequence[int] | None) -> list[range]:
    total = len(anatomy.layers)
    sizes = list(layers or [total // count + (i < total % count) for i in range(count)])
    if len(sizes) != count or sum(sizes) != total or min(sizes) < 1:
        raise LayoutError(
            f"pipeline: {total} layers as {sizes} for {count} stages\n  fix: layers=, one number for each stage, at "
            f"least 1, {total} together"
        )
    return [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(count)]


def _passed_whole(pipeline: Pipeline, shape: tuple[int, int]) -> PipelinePlan:
    """The plan of a small tensor that each rank of every stage has whole."""
    bare = [(Layout(grid, None, None), Layout(grid, None, None)) for grid in pipeline.grids]
    return PipelinePlan(pipeline.grids, shape, layouts=bare, ranks=pipeline.ranks_of)


def _data_axes(block: BlockLayouts) -> int:
    """Return the number of leading axes that split rows and no weight, such as `dp`."""
    weights = {*block.up_weight.axes, *block.down_weight.axes}
    return next((i for i, axis in enumerate(block.input.dims[0]) if axis in weights), len(block.input.dims[0]))


def _shapes(blocks: Sequence[BlockLayouts], hidden: int, batch: int, length: int) -> tuple[bool, list[Shape]]:
    """Return whether sequences are cut, and the shapes [rows, features] of a micro-batch's hidden states on each stage,
    with the padding of its grid.

    Where the ranks of one stage do not divide the sequences, all stages have tokens of every sequence: what passes
    between them lies in one order.

    Raises:
        LayoutError: sequences that `dp` does not divide, or not into what its rows are padded to.
    """
    found: list[tuple[int, int]] = []
    counts = []
    for i, block in enumerate(blocks):
        grid = block.input.grid
        data = block.input.dims[0][: _data_axes(block)]
        outside, splits = Layout(grid, data, None), grid.size(data)
        multiple = row_multiple(block.plans("model"), outside)
        if batch % splits:
            raise LayoutError(
                f"pipeline: a micro-batch of {batch} sequences, which {' '.join(f'{a}={grid[a]}' for a in data)} of "
                f"stage {i} do not divide\n  fix: batch={-(-batch // splits) * splits}"
            )
        padded = -(-batch // splits // multiple) * multiple * splits
        weights = {*block.up_weight.axes, *block.down_weight.axes}
        width = grid.size([axis for axis in grid if axis in weights])
        found.append((padded * length, -(-hidden // width) * width))
        counts.append((padded, splits, multiple * splits))
    cuts = any(padded != batch for padded, *_ in counts)
    if any(padded != batch for padded, *_ in counts) and any(splits > 1 for _, splits, _ in counts):
        whole = max(each for *_, each in counts)
        raise LayoutError(
            f"pipeline: a micro-batch of {batch} sequences is padded between the parts of dp on grids "
            f"{', '.join(str(block.input.grid) for block in blocks)}\n"
            f"  fix: batch={-(-batch // whole) * whole}, or no dp"
        )
    if cuts:
        rows = [-(-length // multiple) * multiple * batch for *_, multiple in counts]
        found = [(each, width) for each, (_, width) in zip(rows, found, strict=True)]
    return cuts, list(found)


class StageModule(nn.Module):
    """A stage's part of a model: [sequences, length] ids or a shard of hidden states in, such a shard or logits out.

    ids      [batch / dp, length]      this rank's sequences of a micro-batch
    hidden   [rows / .., features / ..]  as the stage's layout says
    logits   [rows / .., vocabulary / ..]
    sums     [2, experts]                beside hidden states, of a model whose routers have a loss; see `Balance`

    Other tensors, such as attention masks, are those of a whole micro-batch, [batch, ..], on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        traveller: Traveller,
        shape: tuple[int, int],
        sequences: Layout,
        rank: int,
        takes_ids: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.batch, self.sequences = shape[0], sequences
        self.mine = sequences.slices(rank, shape[:1])[0]
        self.lead = (self.mine.stop - self.mine.start, shape[1])
        self.takes_ids = takes_ids
        self.logits: Passage | None = None
        self.gives_logits = False
        self.traveller = traveller
        self.balance: Balance | None = None
        self.routed: list[Tensor] = []

    @property
    def split(self) -> Any:
        report: Any = self.model.ndtp_report
        return report.split

    def balance_with(self, balance: Balance | None) -> None:
        """Take the logits of this stage's routers from now on."""
        self.balance = balance
        if balance is not None:
            for router in balance.routers(self.model):
                router.register_forward_hook(taking(balance, self.routed))

    def forward(self, x: Tensor, sums: Tensor | None = None, **kwargs: Any) -> Any:
        ids = x
        if not self.takes_ids:
            # Only their number counts; padding among them would be worth a warning to some models.
            config: object = self.model.config
            ids = torch.full(self.lead, int(getattr(config, "pad_token_id", None) == 0), device=x.device)
            self.traveller.hidden = enter(x.view_as(x), self._passage())
        elif tuple(x.shape) != self.lead:
            raise LayoutError(f"pipeline: the first stage takes ids {self.lead}, these are {tuple(x.shape)}")
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and value.dim() and len(value) == self.batch:
                kwargs[name] = value[self.mine]
        if self.balance is not None:
            kwargs["output_router_logits"] = False  # which would make a loss of this stage's layers alone
        self.routed.clear()
        found: Any = None
        try:
            found = self.model(input_ids=ids, use_cache=False, **kwargs)
        except Arrived:
            hidden = self.traveller.hidden
        finally:
            self.traveller.hidden = None
            routed, self.routed[:] = list(self.routed), []
        if self.balance is not None:
            sums = self._summed(self.balance.sums(routed, kwargs.get("attention_mask")), sums)
        if found is None:
            return self._left(hidden) if sums is None else (self._left(hidden), sums)
        self.logits = found.logits.passage if isinstance(found.logits, Hidden) else None
        logits: Any = leave(found.logits)
        logits.ndtp_sums, logits.ndtp_stage, self.gives_logits = sums, self, True
        return logits

    def _summed(self, mine: Tensor, before: Tensor | None) -> Tensor:
        """Return the balance sums of all sequences, over this stage's layers and the layers of stages before."""
        frame: Frame = self.split.frame
        axes, bare = frame.mesh.grid.nontrivial(frame.outside.dims[0]), Layout(frame.mesh.grid, None, None)
        mine = sum_over(mine.to(frame.mesh.device_type), bare, axes, frame.mesh, "routers")
        return mine if before is None else before + mine

    def _passage(self) -> Passage:
        split = self.split
        frame: Frame = split.frame
        rows, across = frame.rows_of(self.lead)
        lies = (frame, split.layouts.input, self.lead, rows, split.hidden, split.width)
        return Passage(*lies, across=across, came_from="stage before")

    def _left(self, hidden: Any) -> Tensor:
        if not isinstance(hidden, Hidden) or hidden.passage != self._passage():
            raise LayoutError(f"pipeline: the layers of a stage gave {hidden!r}, not {self._passage()}")
        return leave(hidden)

    def loss(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        own: Any = self.model
        last: StageModule = getattr(logits, "ndtp_stage", self)
        if not last.gives_logits:
            raise LayoutError(
                "pipeline: the loss of a stage that gives no logits was called with other logits than the last stage "
                "gave\n  fix: loss_fn=stages[-1].loss, with the stages of a rank in their order"
            )
        whole: object = logits if last.logits is None else enter(logits.view_as(logits), last.logits)
        loss: Tensor = own.loss_function(logits=whole, labels=labels, vocab_size=own.config.vocab_size, **kwargs)
        if self.balance is None:
            return loss
        sums = getattr(logits, "ndtp_sums", None)
        if sums is None:
            raise LayoutError(
                "pipeline: the loss of the routers goes with the logits that the last stage gave; these are others\n"
                "  fix: stage.loss of those, as they are"
            )
        return loss + self.balance.coefficient * self.balance.loss(sums).to(loss)


class ModelStage(PipelineStage):
    """A stage of a model of transformers; see `pipeline_stages`.

    Attributes:
        model: this stage's part, on the grid; its parameters are what an optimizer gets.
        tied: the weights that the first and the last stage share, of which this rank has a part.
    """

    submod: StageModule
    tied: list[TiedWeight]
    shares_names = True

    @property
    def model(self) -> nn.Module:
        return self.submod.model

    def rows(self, whole: Tensor, micro_batches: int, layout: Layout | None = None) -> Tensor:
        """This rank's sequences of every micro-batch of ids or labels [sequences, length], one behind the other."""
        return super().rows(whole, micro_batches, self.submod.sequences if layout is None else layout)

    def volume(self, micro_batches: int) -> Volume:
        """Return the traffic of a step, including the weights that two stages share."""
        return sum((weight.volume for weight in self.tied), super().volume(micro_batches))

    def loss(self, logits: Tensor, labels: Tensor, **kwargs: object) -> Tensor:
        """The dense model's own loss of a micro-batch, on every rank of the last stage: a schedule's `loss_fn`.

        logits   [rows / .., vocabulary / ..]  what the last stage gave
        labels   [batch / dp, length]          `rows` of the labels, shifted by the model's own loss
        """
        return self.submod.loss(logits, labels, **kwargs)

"""The time of a training step: what a rank computes, what it waits for, and how stages take turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from ndtp.algebra.wire import row_bytes
from ndtp.planner.block_cost import Block, messages
from ndtp.planner.grids import FOLDED, PerGrid
from ndtp.planner.hardware import Hardware
from ndtp.planner.time_model import Network
from ndtp.planner.training.arithmetic import Arithmetic, Both, Compute
from ndtp.planner.training.memory import deepest, held, optimizer_ranks
from ndtp.planner.training.practice import Practice
from ndtp.planner.training.splits import Splits
from ndtp.planner.training.transformer import Transformer

# Kernels of a layer that a host starts, forward and backward: those outside of experts, and those of a router with what
# puts rows in order; and those of one expert, whose six products cast and scale what enters them where it has 8 bits.
KERNELS = {"fused": 60, "one by one": 120}
ROUTER_KERNELS = 100
EXPERT_KERNELS = {"float8": 18, "": 6}
# Kernels that the host cannot start ahead of the device, because it waits for the counts of rows first.  Fitted.
COUNTED_KERNELS = 60
# Of a kernel's launch by a driver: what Python, autograd and the modules around it take.
HOST = {"fused": 5.0, "one by one": 3.0}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they go to; all that is exposed adds up to the `total`.

    Attributes:
        products, cores, moved: of the fullest stage: products, attention cores, and what memory bounds.
        again: recomputation of these in backward.
        tensor, weights, context, experts, stages, data: waited for: collectives over x and y; over z; over cp; the
            rows of experts; sends between stages; sums and gathers over data-parallel ranks.
        bubble: stages that wait for their turn.
        optimizer, host: the optimizer's step, and what no device does.
    """

    products: PerGrid
    cores: PerGrid
    moved: PerGrid
    again: PerGrid
    tensor: PerGrid
    weights: PerGrid
    context: PerGrid
    experts: PerGrid
    stages: PerGrid
    data: PerGrid
    bubble: PerGrid
    optimizer: PerGrid
    host: PerGrid

    @property
    def total(self) -> PerGrid:
        return sum(getattr(self, field.name) for field in fields(self))

    def parts(self) -> dict[str, float]:
        """Return the parts of one split's time."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True)
class Waits:
    """Seconds that a part of the model's collectives take, of one micro-batch."""

    tensor: Both
    weights: Both
    experts: Both


@dataclass(frozen=True)
class TrainingJob:
    """A training task: a model, batches of so many sequences, one machine, and the practice of one software."""

    model: Transformer
    batch: int
    hardware: Hardware
    practice: Practice

    def step(self, splits: Splits, order: Sequence[str]) -> StepTime:
        mixture = self.model.mixture
        if mixture is not None and self.practice.fold_experts:
            fits = np.asarray(mixture.count % (splits.e * splits.y) == 0)
            splits = replace(splits, fold=np.where(fits, 1 << FOLDED["y"], 0))
        return _Clock(self, splits, splits.network(order, self.hardware)).step()


@dataclass(frozen=True)
class _Clock:
    job: TrainingJob
    splits: Splits
    network: Network

    def __post_init__(self) -> None:
        s = self.splits
        micros = np.maximum(1, -(-self.job.batch // (s.shares * s.micro)))
        arithmetic = Arithmetic(self.job.model, self.job.hardware, self.job.practice, s, micros)
        object.__setattr__(self, "arithmetic", arithmetic)

    arithmetic: Arithmetic = None  # type: ignore[assignment]

    def step(self) -> StepTime:
        job, s, model, practice = self.job, self.splits, self.job.model, self.job.practice
        tokens = self.arithmetic.tokens
        micros = np.maximum(1, -(-job.batch // (s.shares * s.micro)))
        per_stage = deepest(model, s)
        blocks = model.blocks(tokens)
        share = per_stage / model.layers  # of all layers, on the fullest stage

        layers = Compute()
        tensor = weights = experts = Both(0.0, 0.0)
        busy = Both(0.0, 0.0)  # layers with their tensor-parallel waits: what z's gathers hide under
        for block in blocks:
            compute = self.arithmetic.layer(block)
            waits = self._waits(block)
            exposed = self._beside(compute.products, waits.tensor)
            count = block.times * share
            layers = layers + compute.times(count)
            tensor = tensor + exposed.times(count)
            experts = experts + waits.experts.times(count)
            weights = weights + waits.weights.times(count)
            busy = busy + (compute.sum + exposed + waits.experts).times(count)
        if practice.overlap_experts:  # beside another micro-batch's layers
            hidden = self._exposed(layers.sum, experts)
            busy, experts = busy + hidden + experts.times(-1), hidden
        again, again_tensor, again_experts = self._again(layers, tensor, experts)
        busy = busy + Both(0.0, again + again_tensor + again_experts)
        context = self._context(layers.cores).times(per_stage)
        exposed_weights = self._under(busy, weights)

        ends = self.arithmetic.ends()
        ends_tensor = self._waits(model.ends(tokens)).tensor
        # Where stages have layers alike the head comes on top; where some have one less, it stands in for that one.
        layer = (layers.sum.total + again + tensor.total) / per_stage
        alike = model.layers % s.pp == 0
        part = np.where(alike, 1.0, np.maximum(0.0, 1 - layer / ends.sum.total))

        stage = (
            layers.sum.total + ends.sum.total * part + again + tensor.total + again_tensor
            + ends_tensor.total * part + context.total + experts.total + again_experts + exposed_weights.total
        )  # fmt: skip
        host = np.maximum(self._counted(), self._launches() - stage)
        bubble = (s.pp - 1) * (stage + host - ends.sum.total * part * (np.asarray(s.pp) > 1)) / s.virtual
        data = self._data(busy, micros)
        parameters = held(model, s)
        sharded = optimizer_ranks(practice, s)
        return StepTime(
            products=micros * (layers.products.total + ends.products.total * part),
            cores=micros * layers.cores.total,
            moved=micros * (layers.moved.total + ends.moved.total * part),
            again=micros * again,
            tensor=micros * (tensor.total + again_tensor + ends_tensor.total * part),
            weights=micros * exposed_weights.total,
            context=micros * context.total,
            experts=micros * (experts.total + again_experts),
            stages=self._stages(micros),
            data=data,
            bubble=bubble,
            optimizer=self.arithmetic.optimizer(parameters / sharded),
            host=micros * host,
        )

    def _counted(self) -> PerGrid:
        """Return the time in which devices have nothing to do, since the host has waited for how many rows each expert
        gets.
        """
        practice, mixture = self.job.practice, self.job.model.mixture
        if mixture is None or practice.graphs == "step":
            return 0.0
        each = HOST["fused" if practice.fused else "one by one"] * self.job.hardware.launch_us * 1e-6
        return COUNTED_KERNELS * each * deepest(self.job.model, self.splits) * mixture.layers / self.job.model.layers

    def _launches(self) -> PerGrid:
        """Return the time that the host takes to start the kernels of a micro-batch, of which devices hide what they
        take themselves.
        """
        practice, mixture = self.job.practice, self.job.model.mixture
        kind = "fused" if practice.fused else "one by one"
        kernels: PerGrid = KERNELS[kind] if practice.graphs == "none" else 0
        if mixture is not None:
            own = mixture.count / self.splits.grids.over(mixture.count)
            experts = EXPERT_KERNELS.get(practice.dtype, EXPERT_KERNELS[""]) * own
            part = mixture.layers / self.job.model.layers
            kernels = kernels + part * (experts + ROUTER_KERNELS * (practice.graphs == "none"))
        if practice.graphs == "step":
            return 0.0
        each = HOST[kind] * self.job.hardware.launch_us * 1e-6
        again = 1 + practice.recomputed[0] / 3  # a forward is a third of both
        return (kernels + self._calls()) * again * each * deepest(self.job.model, self.splits)

    def _calls(self) -> PerGrid:
        """Return the number of collectives of a layer, each of which the host starts as it does a kernel."""
        if self.job.practice.graphs != "none":
            return 0
        found: PerGrid = 0
        for block in self.job.model.blocks(1):
            part = block.times / self.job.model.layers
            for message in messages(block, self.splits.grids, 0, int(self.job.practice.regather)):
                found = found + part * (np.asarray(self.network.size(message.axis)) > 1)
        return found

    def _waits(self, block: Block) -> Waits:
        """The collectives of one block and one micro-batch.  Sums over replicas come once a step: see `_data`."""
        practice = self.job.practice
        found: dict[tuple[str, str], PerGrid] = {}
        for message in messages(block, self.splits.grids, 0, int(practice.regather)):
            if message.phase == "wgrad" and message.collective == "all_reduce":
                continue
            of_weight = message.tensor.endswith(" B") or message.tensor.endswith(" dB")
            kind = "weights" if of_weight and message.axis == "z" else "tensor"
            if message.axis in ("experts", "counts") or (message.collective == "all_to_all" and message.axis == "x"):
                kind = "experts" if block.experts else kind
            size = practice.reduce_bytes if message.tensor.endswith(" dB") else 2
            received = np.asarray(message.num_bytes(size, practice.wire), dtype=np.float64)
            phase = "forward" if message.phase == "forward" else "backward"
            if practice.once_per_node and message.axis == "experts":
                nodes, picks = self.network.reach_of("experts").nodes, block.top_k
                # Nodes that a token goes to, of as many as it has experts: drawn at random, among some of them.
                reached = nodes * (1 - (1 - 1 / nodes) ** picks)
                reached = np.minimum(reached, practice.expert_nodes) if practice.expert_nodes else reached
                received = received * np.where(nodes > 1, reached / picks, 1.0)
            seconds = self.network.seconds(message.collective, message.axis, received)
            found[kind, phase] = found.get((kind, phase), 0.0) + seconds
        return Waits(*(
            Both(found.get((kind, "forward"), 0.0), found.get((kind, "backward"), 0.0))
            for kind in ("tensor", "weights", "experts")
        ))  # fmt: skip

    def _beside(self, products: Both, waits: Both) -> Both:
        """Return the exposed time of tensor-parallel collectives that run in chunks beside their products."""
        chunks, contention = self.job.practice.tensor_chunks, self.job.hardware.contention

        def exposed(compute: PerGrid, wait: PerGrid) -> PerGrid:
            hidden = np.minimum(compute, wait) * (1 - 1 / chunks)
            return wait - hidden * (1 - contention)

        return Both(exposed(products.forward, waits.forward), exposed(products.backward, waits.backward))

    def _again(self, layers: Compute, tensor: Both, experts: Both) -> tuple[PerGrid, PerGrid, PerGrid]:
        products, cores, stops = self.job.practice.recomputed
        name, last = self.job.practice.recompute, self.job.model.last
        if name == "mlp":
            products = self.job.model.in_mlp
        whole = products > 0 and name not in ("products", "latent", "mlp")
        moved = {"products": 1.0, "activations": 0.5, "latent": 0.5, "mlp": 0.5}.get(name, products)
        again = (
            (products - stops * (last if name == "mlp" else products * last)) * layers.products.forward
            + cores * layers.cores.forward
            + moved * layers.moved.forward
        )
        waits = products if whole else 0.0
        return again, waits * tensor.forward, waits * experts.forward

    def _under(self, busy: Both, waits: Both) -> Both:
        """Return the exposed time of collectives that are started a layer ahead."""
        return self._exposed(busy, waits) if self.job.practice.overlap_weights else waits

    def _exposed(self, busy: Both, waits: Both) -> Both:
        """Return what is waited for of collectives that run beside other work, and what that loses by them."""
        contention = self.job.hardware.contention

        def exposed(compute: PerGrid, wait: PerGrid) -> PerGrid:
            return np.maximum(wait - compute, contention * np.minimum(wait, compute))

        return Both(exposed(busy.forward, waits.forward), exposed(busy.backward, waits.backward))

    def _context(self, cores: Both) -> Both:
        """Return the exposed time of one layer's keys and values of other context-parallel ranks, and of their
        gradients.
        """
        m, s, practice = self.job.model, self.splits, self.job.practice
        per_stage = deepest(m, s)
        received = self.arithmetic.rows / s.x * 2 * m.keys * m.head / s.y * (s.cp - 1)
        # Causal ranks need half of them; round the ring all of them go, and their gradients as they are computed.
        back = "activation_gradients" if practice.gather_context else ""
        one, grads = (
            self.network.seconds("all_gather", "cp", received * row_bytes(m.head, 2, practice.wire, kind) / m.head)
            for kind in ("activations", back)
        )
        wait = Both(one, one + grads)
        if practice.gather_context:
            return wait
        one_core = Both(cores.forward / per_stage, cores.backward / per_stage)
        return self._under(one_core, wait)

    def _stages(self, micros: object) -> object:
        """Sends between stages: waited for by each micro-batch, or by the first and the last alone."""
        m, s, hardware = self.job.model, self.splits, self.job.hardware
        spread = s.x * s.y
        size = self.arithmetic.rows * m.hidden * 2.0 / spread
        link, near = hardware.inter, hardware.intra
        crosses = self.network.crosses("pp")
        rate = np.where(crosses, link.bandwidth_gbs, near.bandwidth_gbs) * 1e9
        latency = np.where(crosses, link.latency_us, near.latency_us) * 1e-6
        one = (size / rate + latency) * (np.asarray(s.pp) > 1)
        count = (s.pp - 1) if self.job.practice.overlap_stages else micros * s.virtual + (s.pp - 1)
        return 2 * one * count

    def _data(self, busy: Both, micros: PerGrid) -> PerGrid:
        """Sums of gradients over replicas, and, of an optimizer that is sharded, the new weights."""
        s, practice = self.splits, self.job.practice
        parameters = held(self.job.model, s)
        copies = s.replicas
        parts = (copies - 1) / copies
        form = None if practice.wire is None else practice.wire.format("weight_gradients")
        size = practice.reduce_bytes if form is None else min(form.itemsize, practice.reduce_bytes)
        if practice.shard_optimizer:
            sums = self.network.seconds("reduce_scatter", "replicas", parameters * size * parts)
            new = self.network.seconds("all_gather", "replicas", parameters * 2.0 * parts)
        else:
            sums = self.network.seconds("all_reduce", "replicas", 2 * parameters * size * parts)
            new = 0.0
        if not practice.overlap_data:
            return sums + new
        last = 1.0 / deepest(self.job.model, s)  # of the layer that is finished last
        hidden = self._under(busy, Both(new, sums))
        return np.maximum(hidden.backward, last * sums) + np.maximum(hidden.forward, last * new)

"""The arithmetic of a rank for one micro-batch: products by size, attention cores by kind, the rest by bytes. Pure.

Bytes are counted per element that a fused kernel reads and writes once.  Both backward's halves of a product take what
its forward takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ndtp.planner.block_cost import Block, gemms
from ndtp.planner.grids import PerGrid
from ndtp.planner.hardware import Hardware
from ndtp.planner.time_model import gemm_seconds
from ndtp.planner.training.practice import Practice
from ndtp.planner.training.splits import Splits
from ndtp.planner.training.transformer import Transformer

# Bytes that are read and written per element, forward and backward, where kernels are fused and elements have two.
NORM = (4.0, 6.0)  # in and out; gradient and input in, gradient out
RESIDUAL = (6.0, 6.0)  # two in, one out
DROPOUT = (1.0, 5.0)  # its mask; gradient and mask in, gradient out
ACTIVATION = (4.0, 6.0)
GATED = (6.0, 10.0)  # per feature of one half
ROTARY = (4.0, 4.0)
SCORES = (8.0, 14.0)  # of an attention core that writes them: product out, softmax in and out, second product in
SCORES_DROPOUT = (5.0, 7.0)
LOSS = (14.0, 10.0)  # logits in fp32, read twice; probabilities and gradients
EXPERTS = (16.0, 16.0)  # rows put in order, sent, and added up
CAST = (4.0, 4.0)  # to float8, as it is and transposed; of what enters a product, and of its gradient
# Operation by operation, with norms, softmax and rotary embeddings in fp32, as eager frameworks do them.
UNFUSED = 4.0
# Per parameter: gradient in, the master weight and two moments in and out, the weight out; the gradient's norm, zeros.
OPTIMIZER = 4.0 + 24.0 + 2.0 + 4.0 + 4.0

# Flops of an attention core's backward over its forward's, in a kernel that makes scores again.
FLASH_BACKWARD = 2.5
# Tokens of a sequence at which such a kernel reaches half of its rate, and features of a head.
HALF_SEQUENCE = 400.0
HALF_HEAD = 32.0


@dataclass(frozen=True)
class Both:
    """Seconds of forward and of backward."""

    forward: PerGrid
    backward: PerGrid

    def __add__(self, other: Both) -> Both:
        return Both(self.forward + other.forward, self.backward + other.backward)

    def times(self, count: object) -> Both:
        return Both(self.forward * count, self.backward * count)

    @property
    def total(self) -> PerGrid:
        return self.forward + self.backward


NOTHING = Both(0.0, 0.0)


@dataclass(frozen=True)
class Compute:
    """Seconds of a part of the model on one rank.

    Attributes:
        moved: what is bound by memory.
    """

    products: Both = NOTHING
    cores: Both = NOTHING
    moved: Both = NOTHING

    def __add__(self, other: Compute) -> Compute:
        return Compute(self.products + other.products, self.cores + other.cores, self.moved + other.moved)

    def times(self, count: object) -> Compute:
        return Compute(self.products.times(count), self.cores.times(count), self.moved.times(count))

    @property
    def sum(self) -> Both:
        return self.products + self.cores + self.moved


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of one model on one machine, in many splits at once.

    Attributes:
        micros: micro-batches of a step.
    """

    model: Transformer
    hardware: Hardware
    practice: Practice
    splits: Splits
    micros: PerGrid = 1

    @property
    def tokens(self) -> PerGrid:
        """Rows of a micro-batch over all ranks of a stage."""
        return self.splits.micro * self.model.sequence * self.splits.shares

    @property
    def rows(self) -> PerGrid:
        """Rows of a micro-batch that the ranks along x and y work on together."""
        return self.splits.micro * self.model.sequence / self.splits.cp

    def layer(self, block: Block) -> Compute:
        """One block of a layer, with its norm and its residual."""
        compute = Compute(self._products(block, self.practice.dtype), moved=self._around(block))
        return compute + Compute(cores=self._core()) if block.name == "attention" else compute

    def ends(self) -> Compute:
        """The head and its loss, and the last norm.  An embedding reads as many rows as it writes."""
        m, s = self.model, self.splits
        wide = "bfloat16" if self.practice.dtype == "float8" else self.practice.dtype
        logits = self.rows * m.vocabulary / (s.x * s.y)
        outside = self._outside() * m.hidden
        fused = 1.0 if self.practice.fused else 1.5
        moved = self._bytes((LOSS[0] * logits * fused, LOSS[1] * logits * fused), (8.0 * outside, 8.0 * outside))
        return Compute(self._products(m.ends(self.tokens), wide), moved=moved)

    def optimizer(self, parameters: PerGrid) -> PerGrid:
        """Seconds of a step of AdamW on so many parameters of a rank."""
        return OPTIMIZER * parameters / (self.hardware.memory_gbs * 1e9)

    def _products(self, block: Block, dtype: str) -> Both:
        count: PerGrid = 1.0
        if block.experts:  # one by one, and the fullest rank is waited for
            count = block.experts / self.splits.grids.over(block.experts)
        seconds = sum(gemm_seconds(self.hardware, m, n, k, dtype, count) for m, n, k in gemms(block, self.splits.grids))
        if block.experts:
            seconds = seconds * self.practice.imbalance
        return Both(seconds, 2 * seconds)

    def _outside(self) -> PerGrid:
        """Rows of hidden features that a rank has between blocks."""
        s = self.splits
        if self.practice.sequence_parallel:
            return self.rows / (s.x * s.y)
        return self.rows / s.x  # x splits features of rows that are not split over it

    def _around(self, block: Block) -> Both:
        m, s, practice = self.model, self.splits, self.practice
        inside = self.rows * block.top_k / (s.x * s.y)  # of features inside of the block
        outside = self._outside() * m.hidden
        norm = (NORM[0] * outside, NORM[1] * outside)
        if m.parallel and block.name != "attention":
            norm = (0.0, 0.0)
        parts = [norm, (RESIDUAL[0] * outside, RESIDUAL[1] * outside)]
        if practice.dropout:
            parts.append((DROPOUT[0] * outside, DROPOUT[1] * outside))
        if block.name == "attention":
            turned = inside * (m.heads + m.keys) * m.head
            parts.append((ROTARY[0] * turned, ROTARY[1] * turned))
        else:
            each = GATED if len(block.outs) == 2 else ACTIVATION
            parts.append((each[0] * inside * block.inner, each[1] * inside * block.inner))
        if block.experts:
            sent = self._outside() * block.top_k * m.hidden
            parts.append((EXPERTS[0] * sent, EXPERTS[1] * sent))
        if practice.dtype == "float8":
            entering = inside * (m.hidden + block.inner)
            parts.append((CAST[0] * entering, CAST[1] * inside * (sum(block.outs) + m.hidden)))
        # A gradient is added to what earlier micro-batches left, but over z, where it is summed up at once.
        held = block.parameters / ((s.e if block.experts else 1) * s.z * s.x * s.y)
        adds = (np.asarray(s.z) == 1) & (np.asarray(self.micros) > 1)
        added = (0.0, np.where(adds, 2.0 * practice.reduce_bytes * held, 0.0))
        scale = self._width * (1.0 if practice.fused else UNFUSED)
        return self._bytes(*((forward * scale, backward * scale) for forward, backward in parts), added)

    @property
    def _width(self) -> float:
        """Return the bytes of an activation over the two for which the constants of this module stand."""
        return {"float32": 2.0, "float64": 4.0}.get(self.practice.dtype, 1.0)

    def _bytes(self, *parts: Sequence[PerGrid]) -> Both:
        rate = self.hardware.memory_gbs * 1e9
        return Both(sum(part[0] for part in parts) / rate, sum(part[1] for part in parts) / rate)

    def _core(self) -> Both:
        m, s = self.model, self.splits
        rows = self.rows * m.heads / (s.x * s.y)  # of one head
        if self.practice.attention == "core":
            return self._written_core(rows)
        length = m.sequence / s.cp
        reached = length / (length + HALF_SEQUENCE) * (m.head / (m.head + HALF_HEAD)) * (128 + HALF_HEAD) / 128
        flops = 4.0 * rows * m.attended * m.head
        wide = self.practice.dtype if self._width > 1 else ""
        seconds = flops / (self.hardware.attention_rate(self.practice.attention, wide) * reached)
        return Both(seconds, FLASH_BACKWARD * seconds)

    def _written_core(self, rows: PerGrid) -> Both:
        m, hardware = self.model, self.hardware
        dtype = "bfloat16" if self.practice.dtype == "float8" else self.practice.dtype
        heads = rows / m.sequence  # a product each
        one = gemm_seconds(hardware, m.sequence, m.sequence, m.head, dtype)
        two = gemm_seconds(hardware, m.sequence, m.head, m.sequence, dtype)
        products = heads * (one + two - 2 * hardware.launch_us * 1e-6)
        per_score = [plain + more * self.practice.dropout for plain, more in zip(SCORES, SCORES_DROPOUT, strict=True)]
        scores = rows * m.sequence
        moved = self._bytes([each * scores * (1 if self.practice.fused else 2) for each in per_score])
        return Both(np.asarray(products), 2 * products) + moved

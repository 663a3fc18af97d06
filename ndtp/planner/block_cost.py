"""What a block costs on a grid, in closed form and for many grids at once: volume, memory, local products.  Pure.

A block is two products with the first's result, or a part of it, entering the second: an MLP, a gated MLP, or the
projections around attention.  It lies as the 3D scheme says, of which 1D (x = z = 1), 2D (z = 1), FSDP (z alone) and
data parallelism (dp alone) are special cases.  `MatMulPlan.volume` of the two plans gives the same numbers,
one grid at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndtp.algebra.grid import divisors
from ndtp.algebra.volume import lower_bound

AXES = ("dp", "z", "x", "y")

# Of a tensor's dims.  Costs are exact up to it, and their products far below what a float holds.
LARGEST_SIZE = 10**15


@dataclass(frozen=True)
class Block:
    """`down(f(up(A)))` with `up` [tokens, hidden] -> the sizes `outs`, side by side, and `down` inner -> hidden.

    A head is one product, and ends there: its `inner` is 0.  An embedding alone has no `outs` either.

    Attributes:
        outs: (ffn,) for an MLP, (ffn, ffn) for a gated one, (queries, keys, values) for attention.
        inner: the features that enter `down`; 0 where nothing does.
        looked_up: rows of a table in which hidden features are looked up before.
        tied: the table is the weight of `up`: it takes no memory of its own.
        heads: sizes that y must divide, such as the number of query heads.
        key_heads, key_features: those of keys and values together. Where y divides the features of each but not their
            heads, these are gathered over y, for every rank to take those that its queries use.
        times: how often it is repeated in a layer.
    """

    tokens: int
    hidden: int
    outs: tuple[int, ...]
    inner: int
    heads: tuple[int, ...] = ()
    key_heads: int = 0
    key_features: int = 0
    name: str = "mlp"
    looked_up: int = 0
    tied: bool = False
    times: int = 1

    @classmethod
    def mlp(cls, tokens: int, hidden: int, ffn: int, gated: bool = False) -> Block:
        return cls(tokens, hidden, (ffn,) * (1 + gated), ffn, name="gated mlp" if gated else "mlp")

    @classmethod
    def attention(
        cls, tokens: int, hidden: int, heads: int, kv_heads: int | None = None, head: int | None = None
    ) -> Block:
        """The projections into queries, keys and values as one product, and the one out of the heads."""
        head = head or hidden // heads
        kv_heads = kv_heads or heads
        sizes = (heads * head, kv_heads * head, kv_heads * head)
        return cls(tokens, hidden, sizes, heads * head, (heads,), kv_heads, 2 * kv_heads * head, "attention")

    @classmethod
    def vocabulary(cls, tokens: int, hidden: int, classes: int, tied: bool = False, head: bool = True) -> Block:
        """The table of an embedding, and the head that leads to as many classes, with its loss in chunks of rows."""
        return cls(tokens, hidden, (classes,) * head, 0, name="vocabulary", looked_up=classes, tied=tied and head)

    @property
    def bounds(self) -> tuple[tuple[int, int, int], ...]:
        """(M, K, N) of the products."""
        both = (self.tokens, self.hidden, sum(self.outs)), (self.tokens, self.inner, self.hidden)
        return tuple(product for product in both if all(product))

    def lower_bound(self, ranks: int) -> float:
        """Elements that a rank must receive in forward: the sum of the products' bounds."""
        return self.times * sum(lower_bound(m, n, k, ranks) for m, k, n in self.bounds)

    @property
    def table(self) -> int:
        """Rows of a table that is no other weight."""
        return 0 if self.tied else self.looked_up

    @property
    def parameters(self) -> int:
        """Of one of its repetitions."""
        return self.hidden * (sum(self.outs) + self.table + self.inner)


@dataclass(frozen=True)
class Grids:
    """Sizes of the four axes of many grids: arrays of one shape (integers do as well)."""

    dp: Any
    z: Any
    x: Any
    y: Any

    @property
    def ranks(self) -> Any:
        return self.dp * self.z * self.x * self.y

    @classmethod
    def all(cls, ranks: int) -> Grids:
        """Every factorization of a number of ranks."""
        below = {n: divisors(n) for n in divisors(ranks)}
        sizes = [
            (dp, z, x, ranks // (dp * z * x))
            for dp in below[ranks]
            for z in below[ranks // dp]
            for x in below[ranks // (dp * z)]
        ]
        return cls(*np.array(sizes, dtype=np.int64).T)

    def take(self, index: Any) -> Grids:
        return Grids(*(getattr(self, axis)[index] for axis in AXES))

    def unbounded(self) -> Grids:
        """The same as Python's integers, which do not overflow, and take ten times as long."""
        return Grids(*(getattr(self, axis).astype(object) for axis in AXES))


def divides(block: Block, g: Grids, pad: bool) -> Any:
    """Which grids a block fits on.  Heads are never padded; sizes are where `pad` says so."""
    fits = np.ones(np.shape(g.ranks), dtype=bool)
    for size in block.heads:
        fits &= size % g.y == 0
    if block.key_heads:
        fits &= block.key_features // 2 % g.y == 0
    if not pad:
        sizes = padded(block, g)
        fits &= (sizes.tokens == block.tokens) & (sizes.hidden == block.hidden)
        fits &= (sizes.inner == block.inner) & (sizes.up == sum(block.outs))
    return fits


@dataclass(frozen=True)
class Sizes:
    """Sizes of a block's tensors, padded to what each grid divides; `up` is the width of the first product."""

    tokens: Any
    hidden: Any
    inner: Any
    up: Any


def row_multiple(g: Grids) -> Any:
    """What the rows must be a multiple of, for every split of them to divide."""
    # numpy would make 64 bits of Python's integers, which what is multiplied by this may outgrow.
    lcm = math.lcm(g.x, g.y) if isinstance(g.x, int) else np.lcm(g.x, g.y)
    return g.dp * g.z * lcm


def padded(block: Block, g: Grids) -> Sizes:
    """Rows are split by dp z y outside and dp z x inside of the block, features by x z and y z (in the weights)."""

    def to(size: int, multiple: Any) -> Any:
        return -(-size // multiple) * multiple

    inner = to(block.inner, g.y * g.z)
    up = sum((inner if size == block.inner else to(size, g.y)) for size in block.outs)
    return Sizes(to(block.tokens, row_multiple(g)), to(block.hidden, g.x * g.z), inner, up)


@dataclass(frozen=True)
class Message:
    """One collective of a step: elements received per rank, for each grid."""

    phase: str
    tensor: str
    collective: str
    axis: str
    elements: Any


def messages(block: Block, g: Grids, regather_a: Any = 0, regather_b: Any = 0) -> Iterator[Message]:
    """Every collective of a forward and backward.  `regather_*` is 1 where backward gathers the operand again."""
    s, ranks = padded(block, g), g.ranks
    outside = s.tokens * s.hidden // ranks * (g.y - 1)  # activations [tokens, hidden] over y
    inside = s.tokens * s.inner // ranks * (g.x - 1)
    products = []
    if block.outs:
        products.append(("up", s.hidden * s.up, outside, s.tokens * s.up // ranks * (g.x - 1), "y", "x"))
    if block.inner:
        products.append(("down", s.hidden * s.inner, inside, outside, "x", "y"))
    if block.tied:
        # y has some rows of the table each: what they find is summed.
        for phase, tensor, collective in (("forward", "A", "reduce_scatter"), ("dgrad", "dA", "all_gather")):
            yield Message(phase, f"up {tensor}", collective, "y", outside)
    elif block.looked_up:
        # A rank finds its features of all rows; they go to the ranks of these rows, and their gradient comes back.
        for phase, tensor in (("forward", "A"), ("dgrad", "dA")):
            for axis, others in (("z", g.y), ("y", 1)):
                found = s.tokens * s.hidden // ranks // others * (getattr(g, axis) - 1) // getattr(g, axis)
                yield Message(phase, f"up {tensor}", "all_to_all", axis, found)
        table = s.hidden * block.looked_up // (g.z * g.x * g.y)
        yield Message("wgrad", "up dB", "all_reduce", "dp", 2 * (g.dp - 1) * -(-table // g.dp))
    if block.key_heads:
        keys = s.tokens * block.key_features // ranks * (g.y - 1) * (block.key_heads % g.y != 0)
        yield Message("forward", "up C", "all_gather", "y", keys)
        yield Message("dgrad", "up dC", "reduce_scatter", "y", keys)
    for name, width, a, c, a_axis, c_axis in products:
        shard = width // (g.z * g.x * g.y)
        weight = shard * (g.z - 1)
        yield Message("forward", f"{name} A", "all_gather", a_axis, a)
        yield Message("forward", f"{name} B", "all_gather", "z", weight)
        yield Message("forward", f"{name} C", "reduce_scatter", c_axis, c)
        yield Message("dgrad", f"{name} dC", "all_gather", c_axis, c)
        yield Message("dgrad", f"{name} B", "all_gather", "z", weight * regather_b)
        yield Message("dgrad", f"{name} dA", "reduce_scatter", a_axis, a)
        yield Message("wgrad", f"{name} A", "all_gather", a_axis, a * regather_a)
        yield Message("wgrad", f"{name} dB", "reduce_scatter", "z", weight)
        yield Message("wgrad", f"{name} dB", "all_reduce", "dp", 2 * (g.dp - 1) * -(-shard // g.dp))


def volume(block: Block, g: Grids, regather_a: Any = 0, regather_b: Any = 0) -> Any:
    """Elements received per rank in a training step, by one of its repetitions."""
    return sum(message.elements for message in messages(block, g, regather_a, regather_b))


def gemms(block: Block, g: Grids) -> tuple[tuple[Any, Any, Any], ...]:
    """(m, n, k) of a rank's forward products; dgrad and wgrad permute them."""
    s = padded(block, g)
    rows = s.tokens // (g.dp * g.z)
    both = (rows, s.up // g.y, s.hidden // g.x), (rows, s.hidden // g.x, s.inner // g.y)
    return tuple(sizes for sizes, is_there in zip(both, (block.outs, block.inner), strict=True) if is_there)


def largest_integer(blocks: Sequence[Block], ranks: int, layers: int) -> int:
    """No integer that `volume` and `memory` meet on any grid is larger, in bytes and summed over all layers.

    Padding adds less than the number of ranks to a size.  Before it is divided among ranks an operand is multiplied by
    the ranks that gather it; after that, no collective brings a rank more than the whole operand.
    """
    widest = max(sum(block.outs) + block.looked_up + block.inner + block.hidden + 8 * ranks for block in blocks)
    rows = max(max(block.tokens, block.hidden) + ranks for block in blocks)
    return rows * widest * max(4 * ranks, 1024 * layers * sum(block.times for block in blocks))


# Bytes of optimizer state per parameter, beside the parameter itself, at (4-byte, 2-byte) parameters.
OPTIMIZERS = {"none": (0, 0), "sgd": (0, 4), "momentum": (4, 8), "adamw": (8, 12)}


@dataclass(frozen=True)
class BlockMemory:
    """Bytes per rank of a training step."""

    weights: Any
    gradients: Any
    optimizer: Any
    activations: Any
    working: Any

    @property
    def total(self) -> Any:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


def memory(
    block: Block, g: Grids, itemsize: int, optimizer: str = "adamw", regather_a: Any = 0, regather_b: Any = 0
) -> BlockMemory:
    """What one block keeps from forward to backward, and the largest operands that it works on for a moment.

    Optimizers keep fp32 state, and an fp32 copy of parameters of two bytes.  Kept activations: both products' A and B
    (gathered, or as stored where backward gathers them again), and the input of the activation function.
    """
    s = padded(block, g)
    shard = s.hidden * (s.up + block.table + s.inner) // (g.z * g.x * g.y)
    gathered_b = s.hidden * (s.up + s.inner) // (g.x * g.y) * (g.z > 1)  # beside the stored shard
    # An MLP's activations are made again from the input of the activation function, which is kept anyway; what lies
    # between the projections of heads is not.
    stored_a = s.tokens * (s.hidden + s.inner * bool(block.heads)) // g.ranks
    gathered_a = s.tokens * s.hidden * (g.y if block.outs else 1) // g.ranks + s.tokens * s.inner * g.x // g.ranks
    # Of the logits of a head there is a chunk at a time.
    between = s.tokens * s.up // g.ranks * bool(block.inner)
    kept = np.where(regather_a, stored_a, gathered_a) + between + np.where(regather_b, 0, gathered_b)
    working = between * g.x + (gathered_a - stored_a) * regather_a + gathered_b * (1 + regather_b)
    state = OPTIMIZERS[optimizer][0 if itemsize >= 4 else 1]
    return BlockMemory(shard * itemsize, shard * itemsize, shard * state, kept * itemsize, working * itemsize)

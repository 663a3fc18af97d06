"""The cost of a block on a grid in closed form, for many grids at once: volume, memory, local products. Pure.

A block is two products with the first's result, or a part of it, entering the second: an MLP, a gated MLP, or the
projections around attention.  It lies as the 3D scheme says, of which 1D (x = z = 1), 2D (z = 1), FSDP (z alone) and
data parallelism (dp alone) are special cases.  `MatMulPlan.volume` of the two plans gives the same numbers,
one grid at a time.

Experts are the same block with as many weights as there are experts, and `top_k` rows a token.  The axis e, and any of
z, x and y besides, split the experts; the others are for each of them what they are for an MLP.  Routing is taken to
be even, as `MoE.num_bytes` takes it where nothing else is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ndtp.algebra.volume import lower_bound
from ndtp.algebra.wire import Wire
from ndtp.planner.grids import AXES, EXPERT_AXES, FOLDED, Grids, PerGrid
from ndtp.planner.transfers import Transfer

__all__ = ["AXES", "EXPERT_AXES", "Block", "Grids", "divides", "gemms", "memory", "messages", "num_bytes", "volume"]

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
        experts: how many MLPs there are, of which a token goes through `top_k`, by a router; 0: one MLP, without.
        whole_scores: every rank gets what the router says of all rows of its dp and e, as transformers' routers want it
            (`ndtp.models.hidden_forms`); otherwise of its own alone, as `ndtp.nn.MoE`'s.
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
    experts: int = 0
    top_k: int = 1
    whole_scores: bool = False

    @classmethod
    def moe(
        cls,
        tokens: int,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int,
        gated: bool = True,
        whole_scores: bool = False,
    ) -> Block:
        outs = (ffn,) * (1 + gated)
        return cls(
            tokens, hidden, outs, ffn, name="experts", experts=experts, top_k=top_k, whole_scores=whole_scores
        )  # fmt: skip

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
        rows = self.tokens * self.top_k
        both = (rows, self.hidden, sum(self.outs)), (rows, self.inner, self.hidden)
        return tuple(product for product in both if all(product))

    def lower_bound(self, ranks: int) -> float:
        """Elements that a rank must receive in forward: the sum of the products' bounds.

        Each expert is taken to have its part of the ranks, and the rows to be there: as many ranks need nothing.
        """
        count = self.experts or 1
        if 1 < ranks <= count:
            return 0.0
        return self.times * sum(lower_bound(m / count, n, k, ranks / count) for m, k, n in self.bounds)

    @property
    def table(self) -> int:
        """Rows of a table that is no other weight."""
        return 0 if self.tied else self.looked_up

    @property
    def parameters(self) -> int:
        """The parameters of one repetition of the block."""
        return self.hidden * ((sum(self.outs) + self.inner) * (self.experts or 1) + self.table + self.experts)


def divides(block: Block, g: Grids, pad: bool) -> PerGrid:
    """Return, for each grid, whether a block fits on it.

    Heads and experts are never padded; sizes are padded where `pad` says so.
    """
    fits = np.ones(np.shape(g.ranks), dtype=bool)
    if block.experts:
        fits &= block.experts % g.over(block.experts) == 0
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

    tokens: PerGrid
    hidden: PerGrid
    inner: PerGrid
    up: PerGrid


def row_multiple(g: Grids) -> PerGrid:
    """Return the multiple of rows that every split of the rows divides."""
    # numpy would make 64 bits of Python's integers, which what is multiplied by this may outgrow.
    lcm = math.lcm(g.x, g.y) if isinstance(g.x, int) else np.lcm(g.x, g.y)
    return g.dp * g.e * g.z * lcm


def padded(block: Block, g: Grids) -> Sizes:
    """Rows are split by dp z y outside and dp z x inside of the block, features by x z and y z (in the weights)."""

    def to(size: int, multiple: PerGrid) -> PerGrid:
        return -(-size // multiple) * multiple

    i, rows = g.inside(block.experts), row_multiple(g)
    if block.experts:  # where x splits experts, it splits rows beside y
        rows = rows + (g.ranks - rows) * (g.fold >> FOLDED["x"] & 1)
    inner = to(block.inner, i.y * i.z)
    up = sum((inner if size == block.inner else to(size, i.y)) for size in block.outs)
    return Sizes(to(block.tokens, rows), to(block.hidden, g.x * g.z), inner, up)


def messages(block: Block, g: Grids, regather_a: object = 0, regather_b: object = 0) -> Iterator[Transfer]:
    """Every collective of a forward and backward.  `regather_*` is 1 where backward gathers the operand again."""
    s, ranks, i, over = padded(block, g), g.ranks, g.inside(block.experts), g.over(block.experts)
    copies, data_axis = (block.experts, "dp") if block.experts else (1, g.data_axis)
    if block.experts:  # which keep what they gathered
        regather_a = regather_b = 0
        yield from _sent(block, g, s)
    rows = s.tokens * block.top_k
    outside = rows * s.hidden // ranks * (i.y - 1)  # activations [rows, hidden] over y
    inside = rows * s.inner // ranks * (i.x - 1)
    products = []
    hidden = s.hidden // i.x  # features of a row outside of the block, and between its products
    if block.outs:
        between = rows * s.up // ranks * (i.x - 1)
        products.append(("up", s.hidden * s.up, outside, between, "y", "x", hidden, s.up // i.y))
    if block.inner:
        products.append(("down", s.hidden * s.inner, inside, outside, "x", "y", s.inner // i.y, hidden))
    of_table = hidden // (g.z * g.y)
    if block.tied:
        # y has some rows of the table each: what they find is summed.
        for phase, tensor, collective in (("forward", "A", "reduce_scatter"), ("dgrad", "dA", "all_gather")):
            yield Transfer(phase, f"up {tensor}", collective, "y", outside, row=hidden // g.z)
    elif block.looked_up:
        # A rank finds its features of all rows; they go to the ranks of these rows, and their gradient comes back.
        for phase, tensor in (("forward", "A"), ("dgrad", "dA")):
            for axis, others in (("z", g.y), ("y", 1)):
                found = s.tokens * s.hidden // ranks // others * (getattr(g, axis) - 1) // getattr(g, axis)
                yield Transfer(phase, f"up {tensor}", "all_to_all", axis, found, row=of_table)
        table = s.hidden * block.looked_up // (g.z * g.x * g.y)
        yield Transfer("wgrad", "up dB", "all_reduce", data_axis, all_reduced(table, i.dp), row=of_table)
    if block.key_heads:
        keys = s.tokens * block.key_features // ranks * (g.y - 1) * (block.key_heads % g.y != 0)
        row = block.key_features // 2 // g.y
        yield Transfer("forward", "up C", "all_gather", "y", keys, row=row)
        yield Transfer("dgrad", "up dC", "reduce_scatter", "y", keys, row=row)
    for name, width, a, c, a_axis, c_axis, a_row, c_row in products:
        shard = copies * width // (over * i.z * i.x * i.y)
        weight, row = shard * (i.z - 1), a_row // i.z  # weights [out, in] are split over z along their last dim
        yield Transfer("forward", f"{name} A", "all_gather", a_axis, a, row=a_row)
        yield Transfer("forward", f"{name} B", "all_gather", "z", weight, row=row)
        yield Transfer("forward", f"{name} C", "reduce_scatter", c_axis, c, row=c_row)
        yield Transfer("dgrad", f"{name} dC", "all_gather", c_axis, c, row=c_row)
        yield Transfer("dgrad", f"{name} B", "all_gather", "z", weight * regather_b, row=row)
        yield Transfer("dgrad", f"{name} dA", "reduce_scatter", a_axis, a, row=a_row)
        yield Transfer("wgrad", f"{name} A", "all_gather", a_axis, a * regather_a, row=a_row)
        yield Transfer("wgrad", f"{name} dB", "reduce_scatter", "z", weight, row=row)
        yield Transfer("wgrad", f"{name} dB", "all_reduce", data_axis, all_reduced(shard, i.dp), row=row)
    if block.experts:
        yield from _returned(block, g, s)


def all_reduced(elements: PerGrid, ranks: PerGrid) -> object:
    """Return what a rank receives of an all-reduce: twice all parts but its own."""
    return 2 * (ranks - 1) * -(-elements // ranks)


def _sent(block: Block, g: Grids, s: Sizes) -> Iterator[Transfer]:
    """Yield the messages before the products of a layer of experts: the router's logits, and rows on their way to
    experts.

    Its router has features of tokens as they lie, and every weight whole: `ndtp.nn.router.Router` without losses.
    """
    i, here = g.inside(block.experts), s.tokens * s.hidden // g.ranks
    row, moved = s.hidden // g.x, s.hidden // i.x
    x = g.x if block.whole_scores else i.x
    logits = s.tokens * x // g.ranks * block.experts
    yield Transfer("forward", "up A", "all_to_all", "x", _of_others(here, g.x // i.x), row=row)
    yield Transfer("forward", "up A", "all_reduce", "x", all_reduced(logits, x), "wide")
    if block.whole_scores:
        yield Transfer("forward", "up A", "all_gather", "scores", (g.z * g.y - 1) * logits, "wide")
    others = math.prod(g.splits("counts").values())
    yield Transfer("forward", "up A", "all_gather", "counts", (others - 1) * block.experts, "counts")
    chosen = _of_others(here * block.top_k, g.over(block.experts))
    yield Transfer("forward", "up A", "all_to_all", "experts", chosen, row=moved)
    yield Transfer("dgrad", "down dC", "all_to_all", "x", _of_others(here, g.x // i.x), row=row)
    yield Transfer("dgrad", "down dC", "all_to_all", "experts", chosen, row=moved)


def _returned(block: Block, g: Grids, s: Sizes) -> Iterator[Transfer]:
    """Yield the messages behind the products: rows on their way back, and gradients of the gates and the router's
    weight.
    """
    i, here = g.inside(block.experts), s.tokens * s.hidden // g.ranks
    row, moved = s.hidden // g.x, s.hidden // i.x
    chosen = _of_others(here * block.top_k, g.over(block.experts))
    yield Transfer("forward", "down C", "all_to_all", "experts", chosen, row=moved)
    yield Transfer("forward", "down C", "all_to_all", "x", _of_others(here, g.x // i.x), row=row)
    yield Transfer("dgrad", "up dA", "all_to_all", "experts", chosen, row=moved)
    gates = s.tokens * i.x // g.ranks * block.top_k
    yield Transfer("dgrad", "up dA", "all_reduce", "x", all_reduced(gates, i.x), "wide")
    yield Transfer("dgrad", "up dA", "all_to_all", "x", _of_others(here, g.x // i.x), row=row)
    if block.whole_scores:  # gates are whole, too, and so is the router's weight on every rank
        others = math.prod(g.splits("gates").values()) - 1
        yield Transfer("dgrad", "up dA", "all_gather", "gates", others * gates, "wide")
        part = block.experts * s.hidden // g.x
        yield Transfer("wgrad", "up dB", "all_reduce", "scores", all_reduced(part, g.z * g.y))
        yield Transfer("wgrad", "up dB", "all_gather", "x", (g.x - 1) * part)
        yield Transfer("wgrad", "up dB", "all_reduce", "data", all_reduced(block.experts * block.hidden, g.dp * g.e))
        return
    router = block.experts * s.hidden // i.x
    yield Transfer("wgrad", "up dB", "all_reduce", "rows", all_reduced(router, g.ranks // i.x), "wide")


def _of_others(elements: PerGrid, ranks: PerGrid) -> object:
    """Return what a rank receives of elements that are spread evenly over all ranks."""
    return elements // ranks * (ranks - 1)


def volume(block: Block, g: Grids, regather_a: object = 0, regather_b: object = 0) -> PerGrid:
    """Elements received per rank in a training step, by one of its repetitions."""
    return sum(message.elements for message in messages(block, g, regather_a, regather_b))


def num_bytes(
    block: Block, g: Grids, itemsize: int, regather_a: object = 0, regather_b: object = 0, wire: Wire | None = None
) -> PerGrid:
    """Return the volume of a block in bytes."""
    return sum(message.num_bytes(itemsize, wire) for message in messages(block, g, regather_a, regather_b))


def gemms(block: Block, g: Grids) -> tuple[tuple[PerGrid, PerGrid, PerGrid], ...]:
    """(m, n, k) of a rank's forward products, of each of its experts; dgrad and wgrad permute them."""
    s, i = padded(block, g), g.inside(block.experts)
    rows = -(-s.tokens * block.top_k // ((block.experts or 1) * i.dp * i.z))
    both = (rows, s.up // i.y, s.hidden // i.x), (rows, s.hidden // i.x, s.inner // i.y)
    return tuple(sizes for sizes, is_there in zip(both, (block.outs, block.inner), strict=True) if is_there)


def largest_integer(blocks: Sequence[Block], ranks: int, layers: int) -> int:
    """No integer that `volume` and `memory` meet on any grid is larger, in bytes and summed over all layers.

    Padding adds less than the number of ranks to a size.  Before it is divided among ranks an operand is multiplied by
    the ranks that gather it; after that, no collective brings a rank more than the whole operand.
    """
    widest = max(
        (sum(block.outs) + block.inner) * max(1, block.experts) + block.looked_up + block.hidden + 8 * ranks
        for block in blocks
    )
    rows = max(max(block.tokens * block.top_k, block.hidden) + ranks for block in blocks)
    return rows * widest * max(4 * ranks, 1024 * layers * sum(block.times for block in blocks))


# Bytes of optimizer state per parameter, beside the parameter itself, at (4-byte, 2-byte) parameters.
OPTIMIZERS = {"none": (0, 0), "sgd": (0, 4), "momentum": (4, 8), "adamw": (8, 12)}


@dataclass(frozen=True)
class BlockMemory:
    """Bytes per rank of a training step."""

    weights: PerGrid
    gradients: PerGrid
    optimizer: PerGrid
    activations: PerGrid
    working: PerGrid

    @property
    def total(self) -> PerGrid:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


def memory(
    block: Block, g: Grids, itemsize: int, optimizer: str = "adamw", regather_a: PerGrid = 0, regather_b: PerGrid = 0
) -> BlockMemory:
    """Return the memory that one block keeps from forward to backward, and its largest operands of a moment.

    Optimizers keep fp32 state, and an fp32 copy of parameters of two bytes.  Kept activations: both products' A and B
    (gathered, or as stored where backward gathers them again), and the input of the activation function.
    """
    s, i, over, copies = padded(block, g), g.inside(block.experts), g.over(block.experts), block.experts or 1
    rows = s.tokens * block.top_k
    shard = s.hidden * (copies * (s.up + s.inner) + block.table * over) // (over * i.z * i.x * i.y)
    gathered_b = copies * s.hidden * (s.up + s.inner) // (over * i.x * i.y) * (i.z > 1)  # beside the stored shard
    # An MLP's activations are made again from the input of the activation function, which is kept anyway; what lies
    # between the projections of heads is not.
    stored_a = rows * (s.hidden + s.inner * bool(block.heads)) // g.ranks
    gathered_a = rows * s.hidden * (i.y if block.outs else 1) // g.ranks + rows * s.inner * i.x // g.ranks
    # Of the logits of a head there is a chunk at a time.
    between = rows * s.up // g.ranks * bool(block.inner)
    state = OPTIMIZERS[optimizer][0 if itemsize >= 4 else 1]
    if block.experts:
        # Autograd keeps what each step takes: besides, what a gate gives, and rows that came back, for the gates'
        # gradient.
        between = between + rows * (s.inner * (len(block.outs) > 1) + s.hidden) // g.ranks
        kept = (gathered_a + between + gathered_b) * itemsize + _of_routing(block, g, s, itemsize)
        wide = itemsize if block.whole_scores else max(4, itemsize)
        router = block.experts * (block.hidden if block.whole_scores else s.hidden // i.x)
        state_of_router = OPTIMIZERS[optimizer][0 if wide >= 4 else 1]
        weights, states = shard * itemsize + router * wide, shard * state + router * state_of_router
        return BlockMemory(weights, weights, states, kept, gathered_b * itemsize)
    kept = np.where(regather_a, stored_a, gathered_a) + between + np.where(regather_b, 0, gathered_b)
    working = between * i.x + (gathered_a - stored_a) * regather_a + gathered_b * (1 + regather_b)
    return BlockMemory(shard * itemsize, shard * itemsize, shard * state, kept * itemsize, working * itemsize)


def _of_routing(block: Block, g: Grids, s: Sizes, itemsize: int) -> object:
    """Bytes that a layer of experts keeps of its choices: of Mixtral's router, which others differ from by little."""
    i, over, wide = g.inside(block.experts), g.over(block.experts), max(4, itemsize)
    narrow, top_k = itemsize < 4, block.top_k
    here = s.tokens * i.x // g.ranks  # tokens of a rank
    scored = s.tokens // (g.dp * g.e) if block.whole_scores else here
    # The tokens in fp32, logits, their softmax, the best of it, their sum and the quotients.
    moved = 1 - (1 - narrow) * (g.x == i.x)
    scores = here * (s.hidden // i.x) * moved + scored * (2 * block.experts + 2 * top_k + 1)
    # Which experts were chosen, the choices in their order, and the order of rows where these come from several ranks.
    arrived = s.tokens * top_k // (over * i.dp * i.z) * ((over * i.y > 1) & (block.experts > over))
    return scores * wide + 8 * top_k * (scored + here) + 16 * arrived + here * top_k * itemsize * narrow

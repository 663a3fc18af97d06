"""The collectives of a decode step: one token of each sequence, in a model whose weights are split.  Pure.

Up to `WHOLE_ROWS` sequences of a dp rank are rows that every rank has, and weights stay, see `ndtp.algebra.stationary`;
more are split as in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ndtp.algebra.layout import Layout
from ndtp.algebra.relayouts import RelayoutPlan
from ndtp.algebra.schemes import BlockLayouts
from ndtp.algebra.stationary import WHOLE_ROWS, Axes, in_common, summed_axes
from ndtp.algebra.steps import Step
from ndtp.algebra.volume import Traffic, traffic
from ndtp.planner.training.transformer import Transformer

Calls = dict[tuple[str, Axes, float], float]  # how often each runs: (kind, axes, bytes that a rank receives)


def pairs_of(model: Transformer, batch: int) -> Iterator[tuple[float, int, int, int]]:
    """Yield the pairs of products of a model: (how many, features that lead in, features between, experts in use)."""
    inner = model.heads * model.head
    yield model.layers, inner + 2 * model.keys * model.head, inner, 1
    for block in model.blocks(1):
        if block.name == "attention":
            continue
        experts = block.experts and block.experts * (1 - (1 - block.top_k / block.experts) ** batch)
        yield block.times, sum(block.outs), block.inner, max(round(experts), 1) if experts else 1


def calls_of_step(model: Transformer, layouts: BlockLayouts, batch: int, dp: int, itemsize: int) -> Calls:
    """Return the collectives of a step of `batch` sequences, on all ranks."""
    calls: Calls = {}
    few = batch <= WHOLE_ROWS * dp
    for times, entries in (
        _of_few(model, layouts, batch, itemsize) if few else _of_many(model, layouts, batch, itemsize)
    ):
        for entry in entries:
            if entry.phase == "forward":
                key = entry.collective, entry.axes, float(entry.num_bytes)
                calls[key] = calls.get(key, 0.0) + times
    return calls


def _of_few(
    model: Transformer, layouts: BlockLayouts, batch: int, itemsize: int
) -> Iterator[tuple[float, Iterable[Traffic]]]:
    grid = layouts.input.grid
    spread, data = _spread(layouts), _data(layouts)
    heads = grid.nontrivial(layouts.hidden.dims[1])
    (up_out, up_in), (down_out, down_in) = (
        [grid.nontrivial(axes) for axes in weight.dims] for weight in (layouts.up_weight, layouts.down_weight)
    )
    into, context = in_common(up_out, heads), in_common(heads, down_in)
    outside, rows = Layout(grid, data, None), batch // grid.size(data)

    def summed(out: Axes, to: Axes, taken: Axes, features: int) -> Iterable[Traffic]:
        axes = summed_axes(grid, out, to, taken)
        shape = rows, _padded(features, spread) // grid.size(to)
        return traffic(grid, (Step("all_reduce", axes),), shape, "forward", "", itemsize) if axes else ()

    for index, (times, wide, inner, experts) in enumerate(pairs_of(model, batch)):
        if experts > 1:  # which take hidden states that are split
            yield from _products(layouts, times, batch, wide, inner, model.hidden, itemsize)
            back = RelayoutPlan(layouts.output, outside)
            yield times, back.volume((batch, _padded(model.hidden, spread)), itemsize, dgrad=False).entries
            continue
        yield times, summed(up_out, into, up_in, wide)
        yield times, summed(down_out, (), down_in, model.hidden)
        if index == 0:  # an attention, whose ranks have sequences and heads of their own
            back = RelayoutPlan(layouts.hidden, Layout(grid, data, context))
            yield times, back.volume((batch, inner), itemsize, dgrad=False).entries
            if model.keys % grid.size(heads):
                keys = RelayoutPlan(layouts.hidden, layouts.hidden.with_dims(layouts.hidden.dims[0], None))
                yield 2 * times, keys.volume((batch, model.keys * model.head), itemsize, dgrad=False).entries
    yield 1, summed(up_out, (), up_in, model.vocabulary)
    features = grid.nontrivial(layouts.input.dims[1])
    if features:  # the gains of two norms a layer, and of the last one
        order, total = tuple(axis for axis in grid if axis in features), (2 * model.layers + 1) * model.hidden
        yield 1, traffic(grid, (Step("all_reduce", order),), (total,), "forward", "", itemsize)
    table = layouts.up_weight
    if not model.tied:
        first = layouts.input.dims[1]
        rest = [axis for axis in grid if axis in layouts.up_weight.axes and axis not in first]
        table = Layout(grid, None, (*first, *rest))
    found = RelayoutPlan(Layout(grid, data, table.dims[1]), outside, grid.nontrivial(table.dims[0]))
    yield 1, found.volume((batch, _padded(model.hidden, spread)), itemsize, dgrad=False).entries


def _of_many(
    model: Transformer, layouts: BlockLayouts, batch: int, itemsize: int
) -> Iterator[tuple[float, Iterable[Traffic]]]:
    grid = layouts.input.grid
    for times, wide, inner, _ in pairs_of(model, batch):
        yield from _products(layouts, times, batch, wide, inner, model.hidden, itemsize)
    head = layouts.plans()[0]
    yield 1, head.volume((batch, model.hidden, _padded(model.vocabulary, _spread(layouts))), itemsize)
    features = grid.nontrivial(layouts.input.dims[1])
    if features:  # two norms a layer, of one number a row
        rows = batch // layouts.input.num_splits(0)
        yield 2 * model.layers + 1, [Traffic("forward", "all_reduce", features, rows * 8)]
    data = _data(layouts)
    whole = tuple(a for a in grid.nontrivial((*layouts.hidden.dims[0], *layouts.hidden.dims[1])) if a not in data)
    if whole:  # logits, whole on every rank
        yield 1, [Traffic("forward", "all_gather", whole, batch // grid.size(data) * model.vocabulary * itemsize)]


def _products(
    layouts: BlockLayouts, times: float, batch: int, wide: int, inner: int, hidden: int, itemsize: int
) -> Iterator[tuple[float, Iterable[Traffic]]]:
    """Yield the collectives of a pair of products as they are planned for training."""
    (up, down), spread = layouts.plans(), _spread(layouts)
    yield times, up.volume((batch, hidden, _padded(wide, spread)), itemsize)
    yield times, down.volume((batch, _padded(inner, spread), hidden), itemsize)


def _data(layouts: BlockLayouts) -> Axes:
    """Return the axes that split rows and no weight."""
    weights = {*layouts.up_weight.axes, *layouts.down_weight.axes}
    return tuple(axis for axis in layouts.input.dims[0] if axis not in weights)


def _spread(layouts: BlockLayouts) -> int:
    """Return over how many ranks a weight is split."""
    return layouts.input.grid.size([*{*layouts.up_weight.axes, *layouts.down_weight.axes}])


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

"""A dense simulation of a plan: every rank's shard is a NumPy array, every collective an exchange of blocks.

It shares no code with the rooms it checks.  Of a plan it reads the steps and the layouts, nothing else; what a shard
is, who is in a group and what a collective does are written down here again.  Collectives go hop by hop, as a ring or
pairwise, and count what each rank receives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

Shards = list[np.ndarray]


def part(tensor: np.ndarray, index: int, count: int, dim: int) -> np.ndarray:
    """One of `count` equal blocks; `np.split` makes all of them, five times as slowly."""
    size, rest = divmod(tensor.shape[dim], count)
    assert rest == 0, (tensor.shape, dim, count)
    return tensor[(*[slice(None)] * dim, slice(index * size, (index + 1) * size))]


def split(tensor: np.ndarray, count: int, dim: int = 0) -> Shards:
    return [part(tensor, index, count, dim) for index in range(count)]


def shard(dense: np.ndarray, grid: Any, dims: Any, rank: int) -> np.ndarray:
    """The block of `rank`: each axis, major to minor, cuts what it is given into equal blocks."""
    return dense[block(dense.shape, grid, tuple(dims), rank)]


@cache
def block(shape: tuple[int, ...], grid: Any, dims: tuple[tuple[str, ...], ...], rank: int) -> tuple[slice, ...]:
    """Where it lies; cut out of the numbers of rows, of columns and so on."""
    position = dict(zip(grid.names, np.unravel_index(rank, grid.shape), strict=True))
    slices = []
    for size, axes in zip(shape, dims, strict=True):
        places = np.arange(size)
        for axis in axes:
            places = part(places, position[axis], grid[axis], 0)
        slices.append(slice(int(places[0]), int(places[-1]) + 1) if places.size else slice(0, 0))
    return tuple(slices)


@cache
def groups(grid: Any, axes: tuple[str, ...]) -> np.ndarray:
    """One row a group of the ranks along `axes`, in the order of their coordinates there, the first axis major."""
    ranks = np.arange(int(np.prod(grid.shape))).reshape(grid.shape)
    ranks = np.moveaxis(ranks, [grid.names.index(axis) for axis in axes], range(-len(axes), 0))
    return ranks.reshape(-1, int(np.prod([grid[axis] for axis in axes])))


def ring_all_gather(blocks: Shards) -> tuple[list[Shards], list[int]]:
    """`blocks[i]` starts on rank i; returns what every rank then holds, in rank order, and what it received."""
    p = len(blocks)
    held: list[dict[int, np.ndarray]] = [{i: block} for i, block in enumerate(blocks)]
    received = [0] * p
    for hop in range(p - 1):
        for i, block in enumerate([held[i][(i - hop) % p] for i in range(p)]):
            held[(i + 1) % p][(i - hop) % p] = block
            received[(i + 1) % p] += block.size
    return [[own[i] for i in range(p)] for own in held], received


def ring_reduce_scatter(parts: list[Shards]) -> tuple[Shards, list[int]]:
    """`parts[i][j]` is rank i's addend to block j; returns the summed block of every rank and what it received."""
    p = len(parts)
    sums = [list(part) for part in parts]
    received = [0] * p
    for hop in range(p - 1):
        for i, block in enumerate([sums[i][(i - hop - 1) % p] for i in range(p)]):
            sums[(i + 1) % p][(i - hop - 1) % p] = sums[(i + 1) % p][(i - hop - 1) % p] + block
            received[(i + 1) % p] += block.size
    return [own[i] for i, own in enumerate(sums)], received


def ring_all_reduce(tensors: Shards) -> tuple[Shards, list[int]]:
    p = len(tensors)
    flat = [np.pad(tensor.ravel(), (0, -tensor.size % p)) for tensor in tensors]
    blocks, first = ring_reduce_scatter([split(tensor, p) for tensor in flat])
    gathered, second = ring_all_gather(blocks)
    shape, size = tensors[0].shape, tensors[0].size
    return [np.concatenate(own)[:size].reshape(shape) for own in gathered], [
        a + b for a, b in zip(first, second, strict=True)
    ]


def pairwise_all_to_all(tensors: Shards, dim: int, source: int) -> tuple[Shards, list[int]]:
    cut = [split(tensor, len(tensors), dim) for tensor in tensors]
    result, received = [], []
    for j in range(len(tensors)):
        result.append(np.concatenate([own[j] for own in cut], axis=source))
        received.append(sum(own[j].size for i, own in enumerate(cut) if i != j))
    return result, received


def exchange(step: Any, tensors: Shards) -> tuple[Shards, list[int]]:
    """One step in one group; `tensors` in the order of the group."""
    if step.kind == "all_gather":
        gathered, received = ring_all_gather(tensors)
        return [np.concatenate(own, axis=step.dim) for own in gathered], received
    if step.kind == "reduce_scatter":
        return ring_reduce_scatter([split(tensor, len(tensors), step.dim) for tensor in tensors])
    if step.kind == "all_reduce":
        return ring_all_reduce(tensors)
    if step.kind == "all_to_all":
        return pairwise_all_to_all(tensors, step.dim, step.source)
    assert step.kind == "slice", step
    return [part(tensor, i, len(tensors), step.dim) for i, tensor in enumerate(tensors)], [0] * len(tensors)


@dataclass
class Run:
    """What a simulated plan left on the ranks, and what every rank received, by (phase, collective, axes).

    `starts` has the phase of every tensor's move, and the shape of every rank's part before it.
    """

    grid: Any
    received: Counter = field(default_factory=Counter)
    starts: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    c: Shards = field(default_factory=list)
    da: Shards = field(default_factory=list)
    db: Shards = field(default_factory=list)

    def move(self, phase: str, name: str, plan: Any, tensors: Shards) -> Shards:
        """A tensor of a plan, by its name."""
        (shape,) = {tensor.shape for tensor in tensors}
        self.starts[name] = phase, shape
        return self.follow(phase, plan.relayouts[name], tensors)

    def follow(self, phase: str, steps: Any, tensors: Shards) -> Shards:
        for step in steps:
            moved = list(tensors)
            counts = set()
            for members in groups(self.grid, step.axes):
                result, received = exchange(step, [tensors[rank] for rank in members])
                counts.update(received)
                for rank, tensor in zip(members, result, strict=True):
                    moved[rank] = tensor
            (count,) = counts  # every rank receives the same
            if step.kind != "slice":
                self.received[phase, step.kind, step.axes] += count
            tensors = moved
        return tensors


def swapped(tensor: np.ndarray, yes: bool) -> np.ndarray:
    return np.swapaxes(tensor, -1, -2) if yes else tensor


def summed_to(tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum over the batch dims that a tensor of `shape` lacks or broadcasts."""
    if tensor.shape == shape:
        return tensor
    tensor = tensor.sum(axis=tuple(range(tensor.ndim - len(shape))))
    wide = tuple(dim for dim, size in enumerate(shape) if size == 1 and tensor.shape[dim] != 1)
    return tensor.sum(axis=wide, keepdims=True)


def products(
    a: np.ndarray, b: np.ndarray, dc: np.ndarray, transpose_a: bool, transpose_b: bool
) -> tuple[np.ndarray, np.ndarray]:
    """dA and dB of a dense product."""
    da = summed_to(dc @ np.swapaxes(swapped(b, transpose_b), -1, -2), swapped(a, transpose_a).shape)
    db = summed_to(np.swapaxes(swapped(a, transpose_a), -1, -2) @ dc, swapped(b, transpose_b).shape)
    return swapped(da, transpose_a), swapped(db, transpose_b)


def simulate(plan: Any, a: np.ndarray, b: np.ndarray, dc: np.ndarray) -> Run:
    """Run a plan, forward and backward, on dense operands and a dense gradient of C."""
    run = Run(plan.grid)
    ranks = range(int(np.prod(plan.grid.shape)))
    ta, tb = plan.transpose_a, plan.transpose_b
    a_held = run.move("forward", "A", plan, [shard(a, plan.grid, plan.a.dims, rank) for rank in ranks])
    b_held = run.move("forward", "B", plan, [shard(b, plan.grid, plan.b.dims, rank) for rank in ranks])
    partial = [swapped(a_held[rank], ta) @ swapped(b_held[rank], tb) for rank in ranks]
    run.c = run.move("forward", "C", plan, partial)
    dc_held = run.move("dgrad", "dC", plan, [shard(dc, plan.grid, plan.out.dims, rank) for rank in ranks])
    grads = [products(a_held[rank], b_held[rank], dc_held[rank], ta, tb) for rank in ranks]
    run.da = run.move("dgrad", "dA", plan, [da for da, _ in grads])
    run.db = run.move("wgrad", "dB", plan, [db for _, db in grads])
    return run


def assert_exact(plan: Any, a_shape: tuple[int, ...], b_shape: tuple[int, ...], seed: int = 0) -> Run:
    """Small random integers: C, dA and dB equal the dense ones, and the predicted volumes the counted ones."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-9, 10, a_shape), rng.integers(-9, 10, b_shape)
    c = swapped(a, plan.transpose_a) @ swapped(b, plan.transpose_b)
    dc = rng.integers(-9, 10, c.shape)
    da, db = products(a, b, dc, plan.transpose_a, plan.transpose_b)
    run = simulate(plan, a, b, dc)
    expected = ((run.c, c, plan.out), (run.da, da, plan.a), (run.db, db, plan.b))
    for name, (shards, dense, layout) in zip(("C", "dA", "dB"), expected, strict=True):
        for rank, found in enumerate(shards):
            wanted = shard(dense, plan.grid, layout.dims, rank)
            assert found.shape == wanted.shape and (found == wanted).all(), (name, rank, plan)
    k = a_shape[-2] if plan.transpose_a else a_shape[-1]
    shape = (*c.shape[:-1], k, c.shape[-1])
    assert {entry.key: entry.elements for entry in plan.volume(shape)} == dict(run.received), plan
    sizes = plan.sizes(shape)
    assert {move.tensor: (move.phase, plan.start_shape(move.tensor, sizes)) for move in plan.moves()} == run.starts
    return run

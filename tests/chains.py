"""Random chains of products in chunks, on every rank against the dense ones: bits, bytes, and what is left in flight.

A case is drawn from its number alone, so that every rank draws the same and a failure is named by a number:

    python tests/chains.py 0 2000          # cases 0 to 1999, on 4 ranks
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from unittest import mock

import torch
from legal import all_dims
from products import BOUNDS, mesh_of
from torch import Tensor

import ndtp.collectives.buffer_ring
from ndtp import CommMeter, Grid, Layout, LayoutError, MatMulPlan
from ndtp.collectives.collectives import Collectives
from ndtp.compute.epilogues import ACTIVATIONS
from ndtp.compute.gemm import KernelGemm
from ndtp.testing import run, small_integers

GRIDS = {2: [Grid(x=2)], 4: [Grid(x=4), Grid(x=2, y=2), Grid(x=2, y=2), Grid(x=2, y=2)], 3: [Grid(x=3)]}
REGATHER = ((), (), ("a",), ("b",), ("a", "b"))
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
EXACT = ("relu", "identity", "reglu")  # integers stay integers


@dataclass(frozen=True)
class Chain:
    """Shapes are global: [*batch, rows, features[0]], then features[1] and so on behind each product."""

    grid: Grid
    plans: tuple[MatMulPlan, ...]
    batch: tuple[int, ...]
    rows: int
    features: tuple[int, ...]
    activation: str
    dtype: torch.dtype
    biases: tuple[bool, ...]
    needs: tuple[bool, ...]  # of A, the weights, the biases
    kernels: bool  # operands of low precision as blocks of columns, sums in one pass
    torchs_own: bool  # collectives as NCCL would run them

    def __str__(self) -> str:
        options = [
            f"chunks={p.chunks} regather={p.regather}{' transpose_a' * p.transpose_a}{' transpose_b' * p.transpose_b}"
            for p in self.plans
        ]
        products = "; ".join(f"{p.equation} {o}" for p, o in zip(self.plans, options, strict=True))
        return (
            f"{products} on {self.grid}, {self.batch} {self.rows} {self.features} {self.activation} {self.dtype} "
            f"biases {self.biases} needs {self.needs}"
            + " kernels" * self.kernels
            + " torch's collectives" * self.torchs_own
        )

    def widths(self) -> list[tuple[int, int]]:
        """(K, N) of every product: a gated activation takes two features for each that it gives."""
        width, last = ACTIVATIONS[self.activation].width, len(self.plans) - 1
        return [(k, n * (width if p < last else 1)) for p, (k, n) in enumerate(pairwise(self.features))]


def drawn(number: int, num_ranks: int) -> Chain | None:
    """The chain of a number; None where what was drawn is not legal."""
    draw = random.Random(number)
    grid = draw.choice(GRIDS[num_ranks])
    count = draw.choice((1, 1, 2, 2, 3))
    num_batch = draw.choice((0, 0, 0, 0, 1))
    unit = num_ranks
    rows, *features = (draw.choice((unit, 2 * unit, 2 * unit, 4 * unit, 3, 5)) for _ in range(count + 2))
    rows = draw.choice((rows, rows * 6, rows * 5, 24, 16))
    batch = (unit,) * num_batch
    chunks, regather = draw.choice((1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 16)), draw.choice(REGATHER)
    layout, plans = None, []
    for p in range(count):
        for _ in range(20):
            a = layout or Layout(grid, *draw.choice(_dims(grid, 2 + num_batch)))
            b = Layout(grid, *draw.choice(_dims(grid, 2)))
            out = draw.choice((None, Layout(grid, *draw.choice(_dims(grid, 2 + num_batch)))))
            options = {
                "transpose_a": draw.random() < (0.25 if p == 0 else 0.03),
                "transpose_b": draw.random() < 0.4,
                "regather": regather if draw.random() < 0.8 else draw.choice(REGATHER),
                "chunks": chunks if draw.random() < 0.9 else draw.randint(1, 9),
            }
            try:
                plans.append(MatMulPlan(a, b, out, name=f"p{p}", **options))
            except LayoutError:
                continue
            layout = plans[-1].out
            break
        else:
            return None
    dtype, activation = draw.choice(DTYPES), draw.choice(EXACT)
    if dtype is torch.bfloat16:  # exact up to 256 only
        rows, features = min(rows, 4 * unit), [unit * draw.choice((1, 2)) for _ in features]
        activation, plans = draw.choice(EXACT[:2]), plans[:2]
        count = len(plans)
        features = features[: count + 1]
    biases = tuple(draw.random() < 0.5 for _ in plans)
    needs = tuple(draw.random() < 0.8 for _ in range(1 + 2 * count))
    how = draw.random() < 0.2, draw.random() < 0.2
    return Chain(grid, tuple(plans), batch, rows, tuple(features), activation, dtype, biases, needs, *how)


_DIMS: dict[tuple[Grid, int], list] = {}


def _dims(grid: Grid, ndim: int) -> list:
    key = grid, ndim
    if key not in _DIMS:
        _DIMS[key] = list(all_dims(list(grid), ndim))
    return _DIMS[key]


@contextmanager
def _replaced(mesh: ndtp.ProcessGrid, chain: Chain) -> Iterator[None]:
    own = mesh.gemm, mesh.collectives
    mesh.gemm = KernelGemm() if chain.kernels else own[0]
    mesh.collectives = _torchs_own(mesh) if chain.torchs_own else own[1]
    try:
        with mock.patch.object(ndtp.collectives.buffer_ring, "SMALLEST", 1):  # tiny buffers are lent as large ones are
            yield
    finally:
        mesh.gemm, mesh.collectives = own


@cache
def _torchs_own(mesh: ndtp.ProcessGrid) -> Collectives:
    return Collectives(mesh.groups, mesh.ring, mesh.step.recording)


def problems(chain: Chain, seed: int) -> list[str] | None:
    """What is wrong on this rank; None where the sizes are refused."""
    with _replaced(mesh_of(chain.grid), chain):
        return _problems(chain, seed)


def _problems(chain: Chain, seed: int) -> list[str] | None:
    mesh, last = mesh_of(chain.grid), len(chain.plans) - 1
    widths = chain.widths()
    first = chain.plans[0]
    a_shape = (
        *chain.batch,
        *((chain.features[0], chain.rows) if first.transpose_a else (chain.rows, chain.features[0])),
    )
    shapes = [a_shape]
    shapes += [(n, k) if p.transpose_b else (k, n) for p, (k, n) in zip(chain.plans, widths, strict=True)]
    shapes += [(n,) for _, n in widths]
    present = [True] * (2 + last) + list(chain.biases)
    whole = [small_integers(s, seed + i, torch.float64, **BOUNDS) for i, s in enumerate(shapes)]
    for tensor, need, there in zip(whole, chain.needs, present, strict=True):
        tensor.requires_grad_(need and there)
    layouts = [first.a, *(p.b for p in chain.plans), *(p.bias for p in chain.plans)]
    names = ["dA", *(f"dB{p}" for p in range(last + 1)), *(f"dbias{p}" for p in range(last + 1))]
    try:
        shards = [
            layout.shard(t.detach(), mesh.rank).to(chain.dtype, copy=True).contiguous().requires_grad_(t.requires_grad)
            for layout, t in zip(layouts, whole, strict=True)
        ]
    except LayoutError:
        return None
    tensors = [t if there else None for t, there in zip(shards, present, strict=True)]
    weights, biases = tensors[1 : last + 2], tensors[last + 2 :]
    wants = any(t.requires_grad for t in shards)
    with CommMeter() as meter:
        try:
            if last:
                c = ndtp.ops.products.mlp(tensors[0], weights, chain.plans, mesh, chain.activation, biases)
            else:
                c = ndtp.matmul(tensors[0], weights[0], first, mesh, biases[0])
        except LayoutError:
            return None
        reference = _dense(chain, whole)
        upstream = small_integers(reference.shape, seed + 50, torch.float64, **BOUNDS)
        out = chain.plans[-1].out
        if wants:
            c.backward(out.shard(upstream, mesh.rank).to(chain.dtype))
    wrong = [] if _same(c, out.shard(reference, mesh.rank), chain.dtype) else ["C"]
    if wants:
        reference.backward(upstream)
    for name, layout, shard, tensor in zip(names, layouts, shards, whole, strict=True):
        if tensor.requires_grad != (shard.grad is not None):
            wrong.append(f"{name} is {shard.grad}")
        elif tensor.requires_grad and not _same(shard.grad, layout.shard(tensor.grad, mesh.rank), chain.dtype):
            wrong.append(name)
    predicted = _predicted(chain, [t is not None and t.requires_grad for t in tensors])
    if meter.volume != predicted:
        wrong.append(f"metered {meter.volume}, predicted {predicted}")
    if mesh.collectives.in_flight:
        wrong.append(f"{mesh.collectives.in_flight} in flight")
    return wrong


def _dense(chain: Chain, whole: list[Tensor]) -> Tensor:
    last = len(chain.plans) - 1
    x = whole[0]
    for p, plan in enumerate(chain.plans):
        a = x.mT if plan.transpose_a else x
        b = whole[1 + p].mT if plan.transpose_b else whole[1 + p]
        x = torch.matmul(a, b)
        if chain.biases[p]:
            x = x + whole[2 + last + p]
        if p < last and chain.activation == "reglu":
            x = torch.relu(x[..., ::2]) * x[..., 1::2]
        elif p < last and chain.activation == "relu":
            x = torch.relu(x)
    return x


def _predicted(chain: Chain, needs: list[bool]) -> ndtp.algebra.volume.Volume:
    count = len(chain.plans)
    total = None
    for p, (plan, (k, n)) in enumerate(zip(chain.plans, chain.widths(), strict=True)):
        dgrad = any(needs[: p + 1]) or any(needs[count + 1 : count + 1 + p])
        shape = (*chain.batch, chain.rows, k, n)
        volume = (
            plan.volume(
                shape,
                chain.dtype,
                dgrad=dgrad,
                wgrad=needs[1 + p],
                bias=chain.biases[p],
                bias_grad=needs[1 + count + p],
            )
            if any(needs)
            else plan.volume(shape, chain.dtype, dgrad=False, wgrad=False, bias=chain.biases[p], bias_grad=False)
        )
        total = volume if total is None else total + volume
    return total


def _same(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    return found.dtype == dtype and torch.equal(found.detach(), wanted.detach().to(dtype))


def check_numbers(numbers: Iterable[int], num_ranks: int, stop: int = 10**9) -> tuple[int, list[str]]:
    """How many chains ran, and what was wrong with which."""
    ran, found = 0, []
    for number in numbers:
        chain = drawn(number, num_ranks)
        if chain is None:
            continue
        try:
            wrong = problems(chain, number)
        except Exception as error:
            import traceback

            at = traceback.extract_tb(error.__traceback__)[-1]
            wrong = [f"{type(error).__name__}: {str(error)[:200]} at {at.filename.split('/')[-1]}:{at.lineno}"]
        ran += wrong is not None
        if wrong:
            found.append(f"{number}: {'; '.join(wrong)}\n    {chain}")
            if len(found) >= stop:
                break
    return ran, found


if __name__ == "__main__":
    begin, end = int(sys.argv[1]), int(sys.argv[2])
    num_ranks = int(sys.argv[3]) if len(sys.argv) > 3 else 4
    answers = run(check_numbers, num_ranks, args=(range(begin, end), num_ranks), timeout=900)
    print(answers[0][0], "ran")
    for rank, (_, found) in enumerate(answers):
        print(f"rank {rank}: {len(found)} wrong")
    for text in answers[0][1][:12]:
        print(text)

"""Checks of distributed products that several test files run on the ranks: against dense ones, and against the plan."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ndtp import CommMeter, Grid, GridError, Layout, MatMulPlan, ProcessGrid, matmul, nn
from ndtp.algebra.binding import bind
from ndtp.compute.gemm import TorchGemm
from ndtp.testing import RankPool, assert_equal, small_integers

TorchGemm.own_part_from = 0  # tiny products go the way of large ones, in every process that imports this
if "torch._dynamo.guards" in sys.modules:  # as in the ranks
    # How long guards take goes into a log alone; to measure it dynamo empties the cache, 20 ms a frame.
    sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0

# Sums of so few products of -1, 0 and 1 are exact in every dtype, whatever their order.
BOUNDS = {"low": -1, "high": 1}


@functools.cache
def mesh_of(grid: Grid) -> ProcessGrid:
    """One per grid and process: process groups are finite."""
    return ProcessGrid(grid)


@functools.cache
def turned_mesh(grid: Grid) -> ProcessGrid:
    """A grid whose first axis is the fastest in the order of the world, in which process groups have their members."""
    names = grid.names
    return ProcessGrid.from_mesh(
        init_device_mesh(torch.get_default_device().type, grid.shape[::-1], mesh_dim_names=names[::-1]),
        dict(zip(names, names, strict=True)),
    )


@dataclass(frozen=True)
class Product:
    """A product to check.  Layouts as `Layout.parse` reads them; shapes are global, as the operands are stored."""

    grid: Grid
    a: str
    b: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    out: str | None = None
    dtype: torch.dtype = torch.float32
    bias: bool = False
    needs: tuple[bool, bool] = (True, True)
    options: dict = field(default_factory=dict)

    def plan(self) -> MatMulPlan:
        out = None if self.out is None else Layout.parse(self.grid, self.out)
        return MatMulPlan(Layout.parse(self.grid, self.a), Layout.parse(self.grid, self.b), out, **self.options)


def global_shape(product: Product) -> tuple[int, ...]:
    """(*batch, M, K, N)"""
    a, b = list(product.a_shape), list(product.b_shape)
    m, k = (a[-1], a[-2]) if product.options.get("transpose_a") else (a[-2], a[-1])
    n = b[-2] if product.options.get("transpose_b") else b[-1]
    return (*torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2])), m, k, n)


def dense(product: Product, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    a = a.mT if product.options.get("transpose_a") else a
    b = b.mT if product.options.get("transpose_b") else b
    c = torch.matmul(a, b)
    return c if bias is None else c + bias


def check_product(product: Product, seed: int = 0) -> None:
    """Result and gradients are bit-equal to the dense ones, every byte is as the plan says, no handle is left over."""
    plan, mesh = product.plan(), mesh_of(product.grid)
    *_, n = shape = global_shape(product)
    shapes = (product.a_shape, product.b_shape, (n,))
    whole = [integers(product.dtype, s, seed + i) for i, s in enumerate(shapes)]
    wanted = [tensor.requires_grad_(need) for tensor, need in zip(whole, (*product.needs, product.bias), strict=True)]
    reference = dense(product, wanted[0], wanted[1], wanted[2] if product.bias else None)
    upstream = integers(product.dtype, reference.shape, seed + 3)
    layouts = (plan.a, plan.b, plan.bias)
    shards = [
        layout.shard(tensor.detach(), mesh.rank).to(product.dtype, copy=True).requires_grad_(tensor.requires_grad)
        for layout, tensor in zip(layouts, whole, strict=True)
    ]
    wants_grad = any(tensor.requires_grad for tensor in shards)
    with CommMeter() as meter:
        c = matmul(shards[0], shards[1], plan, mesh, shards[2] if product.bias else None)
        if wants_grad:
            c.backward(plan.out.shard(upstream, mesh.rank).to(product.dtype))
    assert_equal(c, plan.out.shard(reference, mesh.rank).to(product.dtype), f"{product}: C")
    if wants_grad:
        reference.backward(upstream)
    for name, layout, shard, tensor in zip(("dA", "dB", "dbias"), layouts, shards, whole, strict=True):
        if tensor.requires_grad:
            assert_equal(shard.grad, layout.shard(tensor.grad, mesh.rank).to(product.dtype), f"{product}: {name}")
        else:
            assert shard.grad is None, f"{product}: {name} was not wanted"
    bound, _ = bind(plan, shards[0].shape, shards[1].shape)
    predicted = bound.volume(shape, c.dtype, dgrad=product.needs[0], wgrad=product.needs[1], bias=product.bias)
    assert meter.volume == predicted, f"{product}: measured {meter.volume}, predicted {predicted}"
    assert not mesh.collectives.in_flight, f"{product}: handles left over"


def integers(dtype: torch.dtype, shape: Sequence[int], seed: int) -> Tensor:
    """Whole numbers in twice the precision that a check has, complex ones for a complex dtype."""
    real = small_integers(shape, seed, torch.float64, **BOUNDS)
    return torch.complex(real, small_integers(shape, seed + 100, torch.float64, **BOUNDS)) if dtype.is_complex else real


def check_products(products: Sequence[Product]) -> None:
    for product in products:
        check_product(product)


# Schemes on eight ranks where they take axes of two sizes, or three axes; on four otherwise.
CUBE = Grid(z=2, x=2, y=2)
LINE = Grid(x=4)
PLANE = Grid(x=2, y=4)
DATA = Grid(d=2, x=2)
M, K, N = 16, 32, 64

# The table of docs/: name -> grid, A, B, explicit output.
SCHEMES = {
    "1d column": (LINE, "None None", "None x", None),
    "1d row": (LINE, "None x", "x None", None),
    "1d row, scattered": (LINE, "None x", "x None", "x None"),
    "1d column, sequence parallel": (LINE, "x None", "None x", None),
    "2d feature split": (PLANE, "None (x y)", "x y", None),
    "2d row split": (PLANE, "y x", "x y", None),
    "3d": (CUBE, "(z y) x", "(x z) y", None),
    "3d, second product": (CUBE, "(z x) y", "(y z) x", None),
    "data parallel": (DATA, "d None", "None None", None),
    "fsdp": (DATA, "d None", "d None", None),
    "data parallel 1d": (DATA, "d x", "x None", None),
    "2d on a cube, z replicates": (CUBE, "y x", "x y", None),
    "sizes of 1": (Grid(z=1, x=4, y=1), "(z y) x", "(x z) y", None),
}


def scheme_product(name, **changes):
    grid, a, b, out = SCHEMES[name]
    return replace(Product(grid, a, b, (M, K), (K, N), out), **changes)


def check_on(ranks: Callable[[int], RankPool], products: Iterable[Product]) -> None:
    """Each on as many ranks as its grid has; `ranks` is the fixture."""
    by_size: dict[int, list[Product]] = {}
    for product in products:
        by_size.setdefault(product.grid.num_ranks, []).append(product)
    for num_ranks, some in by_size.items():
        ranks(num_ranks).run(check_products, some)


def shards_of(product, seed=0):
    plan, mesh = product.plan(), mesh_of(product.grid)
    whole = [small_integers(s, seed + i, **BOUNDS) for i, s in enumerate((product.a_shape, product.b_shape))]
    a, b = (layout.shard(t, mesh.rank).contiguous() for layout, t in zip((plan.a, plan.b), whole, strict=True))
    return plan, mesh, whole, a, b


def product_on(mesh: ProcessGrid) -> Tensor | None:
    """A 3D product on whatever the axes are called."""
    z, x, y = mesh.grid.names
    plan = MatMulPlan(Layout(mesh.grid, (z, y), x), Layout(mesh.grid, (x, z), y))
    a, b = small_integers((8, 8), 0), small_integers((8, 8), 1)
    b_shard = plan.b.shard(b, mesh.rank).clone().requires_grad_()
    c = matmul(plan.a.shard(a, mesh.rank), b_shard, plan, mesh)
    assert_equal(c, plan.out.shard(a @ b, mesh.rank), f"{mesh}: C")
    c.sum().backward()
    assert_equal(b_shard.grad, plan.b.shard(a.mT @ torch.ones(8, 8), mesh.rank), f"{mesh}: dB")
    if z != "z":
        return None  # DTensor has no order for K_xz of axes by other names
    layer = nn.Linear(8, 8, mesh=mesh, in_layout=plan.a, weight_layout=Layout(mesh.grid, y, (x, z)), seed=1)
    return layer.to_dense().weight


def message_of(call: Callable[[], object]) -> str:
    """What a GridError says."""
    try:
        call()
    except GridError as error:
        return str(error)
    raise AssertionError("no error")

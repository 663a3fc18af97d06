"""Mapped tensors on real ranks against dense ones: values, gradients, and every byte as planned."""

from random import Random

import pytest
import torch
import torch.nn.functional as F
from einsum_cases import in_torchs_words, random_case
from products import mesh_of

import ndtp
from ndtp import CommMeter, Grid, Layout, LayoutError, Mapped
from ndtp.algebra.einsum import ExtremePlan, elementwise
from ndtp.ops.mapped import plan_of
from ndtp.testing import assert_equal, small_integers

SQUARE = Grid(x=2, y=2)
BOUNDS = {"low": -2, "high": 2}


def mapped(shape, names, split, mesh, seed, dtype=torch.float64):
    """A dense tensor of integers and its shards, both of which want gradients."""
    dense = small_integers(shape, seed, dtype, **BOUNDS)
    return dense.requires_grad_(), Mapped.shard(dense.detach(), names, split, mesh).requires_grad_()


def compare(dense, what, operands, predicted, calls):
    """Run backward on both, and compare results, gradients and bytes.

    `operands` are pairs of a dense tensor and its mapped one; `calls` computes what was found, under a meter.
    """
    upstream = small_integers(dense.shape, 9, dense.dtype, **BOUNDS)
    mesh = operands[0][1].mesh
    with CommMeter() as meter:
        found = calls()
        found.local.backward(found.layout.shard(upstream, mesh.rank))
    dense.backward(upstream)
    assert found.shape == tuple(dense.shape), what
    assert_equal(found.local.contiguous(), found.layout.shard(dense.detach(), mesh.rank).contiguous(), what)
    for whole, shards in operands:
        assert_equal(shards.local.grad, shards.layout.shard(whole.grad, mesh.rank), f"{what}: gradient")
    assert meter.volume == predicted, f"{what}: measured {meter.volume}, predicted {predicted}"
    assert not mesh.collectives.in_flight, what
    return found


# expression, splits of the operands, shapes, split of the result
EINSUMS = [
    ("b m k, k n -> b m n", [{"m": "y", "k": "x"}, {"k": "x", "n": "y"}], [(2, 4, 8), (8, 4)], None),
    ("b s h d, b t h d -> b h s t", [{"s": "x", "h": "y"}, {"t": "x", "h": "y"}], [(2, 4, 2, 4), (2, 4, 2, 4)], None),
    ("b s h d, h d o -> b s o", [{"s": "x", "h": "y"}, {"h": "y", "d": "x"}], [(2, 4, 2, 4), (2, 4, 6)], None),
    ("m s, n -> m n", [{"s": ("y", "x")}, {"n": "x"}], [(4, 8), (4,)], {"n": ("x", "y")}),
    ("m k, m k -> ", [{"m": "x", "k": "y"}, {"k": "x"}], [(4, 4), (4, 4)], None),
    ("e m k, e k n -> e m n", [{"m": "x"}, {"k": ("y", "x")}], [(2, 4, 8), (1, 8, 4)], {"m": "x", "e": "y"}),
    ("m k -> k", [{"m": "x", "k": "y"}], [(4, 6)], {}),
    ("m k, k n, n o -> m o", [{"m": "x", "k": "y"}, {"k": "y"}, {"o": "x"}], [(4, 4), (4, 2), (2, 4)], None),
]


def check_einsums():
    mesh = mesh_of(SQUARE)
    for i, (expression, splits, shapes, out) in enumerate(EINSUMS):
        names = [own.split() for own in expression.split("->")[0].split(",")]
        pairs = [
            mapped(shape, own, split, mesh, 10 * i + j)
            for j, (shape, own, split) in enumerate(zip(shapes, names, splits, strict=True))
        ]
        dense = torch.einsum(in_torchs_words(expression), *(whole for whole, _ in pairs))
        shards = [each for _, each in pairs]
        if len(shards) < 3:
            predicted = plan_of(expression, *shards, out=out).volume(dtype=dense.dtype)
        else:
            first = plan_of("m k, k n -> m n", *shards[:2])
            between = Mapped(torch.empty(first.out.shard_shape(first.shape)), "m n", first.out, mesh)
            predicted = first.volume(dtype=dense.dtype)
            predicted += plan_of("m n, n o -> m o", between, shards[2]).volume(dtype=dense.dtype)
        compare(dense, expression, pairs, predicted, lambda e=expression, s=shards, o=out: ndtp.einsum(e, *s, out=o))


def check_overlapped():
    """What is a product of matrices takes chunks as one does."""
    mesh = mesh_of(SQUARE)
    a, ma = mapped((16, 4, 8), "s b e", {"s": "y", "e": "x"}, mesh, 1)
    w, mw = mapped((8, 2, 4), "e h d", {"e": "x", "h": "y"}, mesh, 2)
    expression = "s b e, e h d -> s b h d"
    assert plan_of(expression, ma, mw).out == Layout(SQUARE, "x", None, "y", None)
    predicted = plan_of(expression, ma, mw).volume(dtype=a.dtype)
    compare(torch.einsum("sbe,ehd->sbhd", a, w), "in chunks", [(a, ma), (w, mw)], predicted,
            lambda: ndtp.einsum(expression, ma, mw, chunks=2))  # fmt: skip


def check_random(seeds=range(120), grids=(SQUARE,)):
    """Of one and two operands, as `tests/algebra` draws them: (legal and equal to torch's, refused, left out)."""
    found = [0, 0, 0]
    for seed in seeds:
        rng = Random(seed)
        mesh = mesh_of(rng.choice(grids))
        case = random_case(rng, mesh.grid)
        if len(case.names) > 2:
            found[2] += 1
            continue
        pairs = [
            mapped(shape, own, {n: axes for n, axes in zip(own, dims, strict=True) if axes}, mesh, seed)
            for shape, own, dims in zip(case.shapes, case.names, case.dims, strict=True)
        ]
        shards = [each for _, each in pairs]
        options = {
            "out": None if case.out is None else dict(zip(case.result, case.out, strict=True)), "roles": case.roles
        }  # fmt: skip
        if not case.legal:
            with pytest.raises(LayoutError, match="fix: "):
                ndtp.einsum(case.expression, *shards, **options)
            found[1] += 1
            continue
        dense = torch.einsum(in_torchs_words(case.expression), *(whole for whole, _ in pairs))
        plan = plan_of(case.expression, *shards, **options)
        compare(dense, f"{seed}: {plan}", pairs, plan.volume(dtype=dense.dtype),
                lambda e=case.expression, s=shards, o=options: ndtp.einsum(e, *s, **o))  # fmt: skip
        found[0] += 1
    assert min(found[:2]), "none legal, or none refused"
    return tuple(found)


def check_elements():
    mesh = mesh_of(SQUARE)
    x, mx = mapped((4, 4, 8), "b s h", {"s": "x", "h": "y"}, mesh, 0)
    bias, mbias = mapped((8,), "h", {"h": "x"}, mesh, 1)
    other, mother = mapped((8, 4), "h b", {"b": ("y", "x")}, mesh, 2)
    plan = plan_of(elementwise([mx.names, mbias.names, mother.names]), mx, mbias, mother)

    def function(a, b, c):
        return torch.where(a > b, a * b, c)

    dense = function(x, bias, other.mT[:, None])
    compare(dense, "where", [(x, mx), (bias, mbias), (other, mother)], plan.volume(dtype=x.dtype),
            lambda: Mapped.apply(function, mx, mbias, mother))  # fmt: skip
    assert torch.where(mx > 0, 1.0 - mx / 2, 0.0).names == mx.names
    with CommMeter() as meter:
        local = F.gelu(-mx * 2 + 1, approximate="tanh").local
    torch.testing.assert_close(local, mx.layout.shard(F.gelu(-x * 2 + 1, approximate="tanh"), mesh.rank))
    assert not meter.volume.total
    wide = mbias.expand(t=3)
    assert wide.split == {"h": ("x",)} and wide.shape == (8, 3)
    (grad,) = torch.autograd.grad(wide.sum().local, mbias.local)
    assert_equal(grad, torch.full_like(mbias.local, 3.0), "what was repeated")
    outer = mbias + Mapped.shard(torch.arange(4.0, dtype=torch.float64), "t", {"t": "y"}, mesh)
    assert outer.names == ("h", "t") and outer.split == {"h": ("x",), "t": ("y",)}
    assert_equal(outer.to_dense(), bias.detach()[:, None] + torch.arange(4.0, dtype=torch.float64), "outer sum")


def check_reductions():
    mesh = mesh_of(SQUARE)
    split = {"s": "x", "h": "y"}
    for names, dims in (("h", (2,)), ("s h", (1, 2)), ("b", (0,)), ("h b s", (0, 1, 2))):
        for kind in ("amax", "amin"):
            x, mx = mapped((2, 4, 8), "b s h", split, mesh, 5)
            plan = ExtremePlan(plan_of(f"b s h -> {' '.join(n for n in 'bsh' if n not in names)}", mx, name=kind))
            dense = getattr(torch, kind)(x, dims)
            upstream = torch.ones_like(dense)
            with CommMeter() as meter:
                found = getattr(mx, kind)(names)
                found.local.backward(found.layout.shard(upstream, mesh.rank))
            dense.backward(upstream)
            assert_equal(found.local, found.layout.shard(dense.detach(), mesh.rank), f"{kind} over {names}")
            torch.testing.assert_close(mx.local.grad, mx.layout.shard(x.grad, mesh.rank))
            assert meter.volume == plan.volume(dtype=x.dtype), f"{kind} over {names}: {meter.volume}"
    x, mx = mapped((2, 4, 8), "b s h", split, mesh, 6)
    (mx.softmax("h") * mx.mean("b")).sum().backward()
    (x.softmax(-1) * x.mean(0)).sum().backward()
    torch.testing.assert_close(mx.grad.local, mx.layout.shard(x.grad, mesh.rank))
    everything = mx.detach().softmax("b s h")
    torch.testing.assert_close(everything.to_dense(), x.detach().flatten().softmax(0).view_as(x))
    scattered = mx.sum("h", split={"s": ("x", "y")})
    assert scattered.split == {"s": ("x", "y")}


def check_slices_and_layouts():
    mesh = mesh_of(SQUARE)
    for where, index in (
        ({"m": slice(2, 6)}, (slice(2, 6),)),
        ({"m": 5, "k": slice(4, None)}, (5, slice(4, None))),
        ({"k": -1}, (slice(None), -1)),
        ({}, ()),
    ):
        x, mx = mapped((8, 8), "m k", {"m": "x", "k": "y"}, mesh, 7)
        predicted = mx.slice_plan(where).volume(mesh.rank, dtype=x.dtype)
        compare(x[index].clone(), f"slice {where}", [(x, mx)], predicted, lambda m=mx, w=where: m.slice(**w))
    for split in ({"m": "y"}, {"k": ("y", "x")}, {"m": ("y", "x")}, {"k": "x"}, {}):
        x, mx = mapped((8, 8), "m k", {"m": ("x", "y")}, mesh, 8)
        plan = mx.relayout_plan(split)
        predicted = plan.volume(*((mesh.rank, True) if hasattr(plan, "busiest") else ((8, 8),)), dtype=x.dtype)
        compare(x.clone(), f"relayout {split}", [(x, mx)], predicted, lambda m=mx, s=split: m.relayout(s))
    line = mesh_of(Grid(d=4))
    x, mx = mapped((8, 4), "m k", {"m": "x", "k": "y"}, mesh, 9)
    moved = mx.to(line, {"m": "d"})
    assert_equal(moved.local, Layout(line.grid, "d", None).shard(x.detach(), line.rank), "on another grid")
    moved.sum().backward()
    assert_equal(mx.grad.local, torch.ones_like(mx.local), "and back")
    dense = x.detach().requires_grad_()
    (Mapped.shard(dense, "m k", {"m": ("x", "y")}, mesh) * 3.0).to_dense().sum().backward()
    assert_equal(dense.grad, torch.full_like(dense, 3.0), "the gradient of the whole is whole")


def check_dtensors():
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh = mesh_of(SQUARE)
    layout = Layout(SQUARE, "x", "y")
    whole = small_integers((4, 8), 3, torch.float32)
    weight = torch.nn.Parameter(distribute_tensor(whole, mesh.device_mesh, layout.placements_on(mesh.mesh_axes)))
    named = Mapped.from_dtensor(weight, "k n", mesh)
    assert named.split == {"k": ("x",), "n": ("y",)} and named.shape == (4, 8)
    assert named.local.data_ptr() == weight.to_local().data_ptr()
    ndtp.einsum("m k, k n -> m n", Mapped.shard(torch.ones(2, 4), "m k", {}, mesh), named).sum().backward()
    assert isinstance(weight.grad, DTensor) and weight.grad.placements == weight.placements
    assert_equal(weight.grad.to_local(), torch.full((2, 4), 2.0), "gradient of a parameter")
    back = named.detach().to_dtensor()
    assert back.placements == weight.placements and back.to_local().data_ptr() == named.local.data_ptr()
    assert_equal(back.full_tensor(), whole, "as a DTensor")
    with pytest.raises(LayoutError, match="it lies on"):
        Mapped.from_dtensor(weight, "k n", mesh_of(Grid(d=4)))


def check_refusals():
    mesh = mesh_of(SQUARE)
    x = Mapped.shard(torch.zeros(4, 6), "m k", {"m": "x"}, mesh)
    for call, error, words in (
        (lambda: Mapped.shard(torch.zeros(5, 4), "m k", {"m": "x"}, mesh), LayoutError, "do not divide"),
        (lambda: Mapped.shard(torch.zeros(4, 4), "m k", {"n": "x"}, mesh), LayoutError, "splits 'n', which is none"),
        (lambda: Mapped.shard(torch.zeros(4, 4), "m m", {}, mesh), LayoutError, "a name of its own"),
        (lambda: ndtp.einsum("m k -> m", x, x), LayoutError, "it names 1 operands, and there are 2"),
        (
            lambda: ndtp.einsum("m k, k n -> m n", x, torch.zeros(6, 3)),
            TypeError,
            "einsum 'm k, k n -> m n': a tensor that",
        ),
        (lambda: x + torch.zeros(6), TypeError, r"fix: ndtp.Mapped.shard"),
        (lambda: x + Mapped.shard(torch.zeros(8), "k", {}, mesh), LayoutError, "k is 6 in A and 8 in B"),
        (lambda: torch.cumsum(x, 0), TypeError, "no function of elements"),
        (lambda: Mapped.apply(lambda a: a.sum(), x), LayoutError, "function of elements"),
        (lambda: x.slice(m=slice(0, 4, 2)), LayoutError, "steps of 2"),
        (lambda: x.slice(m=slice(0, 3)), LayoutError, "do not divide"),
        (lambda: x.slice(n=0), LayoutError, "no dim is called 'n'; dims: m, k"),
        (lambda: x.slice(k=6), LayoutError, "no element 6"),
        (lambda: x.sum("q"), LayoutError, "no dim is called 'q'"),
        (lambda: ndtp.einsum("m k, k -> m", x, x.slice(m=0).astype(torch.float64)), LayoutError, "fix: cast them"),
    ):
        with pytest.raises(error, match=words):
            call()


def check_all():
    check_einsums()
    check_overlapped()
    check_random()
    check_elements()
    check_reductions()
    check_slices_and_layouts()
    check_dtensors()
    check_refusals()


def test_mapped_tensors(ranks):
    ranks(4).run(check_all)

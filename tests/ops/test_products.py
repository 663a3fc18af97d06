"""matmul, batch_matmul and relayout on real ranks: exact, differentiable, and no byte more than the plan says."""

import dataclasses
import itertools

import pytest
import torch
from products import (
    PLANE,
    SCHEMES,
    K,
    Product,
    check_on,
    check_product,
    check_products,
    mesh_of,
    scheme_product,
    shards_of,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import ndtp
from ndtp import CommMeter, Grid, Layout, LayoutError, MatMulPlan, ProcessGrid
from ndtp.testing import assert_equal, small_integers


def transposed(product, flags):
    """The same product of operands that are stored with their two last dims swapped."""
    swapped = {}
    for flag, name in zip(flags, ("a", "b"), strict=True):
        if flag:
            layout = Layout.parse(product.grid, getattr(product, name))
            shape = getattr(product, f"{name}_shape")
            swapped[name] = str(layout.with_dims(*layout.dims[:-2], layout.dims[-1], layout.dims[-2])).strip("'")
            swapped[f"{name}_shape"] = (*shape[:-2], shape[-1], shape[-2])
    options = {**product.options, "transpose_a": flags[0], "transpose_b": flags[1]}
    return dataclasses.replace(product, options=options, **swapped)


# ---- results, gradients and bytes ----


@pytest.mark.parametrize("name", SCHEMES)
def test_scheme_is_exact_with_both_transposes_and_regather(ranks, name):
    flags = list(itertools.product((False, True), repeat=2))
    products = [transposed(scheme_product(name, bias=f[0] == f[1]), f) for f in flags]
    products += [
        dataclasses.replace(scheme_product(name, bias=True), options={"regather": regather})
        for regather in (("a",), ("b",), ("a", "b"))
    ]
    check_on(ranks, products)


def test_dtypes_are_exact(ranks):
    """Sums stay below 2^8, so that bf16 holds them: any rounding of a partial sum would show.  The others by turns."""
    others = zip(SCHEMES, itertools.cycle((torch.float64, torch.float16, torch.complex64)), strict=False)
    check_on(
        ranks,
        [scheme_product(n, dtype=t, bias=True) for n, t in [*dict.fromkeys(SCHEMES, torch.bfloat16).items(), *others]],
    )


def held_to_stored():
    """Every row of the table, for C and, by the layouts of A and B, for the gradients."""
    grid = Grid(x=2, y=2)
    every = Product(grid, "None x", "x None", (16, 32), (32, 8))
    for out in ("None None", "x None", "None x", "(x y) None", "x y", "y x", "None (x y)", "(y x) None", "None (y x)"):
        yield dataclasses.replace(every, out=out)  # partial -> replicated, split; replicated -> slice
    for out in ("y None", "None y", "None None", "x y", "(y x) None", "y x", "None (y x)"):
        yield Product(grid, "y None", "None None", (16, 32), (32, 8), out)  # split -> replicated, split, moved
        yield Product(grid, "None None", "None y", (16, 32), (32, 8), out if out[0] != "y" else "None None")
    for a, b in itertools.product(("None None", "x None", "None x", "y x", "(x y) None"), repeat=2):
        yield Product(grid, a, b, (16, 32), (32, 8))  # gathered, replicated inputs sliced
    # An axis that overrides its role: gathered where it would have contracted.
    yield Product(grid, "None x", "x None", (16, 32), (32, 8), options={"roles": {"x": "m"}})
    yield Product(grid, "None x", "x None", (16, 32), (32, 8), options={"roles": {"x": "n", "y": "k"}})


def test_every_row_of_the_relayout_table(ranks):
    cases = [dataclasses.replace(product, bias=turn % 2 == 0) for turn, product in enumerate(held_to_stored())]
    legal = []
    for case in cases:
        try:
            case.plan()
        except LayoutError:
            continue
        legal.append(case)
    assert len(legal) > 30 and {case.bias for case in legal} == {False, True}
    kinds = {step.step.kind for case in legal for step in case.plan().steps}
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice"}
    ranks(4).run(check_products, legal)


def test_batched(ranks):
    grid = Grid(e=2, x=2, y=2)
    cases = [
        Product(grid, "e None x", "e x y", (4, 8, 8), (4, 8, 4)),
        Product(grid, "e y x", "e x y", (4, 8, 8), (4, 8, 4)),
        Product(grid, "None y x", "e x y", (4, 8, 8), (4, 8, 4)),  # A is sliced over e
        Product(grid, "e y x", "None x y", (4, 8, 8), (4, 8, 4)),
        Product(grid, "e y x", "x y", (4, 8, 8), (8, 4)),  # B lacks the batch dim
        Product(grid, "y x", "e x y", (8, 8), (4, 8, 4)),
        Product(grid, "e y x", "None x y", (4, 8, 8), (1, 8, 4)),  # B is broadcast
        Product(grid, "None y x", "e x y", (1, 8, 8), (4, 8, 4)),
        Product(grid, "e None None x", "y x None", (2, 4, 4, 8), (4, 8, 4)),
        Product(grid, "e None y x", "e None x y", (2, 1, 4, 8), (2, 3, 8, 4)),
        Product(grid, "(e x) None None", "(e x) None y", (4, 4, 8), (4, 8, 4)),
        Product(grid, "e None x", "e x y", (4, 8, 8), (4, 8, 4), "None None (y x)"),
        Product(grid, "e None x", "e x y", (4, 8, 8), (4, 8, 4), "x e y"),
    ]
    flags = list(itertools.product((False, True), repeat=2))
    turns = itertools.cycle(flags[1:])  # of operands that are stored transposed
    ranks(8).run(check_products, [*cases, *(transposed(case, f) for case, f in zip(cases, turns, strict=False))])


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
def test_what_needs_no_gradient_costs_nothing(ranks, needs):
    """A frozen weight or input skips its product and its collectives: the meter says so.

    Gathered again or not by turns, and the other way round where it is the other operand that needs none.
    """
    cases = [
        scheme_product(name, needs=needs, bias=turn // 2 % 2 == 0, options={"regather": (("a", "b"), ())[turn % 2]})
        for turn, name in enumerate(SCHEMES, needs[1])
    ]
    check_on(ranks, cases)


def test_fewer_ranks(ranks):
    ranks(2).run(check_products, [Product(Grid(x=2), "None x", "x None", (4, 8), (8, 4), bias=True)])
    ranks(4).run(check_products, [Product(Grid(z=4, x=1, y=1), "(z y) x", "(x z) y", (4, 8), (8, 4), bias=True)])


def test_world_size_one_needs_no_process_group():
    assert not torch.distributed.is_initialized()
    check_product(Product(Grid(z=1, x=1, y=1), "(z y) x", "(x z) y", (3, 5), (5, 7), bias=True))
    check_product(Product(Grid(x=1), "None x", "x None", (3, 5), (5, 7), bias=True))
    assert not torch.distributed.is_initialized()


def test_zero_rows(ranks):
    dtypes = itertools.cycle((torch.float32, torch.bfloat16))
    cases = [
        scheme_product(name, a_shape=(0, K), bias=True, dtype=dtype)
        for name, dtype in zip(SCHEMES, dtypes, strict=False)
    ]
    cases += [scheme_product("3d", a_shape=(0, K), bias=True, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    cases += [Product(PLANE, "y x", "x y", (8, 0), (0, 8), bias=True)]
    check_on(ranks, cases)


# ---- operands and gradients of every memory layout ----


def strides(product):
    plan, mesh, (a_whole, b_whole), a, b = shards_of(product)
    expected = a_whole @ b_whole
    # Column-major and with gaps.
    a_strided = torch.empty(a.shape[0], 2 * a.shape[1])[:, ::2].copy_(a).requires_grad_()
    b_strided = b.t().contiguous().t().requires_grad_()
    assert not a_strided.is_contiguous()
    c = ndtp.matmul(a_strided, b_strided, plan, mesh)
    assert_equal(c, plan.out.shard(expected, mesh.rank), "C of strided operands")
    # The gradient of a sum is expanded from one element.
    c.sum().backward()
    ones = torch.ones_like(expected)
    assert_equal(a_strided.grad, plan.a.shard(ones @ b_whole.mT, mesh.rank), "dA of a sum")
    assert_equal(b_strided.grad, plan.b.shard(a_whole.mT @ ones, mesh.rank), "dB of a sum")
    # A transposed gradient, and expanded operands.
    a.requires_grad_()
    ndtp.matmul(a, b, plan, mesh).backward(torch.ones(c.shape[::-1]).t())
    assert_equal(a.grad, plan.a.shard(ones @ b_whole.mT, mesh.rank), "dA of a transposed gradient")
    flat = ndtp.matmul(torch.ones(1, 1).expand(a.shape), torch.ones(1, 1).expand(b.shape), plan, mesh)
    assert_equal(flat, torch.full_like(flat, a_whole.shape[1]), "C of expanded operands")
    assert not mesh.collectives.in_flight, "handles left over"


@pytest.mark.parametrize("name", SCHEMES)
def test_non_contiguous_and_expanded(ranks, name):
    product = scheme_product(name)
    ranks(product.grid.num_ranks).run(strides, product)


def relayouts(grid, layouts, shape):
    """Every pair of layouts; returns those that were refused."""
    mesh, refused = mesh_of(grid), []
    whole, upstream = small_integers(shape, 1), small_integers(shape, 2)
    for texts in itertools.product(layouts, repeat=2):
        source, target = (Layout.parse(grid, text) for text in texts)
        x = source.shard(whole, mesh.rank).clone().requires_grad_()
        try:
            y = ndtp.relayout(x, source, target, mesh)
        except LayoutError:
            refused.append(texts)
            continue
        assert_equal(y, target.shard(whole, mesh.rank), f"{source} -> {target}")
        y.backward(target.shard(upstream, mesh.rank))
        assert_equal(x.grad, source.shard(upstream, mesh.rank), f"{source} -> {target}, gradient")
    assert not mesh.collectives.in_flight, "handles left over"
    return refused


def shared_axes_lead(source, target):
    """In every dim the axes that stay must be the major ones, in one order: then blocks stay whole."""
    for s, t in zip(source.dims, target.dims, strict=True):
        stay = [axis for axis in s if axis in t]
        if list(s[: len(stay)]) != stay or list(t[: len(stay)]) != stay:
            return False
    return True


def test_relayout_between_all_layouts(ranks):
    grid = Grid(x=2, y=4)
    layouts = ["None None", "x None", "None x", "y None", "None y", "(x y) None", "None (x y)"]
    layouts += ["x y", "y x", "(y x) None", "None (y x)"]
    illegal = [
        pair
        for pair in itertools.product(layouts, repeat=2)
        if not shared_axes_lead(*(Layout.parse(grid, text) for text in pair))
    ]
    assert 0 < len(illegal) < 30
    for refused in ranks(8).run(relayouts, grid, layouts, (16, 8)):
        assert refused == illegal


# ---- autograd ----


def without_values(function, *given):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return function(*given)


def mutating(call, *given):
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        return call(*given)


def errors():
    grid = Grid(z=2, x=2, y=2)
    mesh = mesh_of(grid)
    plan = MatMulPlan(Layout.parse(grid, "(z y) x"), Layout.parse(grid, "(x z) y"), name="up")
    batched = MatMulPlan(Layout.parse(grid, "z y x"), Layout.parse(grid, "z x y"))
    scattered = MatMulPlan(*(Layout.parse(grid, text) for text in ("None x", "x None", "x None")))
    a, b = torch.ones(4, 16), torch.ones(8, 32)
    other = Grid(x=8)
    other_plan = MatMulPlan(Layout(other, None, "x"), Layout(other, "x", None))
    x_rows, rows = Layout.parse(grid, "x None"), Layout.parse(grid, "None None")
    calls = {
        "dtype": lambda: ndtp.matmul(a, b.double(), plan, mesh),
        "bias dtype": lambda: ndtp.matmul(a, b, plan, mesh, torch.ones(32).double()),
        "k": lambda: ndtp.matmul(torch.ones(4, 24), b, plan, mesh),
        "ndim": lambda: ndtp.matmul(torch.ones(2, 4, 16), b, plan, mesh),
        "grid": lambda: ndtp.matmul(a, b, other_plan, mesh),
        "bias": lambda: ndtp.matmul(a, b, plan, mesh, torch.ones(64)),
        "divide": lambda: ndtp.matmul(torch.ones(3, 2), torch.ones(2, 1), scattered, mesh),
        "no batch": lambda: ndtp.batch_matmul(a, b, plan, mesh),
        "batch": lambda: ndtp.batch_matmul(torch.ones(2, 4, 16), torch.ones(3, 16, 32), batched, mesh),
        "trace": lambda: make_fx(lambda a: ndtp.matmul(a, b, plan, mesh))(a),
        "mutation": lambda: mutating(ndtp.matmul, a, b, plan, mesh),
        "no values": lambda: without_values(ndtp.matmul, a, b, plan, mesh),
        "sparse": lambda: ndtp.matmul(a.to_sparse(), b, plan, mesh),
        "nothing": lambda: ndtp.matmul(a, None, plan, mesh),
        "no plan": lambda: ndtp.matmul(a, b, None, mesh),
        "no mesh": lambda: ndtp.matmul(a, b, plan, mesh.grid),
        "relayout ndim": lambda: ndtp.relayout(torch.ones(4), x_rows, rows, mesh),
        "relayout divide": lambda: ndtp.relayout(torch.ones(3, 3), rows, x_rows, mesh),
        "relayout grid": lambda: ndtp.relayout(torch.ones(8, 8), Layout(other, "x", None), rows, mesh),
        "relayout mesh": lambda: ndtp.relayout(
            torch.ones(8, 8), Layout(other, "x", None), Layout(other, None, "x"), mesh
        ),
    }
    messages = {}
    with CommMeter() as meter:
        for name, call in calls.items():
            try:
                call()
            except (LayoutError, TypeError) as error:
                messages[name] = str(error)
            else:
                raise AssertionError(f"{name}: no error")
    assert not meter.volume.entries, f"communicated before the check: {meter.volume}"
    return messages


def test_errors_name_what_is_wrong_on_every_rank_alike(ranks):
    messages = ranks(8).run(errors)
    assert all(message == messages[0] for message in messages)
    for name, words in {
        "dtype": ["'up'", "float32", "float64", "fix"],
        "k": ["K is 48 in A", "32 in B", "fix"],
        "ndim": ["'up'", "(2, 4, 16)", "2 dims"],
        "grid": ["z=2 x=2 y=2", "x=8"],
        "bias": ["bias", "(64,)", "(32,)"],
        "divide": ["does not divide", "fix"],
        "no batch": ["batch dims", "ndtp.matmul"],
        "batch": ["4 in A", "6 in B"],
        "trace": ["all_gather", "up", "make_fx", "fix"],
        "mutation": ["all_gather", "up", "allow_mutation_on_saved_tensors", "fix"],
        "no values": ["all_gather", "up", "FakeTensorMode", "fix"],
        "sparse": ["'up'", "A is a torch.sparse_coo tensor", "fix"],
        "nothing": ["'up'", "B is a NoneType", "fix"],
        "no plan": ["the plan is a NoneType", "fix"],
        "no mesh": ["the mesh a Grid", "fix"],
        "relayout ndim": ["1 dims"],
        "relayout grid": ["x=8", "z=2 x=2 y=2"],
        "relayout mesh": ["x=8", "z=2 x=2 y=2"],
    }.items():
        for word in words:
            assert word in messages[0][name], (name, word, messages[0][name])


def dtensors(product):
    """A DTensor operand is taken by its shard, and gets a DTensor gradient; one that lies otherwise is refused."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    plan, mesh, (a_whole, b_whole), a, b = shards_of(product)
    placements = plan.b.placements_on(mesh.mesh_axes)
    weight = torch.nn.Parameter(DTensor.from_local(b, mesh.device_mesh, placements, run_check=False))
    ndtp.matmul(a, weight, plan, mesh).sum().backward()
    assert weight.grad.placements == placements, "placements of the gradient"
    assert_equal(weight.grad.full_tensor(), a_whole.mT @ torch.ones(a_whole.shape[0], b_whole.shape[1]), "dB")
    swapped = tuple(Shard(1 - p.dim) if p.is_shard() else Replicate() for p in placements)
    wrong = DTensor.from_local(b, mesh.device_mesh, swapped, run_check=False)
    try:
        ndtp.matmul(a, wrong, plan, mesh)
    except LayoutError as error:
        return str(error)
    raise AssertionError("a DTensor that lies otherwise than the plan says was taken for one that does")


def test_dtensor_operands(ranks):
    product = Product(Grid(x=2, y=2), "y x", "x y", (8, 8), (8, 8))
    for message in ranks(4).run(dtensors, product):
        assert "DTensor" in message and "B" in message


def one_rank_of_many():
    """A grid of one rank inside a world of many communicates with nobody."""
    mesh = ProcessGrid(Grid(x=1, y=1))
    layout = Layout(mesh.grid, "x", "y")
    with CommMeter() as meter:
        c = ndtp.matmul(torch.ones(2, 3), torch.ones(3, 4), MatMulPlan(layout, layout), mesh)
    assert_equal(c, torch.full((2, 4), 3.0))
    assert not meter.volume.entries, "no communication"


def test_grid_of_one_rank_in_a_world_of_many(ranks):
    ranks(2).run(one_rank_of_many)

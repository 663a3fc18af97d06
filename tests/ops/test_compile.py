"""Under `torch.compile(fullgraph=True)`: results, gradients and bytes are those of eager mode, to the bit."""

import gc
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from products import BOUNDS, mesh_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from turns import by_turns

import ndtp
from ndtp import CommMeter, Grid, Layout, LayoutError, MatMulPlan, ProcessGrid
from ndtp.algebra.schemes import block_layouts
from ndtp.compute.devices import KINDS
from ndtp.ops.products import mlp
from ndtp.runtime import chunk_count
from ndtp.testing import assert_equal, small_integers

ROWS, HIDDEN, INNER = 32, 8, 16


def compiled(function, backend="aot_eager", ops=None, on=None):
    """The names of all operations in its graphs are appended to `ops`.

    Given a rank as `on`, that one compiles, and the others run the function itself: what they exchange is the same, but
    for weights of modules, which eager code gathers ahead.
    """
    if on not in (None, dist.get_rank()):
        return function
    import torch._dynamo
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # or every rank starts processes for it, which import torch
    torch.compiler.config.force_disable_caches = True  # they do not see that an op's autograd formula changed

    torch._dynamo.reset()
    inner = torch._dynamo.lookup_backend(backend)

    def noting(graph, inputs):
        if ops is not None:
            ops.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return inner(graph, inputs)

    return torch.compile(function, backend=noting, fullgraph=True)


def shard_of(layout, shape, mesh, seed, **options):
    return layout.shard(small_integers(shape, seed, **BOUNDS, **options), mesh.rank).clone()


def with_integers(module, mesh):
    """Parameters whose products are exact."""
    for i, parameter in enumerate(module.parameters()):
        local = getattr(parameter, "_local_tensor", parameter.data)
        local.copy_(small_integers(local.shape, 10 + i + 100 * mesh.rank, **BOUNDS))
    return module


def outcome(function, x, leaves=()):
    """The result, all gradients, and the traffic of a step."""
    x = x.detach().clone().requires_grad_()
    for leaf in leaves:
        leaf.grad = None
    with CommMeter() as meter:
        y = function(x)
        y.backward(small_integers(y.shape, 5, y.dtype, **BOUNDS))
    gradients = [getattr(leaf.grad, "_local_tensor", leaf.grad) for leaf in leaves]
    return [y.detach(), x.grad, *gradients], meter.volume


def assert_same_step(eager, traced, x, leaves=(), what=""):
    expected, volume = outcome(eager, x, leaves)
    for step in range(2):
        measured, traffic = outcome(traced, x, leaves)
        for i, (one, other) in enumerate(zip(measured, expected, strict=True)):
            assert (one is None) == (other is None), f"{what} step {step}: tensor {i}"
            if one is not None:
                assert_equal(one, other, f"{what} step {step}: tensor {i}")
        assert traffic == volume, f"{what}: {traffic} against {volume}"
    return volume


@pytest.mark.real
@pytest.mark.parametrize("regather", [(), ("a", "b")], ids=str)
def test_ops_pass_the_checks_of_torch(regather):
    import ndtp.ops.compiled_reductions  # noqa: F401 (makes the op)
    from ndtp.ops.compiled import chain_text

    mesh = ProcessGrid(Grid(x=1, y=1, z=1))
    plans = block_layouts(mesh.grid, "3d").plans("block", chunks=2, regather=regather)
    shapes = ((4, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER), (INNER,))
    for needs in ((True,) * 4, (False, True, False, True)):
        tensors = [torch.randn(shape, requires_grad=need) for shape, need in zip(shapes, needs, strict=True)]
        # With "identity" the second product's A is the first one's result, which is kept too.
        text = chain_text((tensors[3], None), plans, ("identity", None), mesh)
        torch.library.opcheck(torch.ops.ndtp.mlp.default, (tensors, text, list(needs)))
    arguments = (tensors[0], mesh.name, "(x) ()\n() (x)\n\ny\nrelayout\nactivations", "forward")
    torch.library.opcheck(torch.ops.ndtp.relayout.default, arguments)


def test_any_number_of_chunks_is_written_down():
    from ndtp.ops.compiled import chain_text

    mesh = ProcessGrid(Grid(x=1))
    plan = MatMulPlan(Layout(mesh.grid, None, "x"), Layout(mesh.grid, "x", None), chunks=10**9)
    assert "|1000000000|" in chain_text((None,), (plan,), (None,), mesh)


def test_a_grid_that_is_gone_is_named():
    from ndtp.runtime.process_grid import grid_named

    mesh = ProcessGrid(Grid(x=1))
    name = mesh.name
    assert grid_named(name) is mesh
    del mesh
    gc.collect()
    with pytest.raises(ndtp.errors.GridError, match=r"'x=1 #\d+' of a compiled function is gone"):
        grid_named(name)


# ---- products and blocks ----

FIXED, TRAINED = (True, False), (True, True)  # the bias beside its weight
PRODUCTS = [
    (Grid(x=2, y=2), "None (x y)", "x y", {}, (FIXED,)),
    (Grid(x=2, y=2), "y x", "x y", {"regather": ("a",)}, (TRAINED, FIXED)),
    (Grid(x=2, z=2), "z x", "(x z) None", {"chunks": 2}, (TRAINED,)),
    (Grid(x=2, z=2), "z x", "(x z) None", {"chunks": "auto", "regather": ("b",)}, (FIXED,)),
    (Grid(x=4), "None x", "x None", {}, (TRAINED,)),
]


def products():
    """One compiled function for all plans: it must not take one for another."""

    def product(x, weight, bias, plan, mesh):
        return ndtp.matmul(x, weight, plan, mesh, bias)

    ops = []
    traced = compiled(product, ops=ops, on=3)
    for grid, a, b, options, trained in PRODUCTS:
        mesh = mesh_of(grid)
        plan = MatMulPlan(Layout.parse(grid, a), Layout.parse(grid, b), **options)
        x, weight, bias = (
            shard_of(layout, shape, mesh, seed)
            for seed, (layout, shape) in enumerate(((plan.a, (ROWS, 8)), (plan.b, (8, 16)), (plan.bias, (16,))))
        )
        for needs in trained:
            leaves = [tensor.requires_grad_(need) for tensor, need in zip((weight, bias), needs, strict=True)]
            eager, other = (
                (lambda x, f=function: f(x, weight, bias, plan, mesh)) for function in (product, traced)  # noqa: B023
            )  # fmt: skip
            volume = assert_same_step(eager, other, x, leaves, f"{grid} {a} {b} {options} {needs}")
            planned = plan.volume((ROWS, 8, 16), wgrad=True, bias=True, bias_grad=needs[1])
            assert volume == planned
        assert not mesh.collectives.in_flight
    named = {op for op in ops if "built-in" not in op}
    assert named == {"ndtp.mlp.default"} or (traced is product and not named), named


def test_products(ranks):
    ranks(4).run(products)


def rejected():
    mesh = mesh_of(Grid(x=2, y=2))
    plan = MatMulPlan(Layout.parse(mesh.grid, "y x"), Layout.parse(mesh.grid, "x y"), name="narrow")
    traced = compiled(lambda x, weight: ndtp.matmul(x, weight, plan, mesh))
    with CommMeter() as meter, pytest.raises(Exception, match=r"MatMul 'narrow'.*K is 8 in A .* and 16 in B"):
        traced(torch.zeros(4, 4), torch.zeros(8, 4))
    assert not meter.volume.total


def test_what_does_not_fit_is_refused_while_compiling(ranks):
    ranks(4).run(rejected)


def module_cases(grid, scheme, backend="aot_eager", on=None, **options):
    mesh = mesh_of(grid)
    block = with_integers(ndtp.nn.MLP(HIDDEN, INNER, "relu", mesh=mesh, scheme=scheme, **options), mesh)
    x = shard_of(block.in_layout, (ROWS, HIDDEN), mesh, 1)
    ops = []
    traced = compiled(block, backend, ops, on)
    volume = assert_same_step(block, traced, x, list(block.parameters()), f"{grid} {scheme} {options}")
    assert volume == block.volume(ROWS)
    expected = [] if traced is block else ["ndtp.mlp.default"]
    assert [op for op in ops if op.startswith("ndtp")] == expected, "the block is one op"
    assert not mesh.collectives.in_flight


def test_a_block_is_one_op(ranks):
    """One on z: `modes`; a gated one: nn/test_gated.py."""
    ranks(2).run(module_cases, Grid(x=2), "1d-sp", on=1, regather=("a",))


@pytest.mark.real
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(ranks):
    """Compiled on every rank."""
    ranks(2).run(module_cases, Grid(x=2), "1d-sp", "inductor", chunks=2)


def measured_while_compiling():
    """`chunks="auto"` of a grid that never ran eagerly: its ranks measure together when they compile."""
    mesh = ProcessGrid(Grid(x=2))
    block = with_integers(ndtp.nn.MLP(HIDDEN, INNER, "relu", mesh=mesh, scheme="1d-sp", chunks="auto"), mesh)
    x = shard_of(block.in_layout, (ROWS, HIDDEN), mesh, 1)
    traced, measure, seen = compiled(block), chunk_count.measure, []
    few = replace(KINDS["cpu"], chunks_from=(0, 0), probe_bytes=2**12, probe_side=32, probe_gathers=1)

    def noting(*arguments, **options):
        # gloo's threads inherit it, and then wait for the interpreter's lock: a deadlock, now and then.
        seen.append(torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher))
        return measure(*arguments, **options)

    with (
        mock.patch.dict(KINDS, cpu=few, cuda=few),
        mock.patch.object(chunk_count, "shared_processors", return_value=0),
        mock.patch.object(chunk_count, "measure", noting),
    ):
        with torch.no_grad():
            inferred = traced(x)
            assert not seen, "nobody waits for others while it compiles for inference"
            assert_equal(inferred, block(x), "inference")
            assert not seen, "compiled and eager code choose alike"
        traced(x)
    assert seen == [False], seen
    assert_same_step(block, traced, x, list(block.parameters()), "auto")


def test_auto_chunks_while_compiling(ranks):
    ranks(2).run(measured_while_compiling)


# ---- models ----


class Model(nn.Module):
    """A norm, a pair whose sizes need padding, and something after it."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 11), nn.Linear(11, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x + self.down(torch.relu(self.up(x))))


def parallelized():
    mesh = mesh_of(Grid(x=2))
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(small_integers(parameter.shape, i, **BOUNDS))
    ndtp.parallelize(model, mesh, {"up": "up", "down": "down"}, scheme="1d-sp", check=False)
    x = small_integers((5, 3, 6), 7, **BOUNDS)
    ops = []
    traced = compiled(model, ops=ops, on=1)
    assert_same_step(model, traced, x, list(model.parameters()), "parallelize")
    expected = 0 if traced is model else 2
    assert ops.count("ndtp.relayout.default") == ops.count("ndtp.mlp.default") == expected, ops


def test_a_model_that_was_parallelized(ranks):
    ranks(2).run(parallelized)


class Named(nn.Module):
    """What lies between its layers is checked as it runs, and as it is compiled."""

    def __init__(self, between):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 11), nn.Linear(6, 11), nn.Linear(11, 6)
        self.between = between

    def forward(self, x):
        return x + self.down(self.between(self.up(x), self.gate(x)).to(self.down.weight.dtype))


def named(between, ranks):
    torch.manual_seed(0)
    plan = {"up": "up", "gate": "gate", "down": "down"}
    model = ndtp.parallelize(Named(between), mesh_of(Grid(x=ranks)), plan, scheme="1d-sp", check=False)
    return model, torch.randn(5, 3, 6)


def named_pairs():
    def known(h, g):
        g = torch.where(g > 0, F.silu(g), 0.1 * g.pow(2)) * (g.numel() / g.shape[-1])
        return F.relu(h.clamp(max=0.5) + 1, inplace=True) * g

    model, x = named(known, ranks=2)
    expected, _ = outcome(model, x, list(model.parameters()))
    for one, other in zip(outcome(compiled(model, on=0), x, list(model.parameters()))[0], expected, strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_refused_or_drawn_between_a_named_pair():
    model, x = named(lambda h, g: torch.softmax(h, -1) * g, ranks=1)
    with pytest.raises(LayoutError, match="softmax"):
        torch.compile(model, backend="aot_eager")(x)
    model, x = named(lambda h, g: F.dropout(h, 0.5) * g, ranks=1)
    results = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        torch.manual_seed(3)
        results.append(run(x))
    torch.testing.assert_close(*results)


def test_what_lies_between_a_named_pair(ranks):
    ranks(2).run(named_pairs)


def modes(way):
    mesh = mesh_of(Grid(z=2, x=1, y=1))
    block = with_integers(ndtp.nn.MLP(HIDDEN, INNER, "relu", mesh=mesh, regather=("b",), chunks=2), mesh)
    x = shard_of(block.in_layout, (ROWS, HIDDEN), mesh, 1)
    leaves = list(block.parameters())
    element = 4

    def run(x):
        return block(x)

    if way == "checkpoint":

        def run(x):
            return checkpoint(block, x, use_reentrant=False)

    elif way == "autocast":
        element, kind = 2, torch.get_default_device().type

        def run(x):
            with torch.autocast(kind, torch.bfloat16):
                return block(x)

    ops = []
    traced = compiled(run, ops=ops)
    volume = assert_same_step(run, traced, x, leaves, way)
    if way == "plain":
        assert [op for op in ops if op.startswith("ndtp")] == ["ndtp.mlp.default"], "the block is one op"
    if way == "checkpoint":
        plain = outcome(block, x, leaves)
        for one, other in zip(outcome(traced, x, leaves)[0], plain[0], strict=True):
            assert_equal(one, other, "checkpointed against plain")
        assert volume.by("phase")["forward"] == 2 * plain[1].by("phase")["forward"], "forward runs twice"
    else:
        told = block.volume(ROWS)
        assert volume.by("axes", "elements") == told.by("axes", "elements") and volume.total == element * told.elements
    for grad_mode in (torch.no_grad, torch.inference_mode):
        with CommMeter() as expected:
            y = run(x)
        with grad_mode(), CommMeter() as meter:
            measured = traced(x)
        assert_equal(measured, y.detach(), grad_mode.__name__)
        assert meter.volume == expected.volume, f"{grad_mode.__name__}: what moves depends on the grad mode"
        assert not measured.requires_grad


@pytest.mark.parametrize("way", by_turns(["plain", "checkpoint", "autocast"], 3))
def test_modes(ranks, way):
    ranks(2).run(modes, way)


def functional_block():
    """`ndtp.ops.products.mlp` on plain shards, of which some want no gradient; and again with another number of
    rows.
    """
    mesh = mesh_of(Grid(x=2, y=2))
    plans = block_layouts(mesh.grid, "2d-features").plans("block", chunks=2)
    up, down = (
        shard_of(plan.b, shape, mesh, seed)
        for seed, (plan, shape) in enumerate(zip(plans, ((INNER, HIDDEN), (HIDDEN, INNER)), strict=True))
    )
    down.requires_grad_()

    def block(x):
        return mlp(x, (up, down), plans, mesh, "relu")

    traced = compiled(block, on=3)
    for rows in (ROWS, 2 * ROWS):
        x = shard_of(plans[0].a, (rows, HIDDEN), mesh, 3)
        assert_same_step(block, traced, x, [down], f"{rows} rows")


def test_other_rows_and_frozen_weights(ranks):
    ranks(4).run(functional_block)

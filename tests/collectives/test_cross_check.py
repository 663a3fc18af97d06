"""check=True: a rank that deviates is named on all ranks, and nobody hangs."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import ndtp
from ndtp import CommMeter, Grid, Layout, MatMulPlan, MismatchError, ProcessGrid
from ndtp.ops import compiled
from ndtp.testing import assert_equal

GRID = Grid(x=2, y=2)
DEVIANT = 2


def deviate(how):
    """All ranks multiply alike but one; returns the message of the error, and what works afterwards."""
    mesh = ProcessGrid(GRID, check=True, timeout=60)
    deviant = mesh.rank == DEVIANT
    a, b = torch.ones(4, 2), torch.ones(2, 4, requires_grad=True)
    layouts, options = ["y x", "x y", None], {}
    if deviant:
        if how == "shape":
            a = torch.ones(6, 2)
        elif how == "dtype":
            a, b = a.double(), b.double()
        elif how == "out":
            layouts[2] = "None y"
        elif how == "roles":
            options["roles"] = {"y": "m"}
        elif how == "regather":
            options["regather"] = ("a",)
        elif how == "gradient":
            b = b.detach()
        elif how == "chunks":
            options["chunks"] = "auto"
        elif how == "bias":
            options["bias"] = torch.ones(4)
        elif how == "grid":
            other = Grid(x=4, y=1)
    grid = other if deviant and how == "grid" else GRID
    bias = options.pop("bias", None)
    a_layout, b_layout, out = (None if text is None else Layout.parse(grid, text) for text in layouts)
    plan = MatMulPlan(a_layout, b_layout, out, **options)
    message = None
    try:
        if how == "activation":
            down = MatMulPlan(plan.out, Layout.parse(GRID, "y x"))
            ndtp.ops.products.mlp(a, (b, torch.ones(4, 2)), (plan, down), mesh, "silu" if deviant else "gelu")
        elif how == "needs":  # as the compiler hands it over
            text = compiled.chain_text((None,), (plan,), (None,), mesh)
            compiled.IMPLEMENTATIONS["ndtp::mlp"]([a, b.detach()], text, [deviant, True])
        elif how == "accumulate":
            with mesh.accumulate() if deviant else nullcontext():
                ndtp.matmul(a, b, plan, mesh)
        elif how == "relayout":
            target = Layout.parse(GRID, "y None" if deviant else "None None")
            ndtp.relayout(a, Layout.parse(GRID, "y x"), target, mesh)
        else:
            ndtp.matmul(a, b, plan, mesh, bias)
    except MismatchError as error:
        message = str(error)
    assert not mesh.collectives.in_flight, "handles left over"
    # The groups are still in step.
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.group(("x",)))
    assert total.item() == 2, "the group works after the error"
    return message


HOWS = ["shape", "dtype", "out", "roles", "regather", "gradient", "bias", "grid", "relayout", "activation", "chunks"]


@pytest.mark.parametrize("how", [*HOWS, "accumulate", "needs"])
def test_the_deviating_rank_is_named_on_all_ranks(ranks, how):
    messages = ranks(4).run(deviate, how, timeout=100)
    assert messages[0] is not None and all(message == messages[0] for message in messages), messages
    assert f"rank {DEVIANT} (x=1, y=0)" in messages[0]
    assert "rank 0 (" not in messages[0] and "3 ranks" in messages[0]
    word = {"shape": "(6, 2)", "dtype": "float64", "out": "C[M, N_y]", "grid": "x=4"}.get(how, "")
    word = {
        "activation": "; silu",
        "chunks": "chunks by nothing measured",
        "accumulate": "accumulating",
        "needs": "[True, True]",
    }.get(how, word)
    assert word in messages[0]


def agree():
    """Agreeing ranks get the product; the check's own bytes are a phase of their own."""
    mesh = ProcessGrid(GRID, check=True)
    plan = MatMulPlan(Layout.parse(GRID, "y x"), Layout.parse(GRID, "x y"))
    with CommMeter() as meter:
        c = ndtp.matmul(torch.ones(4, 2), torch.ones(2, 4), plan, mesh)
    assert_equal(c, torch.full((4, 4), 4.0))
    by_phase = meter.volume.by("phase")
    assert set(by_phase) == {"forward", "check"}, by_phase
    assert by_phase["forward"] == plan.volume((8, 4, 8), dgrad=False, wgrad=False).total


def test_agreeing_ranks_get_the_product(ranks):
    ranks(4).run(agree)


def test_one_rank_checks_nothing():
    mesh = ProcessGrid(Grid(x=1), check=True)
    plan = MatMulPlan(Layout(mesh.grid, None, "x"), Layout(mesh.grid, "x", None))
    assert_equal(ndtp.matmul(torch.ones(1, 2), torch.ones(2, 1), plan, mesh), torch.tensor([[2.0]]))


def read_different_tables():
    """One rank's cache holds a tuned entry that the others lack."""
    from ndtp_kernels.choice import table

    own = table.default_table
    if dist.get_rank() == DEVIANT:
        other = table.shipped_table().with_tuned({"h200": {"bfloat16": {"plain nt 1 1 1": table.TORCH}}})
        table.default_table = lambda: other
    try:
        ProcessGrid(GRID, gemm="kernels", timeout=60)
    except MismatchError as error:
        return str(error)
    finally:
        table.default_table = own
    return None


def test_ranks_with_different_tables_of_kernels_are_named_on_all_ranks(ranks):
    messages = ranks(4).run(read_different_tables, timeout=100)
    assert messages[0] is not None and all(message == messages[0] for message in messages), messages
    assert "disagree on the table of kernels; 3 ranks" in messages[0] and f"rank {DEVIANT} (x=1, y=0)" in messages[0]
    assert "gemm.json on every machine" in messages[0]


def multiply_with_kernels():
    mesh = ProcessGrid(GRID, gemm="kernels")
    plan = MatMulPlan(Layout.parse(GRID, "y x"), Layout.parse(GRID, "x y"))
    assert_equal(ndtp.matmul(torch.ones(4, 2), torch.ones(2, 4), plan, mesh), torch.full((4, 4), 4.0))


def test_ranks_with_one_table_multiply(ranks):
    ranks(4).run(multiply_with_kernels)

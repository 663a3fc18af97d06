"""`nn.MoE` with buffers of one size for all routings: equal to dense, to the byte, and without a read of the host."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from moe_case import EXPERTS, HIDDEN, INNER, check_all
from products import turned_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndtp
from ndtp import CaptureError, Grid
from ndtp.ops.expert_rooms import Rooms
from ndtp.ops.memory import measured
from ndtp.testing import RecordedCuda

LOSSES = {"balance": 0.1, "z_loss": 0.01}
CALLS = 5


def with_buffers(buffers, cases):
    return [(grid, {"buffers": buffers, **arguments}) for grid, arguments in cases]


def test_routers_are_the_plain_loops(ranks):
    routers = ("mixtral", "switch", "gshard", "noisy", "deepseek")
    cases = [
        (Grid({axis: 2}), {"router": name, "options": LOSSES}) for axis, name in zip("exyze", routers, strict=True)
    ]
    ranks(2).run(check_all, with_buffers("worst-case", cases))


def test_experts_beside_and_inside(ranks):
    """Uneven and empty experts, capacities, chunks that do not divide, experts on attention's own axes, dp beside."""
    cases = [
        (Grid(e=2, y=2), {"router": "noisy", "options": LOSSES, "chunks": 2}),
        (Grid(e=2, z=2), {"router": "gshard", "options": {**LOSSES, "groups": 2}, "gated": False}),
        (Grid(x=2, y=2), {"router": "deepseek", "expert_axis": ("x", "y")}),
        (Grid(x=2, y=2), {"expert_axis": ("x", "y"), "mesh_of": turned_mesh}),
        (Grid(dp=2, e=2), {"router": "gshard", "options": {"groups": 4}, "chunks": 3}),
        (Grid(e=2, x=2), {"router": "switch", "options": {"capacity": 0.5}, "skew": 2.0}),
        (Grid(e=2, x=2), {"router": "qwen", "scheme": "1d", "skew": 1.0, "options": LOSSES}),
        (Grid(x=4), {"chunks": 2, "skew": 3.0}),
        (Grid(x=2, y=2), {"scheme": "2d-features", "skew": 1.0, "chunks": 3}),
        (Grid(e=4), {"skew": 3.0, "options": LOSSES, "chunks": 5}),
        (Grid(x=2, y=2), {"router": "qwen", "shared": 16, "shared_gate": True}),
    ]  # fmt: skip
    ranks(4).run(check_all, with_buffers("worst-case", cases) + with_buffers(2.5, cases[:2]))


def check_rest():
    mesh = ndtp.ProcessGrid(Grid(e=2), ring_bytes=0)
    x = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(2))
    shard = x[8 * mesh.rank :][:8].clone().requires_grad_()
    arguments = {"mesh": mesh, "seed": 1}
    for buffers, chunks in (("worst-case", 1), ("worst-case", 2), (1.5, 1)):
        moe = ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, buffers=buffers, chunks=chunks, **arguments)
        shard.grad = None
        counted = measured(lambda: moe(shard), torch.ones(8, HIDDEN))  # noqa: B023
        assert counted == moe.memory(16), (buffers, chunks)
        assert moe.volume(16) == moe.volume(16, routing="most") == moe.volume(16, routing="least")
    assert (
        moe.volume(16).total < ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, buffers="worst-case", **arguments).volume(16).total
    )
    check_padding(ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, buffers="worst-case", **arguments), shard)
    assert moe(x[:0]).shape == (0, HIDDEN)
    with torch.no_grad():  # all rows for the experts of one rank
        moe.router.weight.zero_()
    messages = []
    for wrong in (
        lambda: moe(x),
        lambda: ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, mesh=mesh, buffers="worst"),
        lambda: ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, mesh=mesh, buffers=0.5),
    ):
        with pytest.raises((ValueError, RuntimeError)) as error:
            wrong()
        messages.append(str(error.value))
    return messages


def check_padding(moe, shard):
    """What no choice fills is zeros when it is sent, and so is its gradient when it comes back."""
    seen = []
    put = Rooms.put

    def noted(rooms, each):
        sent = put(rooms, each)
        seen.append((rooms, sent))
        return sent

    with mock.patch.object(Rooms, "put", noted):
        moe(shard).square().sum().backward()
    assert len(seen) == 2
    for rooms, sent in seen:
        filled = torch.zeros(rooms.size, dtype=torch.bool)
        filled[rooms.places] = True
        assert sent[filled].any(1).all() and not sent[~filled].any() and (~filled).sum() == rooms.size // 2


def test_memory_padding_and_refusals(ranks):
    one, other = ranks(2).run(check_rest)
    assert one == other
    for message, part in zip(one, ("buffers=1.5 times the mean", "'worst'", "buffers=0.5"), strict=True):
        assert part in message and "fix:" in message, message


# ------------------------------------------------------------------------------------------------------ in a graph


def trained(make, captures):
    """Losses of a few steps, each with a batch that is routed otherwise."""
    model, loss_of, batches = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1e-1), fused=True)

    def step(x):
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = ndtp.capture(step, batches[0]) if captures else step
    return [run(x).item() for x in batches]


def layer(grid, **arguments):
    mesh = ndtp.ProcessGrid(grid, device_type="cpu", groups_per_axis=2)
    moe = ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, mesh=mesh, seed=0, **arguments)
    x = torch.randn(CALLS, *moe.in_layout.shard_shape((32, HIDDEN)), generator=torch.Generator().manual_seed(0))
    return moe, lambda x: moe(x).square().mean() + moe.aux_loss, x


@pytest.mark.cpu
@pytest.mark.parametrize(
    "arguments",
    [{"buffers": "worst-case", "options": {"balance": 0.1}}, {"buffers": 2.0, "chunks": 2, "router": "switch"}],
    ids=["worst-case", "a factor"],
)
def test_replays_of_a_layer_are_bit_equal_to_eager_steps(arguments):
    seen = []
    for captures in (False, True):
        with RecordedCuda():
            seen.append(trained(partial(layer, Grid(x=1), **arguments), captures))
    assert seen[0] == seen[1] and len(set(seen[0])) == CALLS
    exact = trained(partial(layer, Grid(x=1), **{**arguments, "buffers": "exact"}), False)
    torch.testing.assert_close(torch.tensor(seen[0]), torch.tensor(exact))


@pytest.mark.cpu
def test_a_layer_on_a_grid_is_captured():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with RecordedCuda():
            trained(partial(layer, Grid(e=2, x=2), buffers="worst-case", chunks=2), captures=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.cpu
def test_a_layer_whose_sizes_the_host_reads_is_not_captured():
    with RecordedCuda(), pytest.raises(CaptureError, match="cannot be captured as it is"):
        trained(partial(layer, Grid(x=1)), captures=True)


def check_tokens():
    mesh = ndtp.ProcessGrid(Grid(e=2))
    moe = ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, mesh=mesh, seed=0, buffers="worst-case", name="router")
    with pytest.raises(RuntimeError, match=r"MoE 'router': ranks have other numbers of tokens.*\n  fix: as many"):
        moe(torch.randn(8 - 2 * mesh.rank, HIDDEN))


def test_other_numbers_of_tokens_are_named(ranks):
    ranks(2).run(check_tokens)

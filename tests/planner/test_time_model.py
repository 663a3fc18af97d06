"""The time model: hand-computed cases, the hierarchy of nodes, and what hides under what."""

from dataclasses import replace

import pytest

from ndtp.algebra.grid import Grid
from ndtp.planner.block_cost import AXES, Block, Grids
from ndtp.planner.hardware import Hardware, Link
from ndtp.planner.time_model import BlockWork, Network, Reach, gemm_seconds

SLOW = Link(1.0, 100.0, 10.0)
FAST = Link(100.0, 5.0, 1.0)
MACHINE = Hardware("test", 4, FAST, SLOW, {"float32": 1.0}, gemm_half=0.0, memory_gbs=1e6, launch_us=0.0)


def network(order=AXES, hardware=MACHINE, **sizes):
    return Network.of(Grids(**({"dp": 1, "z": 1, "x": 1, "y": 1} | sizes)), order, hardware)


def test_inside_a_node():
    """3 MB at 100 GB/s, a call and three hops."""
    seconds = network(y=4).seconds("all_gather", "y", 3e6)
    assert seconds == pytest.approx(3e6 / 100e9 + 5e-6 + 3e-6)


def test_one_member_a_node_pays_the_slow_link():
    net = network(z=2, y=4)  # z is the slow axis: its two members are on two nodes
    assert net.seconds("all_gather", "z", 1e6) == pytest.approx(1e6 / 1e9 + 100e-6 + 10e-6)
    assert net.seconds("all_reduce", "z", 1e6) == pytest.approx(1e6 / 1e9 + 100e-6 + 20e-6)


def test_members_of_a_node_share_the_traffic_between_nodes():
    """8 ranks on 2 nodes gather 8 MB: each node lacks 4 MB, which come over 4 links at once."""
    net = network(y=8)
    assert net.seconds("all_gather", "y", 7e6) == pytest.approx(1e6 / 1e9 + 100e-6 + 10e-6 + 3e-6)


def test_nothing_to_move_takes_no_time():
    assert network(y=1).seconds("all_gather", "y", 0) == 0


@pytest.mark.parametrize("per_node", [1, 4, 6, 8])
@pytest.mark.parametrize("order", [AXES, ("y", "x", "z", "dp")])
def test_reach_agrees_with_the_ranks_of_the_groups(per_node, order):
    """Whether a group leaves its node is always right; on how many nodes it lies, where groups fall evenly."""
    for grid in Grid.all(24, order):
        net = network(order, Hardware("n", per_node, FAST, SLOW, {"float32": 1.0}), **{a: grid[a] for a in AXES})
        for axis in AXES:
            groups = {grid.group(rank, (axis,)) for rank in range(24)}
            nodes = max(len({rank // per_node for rank in group}) for group in groups)
            reach = net.reach[axis]
            assert (int(reach.nodes) > 1) == (nodes > 1), (grid, axis)
            stride = grid.size(grid.names[grid.names.index(axis) + 1 :])
            if all(a % b == 0 or b % a == 0 for a in (stride, stride * grid[axis]) for b in (per_node,)):
                assert int(reach.nodes) == nodes, (grid, axis)


def test_reach_of_a_job_on_one_node():
    assert int(Reach.of(3, 2, 6, 8).nodes) == 1  # six ranks of a node of eight: nothing leaves it


def test_gemm_roof():
    assert gemm_seconds(MACHINE, 1000, 1000, 1000, "float32") == pytest.approx(2e-3)
    short = Hardware("h", 4, FAST, SLOW, {"float32": 1.0}, gemm_half=100.0, memory_gbs=1e6, launch_us=0.0)
    assert gemm_seconds(short, 100, 1e9, 1e9, "float32") == pytest.approx(2 * 100 * 1e18 * 2 / 1e12, rel=1e-3)
    bound_by_memory = Hardware("m", 4, FAST, SLOW, {"float32": 1.0}, gemm_half=0.0, memory_gbs=1.0, launch_us=7.0)
    assert gemm_seconds(bound_by_memory, 1, 1000, 1000, "float32") == pytest.approx(
        1_002_000 * 4 / 1e9 + 7e-6, rel=1e-3
    )


def test_step_by_hand():
    """1D over 4 ranks of one node, one block: what is waited for, and what hides under the weight gradient."""
    block, g = Block.mlp(64, 16, 32), Grids(1, 1, 1, 4)
    net = Network.of(g, AXES, MACHINE)
    time = BlockWork.of([block], g, MACHINE, "float32").time(net)
    gemm = 2 * 64 * 16 * 8 / 1e12
    move = 64 * 16 * 3 / 4 * 4 / 100e9 + 8e-6
    # forward: gather, two products, scatter.  Backward: gather dC of down; dA of up hides under nothing but its wgrad.
    expected = 2 * move + 2 * gemm + move + 2 * gemm + gemm + max(move, gemm)
    # A quarter of what is gathered is the rank's own, and multiplied meanwhile.
    expected -= 2 * gemm / 4
    assert time.gemm == pytest.approx(6 * gemm)
    assert time.communication == pytest.approx(4 * move)
    assert time.total - time.elementwise == pytest.approx(expected)
    assert time.exposed == pytest.approx(expected - 6 * gemm)


def test_chunks_cost_latency():
    g = Grids(1, 1, 1, 4)
    slow = replace(MACHINE, intra=Link(1e9, 1000.0, 0.0))
    one, four = (
        BlockWork.of([Block.mlp(64, 16, 32)], g, slow, "float32", chunks=n).time(Network.of(g, AXES, slow))
        for n in (1, 4)
    )
    assert four.total > one.total


def test_weight_gradients_of_a_layer_reduce_under_the_layers_before():
    """Data parallel: of four layers only the first one's reduction has nothing left to hide under."""
    g, block = Grids(4, 1, 1, 1), Block.mlp(4096, 256, 256)
    net = Network.of(g, AXES, MACHINE)
    one, four = (BlockWork.of([block], g, MACHINE, "float32", layers=n).time(net) for n in (1, 4))
    reduction = net.seconds("all_reduce", "dp", 2 * 3 / 4 * 256 * 256 * 4)
    assert reduction < one.gemm / 6
    assert one.exposed == pytest.approx(reduction)
    assert four.exposed == pytest.approx(reduction)
    assert four.total == pytest.approx(4 * (one.total - reduction) + reduction)


def test_next_weight_is_gathered_under_this_product():
    g, block = Grids(1, 4, 1, 1), Block.mlp(4096, 256, 256)
    net = Network.of(g, AXES, MACHINE)
    time = BlockWork.of([block], g, MACHINE, "float32").time(net)
    gather = net.seconds("all_gather", "z", 3 / 4 * 256 * 256 * 4)
    assert gather < time.gemm / 6
    # Exposed: the first gather, and the last reduction.
    assert time.communication == pytest.approx(4 * gather)
    assert time.exposed == pytest.approx(2 * gather)


@pytest.mark.parametrize("contention", [0.25, 1.0])
def test_contention_takes_a_part_of_what_is_hidden(contention):
    """The gather of `down`'s weight hides under `up`, the reduction of its gradient under `up`'s backward."""
    g, block = Grids(1, 4, 1, 1), Block.mlp(4096, 256, 256)
    slower = replace(MACHINE, contention=contention)
    net = Network.of(g, AXES, MACHINE)
    free, paid = (BlockWork.of([block], g, machine, "float32").time(net) for machine in (MACHINE, slower))
    gather = net.seconds("all_gather", "z", 3 / 4 * 256 * 256 * 4)
    assert paid.total == pytest.approx(free.total + contention * 2 * gather, rel=1e-4)
    if contention == 1:
        assert paid.total - paid.elementwise == pytest.approx(paid.gemm + paid.communication, rel=1e-4), (
            "nothing is gained"
        )


@pytest.mark.parametrize("dtype,itemsize", [("bfloat16", 2), ("float32", 0)])
def test_weights_gathered_over_z_are_put_in_order(dtype, itemsize):
    """Low precision is read and written once after the gather; fp32 is multiplied as it lies, as all is on dp."""
    slow_memory = replace(MACHINE, memory_gbs=1.0, tflops={dtype: 1.0})
    block = Block.mlp(64, 16, 32)
    z, dp = (
        BlockWork.of([block], g, slow_memory, dtype).time(Network.of(g, AXES, slow_memory))
        for g in (Grids(1, 4, 1, 1), Grids(4, 1, 1, 1))
    )
    assert z.elementwise - dp.elementwise == pytest.approx(2 * (2 * 16 * 32 * itemsize) / 1e9)


def test_spans_are_the_step():
    """What is drawn ends when the prediction does, and computes as long."""
    g, block = Grids(1, 2, 2, 2), Block.mlp(8192, 512, 2048)
    machine = replace(MACHINE, memory_gbs=100.0, contention=0.5)
    net = Network.of(g, AXES, machine)
    work = BlockWork.of([block], g, machine, "float32", chunks=4)
    spans, time = work.spans(net), work.time(net)
    assert max(span.end for span in spans) == pytest.approx(float(time.total))
    multiplied = sum(span.end - span.begin for span in spans if span.what in ("multiply", "own"))
    assert multiplied == pytest.approx(float(time.gemm))
    other = sum(span.end - span.begin for span in spans if span.what in ("activate", "order"))
    assert other == pytest.approx(float(time.elementwise))


def test_chunks_never_slow_a_step_down_without_latency():
    g = Grids.all(64)
    block, machine = (
        Block.mlp(8192, 4096, 16384),
        replace(MACHINE, intra=Link(1.0, 0.0, 0.0), inter=Link(1.0, 0.0, 0.0)),
    )
    net = Network.of(g, AXES, machine)
    whole, cut = (BlockWork.of([block], g, machine, "float32", chunks=chunks).time(net) for chunks in (1, 4))
    activations = (g.z == 1) & (g.dp == 1)  # a weight is not cut
    assert (cut.total <= whole.total * (1 + 1e-12))[activations].all()
    assert (cut.total < whole.total * 0.9)[activations].any()
    assert (cut.total >= whole.gemm).all()

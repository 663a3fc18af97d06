"""`nn.MoE` against loops over tokens and experts in fp64: outputs, losses, gradients, bytes; and what it refuses."""

from unittest import mock

import pytest
import torch
from moe_case import EXPERTS, HIDDEN, INNER, assert_close, check, check_all, fused, separate, whole
from products import mesh_of, turned_mesh

import ndtp
from ndtp import Grid
from ndtp.compute import grouped
from ndtp.ops.experts import _Trip
from ndtp.ops.memory import measured

LOSSES = {"balance": 0.1, "z_loss": 0.01}


def test_routers_are_the_plain_loops(ranks):
    """Also: experts inside of two ranks in every way, and all of them on one."""
    routers = ("mixtral", "switch", "gshard", "noisy", "deepseek")
    cases = [
        (Grid({axis: 2}), {"router": name, "options": LOSSES}) for axis, name in zip("exyze", routers, strict=True)
    ]
    ranks(2).run(check_all, cases)


def test_experts_beside_and_inside(ranks):
    """Uneven and empty experts, capacities over several ranks, groups, chunks, experts on attention's own axes."""
    cases = [
        (Grid(e=2, y=2), {"router": "noisy", "options": LOSSES, "chunks": 2}),
        (Grid(e=2, z=2), {"router": "gshard", "options": {**LOSSES, "groups": 2}, "gated": False}),
        (Grid(x=2, y=2), {"router": "deepseek", "expert_axis": ("x", "y"),
                            "options": {**LOSSES, "expert_groups": 4, "top_groups": 2}}),
        (Grid(x=2, y=2), {"expert_axis": ("x", "y"), "mesh_of": turned_mesh}),
        (Grid(dp=2, e=2), {"router": "gshard", "options": {"groups": 4}, "chunks": 3}),
        (Grid(e=2, x=2), {"router": "switch", "options": {"capacity": 0.5}, "skew": 2.0}),
        (Grid(e=2, x=2), {"router": "qwen", "scheme": "1d", "skew": 1.0, "options": LOSSES}),
        (Grid(x=4), {"chunks": 2, "skew": 3.0}),  # rows that are cut unevenly, which bounds allow for
        (Grid(x=2, y=2), {"scheme": "2d-features", "skew": 1.0, "chunks": 2}),
        (Grid(e=4), {"skew": 3.0, "options": LOSSES}),
        (Grid(x=2, y=2), {"router": "qwen", "shared": 16, "shared_gate": True}),
    ]  # fmt: skip
    loads = ranks(4).run(check_all, cases)[0][-1]["loads"]
    assert 0 in loads and max(loads) > 2 * 16 / EXPERTS  # some experts had nothing, others far more than a share


def test_eight_ranks(ranks):
    ranks(8).run(check, Grid(e=2, z=1, x=2, y=2), options=LOSSES, chunks=2)
    ranks(8).run(check, Grid(e=2, z=2, x=2, y=1), router="gshard", options={**LOSSES, "groups": 2})


def check_memory(moe, x):
    """What a step allocates is what is said of its routing, to the byte."""
    shard = moe.in_layout.shard(x, moe.mesh.rank).clone().requires_grad_()
    counted = measured(lambda: moe(shard), torch.ones_like(shard))
    assert counted == moe.memory(len(x), routing=moe.counts())


def check_order():
    """All rows leave before the first product; a chunk's leave for home before the next one is multiplied, and are
    waited for behind all products: s(end), w(ait), p(roduct), forward and backward."""
    moe, events = ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, mesh=mesh_of(Grid(e=2)), chunks=3, seed=1), []

    def noted(letter, function):
        return lambda *arguments: (events.append(letter), function(*arguments))[1]

    x = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(moe.mesh.rank), requires_grad=True)
    with (
        mock.patch.multiple(_Trip, start=noted("s", _Trip.start), wait=noted("w", _Trip.wait)),
        mock.patch.multiple(grouped, multiplied=noted("p", grouped.multiplied), outer=noted("p", grouped.outer)),
    ):
        y = moe(x)
        forward = "".join(events)
        events.clear()
        y.sum().backward()
    assert forward == "sss" + 3 * "wpps" + "www" and "".join(events) == "sss" + 3 * "wpppps" + "www", (forward, events)


def check_rest():
    mesh = mesh_of(Grid(e=2))
    arguments = {"mesh": mesh, "shared": 16, "shared_gate": True, "dtype": torch.float64, "seed": 4}
    moe = ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, **arguments)
    # The same weights for the same seed, on every grid.
    other = ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, **{**arguments, "mesh": mesh_of(Grid(x=2))})
    dense = {name: whole(p) for name, p in moe.state_dict().items()}
    for name, p in other.state_dict().items():
        assert_close(whole(p), dense[name], name)
    # Fused and separate weights of dense experts.
    x = torch.randn(8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = moe(moe.in_layout.shard(x, mesh.rank))
    for form in (
        fused(dense),
        separate(dense, ("gate_proj", "up_proj", "down_proj")),
        separate(dense, ("w1", "w3", "w2")),
    ):
        moe.reset_parameters(seed=9)
        assert not torch.equal(moe(moe.in_layout.shard(x, mesh.rank)), expected)
        assert not any(moe.load_state_dict(form))
        assert_close(moe(moe.in_layout.shard(x, mesh.rank)), expected, "loaded")
    assert moe(x[:0]).shape == (0, HIDDEN)  # no token on any rank
    # The shared expert, by hand.
    whole_x = other.in_layout.shard(x, mesh.rank)
    shared = other.shared(whole_x) * (x @ dense["shared_gate.weight"].T).sigmoid()
    routing = other.router(whole_x)
    routed = other.experts(whole_x, routing.experts, routing.gates)
    assert_close(other(whole_x), routed + shared, "shared")
    assert moe.volume(8).total > 0
    for grid, more in (
        (Grid(y=2), arguments),
        (Grid(e=2), {"chunks": 2}),
        (Grid(e=2), {"router": "switch", "options": {"capacity": 0.5}, "chunks": 3}),
    ):
        no_ring = {"mesh": ndtp.ProcessGrid(grid, ring_bytes=0), "seed": 1}  # whose buffers would not be counted
        layer = ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, **{**more, **no_ring})
        check_memory(layer, x.to(layer.experts.down_proj.dtype))
    check_order()
    # A bias moves towards experts that had less.
    balanced = ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, router="deepseek", mesh=mesh, seed=1)
    balanced(torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(mesh.rank)))
    counts = balanced.counts().sum(0)
    balanced.update_bias()
    assert_close(balanced.router.bias_of_choice, 1e-3 * torch.sign(counts.double().mean() - counts).float(), "bias")
    metrics = balanced.metrics()
    assert metrics["dropped"] == 0 and 0 < metrics["entropy"] <= 1 and abs(sum(metrics["load"]) - 1) < 1e-12
    with mock.patch("ndtp.nn.experts.used_over", lambda x, *_: x), pytest.raises(AssertionError, match="dx"):
        check(Grid(x=2))  # what the comparison says where the router's gradient is that of a part of the features
    messages = []
    for wrong in (
        lambda: ndtp.nn.MoE(HIDDEN, INNER, 7, mesh=mesh),
        lambda: ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, mesh=mesh, expert_axis="w"),
        lambda: ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, mesh=mesh, router="best"),
        lambda: ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, 9, mesh=mesh),
        lambda: ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, mesh=mesh, activation="swiglu"),
        lambda: ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, mesh=mesh, chunks=0),
        lambda: moe(x[:, :3]),
        lambda: moe.volume(8, routing=[[1]]),
        lambda: ndtp.nn.MoE(HIDDEN, INNER, EXPERTS, router="gshard", mesh=mesh, options={"groups": 3})(x.float()),
    ):
        with pytest.raises(ValueError) as error:
            wrong()
        messages.append(str(error.value))
    return messages


@pytest.mark.cpu
def test_weights_metrics_and_refusals(ranks):
    one, other = ranks(2).run(check_rest)
    assert one == other
    for message, part in zip(
        one,
        ("does not divide 7", "axes of grid e=2", "best", "top_k=9 of 8", "swiglu", "chunks=0",
         "3 features", "2 are needed", "3 groups"),
        strict=True,
    ):  # fmt: skip
        assert part in message, message

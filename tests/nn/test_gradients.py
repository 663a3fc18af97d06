"""Clipping and summing gradients where sharded parameters and plain ones live in one model."""

import pytest
import torch
import torch.distributed as dist
from products import mesh_of
from torch import nn as dense_nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ndtp
from ndtp import CommMeter, Grid
from ndtp.ops.gradients import _sum_sparse

INF = float("inf")
NORM_TYPES = [2.0, 1.0, 3, 0.5, INF, -INF, -1.0, -2, 0.0]


def on_two_grids():
    """A dense model with gradients, and the same one on two grids, on a mesh of the user's own, and on none."""
    mesh, other = mesh_of(Grid(z=2, x=1, y=2)), mesh_of(Grid(dp=2, x=2))
    own = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    names = ("linear", "other", "norm")
    layers = dense_nn.Linear(4, 8), dense_nn.Linear(4, 8), dense_nn.LayerNorm(4)
    dense = dense_nn.ModuleDict(dict(zip(names, layers, strict=True)))
    model = dense_nn.ModuleDict(
        {
            "linear": ndtp.nn.Linear.from_dense(dense["linear"], mesh=mesh),
            "other": ndtp.nn.Linear.from_dense(dense["other"], mesh=other, scheme="1d"),
            "norm": dense_nn.LayerNorm(4),
        }
    )
    whole, row = Replicate(), Shard(0)  # a single row on two ranks: one of them has none
    for i, placements in enumerate(([row, whole], [Shard(1), row], [whole, whole], [Partial(), row])):
        dense.register_parameter(f"own{i}", dense_nn.Parameter(torch.randn(1, 3)))
        stored = [whole if placement.is_partial() else placement for placement in placements]
        value = dense_nn.Parameter(distribute_tensor(torch.zeros(1, 3), own, stored))
        value.grad = distribute_tensor(torch.zeros(1, 3), own, placements)
        model.register_parameter(f"own{i}", value)
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        theirs.grad = torch.randn_like(theirs).round(decimals=1)
        theirs.grad[..., 0] = 0  # of which norms of order 0 and -1 know
        placements = getattr(ours if ours.grad is None else ours.grad, "placements", None)
        ours.grad = theirs.grad.clone()
        if placements:
            ours.grad = distribute_tensor(ours.grad, ours.device_mesh, placements)
    return dense, model


def local(grad):
    return grad.to_local() if isinstance(grad, DTensor) else grad


def reset(model, gradients):
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        local(parameter.grad).copy_(gradient)


def clipped_on_two_grids():
    dense, model = on_two_grids()
    saved = [[local(p.grad).clone() for p in each.parameters()] for each in (dense, model)]
    totals = []
    for norm_type in NORM_TYPES:
        for max_norm, foreach in ((0.1, None), (1000.0, False), (0.3, True)):
            for each, gradients in zip((dense, model), saved, strict=True):
                reset(each, gradients)
            expected = torch.nn.utils.clip_grad_norm_(dense.parameters(), max_norm, norm_type, foreach=foreach)
            # A generator is there once.
            total = ndtp.nn.clip_grad_norm_((p for p in model.parameters()), max_norm, norm_type, foreach=foreach)
            torch.testing.assert_close(total, expected, msg=lambda text: f"order {norm_type}: {text}")  # noqa: B023
            for (name, parameter), gradient in zip(model.named_parameters(), saved[1], strict=True):
                clipped = gradient * min(1.0, max_norm / (expected.item() + 1e-6))
                torch.testing.assert_close(local(parameter.grad), clipped, msg=f"order {norm_type}, {name}")
            totals.append(total.item())
    for norm_type in (2.0, INF, -INF):
        reset(model, saved[1])
        if dist.get_rank() == 2:
            local(model["linear"].weight.grad)[0, 0] = float("nan")
        with pytest.raises(RuntimeError, match="total norm"):  # on every rank, not only where it is
            ndtp.nn.clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        assert ndtp.nn.clip_grad_norm_(model.parameters(), 1.0, norm_type).isnan(), f"order {norm_type}"
    return totals


def test_clip_on_several_meshes_equals_torch_on_the_dense_model(ranks):
    totals = ranks(4).run(clipped_on_two_grids)
    assert all(each == totals[0] for each in totals), "the same bits on every rank"


def clipped_elsewhere():
    """A mesh of some ranks: those that are not on it cannot know the norm."""
    parameter = dense_nn.Parameter(distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Replicate()]))
    parameter.grad = parameter.detach().clone()
    if dist.get_rank() == 0:
        assert ndtp.nn.clip_grad_norm_(parameter, 1.0) == 2
    else:
        with pytest.raises(ndtp.GridError, match="not part of"):
            ndtp.nn.clip_grad_norm_(parameter, 1.0)


def test_clip_on_a_mesh_of_others(ranks):
    ranks(2).run(clipped_elsewhere)


def with_gradient(grad):
    parameter = dense_nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    parameter.grad = grad
    return parameter


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_clip_of_mixed_dtypes_and_missing_gradients(norm_type):
    def parameters():
        torch.manual_seed(0)
        dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64]
        return [with_gradient(torch.randn(3, 4).to(dtype)) for dtype in dtypes] + [dense_nn.Parameter(torch.ones(2))]

    dense, ours = parameters(), parameters()
    expected = torch.nn.utils.clip_grad_norm_(dense, 0.5, norm_type)
    total = ndtp.nn.clip_grad_norm_(ours, 0.5, norm_type)
    torch.testing.assert_close(total, expected, rtol=1e-2, atol=0)  # torch rounds norms of bfloat16 to bfloat16
    for mine, theirs in zip(ours[:-1], dense, strict=False):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=0)
    assert ours[-1].grad is None


def test_clip_of_a_long_bfloat16_gradient_is_precise():
    exact = with_gradient(torch.full((1 << 16,), 1.0)), with_gradient(torch.full((1 << 15,), 1.0))
    rounded = [with_gradient(parameter.grad.bfloat16()) for parameter in exact]
    total = ndtp.nn.clip_grad_norm_(rounded, 1.0)
    assert total.dtype == torch.bfloat16, "as torch's"
    torch.testing.assert_close(total.float(), ndtp.nn.clip_grad_norm_(exact, 1.0), rtol=2**-8, atol=0)


def check_sums_of_sparse_gradients():
    """An element of any rank stays, also where the sum is zero: an optimizer moves its momentum."""
    sign, mesh = 1.0 - 2.0 * dist.get_rank(), mesh_of(Grid(x=2))
    for is_known in (True, False):
        x = torch.sparse_coo_tensor([[0, 2, 2], [1, 0, 0]], [sign, 2.0, 1.0], (4, 2))
        _sum_sparse(x, mesh.group(("x",)), is_known)
        found = x.coalesce()
        assert found.indices().tolist() == [[0, 2], [1, 0]] and found.values().tolist() == [0.0, 6.0], found


@pytest.mark.cpu
def test_sums_of_sparse_gradients(ranks):
    ranks(2).run(check_sums_of_sparse_gradients)


@pytest.mark.real
def test_clip_of_sparse_gradients():
    """Which torch refuses; what they leave out is zeros."""
    for norm_type in NORM_TYPES:
        values = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values, (3, 2), check_invariants=True)
        dense, ours = with_gradient(sparse.to_dense()), with_gradient(sparse)
        expected = torch.nn.utils.clip_grad_norm_(dense, 1.0, norm_type)
        torch.testing.assert_close(ndtp.nn.clip_grad_norm_([ours], 1.0, norm_type), expected)
        torch.testing.assert_close(ours.grad.to_dense(), dense.grad)
    with pytest.raises(RuntimeError, match="sparse"):
        ndtp.nn.clip_grad_norm_([ours], 1.0, foreach=True)


def test_clip_without_gradients():
    assert ndtp.nn.clip_grad_norm_([dense_nn.Parameter(torch.ones(2))], 1.0) == 0
    assert ndtp.nn.clip_grad_norm_([], 1.0) == 0
    with pytest.warns(UserWarning, match="empty generator"):
        assert ndtp.nn.clip_grad_norm_((p for p in ()), 1.0) == 0


def test_clip_takes_one_tensor_and_refuses_what_is_not_finite():
    parameter = dense_nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert ndtp.nn.clip_grad_norm_(parameter, 1.0) == 5
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    parameter.grad = torch.tensor([float("nan"), 1.0])
    with pytest.raises(RuntimeError, match="total norm"):
        ndtp.nn.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


def summed():
    mesh = mesh_of(Grid(dp=2, x=4))
    model = dense_nn.ModuleList([dense_nn.LayerNorm(4), ndtp.nn.Linear(4, 8, mesh=mesh, scheme="1d")])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, mesh.coordinate["dp"] + 1.0)
    with CommMeter() as meter:
        ndtp.nn.sum_plain_gradients(model, mesh, ["dp"])
    assert all((p.grad == 3).all() for p in model[0].parameters()), "1 + 2"
    for parameter in model[1].parameters():
        own = ndtp.ops.products.local_shard(parameter.grad)
        assert (own == mesh.coordinate["dp"] + 1).all(), "ndtp's own are summed already"
    assert meter.volume.by("collective") == {"all_reduce": 2 * 16}, meter.volume


def test_plain_gradients_are_summed(ranks):
    ranks(8).run(summed)

"""Operations element by element on tensors of a grid that lie alike: shards alone, and the numbers of dense ones."""

import importlib
import math

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ndtp
from ndtp import Grid
from ndtp.runtime.grid_parts import full_of
from ndtp.runtime.grid_tensor import GridTensor, become
from ndtp.runtime.shard_operations import form_of, on_shards

aten = torch.ops.aten
# What optimizers, averages and scaling of gradients are made of.
ON_SHARDS = (
    (aten.add_.Tensor, 2, {"alpha": -0.1}), (aten.mul_.Tensor, 1, {}), (aten.lerp_.Scalar, 2, {}),
    (aten.addcmul_.default, 3, {"value": 0.5}), (aten.addcdiv_.default, 3, {"value": 0.5}), (aten.sqrt.default, 1, {}),
    (aten.copy_.default, 2, {}), (aten.zero_.default, 1, {}), (aten.maximum.default, 2, {}),
)  # fmt: skip
NUMBERS = {aten.mul_.Tensor: (0.9,), aten.lerp_.Scalar: (0.1,)}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.1, amsgrad=True),
    "adamw, of lists": lambda ps: torch.optim.AdamW(ps, 0.1, foreach=True),
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
    "a learning rate that is a tensor": lambda ps: torch.optim.Adam(ps, torch.tensor(0.1)),
    "nadam, of lists": lambda ps: torch.optim.NAdam(ps, 0.1, foreach=True),
    "rprop": lambda ps: torch.optim.Rprop(ps, 0.1),
    "adagrad, of lists": lambda ps: torch.optim.Adagrad(ps, 0.1, foreach=True),
}


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).abs() + 0.1


def on_grid(x, mesh, placements):
    return GridTensor(distribute_tensor(x, mesh.device_mesh, placements))


def check_which():
    """Those that lie alike run on shards; others, and what needs numbers from elsewhere, do not."""
    mesh = mesh_of(Grid(x=2, y=2))
    split, other = [Shard(0), Shard(1)], [Shard(1), Shard(0)]
    for func, count, named in ON_SHARDS:
        dense = [drawn(4, 6, seed=i) for i in range(count)]
        mine, numbers = [on_grid(x, mesh, split) for x in dense], NUMBERS.get(func, ())
        with torch.no_grad():
            expected = func(*dense, *numbers, **named)
            written, made, _ = on_shards(GridTensor, func, (*mine, *numbers), named)
            found = made[0].full_tensor() if written is None else full_of(written)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=str(func))
        if count > 1:
            mixed = [mine[0], *(on_grid(x, mesh, other) for x in dense[1:])]
            assert on_shards(GridTensor, func, (*mixed, *numbers), named) is None, func
    a, b = on_grid(drawn(4, 6), mesh, split), on_grid(drawn(6), mesh, [Replicate(), Shard(0)])
    assert on_shards(GridTensor, aten.add.Tensor, (a, b), {}) is None  # they are broadcast
    assert on_shards(GridTensor, aten.add.Tensor, (a, drawn(4, 6)), {}) is None  # a whole one
    lists = [a, a.clone()], [a.clone(), a.clone()]
    assert on_shards(GridTensor, aten._foreach_addcmul_.Scalar, (*lists, lists[0], 0.5), {}) is not None
    assert on_shards(GridTensor, aten._foreach_add_.List, ([a, b], [a.clone(), drawn(6)]), {}) is None
    gaps = on_grid(drawn(4, 6), mesh, split)[:, ::2]
    assert (gaps * 2).is_contiguous() and (gaps * 2).stride() == (drawn(4, 3) * 2).stride()
    several = [on_grid(drawn(4, 6), mesh, split), on_grid(drawn(6), mesh, [Replicate()] * 2)]
    assert [x.shape for x in torch._foreach_abs(several)] == [x.shape for x in several]
    for found in (torch._foreach_pow(2.0, several)[1], torch._foreach_max(several)[1].exp2()):
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found, 2.0 ** (drawn(6) if found.dim() else drawn(6).max()))
    others = [aten._foreach_norm.Scalar, aten.bernoulli_.float, aten.sum.default, aten.t.default, aten.mm.default]
    others += [
        getattr(aten, name).default
        for name in ("_fused_rms_norm", "_foreach_mm", "_foreach_max")
        if hasattr(aten, name)
    ]
    for func in others:
        assert not form_of(func), func


def check_optimizers():
    """Two steps of each on a weight with padding and on a whole bias, bit for bit those of dense parameters.

    On GPUs torch steps lists of plain tensors in kernels of their own, which round otherwise.
    """
    mesh = mesh_of(Grid(x=2, y=2))
    exact = {} if torch.get_default_device().type == "cuda" else {"rtol": 0, "atol": 0}
    for name, make in OPTIMIZERS.items():
        dense = [nn.Parameter(drawn(5, 6)), nn.Parameter(drawn(6, seed=1))]
        mine = [nn.Parameter(x.detach().clone()) for x in dense]
        stored = nn.functional.pad(dense[0].detach(), (0, 0, 0, 3))
        become(mine[0], distribute_tensor(stored, mesh.device_mesh, [Shard(0), Shard(1)]), "w", (5, 6))
        become(mine[1], distribute_tensor(dense[1].detach(), mesh.device_mesh, [Replicate()] * 2), "b", (6,))
        steps = [make(ps) for ps in (mine, dense)]
        for turn in range(2):
            versions = [p._version for p in mine]
            for p, like in zip(mine, dense, strict=True):
                like.grad = drawn(*like.shape, seed=turn)
                p.grad = torch.zeros_like(p)
                p.grad.copy_(like.grad)
            for each in steps:
                each.step()
            assert all(p._version > version for p, version in zip(mine, versions, strict=True)), name
        for foreach in (False, True):
            for ps in (mine, dense):
                for p in ps:
                    p.grad = p.grad.exp()  # of zeros that are none
            for order in (2, 1, 3.5, math.inf):
                norms = [torch.nn.utils.clip_grad_norm_(ps, 1e9, order, foreach=foreach) for ps in (mine, dense)]
                norms = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
                torch.testing.assert_close(*norms)
        for p, like in zip(mine, dense, strict=True):
            torch.testing.assert_close(full_of(p), like.detach(), **exact, msg=name)
            for order in (
                2,
                1,
                0,
                math.inf,
                -math.inf,
                -2,
            ):  # zeros behind the sizes of the whole are none of its numbers
                norms = torch.linalg.vector_norm(p.detach(), order), *torch._foreach_norm([p.detach()], order)
                for norm in norms:
                    found = norm.full_tensor() if isinstance(norm, DTensor) else norm
                    torch.testing.assert_close(found, torch.linalg.vector_norm(like.detach(), order), msg=name)
        padding = mine[0]._dtensor.full_tensor()[5:]
        assert not padding.any(), name


def test_lists_that_go_element_by_element_keep_sizes():
    """All operations on lists of this torch that take a list alone."""
    checked = []
    for name in (name for name in dir(aten) if name.startswith("_foreach_")):
        func = getattr(getattr(aten, name), "default", None)
        needed = [] if func is None else [x for x in func._schema.arguments if not x.has_default_value()]
        if len(needed) == 1 and form_of(func):
            given = [drawn(4, 6), drawn(6)]
            made = func(given) or given
            assert [x.shape for x in made] == [x.shape for x in given], name
            checked.append(name)
    assert len(checked) > 10, checked


@pytest.mark.parametrize("check", [check_which, check_optimizers])
def test_operations_on_shards(ranks, check):
    ranks(4).run(check)


def scaled_norms(parameters):
    """What optimizers such as LARS do with norms: they write to them, in place and as lists, and through aliases."""
    a = torch._foreach_norm(parameters)
    torch._foreach_add_(a, 1e-3)
    torch._foreach_mul_(a, 10.0)
    b = torch._foreach_norm(parameters, ord=math.inf)
    b[0].mul_(10.0).clamp_(max=1.0)
    torch.mul(b[1], 3.0, out=b[1])
    c = torch._foreach_norm(parameters)
    alias = c[0].detach()
    alias.zero_(), c[1].view(1).add_(1.0)
    torch._foreach_div_(a, torch._foreach_norm(parameters))
    return [float(x) for x in (*a, *b, *c)]


def check_norms():
    for sizes in ({"x": 2, "y": 2}, {"z": 2, "y": 2}):
        mesh = mesh_of(Grid(sizes))
        dense = [drawn(4, 6), drawn(8, seed=1), drawn(6, 4, seed=2)]
        lie = [Shard(0), Shard(1)], [Shard(0), Replicate()], [Replicate()] * 2
        mine = [on_grid(x, mesh, placements) for x, placements in zip(dense, lie, strict=True)]
        with torch.no_grad():
            assert scaled_norms(mine) == pytest.approx(scaled_norms(dense), rel=1e-6), sizes


def test_norms_that_are_written_to(ranks):
    ranks(4).run(check_norms)


def check_lists_with_padding():
    """Numbers before parameters, as NAdam multiplies: results have the sizes of the whole."""
    mesh = mesh_of(Grid(x=2))
    model = ndtp.parallelize(nn.Sequential(nn.Linear(4, 33), nn.Linear(33, 4)), mesh, example=torch.ones(1, 4))
    parameters, numbers = list(model.parameters()), [torch.tensor(0.5)] * 4
    with torch.no_grad():
        for made in (torch._foreach_mul(numbers, parameters), torch._foreach_mul(parameters, numbers)):
            assert [x.shape for x in made] == [p.shape for p in parameters]
            for x, p in zip(made, parameters, strict=True):
                torch.testing.assert_close(full_of(x), full_of(p) * 0.5)
    assert any(p.is_padded for p in parameters)


def test_lists_with_padding(ranks):
    ranks(2).run(check_lists_with_padding)


def check_odd_norms():
    """Of 16 bits, whose squares do not fit; how many numbers are not zero; and lists with one tensor of numbers."""
    mesh = mesh_of(Grid(x=2))
    for dtype in (torch.float16, torch.bfloat16):
        dense = [drawn(8, 6).mul(600).to(dtype), drawn(4, seed=1).mul(1e-4).to(dtype)]
        mine = [on_grid(x, mesh, [Shard(0)]) for x in dense]
        for foreach in (False, True):
            for order in (2, 3, 0, math.inf):
                found, norm = (torch.nn.utils.get_total_norm(xs, order, foreach=foreach) for xs in (mine, dense))
                found = found.full_tensor() if isinstance(found, DTensor) else found
                assert math.isfinite(norm) and found.dtype == norm.dtype == dtype, (dtype, order)
                torch.testing.assert_close(found, norm)
        for x, like in zip(mine, dense, strict=True):
            assert x.norm().dtype == dtype
            torch.testing.assert_close(x.norm(), like.norm())
            torch.testing.assert_close(torch._foreach_norm([x])[0].full_tensor().to(dtype), like.norm())
    dense = [drawn(8, 6).mul(600).half(), drawn(4), drawn(4, seed=1).double()]
    mine = [on_grid(x, mesh, [Shard(0)]) for x in dense]
    for x, like in zip(torch._foreach_norm(mine), torch._foreach_norm(dense), strict=True):
        torch.testing.assert_close(x.full_tensor().to(like.dtype), like)
    numbers = torch.tensor([2.0, 3.0])
    dense = [[drawn(8, 6, seed=i), drawn(4, seed=i)] for i in range(3)]
    mine = [[on_grid(x, mesh, [Shard(0)]) for x in xs] for xs in dense]
    for xs in (mine, dense):
        torch._foreach_addcmul_(*xs, numbers)
        xs[1] = torch._foreach_addcdiv(*xs, numbers)
    for x, like in zip(mine[1], dense[1], strict=True):
        torch.testing.assert_close(full_of(x), like)


def test_odd_norms_and_numbers(ranks):
    ranks(2).run(check_odd_norms)


def test_torch_takes_parameters_in_lists_where_it_takes_dense_ones_so():
    """By default: optimizers on GPUs, and `clip_grad_norm_` everywhere."""
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        assert GridTensor in importlib.import_module(module)._foreach_supported_types
    for name in ("mul", "add", "sub", "div"):
        assert form_of(getattr(aten, f"_foreach_{name}").List) == "lists"

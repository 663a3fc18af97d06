"""Parameters that became ones of a grid: the same objects, and what operations give of them beside plain tensors."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import ndtp
from ndtp import Grid, LayoutError
from ndtp.runtime.grid_tensor import become


class Net(nn.Module):
    """A pair, and much that is none."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.scale = nn.Embedding(10, 6), nn.LayerNorm(6), nn.Parameter(torch.ones(6))
        self.fc1, self.fc2 = nn.Linear(6, 7), nn.Linear(7, 6)  # 7 is padded
        self.memory, self.listed = nn.LSTM(6, 6, batch_first=True), [self.scale]
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 10))

    def forward(self, ids):
        x = self.norm(self.table(ids)) * self.listed[0]
        return self.head(self.memory(x + self.fc2(F.gelu(self.fc1(x))))[0])


IDS = torch.arange(24).view(4, 6) * 7 % 10


def made(mesh=None):
    torch.manual_seed(0)
    model = Net().double()
    return model if mesh is None else ndtp.parallelize(model, mesh, {"fc1": "up", "fc2": "down"}, scheme="1d")


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(model, dense, where):
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs, rtol=1e-9, atol=1e-11, msg=f"{where}: {name}")


def check_training(sizes):
    """All of a model are DTensors of one mesh: fused steps, torch's clip, and a term of all parameters in the loss."""
    mesh, dense = mesh_of(Grid(sizes)), made()
    model, part = made(mesh), slice(None)
    if "dp" in sizes:
        part = slice(2 * mesh.coordinate["dp"], 2 * mesh.coordinate["dp"] + 2)
    assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, dense)]
    for _ in range(2):
        norms = []
        for m, rows in ((model, part), (dense, slice(None))):
            loss = F.cross_entropy(m(IDS[rows]).flatten(0, 1), IDS[rows].flatten())
            loss = loss * len(IDS[rows]) / len(IDS)
            if "dp" not in sizes:
                loss = loss + sum(p.pow(2).sum() for p in m.parameters()) * 0.01
            assert type(loss) is torch.Tensor
            loss.backward()
            norms.append(whole(nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=True)))
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(model, dense, f"{sizes}")
    p = model.table.weight
    p.to_local().square().sum().backward()  # whose gradient torch makes, a DTensor
    torch.testing.assert_close(p.grad.norm(), p.grad.full_tensor().norm())


def check_identity():
    mesh, dense, model = mesh_of(Grid(x=2)), made(), made()
    held, references = list(model.parameters()), [weakref.ref(p) for p in model.parameters()]
    optimizer = torch.optim.SGD([{"params": held[:3]}, {"params": held[3:]}], lr=0.1)
    average = [p.detach().clone() for p in held]
    before = model(IDS).sum()
    nodes = [model.fc1.weight.expand_as(model.fc1.weight).grad_fn.next_functions[0][0]]
    with pytest.raises(LayoutError, match=r"holds the node of autograd .* of 'fc1.weight'"):
        ndtp.parallelize(model, mesh, {"fc1": "up", "fc2": "down"}, scheme="1d")
    assert type(model.fc1.weight) is nn.Parameter
    del nodes
    ndtp.parallelize(model, mesh, {"fc1": "up", "fc2": "down"}, scheme="1d")
    assert all(x is y is z() for x, y, z in zip(model.parameters(), held, references, strict=True))
    with pytest.raises(LayoutError, match="backward of what was computed before the model was split"):
        before.backward()
    model.zero_grad()
    its = torch.optim.SGD(dense.parameters(), lr=0.1)
    for m, steps in ((model, optimizer), (dense, its)):
        m(IDS).square().sum().backward()
        steps.step()
    same(model, dense, "held before")
    torch._foreach_lerp_(average, [p.detach() for p in held], 0.5)  # dense copies, made before
    for mine, old, new in zip(average, made().parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine, old.detach().lerp(new.detach(), 0.5))


WRITES = {
    "a chunk": lambda x: x.chunk(2, 1)[1].mul_(3.0),
    "one of several parts": lambda x: x.split(3)[1].zero_(),
    "a row of all rows": lambda x: x.unbind(0)[2].fill_(5.0),
    "the diagonal": lambda x: x.fill_diagonal_(2.0),
    "what was made of it, without padding": lambda x: x.copy_(torch.cat((x[1:], x[:1]))),
}


def check_operations():
    mesh = mesh_of(Grid(x=2))
    model = made(mesh)
    for fill in (nn.init.normal_, nn.init.trunc_normal_, nn.init.zeros_):
        torch.manual_seed(1)
        dense = fill(torch.empty(7, 6, dtype=torch.float64))
        torch.manual_seed(1)
        fill(model.fc1.weight)
        torch.testing.assert_close(model.fc1.weight.full_tensor(), dense, rtol=0.0, atol=0.0, msg=fill.__name__)
    model, dense = made(mesh), made()
    state = {key: whole(value) for key, value in copy.deepcopy(model).state_dict().items()}
    assert not dense.load_state_dict(state).missing_keys  # without padding
    same(model, dense, "a state dict")
    held = list(model.parameters())
    for m in (model, dense):
        m.float().double()
    assert all(x is y for x, y in zip(model.parameters(), held, strict=True))
    same(model, dense, "to")
    for m in (model, dense):
        m(IDS).square().sum().backward()
        torch.optim.SGD(m.parameters(), lr=0.1, foreach=True).step()
    same(model, dense, "trained after to")
    for name, write in WRITES.items():
        for m in (model, dense):
            for p in (m.fc1.weight, m.fc2.weight):
                write(p.data)
        same(model, dense, f"a write to {name}")
    unnamed = init_device_mesh(mesh.device_type, (2,))  # a user's own
    given = distribute_tensor(torch.arange(42.0, dtype=torch.float64).view(7, 6), unnamed, [Shard(1)])
    with torch.no_grad():
        model.fc1.weight.copy_(given)
    torch.testing.assert_close(model.fc1.weight.full_tensor(), given.full_tensor())
    x = torch.linspace(-1, 1, 21, dtype=torch.float64).view(3, 7)
    torch.testing.assert_close(x @ model.fc1.weight, x @ given.full_tensor())


def test_parameters_that_were_held_are_those_of_the_grid(ranks):
    ranks(2).run(check_identity)


@pytest.mark.parametrize("sizes", [{"x": 2}, {"dp": 2, "x": 1}], ids=str)
def test_whole_parameters_train_beside_split_ones(ranks, sizes):
    ranks(2).run(check_training, sizes)


def test_operations_of_torch(ranks):
    ranks(2).run(check_operations)


def check_moved():
    """Hooks from before `model.to` and from after it are called, once each; handles take them away."""
    model, seen = made(mesh_of(Grid(x=2))), []
    weights = [model.fc1.weight, model.norm.weight, model.table.weight]
    handles = [w.register_hook(lambda grad: seen.append("before")) for w in weights]
    handles += [w.register_post_accumulate_grad_hook(lambda w: seen.append("added")) for w in weights]
    for dtype in (torch.float32, torch.float64, torch.float64):
        model.to(dtype)
        later = [w.register_hook(lambda grad: seen.append("after")) for w in weights]
        seen.clear()
        model(IDS).square().mean().backward()
        assert sorted(seen) == [*["added"] * 3, *["after"] * 3, *["before"] * 3], (dtype, seen)
        for each in later:
            each.remove()
    for each in handles:
        each.remove()
    model.to(torch.float32)
    seen.clear()
    model(IDS).square().mean().backward()
    assert not seen
    for w in weights:
        w.register_post_accumulate_grad_hook(lambda w: seen.append("again"))
    model(IDS).square().mean().backward()
    assert seen == ["again"] * 3


def test_hooks_of_moved_parameters(ranks):
    ranks(2).run(check_moved)


STEPPERS = ("AdamW", "RMSprop", "NAdam", "RAdam", "Rprop", "ASGD", "Adadelta", "Adagrad", "Adamax")


def check_numbers():
    """A parameter without dims trains, beside a dense layer as well; and one element of a split one is written to."""
    mesh, scale = mesh_of(Grid(x=2)), nn.Parameter(torch.tensor(2.0))
    become(scale, distribute_tensor(scale.detach(), mesh.device_mesh, [Replicate()]), "scale", ())
    like, others = nn.Parameter(torch.tensor(2.0)), [nn.Linear(3, 3) for _ in range(2)]
    others[1].load_state_dict(others[0].state_dict())
    for made_of in (lambda x: x.detach().sin(), lambda x: x.data * 2):  # numbers beside plain ones
        average, expected = torch.tensor(1.0), torch.tensor(1.0)
        average.lerp_(made_of(scale), 0.5).add_(scale.data)
        expected.lerp_(made_of(like), 0.5).add_(like.data)
        torch.testing.assert_close(average, expected)
        with torch.no_grad():
            torch.testing.assert_close(torch.zeros(()).copy_(scale).add_(scale), like.detach() * 2)
    assert f"{scale.detach():.2f}" == "2.00" and torch.tensor([scale.detach()]).tolist() == [2.0]
    for kind in (getattr(torch.optim, name) for name in STEPPERS):
        norms = []
        for x, other in ((scale, others[0]), (like, others[1])):
            optimizer = kind([x, *other.parameters()], lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                (other(torch.ones(2, 3)) * x.exp()).square().sum().backward()
                norms.append(whole(nn.utils.clip_grad_norm_([x, *other.parameters()], 1.0)))
                x.grad.data.mul_(0.5)
                optimizer.step()
        torch.testing.assert_close(norms[:2], norms[2:], msg=kind.__name__)
        torch.testing.assert_close(scale.full_tensor(), like.detach(), msg=kind.__name__)
    model, dense = made(mesh), made()
    for m in (model, dense):
        m(IDS).square().sum().backward()
        m.fc1.weight.data[0, 1], m.fc1.bias.data[6], m.fc2.weight.grad[2, 3] = 9.0, -4.6, 5.0
        m.fc2.weight.data.view(-1)[5] = 4.0
        with torch.no_grad():
            m.table.weight[3, 2] = 7.0
    same(model, dense, "written to one element")
    assert f"{model.fc1.weight.detach()[0, 1]:.1f}" == "9.0"
    row, expected = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    row[0], expected[0] = model.fc1.weight.detach()[1, 2], dense.fc1.weight.detach()[1, 2]
    torch.testing.assert_close(row, expected)
    torch._foreach_copy_([model.fc1.weight.grad], [dense.fc1.weight.grad + 1])
    torch.testing.assert_close(whole(model.fc1.weight.grad), dense.fc1.weight.grad + 1)
    torch.testing.assert_close(whole(model.fc2.weight.grad), dense.fc2.weight.grad)


def check_equal():
    """Any two parameters, and any one and a plain tensor, are equal where the dense ones are."""
    dense = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), {"0": "up", "2": "down"}, scheme="1d")
    mine, theirs = [*model.parameters(), *made().parameters()], [*dense.parameters(), *made().parameters()]
    for i, x in enumerate(mine):
        for j, y in enumerate(mine):
            expected = torch.equal(theirs[i], theirs[j])
            assert x.equal(y) == expected and torch.equal(x, theirs[j]) == expected, (i, j)


def test_parameters_of_other_sizes_are_not_equal(ranks):
    ranks(2).run(check_equal)


def test_parameters_without_dims_and_single_elements(ranks):
    ranks(2).run(check_numbers)

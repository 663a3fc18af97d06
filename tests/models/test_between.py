"""What a model does between the layers of a pair: as dense where that is known, and refused by name where it is not."""

import copy
import math

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.nn import functional as F

import ndtp
from ndtp import Grid, LayoutError
from ndtp.models.between import Between
from ndtp.testing import assert_equal

HIDDEN, INNER = 6, 10


class Model(nn.Module):
    """Does with its layers whatever it is given, and hides it from tracing."""

    def __init__(self, way):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.way, self.scale, self.act = way, nn.Parameter(torch.ones(INNER)), nn.SiLU()

    def forward(self, x):
        return self.way(self, x) if x.abs().sum() >= 0 else x


def made(way, mesh=None, gated=False, scheme="1d"):
    torch.manual_seed(0)
    model = Model(way).double()
    plan = {"up": "up", "down": "down"} | ({"gate": "gate"} if gated else {})
    return model if mesh is None else ndtp.parallelize(model, mesh, plan, scheme=scheme)


def example():
    return torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def step(model):
    x = example().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    grads = [
        None if p.grad is None else getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()
    ]
    return y, x.grad, grads


def assert_same(model, dense, what):
    (y, dx, grads), (expected, expected_dx, expected_grads) = step(model), step(dense)
    torch.testing.assert_close(y, expected, msg=lambda m: f"{what}: {m}")
    torch.testing.assert_close(dx, expected_dx, msg=lambda m: f"{what}, dx: {m}")
    for grad, target in zip(grads, expected_grads, strict=True):
        assert (grad is None) == (target is None), what
        if target is not None:
            real = grad[tuple(slice(0, size) for size in target.shape)]
            torch.testing.assert_close(real, target, msg=lambda m: f"{what}, gradient: {m}")


def in_place(m, x):
    h = m.up(x)
    h.mul_(2)
    h += 1
    F.relu(h, inplace=True)
    return m.down(h)


def called_twice(m, x):
    one, other = m.up(x), m.up(x[:1, :2])  # other rows: what belongs to a call goes with it
    y = m.down(F.gelu(one))
    return torch.cat((m.down(torch.tanh(other)).flatten(0, 1), y.flatten(0, 1)))


def gelu_by_hand(h):
    return 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))


def checkpointed(m, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: m.down(checkpoint(m.act, m.up(x), use_reentrant=False)), x, use_reentrant=False)


class OwnSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h * h.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        s = h.sigmoid()
        return grad * (s * (1 + h * (1 - s)))


EXACT = {
    "relu": lambda m, x: m.down(m.up(x).relu()),
    "by hand": lambda m, x: m.down(gelu_by_hand(m.up(x))),
    "quick gelu": lambda m, x: m.down((h := m.up(x)) * torch.sigmoid(1.702 * h)),
    "casts": lambda m, x: m.down(F.silu(m.up(x).float()).to(m.down.weight.dtype)),
    "clamp": lambda m, x: m.down(m.up(x).clamp(min=-0.5, max=0.5)),
    "where": lambda m, x: m.down(torch.where((h := m.up(x)) > 0, h, 0.1 * h)),
    "not zero at zero": lambda m, x: m.down(torch.exp(m.up(x)) + 1),
    "not finite at zero": lambda m, x: m.down(m.up(x).abs().sqrt()),
    "in place": in_place,
    "sums of two calls": lambda m, x: m.down(m.act(m.up(x)) + m.up(x.flip(0)).tanh()),
    "called twice": called_twice,
    "down twice": lambda m, x: m.down(h := m.act(m.up(x))) + m.down(h * 2),
    "sizes": lambda m, x: m.down(h := m.up(x)) * h.shape[-1] + h.size(0) + h.dim() + h.numel() + len(h),
    "module": lambda m, x: m.down(m.act(m.up(x))),
    "checkpointed": checkpointed,
    "function of autograd": lambda m, x: m.down(OwnSilu.apply(m.up(x))),
    "no dropout": lambda m, x: m.down(F.dropout(m.up(x), 0.5, training=False)),
    "one row": lambda m, x: m.down(m.act(m.up(x[0, 0]))),
    "zero rows": lambda m, x: torch.cat([m.down(m.act(m.up(part))).flatten(0, 1) for part in (x[:0], x[:, :0])]),
}
GATED = {
    "silu": lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)),
    "two inputs": lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x.flip(0))),
}


def check_exact(scheme):
    mesh = mesh_of(Grid(x=2))
    for gated, ways in ((False, EXACT), (True, GATED)):
        for name, way in ways.items():
            assert_same(made(way, mesh, gated, scheme), made(way), f"{name}, {scheme}")


@pytest.mark.parametrize("scheme", ["1d", "1d-sp"])
def test_what_acts_element_by_element_is_as_dense(ranks, scheme):
    ranks(2).run(check_exact, scheme)


def stacked(m, x):
    return torch.stack((m.up(x), m.up(x)))


REFUSED = {
    "softmax": lambda m, x: m.down(F.softmax(m.up(x), -1)),
    "layer_norm": lambda m, x: m.down(F.layer_norm(m.up(x), (INNER,))),
    "normalize": lambda m, x: m.down(F.normalize(m.up(x), dim=-1)),
    "cumsum": lambda m, x: m.down(m.up(x).cumsum(0)),
    "roll": lambda m, x: m.down(m.up(x).roll(1, -1)),
    "sum": lambda m, x: m.down(h := m.up(x)) + h.sum(),
    "mul with a tensor from elsewhere": lambda m, x: m.down(m.up(x) * m.scale),
    "add with a tensor from elsewhere": lambda m, x: m.down(torch.ones(3, 5, INNER) + m.up(x)),
    "linear": lambda m, x: F.linear(m.up(x), torch.ones(HIDDEN, INNER)),
    "matmul": lambda m, x: m.up(x) @ torch.ones(INNER, HIDDEN),
    "stack": stacked,
    "view": lambda m, x: m.down(m.up(x).view(-1, INNER)),
    "getitem": lambda m, x: m.down(m.up(x)[:1]),
    "rand_like": lambda m, x: m.down((h := m.up(x)) + torch.rand_like(h)),
    "normal": lambda m, x: m.down(m.up(x).normal_()),
    "alpha_dropout": lambda m, x: m.down(F.alpha_dropout(m.up(x), 0.5, True)),
    "where": lambda m, x: m.down(torch.where(m.up(x) > 0)[0]),
    "item": lambda m, x: m.up(x)[0, 0].item(),
    "numpy": lambda m, x: m.up(x).numpy(),
    "'up', which is the first layer": lambda m, x: m.up(m.up(x)),
    "'down' is the second layer": lambda m, x: m.down(m.gate(x)),
    "add with what 'up' gave, (1, 5, 10),": lambda m, x: m.down(m.up(x) + m.up(x[:1])),
    "silu_backward": lambda m, x: m.down(torch.ops.aten.silu_backward(h := m.up(x), h)),
}


def refusals():
    said = []
    for name, way in REFUSED.items():
        with pytest.raises(LayoutError) as caught:
            made(way, mesh_of(Grid(x=2)))(example())
        said.append(str(caught.value))
        assert name in said[-1], f"{name}: {said[-1]}"
    return said


def test_anything_else_is_refused_by_name(ranks):
    said = ranks(2).run(refusals)
    assert said[0] == said[1] and all("'up'" in each or "'down'" in each for each in said[0])


def dropped(way, grid, scheme):
    torch.manual_seed(5)
    return step(made(way, mesh_of(grid), scheme=scheme))[:2]


DROPOUTS = (
    lambda m, x: m.down(F.dropout(m.up(x), 0.5)),
    lambda m, x: m.down(torch.dropout(m.up(x), 0.3, True)),
    lambda m, x: m.down(F.dropout(m.up(x), 0.3, True, inplace=True)),
    lambda m, x: m.down(F.dropout(m.up(x), 1.0)),
)


def dropouts(grid, scheme):
    return [dropped(way, grid, scheme) for way in (*DROPOUTS, lambda m, x: m.down(nn.Dropout(0.5)(m.up(x))))]


def test_dropout_is_that_of_the_whole(ranks):
    expected = dropouts(Grid(x=1), "1d")
    for scheme in ("1d", "1d-sp"):
        for results in ranks(2).run(dropouts, Grid(x=2), scheme):
            for result, target in zip(results, expected, strict=True):
                for one, other in zip(result, target, strict=True):
                    torch.testing.assert_close(one, other.cpu())
    kept = made(lambda m, x: F.dropout(m.up(x), 0.5), mesh_of(Grid(x=1)))(example()).as_subclass(torch.Tensor)
    assert 0.3 < (kept == 0).double().mean() < 0.7 and type(kept) is torch.Tensor


ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.Mish, nn.ReLU,
    nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh,
)  # fmt: skip


def test_activations_of_torch():
    way = lambda m, x: m.down(m.act(m.up(x)))  # noqa: E731
    for module in ACTIVATIONS:
        model, dense = made(way, mesh_of(Grid(x=1))), made(way)
        model.act = dense.act = module()
        assert_same(model, dense, module.__name__)


def test_what_it_says_of_itself():
    seen = []
    model = made(lambda m, x: m.down(m.act(m.up(x))), mesh_of(Grid(x=1)))
    model.up.register_forward_hook(lambda m, i, o: seen.append(o))
    model(example())
    (h,) = seen
    assert isinstance(h, Between) and h.shape == (3, 5, INNER) and h.dtype == torch.float64 and h.requires_grad
    assert "up" in repr(h) and "(3, 5, 10)" in f"{h}" and hash(h) == id(h) and h.ndim == 3
    assert h.passage.layout == model.down.in_layout


# ---- hooks ----


def hooked(model, calls):
    def note(*_):
        calls.append(1)

    for module in (model.up, model.act, model.down):
        module.register_forward_pre_hook(lambda m, i: note())
        module.register_forward_hook(lambda m, i, o: note() or 2 * o)
        module.register_forward_hook(lambda m, i, k, o: note(), with_kwargs=True)
        module.register_full_backward_pre_hook(lambda m, g: note() or (3 * g[0],))
        module.register_full_backward_hook(lambda m, i, o: note() or (5 * i[0],))
    model.up.register_forward_hook(lambda m, i, o: note(o.register_hook(lambda g: note() or 7 * g)))
    return model


def check_hooks():
    way = lambda m, x: m.down(m.act(m.up(x)))  # noqa: E731
    calls, dense_calls = [], []
    assert_same(hooked(made(way, mesh_of(Grid(x=2))), calls), hooked(made(way), dense_calls), "hooks")
    assert len(calls) == len(dense_calls) > 15
    torch.manual_seed(0)
    dense, seen = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4)), []
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d")
    model[0].register_forward_hook(lambda m, i, o: seen.append(o.gathered().view(-1)))  # of five features in six
    model(torch.ones(2, 3, 4))
    torch.testing.assert_close(seen[0], dense[0](torch.ones(2, 3, 4)).view(-1))


def test_hooks_on_the_layers_of_a_pair_run(ranks):
    ranks(2).run(check_hooks)


# ---- torch's own encoder ----


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double().eval()


def check_encoder():
    mesh = mesh_of(Grid(x=2))
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    padding = torch.tensor([[False] * 4, [False] * 3 + [True]])
    dense = encoder()
    for plan in (
        {"layers.*.linear1": "up", "layers.*.linear2": "down"},
        {"layers.1.linear1": "up", "layers.1.linear2": "down"},
    ):
        model = ndtp.parallelize(encoder(), mesh, plan, scheme="1d")
        out_proj = model.layers[0].self_attn.out_proj
        assert type(out_proj) is type(dense.layers[0].self_attn.out_proj) and isinstance(out_proj.weight, nn.Parameter)
        for grad_mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            with grad_mode():
                torch.testing.assert_close(model(x), dense(x))
                ours, theirs = model(x, src_key_padding_mask=padding), dense(x, src_key_padding_mask=padding)
                # The fast path of torch leaves zeros where the mask is set; what its other path leaves is as good.
                torch.testing.assert_close(ours[~padding], theirs[~padding])
    with pytest.raises(LayoutError, match=r"no nn\.Linear"):
        layout = ndtp.Layout(mesh.grid, None, None)
        ndtp.parallelize(encoder(), mesh, {"layers.0.self_attn.out_proj": (layout, layout)})


def test_the_fast_path_of_torchs_encoder_is_left(ranks):
    ranks(2).run(check_encoder)


def test_zero_rows_of_a_traced_pair():
    model = ndtp.parallelize(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)), mesh_of(Grid(x=1)))
    x = torch.ones(2, 0, 4, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (2, 0, 4)
    assert_equal(model[0].weight.grad, torch.zeros(6, 4))

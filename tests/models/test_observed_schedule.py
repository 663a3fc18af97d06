"""MLPs of any model run as one program, and losses in chunks of rows, wherever one run has shown them."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import Grid
from ndtp.models import head_loss, one_schedule
from ndtp.models.noted import Noted
from ndtp.split import SplitTensor, whole

WORDS = 50


class Language(nn.Module):
    """Three MLPs: gated, gate and up in one layer, and a formula with dropout; a loss of shifted and capped logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(WORDS, 32), nn.LayerNorm(32), nn.Linear(32, WORDS)
        self.gate, self.up, self.down = nn.Linear(32, 48, bias=False), nn.Linear(32, 48), nn.Linear(48, 32)
        self.both, self.back = nn.Linear(32, 96), nn.Linear(48, 32)
        self.first, self.last = nn.Linear(32, 40), nn.Linear(40, 32)

    def forward(
        self, ids: torch.Tensor, is_sequence_first: bool = False, is_turned: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(ids.t() if is_sequence_first else ids)
        y = self.norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        a, b = self.both(self.norm(x)).chunk(2, -1)
        x = x + self.back(F.gelu(a) * b)
        x = x + self.last(F.dropout(F.relu(self.first(x)).square(), 0.1, self.training))
        logits = self.head(x)
        capped = 30 * torch.tanh((logits.transpose(0, 1) if is_sequence_first else logits).float() / 30)
        if is_turned:
            return F.cross_entropy(capped[:, :-1].transpose(1, 2), ids[:, 1:], ignore_index=3), logits
        shifted = capped[..., :-1, :].contiguous().view(-1, WORDS)
        return F.cross_entropy(shifted, ids[..., 1:].reshape(-1), ignore_index=3), logits


def close(ours, theirs, where):
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=lambda text: f"{where}: {text}")


def check_schedules(scheme, axes):
    """Counts what runs as one, in the order of what is tried below."""
    mesh, ran = mesh_of(Grid(axes)), []
    programs = [(one_schedule, one_schedule.mlp), (head_loss, head_loss.linear_cross_entropy)]
    for place, program in programs:

        def counted(*args, program=program, **options):
            ran.append(program.__name__)
            return program(*args, **options)

        setattr(place, program.__name__, counted)
    try:
        torch.manual_seed(0)
        dense = Language().eval()
        torch.manual_seed(0)
        model = ndtp.parallelize(Language().eval(), mesh, scheme=scheme)
        ids = torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(1))
        told = []

        def step(*how):
            ran.clear()
            loss, logits = model(ids, *how)
            told.append((ran.count("mlp"), ran.count("linear_cross_entropy"), type(logits).__name__))
            expected, dense_logits = dense(ids, *how)
            close(loss, expected, told)
            for each in (loss, expected):
                each.backward()
            for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
                close(ours.grad.full_tensor(), theirs.grad, f"{told} {name}")
                ours.grad = theirs.grad = None
            return logits, dense_logits

        logits, expected = step()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with torch.no_grad():
            model.head.weight.grad = torch.zeros_like(model.head.weight)
        optimizer.step()
        assert isinstance(logits, Noted) and logits.is_open
        close(whole(logits), expected, "logits after a step")
        assert type(logits) is SplitTensor
        step(True)
        step(False, True)
        hook = model.up.register_forward_hook(lambda *_: None)
        other = model.head.register_forward_hook(lambda *_: None)
        step()
        hook.remove(), other.remove()
        with torch.no_grad():  # a value that is asked for twice, and a formula that no program knows
            y = model.first(torch.ones(4, 32))
            assert isinstance(y, Noted)
            found = model.last((y.cos() * y).sub(0.5)) + y.sum()
            z = dense.first(torch.ones(4, 32))
            close(whole(found), dense.last((z.cos() * z).sub(0.5)) + z.sum(), "another formula")
        model.train()
        ran.clear()
        model(ids)[0].backward()
        return [*told, ran.count("mlp")]
    finally:
        for place, program in programs:
            setattr(place, program.__name__, program)


@pytest.mark.parametrize(
    ("scheme", "axes"), [("1d-sp", {"x": 2}), ("2d", {"x": 2}), ("3d", {"z": 2}), ("2d", {"y": 2})]
)
def test_what_follows_element_by_element_is_one_program_and_logits_are_never_whole(ranks, scheme, axes):
    plain, permuted, turned, hooked, trained = ranks(2).run(check_schedules, scheme, axes)[0]
    assert plain == (3, 1, "Noted")
    assert permuted == (3, 0, "SplitTensor"), "a transpose is no form of rows"
    assert turned == (3, 1, "Noted"), "features come second"
    assert hooked == (2, 0, "SplitTensor"), "hooks see what a layer gives"
    assert trained == 2, "dropout stands between"


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, 32), nn.Linear(32, WORDS)

    def forward(self, ids):
        return F.cross_entropy(self.head(torch.tanh(self.up(self.table(ids)))).flatten(0, 1), ids.flatten())


def check_dtypes(fuse):
    """The loss of bf16 logits is bf16, and fp32 under autocast, as torch's."""
    mesh, ids = mesh_of(Grid(x=2)), torch.arange(24).view(3, 8)
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True), (torch.float32, False)):
        dense = Plain().to(dtype)
        model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d", fuse=fuse)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
            ours, theirs = model(ids), dense(ids)
        assert ours.dtype == theirs.dtype, (fuse, dtype, autocast, ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=0.0)


@pytest.mark.parametrize("fuse", [True, False])
def test_losses_have_the_dense_dtype(ranks, fuse):
    ranks(2).run(check_dtypes, fuse)


class Undone(torch.autograd.Function):
    """A checkpoint of somebody's own."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Checkpointed(nn.Module):
    """Blocks that end with a layer, and layers of one input of which one has no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.a, self.b, self.c = (nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 8)]) for _ in range(3))
        self.q, self.k, self.d = (nn.Linear(8, 8) for _ in range(3))
        self.e = nn.ModuleList([nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 8)])

    def forward(self, x):
        h = self.first(x)
        h = torch.tanh(checkpoint(lambda t: self.a[1](F.gelu(self.a[0](t))), h, use_reentrant=True))
        h = h + checkpoint(lambda t: self.b[1](F.gelu(self.b[0](t))), h, use_reentrant=True)
        h = h + checkpoint(lambda t: self.e[1](self.e[0](t)) * self.e[2](t), self.d(h), use_reentrant=False)
        h = h + torch.tanh(Undone.apply(lambda t: self.c[1](F.gelu(self.c[0](t))), h))
        h = checkpoint(self.k, x + h, use_reentrant=True)
        with torch.no_grad():
            q = self.q(h)
        return self.last(q * self.k(h))


def check_checkpoints():
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.manual_seed(0)
    dense = Checkpointed()
    torch.manual_seed(0)
    model = ndtp.parallelize(Checkpointed(), mesh_of(Grid(x=2)), scheme="1d-sp", example=x)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ndtp: (Reduce|Checkpoint|backward)")  # nobody takes it whole
        for each in (model, dense):
            each(x).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        if theirs.grad is not None:
            close(ours.grad.full_tensor(), theirs.grad, name)
    check_hooks_inside(model, dense, x)


def check_hooks_inside(model, dense, x):
    """Hooks see the whole's gradients in a backward inside of a backward, and in one that begins at split tensors."""
    seen = [], []
    for each, norms in zip((model, dense), seen, strict=True):
        norms += _norms_inside(each, x)
    for ours, theirs in zip(*seen, strict=True):
        close(ours, theirs, "norm of a gradient")
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        if theirs.grad is not None:
            close(ours.grad.full_tensor(), theirs.grad, name)


def _norms_inside(model, x):
    norms, kept = [], []
    model.c[1].register_full_backward_hook(lambda _, into, out: norms.extend((into[0].norm(), out[0].norm())))
    model.k.register_full_backward_pre_hook(lambda _, out: (out[0] * 0.5,))
    model.k.register_forward_hook(lambda _, args, out: kept.append(out))
    model(x).square().sum().backward()
    y = kept[1].clone() * 2  # of the second call, whose graph is still there
    y.register_hook(lambda grad: norms.append(grad[:, 1:].norm()))
    part, others = y.diagonal(dim1=0, dim2=1), kept[1].detach().requires_grad_()
    loss = y.square().sum() + part.sum()
    found = torch.autograd.grad(loss, [kept[1], part, others], allow_unused=True, materialize_grads=True)
    return [norm.detach() for norm in (*norms, *(grad.norm() for grad in found))]


def test_checkpoints_that_run_backward_themselves_keep_the_graph_of_what_a_layer_gives(ranks):
    ranks(2).run(check_checkpoints)

"""Activations whose features are several parts in one, each split by itself; views of activations, written to."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from own_functions import Sorted
from products import mesh_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import Grid, Layout
from ndtp.errors import LayoutError
from ndtp.models.frame import Frame, Passage
from ndtp.models.hidden import enter, split, whole


def written(y):
    """Written in place, wherever a function's signature has the tensor that it writes to."""
    torch.mul(y, y, out=y)
    torch.cumsum(y * 1, -1, out=y)
    torch.sort(-y, -1, out=(y, torch.empty(y.shape, dtype=torch.long)))
    torch._foreach_add_([y], 1)
    torch.relu_(input=y)
    z = torch.nn.init.constant_(y * 1, 3.0)
    return y, z, torch.where(y > 2, z, y, out=z * 0)


def check_sections(grid, sections):
    """As gate and up in one weight give them: each rank has its features of every part, rows are split, too."""
    mesh, each = mesh_of(grid), 4
    frame = Frame(mesh, Layout(grid, None, None), 2)
    features = sections * each
    dense = torch.arange(3 * 2 * features, dtype=torch.float64).view(3, 2, features)
    passage = Passage(frame, Layout(grid, "x", "y"), (3, 2), 8, features, features, sections)
    assert passage.order is passage.order, "copied to a device once"
    rows = torch.nn.functional.pad(dense.flatten(0, 1), (0, 0, 0, 2))
    parts = [Layout(grid, "x", "y").shard(part, mesh.rank) for part in rows.chunk(sections, 1)]
    x = enter(torch.cat(parts, 1).requires_grad_().clone(), passage)

    assert torch.equal(whole(x), dense)
    for other in (dense * 2, dense[0, 0], dense[:1], torch.tensor(3.0)):
        assert torch.equal(whole(x + other), dense + other), tuple(other.shape)
        assert torch.equal(whole(other * x), dense * other), tuple(other.shape)
    for mine, theirs in zip((x + dense).chunk(sections, -1), (2 * dense).chunk(sections, -1), strict=True):
        assert torch.equal(whole(mine), theirs)
    y, z = x * 1, dense * 1
    for each in (y, z):
        part = each.chunk(sections, -1)[1]
        part.mul_(2)
        each.add_(1)
        part.sub_(0.5)
    assert torch.equal(whole(y), z)
    for mine, theirs in zip(x.chunk(chunks=sections, axis=-1), dense.chunk(sections, -1), strict=True):
        assert torch.equal(whole(mine), theirs)
    assert torch.equal(whole(torch.cat(tensors=[x, x], dim=0)), torch.cat([dense, dense], axis=0))
    assert torch.equal(x.transpose(0, 1), dense.transpose(0, 1))  # gathered
    assert [whole(y).tolist() for y in written(x.detach().clone())] == [y.tolist() for y in written(dense.clone())]
    given = torch.randn(dense.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf = dense.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(((x * leaf).clone() * given).sum(), leaf)
    torch.testing.assert_close(gradient, given * dense)


def last_then_all(x):
    last = x[:, -1]
    x.mul_(3)  # which the view shows
    last.add_(x[:, 0])
    x.transpose(0, 1)[1].sub_(last)


# Writes to views, and to what these are views of: in some layouts the two share no memory.
VIEWS = [
    lambda x: x[:, -1].add_(0.5),
    lambda x: x[:, 1:][:, 0].add_(x[:, 1:].reshape(-1, 7).mul_(2)[:4]),  # what is multiplied is a copy
    lambda x: x[1:].view(-1, 7)[2:9].mul_(2),
    lambda x: x[:, 1:].contiguous().add_(1),
    lambda x: x[..., 0].contiguous().add_(1),
    lambda x: x[0].sub_(x[1]),
    lambda x: x[..., :3].add_(1),
    lambda x: x[..., -1].sub_(x[..., 0]),
    lambda x: x.narrow(1, 0, 1).unsqueeze(0).mul_(3),
    lambda x: x.permute(2, 0, 1)[1:3].fill_(0.25),
    lambda x: x.data.transpose(0, 1)[0].mul_(2),
    lambda x: x.detach()[:, -1].copy_(torch.arange(7.0)),
    lambda x: x[:, :1].masked_fill_(x[:, :1] > 0, 0.25),
    lambda x: x.expand(-1, -1, 7)[:, 1].add_(1),
    lambda x: x[:, [0, 1]].add_(1),  # a copy
    lambda x: dist.all_reduce(x[1:].detach()),
    lambda x: dist.all_reduce(x.detach().flatten()[3:9], async_op=True).wait(),
    last_then_all,
]

# Parts of one tensor, to which one call writes: some of them are copies in some layouts.
OVERLAPPING = [
    lambda x: [x[:, 0], x[..., 1]],
    lambda x: [x, x[:, 0]],
    lambda x: [x[:, 0], x],
    lambda x: [x.view(-1)[:5], x[:, 0]],
    lambda x: [x[..., :3], x[1]],
]


def check_views(dims):
    """Values and gradients, with features that are padded, and in inference mode, where torch counts no changes."""
    grid = Grid(x=2)
    mesh, layout = mesh_of(grid), Layout(grid, *dims)
    frame = Frame(mesh, Layout(grid, None, None), 2)
    numbers = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    warnings.simplefilter("ignore")  # of what is gathered
    for i, write in enumerate(VIEWS):
        found = []
        for make, finish in (
            (lambda x: x, lambda x: x),
            (lambda x: split(x, frame, layout, 8) * 1, whole),
        ):
            leaf = numbers.clone().requires_grad_()
            x = make(leaf * 1)
            write(x)
            y = finish(x)
            assert y.is_contiguous(), "code may ask for a view of it"
            (y * torch.arange(7.0)).sum().backward()
            with torch.inference_mode():
                x = make(numbers.clone())
                write(x)
                found.append((y.detach(), leaf.grad, finish(x).clone()))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, i=i: f"{i}: {text}")
    for i, parts in enumerate(OVERLAPPING):
        x, y = numbers.clone(), split(numbers.clone(), frame, layout, 8)
        torch._foreach_mul_(parts(x), 2.0)
        try:
            torch._foreach_mul_(parts(y), 2.0)
        except LayoutError as error:
            assert "write to one after the other" in str(error)
        else:
            assert torch.equal(whole(y), x), i
    with pytest.raises(LayoutError, match=r"expand(.|\n)* clone\(\)"):
        split(numbers[:1], frame, Layout(grid, None, None), 8).expand(4, -1, -1).add_(1)


@pytest.mark.parametrize("dims", [("x", None), (None, "x"), (None, None)], ids=["rows", "features", "whole"])
def test_what_is_written_to_a_view_comes_back(ranks, dims):
    ranks(2).run(check_views, dims)


@pytest.mark.parametrize("sections", [2, 3])
def test_parts_of_features_in_one_are_taken_for_what_they_are(ranks, sections):
    ranks(4).run(check_sections, Grid(x=2, y=2), sections)


def parts_on_vectors(model):
    """What parts of a Llama give for one token alone, without a dim of rows."""
    layer, one = model.model.layers[0], torch.ones(32)
    row = model.model.embed_tokens(torch.tensor(5))
    return [
        row,
        model.lm_head(layer.mlp(layer.post_attention_layernorm(row)) + row),
        model.model.norm(one),
        layer.mlp(one),
    ]


def check_vectors(scheme):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes))
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2, y=2)), scheme=scheme)
    mine, theirs = parts_on_vectors(model), parts_on_vectors(dense)
    for x, y in zip(mine, theirs, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(torch.zeros_like(y) + x, y)
    for each in (mine, theirs):
        sum(x.square().sum() for x in each).backward()
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("scheme", ["2d", "3d"])
def test_layers_take_vectors(ranks, scheme):
    ranks(4).run(check_vectors, scheme)


def twice(layer):
    """Let a layer run in a checkpoint inside of another one."""
    run = layer.forward

    def forward(x, **options):
        once = lambda x: checkpoint(run, x, use_reentrant=False, **options)  # noqa: E731
        return checkpoint(once, x, use_reentrant=False)

    layer.forward = forward


def check_reentrant():
    """The gradient of one layer's checkpoint is what the checkpoint of the layer below begins with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d-sp")
    ids = torch.arange(32).view(4, 8)
    for each in (dense, model):
        each.gradient_checkpointing_enable({"use_reentrant": True})
        each.train()(input_ids=ids, labels=ids).loss.backward()
    for is_nested in (False, True):
        for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-7, msg=name)
        if not is_nested:
            for each in (dense, model):
                each.zero_grad()
                each.gradient_checkpointing_disable()
                for layer in each.model.layers:
                    twice(layer)
                each(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_checkpoints_one_behind_the_other_and_inside(ranks):
    ranks(2).run(check_reentrant)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class Turned(torch.autograd.Function):
    """Its derivative is called `vjp`, which torch takes for `backward`."""

    @staticmethod
    def forward(ctx, x):
        return x.flip(-1)

    @staticmethod
    def vjp(ctx, grad):
        return grad.flip(-1)


class Applied(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind.apply(x)


def check_functions():
    """In a stock model: the whole, gathered; shards where a rule says that it acts element by element."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ndtp.register_rule(Tripled, "elementwise")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    ids = torch.arange(32).view(4, 8)
    for kind in (Sorted, Turned, Tripled):
        dense = LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes))
        dense.model.layers[0].mlp.act_fn = Applied(kind)
        dense.model.layers[0].register_forward_hook(lambda _, __, y, kind=kind: kind.apply(y))
        model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d-sp")
        for each in (dense, model):
            each(input_ids=ids, labels=ids).loss.backward()
        for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6, msg=f"{kind} {name}")
        assert bool(model.ndtp_report.gathered) == (kind is not Tripled), model.ndtp_report


@pytest.mark.filterwarnings("ignore:ndtp")
def test_functions_of_somebody_else_take_the_whole(ranks):
    ranks(2).run(check_functions)

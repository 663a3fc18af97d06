"""Ranks with rows of their own that use other layers: gradients are those of all rows, whatever each rank has used."""

import contextlib
import copy
import warnings
from functools import partial

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import ndtp
from ndtp import Grid
from ndtp.errors import MismatchError


class Routed(nn.Module):
    """Experts that a rank calls where it has rows for them, or always."""

    def __init__(self, always=False):
        super().__init__()
        self.always, self.inner = always, nn.Linear(16, 16)
        kinds = nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16)
        self.experts = nn.ModuleList(nn.Sequential(*map(copy.deepcopy, kinds)) for _ in range(3))

    def forward(self, x, which):
        h = self.inner(x)
        y = h
        for i, expert in enumerate(self.experts):
            mask = which == i
            if self.always or mask.any():
                rows = mask.nonzero()[:, 0]
                y = y.index_add(0, rows, expert(h[rows]))
        return y


WHICH = torch.tensor([0, 1, 1, 0, 1, 2, 1, 2])  # expert 0 has rows of the first half alone, expert 2 of the second


def routed(mesh, scheme, always=False):
    """The model on the grid, the dense one, this rank's rows, and all of them."""
    torch.manual_seed(0)
    x, dense, at = torch.randn(8, 16, dtype=torch.float64), Routed(always).double(), mesh.coordinate["dp"]
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme=scheme, example=(x, torch.arange(8) % 3))
    return model, dense, (x.chunk(2)[at], WHICH.chunk(2)[at]), (x, WHICH)


def check_alike(model, dense):
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}")


def check_routes(sizes, scheme):
    mesh = mesh_of(Grid(**sizes))
    model, dense, mine, whole = routed(mesh, scheme)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            dense(*whole).square().mean().backward()
            (model(*mine).square().mean() / 2).backward()
            check_alike(model, dense)
    said = [str(each.message) for each in caught if "used other layers of Routed" in str(each.message)]
    assert len(said) == 1 and "'experts.0.0.weight'" in said[0], said


@pytest.mark.parametrize(
    ("sizes", "scheme"), [({"dp": 2, "x": 2}, "1d"), ({"dp": 2, "z": 2}, "3d"), ({"dp": 2, "x": 2}, "1d-sp")], ids=str
)
def test_experts_that_some_ranks_call(ranks, sizes, scheme):
    ranks(4).run(check_routes, sizes, scheme)


def check_always():
    mesh = mesh_of(Grid(dp=2))
    model, dense, mine, whole = routed(mesh, "1d", True)
    dense(*whole).square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (model(*mine).square().mean() / 2).backward()
    check_alike(model, dense)


def test_experts_without_rows_keep_ranks_in_step(ranks):
    ranks(2).run(check_always)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def check_refusals():
    mesh = mesh_of(Grid(dp=2))
    model, _, mine, _ = routed(mesh, "1d")
    with pytest.raises(
        MismatchError, match=r"uses, whose gradients cannot wait, of the weights of 'experts\.0\.0' before"
    ):
        torch.autograd.grad(model(*mine).square().mean(), list(model.inner.parameters()))
    model, _, mine, _ = routed(mesh, "1d")
    for expert in model.experts:
        parametrize.register_parametrization(expert[0], "weight", Doubled())
    with pytest.raises(MismatchError, match=r"what is computed of the weights of 'experts\.0\.0' before it: rank"):
        model(*mine).square().mean().backward()


def test_gradients_that_cannot_wait_are_refused(ranks):
    ranks(2).run(check_refusals)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.again = nn.Linear(16, 16), nn.Linear(16, 16), None

    def forward(self, x, takes):
        b = self.b if self.again is None else partial(checkpoint, self.b, use_reentrant=self.again)
        return b(self.a(x)) if takes.any() else self.a(x)


def check_micro_batches(first, second, again=None):
    """Each rank's branch in two micro-batches."""
    mesh, x = mesh_of(Grid(dp=2)), torch.randn(4, 16, dtype=torch.float64)
    torch.manual_seed(0)
    dense, at = Branch().double(), mesh.coordinate["dp"]
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d", example=(x, torch.ones(1)))
    model.again = again
    for taken in (first, second):
        for rank in range(2):
            dense(x.chunk(2)[rank], torch.tensor(taken[rank])).square().mean().backward()
    with mesh.accumulate():
        model(x.chunk(2)[at], torch.tensor(first[at])).square().mean().backward()
    model(x.chunk(2)[at], torch.tensor(second[at])).square().mean().backward()
    check_alike(model, dense)


def check_uneven_micro_batches():
    for again in (None, False, True):  # computed again by a checkpoint
        check_micro_batches((0, 1), (1, 1), again)  # the last one has them all
    for again in (None, False):
        check_micro_batches((0, 1), (0, 0), again)
        check_micro_batches((1, 1), (0, 1), again)


def test_layers_that_some_ranks_call_while_gradients_add_up(ranks):
    ranks(2).run(check_uneven_micro_batches)


class Gated(nn.Module):
    """Two layers of one input as one product, and a program of three."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class Mixed(nn.Module):
    """Three layers of one input as one product."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=i != 2) for i in range(4))

    def forward(self, x):
        return self.o((self.q(x) * self.k(x)).softmax(-1) * self.v(x))


class Looped(nn.Module):
    """Experts as people write them: a loop over those that have tokens."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.gate = nn.Linear(16, 16), nn.Linear(16, 4)
        self.experts = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x):
        x = self.inner(x)
        weights = self.gate(x).softmax(-1)
        best, y = weights.argmax(-1), torch.zeros_like(x)
        for i in best.unique().tolist():
            rows = (best == i).nonzero()[:, 0]
            y = y.index_add(0, rows, self.experts[i](x[rows]) * weights[rows, i, None])
        return x + y


@pytest.mark.filterwarnings("ignore")
def check_loop(kind, sizes, scheme):
    """With the defaults alone: the first call, whose rows show each rank other experts, decides."""
    mesh = mesh_of(Grid(**sizes))
    torch.manual_seed(3)
    dense, at = Looped(kind).double(), mesh.coordinate["dp"]
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme=scheme)
    for _ in range(2):
        for i in range(3):
            rows = torch.randn(4, 16, dtype=torch.float64).chunk(2)
            for each in rows:
                dense(each).square().mean().backward()
            with mesh.accumulate() if i < 2 else contextlib.nullcontext():
                model(rows[at]).square().mean().backward()
    used = {name for name, q in dense.named_parameters() if q.grad is not None}
    assert len(used) > 8 and {name for name, p in model.named_parameters() if p.grad is not None} == used
    for name, p in model.named_parameters():
        if name in used:
            torch.testing.assert_close(p.grad.full_tensor(), dense.get_parameter(name).grad)


@pytest.mark.parametrize("kind", [Gated, Mixed])
@pytest.mark.parametrize(("sizes", "scheme"), [({"dp": 2, "x": 2}, "1d-sp"), ({"dp": 2, "z": 2}, "3d")], ids=str)
def test_loops_over_experts(ranks, kind, sizes, scheme):
    ranks(4).run(check_loop, kind, sizes, scheme)


def test_a_loop_over_experts_of_fused_layers(ranks):
    ranks(2).run(check_loop, Fused, {"dp": 2}, "1d")


def check_fused():
    """The features of a fused layer are split in parts, so that its weight is computed."""
    with pytest.raises(MismatchError, match=r"what is computed of the weights of 'experts\.\d\.both' before it: rank"):
        check_loop(Fused, {"dp": 2, "x": 2}, "1d-sp")


def test_weights_that_are_computed_do_not_wait(ranks):
    ranks(4).run(check_fused)


def wav2vec2():
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    convs = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16}
    drops = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    rest = {"vocab_size": 32, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.5, "mask_time_prob": 0.0}
    return Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **convs, **rest, **dict.fromkeys(drops, 0.0)))


@pytest.mark.filterwarnings("ignore")
def check_layers_left_out():
    mesh = mesh_of(Grid(dp=2))
    torch.manual_seed(0)
    dense, at = wav2vec2().double().train(), mesh.coordinate["dp"]
    x, y = torch.randn(2, 400, dtype=torch.float64), torch.randint(1, 32, (2, 3))
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d")

    def loss(net, rank, step):
        torch.manual_seed(10 * step + rank)  # each rank leaves out layers of its own
        return net(x[rank : rank + 1], labels=y[rank : rank + 1]).loss

    for step in range(3):
        loss(dense, 0, step).backward()
        loss(dense, 1, step).backward()
        loss(model, at, step).backward()
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_layers_that_each_rank_leaves_out(ranks):
    ranks(2).run(check_layers_left_out)


def switch():
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4, "num_layers": 2, "num_experts": 8}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 64}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0, "router_jitter_noise": 0.0}
    return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes, **sparse, **ids))


@pytest.mark.filterwarnings("ignore")
def check_switch():
    mesh = mesh_of(Grid(dp=2))
    torch.manual_seed(0)
    dense = switch()
    ids = torch.randint(1, 64, (2, 3))  # of few tokens: most experts have rows on one rank alone
    model, at = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d"), mesh.coordinate["dp"]
    dense(input_ids=ids, labels=ids, output_router_logits=False).loss.backward()
    mine = ids[at : at + 1]
    model(input_ids=mine, labels=mine, output_router_logits=False).loss.backward()
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5)


def test_experts_of_switch_transformers(ranks):
    ranks(2).run(check_switch)

"""MLPs of stock models as one program, and heads with their loss in chunks of rows; and what forbids it."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from products import mesh_of
from torch import nn

import ndtp
from ndtp import CommMeter, Grid, LayoutError
from ndtp.compute.epilogues import ACTIVATIONS, GATES
from ndtp.models import head_loss, one_schedule, pending
from ndtp.models.hidden import whole
from ndtp.split.functions import _GIVEN

pytest.importorskip("transformers")

import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it
from architectures import build, inputs
from test_transformers_whole import check_gradients
from transformers.activations import ACT2FN


@contextlib.contextmanager
def counted():
    """How often each of the two programs runs, and the chunks of logits."""
    counts = {"mlp": 0, "loss": 0}
    real = one_schedule.mlp, head_loss.linear_cross_entropy

    def count(name, function):
        def counting(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return counting

    one_schedule.mlp, head_loss.linear_cross_entropy = count("mlp", real[0]), count("loss", real[1])
    try:
        yield counts
    finally:
        one_schedule.mlp, head_loss.linear_cross_entropy = real


def check_runs(model, dense, given, wanted, where):
    """Loss and gradients are the dense model's, by the programs that are wanted."""
    with counted() as counts:
        loss = model(**given).loss
    expected = dense(**given).loss
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0.0, msg=where)
    loss.backward()
    expected.backward()
    check_gradients(model, dense, where)
    assert tuple(counts.values()) == wanted, f"{where}: {counts}"
    for each in (model, dense):
        each.zero_grad()


# ---- which activations ----


STOCK = {
    "gelu": "gelu", "gelu_10": None, "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "linear": "identity",
    "relu": "relu", "relu2": "squared_relu", "sigmoid": "sigmoid", "silu": "silu", "swish": "silu", "tanh": "tanh",
    "quick_gelu": "quick_gelu", "mish": "mish", "relu6": "relu6", "hardswish": "hardswish", "leaky_relu": "leaky_relu",
    "prelu": None,
}  # fmt: skip


def test_activations_are_found_by_what_they_do():
    """Of every name that transformers has: by itself, as a gate from either side, and as what it is not."""
    model = build("LlamaForCausalLM", num_hidden_layers=1)
    ndtp.parallelize(model, mesh_of(Grid(x=1)), scheme="1d")
    mlp = model.model.layers[0].mlp
    hidden = model.model.embed_tokens(torch.tensor([[3, 4]]))
    gates = {act: gated for gated, act in GATES.items()}
    for name, wanted in STOCK.items():
        act = ACT2FN[name].double()

        def found(formula, act=act, mode=torch.enable_grad):
            gate, up = mlp.gate_proj(hidden), mlp.up_proj(hidden)
            assert type(gate) is type(up) is pending.Pending
            made = formula(act, gate, up)
            with mode():
                return one_schedule.activation_of(made) if type(made) is pending.Pending else None

        alone = found(lambda act, gate, up: act(gate))
        # What is found in a first call, without gradients, holds for later ones.
        assert found(lambda act, gate, up: act(gate), mode=torch.inference_mode) == alone, name
        assert alone == (None if wanted is None else (wanted, [(0, None)])), f"{name}: {alone}"
        other = [0, 1] if name == "linear" else [1, 0]  # of which none is the gate
        for formula, order in ((lambda a, g, u: a(g) * u, [0, 1]), (lambda a, g, u: g * a(u), other)):
            gated = found(formula)
            if wanted in gates:
                assert gated == (gates[wanted], [(i, None) for i in order]), f"{name}: {gated}"
        assert found(lambda act, gate, up: act(gate).detach() * up) is None, name
        assert found(lambda act, gate, up: act(gate).float()) is None, name
        assert found(lambda act, gate, up: act(gate) * up * 1.0001) is None, name


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_backward_of_activations(name):
    activation = ACTIVATIONS[name]
    pre = torch.linspace(-7.3, 7.1, 40, dtype=torch.float64).requires_grad_()
    y = activation.forward(pre)
    upstream = torch.linspace(1, 2, len(y), dtype=torch.float64)
    (wanted,) = torch.autograd.grad(y, pre, upstream)
    torch.testing.assert_close(activation.backward(upstream, pre.detach()), wanted)


# ---- in models, and what forbids it ----


FORMS = {"LlamaForCausalLM": "2d-features", "Phi3ForCausalLM": "2d-features", "T5ForConditionalGeneration": "2d"}


def written_to(mlp, x):
    up = mlp.up_proj(x)
    twice, rows = up * 2, up.view(-1, up.shape[-1])[:, None] + 1  # noted, of what they are now
    up[:, 0].mul_(3)
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * up + twice + rows.view(up.shape))


def check_forms():
    """Without a gate, gated, in one projection; hooks, and another formula."""
    mesh = mesh_of(Grid(x=2, y=2))
    for name, scheme in FORMS.items():
        changes = {} if name.startswith("Llama") else {"num_hidden_layers": 1, "num_layers": 1}
        dense, model = (build(name, **changes) for _ in range(2))
        ndtp.parallelize(model, mesh, scheme=scheme)
        layers = 1 if name.startswith("Phi3") else 2  # or an encoder's and a decoder's
        check_runs(model, dense, inputs(name), (layers, 1), f"{name}, {scheme}")
    dense, model = build("LlamaForCausalLM"), build("LlamaForCausalLM")
    ndtp.parallelize(model, mesh, scheme="2d")
    given, mlps = inputs("LlamaForCausalLM"), [each.model.layers[0].mlp for each in (model, dense)]
    seen = []
    hooks = [mlps[0].down_proj.register_forward_hook(lambda module, args, y: seen.append(type(args[0])))]
    check_runs(model, dense, given, (1, 1), "a hook")
    assert pending.Pending not in seen and seen
    hooks[0].remove()
    hooks = [each.up_proj.register_full_backward_hook(lambda m, i, o: (2 * i[0],)) for each in mlps]
    check_runs(model, dense, given, (1, 1), "a hook of backward")
    for hook in hooks:
        hook.remove()
    check_runs(model, dense, given, (2, 1), "without hooks")
    for mlp in mlps:
        mlp.forward = lambda x, self=mlp: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)
    check_runs(model, dense, given, (1, 1), "another formula")
    for mlp in mlps:
        mlp.forward = lambda x, self=mlp: written_to(self, x)
    check_runs(model, dense, given, (1, 1), "a formula of what is written to later")
    gathered = model.ndtp_report.gathered
    assert not gathered, gathered


def test_one_schedule(ranks):
    ranks(4).run(check_forms)


def check_separately():
    """`fuse=False` gives the same, and the same bytes."""
    mesh = mesh_of(Grid(x=2, y=2))
    given, volumes = inputs("LlamaForCausalLM"), []
    for fuse in (False, True):
        model = ndtp.parallelize(build("LlamaForCausalLM", num_hidden_layers=1), mesh, scheme="2d", fuse=fuse)
        with counted() as counts, CommMeter() as meter:
            model(**given).loss.backward()
        assert tuple(counts.values()) == ((1, 1) if fuse else (0, 0)), counts
        volumes.append(meter.volume)
    assert volumes[0] == volumes[1] == model.ndtp_report.volume(4, 6)


def check_odd_halves():
    """Two halves of 22 features, which y divides; the weight that they meet is padded to 24 over y and z."""
    changes = {"num_hidden_layers": 1, "intermediate_size": 22}
    dense, model = (build("Phi3ForCausalLM", **changes) for _ in range(2))
    ndtp.parallelize(model, mesh_of(Grid(z=2, y=2)))
    check_runs(model, dense, inputs("Phi3ForCausalLM"), (0, 1), "odd halves")


def test_bytes_are_the_same_separately(ranks):
    ranks(4).run(check_separately)
    ranks(4).run(check_odd_halves)


# ---- the head and its loss ----


def shifted(model, given, pick):
    """As models of an older make do it: rows are picked behind the head."""
    hidden = model.model(input_ids=given["input_ids"]).last_hidden_state
    logits, labels = model.lm_head(hidden)[..., :-1, :], given["labels"][..., 1:]
    return F.cross_entropy(logits.reshape(-1, 67).float(), labels.reshape(-1), **pick)


def check_loss():
    mesh = mesh_of(Grid(x=2, y=2))
    for name in ("LlamaForCausalLM", "Gemma2ForCausalLM"):
        dense, model = (build(name, num_hidden_layers=1) for _ in range(2))
        ndtp.parallelize(model, mesh, scheme="2d")
        given = inputs(name, batch=3)
        model.ndtp_report.split.frame.loss_rows = 3  # several chunks
        out = model(**given)
        assert type(out.logits) is pending.Pending and out.logits.is_open, "nobody has asked for logits"
        assert tuple(out.logits.shape) == (3, 6, 67) and out.logits.dtype == torch.float64
        # On request they are there, and a loss of them is differentiated beside the other.
        expected = dense(**given)
        torch.testing.assert_close(out.logits.gathered(), expected.logits, rtol=1e-6, atol=1e-7)
        for each in (out, expected):
            (each.loss + whole(each.logits).square().mean()).backward()
        check_gradients(model, dense, f"{name}, logits beside the loss")
    weights = torch.linspace(0.5, 2, 67)
    for pick in ({}, {"weight": weights, "label_smoothing": 0.1}, {"reduction": "sum"}, {"ignore_index": 5}):
        for each in (dense, model):
            each.zero_grad()
        with counted() as counts:
            model.ndtp_report.split.frame.has_labels = True
            loss = shifted(model, {key: x.clamp(min=0) for key, x in given.items()}, pick)
            model.ndtp_report.split.frame.has_labels = False
        wanted = shifted(dense, {key: x.clamp(min=0) for key, x in given.items()}, pick)
        torch.testing.assert_close(loss, wanted, rtol=2e-6, atol=0.0)
        assert counts["loss"] == 1, pick
        loss.backward()
        wanted.backward()
        check_gradients(model, dense, f"picked rows, {pick}")
    for each in (dense, model):
        each.zero_grad()
    losses = [shifted(each, {key: x.clamp(min=0) for key, x in given.items()}, {"reduction": "none", "weight": weights})
              for each in (model, dense)]  # fmt: skip
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.square().sum().backward()
    check_gradients(model, dense, "a loss for every row")
    out = model(**given)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(LayoutError, match="were changed by other than an optimizer; it was not computed"):
        out.logits.gathered()
    with torch.no_grad():
        assert type(model(input_ids=given["input_ids"]).logits) is not pending.Pending, "without labels"


def test_loss_in_chunks(ranks):
    ranks(4).run(check_loss)


def test_code_that_looks_past_functions_of_torch():
    """An autograd.Function gets no numbers before they are there, and never a gradient that is none."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Seen(nn.Module):
        def forward(self, x):
            return Doubled.apply(x)

    doubled = _GIVEN.__get__(None, Doubled)  # as somebody has it who took it before any model was split

    class Unseen(nn.Module):
        def forward(self, x):
            return doubled(x)

    given = inputs("OPTForCausalLM")
    for fuse, act in ((True, Unseen), (False, Unseen), (True, Seen)):
        other = build("OPTForCausalLM")
        for layer in other.model.decoder.layers:
            layer.activation_fn = act()
        mine = ndtp.parallelize(copy.deepcopy(other), mesh_of(Grid(x=1)), scheme="1d", fuse=fuse)
        loss = mine(**given).loss
        torch.testing.assert_close(loss, other(**given).loss, rtol=2e-6, atol=0.0)
        with pytest.raises(LayoutError, match="fuse=False") if fuse and act is Unseen else contextlib.nullcontext():
            loss.backward()


def test_layers_of_one_input_of_which_one_has_no_gradient():
    """They are one product where torch records what each of them does, or what none does."""
    given, dense = inputs("LlamaForCausalLM"), build("LlamaForCausalLM")
    mine = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=1)), scheme="1d")
    for model in (mine, dense):
        layer = model.model.layers[0].self_attn.q_proj
        layer.forward = torch.no_grad()(layer.forward)
        model(**given).loss.backward()
        assert layer.weight.grad is None
    ours, theirs = (model.model.layers[0].self_attn.k_proj.weight.grad for model in (mine, dense))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


MODES = {
    "dtypes of autocast": (
        partial(torch.autocast, "cpu", torch.bfloat16),
        partial(torch.autocast, "cpu", torch.float16),
    ),
    "inference": (torch.no_grad, torch.inference_mode),
}


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
def test_layers_of_one_input_in_two_modes(modes):
    given, seen = {"input_ids": inputs("LlamaForCausalLM")["input_ids"]}, []

    def inside(forward, mode, x):
        with mode():
            y = forward(x)
        seen.append((y.dtype, y.is_inference(), y.requires_grad))
        return y.float().clone()

    dense = build("LlamaForCausalLM").float()
    for model in (ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=1)), scheme="1d"), dense):
        attention = model.model.layers[0].self_attn
        for layer, mode in zip((attention.q_proj, attention.k_proj), modes, strict=True):
            layer.forward = partial(inside, layer.forward, mode)
        model(**given)
    assert seen[:2] == seen[2:]

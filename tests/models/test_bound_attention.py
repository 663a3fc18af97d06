"""Decode steps whose attention was bound in the one before: the dense model's numbers, whatever has changed since, and
few calls of Python.
"""

import copy

import pytest
import torch
from products import mesh_of
from test_settled import calls_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import ndtp
from ndtp import Grid
from ndtp.measure.volume import fake_group

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4}


def llama(layers=2):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=layers, **SIZES)).double().eval()


def whole(x):
    return x.gathered() if hasattr(x, "gathered") else x


def steps(model, batch=4, count=2, between=lambda step: None, **given):
    """Logits of a prompt's last token, and of some steps behind it."""
    cache, found = DynamicCache(config=model.config), []
    ids = torch.arange(batch * 5).view(batch, 5)
    for step in range(count + 1):
        mask = torch.ones(batch, 5 + step, dtype=torch.long)
        mask[0, 1] = 0  # so that there is a mask
        out = model(input_ids=ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1, **given)
        found += [whole(out.logits)] + [whole(each) for each in out.attentions or ()]
        ids = out.logits.argmax(-1) if type(out.logits) is torch.Tensor else out.logits.gathered().argmax(-1)
        between(step)
    return found


def scaled(model):
    part = model.model.layers[0].self_attn.v_proj
    part.weight = torch.nn.Parameter(1.5 * torch.ones_like(part.weight))


def hooked(model):
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, args, y: y * 1.5)


def replaced(model):
    attention = model.model.layers[1].self_attn
    own = attention.k_proj.forward
    attention.k_proj.forward = lambda x: own(x) * 1.25


def written(model):
    """Between two steps, and in place."""

    def write(step):
        if step == 1:
            for name in ("q_proj", "o_proj"):
                getattr(model.model.layers[1].self_attn, name).weight.mul_(1.5)

    return steps(model, count=3, between=write)


def eager(model):
    model.set_attn_implementation("eager")
    return steps(model, output_attentions=True)


def trains(model):
    found = steps(model.train())
    return found + steps(model.eval())


@torch.no_grad()
def check_changes(grid, scheme):
    dense, model = llama(), ndtp.parallelize(llama(), mesh_of(grid), scheme=scheme)
    changes = (
        steps, lambda each: steps(each, batch=2), lambda each: (scaled(each), steps(each))[1],
        written, eager, trains, lambda each: steps(copy.deepcopy(each)),
        lambda each: (hooked(each), steps(each))[1], lambda each: (replaced(each), steps(each))[1],
    )  # fmt: skip
    for number, change in enumerate(changes):
        for mine, theirs in zip(change(model), change(dense), strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda m: f"change {number}: {m}")  # noqa: B023


@pytest.mark.parametrize(("sizes", "scheme"), [({"x": 2, "y": 2}, "2d"), ({"z": 2, "x": 2}, "3d"), ({"y": 4}, "1d")])
def test_steps_are_the_dense_ones_whatever_changes(ranks, sizes, scheme):
    ranks(4).run(check_changes, Grid(sizes), scheme)


class Operations(TorchDispatchMode):
    """Counts operations of torch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_of(call):
    with Operations() as operations:
        call()
    return operations.count


def of_a_layer(count, sizes, scheme):
    """What a decode step does in a layer: the difference between models of three layers and of two."""
    found = []
    for layers in (2, 3):
        with fake_group(Grid(sizes).num_ranks):
            model = ndtp.parallelize(llama(layers), ndtp.ProcessGrid(Grid(sizes), device_type="cpu"), scheme=scheme)
            cache, ids = DynamicCache(config=model.config), torch.arange(20).view(4, 5)
            for given in (ids, ids[:, :1], ids[:, :1]):
                model(input_ids=given, past_key_values=cache)
            found.append(count(lambda: model(input_ids=ids[:, :1], past_key_values=cache)))  # noqa: B023
    return found[1] - found[0]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("sizes", "scheme", "most"),
    [
        ({"y": 2}, "1d", 155), ({"x": 2}, "1d-sp", 155), ({"x": 2, "y": 2}, "2d", 220),
        ({"z": 2, "x": 2, "y": 2}, "3d", 225),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_decode_step_calls_few_functions(sizes, scheme, most):
    assert of_a_layer(calls_of, sizes, scheme) <= most


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("sizes", "scheme", "most"),
    [({"y": 2}, "1d", 74), ({"x": 2, "y": 2}, "2d", 95), ({"z": 2, "x": 2, "y": 2}, "3d", 101)],
)
@torch.no_grad()
def test_a_decode_step_runs_few_operations(sizes, scheme, most):
    assert of_a_layer(operations_of, sizes, scheme) <= most

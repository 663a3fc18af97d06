"""Any parameter of a stock model, changed in place between forward and backward: torch's error, or exact gradients."""

import pytest
import torch
from products import mesh_of

import ndtp
from ndtp import Grid

pytest.importorskip("transformers")
import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it
from architectures import build, inputs
from test_transformers_whole import check_gradients

# By model: layers whose weights backward needs.
NEEDED = {"LlamaForCausalLM": {"down_proj", "norm"}, "GPT2LMHeadModel": {"ln_f"}, "BertForMaskedLM": {"dense"}}


def check_changes(trains):
    mesh = mesh_of(Grid(x=2))
    for name in NEEDED:
        refused, changes = set(), {"num_hidden_layers": 1} | ({"n_layer": 1} if name.startswith("GPT2") else {})
        dense, given = build(name, **changes), inputs(name)
        model = ndtp.parallelize(build(name, **changes), mesh, scheme="1d-sp")
        for each in (model, dense):
            each(**given).loss.backward()
        check_gradients(model, dense, name)
        exact = {key: parameter.grad.to_local().clone() for key, parameter in model.named_parameters()}
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(trains)
            model.zero_grad()
            loss, before = model(**given).loss, parameter.detach().clone()
            with torch.no_grad():
                parameter.mul_(0.5)
            try:
                loss.backward()
                for other, mine in model.named_parameters():
                    where = f"{name}, {key} was changed: {other}"
                    assert (mine.grad is None) == (other == key and not trains), where
                    assert mine.grad is None or torch.equal(mine.grad.to_local(), exact[other]), where
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error), f"{name}, {key}: {error}"
                refused.add(key.split(".")[-2])
            with torch.no_grad():
                parameter.copy_(before)
            parameter.requires_grad_(True)
        assert NEEDED[name] <= refused, refused


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
def test_no_change_goes_unnoticed(ranks, trains):
    ranks(2).run(check_changes, trains)


def scale_input(module, args, _):
    args[0].mul_(1.5)


def check_inputs_written_between():
    """A hook of the first of two layers of one input writes to that input before the second is called."""
    mesh, given = mesh_of(Grid(x=2)), inputs("LlamaForCausalLM")
    for name in ("self_attn.q_proj", "mlp.gate_proj"):
        dense = build("LlamaForCausalLM")
        model = ndtp.parallelize(build("LlamaForCausalLM"), mesh, scheme="1d-sp")
        for each in (model, dense):
            each.model.layers[0].get_submodule(name).register_forward_hook(scale_input)
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                for _ in range(2):
                    torch.testing.assert_close(model(**given).logits * 1.0, dense(**given).logits, msg=name)
    mlp = dense.model.layers[0].mlp  # torch has no gradients for the dense model, which writes to what backward needs
    mlp.gate_proj._forward_hooks.clear()
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(1.5 * x))
    for each in (model, dense):
        each(**given).loss.backward()
    check_gradients(model, dense, "an input that was written to")


def check_inputs_of_an_mlp():
    """The same between calls of the layers by other code."""
    dense, x = build("LlamaForCausalLM"), torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0)).double()
    model = ndtp.parallelize(build("LlamaForCausalLM"), mesh_of(Grid(x=2)), scheme="1d-sp")
    found = []
    for each in (model, dense):
        mlp, v = each.model.layers[0].mlp, x.clone()
        gate = mlp.gate_proj(v)
        with torch.no_grad():
            v.mul_(2)
        found.append((mlp.up_proj(v) + 0, gate * 1))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine.gathered(), theirs)


def test_an_input_of_an_mlp_that_is_written_to_between(ranks):
    ranks(2).run(check_inputs_of_an_mlp)


def test_an_input_of_two_layers_that_is_written_to_between(ranks):
    ranks(2).run(check_inputs_written_between)

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

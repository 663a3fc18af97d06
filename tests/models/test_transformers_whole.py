"""Stock models in fp64, split as a whole, with masks; `test_every_grid.py` has all architectures."""

import warnings

import pytest
import torch
from products import mesh_of
from turns import by_turns

import ndtp
from ndtp import Grid
from ndtp.models.hidden import Hidden, whole

pytest.importorskip("transformers")
import architectures
import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it


def gradient(parameter):
    return parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad


def check_gradients(model, dense, where):
    """Of norms that compute in fp32, as their authors wanted, no more than that is asked."""
    for (key, mine), (name, theirs) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        assert key == name, where
        if theirs.grad is None:
            assert mine.grad is None, f"{where}: {name}"
            continue
        found = gradient(mine)[tuple(slice(0, size) for size in theirs.shape)]
        scale = theirs.grad.abs().max().item()
        error = (found - theirs.grad).abs().max().item()
        assert error <= 2e-6 * scale + 1e-9, f"{where}: {name}, {error:.1e} of {scale:.1e}"


def check_models(names, sizes, scheme, batch=4, masked=False, **changes):
    mesh = mesh_of(Grid(sizes))
    for name in names:
        where = f"{name}, {mesh.grid}, {scheme}"
        dense, model = (architectures.build(name, **changes) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what is gathered; see check_report
            keys = {key: tuple(value.shape) for key, value in dense.state_dict().items()}
            assert ndtp.parallelize(model, mesh, scheme=scheme) is model
            assert list(model.state_dict()) == list(keys), where
            given = architectures.inputs(name, batch)
            rows = mesh.coordinate.get("dp", 0), mesh.grid["dp"] if "dp" in mesh.grid else 1
            if masked:
                given["attention_mask"] = torch.ones_like(given["input_ids"])
                given["attention_mask"][0, 4:] = 0
            expected, out = dense(**given), model(**{key: x.chunk(rows[1])[rows[0]] for key, x in given.items()})
            torch.testing.assert_close(out.loss, expected.loss, rtol=2e-6, atol=0.0, msg=f"{where}: loss")
            if "logits" in out:
                logits = expected.logits.chunk(rows[1])[rows[0]]
                torch.testing.assert_close(whole(out.logits), logits, rtol=1e-6, atol=1e-6, msg=f"{where}: logits")
            expected.loss.backward()
            out.loss.backward()
        check_gradients(model, dense, where)
        model.load_state_dict(dense.state_dict())  # padded or not, shared or not
        assert not mesh.collectives.in_flight, where
        if "labels" in given and "input_ids" in given:
            assert isinstance(out.logits, Hidden), f"{where}: logits stay split"


def test_one_dimension_and_masks(ranks):
    ranks(2).run(check_models, ["LlamaForCausalLM", "GPT2LMHeadModel"], {"x": 2}, "1d", masked=True)
    ranks(2).run(check_models, ["LlamaForCausalLM", "Phi3ForCausalLM"], {"x": 2}, "1d-sp", masked=True)


def test_classifiers(ranks):
    """Split too, with the transform and the pooler before them; the loss is the mean over the ranks of dp."""
    names = by_turns([name for name in architectures.HEADS if name not in architectures.ALL], 2)
    for sizes, scheme in (({"x": 2, "y": 2}, "2d-features"), ({"dp": 2, "x": 2}, "1d-sp")):
        ranks(4).run(check_models, names, sizes, scheme, num_hidden_layers=1)

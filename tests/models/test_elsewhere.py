"""Models of the zoo of `elsewhere.py` that were once wrong, broke or were refused, each for a cause of its own."""

from __future__ import annotations

import elsewhere
import pytest
import torch

# What becomes of them, by the start of their name; of one that is refused, a part of the reason.
ONCE = {
    "flow of couplings": "equal",  # sections of a layer that leads out would lie as no DTensor can
    "weights of complex numbers": "equal",  # gradients want the conjugate of the other operand
    "generator and critic": "equal",  # gradients of gradients
    "waves that solve": "equal",  # the same, where gradients are on in the model's code alone
    "a network that makes": "equal",  # whole weights that were computed, by functional_call
    "sets with induced": "equal",  # a parameter of the model's own as the input of nn.MultiheadAttention
    "blocks that are undone": "equal",  # an autograd.Function that calls split layers, forward and backward
    "layers of its own": "equal",  # a model without nn.Linear was refused
    "layers with spectral": "equal",  # `parallelize` read a weight whose parametrization changes buffers
    "an ensemble": "equal",  # of vmap of functional_call: what it takes is gathered
    "a learner": "torch.func transforms look past the shards",  # in its first call
    "a submodule that is a script": "'body' is a script",
}


@pytest.mark.parametrize("start", ONCE)
def test_models_that_were_wrong_are_equal_or_refused_by_name(ranks, tmp_path, start):
    name, path = next(name for name in elsewhere.ALL if name.startswith(start)), str(tmp_path / "dense")
    elsewhere.dense_of(elsewhere.ALL[name], torch.float32, path)
    for row in ranks(4).run(elsewhere.on_grid, name, {"x": 2, "y": 2}, "3d", torch.float32, path):
        if (wanted := ONCE[start]) == "equal":
            assert row["verdict"] == "equal" and row["split"] > 0.5, row
        else:
            verdict = "stopped" if start == "a learner" else "refused"
            assert row["verdict"] == verdict and wanted in row["error"], row

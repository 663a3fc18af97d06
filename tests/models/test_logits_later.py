"""What training loops compute of `out.logits`, before a step of the optimizer and behind it: the dense loop's."""

import io
import warnings

import numpy as np
import pytest
import torch
from products import mesh_of
from small_models import IDS, build, called

import ndtp
from ndtp import Grid, LayoutError
from ndtp.models import kept_logits

pytest.importorskip("transformers")
import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it

READS = {
    "whole": lambda y: y.detach().cpu().float() * 1,
    "argmax": lambda y: y.argmax(-1),
    "torch.argmax": lambda y: (torch.argmax(y, dim=-1) == IDS).float().mean(),
    "numpy": lambda y: torch.from_numpy(np.argmax(y.detach().cpu().numpy(), axis=-1)),
    "shifted": lambda y: y[:, :-1].float().softmax(-1).max(-1).values.detach(),
    "topk": lambda y: y.topk(3).indices,
    "python": lambda y: torch.tensor(y[0, 0].tolist()),
}


def loop(model, step=True):
    """All of the reads, of logits of one call each, where a loop reads them; and again in evaluation."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1.0), []
    for read in READS.values() if step else (READS["argmax"],):
        loss, logits = called(model)
        loss.backward()
        if step:
            optimizer.step()
        optimizer.zero_grad()
        found.append(read(logits))
    model.eval()
    with torch.no_grad():
        return [*found, called(model)[1].argmax(-1)]


def plain(x):
    return x.gathered() if hasattr(x, "gathered") else x


def check_reads():
    mesh = mesh_of(Grid(x=2))
    for kind in ("llama", "nano"):
        for step in (True, False):
            expected = loop(build(kind), step)
            found = loop(ndtp.parallelize(build(kind), mesh, scheme="1d"), step)
            for name, mine, theirs in zip([*READS, "eval"], found, expected, strict=False):
                torch.testing.assert_close(plain(mine), theirs, rtol=1e-4, atol=1e-4, msg=f"{kind} {step} {name}")
    model = ndtp.parallelize(build("llama"), mesh, scheme="1d")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called(model)[0].backward()
    assert not kept_logits._OPEN  # nobody has the logits, and a step copies nothing
    _, logits = called(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    optimizer.step()
    with pytest.raises(LayoutError, match="changed by other than an optimizer"):
        logits.argmax(-1)


def test_logits_are_those_of_the_call(ranks):
    ranks(2).run(check_reads)


def check_saved():
    """A file has the whole of them, and libraries of arrays take them for tensors of torch's by the name of a class."""
    model, file = ndtp.parallelize(build("llama"), mesh_of(Grid(x=2)), scheme="1d"), io.BytesIO()
    logits = model(input_ids=IDS).logits
    assert type(logits).__module__ == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(logits, file)
    file.seek(0)
    assert torch.equal(torch.load(file), plain(logits))


def test_logits_are_saved_as_a_tensor_of_torch(ranks):
    ranks(2).run(check_saved)

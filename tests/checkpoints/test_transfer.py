"""Training runs that go from grid to grid without a file: every bit, optimizer included, and the least bytes."""

import numpy as np
import pytest
import torch
from ndtp.checkpoint import transfer, transfer_volume
from products import mesh_of

import ndtp
from ndtp import CommMeter, Grid
from ndtp.algebra.volume import Volume
from ndtp.errors import CheckpointError, GridError
from ndtp.models.state_entries import entries_of

transformers = pytest.importorskip("transformers")
from architectures import as_dense, inputs  # noqa: E402
from test_training_state import adamw, build  # noqa: E402

NAME, TIED = "MixtralForCausalLM", {"tie_word_embeddings": True}
ONE, OTHER = Grid(e=2, x=2), Grid(y=2, z=2)


def lacking(source, target, mesh, to):
    """Bytes of real elements that this rank has afterwards and not before, counted one by one."""
    found, before = 0, {key: entry for entry in entries_of(source, mesh) for key in entry.keys}
    for entry in entries_of(target, to):
        has, wants = (np.zeros(entry.real, dtype=bool) for _ in range(2))
        has[before[entry.keys[0]].part(mesh.rank)] = True
        wants[entry.part(to.rank)] = True
        found += int((wants & ~has).sum()) * entry.local.element_size()
    return found


def shards(model, optimizer):
    states = {f"{i} {n}": x for i, (_, s) in enumerate(optimizer.state.items()) for n, x in s.items()}
    named = dict(model.named_parameters()) | {
        n: x if isinstance(x, torch.Tensor) else torch.tensor(x) for n, x in states.items()
    }
    return {name: getattr(x, "_local_tensor", x).detach() for name, x in named.items()}


def check_all():
    """Of a vocabulary that is padded and tied, and of experts that lie over other axes."""
    mesh, to = mesh_of(ONE), mesh_of(OTHER)
    model, again = (ndtp.parallelize(build(NAME, **TIED), mesh) for _ in range(2))
    target, dense = ndtp.parallelize(build(NAME, **TIED), to, expert_axis="y"), build(NAME, **TIED)
    optimizer, its, last = adamw(model), adamw(target, betas=(0.1, 0.2)), adamw(again)
    first = mesh.coordinate["e"] * 2  # of the sequences that these ranks are given
    model(**{key: x[first : first + 2] for key, x in inputs(NAME).items()}).loss.backward()
    optimizer.step()
    predicted = transfer_volume(model, optimizer, target)
    with CommMeter() as meter:
        moved = transfer(model, optimizer, target, its)
    found = Volume.of(entry for entry in meter.volume if entry.phase == "transfer")
    assert found == predicted == moved and not mesh.collectives.in_flight, f"{meter.volume}, {predicted}"
    assert predicted.total == 3 * lacking(model, target, mesh, to), "parameters, and two as large beside"
    assert its.param_groups[1]["betas"] == (0.9, 0.999)
    transfer(model, None, dense)
    for (key, mine), theirs in zip(target.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(as_dense(mine.full_tensor(), theirs), theirs), key
    transfer(target, its, again, last)
    mine, theirs = shards(again, last), shards(model, optimizer)
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert torch.equal(mine[key], theirs[key]), f"{key} there and back"
    with torch.device("meta"):
        narrow = build(NAME, **TIED).bfloat16()
    ndtp.parallelize(narrow, to, expert_axis="y")
    assert 4 * transfer(model, None, narrow).total == lacking(model, target, mesh, to)
    for mine, theirs in zip(narrow.parameters(), target.parameters(), strict=True):
        assert torch.equal(mine._local_tensor, theirs._local_tensor.bfloat16())
    its = adamw(narrow)
    assert transfer(model, optimizer, narrow, its) == transfer_volume(model, optimizer, narrow)
    assert {x.dtype for state in its.state.values() for name, x in state.items() if name != "step"} == {torch.bfloat16}
    check_refusals(model, optimizer, target, adamw(target))


def check_refusals(model, optimizer, target, its):
    larger = ndtp.parallelize(build(NAME, vocab_size=68, **TIED), mesh_of(OTHER))
    deeper = ndtp.parallelize(build(NAME, num_hidden_layers=2, **TIED), mesh_of(OTHER))
    before = shards(target, its)
    for words, given in (
        (r"embed_tokens.weight' is \(67, 32\)", (model, None, larger)),
        ("layers.1.*' is a key of the model that takes", (model, None, deeper)),
        ("layers.1.*' is a key of the model that gives", (deeper, None, model)),
        ("one model has an optimizer", (model, optimizer, target)),
        ("neither model is on a grid", (build(NAME), None, build(NAME))),
    ):
        with pytest.raises(CheckpointError, match=words):
            transfer(*given)
    with pytest.raises(GridError, match="over the same ranks"):
        transfer_volume(model, None, ndtp.parallelize(build(NAME), ndtp.ProcessGrid(Grid(x=1))))
    after = shards(target, its)
    assert all(torch.equal(x, after[key]) for key, x in before.items())


def test_from_grid_to_grid_and_back(ranks):
    ranks(4).run(check_all)

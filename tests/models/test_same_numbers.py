"""Numbers that one rank has otherwise and that no loss of the call shows: each is named by all ranks."""

import math
import random
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from architectures import build
from products import mesh_of
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ndtp
from ndtp import Grid, MismatchError
from ndtp.models.same_weights import _lines
from ndtp.runtime.facts import Fingerprint, hash_of_content, projection_of
from ndtp.runtime.memories import memories_of
from ndtp.runtime.reads import reads_since
from ndtp.runtime.versions import Versions, refuse_changed, version_of


@pytest.mark.parametrize("sizes", [(4096, 16), (128, 1, 32, 32), (5000, 7)], ids=str)
def test_a_sample_of_a_tensor_has_numbers_of_all_of_its_columns(sizes):
    x = torch.ones(sizes)
    before = projection_of(x)
    assert isinstance(before, Fingerprint)
    for column in range(sizes[-1]):
        other = x.clone()
        other[..., column] = 2
        assert projection_of(other).square > before.square, column


def test_weights_of_other_kinds_have_hashes():
    """Of two tensors in one, as quantised weights are; what is nested is left out."""
    a, b = torch.arange(6.0), torch.arange(6.0) + 1
    assert hash_of_content(TwoTensor(a, b)) == hash_of_content(TwoTensor(a.clone(), b.clone()))
    assert hash_of_content(TwoTensor(a, b)) != hash_of_content(TwoTensor(a, a))
    module = nn.Module()
    module.register_buffer("rows", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    module.register_buffer("turned", torch.ones(2, dtype=torch.complex64).conj())
    assert [line.partition(" ")[0] for line in _lines(module)] == ["turned"]


def test_versions_say_what_has_changed():
    x, n = torch.ones(3), torch.ones(3)
    seen = version_of(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0 instead"):
        refuse_changed(x, seen, "B")
    seen = version_of(x)
    x.data = n
    with pytest.raises(RuntimeError, match=r"B, .* has other memory since"):
        refuse_changed(x, seen, "B")
    with torch.inference_mode():
        uncounted = Versions([torch.ones(3)])
    assert uncounted.of_new(uncounted.now()) == uncounted.now()
    counted = Versions([x], swaps=False)
    before = counted.now()
    torch.utils.swap_tensors(x, torch.ones(3, dtype=torch.bfloat16))  # whose count is lower
    assert counted.changed(before, counted.now()) == {0: 0}
    plain = nn.Parameter(n)  # as a dry run makes one of a parameter of the grid, with its attributes
    plain.ndtp_memories = None
    assert memories_of(plain) is plain


class Noisy(nn.Module):
    """A Linear with a temperature, and noise from a generator that a model's code may use."""

    def __init__(self, source):
        super().__init__()
        self.first, self.last, self.source = nn.Linear(8, 16), nn.Linear(16, 4), source
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("turned", torch.ones(2, dtype=torch.complex64).conj())
        self.register_buffer("seconds", torch.tensor(0.0), persistent=False)

    def forward(self, x):
        noise = {"NumPy": np.random.rand, "Python": random.random, None: float}[self.source]()
        return self.last(torch.relu(self.first(x) + noise)) * self.gain / self.temperature


def said_of(source, change, axis, beside=None):
    mesh, x = mesh_of(Grid({axis: 2})), torch.ones(4, 8)
    if beside is not None:
        end = threading.Event()
        threading.Thread(target=beside, args=(end,), daemon=True).start()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    model = ndtp.parallelize(Noisy(source), mesh, example=x)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights[::-1] if mesh.rank else weights, lr=0.1)  # as of a set, which goes by addresses
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if mesh.rank:
                change(model)
    except MismatchError as error:
        return str(error)
    finally:
        if beside is not None:
            end.set()


def draws(model):
    np.random.rand(), random.random()


def draws_beside(end):
    while not end.wait(0.0001):
        random.random()


def cools(model):
    model.temperature.mul_(0.5)


def counts_seconds(model):
    model.seconds.add_(1.0), model.mask[0].add_(1e-6)


def test_generators_of_numpy_and_python_are_compared_where_a_forward_draws_from_them(ranks):
    assert ranks(2).run(said_of, None, draws, "x") == [None, None]
    assert ranks(2).run(said_of, "NumPy", draws, "dp") == [None, None]
    for source, fix in (("NumPy", "np.random.seed with"), ("Python", "random.seed with")):
        for said in ranks(2).run(said_of, source, draws, "x"):
            assert f"random numbers of {source}" in said and fix in said


def test_a_thread_that_draws_beside_the_model_is_none_of_its_business(ranks):
    assert ranks(2).run(said_of, None, draws, "x", draws_beside) == [None, None]
    assert ranks(2).run(said_of, "Python", draws, "x", draws_beside) == [None, None]
    assert ranks(2).run(of_one_rank, "NumPy", draws, "x") == [None, None]


def of_one_rank(source, change, axis):
    """A thread of rank 0 alone, as loggers have one."""
    return said_of(source, change, axis, None if dist.get_rank() else draws_beside)


def test_buffers_are_compared_up_to_rounding(ranks):
    for said in ranks(2).run(said_of, None, cools, "z"):
        assert "buffer 'temperature': rank 1 has norm 0.5" in said and "the same buffers on every rank" in said
    assert ranks(2).run(said_of, None, cools, "dp") == [None, None]
    assert ranks(2).run(said_of, None, counts_seconds, "z") == [None, None]


def in_own_order(model):
    """The weights in the order in which a set has them, which is another one on each rank."""
    return list(model.parameters()) if dist.get_rank() else [*model.parameters()][::-1]


def logs_norms(model):
    for p in in_own_order(model):
        p.norm()


def logs_norms_of_gradients(model):
    for p in in_own_order(model):
        p.grad.norm()


def clips_fewer(model, order=2.0):
    weights = [p for p in model.parameters() if dist.get_rank() or p.dim() == 2]
    torch.nn.utils.clip_grad_norm_(weights, 1e-3, order)


def clips_fewer_by_the_largest(model):
    clips_fewer(model, math.inf)


def clips_each(model):
    for p in in_own_order(model):
        torch.nn.utils.clip_grad_norm_(p, 1e-3)


def clips_a_set(model):
    torch.nn.utils.clip_grad_norm_(in_own_order(model), 1e-3)


def read_by(act, axis):
    """Whether ranks of the axis read their weights alike, behind a step."""
    mesh, x = mesh_of(Grid({axis: 2})), torch.ones(4, 8)
    torch.manual_seed(0)
    model = ndtp.parallelize(Noisy(None), mesh, example=x)
    try:
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
            act(model)
    except MismatchError as error:
        return str(error)


def test_reads_of_split_weights_in_another_order_are_named_at_the_next_point(ranks):
    for said in [*ranks(2).run(read_by, logs_norms, "x"), *ranks(2).run(read_by, logs_norms, "x")]:  # of equal grids
        assert "read 1 of split" in said and "norm of 'first.weight'" in said and "norm of 'last.weight'" in said
        assert "over model.named_parameters(), not over a set" in said and "more like it" in said
    for act, name in ((logs_norms_of_gradients, "gradient of first.weight"), (clips_each, "gradient of first.weight")):
        for said in ranks(2).run(read_by, act, "x"):
            assert f"norm of '{name}'" in said
    for act in (clips_fewer, clips_fewer_by_the_largest):
        for said in ranks(2).run(read_by, act, "x"):
            assert "norm of '2 tensors (names " in said and "norm of '5 tensors (names " in said
    assert ranks(2).run(read_by, logs_norms, "dp") == [None, None]
    assert ranks(2).run(read_by, clips_a_set, "x") == [None, None]


def reads_of_copies():
    """Of what is split over x alone, and so read by the ranks of one copy, and of what another thread has read."""
    mesh, x = mesh_of(Grid(x=2, y=2)), torch.ones(4, 8)
    torch.manual_seed(0)
    model = ndtp.parallelize(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), mesh, example=x, scheme="2d")
    for _ in range(2):
        model(x).square().mean().backward()
        for p in model.parameters():
            own = [axis for axis, each in zip(mesh.mesh_axes, p.placements, strict=True) if not each.is_replicate()]
            if len(own) == 1 and mesh.coordinate[{"x": "y", "y": "x"}[own[0]]] == 0:
                p.norm()
        reading = threading.Thread(target=lambda: (model[0].weight.norm(), model[2].weight.norm()))
        reading.start(), reading.join()
    return len(reads_since(mesh.device_mesh, ()))


def test_reads_of_one_copy_or_of_another_thread_are_no_disagreement(ranks):
    assert sorted(ranks(4).run(reads_of_copies)) == [0, 1, 1, 2]


def last_token(axis, seed, check):
    """What a rank says of tokens that it samples, of which the model sees none."""
    mesh, ids = mesh_of(Grid({axis: 2})), torch.arange(8)[None]
    model = ndtp.parallelize(build("LlamaForCausalLM", num_hidden_layers=1), mesh, check=check).eval()
    torch.manual_seed(seed * mesh.rank)
    try:
        model.generate(ids, do_sample=True, max_new_tokens=1, min_new_tokens=1, pad_token_id=0)
    except MismatchError as error:
        return str(error)


def test_the_last_token_that_ranks_sample_is_compared(ranks):
    for said in ranks(2).run(last_token, "x", 1, None):
        assert "at the end of generate after call 1 of Llama" in said and "sampled tokens: values: rank" in said
        assert "fix: torch.manual_seed with one seed" in said
    for axis, seed, check in (("x", 0, None), ("x", 1, False), ("dp", 1, None)):
        assert ranks(2).run(last_token, axis, seed, check) == [None, None]


def changes_its_shard(check):
    """What a rank says of a shard that rank 1 alone holds, and changes behind the second of three steps."""
    mesh, x = mesh_of(Grid({"y": 2})), torch.ones(4, 8)
    torch.manual_seed(0)
    model = ndtp.parallelize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), mesh, example=x, check=check)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if mesh.rank and step == 1:
                model[0].weight.to_local().data.mul_(1.5)
    except MismatchError as error:
        return str(error)


def test_a_shard_that_one_rank_changes_between_any_two_steps_is_named_where_all_is_looked_at(ranks):
    for said in ranks(2).run(changes_its_shard, True):
        assert "before call 3 of Sequential" in said and "weight '0.weight' since the last step: rank" in said
    assert ranks(2).run(changes_its_shard, None) == [None, None]


def writes_before_a_step(times, where, at=2, rates=(0.1, 0.1)):
    """What a rank says where ranks write to a weight so often between backward and a step, which have rates from there.

    Steps of higher numbers than 8 are not looked at, but for each eighth.
    """
    mesh, x = mesh_of(Grid({where: 2})), torch.ones(4, 8)
    torch.manual_seed(0)
    model = ndtp.parallelize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), mesh, example=x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(at + 8):
            optimizer.zero_grad()
            model(x).square().mean().div(2 if where == "dp" else 1).backward()
            if step >= at:
                optimizer.param_groups[0]["lr"] = rates[mesh.rank]
            for _ in range(times[mesh.rank] if step == at else 0):
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
            optimizer.step()
    except MismatchError as error:
        return str(error)


def test_a_weight_that_one_rank_writes_to_before_a_step_is_named(ranks):
    for where in ("y", "dp"):
        for said in ranks(2).run(writes_before_a_step, (1, 2), where):
            assert "disagree at the call 4 of Sequential" in said
            assert (
                "weight '0.weight' since the last call: rank 1 has written to 2 times, rank 0 has written to 1" in said
            )
        assert ranks(2).run(writes_before_a_step, (1, 1), where) == [None, None]


def steps_of_two_optimizers(rates):
    """What a rank says where the second one of two optimizers of a model has another rate from step 10 on."""
    mesh, x = mesh_of(Grid(y=2)), torch.ones(4, 8)
    torch.manual_seed(0)
    model = ndtp.parallelize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), mesh, example=x)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    try:
        for step in range(18):
            model.zero_grad()
            model(x).square().mean().backward()
            optimizers[1].param_groups[0]["lr"] = rates[mesh.rank] if step >= 10 else 0.1
            for optimizer in optimizers:
                optimizer.step()
    except MismatchError as error:
        return str(error)


def test_the_second_optimizer_of_a_model_is_looked_at_as_the_first_one_is(ranks):
    for said in ranks(2).run(steps_of_two_optimizers, (0.1, 0.2)):
        assert "disagree at the call 18 of Sequential" in said
        assert "optimizer of step 34: lr: rank 1 has 0.2, rank 0 has 0.1" in said
    assert ranks(2).run(steps_of_two_optimizers, (0.1, 0.1)) == [None, None]


def test_what_one_rank_does_in_a_step_that_is_not_looked_at_is_named_at_the_next_one_that_is(ranks):
    for said in ranks(2).run(writes_before_a_step, (1, 2), "y", 10):
        assert "disagree at the call 17 of Sequential" in said
        assert "all of the writes to '0.weight' since it was last looked at: rank 1 has 10, rank 0 has 9" in said
        assert "fix: change weights on every rank alike" in said
    for said in ranks(2).run(writes_before_a_step, (0, 0), "y", 10, (0.1, 0.2)):
        assert "disagree at the call 18 of Sequential" in said and "lr: rank 1 has 0.2, rank 0 has 0.1" in said
    assert ranks(2).run(writes_before_a_step, (1, 1), "y", 10) == [None, None]

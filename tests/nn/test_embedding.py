"""Embedding against torch's: features over everything, or as a head's weight; ids out of range; bytes."""

import pytest
import torch
from module_case import EIGHT, FOUR, TWO, check_gradients, close, randn, shard
from products import mesh_of, turned_mesh
from test_linear import message_of

import ndtp
from ndtp import CommMeter, Grid, Layout
from ndtp.testing import assert_equal

VOCABULARY, FEATURES, TOKENS = 24, 16, 16


def dense_embedding(vocabulary=VOCABULARY, features=FEATURES, padding_idx=None):
    dense = torch.nn.Embedding(vocabulary, features, padding_idx, dtype=torch.float64)
    with torch.no_grad():
        dense.weight.copy_(randn(vocabulary, features))
    return dense


def whole_numbers(tokens, size, seed=0):
    return torch.randint(0, size, (tokens,), generator=torch.Generator().manual_seed(seed))


def check_embedding(mesh, dense, module, where, tokens=TOKENS):
    ids = whole_numbers(tokens, dense.num_embeddings)
    upstream = randn(tokens, dense.embedding_dim, seed=1)
    padded = (0, module.padded_dim - dense.embedding_dim)
    whole = lambda t: torch.nn.functional.pad(t, padded)  # noqa: E731
    with CommMeter() as meter:
        rows = module(shard(ids, module.in_layout, mesh))
        rows.backward(shard(whole(upstream), module.out_layout, mesh))
    expected = dense(ids)
    expected.backward(upstream)
    close(rows, shard(whole(expected), module.out_layout, mesh), f"{where}: rows")
    check_gradients(module, dense, where)
    dense.zero_grad()
    predicted = module.volume(tokens)
    assert meter.volume == predicted, f"{where}: measured {meter.volume}, predicted {predicted}"
    assert not mesh.collectives.in_flight, where


def check_cases(cases):
    """With a row of padding, or ids that are looked at: tied or not by turns; and features that are padded."""
    forms = [(False, None, True), (False, 3, False), (True, 3, False), (True, None, True)]
    for turn, (sizes, scheme) in enumerate(cases):
        mesh = mesh_of(Grid(sizes))
        for tied, padding_idx, checks in forms[turn % 2 :: 2]:
            where = f"{mesh.grid}, {scheme}, tied={tied}"
            dense = dense_embedding(padding_idx=padding_idx)
            module = ndtp.nn.Embedding.from_dense(dense, mesh=mesh, scheme=scheme, tied=tied, checks=checks)
            check_embedding(mesh, dense, module, where)
            assert_equal(module.to_dense().weight, dense.weight, f"{where}: to_dense")
        dense = dense_embedding(19, 13)
        tied = turn % 2 == 1
        module = ndtp.nn.Embedding.from_dense(dense, mesh=mesh, scheme=scheme, tied=tied, pad=True)
        check_embedding(mesh, dense, module, f"{mesh.grid}, {scheme}, padded, tied={tied}")


def test_equals_dense_on_grids(ranks):
    check_cases([({"x": 1}, "1d")])
    ranks(2).run(check_cases, TWO)
    ranks(4).run(check_cases, FOUR)
    ranks(8).run(check_cases, EIGHT)


def check_split_ids_and_one_exchange(mesh_of=mesh_of):
    mesh = mesh_of(Grid(z=2, y=2))
    dense = dense_embedding()
    rows = ("z", "y")
    module = ndtp.nn.Embedding.from_dense(dense, mesh=mesh, in_layout=Layout(mesh.grid, rows))
    check_embedding(mesh, dense, module, "ids as the rows")
    # One all-to-all over both axes takes 3/4 of the shard, where one after the other took 1/2 each.
    moved = module.plan.rows.volume((TOKENS, FEATURES), 1)
    assert moved.by("collective") == {"all_to_all": 2 * TOKENS * FEATURES // 4 * 3 // 4}, moved
    assert moved.by("axes") == {"zy": moved.total}


def check_tied_head():
    """A head and an embedding that share a weight: one parameter, both gradients."""
    mesh = mesh_of(Grid(x=2, y=2))
    embedding, head = dense_embedding(), torch.nn.Linear(FEATURES, VOCABULARY, bias=False, dtype=torch.float64)
    head.weight = embedding.weight
    mine = ndtp.nn.Embedding.from_dense(embedding, mesh=mesh, scheme="2d", tied=True)
    my_head = ndtp.nn.Linear.from_dense(head, mesh=mesh, scheme="2d")
    my_head.weight = mine.weight
    ids, upstream = whole_numbers(TOKENS, VOCABULARY), randn(TOKENS, VOCABULARY, seed=3)
    logits = my_head(mine(ids))
    logits.backward(shard(upstream, my_head.out_layout, mesh))
    expected = head(embedding(ids))
    expected.backward(upstream)
    close(logits, shard(expected, my_head.out_layout, mesh), "logits")
    close(mine.weight.grad.full_tensor(), embedding.weight.grad, "dweight")


def initial(sizes, scheme, tied):
    mesh = mesh_of(Grid(sizes))
    module = ndtp.nn.Embedding(VOCABULARY, FEATURES, 1, mesh=mesh, scheme=scheme, tied=tied, seed=5)
    return module.to_dense().weight.detach()


def test_split_ids_tied_heads_and_values(ranks):
    ranks(4).run(check_split_ids_and_one_exchange)
    ranks(4).run(check_split_ids_and_one_exchange, turned_mesh)
    ranks(4).run(check_tied_head)
    expected = initial({"x": 1}, "1d", False)
    assert not expected[1].any(), "the row of padding"
    for tied in (False, True):
        for value in ranks(4).run(initial, {"x": 2, "y": 2}, "2d", tied):
            assert_equal(value, expected, "the same seed")
    drawn = expected[2:].flatten()
    assert abs(drawn.mean().item()) < 0.15 and 0.85 < drawn.std().item() < 1.15


def out_of_range():
    """On one dp rank alone an id is wrong; all ranks say so, before they go on."""
    mesh = mesh_of(Grid(dp=2, x=2))
    module = ndtp.nn.Embedding(VOCABULARY, FEATURES, mesh=mesh, scheme="1d-sp")
    messages = []
    for wrong in (VOCABULARY, -1):
        ids = torch.zeros(8, dtype=torch.long)
        if mesh.coordinate["dp"] == 1:
            ids[3] = wrong
        try:
            module(ids)
        except IndexError as error:
            messages.append(str(error))
    memory = module.memory(TOKENS)
    assert memory.gradients == VOCABULARY * FEATURES // 2 * 4, memory
    messages.append(message_of(lambda: ndtp.nn.Embedding(8, 15, mesh=mesh)))
    messages.append(message_of(lambda: ndtp.nn.Embedding.from_dense(torch.nn.Embedding(4, 4, max_norm=1.0), mesh=mesh)))
    messages.append(message_of(lambda: module(torch.zeros(3, dtype=torch.long))))
    return messages


@pytest.mark.cpu  # a GPU asserts that ids are rows, and the process ends
def test_errors_are_the_same_on_every_rank(ranks):
    messages = ranks(4).run(out_of_range)
    assert all(message == messages[0] for message in messages)
    words = ("1 of 16 ids are not among the 24 rows", "1 of 16", "pad=True", "max_norm", "do not divide")
    for message, word in zip(messages[0], words, strict=True):
        assert word in message

"""Messages say what they are: ranks that disagree get an error on both sides, never a number."""

from unittest import mock

import pytest
import torch

import ndtp
from ndtp import CommunicationError, Grid, Layout, MatMulPlan, ProcessGrid
from ndtp.algebra.steps import Step
from ndtp.collectives import direct_exchange
from ndtp.collectives.labels import Label
from ndtp.testing import small_integers

GATHER, SCATTER, SUM = Step("all_gather", ("x",), 0), Step("reduce_scatter", ("x",), 0), Step("all_reduce", ("x",))


def start(mesh, step, tensor, op="up", phase="forward", part=""):
    return mesh.collectives.start(step, tensor, (op, "A"), phase, part=part)


def both_orders(mesh):
    """Two products, their names and shapes alike but for the op's."""
    plans = [
        MatMulPlan(
            Layout(mesh.grid, None, "x"), Layout(mesh.grid, "x", None), out=Layout(mesh.grid, "x", None), name=op
        )
        for op in ("up", "down")
    ]
    for plan in plans if mesh.rank else plans[::-1]:
        ndtp.matmul(torch.full((4, 2), 2.0), torch.ones(2, 4), plan, mesh)


ones = torch.ones
CASES = {
    "the order of products": both_orders,
    "a name": lambda mesh: start(mesh, GATHER, ones(4), "up" if mesh.rank else "down").wait(),
    "a kind": lambda mesh: start(mesh, *((GATHER, ones(4)) if mesh.rank else (SCATTER, ones(8)))).wait(),
    "a phase": lambda mesh: start(mesh, GATHER, ones(4), phase="dgrad" if mesh.rank else "wgrad").wait(),
    "a chunk": lambda mesh: start(mesh, GATHER, ones(4), part=f"{mesh.rank + 1}/2").wait(),
    "a length": lambda mesh: start(mesh, GATHER, ones(4 + mesh.rank)).wait(),
    "a dtype": lambda mesh: start(mesh, GATHER, ones(4).to((torch.float16, torch.bfloat16)[mesh.rank])).wait(),
}


# Of two ranks an all-reduce is an exchange, except of an odd number; of more it is gloo's own.
SUMS = {
    "a name": lambda mesh: start(mesh, SUM, ones(4), "up" if mesh.rank else "down").wait(),
    "a name, of an odd number": lambda mesh: start(mesh, SUM, ones(5), "up" if mesh.rank else "down").wait(),
    "a kind": lambda mesh: start(mesh, SUM if mesh.rank else GATHER, ones(4)).wait(),
}
ALL = {"gathers": CASES, "sums": SUMS}


def disagree(ranks, which):
    grids = {case: ProcessGrid(Grid(x=ranks), timeout=0.1) for case in ALL[which]}
    said = {}
    for case, mesh in grids.items():
        try:
            said[case] = f"no error: {ALL[which][case](mesh)}"
        except CommunicationError as error:
            said[case] = str(error)
    return said


def test_ranks_that_disagree_get_an_error_each(ranks):
    """As short a timeout as can be: a peer that is late for another reason ends in the same error."""
    for rank, said in enumerate(ranks(2).run(disagree, 2, "gathers")):
        for case, text in said.items():
            assert "failed: rank" in text and "over axis x" in text, f"rank {rank}, {case}: {text}"
        assert "reduce_scatter of " + ("up", "down")[1 - rank] in said["the order of products"]


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduces_are_told_apart_too(ranks, size):
    for rank, said in enumerate(ranks(size).run(disagree, size, "sums")):
        for case, text in said.items():
            assert "failed: rank" in text, f"rank {rank}, {case}: {text}"


class Group:
    """Writes down the tags of messages that nobody sends."""

    def __init__(self, rank):
        self.me, self.sent, self.received = rank, [], []

    def size(self):
        return 2

    def rank(self):
        return self.me

    def send(self, tensors, peer, tag):
        self.sent.append(tag)

    def recv(self, tensors, peer, tag):
        self.received.append(tag)


def test_tags_are_those_of_the_peer_and_fit_gloo():
    groups = [Group(rank) for rank in range(2)]
    for i in range(60):
        purpose = direct_exchange.purpose_of(Label((f"op{i % 3}",), "forward", "all_gather", ("x",)), torch.float32)
        for group in groups:  # what goes to the peer is longer on rank 1
            own = ones(4 + group.me)
            direct_exchange.exchange(group, [own, own], [ones(4), ones(5)], purpose)
    assert groups[0].sent == groups[1].received and groups[1].sent == groups[0].received
    tags = groups[0].sent + groups[1].sent
    assert len(set(tags)) == len(tags) and all(2**30 <= tag < 2**31 for tag in tags)


def multiply_twice():
    mesh = ProcessGrid(Grid(x=2))
    plan = MatMulPlan(Layout(mesh.grid, None, "x"), Layout(mesh.grid, "x", None))
    first = ndtp.matmul(ones(4, 2), ones(2, 4), plan, mesh)
    with mock.patch.object(direct_exchange.hashlib, "blake2b", side_effect=AssertionError("hashed again")):
        assert torch.equal(ndtp.matmul(ones(4, 2), ones(2, 4), plan, mesh), first)


def test_what_messages_are_for_is_settled_when_a_product_is_bound(ranks):
    ranks(2).run(multiply_twice)


def through_the_host(ranks):
    """As of a GPU's tensors, which gloo cannot send: every message goes through other memory, both ways."""
    mesh = ProcessGrid(Grid(x=ranks))
    of_rank = [small_integers((ranks, 6), seed) for seed in range(ranks)]
    mine, sent = of_rank[mesh.rank], []
    group = mesh.group(("x",))
    parts = list(mine.unbind())
    elsewhere = mock.patch.object(direct_exchange, "is_elsewhere", lambda x: True)
    with elsewhere, mock.patch.object(torch.Tensor, "cpu", torch.Tensor.clone):
        landings = [torch.zeros(6) for _ in range(ranks)]
        work = direct_exchange.exchange(group, parts, landings)
        parts[mesh.rank - 1].zero_()  # what was copied may change
        sent = [x.clone() for x in landings]
        work.wait()
        everywhere = [torch.zeros(ranks, 6) for _ in range(ranks)]
        direct_exchange.exchange(group, [of_rank[mesh.rank].clone()] * ranks, everywhere).wait()
    assert not torch.stack([x for j, x in enumerate(sent) if j != mesh.rank]).any(), "it lands when it is waited for"
    for rank, landed in enumerate(landings):
        expected = small_integers((ranks, 6), rank)[mesh.rank]
        assert torch.equal(landed, expected), rank
        assert everywhere[rank].shape == (ranks, 6)
        if rank != mesh.rank:
            zeroed = small_integers((ranks, 6), rank)
            zeroed[rank - 1] = 0
            assert torch.equal(everywhere[rank], zeroed), rank


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_a_device_go_through_the_host(ranks, size):
    ranks(size).run(through_the_host, size)

"""Operands in blocks: what an all-gather leaves, what a reduce-scatter wants."""

import itertools
from dataclasses import replace

import pytest
import torch
from ndtp_kernels import products, reference
from ndtp_kernels.call import GemmCall
from ndtp_kernels.choice.chips import INTERPRETER
from ndtp_kernels.choice.table import fits
from ndtp_kernels.form import Form
from ndtp_kernels.operands import matrix
from poisoned import POINTER, TMA, TMA_HALVES, integers, surrounded, triton_options

CHOICES = (None, "m", "k"), (None, "k", "n"), (None, "n", "n")  # of A, B and C


def forms(step):
    """Every pair of any two operands' blocks, each once; another `step` pairs them with other blocks of the third."""
    picked = [(i, j, (i + step * j) % 3) for i, j in itertools.product(range(3), repeat=2)]
    return [tuple(of[i] for of, i in zip(CHOICES, each, strict=True)) for each in picked if any(each)]


def stacked(x, blocks, num_blocks, letters, transpose):
    """[.., r, c] as it is stored in blocks along a letter, each inside NaN."""
    if blocks is None:
        return surrounded(x)
    dim = -2 if blocks == (letters[::-1] if transpose else letters)[0] else -1
    return surrounded(torch.stack(x.chunk(num_blocks, dim)))


def compare(m, n, k, form, counts, options, batch=(), transposes=(False, True)):
    a = integers(*batch, *((k, m) if transposes[0] else (m, k)))
    b = integers(*((n, k) if transposes[1] else (k, n)))
    bias = integers(n)
    blocked_a = stacked(a, form[0], counts[0], "mk", transposes[0])
    blocked_b = stacked(b, form[1], counts[1], "kn", transposes[1])
    full = Form(*transposes, *form[:2], counts[2] if form[2] else 1)
    got = products.gemm("gemm", blocked_a, blocked_b, form=full, bias=bias, activation="relu", options=options).c
    want, _ = reference.gemm(blocked_a, blocked_b, bias, activation_name="relu", **full._asdict())
    assert torch.equal(got.double(), want)
    plain = torch.relu((a.mT if transposes[0] else a) @ (b.mT if transposes[1] else b) + bias)
    assert torch.equal(got, reference.cut(plain, full.c_blocks))


@pytest.mark.parametrize("form", forms(1), ids=str)
def test_pointer_kernel_with_uneven_tiles(form):
    """Blocks that no tile divides, of a different number for each operand, batched; more columns than a tile has."""
    compare(12, 18, 12, form, (3, 2, 6), triton_options(), batch=(2,))


@pytest.mark.parametrize("form", forms(2), ids=str)
def test_descriptor_kernel(form):
    """Blocks of whole tiles keep the descriptors."""
    k = 96 if form[:2] == ("k", "k") else 48 if form[1] == "k" else 32
    compare(32, 32, k, form, (2, 3 if form[1] == "k" else 2, 2), triton_options(TMA))


@pytest.mark.parametrize("form", [(None, None, "n"), (None, "n", "n"), ("k", "k", "n")], ids=str)
def test_descriptor_kernel_that_stores_halves(form):
    """A tile of C leaves in two stores: both must find their block."""
    compare(32, 64, 96, form, (2, 3 if form[1] == "k" else 2, 2), triton_options(TMA_HALVES))


@pytest.mark.parametrize("transposes", list(itertools.product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("form", [("m", "n", "n"), ("k", "k", None)], ids=str)
def test_transposes_of_blocks(form, transposes):
    compare(24, 36, 24, form, (2, 3, 4), triton_options(), transposes=transposes)
    n, k = (64, 16) if form[1] == "n" else (16, 64)  # two tiles in each block
    compare(64, n, k, form, (2, 2, 2), triton_options(TMA), transposes=transposes)


def test_split_k_of_blocks():
    """The second pass writes the blocks of C."""
    compare(20, 24, 60, ("k", "k", "n"), (2, 3, 4), triton_options(replace(POINTER, split_k=3)), batch=(2,))


def test_blocks_that_follow_one_another_are_one_matrix():
    """What is gathered along the first dim is contiguous: no block arithmetic, and descriptors for any block size."""
    x = integers(4, 5, 8)
    view = matrix(x, "mk", False, "m", op="test", name="a")
    assert (view.rows, view.blocked) == (20, 0)
    assert matrix(x, "mk", False, "k", op="test", name="a").blocked == 2


def test_descriptors_need_whole_tiles():
    """A block edge inside a tile would read the neighbour's rows: such products go to the pointer kernel."""
    a, b = integers(2, 20, 24), integers(48, 32)
    c = torch.empty(20, 32)
    views = (
        matrix(a, "mk", False, "k", op="t", name="a"),
        matrix(b, "kn", False, None, op="t", name="b"),
        matrix(c, "mn", False, None, op="t", name="c"),
    )
    problem = GemmCall(a, b, c, *views).problem()
    assert problem.blocks == (0, 0, 24)
    assert not fits(problem, TMA, INTERPRETER)
    assert fits(problem, replace(TMA, block_k=8), INTERPRETER)

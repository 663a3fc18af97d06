"""Products in chunks whose operands and results move in every way that layouts allow: bits and bytes of the dense ones.

`tests/chains.py` draws thousands; here are those that show what each way needs, and a few more.
"""

import pytest
import torch
from chains import check_numbers
from products import Product, check_products

import ndtp
from ndtp import Grid, Layout
from ndtp.testing import assert_equal, small_integers

LINE = Grid(x=2)
BY_COLUMNS = [
    # C is gathered along columns, into the shard that goes out; the second time dA is.
    Product(LINE, "None None", "None x", (8, 4), (4, 6), "None None", options={"chunks": 2}),
    Product(LINE, "None None", "x None", (8, 4), (4, 6), options={"chunks": 2}),
    # dC is gathered along columns, and stays in blocks of them, beside an A whose rows lie on its last dim.
    Product(LINE, "None None", "x None", (4, 8), (4, 6), "None x", options={"chunks": 2, "transpose_a": True}),
    Product(LINE, "None x", "x None", (4, 8), (4, 6), "None x", options={"chunks": 2, "transpose_a": True}),
]
# Every way of `BY_COLUMNS` inside of chains, A activated again in five chunks and more, all-reduces of odd sizes.
KNOWN = [8, 23, 45, 65, 72, 116, 168, 172, 188, 213, 252, 288, 372, 404, 488]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gathers_by_columns(ranks, dtype):
    ranks(2).run(check_products, [Product(**{**vars(each), "dtype": dtype}) for each in BY_COLUMNS])


def test_drawn_chains(ranks):
    answers = ranks(4).run(check_numbers, [*KNOWN, *range(1000, 1004)], 4, timeout=200)
    assert not any(wrong for _, wrong in answers), answers[0][1] or answers
    assert answers[0][0] > len(KNOWN), "most of them must be legal"


def modules():
    mesh = ndtp.ProcessGrid(LINE)
    whole = Layout(mesh.grid, None, None)
    layouts = {"in_layout": whole, "weight_layout": Layout(mesh.grid, "x", None), "out_layout": whole}
    dense, x = torch.nn.Linear(4, 6), small_integers((8, 4), 0)
    with torch.no_grad():
        for i, parameter in enumerate(dense.parameters()):
            parameter.copy_(small_integers(parameter.shape, i))
    head = ndtp.nn.Linear.from_dense(dense, mesh=mesh, chunks=2, **layouts)
    assert_equal(head(x), dense(x), "a gathered head in two chunks")


def test_a_gathered_head(ranks):
    ranks(2).run(modules)

"""A cover of `every_grid.py`: each architecture on one grid, each grid with one architecture at least."""

import itertools

import pytest

pytest.importorskip("transformers")

import against_dense
import architectures
import torch
import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it

# From one grid to the next, an architecture a grid: neighbours in the list, which are alike, are on different ones.
COVER = list(zip(architectures.ALL, itertools.cycle(against_dense.SMALL_GRIDS), strict=False))


@pytest.mark.parametrize("name, grid", COVER, ids=[f"{name}, {grid}" for name, grid in COVER])
def test_equals_dense(ranks, tmp_path, name, grid):
    """Logits, loss and all gradients within a multiple of the error of dense, repeats to the bit, the same tokens."""
    path = tmp_path / "dense"
    torch.save(against_dense.reference(name), path)
    for row in ranks(4).run(against_dense.compare_from, str(path), name, grid, small=True):
        assert not row["failed"], f"{name}, {grid}: {row['failed']}"


def test_the_cover_has_all():
    assert {name for name, _ in COVER} == set(architectures.ALL)
    assert {grid for _, grid in COVER} == set(against_dense.SMALL_GRIDS)

"""`scheme="auto"`, `chunks` and `regather` for whole models; the planner's block of a vocabulary."""

import pytest
import torch
from products import mesh_of

import ndtp
from ndtp import CommMeter, Grid, LayoutError
from ndtp.planner.block_cost import Block, Grids, divides, gemms, memory, volume

pytest.importorskip("transformers")

import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it
from architectures import build, inputs
from test_transformers_whole import check_gradients

from ndtp.models.auto import best_grid, best_layouts, whole_request
from ndtp.models.auto_whole import blocks_of


def test_blocks_of_models():
    """Attention, MLPs and vocabulary with their sizes; T5 has attention between its stacks, too."""
    llama = blocks_of(build("LlamaForCausalLM"), 64)
    assert [block.name for block in llama] == ["vocabulary", *["attention"] * 2, *["gated mlp"] * 2]
    assert llama[0] == Block.vocabulary(64, 32, 67) and llama[1].outs == (32, 16, 16) and llama[3].inner == 48
    names = [block.name for block in blocks_of(build("T5ForConditionalGeneration"), 64)]
    assert (names.count("attention"), names.count("mlp")) == (6, 4)
    assert [b.outs for b in blocks_of(build("Phi3ForCausalLM"), 64) if b.inner == 48] == [(48, 48)] * 2


@pytest.mark.parametrize("grid", [Grid(z=2, x=2, y=2), Grid(x=4, y=2), Grid(z=8), Grid(y=8)], ids=str)
def test_the_vocabulary_costs_what_its_plans_say(grid):
    """Head and table, as modules of these sizes would move them; the loss's few numbers a row left out."""
    from ndtp.algebra.layout import Layout
    from ndtp.algebra.schemes import block_layouts
    from ndtp.ops.lookup import LookupPlan

    tokens, hidden, classes = 64, 32, 128
    block = Block.vocabulary(tokens, hidden, classes)
    grid = Grid({axis: grid[axis] if axis in grid else 1 for axis in ("z", "x", "y")})
    layouts = block_layouts(grid, "3d")
    up, _ = layouts.plans()
    table = Layout(grid, None, ("x", "y", "z"))
    lookup = LookupPlan(Layout(grid, None), table, layouts.input)
    moved = up.volume((tokens, hidden, classes)).total + lookup.volume(tokens, (classes, hidden), 4, False, True).total
    sizes = Grids(1, grid["z"], grid["x"], grid["y"])
    assert volume(block, sizes) == moved
    assert len(gemms(block, sizes)) == 1 and block.parameters == 2 * hidden * classes
    assert memory(block, sizes, 4).weights == 2 * hidden * classes * 4 // 8


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_few_key_heads_cost_what_is_gathered(key_heads):
    """Every y that divides the heads of queries is planned; keys and values that are gathered for them cost it."""
    from ndtp.algebra.relayouts import RelayoutPlan
    from ndtp.algebra.schemes import block_layouts

    sizes = Grids(1, 1, 2, 4)
    few, all_heads = Block.attention(64, 32, 8, key_heads), Block.attention(64, 32, 8)
    inside = block_layouts(Grid(x=2, y=4), "3d").hidden
    shared = RelayoutPlan(inside, inside.with_dims(inside.dims[0], None), (), ("y",)).volume((64, 2 * key_heads * 4))
    products = Block(64, 32, few.outs, 32, (8,))
    assert volume(few, sizes) == volume(products, sizes) + shared.total * (key_heads % 4 != 0)
    assert divides(few, sizes, pad=True) and divides(all_heads, sizes, pad=True)
    assert not divides(Block.attention(64, 24, 6, 2), sizes, pad=True), "six heads"


def test_a_large_vocabulary_keeps_the_head_off_x():
    """Over x logits are summed, as many as there are classes: what is planned with the head avoids that."""
    blocks = [Block.mlp(4096, 512, 2048, True)]
    choices = [
        whole_request(given, 8, "cpu", "float32") for given in (blocks, [Block.vocabulary(4096, 512, 64000), *blocks])
    ]
    assert best_grid(choices[1])["x"] == 1
    for asked in choices:
        layouts = best_layouts(asked, Grid(a=2, b=4), stays_split=True)
        assert layouts.input.num_splits(0) * layouts.input.num_splits(1) == 8
    asked = whole_request([Block.attention(54, 30, 5, 5)], 27, "cpu", "float32")
    with pytest.raises(LayoutError, match=r"no axis of grid a=3 b=3 c=3 divides \[5\] heads"):
        best_layouts(asked, Grid(a=3, b=3, c=3), stays_split=True)


def check_auto():
    given, lines = inputs("LlamaForCausalLM"), []
    for mesh in (None, mesh_of(Grid(a=2, b=2))):
        dense, model = build("LlamaForCausalLM").float(), build("LlamaForCausalLM").float()
        ndtp.parallelize(model, mesh, scheme="auto", tokens=4 * 6, hardware="cpu")
        torch.testing.assert_close(model(**given).loss, dense(**given).loss, rtol=1e-5, atol=1e-6)
        report = model.ndtp_report
        assert report.mesh.grid.num_ranks == 4 and (mesh is None or report.mesh is mesh)
        assert "1 vocabulary, 2 attention, 2 gated mlp on grid" in str(report), report
        lines.append(report.planned)
    with pytest.raises(LayoutError, match="give tokens="):
        ndtp.parallelize(build("LlamaForCausalLM"), scheme="auto")
    return lines


def test_auto_is_the_same_on_every_rank(ranks):
    found = ranks(4).run(check_auto)
    assert all(lines == found[0] for lines in found) and all(found[0])


def check_options():
    """Chunks of rows and operands that are gathered again: the same numbers, and the bytes that are predicted."""
    mesh = mesh_of(Grid(z=2, y=2))
    given, volumes = inputs("LlamaForCausalLM", batch=8), []
    dense = build("LlamaForCausalLM")
    dense(**given).loss.backward()
    for options in ({}, {"chunks": 2}, {"regather": ("a", "b"), "chunks": 2}):
        model = ndtp.parallelize(build("LlamaForCausalLM"), mesh, scheme="3d", **options)
        with CommMeter() as meter:
            model(**given).loss.backward()
        check_gradients(model, dense, str(options))
        assert meter.volume == model.ndtp_report.volume(8, 6), options
        volumes.append(meter.volume.total)
    assert volumes[0] == volumes[1] < volumes[2]


def test_chunks_and_regather(ranks):
    ranks(4).run(check_options)

"""`scheme="auto"`, `chunks` and `regather` for whole models; the planner's block of a vocabulary."""

from dataclasses import replace

import pytest
import torch
from products import mesh_of

import ndtp
from ndtp import CommMeter, Grid, LayoutError
from ndtp.planner.block_cost import EXPERT_AXES, Block, Grids, divides, gemms, memory, num_bytes, volume
from ndtp.planner.grids import grids_of
from ndtp.planner.search import axes_of_experts, predict, search

pytest.importorskip("transformers")

import transformers.modeling_layers
import transformers.modeling_utils  # so that ranks are forked with it
from architectures import build, inputs
from test_transformers_whole import check_gradients

from ndtp.models.auto import best_grid, best_of_all_grids, best_on_grid, whole_request
from ndtp.models.auto_whole import blocks_of
from ndtp.models.counted import built


def test_blocks_of_models():
    """Attention, MLPs and vocabulary with their sizes; T5 has attention between its stacks, too."""
    attention, mlp, vocabulary = llama = blocks_of(build("LlamaForCausalLM"), 64)
    assert [(block.name, block.times) for block in llama] == [("attention", 2), ("gated mlp", 2), ("vocabulary", 1)]
    assert vocabulary == Block.vocabulary(64, 32, 67) and attention.outs == (32, 16, 16) and mlp.inner == 48
    found = {block.name: block for block in blocks_of(build("T5ForConditionalGeneration"), 64)}
    assert (found["attention"].times, found["mlp"].times, found["vocabulary"].tied) == (4, 4, True)
    queries, keys = found["cross attention"], found["cross keys"]  # of other rows, so two products
    assert queries.times == keys.times == 2 and queries.inner == keys.outs[0] == found["attention"].inner
    assert [(b.outs, b.times) for b in blocks_of(build("Phi3ForCausalLM"), 64) if b.inner == 48] == [((48, 48), 2)]


def test_a_shared_expert_of_no_features_is_no_block():
    config = transformers.DeepseekV3Config(num_hidden_layers=2, n_shared_experts=0, first_k_dense_replace=1)
    found = blocks_of(built(config.to_dict()), 64)
    assert [block.name for block in found] == ["gated mlp", "experts", "vocabulary"]


def test_layers_that_differ_under_autocast_are_counted():
    """Falcon adds its biases in fp32 there."""
    with torch.device("meta"):
        plain, biased = (build("FalconForCausalLM", bias=bias) for bias in (False, True))
    assert blocks_of(biased, 64) == blocks_of(plain, 64) != []


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
    moved = up.volume((tokens, hidden, classes)) + lookup.rows.volume((tokens, hidden))
    moved += lookup.parameter.volume((classes, hidden), backward="wgrad")
    sizes = Grids(1, grid["z"], grid["x"], grid["y"])
    assert volume(block, sizes) == moved.elements
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
    assert volume(few, sizes) == volume(products, sizes) + shared.elements * (key_heads % 4 != 0)
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
        layouts = best_on_grid(asked, Grid(a=2, b=4)).layouts
        assert layouts.input.num_splits(0) * layouts.input.num_splits(1) == 8
    asked = whole_request([Block.attention(54, 30, 5, 5)], 27, "cpu", "float32")
    with pytest.raises(LayoutError, match=r"no axis of grid a=3 b=3 c=3 divides \[5\] heads"):
        best_on_grid(asked, Grid(a=3, b=3, c=3))


@pytest.mark.parametrize("tokens", [512, 65536])
@pytest.mark.parametrize(
    ("grid", "fixed"),
    [
        (Grid(e=4, a=2), {"dp": 1, "e": 4}),
        (Grid(a=2, e=2, b=2), {"dp": 1, "e": 2}),
        (Grid(a=4, b=2), {"dp": 1, "e": 1}),
        (Grid(dp=4, a=2), {}),
    ],
    ids=str,
)
def test_experts_lie_as_the_planner_says(tokens, grid, fixed):
    """A step takes what the best of the planner's answers with these sizes takes; dp may split experts, as its e."""
    blocks = [
        Block.attention(tokens, 1024, 16, 4), Block.moe(tokens, 1024, 4096, 8, 2, whole_scores=True),
        Block.vocabulary(tokens, 1024, 32000),
    ]  # fmt: skip
    asked = whole_request(blocks, 8, "h100-ib", "bfloat16")
    answers = [
        plan
        for plan in search(replace(asked, fixed=fixed))
        if sorted(
            s for axis, s in zip(plan.grid.names, plan.grid.shape, strict=True) if s > 1 and axis not in ("dp", "e")
        )
        == sorted(grid[axis] for axis in grid if axis not in ("dp", "e"))
    ]
    found = best_on_grid(asked, grid)
    planned = Grid({axis: getattr(found.sizes, axis) for axis in EXPERT_AXES})
    time = predict(asked, planned, axes_of_experts(planned, found.sizes.fold)).total
    moved = sum(num_bytes(block, found.sizes, 2) for block in blocks)
    tied = [plan for plan in answers if plan.step_ms <= 1.01 * min(plan.step_ms for plan in answers)]
    first = min(tied, key=lambda plan: (plan.memory_bytes, plan.step_ms))
    assert (moved, time) == (first.volume_bytes, pytest.approx(first.step_ms / 1e3))
    whole = best_of_all_grids(asked)
    best = search(asked, limit=1)[0]
    assert whole.sizes == grids_of(best.grid, best.expert_axis) and set(whole.experts) == set(best.expert_axis)
    assert not {"dp", "e"} & set(whole.grid), "no rank has rows of its own"
    over = best_of_all_grids(asked, ("y",))
    assert over.experts == ("y",) and over.sizes.y > 1
    with pytest.raises(LayoutError, match="has experts over w"):
        best_of_all_grids(asked, ("w",))
    with pytest.raises(LayoutError, match=r"grid e=3 a=2 divides \[16\] heads and \[8\] experts"):
        best_on_grid(asked, Grid(e=3, a=2))


def check_auto():
    given, lines = inputs("LlamaForCausalLM"), []
    for mesh in (None, mesh_of(Grid(a=2, b=2))):
        dense, model = build("LlamaForCausalLM").float(), build("LlamaForCausalLM").float()
        ndtp.parallelize(model, mesh, scheme="auto", tokens=4 * 6, hardware="cpu")
        torch.testing.assert_close(model(**given).loss, dense(**given).loss, rtol=1e-5, atol=1e-6)
        report = model.ndtp_report
        assert report.mesh.grid.num_ranks == 4 and (mesh is None or report.mesh is mesh)
        assert "2 attention, 2 gated mlp, 1 vocabulary on grid" in str(report), report
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
    dense = build("LlamaForCausalLM", num_hidden_layers=1)
    dense(**given).loss.backward()
    for options in ({}, {"chunks": 2}, {"regather": ("a", "b"), "chunks": 2}):
        model = ndtp.parallelize(build("LlamaForCausalLM", num_hidden_layers=1), mesh, scheme="3d", **options)
        with CommMeter() as meter:
            model(**given).loss.backward()
        check_gradients(model, dense, str(options))
        assert meter.volume == model.ndtp_report.volume(8, 6), options
        volumes.append(meter.volume.total)
    assert volumes[0] == volumes[1] < volumes[2]


def test_chunks_and_regather(ranks):
    ranks(4).run(check_options)

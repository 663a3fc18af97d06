"""The planner's experts: bytes of `ndtp.nn.MoE`, memory of its dry run, and which answers win when."""

import json

import pytest
import torch

import ndtp
from ndtp import Grid
from ndtp.errors import GridError
from ndtp.planner.block_cost import Block, Grids, divides, memory, num_bytes
from ndtp.planner.grids import EXPERT_AXES
from ndtp.planner.model_config import sizes_of
from ndtp.planner.search import axes_of_experts, plan
from ndtp.runtime.dry_grid import DryGrid

HIDDEN, INNER, EXPERTS, TOKENS, TOP_K = 64, 128, 16, 512, 2


def layers(ranks):
    """Every way of experts on every grid: the closed form's index, and a layer without memory on that grid."""
    block, g = Block.moe(TOKENS, HIDDEN, INNER, EXPERTS, TOP_K), Grids.all(ranks, experts=True)
    g = g.take(divides(block, g, pad=False))
    for i in range(len(g.ranks)):
        grid = Grid({axis: int(getattr(g, axis)[i]) for axis in EXPERT_AXES})
        over = axes_of_experts(grid, int(g.fold[i]))
        moe = ndtp.nn.MoE(
            HIDDEN, INNER, EXPERTS, TOP_K, mesh=DryGrid(grid), expert_axis=over, device="meta",
            dtype=torch.float32 if i % 32 else torch.bfloat16,
        )  # fmt: skip
        yield g.take(slice(i, i + 1)), f"{grid}, experts over {over}", moe


def test_bytes_and_memory_are_those_of_the_layer():
    block, count = Block.moe(TOKENS, HIDDEN, INNER, EXPERTS, TOP_K), 0
    for i, (g, where, moe) in enumerate(layers(8)):
        itemsize = moe.experts.down_proj.element_size()
        (mine,), exact = num_bytes(block, g, itemsize), moe.volume(TOKENS)
        assert mine == exact.total, f"{where}: {mine} is not {exact}"
        closed = memory(block, g, itemsize)
        assert closed.weights[0] == sum(p.numel() * p.element_size() for p in moe.parameters()), where
        if i % 16 == 0:  # a run of each would take longer
            assert closed.activations[0] == moe.memory(TOKENS).kept, where
        count += 1
    assert count > 80


def test_which_experts_win_when():
    """Whole ones, as long as there is one a rank; fewer are split inside, by y; with attention there, over its axes."""
    mixtral = {"hidden": 4096, "ffn": 14336, "gated": True, "experts": 8}
    best, *others = plan(65536, ranks=8, **mixtral)
    assert best.expert_axis == ("e",) and best.grid["e"] == 8
    assert "experts lie over e, no tensor parallelism inside of them" in best.why
    assert best.step_ms <= min(each.step_ms for each in others) and {each.expert_axis for each in others} >= {
        (),
        ("y",),
    }
    few = plan(2048, ranks=8, objective="volume", **{**mixtral, "experts": 2})[0]
    assert (few.grid["e"], few.grid["y"]) == (2, 4) and "inside of each tensors over y" in few.why
    heads = plan(2048, ranks=8, objective="volume", heads=32, kv_heads=8, **mixtral)[0]
    assert heads.grid["x"] * heads.grid["y"] == 8 and set(heads.expert_axis) == {"x", "y"}
    assert heads.arguments == {"scheme": "2d", "expert_axis": heads.expert_axis}
    with_mlp = plan(65536, ranks=8, shared=14336, **mixtral)[0]
    assert [block.name for block in with_mlp.request.blocks] == ["experts", "shared expert"]
    assert with_mlp.gemm_ms > best.gemm_ms
    # Of slow links, experts' rows take the fast ones.
    over = plan(2**20, ranks=64, hardware="h100-eth", heads=32, kv_heads=8, fixed={"dp": 8, "e": 8}, **mixtral)[0]
    assert over.grid.nontrivial(over.grid.names) == ("dp", "e")
    for arguments, words in (
        ({"fixed": {"e": 3}}, "no grid of 8 ranks has e=3"),
        ({"top_k": 9}, "top_k=9; it must be an integer from 1 to 8"),
        ({"experts": 3, "fixed": {"e": 8}}, "divides 3 experts"),
    ):
        with pytest.raises(GridError, match=words):
            plan(65536, ranks=8, **{**mixtral, **arguments})


def meta_model(kind, **sizes):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=3, **sizes)
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")(config), json.loads(
            json.dumps(config.to_dict(), default=str)
        )


@pytest.mark.parametrize(
    ("kind", "sizes", "layers"),
    [
        ("Mixtral", {}, 3),
        ("Qwen2Moe", {"mlp_only_layers": [1]}, 2),
        ("Qwen3Moe", {"decoder_sparse_step": 2}, 1),
        ("DeepseekV3", {"first_k_dense_replace": 1}, 2),
    ],
)
def test_configs_are_read_as_the_models_are(kind, sizes, layers):
    """All matrices, of experts and shared ones, dense layers, routers and gates, but latent attention.

    And by scheme="auto", which looks at the model, as by `ndtp plan --model`.
    """
    from ndtp.models.auto_whole import blocks_of

    model, config = meta_model(kind, **sizes)
    read = sizes_of(config)
    assert tuple(blocks_of(model, 8)) == read.blocks(8)
    wanted = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1}
    if kind.startswith("Deepseek"):
        assert read.left_out == ("latent attention",)
        wanted = {name: size for name, size in wanted.items() if "self_attn" not in name}
    assert read.parameters == sum(wanted.values())
    (experts,) = (block for block in read.blocks(8) if block.experts)
    assert (experts.times, experts.top_k) == (layers, config["num_experts_per_tok"])

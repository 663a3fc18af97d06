"""transformers' models with experts on a grid: logits, losses, gradients, generation, files; and what is left whole."""

import textwrap
import warnings

import pytest
import torch
from architectures import as_dense
from products import mesh_of
from turns import by_turns

import ndtp
from ndtp import Grid
from ndtp.models.auto_whole import blocks_of
from ndtp.models.hidden import whole
from ndtp.planner.block_cost import EXPERT_AXES, num_bytes
from ndtp.planner.grids import grids_of

SIZES = {
    "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "head_dim": 8, "pad_token_id": 0, "attn_implementation": "sdpa",
    "experts_implementation": "eager", "output_router_logits": True, "router_aux_loss_coef": 0.1,
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "num_hidden_layers": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "q_lora_rank": 16, "kv_lora_rank": 8, "head_dim": 4,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
QWEN = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 4},
    "Qwen2Moe": {"shared_expert_intermediate_size": 40, "intermediate_size": 48, **QWEN},
    "Qwen3Moe": {"intermediate_size": 48, **QWEN},
    "DeepseekV2": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "DeepseekV3": DEEPSEEK,
}

AUTO = {"scheme": "auto", "tokens": 24, "hardware": "cpu"}


def build(kind, **more):
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**{**SIZES, **MODELS[kind], **more})
    )
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:  # some start at zero, where all experts are alike
            torch.nn.init.normal_(parameter)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:  # by which DeepSeek-V3 balances
            buffer.normal_(std=0.3)
    return model.double().eval()


def check_models(cases):
    for kind, grid, arguments in cases:
        dense, model, where = build(kind), build(kind), f"{kind} on {grid}, {arguments}"
        with warnings.catch_warnings():
            if not kind.startswith("Deepseek"):  # latent attention writes keys into a tensor that is whole
                warnings.simplefilter("error", UserWarning)  # nothing is gathered
            if isinstance(arguments, str):  # what the planner said to write
                exec(arguments, {"ndtp": ndtp, "model": model})
            else:
                ndtp.parallelize(model, None if grid is None else mesh_of(grid), **arguments)
            mesh = model.ndtp_report.mesh
            data = [axis for axis in mesh.grid if axis in ("dp", "e")]
            ids = torch.randint(3, 67, (4, 6), generator=torch.Generator().manual_seed(1))
            count = 4 // mesh.grid.size(data)
            part = slice(mesh.grid.index(mesh.rank, data) * count, None)
            mine = ids[part][:count]
            with ndtp.CommMeter() as meter:
                out = model(input_ids=mine, labels=mine)
                out.loss.backward()
        if not data and not kind.startswith("Deepseek"):  # the loss of the whole batch takes more
            predicted = model.ndtp_report.volume(*mine.shape)
            assert meter.volume.total == predicted.total, f"{where}: {meter.volume}\n{predicted}"
        expected = dense(input_ids=ids, labels=ids)
        expected.loss.backward()
        assert not model.ndtp_report.kept or kind.startswith("Deepseek"), where
        close(out.loss, expected.loss, f"{where}: loss")
        if getattr(expected, "aux_loss", None) is not None:
            close(out.aux_loss, expected.aux_loss, f"{where}: router loss")
        close(whole(out.logits), expected.logits[part][: len(mine)], f"{where}: logits")
        for (name, parameter), (_, theirs) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
            close(as_dense(parameter.grad.full_tensor(), theirs), theirs.grad, f"{where}: {name}")
        if kind != "Mixtral":
            continue
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        assert torch.equal(model.generate(mine, **options), dense.generate(mine, **options)), where


def close(actual, expected, where):
    """The models' own norms, softmaxes and losses are in fp32."""
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-5, atol=3e-7, msg=lambda m: f"{where}\n{m}")


def planned(kind, path, monkeypatch, capsys, *words):
    """The lines that `ndtp plan` ends with, for a model."""
    from ndtp.cli import main

    build(kind).config.to_json_file(path)
    monkeypatch.setattr("sys.argv", ["ndtp", "plan", "--model", str(path), "--tokens", "24", "--ranks", "4", *words])
    with pytest.raises(SystemExit):
        main()
    return textwrap.dedent("\n".join(capsys.readouterr().out.splitlines()[-2:]))


def test_models_equal_dense(ranks, tmp_path, monkeypatch, capsys):
    """One as the planner says, one as it chooses on a grid that is given, one on the best of all grids."""
    lines = planned(
        "Qwen3Moe", tmp_path / "config.json", monkeypatch, capsys, "--fix", "x=2,y=2", "--objective", "volume"
    )
    assert "mesh = ndtp.ProcessGrid(ndtp.Grid(x=2, y=2))" in lines and "expert_axis=('x', 'y')" in lines
    cases = [
        ("Mixtral", Grid(e=2, a=2), AUTO),
        ("Qwen3Moe", "the planner's grid", lines),
        ("Qwen2Moe", None, AUTO),
    ]
    ranks(4).run(check_models, by_turns(cases, 3))


def test_experts_in_buffers_of_one_size_equal_dense(ranks):
    cases = [
        ("Mixtral", Grid(e=2, x=2), {"scheme": "1d", "expert_buffers": "worst-case"}),
        ("Qwen3Moe", Grid(x=2, y=2), {"scheme": "2d", "expert_axis": "y", "expert_buffers": "worst-case"}),
    ]
    ranks(4).run(check_models, cases)


def check_planned_bytes():
    """What a layer more moves is what the planner says of attention and experts, and what two norms move."""
    for grid, over in ((Grid(z=2, x=2), ("x",)), (Grid(e=2, y=2), ("y", "e"))):
        moved = []
        for layers in (1, 2):
            with torch.device("meta"):
                model = build("Mixtral", num_hidden_layers=layers, output_router_logits=False).bfloat16()
            blocks = blocks_of(model, 8 * 6)
            ndtp.parallelize(model, mesh_of(grid), expert_axis=over)
            moved.append(model.ndtp_report.volume(8 // grid.size([axis for axis in grid if axis == "e"]), 6).total)
        on = {"mesh": mesh_of(grid), "layout": model.ndtp_report.split.layouts.input, "dtype": torch.bfloat16}
        norms = 2 * ndtp.nn.RMSNorm(model.config.hidden_size, **on).volume(8 * 6).total
        sizes = grids_of(Grid({axis: grid[axis] if axis in grid else 1 for axis in EXPERT_AXES}), over)
        planned = sum(int(num_bytes(block, sizes, 2)) for block in blocks if block.name != "vocabulary")
        assert moved[1] - moved[0] == planned + norms, f"{grid}, experts over {over}"


def test_layers_take_the_bytes_that_were_planned(ranks):
    ranks(4).run(check_planned_bytes)


def test_latent_attention_and_scores_of_sigmoids(ranks):
    """DeepSeek's: choices by a bias and within groups of experts, shared experts, a dense layer first.

    Of latent attention the general rule takes the first projections and the last; what is between stays whole.
    """
    cases = [
        ("DeepseekV3", Grid(e=2, x=2), {"scheme": "1d-sp"}),
        ("DeepseekV2", Grid(dp=2, e=2), {"expert_axis": ("e", "dp")}),
    ]
    ranks(4).run(check_models, by_turns(cases, 2))


def check_files(folder):
    """Into dense files and back, on another grid; and `save_pretrained`'s state."""
    from ndtp.models.saving import gathered_state

    dense = build("Qwen2Moe")
    model = ndtp.parallelize(build("Qwen2Moe"), mesh_of(Grid(e=2)))
    ndtp.checkpoint.export_safetensors(model, folder)
    other = ndtp.parallelize(build("Qwen2Moe"), mesh_of(Grid(y=2)))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    with torch.device("meta"):  # files and dense states are in the host's memory, whatever the default device is
        ndtp.checkpoint.load_safetensors(other, folder)
        state = gathered_state(other, mesh_of(Grid(y=2)), True)
    assert list(state) == list(dense.state_dict())
    for name, value in dense.state_dict().items():
        assert torch.equal(state[name], value.cpu()), name
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not any(other.load_state_dict(dense.state_dict()))  # dense tensors, in the dense shapes
    again = gathered_state(other, mesh_of(Grid(y=2)), True)
    assert all(torch.equal(again[name], value) for name, value in state.items())
    ndtp.checkpoint.save(other, None, f"{folder}/run")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ndtp.checkpoint.load(model, None, f"{folder}/run")
    moved = gathered_state(model, mesh_of(Grid(e=2)), True)
    assert all(torch.equal(moved[name], value) for name, value in state.items())
    ids = torch.arange(12).view(2, 6)
    for function in (torch.nn.GELU(), torch.nn.Softsign()):  # one that a program knows, and one that none knows
        for each in (dense, model):
            each.model.layers[0].mlp.experts.act_fn = function
        torch.testing.assert_close(model(ids).logits * 1.0, dense(ids).logits)
    clipped = build("Mixtral")
    clipped.model.layers[0].mlp.experts.has_post_expert_norm = True
    kept = ndtp.parallelize(clipped, mesh_of(Grid(e=2))).ndtp_report.kept
    assert "several experts" in kept["model.layers.0.mlp.experts"], kept
    with pytest.raises(ndtp.LayoutError, match="expert_axis"):
        ndtp.parallelize(build("Mixtral"), mesh_of(Grid(e=2)), expert_axis="w")


def test_files_are_the_dense_models(ranks, tmp_path):
    ranks(2).run(check_files, str(tmp_path))

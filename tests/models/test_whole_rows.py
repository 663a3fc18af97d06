"""Few rows without gradients, whole on every rank: the dense model's numbers, the bytes that the planner says, and when
rows are split after all.
"""

import copy

import pytest
import torch
from architectures import build
from products import mesh_of
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import ndtp
from ndtp import Grid
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.stationary import WHOLE_ROWS
from ndtp.measure.volume import fake_group
from ndtp.models.hidden import Hidden
from ndtp.planner.decode_calls import calls_of_step
from ndtp.planner.training.transformer import Transformer

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4}
NAMES = [
    "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel",
    "GPTNeoXForCausalLM", "OPTForCausalLM", "MixtralForCausalLM",
]  # fmt: skip


def llama(**sizes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **SIZES | sizes)).eval()


def whole(x):
    return x.gathered() if hasattr(x, "gathered") else x


def texts(model, batch):
    """Tokens, the logits that chose them, and hidden states of a prompt."""
    prompt = torch.arange(batch * 5).view(batch, 5) % 60 + 3
    given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    found = model.generate(**given, **options, output_logits=True)
    states = model(**given, output_hidden_states=True).hidden_states
    return [found.sequences, *found.logits, *map(whole, states)]


@torch.no_grad()
def check_texts(grid, scheme, names, batches):
    mesh = mesh_of(grid)
    for name in names:
        dense, model = build(name), build(name)
        generator = torch.Generator().manual_seed(0)
        for p in dense.parameters():  # biases and gains that are neither zeros nor ones
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.1)
        model.load_state_dict(dense.state_dict())
        ndtp.parallelize(model.eval(), mesh, scheme=scheme)
        for batch in batches:
            for mine, theirs in zip(texts(model, batch), texts(dense.eval(), batch), strict=True):
                assert type(mine) is torch.Tensor, name
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}, {batch}: {m}")  # noqa: B023


def test_stock_models_write_what_dense_ones_do(ranks):
    ranks(2).run(check_texts, Grid(z=2), "3d", NAMES, (3,))
    ranks(4).run(check_texts, Grid(x=2, y=2), "2d", ["LlamaForCausalLM", "Phi3ForCausalLM"], (4, 1))
    ranks(4).run(check_texts, Grid(x=2, y=2), "2d-features", ["GPT2LMHeadModel", "Gemma2ForCausalLM"], (4,))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("sizes", "scheme", "batch"),
    [
        ({"y": 2}, "1d", 4), ({"y": 8}, "1d", 4), ({"x": 4}, "1d-sp", 4), ({"x": 2, "y": 2}, "2d", 8),
        ({"x": 2, "y": 2}, "2d-features", 4), ({"z": 2, "x": 2, "y": 2}, "3d", 8), ({"z": 4}, "3d", 4),
    ],
)  # fmt: skip
@torch.no_grad()
def test_the_planner_says_which_bytes_a_step_moves(sizes, scheme, batch):
    """No byte of a weight among them, also where z splits these."""
    with fake_group(Grid(sizes).num_ranks):
        mesh = ndtp.ProcessGrid(Grid(sizes), device_type="cpu")
        model = ndtp.parallelize(llama(), mesh, scheme=scheme)
        cache, prompt = DynamicCache(config=model.config), torch.arange(2 * batch).view(batch, 2)
        model(input_ids=prompt, past_key_values=cache)
        with ndtp.CommMeter() as meter:
            model(input_ids=prompt[:, :1], past_key_values=cache)
    plan = Transformer(2, 64, 192, 8, 256, 8, kv_heads=4, gated=True)
    calls = calls_of_step(plan, block_layouts(Grid(sizes), scheme), batch, 1, 4)
    assert meter.volume.total == sum(received * times for (_, _, received), times in calls.items())


@torch.no_grad()
def check_when_rows_are_split():
    dense, model = llama(), ndtp.parallelize(llama(), mesh_of(Grid(x=2, y=2)), scheme="2d")
    layer = model.model.layers[0]
    seen = []
    layer.register_forward_pre_hook(lambda _, args: seen.append(type(args[0])))
    few, many = torch.arange(WHOLE_ROWS).view(4, -1), torch.arange(WHOLE_ROWS + 4).view(4, -1)
    for ids in (few, many):
        torch.testing.assert_close(whole(model(ids).logits), dense(ids).logits)
    layer.mlp.train()  # dropout has one mask for the whole
    torch.testing.assert_close(whole(model(few).logits), dense(few).logits)
    model.train()
    torch.testing.assert_close(whole(model(few).logits), dense(few).logits)
    with torch.enable_grad():
        model.eval()(few)
    assert seen == [torch.Tensor, Hidden, torch.Tensor, Hidden, Hidden]


@torch.no_grad()
def check_dropout():
    """Dropout that is on by itself has one mask for the whole, whatever the ranks would draw."""
    model = ndtp.parallelize(build("GPT2LMHeadModel", embd_pdrop=0.5), mesh_of(Grid(x=2)), scheme="2d").eval()
    ids = torch.arange(8).view(4, 2)
    model(ids)
    model.transformer.drop.train()
    torch.manual_seed(torch.distributed.get_rank())
    found = [torch.empty_like(whole(model(ids).logits)) for _ in range(2)]
    torch.distributed.all_gather(found, whole(model(ids).logits))
    assert torch.equal(*found)


def test_dropout_of_models_in_evaluation(ranks):
    ranks(2).run(check_dropout)


def test_only_few_rows_without_gradients_are_whole(ranks):
    ranks(4).run(check_when_rows_are_split)


@torch.no_grad()
def check_changed_parameters():
    """What is gathered or remembered of parameters holds no longer than they do."""
    dense, model = llama(), ndtp.parallelize(llama(), mesh_of(Grid(x=2)), scheme="2d")
    ids = torch.arange(8).view(4, 2)
    agree = lambda: torch.testing.assert_close(whole(model(ids).logits), dense(ids).logits)  # noqa: E731
    agree(), agree()
    for each in (dense, model):
        each.model.layers[1].input_layernorm.weight.mul_(2)
        each.model.norm.weight.data.mul_(3)
    agree()
    # In the middle of a forward, behind the norm for which all gains were gathered.
    hooks = []
    for each in (dense, model):
        late = each.model.layers[1].post_attention_layernorm
        change = lambda *_, late=late: (late.weight.mul_(1.5), late.weight.data.mul_(0.9), None)[2]  # noqa: E731
        hooks.append(each.model.layers[0].mlp.register_forward_hook(change))
    agree(), agree()
    [hook.remove() for hook in hooks]
    other = copy.deepcopy(model)
    for each in (dense, other):
        each.model.norm.weight.mul_(0.5)
    torch.testing.assert_close(whole(other(ids).logits), dense(ids).logits)
    model = other
    for each in (dense, model):
        each.model.layers[0].self_attn.k_proj.weight.mul_(2)
        each.model.layers[0].mlp.down_proj.bias = torch.nn.Parameter(torch.linspace(0, 1, 64))
    agree()
    with torch.inference_mode():
        agree(), agree()


def test_parameters_may_change_between_steps_and_in_one(ranks):
    ranks(2).run(check_changed_parameters)

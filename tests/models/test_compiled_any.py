"""`torch.compile` of a model that is split as a whole, and of its parts: they run as they are."""

import copy
import logging
import shutil
import warnings

import pytest
import torch
from products import mesh_of
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import ndtp
from ndtp import Grid

HIDDEN = 16
IDS = torch.arange(32).view(4, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(HIDDEN), nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(32, HIDDEN), nn.ModuleList([Block(), Block()])
        self.last, self.head = Block(), nn.Linear(HIDDEN, 32)

    def forward(self, given):
        x = self.table(given["ids"] if isinstance(given, dict) else given)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def whole(model):
    return torch.compile(model)


def blocks(model):
    for block in model.blocks:
        block.compile()
    return model


def parts(model):
    model.last, model.head = torch.compile(model.last), torch.compile(model.head)
    model.blocks[0].attention.compile()
    return model


def check(change, waits):
    """Two steps, of which the second one has other sizes, for which compilers make sizes symbols."""
    torch.manual_seed(0)
    dense = Model().double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d", example=None if waits else IDS)
    run = change(model)
    for ids in (IDS, IDS[:, :6]):
        given = {"ids": ids} if waits else ids
        run(given).square().mean().backward()
        dense(given).square().mean().backward()
    assert not model.ndtp_report.waits and model.ndtp_report.linears[0] == model.ndtp_report.linears[1] > 0
    compare(model, dense)


def compare(model, dense):
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


def check_step():
    """A compiled step, whose backward is in it, and the error of a graph that is to have no breaks."""
    torch.manual_seed(0)
    dense = Model().double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d", example=IDS)

    def step(model, ids):
        loss = model(ids).square().mean()
        loss.backward()
        return loss

    compiled = torch.compile(step)
    for ids in (IDS, IDS[:, :6]):
        torch.testing.assert_close(compiled(model, ids), step(dense, ids))
    compare(model, dense)
    torch._dynamo.reset()  # or it takes frames for those that the step has broken already, at torch's own leave
    with pytest.raises(torch._dynamo.exc.Unsupported, match="memory of a part, which no graph can hold"):
        torch.compile(model, fullgraph=True)(IDS)


@pytest.mark.parametrize(("change", "waits"), [(whole, True), (blocks, False), (parts, False)])
def test_compiled_models_run_as_they_are(ranks, change, waits):
    ranks(2).run(check, change, waits)


def test_a_compiled_step(ranks):
    ranks(2).run(check_step)


def compile_part(module, name):
    module.get_submodule(name).compile(backend="eager")


def replace_part(module, name):
    owner, _, own = name.rpartition(".")
    setattr(module.get_submodule(owner), own, torch.compile(module.get_submodule(name), backend="eager"))


def compile_forward(module, name):
    part = module.get_submodule(name)
    part.forward = torch.compile(part.forward, backend="eager")


def stock():
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))


PARTS = {
    "model": compile_part, "model.layers.0": replace_part, "model.layers.0.self_attn": compile_part,
    "model.layers.0.mlp": replace_part, "model.layers.0.mlp.act_fn": compile_part,
    "model.layers.0.input_layernorm": compile_forward, "model.layers.0.self_attn.o_proj": replace_part,
    "model.embed_tokens": compile_part,
}  # fmt: skip


def check_stock(is_before):
    """Any part of a stock model, compiled before the model is split or afterwards."""
    dense, batch = stock(), {"input_ids": IDS, "labels": IDS}
    dense(**batch).loss.backward()
    gradients = {name: p.grad for name, p in dense.named_parameters()}
    dense.zero_grad()
    mesh = mesh_of(Grid(x=2))
    for part, change in PARTS.items():
        model = copy.deepcopy(dense)
        if is_before:
            change(model, part)
        split = ndtp.parallelize(model, mesh, scheme="1d-sp")
        if not is_before:
            change(split, part)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            split(**batch).loss.backward()
        for name, p in split.named_parameters():
            theirs = gradients[name.replace("_orig_mod.", "")]
            torch.testing.assert_close(p.grad.full_tensor(), theirs, rtol=1e-4, atol=1e-6, msg=f"{part}: {name}")
        torch._dynamo.reset()


@pytest.mark.parametrize("is_before", [False, True])
def test_compiled_parts_of_a_stock_model_run_as_they_are(ranks, is_before):
    ranks(2).run(check_stock, is_before)


def check_names():
    """transformers finds what it records of a model by the name of its class, which may be one of a function."""

    class Local(LlamaModel):
        pass

    dense = stock()
    dense.model = Local(dense.config)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d-sp")
    assert str(type(model.model)) == str(Local)
    found, expected = (each(input_ids=IDS, output_hidden_states=True).hidden_states for each in (model, dense))
    assert len(found) == len(expected) == 2


def test_classes_keep_their_names(ranks):
    ranks(2).run(check_names)


def check_cache():
    """A graph of parameters of a grid, which the compiler's cache on disk passes by without a word."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    torch.compiler.config.force_disable_caches = False
    p = ndtp.parallelize(stock(), mesh_of(Grid(x=2)), scheme="1d-sp").model.layers[0].mlp.up_proj.weight.detach()
    said = []
    log = logging.getLogger("torch._inductor.codecache")
    log.addFilter(lambda record: said.append(record.getMessage()))
    with warnings.catch_warnings(record=True) as warned:
        made = torch.compile(lambda p: p * 2 + 1)(p)
    assert torch.equal(made.full_tensor(), p.full_tensor() * 2 + 1)
    assert not said
    assert not [each for each in warned if "GridTensor" in str(each.message)]


@pytest.mark.real
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_says_nothing_of_its_cache(ranks):
    ranks(2).run(check_cache)

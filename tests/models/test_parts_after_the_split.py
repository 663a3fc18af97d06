"""Modules that come into a stock model after the split, without `parallelize` once more: gains, adapters, code."""

import copy

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor

import ndtp
from ndtp import Grid

pytest.importorskip("transformers")
from architectures import build, inputs
from test_adapters import ONE_LAYER, LoRA, adapted, by_hand


class Scaled(nn.Module):
    """A layer with a gain of its own, which somebody puts around another one."""

    def __init__(self, inner, features):
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.linspace(0.5, 1.5, features, dtype=torch.float64))

    def forward(self, x):
        return self.inner(x) * self.gain


def scaled(model, where):
    layer, width = model.model.layers[0], model.config.hidden_size
    owner, name = {
        "o_proj": (layer.self_attn, "o_proj"), "mlp": (layer, "mlp"), "norm": (layer, "input_layernorm"),
        "embedding": (model.model, "embed_tokens"), "q_proj": (layer.self_attn, "q_proj"),
    }[where]  # fmt: skip
    setattr(owner, name, Scaled(getattr(owner, name), width))


def compare_gradients(model, dense, given, where):
    for each in (dense, model):
        each.zero_grad()
        each(**given).loss.backward()
    for (name, p), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        ours = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(ours, theirs.grad, msg=lambda text, at=(where, name): f"{at}: {text}")


def check_a_gain_after_the_split(grid):
    given = inputs("LlamaForCausalLM", 4, 6)
    for where in ("q_proj", "o_proj", "mlp", "norm", "embedding"):
        dense, model = (build("LlamaForCausalLM", **ONE_LAYER) for _ in range(2))
        ndtp.parallelize(model, mesh_of(grid))
        for each in (dense, model):
            scaled(each, where)
        with torch.inference_mode():
            model(**given)
        compare_gradients(model, dense, given, where)
    compare_gradients(copy.deepcopy(model), dense, given, "a copy")
    for each in (dense, model):
        layer = each.model.layers[0].mlp.down_proj
        layer.register_parameter("gain", nn.Parameter(torch.linspace(0.5, 1.5, 32, dtype=torch.float64)))
        layer.register_forward_hook(lambda layer, args, y: y * layer.gain)
    compare_gradients(model, dense, given, "on a layer")


def check_adapters_after_the_split(grid):
    """Without `parallelize` once more: their code runs on all heads, trained, frozen and in evaluation."""
    given = inputs("LlamaForCausalLM", 2, 6)
    for where in ("q_proj", "v_proj", "o_proj"):
        dense, model = (build("LlamaForCausalLM", **ONE_LAYER) for _ in range(2))
        ndtp.parallelize(model, mesh_of(grid))
        for each in (dense, model):
            part = each.model.layers[0].self_attn
            torch.manual_seed(0)
            setattr(part, where, LoRA(getattr(part, where)))
        with torch.no_grad():
            torch.testing.assert_close(model(**given).logits * 1.0, dense(**given).logits, msg=where)
        compare_gradients(model, dense, given, where)
        for each in (dense, model):
            for p in getattr(each.model.layers[0].self_attn, where).parameters():
                p.requires_grad_(False)
        torch.testing.assert_close(model(**given).loss, dense(**given).loss, msg=where)


class Unit(nn.Module):
    """It has no parameters of its own, and looks at all features."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return 4 * y / y.norm(dim=-1, keepdim=True)


def check_code_after_the_split(grid):
    """Around a projection without parameters, and a second adapter beside one that is on the grid."""
    given = inputs("LlamaForCausalLM", 2, 6)
    dense, model = (build("LlamaForCausalLM", **ONE_LAYER) for _ in range(2))
    ndtp.parallelize(model, mesh_of(grid))
    for each in (dense, model):
        each.model.layers[0].self_attn.q_proj = Unit(each.model.layers[0].self_attn.q_proj)
    compare_gradients(model, dense, given, "code")
    dense, model = (adapted("LlamaForCausalLM", by_hand) for _ in range(2))
    ndtp.parallelize(model, mesh_of(grid))
    assert model(**given).loss.isfinite()
    for each in (dense, model):
        layer = each.model.layers[0].self_attn.o_proj
        torch.manual_seed(3)
        layer.lora_A["two"], layer.lora_B["two"] = nn.Linear(32, 3).double(), nn.Linear(3, 32).double()
        layer.forward = lambda x, layer=layer: (
            layer.base_layer(x) + sum(layer.lora_B[name](layer.lora_A[name](x)) for name in ("one", "two"))
        )
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits * 1.0, dense(**given).logits)


@pytest.mark.parametrize("grid", [Grid(x=2), Grid(z=2)], ids=str)
def test_code_that_comes_after_the_split(ranks, grid):
    ranks(2).run(check_code_after_the_split, grid)


@pytest.mark.parametrize("grid", [Grid(x=2), Grid(z=2)], ids=str)
def test_adapters_that_come_after_the_split(ranks, grid):
    ranks(2).run(check_adapters_after_the_split, grid)


@pytest.mark.parametrize("grid", [Grid(x=2), Grid(y=2), Grid(dp=2)], ids=str)
def test_a_parameter_that_comes_after_the_split(ranks, grid):
    """It has the dense gradient wherever it is."""
    ranks(2).run(check_a_gain_after_the_split, grid)


@pytest.mark.filterwarnings("ignore")
def check_appended():
    """A layer that is appended to a split model stays whole, and takes hidden states that are split."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    mesh = mesh_of(Grid(dp=2, x=2))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=1, **sizes)).double()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh)
    ids, at = torch.randint(50, (4, 10)), mesh.coordinate["dp"]
    for net, rows in ((dense, ids), (model, ids.chunk(2)[at])):
        torch.manual_seed(5)
        net.model.layers.append(LlamaDecoderLayer(net.config, 1).double())
        net.config.num_hidden_layers = 2
        net(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6)


def test_a_layer_that_is_appended(ranks):
    ranks(4).run(check_appended)

"""What programs do with a model that is split already: what they do with the dense one, or an error that names the fix.

The table in docs/train.md is compared with this one; each cell runs here.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import tracing_after
from products import mesh_of
from saving_after import pickled, saved, saved_optimizer, saved_state
from small_models import IDS, build, called, layers
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from training_after import averaged, averaged_by_torch, by_rows_and_signs, trained

import ndtp
from ndtp import Grid, LayoutError
from ndtp.models.standing_in import take_place

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
import transformers
import transformers.modeling_layers
import transformers.modeling_utils  # so that ranks are forked with it

WIDE = {"nano": "down", "llama": "model.layers.0.mlp.down_proj"}
WORKS, REFUSED, NONE = "works", "refused", "has none"


def like(parameter, scale=0.1):
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * scale


def resized(kind, model):
    model.resize_token_embeddings(80)
    return trained(model)


def adapted(kind, model):
    names = {"nano": ["up"], "llama": ["q_proj", "up_proj"]}[kind]
    is_split = hasattr(model, "ndtp_report")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names))
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape, generator=generator) * 0.1
    if is_split:
        ndtp.parallelize(model)
    return trained(model)


def in_norms(kind, model, *norms):
    for norm, layer in zip(norms, layers(kind, model), strict=False):
        if norm is not None:
            norm(layer)
    return trained(model)


def pruned(kind, model):
    layer, embedding, head = layers(kind, model)
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.ln_structured(head, "weight", 0.25, 2, 0)
    prune.random_unstructured(embedding, "weight", 0.25)
    losses = trained(model)
    prune.remove(layer, "weight")
    return torch.cat([losses, trained(model)])


FILLS = {
    "normal_": (), "uniform_": (), "xavier_uniform_": (), "kaiming_normal_": (), "orthogonal_": (), "sparse_": (0.5,),
    "eye_": (), "trunc_normal_": (), "constant_": (0.1,),
}  # fmt: skip


def filled(kind, model):
    found = []
    for name, arguments in FILLS.items():
        for layer in layers(kind, model):
            getattr(nn.init, name)(layer.weight, *arguments)
            found.append(whole(layer.weight.detach()).double().square().sum())
    wide = model.get_submodule(WIDE[kind]).weight  # which `orthogonal_` transposes in place
    nn.init.orthogonal_(wide)
    found.append(whole(wide.detach()).double()[0].sum())
    return torch.stack([*found, called(model)[0].detach().double(), torch.rand(()).double()])


def applied(kind, model):
    def init(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.05)
        if getattr(module, "bias", None) is not None:
            module.bias.data.zero_()

    model.apply(init)
    return trained(model)


def given_data(kind, model):
    for layer in layers(kind, model):
        layer.weight.data = like(layer.weight)
    return trained(model)


def written(kind, model):
    layer, embedding, head = layers(kind, model)
    with torch.no_grad():
        layer.weight.copy_(like(layer.weight))
        embedding.weight[3] = 0.5
        head.weight[:, 2:5] = 0.1
        head.weight.data[-1].mul_(3)
    return trained(model)


def given_parameter(kind, model):
    for layer in layers(kind, model):
        layer.weight = nn.Parameter(like(layer.weight))
    return trained(model)


def given_bias(kind, model):
    """Of these the dense model's head has none, and a Llama's Linears."""
    layer, _, head = layers(kind, model)
    for each in (layer, head):
        each.bias = nn.Parameter(torch.arange(float(each.out_features)) / each.out_features)
    return torch.cat([trained(model), *(whole(each.bias.grad) for each in (layer, head))])


def without_weight(kind, model):
    for layer in layers(kind, model):
        weight, layer.weight = layer.weight, None
        with pytest.raises(LayoutError, match="has no weight") as error:
            called(model)
        layer.weight = weight
    raise error.value


def bounded_gain(kind, model):
    norm = model.get_submodule({"nano": "ln", "llama": "model.norm"}[kind])
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softsign())
    return trained(model)


def other_epsilon(kind, model):
    losses = trained(model)
    for module in model.modules():
        for name in {"eps", "variance_epsilon"} & vars(module).keys():
            setattr(module, name, 0.5)
    return torch.cat([losses, trained(model)])


def renormalised(kind, model):
    layers(kind, model)[1].max_norm = 1.0
    return trained(model)


def attended_otherwise(kind, model):
    """By a function of one's own, which the model's config names."""

    def attend(module, query, key, value, mask, **options):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, scale=3.0, is_causal=True).transpose(1, 2), None

    transformers.AttentionInterface.register("of_this_test", attend)
    losses = trained(model)
    model.set_attn_implementation("of_this_test")
    return torch.cat([losses, trained(model)])


def loaded(kind, model):
    state = {key: value * 1.1 for key, value in build(kind).state_dict().items()}
    model.load_state_dict(state)
    first = trained(model)
    for _ in range(2):  # what was assigned is assigned to again
        model.load_state_dict(state, assign=True)
    return torch.cat([first, trained(model)])


def tied(kind, model):
    _, embedding, head = layers(kind, model)
    head.weight = embedding.weight
    return trained(model)


def called_functionally(kind, model):
    parameters = {name: p * 1.1 for name, p in model.named_parameters()}
    loss = functional_call(model, parameters, (), {"input_ids": IDS, "labels": IDS})[0]
    loss.backward()
    return torch.stack([loss.detach(), *(layer.weight.grad.pow(2).sum() for layer in layers(kind, model))])


def frozen(kind, model):
    model.requires_grad_(False)
    layers(kind, model)[0].requires_grad_(True)
    losses = trained(model)
    return torch.stack([*losses, torch.tensor(float(sum(p.grad is not None for p in model.parameters())))])


def cast(kind, model):
    held = list(model.parameters())
    model.half().double()
    assert all(x is y for x, y in zip(model.parameters(), held, strict=True))
    return trained(model)


def counted(kind, model):
    found = [torch.tensor(float(sum(p.numel() for p in model.parameters())))]
    for layer in layers(kind, model):
        p = layer.weight
        found += [p.sum(), p.mean(), p.norm(), p.std(), p.var(), p.min(), p.max(), p.prod(), p.abs().median(), p[3, 4]]
    return torch.stack(found)


def counted_gradients(kind, model):
    called(model)[0].backward()
    found = []
    for layer in layers(kind, model):
        g = layer.weight.grad
        found += [g.norm(), g.mean(), g.std(), g.min(), g.abs().max(), (g == 0).sum(), g.flatten()[3:].square().sum()]
    return torch.stack([torch.as_tensor(float(x)) for x in found])


def in_the_loss(kind, model):
    loss = called(model)[0] + sum(p.pow(2).sum() + p.abs().mean() + p.mean() for p in model.parameters())
    assert type(loss) is torch.Tensor
    loss.backward()
    sum(p.sum() for p in model.parameters()).backward()  # by itself
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    return called(model)[0]


def hooked(kind, model):
    seen = []
    for layer in layers(kind, model):
        layer.weight.register_hook(lambda grad: seen.append(whole(grad.pow(2).sum())) or grad * 2)
    return torch.cat([trained(model), torch.stack(sorted(seen, key=float))])


def as_a_vector(kind, model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(whole(vector.detach()) * 1.1, model.parameters())
    return trained(model)


def as_numbers(kind, model):
    return torch.tensor([[layer.weight.detach().numpy(force=True).sum(), sum(map(sum, layer.weight.tolist()))]
                         for layer in layers(kind, model)])  # fmt: skip


def shared(kind, model):
    return trained(model.share_memory())


def copied(kind, model):
    losses, made = trained(copy.deepcopy(model)), copy.deepcopy(model)
    trained(model)
    without = sum(p.grad is None for p in (*made.parameters(), *copy.deepcopy(model).parameters()))
    return torch.cat([losses, trained(model), torch.tensor([float(without)])])


# name in the table: (what a program does, what becomes of it for layers that are recognised, and in any other model)
OPERATIONS = {
    "`resize_token_embeddings`": (resized, REFUSED, NONE),
    "`get_peft_model`, and `parallelize` once more": (adapted, WORKS, REFUSED),
    "`torch.nn.utils.spectral_norm`, `weight_norm`": (
        lambda *given: in_norms(*given, nn.utils.spectral_norm, None, nn.utils.weight_norm),
        WORKS,
        WORKS,
    ),
    "`parametrizations.spectral_norm`, `weight_norm`": (
        lambda *given: in_norms(*given, parametrizations.spectral_norm, None, parametrizations.weight_norm),
        WORKS,
        WORKS,
    ),
    "`parametrizations.orthogonal`": (lambda *given: in_norms(*given, parametrizations.orthogonal), WORKS, WORKS),
    "`torch.nn.utils.prune`": (pruned, WORKS, WORKS),
    "`nn.init` of a weight": (filled, WORKS, WORKS),
    "`model.apply(init)`": (applied, WORKS, WORKS),
    "`p.data = dense`": (given_data, WORKS, WORKS),
    "`p.copy_(dense)`, `p[3] = 0`": (written, WORKS, WORKS),
    "`layer.weight = nn.Parameter(dense)`": (given_parameter, WORKS, WORKS),
    "`layer.bias = nn.Parameter(dense)`, where there was none": (given_bias, WORKS, WORKS),
    "`layer.weight = None`": (without_weight, REFUSED, REFUSED),
    "`register_parametrization` of a norm's weight": (bounded_gain, WORKS, WORKS),
    "`norm.eps = 0.5`": (other_epsilon, WORKS, WORKS),
    "`embedding.max_norm = 1.0`": (renormalised, REFUSED, REFUSED),
    "`model.set_attn_implementation`": (attended_otherwise, WORKS, NONE),
    "`load_state_dict` of a dense one, `assign=True`": (loaded, WORKS, WORKS),
    "tying two layers": (tied, REFUSED, REFUSED),
    "`pickle` of the model": (pickled, REFUSED, REFUSED),
    "`torch.save(model)`": (saved, REFUSED, REFUSED),
    "`torch.save(model.state_dict())`": (saved_state, WORKS, WORKS),
    "`torch.save(optimizer.state_dict())`": (saved_optimizer, WORKS, WORKS),
    "`copy.deepcopy`": (copied, WORKS, WORKS),
    "`torch.func.functional_call`": (called_functionally, WORKS, WORKS),
    "`torch.func.grad`": (tracing_after.differentiated, REFUSED, REFUSED),
    "`torch.func.vmap`": (tracing_after.mapped, REFUSED, REFUSED),
    "`torch.jit.trace`": (tracing_after.traced, REFUSED, REFUSED),
    "`torch.jit.trace` of a function, `torch.onnx.export`": (tracing_after.traced_in_a_function, REFUSED, REFUSED),
    "`torch.ao.quantization.quantize_dynamic`": (tracing_after.quantised, REFUSED, REFUSED),
    "`torch.jit.script`": (tracing_after.scripted, REFUSED, REFUSED),
    "`torch.export.export`": (tracing_after.exported, REFUSED, REFUSED),
    "`make_fx`": (tracing_after.recorded, REFUSED, REFUSED),
    "a forward in `FakeTensorMode`": (tracing_after.without_values, REFUSED, REFUSED),
    "`requires_grad_`": (frozen, WORKS, WORKS),
    "`model.half()`, `model.to(dtype)`": (cast, WORKS, WORKS),
    "`p.sum()`, `p.mean()`, `p.std()`, `p.numel()`": (counted, WORKS, WORKS),
    "`p.grad.norm()`, `p.grad.mean()`, `(p.grad == 0).sum()`": (counted_gradients, WORKS, WORKS),
    "a term of all parameters in the loss": (in_the_loss, WORKS, WORKS),
    "`p.register_hook`": (hooked, WORKS, WORKS),
    "`parameters_to_vector`, `vector_to_parameters`": (as_a_vector, WORKS, WORKS),
    "an average of weights, by `lerp_`": (averaged, WORKS, WORKS),
    "`AveragedModel` with `multi_avg_fn` and buffers": (averaged_by_torch, WORKS, WORKS),
    "`torch.optim.Adafactor`, `Rprop`": (by_rows_and_signs, WORKS, WORKS),
    "`p.numpy()`, `p.tolist()`": (as_numbers, WORKS, WORKS),
    "`model.share_memory()`": (shared, REFUSED, REFUSED),
}


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def result(operation, kind, model):
    torch.manual_seed(3)
    try:
        return whole(operation(kind, model).detach())
    except LayoutError as error:
        return f"{error}"


def check_cells():
    mesh, wrong, said = mesh_of(Grid(x=2)), [], []
    for column, kind in ((1, "llama"), (2, "nano")):
        dense, model = build(kind), ndtp.parallelize(build(kind), mesh, scheme="1d")
        for name, row in OPERATIONS.items():
            if row[column] == NONE:
                continue
            found = result(row[0], kind, copy.deepcopy(model))
            if row[column] == REFUSED:
                assert isinstance(found, str) and found.count("\n  fix: ") == 1, f"{kind}, {name}: {found}"
                said.append(found)
                continue
            expected = result(row[0], kind, copy.deepcopy(dense))
            if isinstance(found, str) or not torch.allclose(found.float(), expected.float(), rtol=1e-4, atol=1e-5):
                wrong.append(f"{kind}, {name}: {found} instead of {expected}")
    assert not wrong, "\n".join(wrong)
    head = layers("llama", ndtp.parallelize(build("llama"), mesh, scheme="1d"))[-1]
    lies = head.lies["weight"]
    with pytest.raises(LayoutError, match=r"with padding, .*\n  fix: tie the weights before parallelize"):
        take_place(head.weight, lies._replace(shape=(lies.shape[0] + 1, lies.shape[1])), mesh, "head.weight")
    return said


def test_each_operation_works_or_is_refused(ranks):
    said = ranks(2).run(check_cells)
    assert said[0] == said[1]


def test_the_table_in_the_docs_is_this_one():
    text = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    section = text.split("\n## After parallelize\n")[1].split("\n## ")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in section.splitlines() if "|" in line]
    assert {row[0]: row[1:] for row in rows[2:]} == {name: row[1:] for name, row in OPERATIONS.items()}
    assert not re.search(r"\bTODO\b", section)

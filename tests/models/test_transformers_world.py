"""What torch and transformers do with a stock model that is split, with their defaults: as with the dense one."""

import contextlib
import warnings

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ndtp
from ndtp import Grid, LayoutError

pytest.importorskip("transformers")
import transformers
import transformers.modeling_layers
import transformers.modeling_utils  # so that ranks are forked with it
from architectures import build, inputs
from test_transformers_whole import check_gradients
from torch.distributed.device_mesh import init_device_mesh
from transformers.optimization import Adafactor

LLAMA = "LlamaForCausalLM"
EVEN = {"vocab_size": 64, "num_hidden_layers": 1}


def both(mesh, scheme="1d-sp", **changes):
    return build(LLAMA, **changes), ndtp.parallelize(build(LLAMA, **changes), mesh, scheme=scheme)


def check_same(model, dense, where, atol=2e-5):
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        found = mine.full_tensor()[tuple(slice(0, size) for size in theirs.shape)]
        error = (found - theirs).abs().max().item()
        assert error <= atol, f"{where}: {name}, {error:.1e}"


OPTIMIZERS = {  # every parameter after two steps; `test_composition` has the losses of others, on all kinds of grids
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "Adafactor, foreach": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2, foreach=True),
    "Adafactor of transformers": Adafactor,
}


def check_optimizers(sizes, scheme, names):
    mesh = mesh_of(Grid(sizes))
    given = {**inputs(LLAMA), "input_ids": inputs(LLAMA)["input_ids"] % 64, "labels": inputs(LLAMA)["labels"] % 64}
    for name in names:
        dense, model = both(mesh, scheme, **EVEN)
        for each in (dense, model):
            optimizer = OPTIMIZERS[name](each.parameters())
            for _ in range(2):
                each(**given).loss.backward()
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                if "Adafactor" in name:
                    with ndtp.nn.as_dense():
                        optimizer.step()
                else:
                    optimizer.step()
                optimizer.zero_grad()
        check_same(model, dense, name)


def test_optimizers(ranks):
    ranks(2).run(check_optimizers, {"x": 2}, "1d-sp", ["AdamW", "Adafactor, foreach"])
    ranks(4).run(check_optimizers, {"x": 2, "y": 2}, "2d", ["Adafactor of transformers"])


def check_averages_and_scales():
    mesh = mesh_of(Grid(x=2))
    given = inputs(LLAMA)
    found = []
    for each in both(mesh):
        average = AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        scales = []
        for step in range(3):
            loss = each(**given).loss * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            average.update_parameters(each)
            scales.append(scaler.get_scale())
        assert scales == [1024.0, 512.0, 512.0]
        found.append((each, average.module))
    for i, name in enumerate(("GradScaler", "AveragedModel")):
        check_same(found[1][i], found[0][i], name)
    torch.testing.assert_close(found[1][1](**given).loss, found[0][1](**given).loss, rtol=1e-5, atol=0.0)


def check_saved(folder):
    mesh = mesh_of(Grid(x=2))
    dense, model = both(mesh)
    state = model.state_dict()
    assert list(state) == list(dense.state_dict())
    assert state["model.norm.weight"].shape == dense.model.norm.weight.shape
    other = build(LLAMA)
    for parameter in other.parameters():
        parameter.data *= 0.5
    model.load_state_dict(other.state_dict())
    model.save_pretrained(folder, max_shard_size="30KB")
    again = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for key, value in other.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    with pytest.raises(
        ndtp.CheckpointError, match=r"ranks write to different things: rank 0: \S*0; rank 1: \S*1\n  fix"
    ):
        model.save_pretrained(folder / str(mesh.rank))
    (folder / f"a file {mesh.rank}").write_text("")
    with pytest.raises(ndtp.CommunicationError, match=r"a file .* is not complete; rank 0"):
        model.save_pretrained(folder / "a file 0" / "below")


def test_averages_and_scales(ranks):
    ranks(2).run(check_averages_and_scales)


def test_saved_as_the_dense_model(ranks, tmp_path):
    ranks(2).run(check_saved, tmp_path)


# ---- a mesh of the user's, and layers of other kinds ----


def check_fully_shard():
    """Another dim of the user's mesh: refused by name, and the way that the error names works."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    _, model = both(ndtp.ProcessGrid.from_mesh(mesh["tp"], {"x": "tp"}), "1d")
    with pytest.raises(LayoutError, match=r"fully_shard: parameters on the grid x=2 .* 'dp'\n  fix: make that dim"):
        fully_shard(model, mesh=mesh["dp"])
    dense, model = both(ndtp.ProcessGrid.from_mesh(mesh, {"z": "dp", "x": "tp"}), "3d")
    for each in (dense, model):
        each(**inputs(LLAMA)).loss.backward()
    check_gradients(model, dense, "dp as z")
    held = model.ndtp_report.parameters
    assert held[2] < 0.27 * held[0], "split over both dims"
    # The rest of a model in pairs is on the grid, too: no part is left that another mesh would have to sum.
    torch.manual_seed(0)
    rest = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    ndtp.parallelize(rest, ndtp.ProcessGrid.from_mesh(mesh["tp"], {"x": "tp"}), scheme="1d")
    with pytest.raises(LayoutError, match="fully_shard: parameters on the grid x=2"):
        fully_shard(rest[0], mesh=mesh["dp"])


@pytest.mark.real
def test_fully_shard_is_refused_by_name(ranks):
    ranks(4).run(check_fully_shard)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Int8(nn.Module):
    """Weights of eight bits, and an autograd function of its own, which is none of torch's functions."""

    def __init__(self, dense):
        super().__init__()
        self.scale = dense.weight.abs().max().item() / 127
        self.weight = nn.Parameter((dense.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return Product.apply(x, self.weight * self.scale)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        assert type(x) is torch.Tensor, "a kernel would read this rank's part for the whole"
        ctx.weight = weight.to(x.dtype)
        return x @ ctx.weight.T

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight, None


def check_other_kinds():
    mesh = mesh_of(Grid(x=2))
    models = []
    for _ in range(2):
        model = build(LLAMA)
        first, second = (layer.mlp for layer in model.model.layers)
        first.up_proj.__class__ = Scaled
        second.gate_proj = Int8(second.gate_proj)
        models.append(model)
    dense, model = models
    ndtp.parallelize(model, mesh, scheme="1d-sp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loss, expected = model(**inputs(LLAMA)).loss, dense(**inputs(LLAMA)).loss
    kept = model.ndtp_report.kept  # known since that call, whose tensors alone a kernel takes
    assert kept["model.layers.0.mlp.up_proj"] == "it is a Scaled, a subclass of nn.Linear that computes something else"
    assert "Int8, whose weight is of int8: quantised" in kept["model.layers.1.mlp.gate_proj"]
    assert str(model.ndtp_report).startswith("replaced 13 of 14 Linears"), str(model.ndtp_report)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    loss.backward()
    expected.backward()
    check_gradients(model, dense, "layers left alone")
    mixtral = build("MixtralForCausalLM")
    mixtral.model.layers[0].mlp.experts.is_concatenated = False
    mixtral = ndtp.parallelize(mixtral, mesh, scheme="1d")
    with contextlib.suppress(AttributeError, RuntimeError, IndexError):  # its code has no such weights
        mixtral(**inputs("MixtralForCausalLM"))
    mixtral = mixtral.ndtp_report.kept
    assert "weights of several experts, gate_up_proj (2, 96, 32)" in mixtral["model.layers.0.mlp.experts"], mixtral
    fused = ndtp.parallelize(build("Phi3ForCausalLM"), mesh, scheme="1d").ndtp_report.replaced
    conv = ndtp.parallelize(build("GPT2LMHeadModel"), mesh, scheme="1d").ndtp_report.replaced
    assert "model.layers.0.mlp.gate_up_proj" in fused and "transformer.h.0.attn.c_attn" in conv
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), Scaled(4, 4), Int8(nn.Linear(4, 4)))
    report = ndtp.parallelize(plain, mesh, {"0": "up", "2": "down"}, scheme="1d").ndtp_report
    assert set(report.kept) == {"3", "4"} and "Scaled, a subclass" in report.kept["3"], report.kept


def quantised(names):
    """Eight bits a weight, packed by torch, in the Linears of these names; the others are as they were."""
    model = build(LLAMA).float()
    found = {name for name, m in model.named_modules() if type(m) is nn.Linear and any(n in name for n in names)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have another package do it
        by_name = dict.fromkeys(found, torch.ao.quantization.default_dynamic_qconfig)
        return torch.ao.quantization.quantize_dynamic(model, by_name, inplace=True)


def check_quantised():
    mesh = mesh_of(Grid(x=1, y=2))
    ids = inputs(LLAMA)["input_ids"]
    names = ("0.mlp.down_proj", "1.self_attn", "1.mlp.gate_proj")
    dense, model = quantised(names), ndtp.parallelize(quantised(names), mesh, scheme="2d")
    report = model.ndtp_report
    assert "DynamicQuantizedLinear" in report.kept["model.layers.1.self_attn.q_proj"], report.kept
    assert report.linears[1] >= 6, str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), dense.generate(ids, **options))
    told = r"(?s)no Linear was replaced.*\n  lm_head: it is a DynamicQuantizedLinear"
    with pytest.raises(LayoutError, match=told) as error:
        ndtp.parallelize(quantised(("",)), mesh, scheme="2d")
    assert "fix: load the model without quantisation" in str(error.value)


@pytest.mark.cpu
def test_quantised_layers_beside_split_ones(ranks):
    ranks(2).run(check_quantised)


def test_layers_of_other_kinds_are_left_alone(ranks):
    ranks(2).run(check_other_kinds)

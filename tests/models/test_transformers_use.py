"""What users do with a stock model that is split: generate, train, load, read the report; and what is refused."""

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor
from turns import by_turns

import ndtp
from ndtp import CommMeter, Grid, LayoutError

pytest.importorskip("transformers")

import transformers
import transformers.modeling_layers
import transformers.modeling_utils  # so that ranks are forked with it
from architectures import ALL, HEADS, build, inputs
from test_transformers_whole import check_gradients, gradient


def check_training():
    """Clipping, an optimizer's step, dense state dicts in and out; frozen parameters and tied weights."""
    mesh = mesh_of(Grid(x=2, y=2))
    dense, model = build("Qwen2ForCausalLM"), build("Qwen2ForCausalLM")
    for each in (dense, model):
        each.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    ndtp.parallelize(model, mesh, scheme="2d")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(isinstance(p, DTensor) and p.device_mesh == mesh.device_mesh for p in model.parameters())
    norms = []
    for each in (dense, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        each(**inputs("Qwen2ForCausalLM")).loss.backward()
        norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.5))
        optimizer.step()
    assert model.model.layers[0].mlp.up_proj.weight.grad is None
    # Of lists of gradients, for which torch has kernels on devices, the norm is whole.
    total = norms[1].full_tensor() if torch.get_default_device().type == "cpu" else norms[1]
    torch.testing.assert_close(total, norms[0], rtol=1e-6, atol=0.0)
    assert abs(float(norms[1]) / float(norms[0]) - 1) < 1e-6, "the norm of all, on each rank"
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        found = mine.full_tensor()[tuple(slice(0, size) for size in theirs.shape)]
        torch.testing.assert_close(found, theirs, rtol=0.0, atol=1e-4, msg=name)
    other = build("Qwen2ForCausalLM")
    model.load_state_dict(other.state_dict())
    given = inputs("Qwen2ForCausalLM")
    torch.testing.assert_close(model(**given).loss, other(**given).loss, rtol=1e-6, atol=0.0)


def check_data_parallel():
    """Each dp rank has sequences of its own; the loss is the mean over the tokens of all."""
    mesh = mesh_of(Grid(dp=2, x=2))
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel"):
        dense, model = build(name), build(name)
        ndtp.parallelize(model, mesh, scheme="1d-sp")
        given = inputs(name)
        expected = dense(**given).loss
        mine = {key: value.chunk(2)[mesh.coordinate["dp"]] for key, value in given.items()}
        loss = model(**mine).loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
        expected.backward()
        loss.backward()
        check_gradients(model, dense, f"{name}, dp")


def check_data_parallel_loss_of_whole_logits():
    """Of a classifier that stays whole: the mean over dp ranks; without gradients labels may not be ignored."""
    mesh = mesh_of(Grid(dp=2, x=2))
    name = "ViTForImageClassification"
    dense, model = build(name), build(name)
    ndtp.parallelize(model, mesh, scheme="1d-sp", keep=["classifier"])
    given = inputs(name)
    mine = {key: value.chunk(2)[mesh.coordinate["dp"]] for key, value in given.items()}
    for options in ({}, {"return_dict": False}):
        dense.zero_grad()
        model.zero_grad()
        expected = dense(**given).loss
        out = model(**mine, **options)
        loss = out[0] if options else out.loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
        expected.backward()
        loss.backward()
        check_gradients(model, dense, f"{name}, dp")
    with torch.no_grad(), pytest.raises(LayoutError, match="labels, of which dp ranks may ignore"):
        model(**(mine | {"labels": torch.full_like(mine["labels"], -100)}))


def check_volume():
    """Of other heads, and of an encoder and a decoder of different lengths; `against_dense` has the other models."""
    mesh = mesh_of(Grid(x=2))
    for name in by_turns([*[each for each in HEADS if each not in ALL], "T5ForConditionalGeneration"], 3):
        model = ndtp.parallelize(build(name, num_hidden_layers=1), mesh, scheme="1d-sp")
        given, lengths = inputs(name), (6,)
        if model.config.is_encoder_decoder:
            given["labels"], lengths = given["labels"][:, :4].contiguous(), (6, 4)
        with CommMeter() as meter:
            model(**given).loss.backward()
        report = model.ndtp_report
        for predicted in (report.volume(4, *lengths), report.volume(**given)):
            assert meter.volume == predicted, f"{name}: measured {meter.volume}, predicted {predicted}"
        if model.config.is_encoder_decoder:
            with pytest.raises(LayoutError, match=r"takes volume\(batch, sequence\)"):
                report.volume(4)


def test_training(ranks):
    ranks(4).run(check_training)


def test_data_parallel(ranks):
    ranks(4).run(check_data_parallel)
    ranks(4).run(check_data_parallel_loss_of_whole_logits)


def test_volume_is_exact(ranks):
    ranks(2).run(check_volume)


class Unknown(nn.Module):
    """No architecture of any list: its own names, two layers an MLP is made of, and one that fits nowhere."""

    def __init__(self, hidden):
        super().__init__()
        self.first, self.second = nn.Linear(hidden, 48), nn.Linear(48, hidden)
        self.odd = nn.Bilinear(hidden, hidden, hidden)

    def forward(self, x):
        return self.odd(x, x) + self.second(torch.relu(self.first(x)))


def check_left_alone():
    """Heads that do not divide, layers that fit no pattern, what is to be kept: split by rule or whole, and right."""
    mesh = mesh_of(Grid(x=2, y=2))
    changes = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 33}  # features are padded, too
    dense, model = (build("LlamaForCausalLM", **changes) for _ in range(2))
    for each in (dense, model):
        torch.manual_seed(1)
        each.model.layers[0].mlp = Unknown(33).double()
    ndtp.parallelize(model, mesh, scheme="2d", keep=["model.layers.1.mlp.*"])
    report = model.ndtp_report
    given = inputs("LlamaForCausalLM")
    with pytest.warns(UserWarning, match="bilinear has no rule"):
        loss = model(**given).loss
    torch.testing.assert_close(loss, dense(**given).loss, rtol=1e-6, atol=0.0)
    loss.backward()
    dense(**given).loss.backward()
    check_gradients(model, dense, "left alone")
    assert report.kept["model.layers.1.mlp.up_proj"] == "by the plan"
    assert {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.first"} <= report.replaced.keys()
    assert gradient(model.model.layers[0].mlp.odd.weight) is not None
    text = str(report)
    assert text.startswith("replaced 11 of 14 Linears; of "), text
    assert "gathered bilinear of what" in text, text
    alone = ndtp.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), mesh, scheme="2d")
    assert list(alone.ndtp_report.replaced) == ["0"]
    return text


def check_few_key_heads():
    """Fewer heads of k and v than ranks that split heads: gathered, and each rank takes those that it needs."""
    mesh = mesh_of(Grid(x=1, y=4))
    for name, kv_heads in by_turns([("Qwen3ForCausalLM", 1), ("Qwen3ForCausalLM", 2), ("Phi3ForCausalLM", 2)], 3):
        sizes = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "hidden_size": 64, "num_hidden_layers": 1}
        dense, model = (build(name, **sizes) for _ in range(2))
        ndtp.parallelize(model, mesh, scheme="2d")
        given = inputs(name)
        expected = dense(**given).loss
        with CommMeter() as meter:
            loss = model(**given).loss
            loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
        expected.backward()
        check_gradients(model, dense, f"{name}, {kv_heads} heads of k and v")
        assert meter.volume == model.ndtp_report.volume(4, 6), f"{name}, {kv_heads}"
        assert not any("attn" in layer for layer in model.ndtp_report.kept), name


def test_what_does_not_fit_is_left_whole(ranks):
    texts = ranks(4).run(check_left_alone)
    assert all(text == texts[0] for text in texts)


def test_few_key_heads(ranks):
    ranks(4).run(check_few_key_heads)


def check_as_transformers_asks(folder):
    """What its own tests of tensor parallelism ask of any: 1e-5, with tied weights or not, of loaded models."""
    mesh, close = mesh_of(Grid(x=2)), {"rtol": 1e-5, "atol": 1e-5}
    ids, labels = torch.randint(0, 68, (2, 2, 64), generator=torch.Generator().manual_seed(0))
    for name, is_tied in by_turns([("Qwen2ForCausalLM", True), ("Qwen3ForCausalLM", False)], 2):
        where = folder / f"{name} {is_tied}"
        if mesh.rank == 0:
            sizes = {"vocab_size": 68, "max_position_embeddings": 64, "tie_word_embeddings": is_tied}
            build(name, **sizes).float().save_pretrained(where)
        torch.distributed.barrier()
        kind = getattr(transformers, name)
        dense, model = kind.from_pretrained(where), kind.from_pretrained(where)
        ndtp.parallelize(model, mesh, scheme="1d-sp")
        with torch.no_grad():
            assert torch.allclose(dense(ids).logits, model(ids).logits, **close), "logits as if they were whole"
        for each in (dense, model):
            each.train()
            loss = each(ids, labels=labels).loss
            loss.backward()
            each.loss = loss.detach()
        torch.testing.assert_close(model.loss, dense.loss, **close)
        for (key, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(gradient(mine), theirs.grad, **close, msg=lambda text, key=key: f"{key}: {text}")
        options = {"max_new_tokens": 5, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        expected, found = (each.eval().generate(ids[:1, :10], **options) for each in (dense, model))
        torch.testing.assert_close(torch.stack(found.scores), torch.stack(expected.scores), **close)
        assert torch.equal(found.sequences, expected.sequences)


def test_as_transformers_asks(ranks, tmp_path):
    ranks(2).run(check_as_transformers_asks, tmp_path)

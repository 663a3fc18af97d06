"""Stock models whose batch the ranks do not divide: each rank has tokens of every sequence; equal to dense."""

import warnings

import pytest
import torch
from products import mesh_of
from test_transformers_whole import check_gradients
from turns import by_turns

import ndtp
from ndtp import CommMeter, Grid
from ndtp.models.dry_step import OfWholeBatches
from ndtp.models.hidden import leave, whole

pytest.importorskip("transformers")
import architectures
import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it


def check(names, sizes, scheme, batch, length=7, generates=False, masked=True, attention="auto", **changes):
    """Logits, loss, gradients, bytes and the rows that a rank computes; and tokens that are generated."""
    mesh = mesh_of(Grid(sizes))
    for name in names:
        where = f"{name}, {mesh.grid}, {scheme}, {batch} sequences, {attention}"
        dense, model = (architectures.build(name, num_hidden_layers=1, **changes) for _ in range(2))
        given = architectures.inputs(name, batch, length)
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][0, 4:] = not masked
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # nothing whole is gathered
            ndtp.parallelize(model, mesh, scheme=scheme, attention=attention)
            with CommMeter() as meter:
                out = model(**given)
                out.loss.backward()
        expected = dense(**given)
        expected.loss.backward()
        torch.testing.assert_close(out.loss, expected.loss, rtol=2e-6, atol=0.0, msg=f"{where}: loss")
        torch.testing.assert_close(whole(out.logits), expected.logits, rtol=1e-6, atol=1e-6, msg=f"{where}: logits")
        check_gradients(model, dense, where)
        # A dry run has no padding: T5's bias is [1, ..] then, and a ring's work is causal.
        if not masked or (attention == "auto" and not name.startswith("T5")):
            predicted = model.ndtp_report.volume(**given)
            assert meter.volume.total == predicted.total, f"{where}: {meter.volume} instead of {predicted}"
        split = model.ndtp_report.split
        tokens = batch * -(-length // split.frame.sequences) * split.frame.sequences
        assert len(leave(out.logits)) * split.layouts.hidden.num_splits(0) == tokens, where
        if generates:
            ids, options = given["input_ids"], {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
            mask = given["attention_mask"].flip(1)
            tokens = dense.generate(ids, attention_mask=mask, **options)
            assert torch.equal(model.generate(ids, attention_mask=mask, **options), tokens), where


def test_a_dry_run_finds_no_token_of_padding_and_counts():
    ids, weights = torch.empty(3, dtype=torch.long, device="meta"), torch.empty(3, device="meta")
    with OfWholeBatches():
        for counted, dtype in ((torch.bincount(ids, None, 4), torch.long), (ids.bincount(weights, minlength=4), None)):
            assert counted.shape == (4,) and counted.dtype == (dtype or torch.float32)
        assert 0 not in torch.empty(2, 3, dtype=torch.long, device="meta")


WAYS = ("gather", "ring", "heads")
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32}


def check_ways(sizes, scheme, batch, ways):
    """With the mask of padding, and with none, where attention is causal by its kernel."""
    for attention in ways:
        for masked in (False, True):
            options = {"attention": attention, "masked": masked, "generates": masked}
            check(["LlamaForCausalLM"], sizes, scheme, batch, **LLAMA, **options)


def test_one_sequence_in_three_ways(ranks):
    ranks(2).run(check_ways, {"z": 2, "x": 1, "y": 1}, "3d", 1, by_turns(WAYS, 3))


def check_documents(sizes, length, ways):
    """Documents packed into one sequence, with checkpoints, compiled, under autocast: what their positions tell."""
    mesh, ids = mesh_of(Grid(sizes)), torch.arange(3, 3 + length)[None]
    coded = ndtp.ProcessGrid(mesh.grid, wire="fp8")
    positions = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])[None]
    given = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}
    for attention in ways:
        dense, model = (architectures.build("LlamaForCausalLM", num_hidden_layers=1, **LLAMA) for _ in range(2))
        model.gradient_checkpointing_enable()
        ndtp.parallelize(model.train(), mesh, attention=attention)
        with CommMeter() as meter:
            out = torch.compile(model, backend="eager")(**given)
            out.loss.backward()
        expected = dense(**given)
        expected.loss.backward()
        assert (expected.loss - dense(ids, labels=ids).loss).abs() > 1e-3, "documents do not see each other"
        torch.testing.assert_close(out.loss, expected.loss, rtol=2e-6, atol=0.0)
        check_gradients(model, dense, f"{mesh.grid}, {attention}")
        if attention != "ring":  # a dry run sees no documents, and a ring swaps halves where it is causal
            assert meter.volume.total == model.ndtp_report.volume(**given).total, attention
        few = architectures.build("LlamaForCausalLM", num_hidden_layers=1, **LLAMA)
        ndtp.parallelize(few, coded, attention=attention)
        with CommMeter() as meter:
            loss = few(ids, labels=ids).loss
            loss.backward()
        assert 0 < abs(loss - dense(ids, labels=ids).loss) < 0.05
        assert meter.volume.total == few.ndtp_report.volume(input_ids=ids, labels=ids).total, f"{attention}, few bytes"
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(**given).loss, expected.loss, rtol=1e-2, atol=0.0, check_dtype=False)


def test_packed_documents_in_three_ways(ranks):
    """Sequences that both axes of rows cut."""
    ranks(4).run(check_documents, {"z": 2, "x": 2, "y": 1}, 15, by_turns(WAYS, 3))


def test_three_sequences_on_four_ranks(ranks):
    """Norms and biases inside of attention, scores by hand, windows, relative positions, two sources."""
    names = ["Qwen3ForCausalLM", "Olmo2ForCausalLM", "Gemma2ForCausalLM", "T5ForConditionalGeneration"]
    ranks(4).run(check, by_turns(names, 2), {"x": 2, "y": 2}, "2d", 3)

"""Sequences of a cache that are split over ranks: who sends which to whom, against picking from the whole batch."""

import copy
import random

import pytest
import torch
from products import mesh_of

import ndtp
from ndtp import CommMeter, Grid, LayoutError
from ndtp.models.cached_sequences import picks_of

pytest.importorskip("transformers")

import transformers
from architectures import build, inputs


def after(index, before, now, ranks):
    """The sequences that all ranks have after an exchange of these picks, where each starts with numbers of its own."""
    picks = [picks_of(tuple(index), before, now, ranks, me) for me in range(ranks)]
    held = [list(range(rank * before, (rank + 1) * before)) for rank in range(ranks)]
    sent = [iter([held[rank][i] for i in picks[rank].sent]) for rank in range(ranks)]
    boxes = {(a, b): [next(sent[a]) for _ in range(picks[a].sends[b])] for a in range(ranks) for b in range(ranks)}
    found = []
    for rank, mine in enumerate(picks):
        assert mine.receives == tuple(len(boxes[a, rank]) for a in range(ranks))
        have = held[rank] + [x for a in range(ranks) for x in boxes[a, rank]]
        found += [have[i] for i in mine.taken]
    return found, picks


def test_picks_are_those_of_the_whole_batch():
    draw = random.Random(0)
    for _ in range(200):
        ranks, before = draw.randint(1, 5), draw.randint(1, 4)
        count, now = draw.randint(1, ranks * before), draw.randint(1, 6)
        index = [draw.randrange(count) for _ in range(draw.randint(1, ranks * now))]
        found, picks = after(index, before, now, ranks)
        assert found[: len(index)] == index
        assert len({each.is_local for each in picks}) == 1  # all ranks start the exchange, or none
        assert all(each.is_local for each in picks) == (sum(map(len, (each.sent for each in picks))) == 0)


def test_beams_that_stay_on_their_rank_send_nothing():
    _, picks = after([1, 0, 3, 3], before=2, now=2, ranks=2)
    assert all(each.is_local for each in picks)


def check_generation():
    """Token by token, with beams, samples and drafts, against dense; padded prompts, batches that do not divide."""
    mesh = mesh_of(Grid(x=2, y=2))
    ways = {
        "greedy": {},
        "beams": {"num_beams": 3, "num_return_sequences": 2},
        "beams, drawn": {"num_beams": 2, "do_sample": True},
        "static cache": {"num_beams": 2, "cache_implementation": "static"},
        "samples": {"do_sample": True, "num_return_sequences": 2},
        "drafts": {"prompt_lookup_num_tokens": 2, "batch": 1},
    }
    for name, scheme, chosen in (
        ("LlamaForCausalLM", "2d", ways),
        ("T5ForConditionalGeneration", "2d", ("greedy", "beams")),
        ("Qwen2ForCausalLM", "2d-features", ("greedy",)),  # biases, and fewer heads of keys than ranks
        ("Phi3ForCausalLM", "2d-features", ("greedy",)),  # q, k, v in one layer, gate and up in one
    ):
        changes = {"num_layers": 1} if "T5" in name else {"num_hidden_layers": 1}
        dense, model = build(name, **changes), ndtp.parallelize(build(name, **changes), mesh, scheme=scheme)
        for way in chosen:
            options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False} | ways[way]
            ids = inputs(name, batch=options.pop("batch", 3))["input_ids"]
            mask, tokens = torch.ones_like(ids), []
            if "Llama" in name and len(ids) > 1:
                ids[1, :2], mask[1, :2] = 0, 0
            bound = len(mesh.programs)
            for each in (dense, model):
                torch.manual_seed(5)
                tokens.append(each.generate(ids, attention_mask=mask, **options))
            assert torch.equal(*tokens), f"{name}, {way}: {tokens[1]} instead of {tokens[0]}"
            assert len(mesh.programs) == bound, "few rows are multiplied whatever their number is"


def check_cache():
    """A cache by itself: repeated, selected, and refused where keys are packed.

    Two sequences divide, three do not: ranks have tokens of all of them then, and the cache holds the whole batch.
    """
    from transformers import DynamicCache

    mesh = mesh_of(Grid(x=2, y=2))
    dense = build("LlamaForCausalLM", num_hidden_layers=1)
    model = ndtp.parallelize(build("LlamaForCausalLM", num_hidden_layers=1), mesh, scheme="2d")
    ids = inputs("LlamaForCausalLM", batch=2)["input_ids"]
    logits = []
    for each in (dense, model):
        cache, found = DynamicCache(config=each.config), []
        each(input_ids=ids, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        with CommMeter() as meter:
            cache.reorder_cache(torch.tensor([2, 0, 1, 3]))
        for picked in (None, [0, 2, 3], [2, 1]):
            if picked is not None:
                cache.batch_select_indices(torch.tensor(picked))
            count = 4 if picked is None else len(picked)
            out = each(input_ids=ids.flatten()[:count, None], past_key_values=cache).logits
            found.append(out.gathered() if each is model else out)
        logits.append(found)
    for mine, theirs in zip(*logits, strict=True):
        torch.testing.assert_close(mine, theirs)
    # A rank lacks one of its two sequences: keys and values of one of 2 heads of 8 features, 6 tokens, in fp64.
    assert meter.volume.by("axes") == {"x": 2 * 6 * 8 * 8}, meter.volume
    cache.layers[0]._quantize = None
    with pytest.raises(LayoutError, match="quantised keys"):
        cache.reorder_cache(torch.tensor([1, 1]))


def test_generation(ranks):
    ranks(4).run(check_generation)


def test_cache(ranks):
    ranks(4).run(check_cache)


def check_rows_that_end():
    """Along dp, where the rows of one rank end long before those of the other."""
    import peft

    mesh = mesh_of(Grid(dp=2))
    dense = build("LlamaForCausalLM", num_hidden_layers=1)
    model = ndtp.parallelize(build("LlamaForCausalLM", num_hidden_layers=1), mesh)
    ids = inputs("LlamaForCausalLM")["input_ids"]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids[:1])}
    free = dense.generate(ids[:1], **options)
    ends = free[0, ids.shape[1] + 1].item()  # what the first row says second
    lengths = [dense.generate(row, eos_token_id=ends, **options).shape[1] for row in ids[:2].split(1)]
    assert lengths[0] < lengths[1], lengths
    mine = ids[mesh.rank : mesh.rank + 1]
    adapted = peft.get_peft_model(
        build("LlamaForCausalLM", num_hidden_layers=1), peft.LoraConfig(target_modules=["q_proj"])
    )
    adapted = ndtp.parallelize(adapted, mesh)  # whose `generate` takes whatever it is given
    for each, more in ((model, {}), (model, {"synced_gpus": False}), (adapted, {})):  # as Seq2SeqTrainer says
        found = each.generate(input_ids=mine, eos_token_id=ends, **options, **more)
        assert found.shape[1] == lengths[mesh.rank], more
        with torch.no_grad():
            each(input_ids=ids[:1])
    with pytest.raises(LayoutError, match="prompt_lookup_num_tokens= along an axis"):
        model.generate(ids[:1], prompt_lookup_num_tokens=2, **options)


def test_rows_that_end_early_along_dp(ranks):
    ranks(2).run(check_rows_that_end)


def check_copied_prompts():
    """A prompt that is computed once, and whose cache is copied for each use, as transformers' guide does."""
    names = {"num_hidden_layers": 1, "num_key_value_heads": 2}
    dense, model = build("LlamaForCausalLM", **names).eval(), build("LlamaForCausalLM", **names).eval()
    ndtp.parallelize(model, mesh_of(Grid(z=2)))
    prompt, more = torch.arange(3, 8)[None], torch.arange(12).view(4, 3)
    found = []
    for each in (dense, model):
        with torch.no_grad():
            cache = each(prompt, past_key_values=transformers.DynamicCache(config=each.config)).past_key_values
            for _ in range(2):
                own = copy.deepcopy(cache)
                own.batch_repeat_interleave(4)
                ids = torch.cat([prompt.expand(4, -1), more], 1)
                found.append(each.generate(ids, past_key_values=own, max_new_tokens=4, do_sample=False, pad_token_id=0))
    assert all(torch.equal(x, found[0]) for x in found)


def test_copied_prompts(ranks):
    ranks(2).run(check_copied_prompts)

"""Stock models cut into stages on unequal grids: the dense model's loss, gradients and training, tied weights too."""

import copy
from inspect import signature

import pytest
import torch
from counted import of_ndtp
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from turns import by_turns

import ndtp
from ndtp import CommMeter, Grid, LayoutError
from ndtp.algebra.volume import Volume
from ndtp.pipelines.gradients import clip_grad_norm_

MICRO_BATCHES, BATCH, LENGTH = 2, 4, 6


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double()


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=30, n_embd=12, n_layer=3, n_head=2, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).double()


def mixtral(layers=2, tied=False):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
        output_router_logits=True, router_aux_loss_coef=0.5, tie_word_embeddings=tied, experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return MixtralForCausalLM(config).double()


CASES = {  # model, grids of the stages, other options, schedule, steps: the second one needs what the first has kept
    "mixtral": (mixtral, [Grid(dp=2, e=2), Grid(e=2, x=2)], {}, Schedule1F1B, 1),
    "gpt2": (gpt2, [Grid(x=1), Grid(dp=1, x=2), Grid(y=1)], {"layers": [1, 1, 1]}, ScheduleGPipe, 2),
    "in turns": (
        lambda: mixtral(4, tied=True),
        [Grid(x=2), Grid(y=2), Grid(z=2), Grid(dp=2)],
        {"groups": 2},
        ScheduleInterleaved1F1B,
        1,
    ),
}


def whole(x, like):
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x[tuple(slice(size) for size in like.shape)]


LAST = {}  # of the last case, on this rank: the stages and their optimizer


def check_case(name):
    make, grids, options, kind, steps = CASES[name]
    dense = make()
    stages = ndtp.pipeline_stages(copy.deepcopy(dense), grids, BATCH, LENGTH, **options)
    mine = stages if "groups" in options else stages[0]
    counted, takes = {}, "loss_kwargs" in signature(kind.step).parameters  # torch 2.13's do
    # Logits know which stage gave them: the loss of any stage of a rank will do.
    loss_fn = stages[0].loss if takes else lambda *given: stages[0].loss(*given, **counted)
    schedule = kind(mine, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn, scale_grads=False)
    ours = torch.optim.SGD([p for stage in stages for p in stage.model.parameters()], lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    LAST.update(stages=stages, optimizer=ours)
    for step in range(steps):
        ids = torch.randint(30, (MICRO_BATCHES * BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
        labels, mask = ids.clone(), torch.ones_like(ids)
        labels[1, 2:], mask[1, 3:] = -100, 0  # fewer in one micro-batch, and on one rank of dp
        given = [stage.rows(ids, MICRO_BATCHES) for stage in stages if stage.is_first]
        target = [stage.rows(labels, MICRO_BATCHES) for stage in stages if stage.is_last]
        losses, count = [], (labels[:, 1:] >= 0).sum()
        counted["num_items_in_batch"] = count
        with CommMeter() as meter:
            schedule.step(
                *given, target=target[0] if target else None, losses=losses, return_outputs=False,
                attention_mask=mask, **({"loss_kwargs": counted} if takes else {}),
            )  # fmt: skip
        between = Volume(tuple(entry for entry in of_ndtp(meter.volume) if entry.collective == "receive"))
        assert between == stages[0].volume(MICRO_BATCHES), f"{between}, {stages[0].volume(MICRO_BATCHES)}"
        # In micro-batches, as a loss of routers is no sum over them.
        loss = sum(
            dense(input_ids=i, labels=j, attention_mask=m, num_items_in_batch=count).loss
            for i, j, m in zip(*(x.chunk(MICRO_BATCHES) for x in (ids, labels, mask)), strict=True)
        )
        loss.backward()
        if target:
            torch.testing.assert_close(sum(losses), loss, rtol=1e-6, atol=1e-6)
        named = dict(dense.named_parameters(remove_duplicate=False))
        for stage in stages:
            for key, parameter in stage.model.named_parameters():
                where = f"{name}, step {step}, stage {stage.index}, {key}"
                torch.testing.assert_close(
                    whole(parameter.grad, named[key]), named[key].grad, rtol=1e-5, atol=1e-6,
                    msg=lambda m, where=where: f"{where}: {m}",
                )  # fmt: skip
        norm = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        torch.testing.assert_close(clip_grad_norm_(stages, 0.1), norm.double(), rtol=1e-5, atol=1e-6)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    if not stages[0].is_last:
        with pytest.raises(ndtp.LayoutError, match="fix: loss_fn=stages"):
            stages[0].loss(torch.zeros(BATCH, LENGTH, 32), ids)
    return [{key: whole(p.detach(), named[key]) for key, p in stage.model.named_parameters()} for stage in stages]


def check_experts(folder):
    """Also: the stages write one folder, the dense model's, for any grid and for none."""
    parts = check_case("mixtral")
    one, dense = ndtp.parallelize(mixtral(), ndtp.ProcessGrid(Grid(e=2, z=2, y=2))), mixtral()
    ndtp.checkpoint.export_safetensors(LAST["stages"], folder)
    for model in (one, dense):
        ndtp.checkpoint.load_safetensors(model, folder)
    theirs = dense.state_dict()
    on_one = {key: whole(p.detach(), theirs[key]) for key, p in one.named_parameters()}
    for part in parts:
        for key, x in part.items():
            assert torch.equal(theirs[key], x) and torch.equal(on_one[key], x), key
    return sorted(key for part in parts for key in part)


def test_a_model_with_experts(ranks, tmp_path):
    by_rank = ranks(8).run(check_experts, str(tmp_path))
    assert sorted(by_rank[0] + by_rank[4]) == sorted(key for key, _ in mixtral().named_parameters())


def tied_weights(results):
    """All copies of the embedding and of the head, on whichever ranks."""
    words = ("embed_tokens", "wte", "lm_head")
    return [x for rank in results for stage in rank for key, x in stage.items() if any(w in key for w in words)]


def same_run(stages, optimizer, dense, theirs):
    """Every parameter, and what the optimizer keeps for it."""
    named = dict(dense.named_parameters(remove_duplicate=False))
    for stage in stages:
        for key, p in stage.model.named_parameters():
            (kept,), (other,) = optimizer.state[p].values(), theirs.state[named[key]].values()
            assert torch.equal(whole(p.detach(), named[key]), named[key]), f"stage {stage.index}, {key}"
            assert torch.equal(whole(kept, other), other), f"stage {stage.index}, momentum of {key}"


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)


def check_one_folder(folder):
    """A run of four stages goes on in three, which lie there and back, on one grid, and dense; weights alone, too."""
    save, load = ndtp.checkpoint.save, ndtp.checkpoint.load
    save(LAST["stages"], LAST["optimizer"], f"{folder}/run", extra={"step": 2})
    ndtp.checkpoint.export_safetensors(LAST["stages"], f"{folder}/files")

    dense, at_start = mixtral(4, tied=True), mixtral(4, tied=True)
    theirs = momentum(dense.parameters())
    assert load(dense, theirs, f"{folder}/run") == {"step": 2} and theirs.param_groups[0]["lr"] == 0.1
    same_run(LAST["stages"], LAST["optimizer"], dense, theirs)
    ranks = {"grids": [Grid(y=2), Grid(x=2), Grid(z=2)], "ranks": [(0, 1), (2, 3), (0, 1)]}
    stages = ndtp.pipeline_stages(at_start, batch=BATCH, length=LENGTH, **ranks)
    optimizer = momentum([p for stage in stages for p in stage.model.parameters()])
    load(stages, optimizer, f"{folder}/run")
    same_run(stages, optimizer, dense, theirs)
    save(stages, optimizer, f"{folder}/run")
    weights = [p for stage in stages for p in stage.model.parameters()]
    kind = torch.optim.Adam if torch.distributed.get_rank() > 1 else torch.optim.SGD
    save(stages, kind(weights), f"{folder}/of each stage its own")
    split = ndtp.parallelize(mixtral(4, tied=True), ndtp.ProcessGrid(Grid(z=2, y=2)))
    load(split, optimizer := momentum(split.parameters()), f"{folder}/run")
    for (key, p), q in zip(split.named_parameters(), dense.parameters(), strict=True):
        buffers = (each.state[p_]["momentum_buffer"] for each, p_ in ((optimizer, p), (theirs, q)))
        assert torch.equal(whole(p.detach(), q), q) and torch.equal(*(whole(x, q) for x in buffers)), key

    with torch.device("meta"):
        nowhere, bare = mixtral(4, tied=True), mixtral(4, tied=True)
    stages = ndtp.pipeline_stages(nowhere, batch=BATCH, length=LENGTH, **ranks)
    initialize = ndtp.checkpoint.initialize
    for fill in (lambda m: initialize(m, 5), lambda m: ndtp.checkpoint.load_safetensors(m, f"{folder}/files")):
        fill(stages)
        fill(bare)
        for stage in stages:
            for key, p in stage.model.named_parameters():
                assert torch.equal(whole(p.detach(), bare.get_parameter(key)), bare.get_parameter(key)), key
    assert torch.equal(bare.lm_head.weight, dense.lm_head.weight)
    for given, where, words in (
        (stages[:1], "run", "stages .2. are missing"),
        (stages, f"of {torch.distributed.get_rank()}", "about to do different things: save: .*of 0; save: .*of 1"),
    ):
        with pytest.raises(ndtp.errors.CheckpointError, match=words):
            save(given, None, f"{folder}/{where}")


def check_long_sequences():
    """Three sequences, whose tokens both stages split; and few bytes between these."""
    ids, moved = torch.randint(30, (3, 5), generator=torch.Generator().manual_seed(0)), {}
    dense = llama()
    loss = dense(input_ids=ids, labels=ids).loss
    loss.backward()
    named = dict(dense.named_parameters())
    for wire, allowed in ((None, 1e-6), ("fp8", 0.15)):
        grids = [Grid(z=2, x=1, y=1), Grid(z=1, x=1, y=2)]
        (stage,) = ndtp.pipeline_stages(llama(), grids, batch=3, length=5, wire=wire)
        assert stage.pipeline.shapes == ((18, 16), (18, 16)), "rows of padding behind the tokens, not sequences"
        schedule, losses = ScheduleGPipe(stage, n_microbatches=1, loss_fn=stage.loss, scale_grads=False), []
        given, target = ([stage.rows(ids, 1)], None) if stage.is_first else ([], stage.rows(ids, 1))
        with CommMeter() as meter:
            schedule.step(*given, target=target, losses=losses, return_outputs=False)
        between = Volume(tuple(entry for entry in of_ndtp(meter.volume) if entry.collective == "receive"))
        assert between == stage.volume(1), f"{wire}: {between}, {stage.volume(1)}"
        moved[wire] = between.total
        assert not losses or abs(sum(losses) - loss) < allowed
        for key, parameter in stage.model.named_parameters():
            wanted = named[key].grad
            assert (whole(parameter.grad, wanted) - wanted).norm() < allowed * wanted.norm(), f"{wire}: {key}"
    assert moved["fp8"] < 0.3 * moved[None], "of fp64, with a scale a row"


def check_all(names, folder):
    found = [check_case(name) for name in names]
    if "in turns" in names:  # the last one, whose stages go on
        check_one_folder(folder)
    if "gpt2" in names:
        check_long_sequences()
    return found


def test_training_on_four_ranks(ranks, tmp_path):
    names = by_turns(["gpt2", "in turns"], 2)
    for name, *results in zip(names, *ranks(4).run(check_all, names, str(tmp_path)), strict=True):
        tied = tied_weights(results)
        assert len(tied) > 1, name
        assert all((x == tied[0]).all() for x in tied), f"{name}: to the last bit"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": [3, 0]}, "2 layers as .3, 0. for 2 stages"),
        ({"batch": 3}, "micro-batch of 3 sequences, which dp=2 of stage 0 do not divide\n  fix: batch=4"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(LayoutError, match=words):
        ndtp.pipeline_stages(llama(), [Grid(dp=2), Grid(x=2)], **{"batch": 4, "length": 6, **options})

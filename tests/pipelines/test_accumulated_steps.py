"""Two steps of a schedule before one of the optimizer, of tied weights, too, and of a backward in two parts."""

import copy

import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleavedZeroBubble

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM

import ndtp
from ndtp import Grid

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def check(count, options, kind):
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=count, tie_word_embeddings=True)).double()
    stages = ndtp.pipeline_stages(copy.deepcopy(dense), [Grid(x=1)] * count, batch=2, length=6, **options)
    mine = stages if options else stages[0]
    schedule = kind(mine, n_microbatches=4, loss_fn=stages[-1].loss, scale_grads=False)
    optimizers = [torch.optim.SGD([p for s in stages for p in s.model.parameters()], lr=0.1)]
    optimizers.append(torch.optim.SGD(dense.parameters(), lr=0.1))
    named = dict(dense.named_parameters(remove_duplicate=False))
    for step in range(4):
        ids = torch.randint(30, (8, 6), generator=torch.Generator().manual_seed(step))
        target = [stage.rows(ids, 4) for stage in stages if stage.is_last]
        given = [stage.rows(ids, 4) for stage in stages if stage.is_first]
        schedule.step(*given, target=target[0] if target else None, return_outputs=False)
        for part in ids.chunk(4):
            dense(input_ids=part, labels=part).loss.backward()
        for stage in stages:
            for key, p in stage.model.named_parameters():
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                where = f"step {step}, {key}"
                torch.testing.assert_close(grad, named[key].grad, rtol=1e-6, atol=1e-7, msg=where)
        if step % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step > 1)


@pytest.mark.parametrize(
    ("count", "options", "kind"), [(2, {}, Schedule1F1B), (4, {"groups": 2}, ScheduleInterleavedZeroBubble)]
)
def test_gradients_add_up(ranks, count, options, kind):
    ranks(2).run(check, count, options, kind)

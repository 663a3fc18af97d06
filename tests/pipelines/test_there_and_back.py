"""Tied weights of stages on the same ranks, first and last: both ends of a tie meet on both, one message each way."""

import pytest
import torch

import ndtp
from ndtp import Grid

pytest.importorskip("transformers")
from torch.distributed.pipelining import ScheduleZBVZeroBubble
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}


def check(vocabulary):
    """One that the two ranks divide, and one that they do not: rows of the two ends have other lengths then."""
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **SIZES))
    there_and_back = [[0, 1], [2, 3], [2, 3], [0, 1]]
    stages = ndtp.pipeline_stages(dense, [Grid(x=2)] * 4, batch=2, length=8, scheme="1d", ranks=there_and_back)
    schedule = ScheduleZBVZeroBubble(stages, n_microbatches=4, loss_fn=stages[-1].loss)
    ids = torch.randint(vocabulary, (8, 8))
    dense(input_ids=ids, labels=ids).loss.backward()
    expected = dense.model.embed_tokens.weight.grad
    for step in range(2):
        mine, ends = stages[0].rows(ids, 4), (stages[0].is_first, stages[-1].is_last)
        schedule.step(*([mine] if ends[0] else []), **({"target": mine} if ends[1] else {}), return_outputs=False)
        if ends[0]:
            for stage, name in zip(stages, ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
                found = stage.model.get_parameter(name).grad.full_tensor()
                torch.testing.assert_close(found, (step + 1) * expected, msg=lambda text, name=name: f"{name}: {text}")


def test_tied_weights_of_stages_there_and_back(ranks):
    for vocabulary in (32, 33):
        ranks(4).run(check, vocabulary)

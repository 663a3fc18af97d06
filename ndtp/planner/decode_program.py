"""The Python and the torchrun line that run a choice for decoding.  Pure text."""

from __future__ import annotations

from ndtp.planner.decode import DecodeChoice
from ndtp.planner.training.program import FILL, START, torchrun

PROGRAM = '''"""{title}

{torchrun}
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import ndtp

CONFIG = {config!r}
SEQUENCES, LENGTH, NEW_TOKENS = {sequences}, {length}, {new}  # of one data-parallel rank


def prompts(device):
    """Put your prompts here: other ones on every data-parallel rank, the same on those that share them."""
    return torch.randint({vocabulary}, (SEQUENCES, LENGTH), device=device)


{start}

def dense():
    """Return the model without memory: each rank gets that of its part alone, in `fill`."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIG), dtype=torch.{dtype}).eval()


{fill}

def main():
    device = start()
    mesh = ndtp.ProcessGrid(ndtp.Grid({grid}))
    model = ndtp.parallelize(dense(), mesh, scheme={scheme!r}{options})
    fill(model)
    ids = prompts(device)
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    ).tolist()


if __name__ == "__main__":
    print(main())
    dist.destroy_process_group()
'''


def grid_of(choice: DecodeChoice) -> str:
    """Return the arguments of `ndtp.Grid`: the axes that are no 1, or one axis of one rank."""
    axes = {axis: size for axis, size in choice.sizes.items() if size > 1} or {"x": 1}
    return ", ".join(f"{axis}={size}" for axis, size in axes.items())


def decode_program(choice: DecodeChoice, config: str, file: object) -> str:
    """Return the program that continues sequences by a choice.

    Args:
        config: the path of the model's `config.json`.
        file: the path to which the program is written.
    """
    question = choice.question
    length = question.model.sequence
    new = min(32, max(1, length // 2))  # of the tokens that the plan has in the cache
    is_fp8 = question.dtype == "float8"
    dtype = "bfloat16" if is_fp8 else question.dtype
    return PROGRAM.format(
        title=f"{question.model.name} on {question.ranks} ranks: {choice}.",
        torchrun=torchrun(question.ranks, question.hardware.ranks_per_node, file), config=config,
        sequences=-(-question.batch // choice.sizes.get("dp", 1)),
        vocabulary=question.model.vocabulary, start=START, fill=FILL.format(dtype=dtype), dtype=dtype,
        grid=grid_of(choice), scheme=choice.scheme, options=', recipe="fp8-rowwise"' if is_fp8 else "",
        length=max(1, length - new), new=new,
    )  # fmt: skip

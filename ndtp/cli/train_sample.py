"""The text that a model of `ndtp train` makes at the end, on the grid that it was trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ndtp.cli.train_data import load_tokenizer

if TYPE_CHECKING:
    from ndtp.cli.job import Job

TOP_K = 40


def first_tokens(prompt: str, tokenizer: Any) -> list[int]:
    """Return the tokens that a sample follows: those of the prompt, or one that begins a text."""
    if tokenizer is None:
        return list(prompt.encode()) or [ord(" ")]
    found: list[int] = tokenizer(prompt, add_special_tokens=False).input_ids
    return found or [tokenizer.eos_token_id or 0]


@torch.no_grad()
def sample(model: Any, job: Job) -> str:
    """`job.sample` tokens that follow the prompt, drawn from the likeliest; alike on every rank.  A collective."""
    tokenizer: Any = None if job.tokenizer is None else load_tokenizer(job.tokenizer)
    ids = torch.tensor([first_tokens(job.prompt, tokenizer)], device=next(model.module.parameters()).device)
    model.module.eval()
    torch.manual_seed(job.seed)
    if model.is_ours:
        ids = _continued(model.module, ids, job)
    else:
        ids = model.module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=TOP_K, max_new_tokens=job.sample,
            min_new_tokens=job.sample, pad_token_id=0,
        )  # fmt: skip
    model.module.train()
    tokens = ids[0].tolist()
    if tokenizer is None:
        return bytes(token % 256 for token in tokens).decode("utf-8", "replace")
    return str(tokenizer.decode(tokens))


def _continued(model: Any, ids: Tensor, job: Job) -> Tensor:
    """Continue one sequence by whole windows of the sizes of training, which every grid that trains them takes."""
    for _ in range(job.sample):
        seen = ids[:, -job.context :]
        window = torch.zeros(job.batch, job.context, dtype=torch.long, device=ids.device)
        window[:, : seen.shape[1]] = seen
        likeliest, tokens = model.logits(window)[0, seen.shape[1] - 1].float().topk(TOP_K)
        drawn = torch.multinomial(likeliest.softmax(-1), 1)
        ids = torch.cat((ids, tokens[drawn][None]), dim=1)
    return ids

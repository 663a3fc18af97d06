"""`save_pretrained` of a model whose parameters are split: the dense model's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ndtp.errors import LayoutError
from ndtp.models.adopted import class_of
from ndtp.models.state_entries import Entry, entries_of, mesh_of_model
from ndtp.ops.products import relayout
from ndtp.runtime.crew import crew_of
from ndtp.runtime.grid_parts import full_of
from ndtp.runtime.process_grid import ProcessGrid

BLOCK_BYTES = 1 << 26


class SavedWhole:
    """A model of transformers or peft whose `save_pretrained` gathers tensor by tensor, and writes on rank 0."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """A collective; on rank 0 the whole model is in the host's memory (see `ndtp.checkpoint` for one that is not).

        Raises:
            CheckpointError: ranks name different folders; or others, with no part of this model, write there, too.
            CommunicationError: rank 0 could not write; on every rank.
        """
        mesh = mesh_of_model(self)  # type: ignore[arg-type]
        crew = crew_of(mesh)
        crew.agree_on(str(save_directory), "save_pretrained: ranks write to", "one folder for all")
        crew.agree(crew.only_writer(save_directory), "save_pretrained: {}")
        writes = mesh is None or mesh.rank == 0
        state = kwargs.pop("state_dict", None)
        if state is None:
            state = gathered_state(self, mesh, writes, _adapters if hasattr(self, "peft_config") else None)
        save = partial(super().save_pretrained, save_directory, *args, state_dict=state, **kwargs)  # type: ignore[misc]
        with _prompts_known(self):
            return crew.alone(save, f"save_pretrained: {save_directory} is not complete")

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: object, **kwargs: object) -> object:
        """Give the table of tokens as it is; its size is settled where a model is split.

        Raises:
            LayoutError: another number of tokens than the model has.
        """
        embeddings = self.get_input_embeddings()  # type: ignore[attr-defined]
        count = getattr(embeddings, "num_embeddings", None)
        if new_num_tokens is not None and (new_num_tokens != count or args or kwargs.get("pad_to_multiple_of")):
            raise LayoutError(
                f"resize_token_embeddings({new_num_tokens}): the {count} rows of this model's vocabulary are split\n"
                "  fix: resize_token_embeddings before parallelize"
            )
        return embeddings


def saved_whole(model: nn.Module) -> None:
    if not isinstance(model, SavedWhole) and hasattr(model, "save_pretrained"):
        model.__class__ = class_of(SavedWhole, type(model))


@contextmanager
def _prompts_known(model: Any) -> Iterator[None]:
    """Have peft find the prompts that it has learned computed: their encoder is split, and one rank alone asks it."""
    configs = getattr(model, "peft_config", {})
    learned = [name for name, config in configs.items() if getattr(config, "is_prompt_learning", False)]
    found = {name: model.get_prompt_embedding_to_save(name) for name in learned}
    taken = {name: x.gathered() if hasattr(x, "gathered") else x for name, x in found.items()}
    prompts = {name: (full_of(x) if isinstance(x, DTensor) else x).cpu() for name, x in taken.items()}
    if prompts:
        vars(model)["get_prompt_embedding_to_save"] = prompts.__getitem__
    try:
        yield
    finally:
        vars(model).pop("get_prompt_embedding_to_save", None)


def _adapters(key: str, trains: bool) -> bool:
    """Return whether peft saves this entry of a model."""
    return trains or "lora_" in key


@torch.no_grad()
def gathered_state(
    model: Any, mesh: ProcessGrid | None, keeps: bool, wanted: Callable[[str, bool], bool] | None = None
) -> dict[str, Tensor]:
    """The dense state dict in the host's memory, on ranks that keep it; a collective."""
    trains = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    state: dict[str, Tensor] = {}
    for entry in entries_of(model, mesh):
        if wanted is not None and not any(wanted(key, key in trains) for key in entry.keys):
            continue
        whole = torch.empty(entry.real, dtype=entry.local.dtype, device="cpu") if keeps else None
        for row, values in blocks(entry, mesh, BLOCK_BYTES):
            if whole is not None and whole.dim():
                whole[row : row + values.shape[0]] = values
            elif whole is not None:
                whole.copy_(values)
        if whole is not None:
            state |= dict.fromkeys(entry.keys, whole.view(entry.dense))
    return state


@torch.no_grad()
def blocks(entry: Entry, mesh: ProcessGrid | None, block_bytes: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of the real tensor, gathered block by block; on every rank alike."""
    local, layout = entry.local, entry.layout
    if local.dim() == 0:
        yield 0, local
        return
    splits = 1 if layout is None else layout.num_splits(0)
    row_bytes = max(int(torch.Size(entry.stored[1:]).numel()), 1) * local.element_size()
    step = max(block_bytes // (row_bytes * splits), 1)
    columns = tuple(slice(0, size) for size in entry.real[1:])
    for first in range(0, local.shape[0], step):
        rows = local[first : first + step].contiguous()
        if layout is not None and mesh is not None:
            rows = relayout(rows, layout, layout.with_dims(*[None] * layout.ndim), mesh, "export")
        for part, block in enumerate(rows.chunk(splits)):
            start = part * local.shape[0] + first
            count = min(entry.real[0] - start, block.shape[0])
            if count > 0:
                part_of = (slice(0, count), *columns)
                yield start, block[part_of]

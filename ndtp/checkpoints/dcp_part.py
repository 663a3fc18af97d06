"""What a rank has of a dense tensor, as torch's distributed checkpoint (DCP) asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ndtp.models.state_entries import Entry


class Part(Tensor):
    """A tensor of the dense shape that is no more than boxes of it: where they are, and the memory of this rank.

    DTensor describes itself to DCP in the same way (`torch.distributed._checkpointable`).  Padding is in no box, and a
    rank that has nothing else has none.
    """

    entry: Entry
    _boxes: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, entry: Entry, rank: int) -> Part:
        made = Tensor._make_wrapper_subclass(cls, entry.dense, dtype=entry.local.dtype, device=entry.local.device)
        made.entry = entry
        made._boxes = {torch.Size(start): box for start, box in entry.boxes(rank)}
        return made

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(start, box.shape) for start, box in self._boxes.items() if box.numel()]

    def __create_write_items__(self, key: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(self._boxes[chunk.offsets]), self.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(iter(self._boxes.values())) if index.offset is None else self._boxes[index.offset]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        boxes = ", ".join(f"{tuple(box.shape)} at {tuple(start)}" for start, box in self._boxes.items())
        return f"Part({boxes} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func}: a part of a tensor is described, not computed with")

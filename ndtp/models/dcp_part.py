"""What a rank has of a dense tensor, as torch's distributed checkpoint (DCP) asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ndtp.models.state_entries import Entry


class Part(Tensor):
    """A tensor of the dense shape that is no more than a box of it: where the box is, and the memory of this rank.

    DTensor describes itself to DCP in the same way (`torch.distributed._checkpointable`).  Padding is in no box, and a
    rank that has nothing else has none.
    """

    _box: Tensor
    _offsets: torch.Size

    @staticmethod
    def __new__(cls, entry: Entry, rank: int) -> Part:
        made = Tensor._make_wrapper_subclass(cls, entry.real, dtype=entry.local.dtype, device=entry.local.device)
        where = entry.part(rank)
        made._offsets = torch.Size(s.start for s in where)
        made._box = entry.local[tuple(slice(0, s.stop - s.start) for s in where)]
        return made

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self._offsets, self._box.shape)] if self._box.numel() else []

    def __create_write_items__(self, key: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._box)
        return [
            WriteItem(
                MetadataIndex(key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._box

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Part({tuple(self._box.shape)} at {tuple(self._offsets)} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func}: a part of a tensor is described, not computed with")

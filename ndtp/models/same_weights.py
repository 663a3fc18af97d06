"""Do all ranks have the same dense model?  Each keeps its part of what it made itself, so others would give garbage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ndtp.collectives.cross_check import differing
from ndtp.errors import MismatchError
from ndtp.runtime.process_grid import ProcessGrid

BLOCK_BYTES = 1 << 23
# Of a multiplicative hash modulo 2^64, see Knuth, "The Art of Computer Programming", 6.4.
MULTIPLIER, STEP, MODULUS = 0x9E3779B97F4A7C15 - (1 << 64), 0x100000001B3, 1 << 64


def check_same_weights(model: nn.Module, mesh: ProcessGrid) -> None:
    """Compare a hash of every parameter and buffer across all ranks: one all-gather of 32 bytes, where they agree.

    What is on the meta device, or already split, is not compared.

    Raises:
        MismatchError: names the first parameter that differs, and the ranks; the same on every rank.
    """
    if mesh.grid.num_ranks == 1 or not mesh.groups.kind.has_peers:
        return
    by_rank = differing(mesh.groups, "\n".join(_lines(model)))
    if by_rank is None:
        return
    tables = {rank: dict(line.split(" = ") for line in text.split("\n") if line) for rank, text in by_rank.items()}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    for name in names:
        values = {rank: table.get(name, "none") for rank, table in tables.items()}
        if len(set(values.values())) == 1:
            continue
        common, count = Counter(values.values()).most_common(1)[0]
        others = [rank for rank, value in values.items() if value != common]
        kinds = {value.rpartition(", ")[0] for value in values.values()}
        what = "other values" if len(kinds) == 1 else f"{values[others[0]]} instead of {common}"
        ranks = ", ".join(map(str, others[:8])) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
        filled_later = (
            f"; model.get_buffer('{name}').zero_() before parallelize, where code fills what torch.empty has made"
            if name in dict(model.named_buffers())
            else ""
        )
        raise MismatchError(
            f"parallelize: ranks have different models: of '{name}' {count} ranks have the same, rank {ranks} {what}\n"
            "  fix: the same seed (torch.manual_seed) or the same checkpoint on every rank, before the model is made; "
            f"or make it on the meta device{filled_later}"
        )
    raise MismatchError("parallelize: ranks have the same parameters in different orders")


def _lines(model: nn.Module) -> Iterator[str]:
    for name, x in chain(model.named_parameters(), model.named_buffers()):
        if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided or x.is_nested:
            continue
        if not (x.is_meta or x.is_quantized):
            yield f"{name} = {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}, {fingerprint(x):016x}"


@torch.no_grad()
def fingerprint(x: Tensor) -> int:
    """A hash of a tensor's bytes and their order, computed where it lies."""
    data = x.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    total = 0
    for start in range(0, data.numel(), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        if block.numel() % 8 or block.storage_offset() % 8:
            block = F.pad(block, (0, -block.numel() % 8)).clone()
        words = block.view(torch.int64)
        factors = torch.arange(1, 2 * words.numel(), 2, device=x.device) * MULTIPLIER
        mixed = words * factors
        total = (total * STEP + int((mixed ^ (mixed >> 29)).sum())) % MODULUS
    return total

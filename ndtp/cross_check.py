"""Do all ranks mean the same?  A comparison before the first collective, instead of a hang inside it."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ndtp.collectives import Watch, _all_gather_single
from ndtp.errors import MismatchError
from ndtp.meter import Label

if TYPE_CHECKING:
    from ndtp.process_grid import ProcessGrid

DIGEST_BYTES = 32


def cross_check(mesh: ProcessGrid, signature: str, topic: str = "a product", fix: str | None = None) -> None:
    """Compare a signature across all ranks of the grid: one small all-gather.

    Raises:
        MismatchError: on every rank, with the ranks that deviate from the most common signature.
    """
    if mesh.grid.num_ranks == 1:
        return
    axes = mesh.grid.nontrivial(mesh.grid.names)
    group = mesh.group(axes)
    digest = hashlib.blake2b(signature.encode(), digest_size=DIGEST_BYTES).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8, device=mesh.device_type)
    digests = own.new_empty(DIGEST_BYTES * mesh.grid.num_ranks)
    label = Label(("cross-check",), "check", "all_gather", axes)
    with Watch(mesh, label):
        _all_gather_single(digests, own, group=group)
        if len({tuple(row) for row in digests.view(-1, DIGEST_BYTES).tolist()}) == 1:
            return
        signatures: list[str] = [""] * mesh.grid.num_ranks
        dist.all_gather_object(signatures, signature, group=group)
    members = dist.get_process_group_ranks(group)
    by_rank = {mesh.global_ranks.index(member): text for member, text in zip(members, signatures, strict=True)}  # type: ignore[union-attr]
    common, count = Counter(signatures).most_common(1)[0]
    lines = [
        f"  rank {rank} ({', '.join(f'{a}={p}' for a, p in mesh.grid.coordinate(rank).items())}): {text}"
        for rank, text in sorted(by_rank.items())
        if text != common
    ]
    lines += [] if fix is None else [f"  fix: {fix}"]
    raise MismatchError(f"ranks disagree on {topic}; {count} ranks have\n  {common}\nbut\n" + "\n".join(lines))


def cross_check_kernel_table(mesh: ProcessGrid) -> None:
    """Ranks that read different tables would multiply by different kernels, and disagree in the last bits.

    Raises:
        MismatchError: naming the ranks whose table deviates.
    """
    from ndtp_kernels.config import default_table

    fix = "the same ~/.cache/ndtp/gemm.json on every machine, or on none"
    cross_check(mesh, f"table {default_table().fingerprint()}", "the table of kernels", fix)

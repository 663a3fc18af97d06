"""Do all ranks mean the same?  A comparison before the first collective, instead of a hang inside it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ndtp.collectives.labels import Label
from ndtp.collectives.watch import Watch
from ndtp.errors import MismatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ndtp.collectives.axis_groups import AxisGroups

DIGEST_BYTES = 32

# torch 2.13 renamed this one; 2.11 has only the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def differing(groups: AxisGroups, signature: str) -> dict[int, str] | None:
    """The signatures of all ranks of the grid, if they differ; one small all-gather, and one more where they do."""
    if groups.grid.num_ranks == 1:
        return None
    axes = groups.grid.nontrivial(groups.grid.names)
    group = groups.group(axes)
    label = Label(("cross-check",), "check", "all_gather", axes)
    signatures = differing_among(group, groups.device_type, signature, groups.describe, label)
    if signatures is None:
        return None
    members = dist.get_process_group_ranks(group)
    by_rank = {groups.global_ranks.index(member): text for member, text in zip(members, signatures, strict=True)}  # type: ignore[union-attr]
    return dict(sorted(by_rank.items()))


def differing_among(
    group: ProcessGroup, device_type: str, signature: str, describe: Callable[[Sequence[str]], str], label: Label
) -> list[str] | None:
    """Compare ranks as `differing` does, in any group, in its order."""
    digest = hashlib.blake2b(_encoded(signature), digest_size=DIGEST_BYTES).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device_type)
    digests = own.new_empty(DIGEST_BYTES * group.size())
    with Watch(describe, label, dist.get_process_group_ranks(group)):
        _all_gather_single(digests, own, group=group)
        if len({tuple(row) for row in digests.view(-1, DIGEST_BYTES).tolist()}) == 1:
            return None
    return gather_texts(group, device_type, signature, describe, label)


def gather_texts(
    group: ProcessGroup, device_type: str, text: str, describe: Callable[[Sequence[str]], str], label: Label
) -> list[str]:
    """Gather texts of all ranks of a group, in its order, by two all-gathers of bytes, none of which is executed.

    torch's `all_gather_object` unpickles what comes.
    """
    said = bytearray(_encoded(text))
    own = torch.tensor([len(said)], dtype=torch.int64, device=device_type)
    sizes = own.new_empty(group.size())
    with Watch(describe, label, dist.get_process_group_ranks(group)):
        _all_gather_single(sizes, own, group=group)
        lengths: list[int] = sizes.tolist()
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device="cpu")
        padded[: len(said)] = torch.frombuffer(said, dtype=torch.uint8) if said else padded[:0]
        every = torch.empty(group.size() * len(padded), dtype=torch.uint8, device=device_type)
        _all_gather_single(every, padded.to(device_type), group=group)
    rows = every.cpu().view(group.size(), -1)
    return [row[:n].numpy().tobytes().decode() for row, n in zip(rows, lengths, strict=True)]


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # names of files may be no texts


def cross_check(groups: AxisGroups, signature: str, topic: str = "a product", fix: str | None = None) -> None:
    """Compare a signature across all ranks of the grid: one small all-gather.

    Raises:
        MismatchError: on every rank, with the ranks that deviate from the most common signature.
    """
    by_rank = differing(groups, signature)
    if by_rank is None:
        return
    common, count = Counter(by_rank.values()).most_common(1)[0]
    lines = [
        f"  rank {rank} ({', '.join(f'{a}={p}' for a, p in groups.grid.coordinate(rank).items())}): {text}"
        for rank, text in by_rank.items()
        if text != common
    ]
    lines += [] if fix is None else [f"  fix: {fix}"]
    raise MismatchError(f"ranks disagree on {topic}; {count} ranks have\n  {common}\nbut\n" + "\n".join(lines))


def cross_check_kernel_table(groups: AxisGroups) -> None:
    """Ranks that read different tables would multiply by different kernels, and disagree in the last bits.

    Raises:
        MismatchError: naming the ranks whose table deviates.
    """
    from ndtp_kernels.choice.table import default_table

    fix = "the same ~/.cache/ndtp/gemm.json on every machine, or on none"
    cross_check(groups, f"table {default_table().fingerprint()}", "the table of kernels", fix)

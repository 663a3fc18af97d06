"""Do all ranks mean the same?  A comparison before the first collective, instead of a hang inside it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ndtp.collectives.handles import Watch
from ndtp.collectives.meter import Label
from ndtp.compute.gemm import TorchGemm
from ndtp.errors import MismatchError

if TYPE_CHECKING:
    from ndtp.algebra.matmul_plan import MatMulPlan
    from ndtp.runtime.process_grid import ProcessGrid

DIGEST_BYTES = 32

# torch 2.13 renamed this one; 2.11 has only the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
    with Watch(mesh.describe, label):
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


def chain_signature(
    a: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    plans: Sequence[MatMulPlan],
    activations: Sequence[str | None],
    mesh: ProcessGrid,
    needs: Sequence[bool] | None = None,
) -> str:
    """What ranks that run a chain of products compare; see `ndtp.runtime.chain.compare_chain`."""
    products = zip(plans, weights, biases, activations, strict=True)
    return "; then ".join(_description(a, *product) for product in products) + _state(mesh, plans, needs)


def _description(a: Tensor, plan: MatMulPlan, b: Tensor, bias: Tensor | None, activation: str | None) -> str:
    """All that decides what a product sends, and what it makes of it."""
    return (
        f"{plan.equation} on grid {plan.grid}, roles {sorted(plan.roles.items())}, "
        f"regather {sorted(plan.regather)}, chunks {plan.chunks}; "
        f"A {signature_of(a)}, B {signature_of(b)}, bias {signature_of(bias)}{'' if activation is None else '; '}"
        f"{activation or ''}"
    )


def _state(mesh: ProcessGrid, plans: Sequence[MatMulPlan], needs: Sequence[bool] | None) -> str:
    """What a grid has come to that decides collectives or bits too."""
    measures = mesh.step.speeds is None and any(plan.chunks == "auto" for plan in plans)
    return (
        f"; by {type(mesh.gemm).__name__}" * (type(mesh.gemm) is not TorchGemm)
        + "; speeds are measured first" * measures
        + "; accumulating" * mesh.step.partial_sums.is_accumulating
        + (f"; gradients wanted {list(needs)}" if needs is not None else "")
    )


def signature_of(x: Tensor | None) -> str:
    """A tensor's shape and dtype, and whether its gradient is wanted."""
    if x is None:
        return "None"
    # Whether a gradient is wanted decides which collectives backward runs.
    return f"{tuple(x.shape)} {x.dtype}{' requires_grad' * (x.requires_grad and torch.is_grad_enabled())}"


def cross_check_kernel_table(mesh: ProcessGrid) -> None:
    """Ranks that read different tables would multiply by different kernels, and disagree in the last bits.

    Raises:
        MismatchError: naming the ranks whose table deviates.
    """
    from ndtp_kernels.choice.table import default_table

    fix = "the same ~/.cache/ndtp/gemm.json on every machine, or on none"
    cross_check(mesh, f"table {default_table().fingerprint()}", "the table of kernels", fix)

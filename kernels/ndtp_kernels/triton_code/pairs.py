"""Gated activations of features in pairs: columns 2j and 2j + 1 are gate and up of column j, so any shard has both.

    forward     c[j] = act(x[2j]) * x[2j + 1], x the sum of blocks plus bias            [pre = x, only when asked for]
    backward    c[2j], c[2j + 1] = gradients of gate and up, from the sum of blocks of the gradient of act(gate) * up

One pass over memory each, where torch's strided operations take two and five.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ndtp_kernels.triton_code.epilogue import activation, activation_gradient


@triton.jit
def pairs_kernel(
    X,  # [num_blocks, M, 2 N], backward [num_blocks, M, N]
    C,  # [M, N], backward [M, 2 N]
    aux,  # backward: what forward kept, [M, 2 N]
    pre,
    bias,
    M,
    N,  # pairs
    num_blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACT: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) % tiles_n * BLOCK_N
    one, both = first + tl.arange(0, BLOCK_N), 2 * first + tl.arange(0, 2 * BLOCK_N)
    rows = tl.cast(m, tl.int64)[:, None]
    one_mask, both_mask = (m < M)[:, None] & (one < N)[None, :], (m < M)[:, None] & (both < 2 * N)[None, :]
    one_at, both_at = rows * N + one[None, :], rows * (2 * N) + both[None, :]
    if aux is None:
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for part in range(num_blocks):
            start = tl.cast(part, tl.int64) * M * (2 * N)
            acc += tl.load(X + start + both_at, mask=both_mask, other=0.0).to(tl.float32)
        if bias is not None:
            acc += tl.load(bias + both, mask=both < 2 * N, other=0.0).to(tl.float32)[None, :]
        if pre is not None:
            tl.store(pre + both_at, acc.to(pre.dtype.element_ty), mask=both_mask)
        gate, up = acc.reshape(BLOCK_M, BLOCK_N, 2).split()
        tl.store(C + one_at, (activation(gate, ACT) * up).to(C.dtype.element_ty), mask=one_mask)
    else:
        grad = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for part in range(num_blocks):
            start = tl.cast(part, tl.int64) * M * N
            grad += tl.load(X + start + one_at, mask=one_mask, other=0.0).to(tl.float32)
        kept = tl.load(aux + both_at, mask=both_mask, other=0.0).to(tl.float32)
        gate, up = kept.reshape(BLOCK_M, BLOCK_N, 2).split()
        c = tl.join(grad * up * activation_gradient(gate, ACT), grad * activation(gate, ACT))
        tl.store(C + both_at, c.reshape(BLOCK_M, 2 * BLOCK_N).to(C.dtype.element_ty), mask=both_mask)

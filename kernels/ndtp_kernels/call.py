"""The tensors of one product as the kernels address them, and the problem that they pose to the choice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ndtp_kernels.choice.problem import Problem
from ndtp_kernels.operands import Matrix, fold_batch_into_rows, merge_batch


@dataclass
class GemmCall:
    """The tensors of one product.  Backward reads a pre-activation, `aux`, that lies as C does; forward keeps `pre`."""

    a: Tensor
    b: Tensor
    c: Tensor
    view_a: Matrix
    view_b: Matrix
    view_c: Matrix
    aux: Tensor | None = None
    pre: Tensor | None = None
    bias: Tensor | None = None
    activation: str = "none"
    accumulate: bool = False
    sms_to_leave: int = 0
    made: list[Tensor] = field(default_factory=list)  # scratch of its launches

    def scratch(self, shape: tuple[int, ...]) -> Tensor:
        """fp32 memory that a launch fills for another one."""
        self.made.append(self.c.new_empty(shape, dtype=torch.float32))
        return self.made[-1]

    def __post_init__(self) -> None:
        batch = self.view_c.batch
        a, b, c = merge_batch([view.broadcast(batch) for view in (self.view_a, self.view_b, self.view_c)])
        self.view_a, self.view_b, self.view_c = fold_batch_into_rows(a, b, c)

    @property
    def batch_levels(self) -> int:
        return len(self.view_c.batch)

    @property
    def batch(self) -> int:
        return math.prod(self.view_c.batch)

    @property
    def backward(self) -> bool:
        return self.aux is not None

    @property
    def fused_passes(self) -> int:
        """Passes over C that torch needs after its product: an activation, and the bias of other than a matrix."""
        joins = self.batch_levels > 0 or self.view_c.blocked > 0  # else the bias is in the library's own epilogue
        return (self.activation != "none") + (self.bias is not None and joins)

    def problem(self) -> Problem:
        """Return the facts that the choice of a configuration may depend on."""
        a, b, c = self.view_a, self.view_b, self.view_c
        kind = "plain"
        if self.backward:
            kind = "backward"
        elif self.bias is not None or self.activation != "none" or self.pre is not None:
            kind = "epilogue"
        elif self.accumulate:
            kind = "wgrad"
        elif a.blocked or b.blocked or c.blocked:
            kind = "blocks"
        touched = (self.aux, self.pre, self.c if self.accumulate else None)
        dtype = str(self.a.dtype).removeprefix("torch.")
        copied = (a.blocked != 0) * a.rows * a.cols + (b.blocked != 0) * b.rows * b.cols
        return Problem(
            m=a.rows,
            n=b.cols,
            k=a.cols,
            dtype=dtype,
            batch=self.batch,
            out_bytes=self.c.element_size(),
            kind=kind,
            layout=("n" if a.row_major else "t") + ("n" if b.row_major else "t"),
            tma=self.batch_levels <= 1 and describable(a, self.a) and describable(b, self.b),
            blocks=(
                a.block * (a.blocked == 1),
                math.gcd(b.block * (b.blocked == 2), c.block * (c.blocked == 2)),
                math.gcd(a.block * (a.blocked == 2), b.block * (b.blocked == 1)),
            ),
            torch_passes=self.fused_passes + self.accumulate,
            epilogue_bytes=sum(t.element_size() for t in touched if t is not None),
            copied_elements=self.batch * (copied + (c.blocked != 0) * c.rows * c.cols),
            sms_to_leave=self.sms_to_leave,
        )


def describable(view: Matrix, *tensors: Tensor | None) -> bool:
    """Return whether a tensor descriptor can take the operand: one unit stride, the rest in multiples of 16 bytes."""
    strides = (*view.batch_strides, *((view.block_stride,) if view.blocked else ()))
    if view.row_major:
        strides += (view.stride_row,)
    elif view.stride_row == 1:
        strides += (view.stride_col,)
    else:
        return False
    if view.rows * view.cols == 0:
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        if any(stride * tensor.element_size() % 16 for stride in strides):
            return False
        if tensor.device.type != "meta" and tensor.data_ptr() % 16:
            return False
    # Of a single row the stride means nothing to us, but TMA wants a valid one.
    return all(stride > 0 for stride in strides[len(view.batch_strides) :])

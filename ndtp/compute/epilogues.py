"""Epilogues of a product on one rank: activations, and the sum of the blocks that an all-to-all leaves.

One interface, two implementations, as for the products themselves (`ndtp.compute.gemm`): torch's operations, and the
fused kernels of `ndtp_kernels`.  No autograd: backward is called by name, with torch's own formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ndtp_kernels import Options

aten = torch.ops.aten


class Activation(NamedTuple):
    """Functions of tensors and `out=None`: where to put the result, contiguous and of its shape and dtype."""

    forward: Callable[..., Tensor]  # pre [.., width * N] -> activated [.., N]
    backward: Callable[..., Tensor]  # (gradient of activated, pre) -> gradient of pre
    kernel: str | None  # what `ndtp_kernels` calls it, or the gate; None where torch computes it there too
    width: int = 1  # features that go in for each that comes out


def _aten(operation: Any, *constants: float, **options: Any) -> Callable[..., Tensor]:
    """An operation of torch's, which calls where its result goes "out", or "grad_input" in backward."""
    name = next(name for name in ("grad_input", "out") if name in operation.overloads())

    def run(*tensors: Tensor, out: Tensor | None = None) -> Tensor:
        into = {} if out is None else {name: out}
        return operation(*tensors, *constants, **options, **into)  # type: ignore[no-any-return]

    return run


def _quick_gelu(pre: Tensor, out: Tensor | None = None) -> Tensor:
    wide = pre.to(torch.promote_types(pre.dtype, torch.float32))
    return put((wide * torch.sigmoid(1.702 * wide)).to(pre.dtype), out)


def _quick_gelu_backward(grad: Tensor, pre: Tensor, out: Tensor | None = None) -> Tensor:
    wide = torch.promote_types(pre.dtype, torch.float32)
    x, upstream = pre.to(wide), grad.to(wide)
    part = torch.sigmoid(1.702 * x)
    return put((aten.sigmoid_backward(upstream * x, part) * 1.702 + upstream * part).to(pre.dtype), out)


def put(result: Tensor, out: Tensor | None = None) -> Tensor:
    return result if out is None else out.copy_(result)


_tanh_backward, _sigmoid_backward = _aten(aten.tanh_backward), _aten(aten.sigmoid_backward)
ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(_aten(aten.gelu), _aten(aten.gelu_backward), "gelu"),
    "gelu_tanh": Activation(
        _aten(aten.gelu, approximate="tanh"), _aten(aten.gelu_backward, approximate="tanh"), "gelu_tanh"
    ),
    "relu": Activation(_aten(aten.relu), _aten(aten.threshold_backward, 0), "relu"),
    # Primer (So et al. 2021)
    "squared_relu": Activation(
        lambda pre, out=None: torch.square(F.relu(pre), out=out),
        lambda grad, pre, out=None: torch.mul(grad, F.relu(pre).mul_(2), out=out),
        "relu2",
    ),
    "silu": Activation(_aten(aten.silu), _aten(aten.silu_backward), "silu"),
    "tanh": Activation(torch.tanh, lambda grad, pre, out=None: _tanh_backward(grad, pre.tanh(), out=out), "tanh"),
    "sigmoid": Activation(
        torch.sigmoid, lambda grad, pre, out=None: _sigmoid_backward(grad, pre.sigmoid(), out=out), "sigmoid"
    ),
    "identity": Activation(put, lambda grad, pre, out=None: put(grad, out), "none"),
    "quick_gelu": Activation(_quick_gelu, _quick_gelu_backward, None),
    "mish": Activation(_aten(aten.mish), lambda grad, pre, out=None: put(aten.mish_backward(grad, pre), out), None),
    "relu6": Activation(_aten(aten.hardtanh, 0, 6), _aten(aten.hardtanh_backward, 0, 6), None),
    "hardswish": Activation(_aten(aten.hardswish), _aten(aten.hardswish_backward), None),
    "leaky_relu": Activation(_aten(aten.leaky_relu, 0.01), _aten(aten.leaky_relu_backward, 0.01, False), None),
}


def _gated(gate: Activation) -> Activation:
    """`gate(pre[.., 0::2]) * pre[.., 1::2]`: gate and up take turns, so that any shard of the features has both."""

    def forward(pre: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(gate.forward(pre[..., 0::2]), pre[..., 1::2], out=out)

    def backward(grad: Tensor, pre: Tensor, out: Tensor | None = None) -> Tensor:
        gates, ups = pre[..., 0::2], pre[..., 1::2]
        pairs = None if out is None else out.unflatten(-1, (-1, 2))
        return torch.stack((gate.backward(grad * ups, gates), grad * gate.forward(gates)), -1, out=pairs).flatten(-2)

    return Activation(forward, backward, gate.kernel, width=2)


# Shazeer 2020, "GLU Variants Improve Transformer".
GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "glu": "sigmoid"}
GATES |= {f"gated_{name}": name for name in ACTIVATIONS if name not in GATES.values()}
ACTIVATIONS |= {name: _gated(ACTIVATIONS[gate]) for name, gate in GATES.items()}


class TorchEpilogues:
    """Epilogues by torch's operations. Sums of blocks are fp32 inside.

    pre      [.., N]          pre-activation
    bias     [N]
    blocks   [ranks, .., N]   blocks of partial sums, in the order of the ranks

    Results have the dtype of their operands, and may be the argument itself where there is nothing to do.
    """

    def activate(self, pre: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        """The activation `name` of `pre`, in its dtype; a gated one leaves half of the columns.

        Args:
            out: where to put it; contiguous.
        """
        return ACTIVATIONS[name].forward(pre, out=out)

    def activate_backward(self, grad: Tensor, pre: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        """The gradient of `pre`, from that of `activate(pre, name)`."""
        return ACTIVATIONS[name].backward(grad, pre, out=out)

    def fuses(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether what comes before an activation (a sum of blocks, a bias) is one pass over memory with it."""
        return False

    def finish(
        self, blocks: Tensor, bias: Tensor | None, name: str, keep: bool, out: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """(pre, activated): the sum of the blocks plus bias, None unless it is to be kept; and its activation."""
        pre = summed_up(blocks)
        pre = pre if bias is None else pre + bias
        return pre if keep else None, ACTIVATIONS[name].forward(pre, out=out)

    def finish_backward(self, blocks: Tensor, pre: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        """The gradient of `pre`, from blocks of that of `activate(pre, name)`."""
        return ACTIVATIONS[name].backward(summed_up(blocks), pre, out=out)


class KernelEpilogues(TorchEpilogues):
    """One pass over memory each, by `ndtp_kernels`: Triton on a GPU, torch where a kernel cannot run."""

    options: Options

    def activate(self, pre: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        return self.finish(pre[None], None, name, False, out)[1]

    def activate_backward(self, grad: Tensor, pre: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        return self.finish_backward(grad[None], pre, name, out)

    def fuses(self, name: str, dtype: torch.dtype) -> bool:
        return ACTIVATIONS[name].kernel is not None and dtype is not torch.float64

    def finish(
        self, blocks: Tensor, bias: Tensor | None, name: str, keep: bool, out: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        import ndtp_kernels

        kernel = ACTIVATIONS[name].kernel
        if kernel is None:
            return super().finish(blocks, bias, name, keep, out)
        done = ndtp_kernels.reduce_blocks(
            blocks, bias, activation=kernel, pairs=ACTIVATIONS[name].width == 2, out=out,
            return_preactivation=keep, backend=self.options.backend,
        )  # fmt: skip
        return (done.pre, done.c) if keep else (None, done)

    def finish_backward(self, blocks: Tensor, pre: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        import ndtp_kernels

        kernel = ACTIVATIONS[name].kernel
        if kernel is None:
            return super().finish_backward(blocks, pre, name, out)
        return ndtp_kernels.reduce_blocks_backward(
            blocks, pre, activation=kernel, pairs=ACTIVATIONS[name].width == 2, out=out,
            backend=self.options.backend,
        )  # fmt: skip


def summed_up(blocks: Tensor) -> Tensor:
    """The sum of the blocks, in fp32 or wider inside, in the dtype of the blocks."""
    if blocks.shape[0] == 1:
        return blocks[0]
    return blocks.sum(0, dtype=torch.promote_types(blocks.dtype, torch.float32)).to(blocks.dtype)

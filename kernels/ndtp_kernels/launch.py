"""The way from tensors to a kernel launch: layout, configuration, arguments. Triton is imported at the first launch."""
# ruff: noqa: C408 (argument lists read better as calls)

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndtp_kernels.call import GemmCall, describable
from ndtp_kernels.choice.chips import INTERPRETER, Chip, detect
from ndtp_kernels.choice.problem import Config
from ndtp_kernels.errors import warn_once
from ndtp_kernels.operands import Matrix

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
REDUCE_TILE = (16, 256)
VISITED = 2  # tiles an SM that programs which come and go shall take, beyond what the left SMs do


@dataclass
class Launch:
    """A kernel with all its arguments, in order; `aot` compiles what `run` runs."""

    kernel: Any
    arguments: dict[str, Any]
    constants: dict[str, Any]
    grid: int
    options: dict[str, Any] = field(default_factory=dict)
    compiled: Any = None  # what Triton made of it; None before it has run, and in the interpreter

    def run(self) -> None:
        if self.grid:
            self.compiled = self.kernel[(self.grid,)](**self.arguments, **self.constants, **self.options)

    def again(self) -> Callable[..., Any]:
        """A function that launches it, once it has run: of all arguments in order, and of `stream`."""
        if not self.grid:
            return _nothing
        return self.kernel[(self.grid,)] if self.compiled is None else self.compiled[(self.grid, 1, 1)]


def _nothing(*_: object, **__: object) -> None:
    """A launch without tiles."""


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter (TRITON_INTERPRET was set when they were first imported)."""
    import triton

    from ndtp_kernels.triton_code.gemm import gemm_kernel

    return not isinstance(gemm_kernel, triton.JITFunction)


def triton_chip(op: str, tensor: Tensor, backend: str) -> Chip | None:
    """The chip whose kernels can take `tensor`; None where torch has to do it."""
    if backend == "torch":
        return None
    reason = ""
    chip: Chip | None = None
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    elif tensor.dtype not in DTYPES:
        reason = f"no kernel takes {tensor.dtype}"
    elif tensor.device.type == "cuda":
        chip = detect(tensor.device)
    elif tensor.device.type == "cpu" and backend == "triton":
        if interpreted():
            return INTERPRETER
        reason = "the tensors are on a CPU and Triton's interpreter is off"
    if backend == "triton" and reason:
        warn_once(f"{op}: the Triton kernel was asked for and torch runs instead: {reason}")
    return chip


def gemm_launches(call: GemmCall, config: Config, chip: Chip) -> list[Launch]:
    """The launches of a product, one or, with split K, two."""
    split = config.split_k
    if split == 1:
        return [_gemm(call, config, chip)]
    a, b, c = call.view_a, call.view_b, call.view_c
    space = call.scratch((split, call.batch, a.rows, b.cols))
    view = Matrix(a.rows, b.cols, b.cols, 1, c.batch, _contiguous_batch(c.batch, a.rows * b.cols))
    part = replace(call, c=space, view_c=view, aux=None, pre=None, bias=None, activation="none", accumulate=False)
    return [_gemm(part, config, chip), reduce_launch(call, space, view)]


def _contiguous_batch(batch: Sequence[int], size: int) -> tuple[int, ...]:
    strides = []
    for length in reversed(batch):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))


class Shares(NamedTuple):
    """The assignment of tiles to programs: `residents` programs stay, for tiles 0 .. kept; the others take one tile
    each.
    """

    grid: int
    residents: int
    kept: int


def share_out(tiles: int, config: Config, chip: Chip, sms_to_leave: int) -> Shares:
    """Programs of a kernel, and their tiles.

    Programs of a pointer kernel take a tile each.  Those of a TMA kernel stay on their SM and load the next tile while
    they store the last one; but then nothing else gets onto that SM until they are all done.  Where `sms_to_leave` SMs
    are to be had by collectives, so many programs less stay, and some tiles at the end are left to programs that take
    one tile and go: the hardware gives them to whichever SM is free, and an SM to a collective of higher priority at
    the end of a tile.  So the tiles are balanced however long the collective holds its SMs, or if there is none.
    """
    if config.kernel == "pointer":
        return Shares(tiles, 0, 0)
    if not sms_to_leave:
        grid = min(tiles, chip.num_sms * config.ctas_per_sm)
        return Shares(grid, grid, tiles)
    residents = chip.num_sms - sms_to_leave
    each = tiles // chip.num_sms - VISITED
    # Several programs an SM would be spread over all of them: no SM would be left.
    if residents <= 0 or each <= 1 or config.ctas_per_sm > 1:
        return Shares(tiles, 0, 0)
    kept = residents * each
    return Shares(residents + tiles - kept, residents, kept)


def _gemm(call: GemmCall, config: Config, chip: Chip) -> Launch:
    from ndtp_kernels.triton_code.gemm import gemm_kernel

    a, b, c = call.view_a, call.view_b, call.view_c
    m, n, k, batch = a.rows, b.cols, a.cols, call.batch
    tma = config.kernel == "tma"
    k_run = math.gcd(a.block * (a.blocked == 2), b.block * (b.blocked == 1)) or max(k, 1)
    tiles = batch * -(-m // config.block_m) * -(-n // config.block_n) * config.split_k
    shared = share_out(tiles, config, chip, call.sms_to_leave)
    plain = batch == 1 and not call.view_c.batch
    tma_c = tma and c.stride_col == 1 and describable(c, call.c) and config.split_k == 1
    emulate = chip.target == "interpreter"
    arguments: dict[str, Any] = dict(
        A=call.a, B=call.b, C=call.c, aux=call.aux, pre=call.pre, bias=call.bias, M=m, N=n, K=k, batch=batch,
        batch_inner=c.batch[-1] if c.batch else 1, k_run=k_run,
        sa_outer=a.outer_inner[0], sa_inner=a.outer_inner[1], sa_m=a.stride_row, sa_k=a.stride_col,
        sa_block=a.block_stride, a_block=a.block,
        sb_outer=b.outer_inner[0], sb_inner=b.outer_inner[1], sb_k=b.stride_row, sb_n=b.stride_col,
        sb_block=b.block_stride, b_block=b.block,
        sc_outer=c.outer_inner[0], sc_inner=c.outer_inner[1], sc_m=c.stride_row, sc_n=c.stride_col,
        sc_block=c.block_stride, c_block=c.block,
        sc_split=batch * m * n if config.split_k > 1 else 0,
        residents=shared.residents, kept=shared.kept,
    )  # fmt: skip
    constants: dict[str, Any] = dict(
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        SPLIT=config.split_k, TMA=tma, TMA_C=tma_c,
        RANK_A=2 if plain and not a.blocked else 4, RANK_B=2 if plain and not b.blocked else 4,
        RANK_C=2 if plain and not c.blocked else 4, A_ROW_MAJOR=a.row_major, B_ROW_MAJOR=b.row_major,
        A_BATCHED=any(a.batch_strides), B_BATCHED=any(b.batch_strides),
        A_BLOCKED=a.blocked, B_BLOCKED=b.blocked, C_BLOCKED=c.blocked,
        EVEN_M=m % config.block_m == 0, EVEN_N=n % config.block_n == 0, EVEN_K=k_run % config.block_k == 0,
        ACT=call.activation, ACCUMULATE=call.accumulate,
        UPCAST=emulate and call.a.dtype is torch.bfloat16,
        # The tile loop and the K loop are joined, so that the next tile's loads start in this one's epilogue.
        SUBTILE=config.subtile, FLATTEN=tma and not config.warp_specialize and chip.target.startswith("sm_9"),
        SPECIALIZE=config.warp_specialize,
    )  # fmt: skip
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return Launch(gemm_kernel, arguments, constants, shared.grid, {} if emulate else options)


def reduce_launch(
    call: GemmCall,
    x: Tensor,
    view_x: Matrix,
    num_blocks: int | None = None,
    part_stride: int | None = None,
) -> Launch:
    """Add blocks of partial sums and finish them with `call`'s epilogue; by default the blocks are x[0], x[1], .."""
    from ndtp_kernels.triton_code.reduce import reduce_kernel

    c = call.view_c
    m, n, batch = view_x.rows, view_x.cols, call.batch
    block_m, block_n = REDUCE_TILE
    tiles_m = -(-m // block_m)
    arguments: dict[str, Any] = dict(
        X=x, C=call.c, aux=call.aux, pre=call.pre, bias=call.bias, M=m, N=n,
        num_blocks=x.shape[0] if num_blocks is None else num_blocks,
        batch_inner=c.batch[-1] if c.batch else 1, sx_part=x.stride(0) if part_stride is None else part_stride,
        sx_outer=view_x.outer_inner[0], sx_inner=view_x.outer_inner[1], sx_m=view_x.stride_row, sx_n=view_x.stride_col,
        sc_outer=c.outer_inner[0], sc_inner=c.outer_inner[1], sc_m=c.stride_row, sc_n=c.stride_col,
        sc_block=c.block_stride, c_block=c.block,
    )  # fmt: skip
    constants = dict(
        BLOCK_M=block_m, BLOCK_N=block_n, C_BLOCKED=c.blocked, ACT=call.activation, ACCUMULATE=call.accumulate,
    )  # fmt: skip
    grid = batch * tiles_m * -(-n // block_n)
    return Launch(reduce_kernel, arguments, constants, grid, {} if interpreted() else {"num_warps": 8})


def pairs_launch(
    x: Tensor, c: Tensor, aux: Tensor | None, pre: Tensor | None, bias: Tensor | None, m: int, n: int, activation: str
) -> Launch:
    """A gated activation of pairs of columns, forward or, with `aux`, backward; all tensors are contiguous."""
    from ndtp_kernels.triton_code.pairs import pairs_kernel

    block_m, block_n = REDUCE_TILE[0], REDUCE_TILE[1] // 2
    arguments: dict[str, Any] = dict(X=x, C=c, aux=aux, pre=pre, bias=bias, M=m, N=n, num_blocks=x.shape[0])
    constants = dict(BLOCK_M=block_m, BLOCK_N=block_n, ACT=activation)
    grid = -(-m // block_m) * -(-n // block_n)
    return Launch(pairs_kernel, arguments, constants, grid, {} if interpreted() else {"num_warps": 8})


def allocate_on(device: torch.device) -> Callable[[int, int, int | None], Tensor]:
    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, device=device, dtype=torch.int8)

    return allocate


def refused(error: Exception) -> bool:
    """Return whether Triton raised `error` before anything ran: the kernel does not compile, or does not fit."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    # The compiler's passes fail with a plain RuntimeError.
    return isinstance(error, (OutOfResources, PTXASError, CompilationError)) or "PassManager::run" in str(error)


def ran(op: str, launches: Sequence[Launch], device: torch.device, config: Config) -> bool:
    """Launch; False, and a warning, if Triton refuses the configuration on this device."""
    try:
        run(launches, device, config.kernel == "tma")
    except Exception as error:
        if not refused(error):
            raise
        warn_once(f"{op}: {config} does not run here, torch does instead: {str(error).splitlines()[0]}")
        return False
    return True


def run(launches: Sequence[Launch], device: torch.device, needs_descriptors: bool) -> None:
    """Launch on the device's current stream."""
    if needs_descriptors and device.type == "cuda":
        import triton

        # A context variable: autograd's threads do not inherit it, so it is set at every launch.
        triton.set_allocator(allocate_on(device))
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):
            for launch in launches:
                launch.run()
        return
    for launch in launches:
        launch.run()

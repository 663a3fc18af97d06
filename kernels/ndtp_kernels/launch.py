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
from ndtp_kernels.form import FP8
from ndtp_kernels.operands import Matrix

DTYPES = (torch.float16, torch.bfloat16, torch.float32, FP8)
REDUCE_TILE = (16, 256)
VISITED = 2  # tiles an SM that programs which come and go shall take, beyond what the left SMs do
PROMOTED_EVERY = 512  # elements of K: a truncation of 2^-13 for each 32 of them stays under a rounding to bf16


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
        if tensor.dtype == torch.float8_e4m3fn and chip is not None and not chip.has_fp8:
            reason, chip = f"{chip.name} ({chip.target}) has no e4m3 products", None
    elif tensor.device.type == "cpu" and backend == "triton":
        if interpreted():
            return INTERPRETER
        reason = "the tensors are on a CPU and Triton's interpreter is off"
    if backend == "triton" and reason:
        warn_once(f"{op}: the Triton kernel was asked for and torch runs instead: {reason}")
    return chip


def gemm_launches(call: GemmCall, config: Config, chip: Chip) -> tuple[list[Launch], list[Tensor | None]]:
    """The launches of a product, one or, with split K, two; and the column sums (2) and row sums they leave, or None.

    Column sums come as one row per tile, to be added up by the caller.
    """
    split = config.split_k
    if split == 1:
        launch, sums, rows = _gemm(call, config, chip)
        return [launch], [*sums, rows]
    a, b, c = call.view_a, call.view_b, call.view_c
    size = (split, call.batch, a.rows, b.cols)
    space, *space2 = (call.scratch(size) for _ in range(call.products))
    view = Matrix(a.rows, b.cols, b.cols, 1, c.batch, _contiguous_batch(c.batch, a.rows * b.cols))
    part = replace_call(
        call,
        c=space,
        c2=space2[0] if space2 else None,
        view_c=view,
        view_aux=None,
        **dict.fromkeys(("aux", "aux2", "pre", "pre2", "bias", "bias2")),
        activation="none",
        gated=False,
        backward=False,
        accumulate=False,
        column_sums=False,
    )
    launch, _, rows = _gemm(part, config, chip)
    reduction, sums = reduce_launch(call, space, space2[0] if space2 else None, view)
    return [launch, reduction], [*sums, rows]


def replace_call(call: GemmCall, **changes: Any) -> GemmCall:
    """A copy of a call whose views are already merged."""
    return replace(call, **changes)


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


def _gluon(call: GemmCall, config: Config, chip: Chip) -> Launch:
    a, b, c = call.view_a, call.view_b, call.view_c
    m, n = a.rows, b.cols
    options: dict[str, Any] = {"num_warps": config.num_warps}
    if chip.target == "sm_90":
        from ndtp_kernels.triton_code.hopper import hopper_kernel as kernel
    else:
        from ndtp_kernels.triton_code.blackwell import blackwell_kernel as kernel

        options["maxnreg"] = 128  # of eight warps, two of which have work beside the four that store
    shared = share_out(-(-m // config.block_m) * -(-n // config.block_n), config, chip, call.sms_to_leave)
    arguments: dict[str, Any] = dict(
        A=call.a, B=call.b, C=call.c, aux=call.aux, pre=call.pre, bias=call.bias, M=m, N=n, K=a.cols,
        sa=a.stride_row if a.row_major else a.stride_col, sb=b.stride_row if b.row_major else b.stride_col,
        sc=c.stride_row, sx=(call.view_aux or c).stride_row, residents=shared.residents, kept=shared.kept,
    )  # fmt: skip
    constants: dict[str, Any] = dict(
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        STAGES=config.num_stages, SUBTILE=config.subtile, A_ROW_MAJOR=a.row_major, B_ROW_MAJOR=b.row_major,
        ACT=call.activation,
    )  # fmt: skip
    return Launch(kernel, arguments, constants, shared.grid, options)


def _gemm(call: GemmCall, config: Config, chip: Chip) -> tuple[Launch, list[Tensor | None], Tensor | None]:
    if config.kernel == "gluon":
        return _gluon(call, config, chip), [None, None], None
    from ndtp_kernels.triton_code.gemm import gemm_kernel

    a, b, c = call.view_a, call.view_b, call.view_c
    x = call.view_aux or c
    m, n, k, batch = a.rows, b.cols, a.cols, call.batch
    tma = config.kernel == "tma"
    k_run = math.gcd(a.block * (a.blocked == 2), b.block * (b.blocked == 1)) or max(k, 1)
    tiles_m = -(-m // config.block_m)
    tiles = batch * tiles_m * -(-n // config.block_n) * config.split_k
    shared = share_out(tiles, config, chip, call.sms_to_leave)
    plain = batch == 1 and not call.view_c.batch
    tma_c = (
        tma and c.stride_col == 1 and describable(c, call.c, call.c2 if call.backward else None) and config.split_k == 1
    )
    sums: list[Tensor | None] = [None, None]
    if call.column_sums:
        sums = [call.scratch((batch * tiles_m, n)), call.scratch((batch * tiles_m, n)) if call.gated else None]
    row_sums = None
    if call.row_sums:
        row_sums = call.scratch((batch, config.split_k, m))
    emulate = chip.target == "interpreter"
    arguments: dict[str, Any] = dict(
        A=call.a, B=call.b, B2=call.b2, C=call.c, C2=call.c2, aux=call.aux, aux2=call.aux2, pre=call.pre,
        pre2=call.pre2, bias=call.bias, bias2=call.bias2, scale_a=call.scale_a, scale_b=call.scale_b,
        scale_b2=call.scale_b2, sums=sums[0], sums2=sums[1], row_sums=row_sums, M=m, N=n, K=k, batch=batch,
        batch_inner=c.batch[-1] if c.batch else 1, k_run=k_run,
        sa_outer=a.outer_inner[0], sa_inner=a.outer_inner[1], sa_m=a.stride_row, sa_k=a.stride_col,
        sa_block=a.block_stride, a_block=a.block,
        sb_outer=b.outer_inner[0], sb_inner=b.outer_inner[1], sb_k=b.stride_row, sb_n=b.stride_col,
        sb_block=b.block_stride, b_block=b.block,
        sc_outer=c.outer_inner[0], sc_inner=c.outer_inner[1], sc_m=c.stride_row, sc_n=c.stride_col,
        sc_block=c.block_stride, c_block=c.block,
        sx_outer=x.outer_inner[0], sx_inner=x.outer_inner[1], sx_m=x.stride_row, sx_n=x.stride_col,
        sx_block=x.block_stride, sc_split=batch * m * n if config.split_k > 1 else 0,
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
        ACT=call.activation, GATED=call.gated, BACKWARD=call.backward, ACCUMULATE=call.accumulate,
        SCALE_A_ROWS=call.scale_a is not None and call.scale_a.numel() > 1,
        SCALE_B_COLS=call.scale_b is not None and call.scale_b.numel() > 1,
        PRECISION=call.precision,
        PROMOTE=promotion(call, config, chip),
        UPCAST=emulate and call.a.dtype in (torch.bfloat16, FP8),
        SUBTILE=config.subtile, FLATTEN=tma and not config.warp_specialize and flatten_helps(call, config, chip),
        SPECIALIZE=config.warp_specialize,
    )  # fmt: skip
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return Launch(gemm_kernel, arguments, constants, shared.grid, {} if emulate else options), sums, row_sums


def promotion(call: GemmCall, config: Config, chip: Chip) -> int:
    """Steps of K after which fp8 sums are added up in fp32; 0 where the tensor cores' own sums are taken to the end.

    The tensor cores of Ada and Hopper keep 13 bits behind the point of fp8 sums; Blackwell keeps all of fp32.
    """
    if call.a.dtype != FP8 or call.fast_accumulation or chip.target in ("sm_100", "sm_103"):
        return 0
    return max(2, PROMOTED_EVERY // config.block_k)


def flatten_helps(call: GemmCall, config: Config, chip: Chip) -> bool:
    """Return whether the tile loop and the K loop are joined, so that the next tile's loads start in this one's
    epilogue.

    Of single products only, whose sums nothing but the product touches: else ptxas (C7514, C7515) lets every wgmma wait
    for the one before.
    """
    return chip.target.startswith("sm_9") and call.products == 1 and not promotion(call, config, chip)


def reduce_launch(
    call: GemmCall,
    x: Tensor,
    x2: Tensor | None,
    view_x: Matrix,
    num_blocks: int | None = None,
    part_stride: int | None = None,
) -> tuple[Launch, list[Tensor | None]]:
    """Add blocks of partial sums and finish them with `call`'s epilogue; by default the blocks are x[0], x[1], .."""
    from ndtp_kernels.triton_code.reduce import reduce_kernel

    c = call.view_c
    aux = call.view_aux or c
    m, n, batch = view_x.rows, view_x.cols, call.batch
    block_m, block_n = REDUCE_TILE
    tiles_m = -(-m // block_m)
    sums: list[Tensor | None] = [None, None]
    if call.column_sums:
        sums = [call.scratch((batch * tiles_m, n)), call.scratch((batch * tiles_m, n)) if call.gated else None]
    arguments: dict[str, Any] = dict(
        X=x, X2=x2, C=call.c, C2=call.c2, aux=call.aux, aux2=call.aux2, pre=call.pre, pre2=call.pre2,
        bias=call.bias, bias2=call.bias2, sums=sums[0], sums2=sums[1], M=m, N=n,
        num_blocks=x.shape[0] if num_blocks is None else num_blocks,
        batch_inner=c.batch[-1] if c.batch else 1, sx_part=x.stride(0) if part_stride is None else part_stride,
        sx_outer=view_x.outer_inner[0], sx_inner=view_x.outer_inner[1], sx_m=view_x.stride_row, sx_n=view_x.stride_col,
        sc_outer=c.outer_inner[0], sc_inner=c.outer_inner[1], sc_m=c.stride_row, sc_n=c.stride_col,
        sc_block=c.block_stride, c_block=c.block,
        sa_outer=aux.outer_inner[0], sa_inner=aux.outer_inner[1], sa_m=aux.stride_row, sa_n=aux.stride_col,
        sa_block=aux.block_stride,
    )  # fmt: skip
    constants = dict(
        BLOCK_M=block_m, BLOCK_N=block_n, C_BLOCKED=c.blocked, ACT=call.activation, GATED=call.gated,
        BACKWARD=call.backward, ACCUMULATE=call.accumulate,
    )  # fmt: skip
    grid = batch * tiles_m * -(-n // block_n)
    return Launch(reduce_kernel, arguments, constants, grid, {} if interpreted() else {"num_warps": 8}), sums


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

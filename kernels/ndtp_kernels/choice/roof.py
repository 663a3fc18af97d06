"""An estimate of a configuration's time: a static model of bytes, flops and waves.

Not a simulator: it has to rank configurations.  It knows that an idle SM in the last wave is lost, that small tiles
read their operands more often, that a tile has a beginning and an end in which the tensor cores wait, that split-K
writes and reads its partial sums, and that a product done by torch pays one pass over memory for each thing fused here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ndtp_kernels.choice.chips import Chip
from ndtp_kernels.choice.problem import Config, Problem

LAUNCH_SECONDS = 4e-6
TILE_SECONDS = (
    1.2e-6  # fill the pipeline, drain it, write the tile; half is hidden where a persistent block overlaps it
)
# Share of the library's rate that kernels are taken to reach at their best tile, without the roles of warps and the
# clusters that cuBLAS has on Hopper and Blackwell.  From published comparisons; not measured here.
REACH, REACH_OF = 0.90, {"sm_100": 0.70, "sm_103": 0.70}
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Roof:
    """The estimated cost of a problem with a configuration on a chip."""

    seconds: float
    flops: float
    memory_bytes: float
    tiles: int
    waves: float
    bound: str  # "compute" or "memory"

    @property
    def tflops(self) -> float:
        return self.flops / self.seconds / 1e12 if self.seconds else 0.0


def shared_bytes(problem: Problem, config: Config, chip: Chip) -> int:
    """An upper bound of a block's shared memory; `aot` compares it with the compiler's figure.

    The pipeline's stages; beside them, in a persistent kernel, the tile on its way to memory, twice where the epilogue
    turns other tensors into the layout of the sums; and scratch for barriers and sums over threads.
    """
    item = ITEM_BYTES[problem.dtype]
    tiles = config.block_m + config.block_n
    # AMD's pipeline keeps the newest stage in registers.
    held = config.num_stages - chip.target.startswith("gfx")
    pipeline = held * config.block_k * tiles * item
    staging = config.block_m * config.block_n // config.subtile * problem.out_bytes
    scratch = 8192 if problem.kind == "wgrad" else 1024
    if config.kernel == "pointer":
        return max(pipeline + scratch, staging)
    return pipeline + staging * (1 if problem.kind in ("plain", "blocks") else 2) + scratch


def tile_efficiency(config: Config, chip: Chip) -> float:
    """Share of the library's rate that a tile shape reaches: operand bytes through shared memory against flops."""
    if not chip.target.startswith("sm_9") and not chip.target.startswith("sm_10"):
        reach = 48.0  # mma.sync and mfma feed from registers: 128 x 128 is as good as it gets
    else:
        reach = 80.0  # 128 x 256
    intensity = config.block_m * config.block_n / (config.block_m + config.block_n)
    share = REACH_OF.get(chip.target, REACH) * min(1.0, intensity / reach) ** 0.35
    # The pointer kernel spends issue slots on addresses where TMA needs none.
    if chip.has_tma and config.kernel == "pointer":
        share *= 0.75
    return share


def estimate(problem: Problem, config: Config, chip: Chip) -> Roof:
    """Seconds, flops and bytes of `problem` with `config` on `chip`."""
    p = problem
    item, rate = ITEM_BYTES[p.dtype], chip.flops[p.dtype] or chip.flops["float32"]
    flops = 2.0 * p.batch * p.m * p.n * p.k
    compulsory = p.batch * (item * (p.m * p.k + p.n * p.k) + p.out_bytes * p.m * p.n)
    if config.kernel == "torch":
        return _estimate_torch(p, chip, flops, compulsory, item, rate)
    tiles = p.batch * cdiv(p.m, config.block_m) * cdiv(p.n, config.block_n) * config.split_k
    sms = max(1, chip.num_sms - p.sms_to_leave)
    waves = tiles / sms
    steps = cdiv(cdiv(p.k, config.block_k), config.split_k)
    tile_flops = 2.0 * config.block_m * config.block_n * config.block_k * steps
    tile_seconds = tile_flops / (rate / chip.num_sms * tile_efficiency(config, chip))
    overhead = TILE_SECONDS * (config.block_m * config.block_n) / (128 * 256)
    if config.warp_specialize:
        overhead *= 0.5
    compute = cdiv(tiles, sms) * (tile_seconds + overhead)
    extra = 0.0
    if config.split_k > 1:
        extra = 4.0 * p.batch * p.m * p.n * config.split_k * 2
    extra += p.epilogue_bytes * p.batch * p.m * p.n
    # Each wave reads the rows and columns that its tiles touch; grouping keeps most of it in L2.
    memory = (compulsory + extra) / chip.bandwidth
    seconds = max(compute, memory) + LAUNCH_SECONDS * (2 if config.split_k > 1 else 1)
    return Roof(seconds, flops, compulsory + extra, tiles, waves, "compute" if compute >= memory else "memory")


def _estimate_torch(p: Problem, chip: Chip, flops: float, compulsory: float, item: int, rate: float) -> Roof:
    """torch: a library GEMM that adapts its tiles to the shape, then one pass over memory for every fused step."""
    sms = max(1, chip.num_sms - p.sms_to_leave)
    tile = min(((bm, bn) for bm in (64, 128) for bn in (64, 128, 256)), key=lambda t: _wave_loss(p, t, sms))
    tiles = p.batch * cdiv(p.m, tile[0]) * cdiv(p.n, tile[1])
    loss = _wave_loss(p, tile, sms)
    memory = compulsory / chip.bandwidth
    compute = flops * loss / rate
    result = p.out_bytes * p.batch * p.m * p.n
    passes = p.torch_passes * 2.0 * result + p.copied_elements * 2.0 * item
    launches = p.torch_launches + p.torch_passes
    seconds = max(compute, memory) + passes / chip.bandwidth + LAUNCH_SECONDS * launches
    bound = "compute" if compute >= memory else "memory"
    return Roof(seconds, flops, compulsory + passes, tiles, tiles / sms, bound)


def _wave_loss(p: Problem, tile: tuple[int, int], sms: int) -> float:
    """Time against that of perfectly filled SMs; a short K dim is paid in prologues."""
    tiles = p.batch * cdiv(p.m, tile[0]) * cdiv(p.n, tile[1])
    if tiles == 0:
        return 1.0
    fill = cdiv(tiles, sms) * sms / tiles
    # A library splits K where there are too few tiles: half of what that could gain.
    if tiles < sms:
        fill = 1 + (fill - 1) / 2
    edge = (cdiv(p.m, tile[0]) * tile[0] / max(p.m, 1)) * (cdiv(p.n, tile[1]) * tile[1] / max(p.n, 1))
    small = (80.0 * (tile[0] + tile[1]) / (tile[0] * tile[1])) ** 0.35
    return fill * edge * max(1.0, small) * (1 + 40.0 / max(p.k, 1))

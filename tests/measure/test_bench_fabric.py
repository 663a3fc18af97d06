"""The emulated fabric moves the predicted bytes; on a GPU it runs, without one it says that it cannot."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import with_torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndtp

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
try:
    import fabric
finally:
    sys.path.remove(str(BENCH))


class Counting(fabric.Fabric):
    def transfer(self, kind, output, source, group):
        self.busy_ns[kind] = self.busy_ns.get(kind, 0) + fabric.received_bytes(kind, output, source, group.size())


def count_bytes():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=fabric.RANKS)
    sizes = tokens, hidden, inner = 64, 32, 128
    grids = list(ndtp.Grid.all(fabric.RANKS))
    for grid in grids:
        for chunks in (1, 2):
            step, counted = fabric.block(grid, chunks, sizes, "cpu"), Counting(None, 1)
            with counted.installed():
                step()
            mlp = ndtp.nn.MLP(hidden, inner, bias=False, mesh=ndtp.ProcessGrid(grid, device_type="cpu"), device="meta",
                               dtype=torch.bfloat16)  # fmt: skip
            assert counted.busy_ns == mlp.volume(tokens).by("collective"), (grid, chunks, counted.busy_ns)
    return len(grids)


def test_the_bytes_are_those_of_the_grid():
    """Every collective of a step passes through the fabric, with the bytes that the plan predicts."""
    assert with_torch(count_bytes) == 10


def test_durations_are_those_of_the_link():
    link = fabric.Link(bandwidth_gbs=50.0, latency_us=10.0, hop_us=2.0, efficiency={"reduce_scatter": 0.5})
    assert fabric.duration_ns(link, "all_gather", 50_000, 4) == 10_000 + 3 * 2_000 + 1_000
    assert fabric.duration_ns(link, "reduce_scatter", 50_000, 4) == 16_000 + 2_000
    x = torch.empty(8, 3)
    assert fabric.received_bytes("all_gather", x, x[:2], 4) == 4 * 18
    assert fabric.received_bytes("reduce_scatter", x[:2], x, 4) == 4 * 18
    assert fabric.received_bytes("all_reduce", x, x, 4) == 4 * 36


def test_host_time_of_a_chunk_is_a_slope():
    assert fabric.host_us({1: 0.5, 2: 0.6, 4: 0.8}) == pytest.approx(100 / fabric.PASSES)
    assert fabric.host_us({2: 1.0}) is None, "one point has no slope"


def test_the_copy_compiles_ahead_of_time_and_has_its_sm_to_itself(tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers, sizes = ("target", "source"), ("target_tiles", "source_tiles", "tiles", "duration_ns")
    signature = {**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(sizes, "i32"), "TILE": "constexpr"}
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(2)}
    source = ASTSource(fn=fabric.paced_copy, signature=signature, constexprs={"TILE": fabric.TILE}, attrs=attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fabric.WARPS})
    assert "globaltimer" in kernel.asm["ptx"] and "st.global" in kernel.asm["ptx"]
    (tmp_path / "copy.cubin").write_bytes(kernel.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [cuobjdump, "--dump-resource-usage", tmp_path / "copy.cubin"]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    assert registers * 32 * fabric.WARPS == 65536, "another block would fit on the SM as well"
    assert stack <= 64, "what does not fit is next to nothing"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert fabric.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none")
def test_on_a_gpu_every_grid_and_chunk_count_is_reported(tmp_path):
    out = tmp_path / "fabric.json"
    sizes = ("--tokens", 1024, "--hidden", 256, "--inner", 512, "--chunks", 1, 2, "--repetitions", 1, "--out", out)
    words = [sys.executable, BENCH / "fabric.py", *sizes]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0 and "EMULATION" in done.stdout, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert "EMULATION" in result["label"] and len(result["rows"]) == 10 * 2 * 2
    assert all(row["host_us"] is not None and row["step_ms"] > 0 for row in result["rows"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none")
def test_the_copy_copies():
    source = torch.randint(0, 2**30, (3 * fabric.TILE,), device="cuda", dtype=torch.int32)
    target = torch.zeros(7 * fabric.TILE, device="cuda", dtype=torch.int32)
    fabric.paced_copy[(4,)](target, source, 7, 3, 7, 100_000, TILE=fabric.TILE, num_warps=fabric.WARPS)
    assert torch.equal(target, source.repeat(3)[: 7 * fabric.TILE])

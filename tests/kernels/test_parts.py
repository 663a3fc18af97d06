"""Products part by part: as the compiler sees them, and on a GPU; what they compute is in interpreted/case_parts.py."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import triton
from ndtp_kernels import parts
from ndtp_kernels.triton_code import parts as code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

EVEN = ("rows", "N", "K", "sa_m", "sb_k", "sc_m")  # as a launch finds them
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(kernel, signature, constants, **options):
    given = {**signature, **dict.fromkeys(constants, "constexpr")}
    signature = {name: given[name] for name in kernel.arg_names}
    even = [i for i, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or (name in EVEN and kind == "i32")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in even}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def atomics(ptx, order, kind):
    """Where there is one of the whole system."""
    found = re.finditer(r"\batom\.[\w.]+", ptx)
    return [match.start() for match in found if {order, kind, "sys"} <= set(match[0].split("."))]


def stack_of(kernel):
    """Bytes that a thread spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return int(usage.stdout.split("STACK:")[1].split()[0])


@pytest.mark.parametrize("arriving", [True, False], ids=["arrivals", "departures"])
def test_a_product_compiles_with_the_waits_that_it_needs(arriving):
    """Tensor cores, no spills, and a flag that is read so that what came before it is seen, by the whole system."""
    pointers = {"A": "*bf16", "B": "*bf16", "C": "*bf16", "counts": "*i32"}
    sizes = ("rank", "ranks", "rows", "N", "K", "sa_m", "sb_k", "sc_m")
    constants = {
        "sa_k": 1, "sb_n": 1, "sc_n": 1,
        "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "ARRIVING": arriving, "PRECISION": "ieee", "UPCAST": False,
    }  # fmt: skip
    signature = {**pointers, **dict.fromkeys(sizes, "i32")}
    kernel = compiled(code.gemm_of_parts_kernel, signature, constants, num_warps=8, num_stages=3)
    ptx = kernel.asm["ptx"]
    assert "wgmma" in ptx and stack_of(kernel) == 0
    assert kernel.metadata.shared < 232448
    if arriving:
        assert atomics(ptx, "acquire", "cas")
    else:
        (counted,) = atomics(ptx, "release", "add")
        stored = ptx.rindex("st.global", 0, counted)
        assert stored < ptx.index("bar.sync", stored) < counted, "every thread has stored before one counts"


def test_signals_are_of_one_warp_and_of_the_whole_system():
    for kernel, order in ((code.put_signal_kernel, "release"), (code.take_signal_kernel, "acquire")):
        made = compiled(kernel, {"signal": "*i32"}, {}, num_warps=1)
        assert atomics(made.asm["ptx"], order, "cas") and made.metadata.num_warps == 1
        assert made.metadata.shared < 1024, "it fits beside a product"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_arrive_and_leave_on_a_device(dtype):
    """Copies on another stream, one after another and late; until then a part is NaN."""
    ranks, rows, k, n, rank = 4, 300, 520, 264, 2
    whole, b = (torch.randint(-2, 3, size, device="cuda").to(dtype) for size in ((ranks * rows, k), (k, n)))
    expected = whole.double() @ b.double()
    a, flags = torch.full_like(whole, torch.nan), torch.zeros(ranks, dtype=torch.int32, device="cuda")
    counts, taken = torch.zeros_like(flags), torch.full((ranks * rows, n), torch.nan, dtype=dtype, device="cuda")
    leaving = torch.full_like(taken, torch.nan)
    tiles = parts.tiles_of_part(whole, b, ranks)
    # CUDA loads a kernel at its first launch, which waits for all that runs: for a kernel that waits for this one, too.
    ready = torch.ones_like(flags)
    parts.gemm_of_arrivals(whole, b, ready, rank)
    parts.gemm_of_departures(whole, b, ready, rank)
    parts.wait_for(ready[0], 1)
    flags[0].fill_(0)
    torch.cuda.synchronize()
    copies = torch.cuda.Stream()
    copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        for distance in range(ranks):
            part = slice((rank + distance) % ranks * rows, ((rank + distance) % ranks + 1) * rows)
            torch.cuda._sleep(2_000_000)
            a[part].copy_(whole[part])
            flags[(rank + distance) % ranks].fill_(1)
    c = parts.gemm_of_arrivals(a, b, flags, rank)
    with torch.cuda.stream(copies):
        for distance in (1, 2, 3, 0):
            part = (rank - distance) % ranks
            parts.wait_for(counts[part], tiles)
            taken[part * rows : (part + 1) * rows].copy_(leaving[part * rows : (part + 1) * rows])
    parts.gemm_of_departures(whole, b, counts, rank, out=leaving)
    torch.cuda.synchronize()
    assert torch.equal(c.double(), expected.to(dtype).double()) and torch.equal(taken, c)
    assert counts.tolist() == [tiles] * ranks

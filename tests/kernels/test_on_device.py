"""What only a device can show of the kernels: prepared calls on its streams, graphs, and products of experts."""

from dataclasses import replace

import ndtp_kernels as kernels
import pytest
import torch
from ndtp_kernels import prepared
from ndtp_kernels.choice.chips import detect
from ndtp_kernels.choice.problem import Problem
from ndtp_kernels.choice.table import candidates, shipped_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
]
OPTIONS = kernels.Options(backend="triton")


def integers(*shape):
    return torch.randint(-3, 4, shape, device="cuda").bfloat16()


def test_a_repeated_call_runs_on_the_stream_of_its_caller():
    side = torch.cuda.Stream()
    for count in range(4):
        a, b, bias = integers(256, 512), integers(384, 512), integers(384)
        torch.cuda.synchronize()
        with torch.cuda.stream(side if count % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(10_000_000)
            a.mul_(2)
            got = kernels.gemm(a, b, bias, transpose_b=True, activation="relu", options=OPTIONS)
        torch.cuda.synchronize()
        assert torch.equal(got.float(), torch.relu(a.float() @ b.float().mT + bias.float()).bfloat16().float())
    assert any(each.starts for each in prepared._known.values())


def test_a_block_is_captured():
    """Two products with an epilogue: one launch for the host, other numbers in each replay."""
    x, up, down = integers(256, 128), integers(512, 128), integers(128, 512)
    wide = torch.empty(256, 128, device="cuda")

    def block():
        hidden = kernels.gemm(x, up, transpose_b=True, activation="relu", options=OPTIONS)
        return kernels.gemm(hidden, down, transpose_b=True, out=wide, options=OPTIONS)

    for _ in range(2):
        block()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = block()
    x.copy_(integers(256, 128))
    graph.replay()
    want = torch.relu(x.float() @ up.float().mT).bfloat16().float() @ down.float().mT
    assert torch.equal(result, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(768, 512), (328, 200), (50, 36)], ids=str)
def test_products_of_experts(size, dtype):
    """Every shipped configuration against a loop; two routings, of which the host is told nothing."""
    n, k = size
    chip = detect(torch.device("cuda", torch.cuda.current_device()))
    routings = [(300, 0, 1, 129, 82), (0, 0, 512, 0, 0)]
    a, b, grad = integers(512, k).to(dtype), integers(5, n, k).to(dtype), integers(512, n).to(dtype)
    calls = {
        "grouped": lambda how, offsets: kernels.grouped_gemm(a, b, offsets, transpose_b=True, **how),
        "grouped_dgrad": lambda how, offsets: kernels.grouped_gemm(grad, b, offsets, **how),
        "grouped_wgrad": lambda how, offsets: kernels.grouped_wgrad(grad, a, offsets, **how),
    }
    loops = {
        "grouped": lambda sizes: torch.cat([x @ w.mT for x, w in zip(a.float().split(sizes), b.float(), strict=True)]),
        "grouped_dgrad": lambda sizes: torch.cat(
            [x @ w for x, w in zip(grad.float().split(sizes), b.float(), strict=True)]
        ),
        "grouped_wgrad": lambda sizes: torch.stack(
            [y.mT @ x for y, x in zip(grad.float().split(sizes), a.float().split(sizes), strict=True)]
        ),
    }
    tried = 0
    for kind, call in calls.items():
        problem = Problem(128, n, k, str(dtype).removeprefix("torch."), batch=5, kind=kind, tma=n % 8 == k % 8 == 0)
        for config in (each for each in candidates(problem, chip, shipped_table()) if each.kernel != "torch"):
            how = {"options": replace(OPTIONS, config=config)}
            for sizes in routings:
                offsets = torch.tensor([0, *sizes], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
                call(how, offsets)  # compiled, before nothing may wait for the device
                torch.cuda.set_sync_debug_mode("error")
                try:
                    got = call(how, offsets)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                assert torch.equal(got, loops[kind](list(sizes)).to(dtype)), (kind, config, sizes)
                tried += 1
    assert tried >= 3 * len(routings)

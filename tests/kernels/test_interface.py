"""The public interface on a CPU: numbers, errors, profiles.  See test_interpreter for kernels."""

import json
import subprocess
import sys

import ndtp_kernels
import pytest
import torch
from ndtp_kernels.choice.selection import Options
from ndtp_kernels.errors import KernelError, KernelFallback


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_a_block_forward_and_backward_by_hand():
    """The way ndtp uses the pieces: fused forward, activation gradient in dgrad, weight gradients into fp32."""
    x, w1, w2, b1 = torch.randn(12, 8), torch.randn(16, 8), torch.randn(8, 16), torch.randn(16)
    first = ndtp_kernels.gemm(x, w1, b1, transpose_b=True, activation="gelu", return_preactivation=True)
    y = ndtp_kernels.gemm(first.c, w2, transpose_b=True)
    dy = torch.randn_like(y)
    d1 = ndtp_kernels.backward_gemm(dy, w2, first.pre, activation="gelu")
    dw1 = torch.zeros(16, 8)
    ndtp_kernels.gemm(d1, x, transpose_a=True, out=dw1, accumulate=True)
    leaves = [t.clone().requires_grad_() for t in (w1, b1, w2)]
    theirs = torch.nn.functional.gelu(x @ leaves[0].mT + leaves[1]) @ leaves[2].mT
    want = torch.autograd.grad(theirs, leaves, dy)
    for got, expected in zip((dw1, d1.sum(0), ndtp_kernels.gemm(dy, first.c, transpose_a=True)), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_bf16_weight_gradients_accumulate_in_fp32():
    """4096 times 2^-9 on top of 1: lost if a product were rounded to bf16 before it is added."""
    dc, x = torch.ones(1, 8, dtype=torch.bfloat16), torch.full((1, 8), 2.0**-9, dtype=torch.bfloat16)
    out = torch.ones(8, 8)
    ndtp_kernels.gemm(dc, x, transpose_a=True, out=out, accumulate=True)
    assert torch.equal(out, torch.full((8, 8), 1 + 2.0**-9))


OFFSETS, LEAF = torch.tensor([0, 2], dtype=torch.int32), torch.ones(2, 5, requires_grad=True)
ERRORS = {
    "dim k of A is 5 and dim k of B is 6": lambda: ndtp_kernels.gemm(torch.ones(3, 5), torch.ones(6, 4)),
    "bias has shape (3,), dim n is 4": lambda: ndtp_kernels.gemm(torch.ones(2, 5), torch.ones(5, 4), torch.ones(3)),
    "A is torch.float32 and B is torch.float64": lambda: ndtp_kernels.gemm(
        torch.ones(2, 5), torch.ones(5, 4, dtype=torch.float64)
    ),
    "3 blocks of columns do not divide 4": lambda: ndtp_kernels.gemm(torch.ones(2, 5), torch.ones(5, 4), c_blocks=3),
    "a has dims m and k, not 'n'": lambda: ndtp_kernels.gemm(torch.ones(2, 2, 5), torch.ones(5, 4), a_blocks="n"),
    "activation 'swish' is not known": lambda: ndtp_kernels.gemm(
        torch.ones(2, 5), torch.ones(5, 4), activation="swish"
    ),
    "batch dims do not broadcast": lambda: ndtp_kernels.gemm(torch.ones(2, 2, 5), torch.ones(3, 5, 4)),
    "accumulate=True has nothing": lambda: ndtp_kernels.gemm(torch.ones(2, 5), torch.ones(5, 4), accumulate=True),
    "out has shape (2, 3), C has (2, 4)": lambda: ndtp_kernels.gemm(
        torch.ones(2, 5), torch.ones(5, 4), out=torch.ones(2, 3)
    ),
    "x has shape (3,)": lambda: ndtp_kernels.reduce_blocks(torch.ones(3)),
    "x has shape (1, 3)": lambda: ndtp_kernels.reduce_blocks(torch.ones(1, 3), pairs=True),
    "pre has shape (3, 4), C has (3, 8)": lambda: ndtp_kernels.reduce_blocks_backward(
        torch.ones(1, 3, 4), torch.ones(3, 4), activation="silu", pairs=True
    ),
    "backward_gemm: pre is None, C has (2, 4)": lambda: ndtp_kernels.backward_gemm(
        torch.ones(2, 5), torch.ones(5, 4), None, activation="relu"
    ),
    "reduce_blocks_backward: pre is None, C has (3, 4)": lambda: ndtp_kernels.reduce_blocks_backward(
        torch.ones(1, 3, 4), None, activation="relu"
    ),
    "gemm: an operand requires a gradient": lambda: ndtp_kernels.gemm(LEAF, torch.ones(5, 4)),
    "backward_gemm: an operand requires": lambda: ndtp_kernels.backward_gemm(
        LEAF, torch.ones(5, 4), torch.ones(2, 4), activation="relu"
    ),
    "reduce_blocks: an operand requires": lambda: ndtp_kernels.reduce_blocks(LEAF),
    "reduce_blocks_backward: an operand requires": lambda: ndtp_kernels.reduce_blocks_backward(
        LEAF, torch.ones(5), activation="relu"
    ),
    "grouped_gemm: an operand requires": lambda: ndtp_kernels.grouped_gemm(LEAF, torch.ones(1, 5, 4), OFFSETS),
    "grouped_wgrad: an operand requires": lambda: ndtp_kernels.grouped_wgrad(LEAF, LEAF, OFFSETS),
    "backend 'cuda' is not known": lambda: ndtp_kernels.gemm(
        torch.ones(2, 5), torch.ones(5, 4), options=Options(backend="cuda")
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_say_what_is_wrong_and_what_would_work(message):
    with pytest.raises(KernelError) as caught:
        ERRORS[message]()
    assert message in str(caught.value)
    assert "\n  fix: " in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_refused_kernel_is_reported_once():
    """Asking for Triton on a CPU runs torch and says so; asking again does not repeat it."""
    a, b = torch.ones(2, 5), torch.ones(5, 4)
    ndtp_kernels.errors.warn_once.cache_clear()
    with pytest.warns(KernelFallback, match="interpreter is off"):
        c = ndtp_kernels.gemm(a, b, options=Options(backend="triton"))
    assert torch.equal(c, a @ b)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ndtp_kernels.gemm(a, b, options=Options(backend="triton"))


def test_profiler_shows_the_product_with_flops_and_bytes(tmp_path):
    """By name always; flops and bytes where inputs are recorded, in the events and in the trace."""
    a, b = torch.ones(3, 2, 5), torch.ones(5, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        ndtp_kernels.gemm(a, b)
        ndtp_kernels.backward_gemm(
            torch.ones(6, 5).bfloat16(), b.bfloat16(), torch.ones(6, 4).bfloat16(), activation="relu"
        )
        ndtp_kernels.reduce_blocks(torch.ones(2, 3, 4))
    want = {
        "gemm [2 4 5]": {"flops": 3 * 2 * 2 * 4 * 5, "bytes": 3 * 4 * (2 * 5 + 5 * 4 + 2 * 4)},
        "gemm [6 4 5]": {"flops": 2 * 6 * 4 * 5, "bytes": 2 * (6 * 5 + 5 * 4 + 6 * 4)},
        "reduce [3 4]": {"bytes": 4 * (2 * 3 * 4 + 3 * 4)},
    }
    found = {event.name: event.kwinputs for event in profile.events() if event.name in want}
    assert found == want
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for name, numbers in want.items():
        (arguments,) = (event["args"] for event in events if event.get("name") == name)
        assert numbers.items() <= arguments.items()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ndtp_kernels.gemm(a, b)
    assert "gemm [2 4 5]" in {event.key for event in profile.key_averages()}


def test_import_loads_neither_triton_nor_torch():
    """An import costs nothing and touches no driver."""
    code = "import sys, ndtp_kernels; print('torch' in sys.modules, 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_without_triton_everything_runs_in_torch():
    """Triton is optional: its absence is found out without importing anything else of it."""
    code = (
        "import sys, importlib.util as u; sys.modules['triton'] = None\n"
        "find = u.find_spec; u.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "import torch, ndtp_kernels as k\n"
        "print(k.gemm(torch.ones(2, 3), torch.ones(3, 4), activation='gelu').sum().item() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr

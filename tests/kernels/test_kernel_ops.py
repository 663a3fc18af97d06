"""Custom ops and the public interface on a CPU: fakes, autograd, compile, errors.  See test_interpreter for kernels."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import ndtp_kernels
import pytest
import torch
from ndtp_kernels import reference
from ndtp_kernels.autograd import ops, ops_reduce
from ndtp_kernels.choice.selection import Options
from ndtp_kernels.errors import KernelError, KernelFallback
from ndtp_kernels.form import Form

NT = ops.encode_form(Form(False, True))
DEFAULT = ops.encode(Options())


def real(*shape, dtype=torch.float64, grad=True):
    return torch.randn(shape, dtype=dtype, requires_grad=grad)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_opcheck_gemm():
    """Schema, fake, autograd registration and AOT dispatch agree with the op."""
    a, b, bias, residual = (real(*s, dtype=torch.float32) for s in ((6, 8), (10, 8), (10,), (6, 10)))
    for activation, keep in (("gelu", True), ("none", False)):
        torch.library.opcheck(
            ops.gemm, (a, b, bias, residual, None, None, NT, 1, activation, keep, True, None, DEFAULT)
        )


def test_opcheck_gated_and_out():
    a, gate, up, bias = (real(*s, dtype=torch.float32) for s in ((6, 8), (10, 8), (10, 8), (10,)))
    torch.library.opcheck(
        ops.gated_gemm, (a, gate, up, bias, bias, None, None, None, None, NT, 1, "silu", True, None, DEFAULT)
    )
    out = torch.zeros(6, 10)
    torch.library.opcheck(ops.gemm_out, (a.detach(), gate.detach(), out, True, NT, 1, True, DEFAULT))


@pytest.mark.parametrize("gated", [False, True])
def test_opcheck_after_a_scatter(gated):
    lead = (2,) if gated else ()
    x, bias = real(*lead, 3, 6, 10, dtype=torch.float32), real(10, dtype=torch.float32)
    torch.library.opcheck(
        ops_reduce.reduce_blocks, (x, bias, bias if gated else None, None, "silu", gated, True, None, "auto")
    )
    pre, d = real(*lead, 6, 10, dtype=torch.float32, grad=False), real(3, 6, 10, dtype=torch.float32, grad=False)
    torch.library.opcheck(ops_reduce.reduce_blocks_backward, (d, pre, "gelu", gated, True, True, None, "auto"))
    dc, weight = real(6, 8, dtype=torch.float32, grad=False), real(8, 10, dtype=torch.float32, grad=False)
    form = ops.encode_form(Form())
    torch.library.opcheck(
        ops.backward_gemm, (dc, weight, pre, None, None, form, 1, "gelu", gated, True, True, None, DEFAULT)
    )


def test_opcheck_fp8():
    """Scales pass through the ops; gradients do not."""
    a, gate, up = (torch.randn(16, 32).to(torch.float8_e4m3fn) for _ in range(3))
    one, pre = torch.tensor(0.5), torch.randn(16, 16, dtype=torch.bfloat16)
    # The others differentiate, or compare with operations that torch does not have for fp8.
    tests = "test_faketensor"
    torch.library.opcheck(
        ops.gemm, (a, gate, None, None, one, one, NT, 1, "gelu", True, False, None, DEFAULT), test_utils=tests
    )
    torch.library.opcheck(
        ops.gated_gemm, (a, gate, up, None, None, None, one, one, one, NT, 1, "silu", True, None, DEFAULT),
        test_utils=tests,
    )  # fmt: skip
    torch.library.opcheck(
        ops.backward_gemm, (a, gate, pre, one, one, NT, 1, "silu", False, True, True, None, DEFAULT), test_utils=tests
    )


def test_every_op_is_opchecked():
    """An op that is added without one of the tests above is found here."""
    source = Path(__file__).read_text()
    found = [name for name in dir(torch.ops.ndtp_kernels) if not name.startswith("_") and name != "name"]
    defined = {name for name in (*vars(ops), *vars(ops_reduce)) if f"ndtp_kernels::{name}" in defined_ops()}
    assert defined == {"gemm", "gemm_out", "gated_gemm", "backward_gemm", "reduce_blocks", "reduce_blocks_backward"}
    assert set(found) <= defined
    for name in defined:
        assert f"ops.{name}, (" in source or f"ops_reduce.{name}, (" in source, name


def defined_ops():
    return {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("ndtp_kernels::")}


def as_stored(x, letters, transpose, blocks, num_blocks):
    x = x.mT if transpose else x
    if blocks is None:
        return x
    stored = letters[::-1] if transpose else letters
    return torch.stack(x.chunk(num_blocks, -2 if blocks == stored[0] else -1))


FORMS = [
    Form(ta, tb, *blocks, 2)
    for ta, tb in itertools.product((False, True), repeat=2)
    for blocks in [
        (None, None, None),
        ("m", "k", "n"),
        ("k", "n", "m"),
        ("m", "n", None),
        (None, "k", "m"),
        ("k", None, "n"),
    ]
]


@pytest.mark.parametrize("batch", [(), (2,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: "".join(str(x or "-")[0] for x in f[:5]))
def test_gradients_in_every_form(form, batch):
    """Gradients come back as the operands are stored, equal to autograd's through the reference."""
    a = as_stored(torch.randn(*batch, 4, 6, dtype=torch.float64), "mk", form.transpose_a, form.a_blocks, 2)
    b = as_stored(torch.randn(6, 8, dtype=torch.float64), "kn", form.transpose_b, form.b_blocks, 2)
    tensors = [x.clone().requires_grad_() for x in (a, b, torch.randn(8, dtype=torch.float64))]
    options = form._asdict()
    ours = ndtp_kernels.gemm(*tensors, activation="gelu", **options)
    theirs, _ = reference.gemm(*tensors, activation_name="gelu", **options)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    got = torch.autograd.grad(ours, tensors, upstream)
    want = torch.autograd.grad(theirs, tensors, upstream)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("batches", [((3,), (3,)), ((2, 3), (3,)), ((), (3,)), ((2, 1), (3,))], ids=str)
def test_gradients_of_broadcast_batches(batches):
    a, b = real(*batches[0], 4, 5), real(*batches[1], 5, 6)
    ours, theirs = ndtp_kernels.gemm(a, b), torch.matmul(a, b)
    upstream = torch.randn_like(theirs)
    for got, want in zip(
        torch.autograd.grad(ours, (a, b), upstream), torch.autograd.grad(theirs, (a, b), upstream), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", [Form(False, True), Form(False, False), Form(False, True, "k", "k", "n", 2)], ids=str)
def test_gradients_of_gated_pairs(packed, form):
    """Packed weights take the one-product path for dA; it must give the same."""
    a = as_stored(torch.randn(4, 6, dtype=torch.float64), "mk", False, form.a_blocks, 2).requires_grad_()
    weights = torch.randn(2, *as_stored(torch.zeros(6, 8), "kn", form.transpose_b, form.b_blocks, 2).shape).double()
    gate, up = weights.unbind(0) if packed else (weights[0].clone(), weights[1].clone())
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    biases = [real(8), real(8)]
    inputs = (a, gate, up, *biases)
    ours = ndtp_kernels.gated_gemm(*inputs, activation="silu", **form._asdict())
    theirs, _, _ = reference.gated_gemm(*inputs, activation_name="silu", **form._asdict())
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    for got, want in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_after_a_scatter(gated):
    x = real(*((2,) if gated else ()), 3, 4, 6)
    bias, residual = real(6), real(4, 6)

    def run(x, bias, residual):
        return ndtp_kernels.reduce_blocks(
            x, bias, bias if gated else None, residual=residual, gated=gated, activation="gelu"
        )

    assert torch.autograd.gradcheck(run, (x, bias, residual), atol=1e-4, rtol=1e-3)


def test_a_block_forward_and_backward_by_hand():
    """The way ndtp uses the pieces: fused forward, activation gradient in dgrad, bias gradient in wgrad."""
    x, w1, w2 = torch.randn(12, 8), torch.randn(16, 8), torch.randn(8, 16)
    b1 = torch.randn(16)
    first = ndtp_kernels.gemm(x, w1, b1, transpose_b=True, activation="gelu", return_preactivation=True)
    y = ndtp_kernels.gemm(first.c, w2, transpose_b=True)
    dy = torch.randn_like(y)
    d1 = ndtp_kernels.backward_gemm(dy, w2, first.pre, activation="gelu", return_column_sums=True)
    dw1 = torch.zeros(16, 8)
    ndtp_kernels.gemm(d1.c, x, transpose_a=True, out=dw1, accumulate=True)
    wgrad = ndtp_kernels.gemm(dy, first.c, transpose_a=True, return_row_sums=True)
    leaves = [t.clone().requires_grad_() for t in (w1, b1, w2)]
    theirs = torch.nn.functional.gelu(x @ leaves[0].mT + leaves[1]) @ leaves[2].mT
    want = torch.autograd.grad(theirs, leaves, dy)
    for got, expected in zip((dw1, d1.column_sums, wgrad.c), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(wgrad.row_sums, dy.sum(0), rtol=1e-4, atol=1e-4)


def test_compile_is_fullgraph_and_equal():
    def block(x, w, bias):
        return ndtp_kernels.gemm(x, w, bias, transpose_b=True, activation="silu").sum()

    inputs = [real(*s, dtype=torch.float32) for s in ((6, 8), (10, 8), (10,))]
    want = torch.autograd.grad(block(*inputs), inputs)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*inputs), inputs)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other)


def test_autocast_casts_the_operands():
    a, b = real(4, 6, dtype=torch.float32), real(6, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        c = ndtp_kernels.gemm(a, b)
    assert c.dtype == torch.bfloat16
    c.float().sum().backward()
    assert a.grad.dtype == torch.float32


def test_bf16_weight_gradients_accumulate_in_fp32():
    """4096 times 2^-9 on top of 1: lost if a product were rounded to bf16 before it is added."""
    dc, x = torch.ones(1, 8, dtype=torch.bfloat16), torch.full((1, 8), 2.0**-9, dtype=torch.bfloat16)
    out = torch.ones(8, 8)
    ndtp_kernels.gemm(dc, x, transpose_a=True, out=out, accumulate=True)
    assert torch.equal(out, torch.full((8, 8), 1 + 2.0**-9))


ERRORS = {
    "dim k of A is 5 and dim k of B is 6": lambda: ndtp_kernels.gemm(torch.ones(3, 5), torch.ones(6, 4)),
    "bias has shape (3,), dim n is 4": lambda: ndtp_kernels.gemm(torch.ones(2, 5), torch.ones(5, 4), torch.ones(3)),
    "A is torch.float32 and B is torch.float64": lambda: ndtp_kernels.gemm(
        torch.ones(2, 5), torch.ones(5, 4, dtype=torch.float64)
    ),
    "3 blocks along n do not divide 4": lambda: ndtp_kernels.gemm(
        torch.ones(2, 5), torch.ones(5, 4), c_blocks="n", num_c_blocks=3
    ),
    "a has dims m and k, not 'n'": lambda: ndtp_kernels.gemm(torch.ones(2, 2, 5), torch.ones(5, 4), a_blocks="n"),
    "activation 'swish' is not known": lambda: ndtp_kernels.gemm(
        torch.ones(2, 5), torch.ones(5, 4), activation="swish"
    ),
    "batch dims do not broadcast": lambda: ndtp_kernels.gemm(torch.ones(2, 2, 5), torch.ones(3, 5, 4)),
    "accumulate=True has nothing": lambda: ndtp_kernels.gemm(torch.ones(2, 5), torch.ones(5, 4), accumulate=True),
    "out has shape (2, 3), C has (2, 4)": lambda: ndtp_kernels.gemm(
        torch.ones(2, 5), torch.ones(5, 4), out=torch.ones(2, 3)
    ),
    "out= is not differentiable": lambda: ndtp_kernels.gemm(
        torch.ones(2, 5, requires_grad=True), torch.ones(5, 4), out=torch.ones(2, 4)
    ),
    "fp8 products want dim k contiguous": lambda: ndtp_kernels.gemm(
        torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 16).to(torch.float8_e4m3fn)
    ),
    "fp8 operands have no gradient here": lambda: ndtp_kernels.gated_gemm(
        *(torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(3)),
        torch.ones(16, requires_grad=True),
        transpose_b=True,
    ),
    "the scales of gate and up differ in form": lambda: ndtp_kernels.gated_gemm(
        *(torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(3)), transpose_b=True, scale_b_gate=torch.ones(())
    ),
    "row sums would be those of A without its scale": lambda: ndtp_kernels.gemm(
        *(torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(2)),
        transpose_b=True,
        scale_a=torch.ones(()),
        return_row_sums=True,
    ),
    "x has shape (3, 4)": lambda: ndtp_kernels.reduce_blocks(torch.ones(3, 4), gated=True),
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
    a, b, weights = torch.ones(3, 2, 5), torch.ones(5, 4, dtype=torch.float32), torch.ones(2, 4, 5).bfloat16()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        ndtp_kernels.gemm(a, b)
        ndtp_kernels.gated_gemm(torch.ones(6, 5).bfloat16(), *weights, transpose_b=True)
        ndtp_kernels.reduce_blocks(torch.ones(2, 3, 4))
    want = {
        "gemm [2 4 5]": {"flops": 3 * 2 * 2 * 4 * 5, "bytes": 3 * 4 * (2 * 5 + 5 * 4 + 2 * 4)},
        "gemm [6 4 5]": {"flops": 2 * 2 * 6 * 4 * 5, "bytes": 2 * (6 * 5 + 2 * 5 * 4 + 6 * 4)},
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


def test_flop_counter_knows_the_ops():
    from torch.utils.flop_counter import FlopCounterMode

    a, b = real(6, 8, dtype=torch.float32), real(10, 8, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        ndtp_kernels.gemm(a, b, transpose_b=True).sum().backward()
        ndtp_kernels.gated_gemm(a, b, b, transpose_b=True)
    assert counter.get_total_flops() == (3 + 2) * 2 * 6 * 8 * 10


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

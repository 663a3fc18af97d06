"""Signals between ranks of one device, as the compiler sees them; what they do is in interpreted/case_signals.py."""

import re

from ndtp_kernels.triton_code import signals as code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile


def atomics(ptx, order, kind):
    """Where there is one of the whole system."""
    found = re.finditer(r"\batom\.[\w.]+", ptx)
    return [match.start() for match in found if {order, kind, "sys"} <= set(match[0].split("."))]


def test_signals_are_of_one_warp_and_of_the_whole_system():
    for kernel, order in ((code.put_signal_kernel, "release"), (code.take_signal_kernel, "acquire")):
        source = ASTSource(kernel, {"signal": "*i32"}, {}, {(0,): [["tt.divisibility", 16]]})
        made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
        assert atomics(made.asm["ptx"], order, "cas") and made.metadata.num_warps == 1
        assert made.metadata.shared < 1024, "it fits beside a product"

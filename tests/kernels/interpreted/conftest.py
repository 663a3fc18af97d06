"""Fixtures of the interpreted cases; what they import is in `poisoned`, as every conftest has the same module name."""

from ndtp_kernels import launch
from poisoned import poison

__all__ = ["poison"]


def pytest_configure(config):
    assert launch.interpreted(), "run through test_interpreter.py"
    config.addinivalue_line("filterwarnings", "error::ndtp_kernels.errors.KernelFallback")

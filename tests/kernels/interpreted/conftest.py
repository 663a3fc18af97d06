"""Fixtures of the interpreted cases; what they import is in `poisoned`, as every conftest has the same module name."""

import pytest
import triton.language as tl
from ndtp_kernels import launch, prepared
from poisoned import poison
from triton.runtime import interpreter

__all__ = ["poison"]


@pytest.fixture(autouse=True)
def nothing_known():
    """Each case prepares its own calls."""
    prepared.forget()


def pytest_configure(config):
    assert launch.interpreted(), "run through test_interpreter.py"
    config.addinivalue_line("filterwarnings", "error::ndtp_kernels.errors.KernelFallback")
    interpreter._patch_lang = patch_once


def patch_once(fn, patch=interpreter._patch_lang):
    """Triton patches its language anew whenever a kernel calls a function: half of the time of all cases."""
    used = [module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())]
    if any(tl.core.is_builtin(module.load) for module in used):
        return patch(fn)
    return interpreter._LangPatchScope()

"""Run functions on local gloo ranks and compare parallel results with dense ones.

For ndtp's tests, its command line, and the tests of users.  Needs no GPU and no launcher.

Nothing is imported before it is used: pytest loads the plugin wherever ndtp is installed, and needs no torch for that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndtp.testing.compare import assert_close_to_dense, assert_equal, small_integers
    from ndtp.testing.cuda.multiprocessors import find_deadlock
    from ndtp.testing.cuda.place import CudaFault
    from ndtp.testing.cuda.recorded_clock import RecordedClock
    from ndtp.testing.cuda.stand_in import RecordedCuda
    from ndtp.testing.dense import assert_matches_dense
    from ndtp.testing.launch import run
    from ndtp.testing.pool import RankPool
    from ndtp.testing.rank_error import RankError, RankTimeout
    from ndtp.testing.tests_on_ranks import ranks

_HOME = {
    "CudaFault": "cuda.place",
    "RankError": "rank_error",
    "RankPool": "pool",
    "RankTimeout": "rank_error",
    "RecordedClock": "cuda.recorded_clock",
    "RecordedCuda": "cuda.stand_in",
    "assert_close_to_dense": "compare",
    "assert_equal": "compare",
    "assert_matches_dense": "dense",
    "find_deadlock": "cuda.multiprocessors",
    "ranks": "tests_on_ranks",
    "run": "launch",
    "small_integers": "compare",
}

__all__ = [
    "CudaFault",
    "RankError",
    "RankPool",
    "RankTimeout",
    "RecordedClock",
    "RecordedCuda",
    "assert_close_to_dense",
    "assert_equal",
    "assert_matches_dense",
    "find_deadlock",
    "ranks",
    "run",
    "small_integers",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ndtp.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"ndtp.testing.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Run functions on local gloo ranks and compare parallel results with dense ones.

For ndtp's tests, its command line, and the tests of users.  Needs no GPU and no launcher.
"""

from ndtp.testing.compare import assert_close_to_dense, assert_equal, small_integers
from ndtp.testing.dense import assert_matches_dense
from ndtp.testing.launch import run
from ndtp.testing.pool import RankError, RankPool, RankTimeout

__all__ = [
    "RankError",
    "RankPool",
    "RankTimeout",
    "assert_close_to_dense",
    "assert_equal",
    "assert_matches_dense",
    "run",
    "small_integers",
]

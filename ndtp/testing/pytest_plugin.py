"""A pytest fixture for tests that need several ranks.

    # conftest.py
    from ndtp.testing.pytest_plugin import ranks        # or: pytest_plugins = ["ndtp.testing.pytest_plugin"]

    # test_my_model.py
    def check_my_model(seed): ...                       # at module level: the ranks import it by name

    def test_my_model(ranks):
        ranks(8).run(check_my_model, seed=3)

pytest rewrites no asserts in the ranks: use `ndtp.testing.assert_equal`, or give asserts a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ndtp.testing.pool import RankPool, close_shared_pools, shared_pool

__all__ = ["ranks"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)` is the session's pool of n gloo ranks, started at the first use."""
    yield shared_pool
    close_shared_pools()

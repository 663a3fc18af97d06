"""The plugin that pytest finds where ndtp is installed: tests on several ranks, each of which reports its own failure.

    @ndtp.testing.ranks(8)
    def test_sum():                                     # runs on eight ranks
        ...

    def check_my_model(seed): ...                       # at module level: the ranks import it by name

    def test_my_model(ranks):                           # the fixture: the session's ranks, for calls of your own
        ranks(8).run(check_my_model, seed=3)

Asserts are rewritten on the ranks as they are here; see `rank_asserts`.  Nothing of torch is imported before a test
asks for ranks.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ndtp.testing.pool import RankPool
    from ndtp.testing.rank_error import RankError

__all__ = ["ranks"]

MAX_SHOWN = 8  # different failures in one report


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], RankPool]:
    """`ranks(n)` is the session's pool of n gloo ranks, started at the first use."""
    from ndtp.testing.pool import shared_pool

    return shared_pool


def pytest_configure() -> None:
    if os.environ.get("NDTP_TEST_DEVICE"):
        from ndtp.testing.device import use_test_device

        use_test_device()


def pytest_sessionfinish() -> None:
    pool = sys.modules.get("ndtp.testing.pool")
    if pool is not None:
        pool.close_shared_pools()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A report shows what the ranks say, not how this process waited for them."""
    report = yield
    errors = sys.modules.get("ndtp.testing.rank_error")
    error = call.excinfo.value if call.excinfo is not None else None
    if errors is None or not isinstance(error, errors.RankError):
        return report
    if report.outcome == "failed" and error.reports:
        report.longrepr = _shown(error, item)
    for rank, text in sorted(error.printed.items()):
        report.sections.append((f"Captured stdout of rank {rank}", text))
    return report


def _shown(error: RankError, item: pytest.Item) -> Any:
    """One chain of tracebacks: ranks that fail alike have one, with their names; the first to fail comes last."""
    from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

    here = ReprFileLocation(str(item.path), (item.location[1] or 0) + 1, "")
    groups: dict[str, list[int]] = {}
    shown: dict[str, Any] = {}
    for rank in sorted(error.errors):
        repr_of = pickle.loads(error.reports[rank]) if rank in error.reports else None
        key = str(repr_of) if repr_of is not None else error.errors[rank]
        groups.setdefault(key, []).append(rank)
        shown.setdefault(key, repr_of)
    order = sorted(groups.items(), key=lambda group: error.rank in group[1])  # by rank, but the first to fail last
    left_out, order = order[:-MAX_SHOWN], order[-MAX_SHOWN:]
    chain = []
    for key, members in order:
        heading = ReprEntryNative([f"---- {error.name(members)} ----\n"])
        summary = error.summaries.get(members[0], "failed")
        crash = ReprFileLocation(here.path, here.lineno, f"{error.name(members)}: {summary}")
        if shown[key] is None:
            chain.append((ReprTraceback([heading, ReprEntryNative([key + "\n"])], None, "native"), crash, None))
            continue
        trace, where = shown[key].reprtraceback, shown[key].reprcrash
        if where is not None:
            crash = ReprFileLocation(where.path, where.lineno, f"{error.name(members)}: {where.message}")
        chain += getattr(shown[key], "chain", [(trace, where, None)])[:-1]
        chain.append((ReprTraceback([heading, *trace.reprentries], trace.extraline, trace.style), crash, None))
    notes = [f"and {len(left_out)} more that differ"] if left_out else []
    notes += [f"stopped before the end: {error.name(error.unfinished)}"] if error.unfinished else []
    result = ExceptionChainRepr(chain)
    for note in notes:
        result.addsection("ranks", note)
    return result

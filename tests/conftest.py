import gc
from collections.abc import Iterator

import pytest

from ndtp.testing.pool import close_shared_pools
from ndtp.testing.pytest_plugin import ranks

__all__ = ["ranks"]

# What takes longest comes first: at the end a worker would wait for the other one's last file.
LONGEST = (
    "test_aot.py", "test_interpreter.py", "test_bench_programs.py", "test_failures.py", "test_launch.py",
    "test_docs.py", "test_compile.py", "test_mlp.py",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would take the files with the most tests first


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """What was imported so far stays: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_their_file() -> Iterator[None]:
    """Ranks that idle take a tenth of a core: gloo's threads wake a hundred times a second.  New ones start as fast."""
    yield
    close_shared_pools()

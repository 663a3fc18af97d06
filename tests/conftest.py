from collections.abc import Iterator

import pytest

from ndtp.testing.pool import close_shared_pools
from ndtp.testing.pytest_plugin import ranks

__all__ = ["ranks"]


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_their_file() -> Iterator[None]:
    """Ranks that idle take a tenth of a core: gloo's threads wake a hundred times a second.  New ones start as fast."""
    yield
    close_shared_pools()

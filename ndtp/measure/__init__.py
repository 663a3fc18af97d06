"""The measurements of `ndtp bench`. The commands are in `ndtp.cli`; these modules run without it."""

import os

from ndtp.errors import GridError


def check_room(command: str, needed: float, fix: str) -> None:
    """Refuse more ranks than this machine has memory for.

    Raises:
        GridError: the kernel would kill some of the ranks.
    """
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > room:
        raise GridError(
            f"{command}: needs about {needed / 2**30:,.4g} GiB on all local ranks, and this machine has "
            f"{room / 2**30:,.4g} GiB; fix: {fix}"
        )

"""The last error of a failing rank, which names what it waited for, and who is to blame."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from inspect import getclosurevars, isfunction

from ndtp.collectives.own_presence import presence
from ndtp.errors import CommunicationError

# What libraries below say of a peer that is gone or late.
_OF_A_PEER = re.compile(
    r"connection (closed|reset|refused|was likely)|timed out|pair closure|broken pipe|gloo|nccl|tcpstore|"
    r"socket|failed to recv|wait timeout|heartbeat",
    re.IGNORECASE,
)

_CUT = re.compile(
    r"connection (closed|reset|refused|was likely)|broken pipe|pair closure|got 0 bytes|endpoint is not connected|"
    r"timed out connecting|unreachable|no route to host",
    re.IGNORECASE,
)
_TIME_IS_UP = re.compile(r"time[ds]?[ -]?out|ha(s|ve) not come", re.IGNORECASE)
# Errors that torch raises in whatever the main thread is at, by a handler of SIGCHLD.
_OF_THIS_RANK = "DataLoader worker"


def lost_peer(what: str, ranks: Sequence[int], where: str, cause: BaseException) -> CommunicationError:
    """The error of a collective, or of another wait, that failed for a peer.

    Args:
        what: was waited for.
        ranks: of the world, that take part.
        where: this rank, and whom it waited for.
    """
    here = presence()
    if _OF_THIS_RANK in str(cause):
        if here is not None:
            here.raised(cause)
        error = CommunicationError(f"{what} was broken off by an error of this rank: {where}\n  cause: {cause}")
        error.how, error.ranks = "raised", () if here is None else (here.rank,)
        return error
    verdict = None if here is None else here.lost(what, ranks, cut=is_cut(str(cause)))
    lines = [f"{what} failed: {where}"]
    if here is not None and verdict is not None:
        lines.append(verdict.sentence(here.place))
    lines.append(f"cause: {cause}")
    error = CommunicationError("\n  ".join(lines))
    if verdict is not None:
        error.how, error.ranks = verdict.how, verdict.ranks
    return error


def is_cut(text: str) -> bool:
    """Return whether an error tells of a connection that broke: of a peer, and not that time was up.

    Libraries have more words for the first than for the second.
    """
    return bool(_CUT.search(text) or (_OF_A_PEER.search(text) and not _TIME_IS_UP.search(text)))


def is_of_a_peer(error: BaseException | None) -> bool:
    """Return whether an error of torch's tells of a peer or of a link, not of what this rank does."""
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, CommunicationError)
        and bool(_OF_A_PEER.search(str(error)))
    )


def tell_of(error: BaseException) -> BaseException:
    """Tell the others of an error that ends this rank.  Returns what it is: an error of a peer is told as one."""
    here = presence()
    if here is None:
        return error
    if is_of_a_peer(error):
        everybody = [rank for rank in range(here.size) if rank != here.rank]
        found = lost_peer("a collective that ndtp did not start", everybody, f"rank {here.rank}", error)
        found.__cause__ = error
        return found.with_traceback(error.__traceback__)
    if not isinstance(error, CommunicationError):
        here.raised(error)
    return error


def speak_at_the_end() -> None:
    """Have errors that end the program told to the others."""
    before: Callable[..., object] = sys.excepthook
    if _tells(before):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        try:
            error = tell_of(error)
        finally:
            before(type(error), error, trace)

    hook.is_of_ndtp = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _tells(hook: object) -> bool:
    """Return whether a hook is ndtp's, or one of torch's, which every start puts around the hook of before."""
    while hook is not None and not getattr(hook, "is_of_ndtp", False):
        hook = getclosurevars(hook).nonlocals.get("old_hook") if isfunction(hook) else None
    return hook is not None

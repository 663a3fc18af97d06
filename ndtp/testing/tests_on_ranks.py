"""`@ndtp.testing.ranks(8)`: a test whose body runs on eight ranks."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from numbers import Integral
from typing import Any, TypeVar

from ndtp.compute.torch_calls import Arguments, Keywords

Test = TypeVar("Test", bound=Callable[..., Any])
_BODY = "__ndtp_body__"


def ranks(num_ranks: int | None = None, /, *, timeout: float = 300.0, **axes: int) -> Callable[[Test], Test]:
    """A test function that runs on local gloo ranks, which are started once and shared by all tests.

        @ndtp.testing.ranks(z=2, x=2, y=2)
        @pytest.mark.parametrize("hidden", [64, 96])
        def test_block(mesh, hidden):
            block = ndtp.nn.MLP(hidden, 4 * hidden, mesh=mesh)
            ndtp.testing.assert_matches_dense(block, block.to_dense(), torch.randn(32, hidden), mesh)

    Fixtures and parameters are made once, by pytest, and sent to the ranks; what cannot be pickled (a module on a grid,
    say) is made in the test.  Under `torchrun --nproc-per-node 8 -m pytest` the test runs in place, in torchrun's
    group, and so on its GPUs.  A test that returns something returns the results by rank.

    Args:
        num_ranks: how many; or, instead,
        axes: the axes of a grid, slowest first.  A parameter `mesh` of the test is then its `ProcessGrid`, and failures
            tell coordinates.
        timeout: seconds.

    Raises:
        ValueError: neither or both are given, or a size is no positive integer; or the decorator stands without a call.
    """
    if callable(num_ranks):
        raise ValueError(
            f"ranks: @ndtp.testing.ranks stands above {getattr(num_ranks, '__name__', num_ranks)} without a number of "
            "ranks\n  fix: @ndtp.testing.ranks(8), or @ndtp.testing.ranks(z=2, x=2, y=2)"
        )
    sizes = [*axes.values()] if num_ranks is None else [*axes.values(), num_ranks]
    if (num_ranks is None) == (not axes) or not all(isinstance(each, Integral) and each > 0 for each in sizes):
        raise ValueError(
            f"ranks: num_ranks={num_ranks}, axes={axes}: one of them, in positive integers\n"
            "  fix: @ndtp.testing.ranks(8), or @ndtp.testing.ranks(z=2, x=2, y=2)"
        )
    count = num_ranks or prod(axes.values())

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def on_ranks(*args: object, **kwargs: object) -> list[object] | None:
            __tracebackhide__ = True
            from ndtp.testing.launch import is_one_of_many, run

            if is_one_of_many():
                return _agreed(run(_with_mesh, count, args=(test, args, kwargs, axes), timeout=timeout))
            path = inspect.getsourcefile(test) or ""
            call = (test.__module__, path, test.__qualname__, _pickled(test, args, kwargs, signature), axes)
            return _agreed(run(_call_test, count, args=call, timeout=timeout, axes=axes or None))

        setattr(on_ranks, _BODY, test)
        if axes and "mesh" in signature.parameters:  # it is made on the ranks: no fixture of that name is looked for
            others = [each for name, each in signature.parameters.items() if name != "mesh"]
            on_ranks.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return on_ranks  # type: ignore[return-value]

    return decorate


@dataclass(frozen=True)
class CalledOff:
    """The result of a rank where the test says `pytest.skip` or `pytest.xfail`, which cannot be pickled."""

    kind: str
    reason: str


def _agreed(results: list[object]) -> list[object] | None:
    """The results by rank, None where there are none; skips where all ranks skip."""
    __tracebackhide__ = True
    outcomes = [(rank, each) for rank, each in enumerate(results) if isinstance(each, CalledOff)]
    if not outcomes:
        return results if any(each is not None for each in results) else None
    import pytest

    kind, reason = outcomes[0][1].kind, outcomes[0][1].reason
    if len(outcomes) < len(results):
        some = ", ".join(str(rank) for rank, _ in outcomes)
        raise AssertionError(f"of {len(results)} ranks only {some} said pytest.{kind}({reason!r})")
    raised: Any = (pytest.skip if kind == "skip" else pytest.xfail).Exception(reason)
    raised._use_item_location = True
    raise raised


def _pickled(test: Callable[..., object], args: Arguments, kwargs: Keywords, signature: inspect.Signature) -> bytes:
    from ndtp.testing.messages import dumps

    kwargs = {name: type(value)() if _is_monkeypatch(value) else value for name, value in kwargs.items()}
    given = {**dict(zip(signature.parameters, args, strict=False)), **kwargs}
    for name, value in given.items():
        try:
            dumps(value)
        except Exception as error:
            raise ValueError(
                f"{test.__qualname__}: {name}, a {type(value).__name__}, cannot be sent to the ranks: {error}\n"
                "  fix: make it in the test, which runs on each of them"
            ) from error
    return dumps((args, kwargs))


def _call_test(module: str, path: str, name: str, pickled: bytes, axes: dict[str, int]) -> object:
    """Find the test of that name, on a rank, and call what `ranks` was put around."""
    from ndtp.testing.rank_asserts import load

    found: object = load(module, path)
    for part in name.split("."):
        found = getattr(found, part, None)
    while found is not None and not hasattr(found, _BODY):
        found = getattr(found, "__wrapped__", None)
    if found is None:
        raise ValueError(
            f"{name} is not found in {module} on the ranks, or another decorator hides it\n"
            "  fix: define it at module level or in a class, with @ndtp.testing.ranks as its outermost decorator"
        )
    args, kwargs = pickle.loads(pickled)
    patches = [value for value in (*args, *kwargs.values()) if _is_monkeypatch(value)]
    try:
        return _with_mesh(getattr(found, _BODY), args, kwargs, axes)
    except BaseException as error:
        if type(error).__name__ in ("Skipped", "XFailed") and "pytest" in sys.modules:
            return CalledOff("skip" if type(error).__name__ == "Skipped" else "xfail", str(error))
        raise
    finally:  # the ranks are shared by all tests
        for patch in patches:
            patch.undo()


def _is_monkeypatch(value: object) -> bool:
    """Whether pytest's fixture `monkeypatch` gives this; each rank patches, and undoes, with one of its own."""
    return isinstance(value, getattr(sys.modules.get("pytest"), "MonkeyPatch", ()))


def _with_mesh(test: Callable[..., object], args: Arguments, kwargs: Keywords, axes: dict[str, int]) -> object:
    if axes and "mesh" in inspect.signature(test).parameters:
        from ndtp.algebra.grid import Grid
        from ndtp.runtime.process_grid import ProcessGrid

        kwargs = {"mesh": ProcessGrid(Grid(**axes)), **kwargs}
    from ndtp.testing.messages import called

    return called(test, args, kwargs)

"""pytest's asserts on ranks: test modules are rewritten there, too, and failures travel as pytest shows them.

pytest rewrites the asserts of the test modules that it imports itself.  A rank is another process, which imports them
again: it gets a hook of the same kind, set as the session's own is.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

_HERE = os.path.dirname(__file__)
_OPTIONS = ("verbose", "assertmode", "showlocals", "tbstyle", "fulltrace")


@dataclass(frozen=True)
class PytestSettings:
    """All that a rank needs to know of the pytest session that its parent is."""

    options: tuple[tuple[str, Any], ...]
    ini: tuple[tuple[str, Any], ...]
    rewritten: frozenset[str]  # modules that asked for it with `pytest.register_assert_rewrite`


def settings() -> PytestSettings | None:
    """Return the settings of the session whose test is running; None outside of tests."""
    util = sys.modules.get("_pytest.assertion.util")
    config = getattr(util, "_config", None)
    if config is None:
        return None
    options = tuple((name, getattr(config.option, name)) for name in _OPTIONS if hasattr(config.option, name))
    rewritten = getattr(getattr(config.pluginmanager, "rewrite_hook", None), "_must_rewrite", ())
    return PytestSettings(options, tuple(_ini_of(config)), frozenset(rewritten))


def _ini_of(config: Any) -> Iterator[tuple[str, object]]:
    for name in ("python_files", "truncation_limit_lines", "truncation_limit_chars", "verbosity_assertions"):
        with contextlib.suppress(ValueError, KeyError):  # a version of pytest that has no such setting
            yield name, config.getini(name)


@cache
def prepare() -> Any:
    """A pytest configuration of nobody's files, its hook for imports installed: 20 ms, so the ranks inherit it."""
    from _pytest.config import get_config

    alone = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
    before = os.environ.get(alone)
    os.environ[alone] = "1"
    try:
        config = get_config()
        config.parse(["-c", os.devnull, "--rootdir", os.sep, "--noconftest", "-p", "no:cacheprovider"])
    finally:
        os.environ.pop(alone)
        if before is not None:
            os.environ[alone] = before
    _explain_comparisons(config)
    return config


def _explain_comparisons(config: Any) -> None:
    """Has rewritten asserts show what differs, for as long as this process lives: pytest does for each test's time."""
    from _pytest.assertion import pytest_runtest_protocol, util

    around = pytest_runtest_protocol(SimpleNamespace(ihook=config.hook, config=config))  # type: ignore[arg-type]
    next(around)
    config.add_cleanup(around.close)  # and holds it until then
    util._config = None  # which `settings` would take for a session of this process


def install(given: PytestSettings) -> None:
    """Rewrite the test modules that this rank imports from now on."""
    from _pytest.assertion import util

    config = prepare()
    for name, value in given.options:
        setattr(config.option, name, value)
    config._inicache.update(given.ini)
    hooks = [hook for hook in sys.meta_path if hook.__class__.__name__ == "AssertionRewritingHook"]
    if dict(given.options).get("assertmode") == "plain":
        sys.meta_path[:] = [hook for hook in sys.meta_path if hook not in hooks]
    for hook in hooks:
        hook.fnpats = dict(given.ini).get("python_files", ["test_*.py", "*_test.py"])  # type: ignore[attr-defined]
        hook.mark_rewrite(*given.rewritten)  # type: ignore[attr-defined]
    util._config = config  # for what it says of sets, dicts and colours


def load(name: str, path: str) -> ModuleType:
    """The test module of that name: imported as ever, or from its file, where no path of imports leads to it."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    hooks: list[Any] = [hook for hook in sys.meta_path if hook.__class__.__name__ == "AssertionRewritingHook"]
    spec = importlib.util.spec_from_file_location(name, path, loader=hooks[0] if hooks else None)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a module that a rank can import")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def report_of(error: BaseException) -> bytes | None:
    """Pickled, how pytest shows an exception: source, values and comparison.  None where it cannot."""
    import pytest

    option = prepare().option
    style = {"auto": "long", "native": "native"}.get(option.tbstyle, option.tbstyle)

    def frames(info: pytest.ExceptionInfo[BaseException]) -> Any:
        shown = info.traceback
        if option.fulltrace:
            return shown
        kept = type(shown)([e for e in shown if os.path.dirname(str(e.path)) != _HERE and not e.ishidden(info)])
        if option.tbstyle == "auto" and len(kept) > 2:  # as for tests: the first and the last in full
            middle = [entry.with_repr_style("short") for entry in kept[1:-1]]
            kept = type(shown)([kept[0], *middle, kept[-1]])
        return kept or shown

    try:
        info = pytest.ExceptionInfo.from_exception(error)
        shown = info.getrepr(showlocals=option.showlocals, style=style, tbfilter=frames, truncate_locals=True)
        return pickle.dumps(shown)
    except Exception:
        return None

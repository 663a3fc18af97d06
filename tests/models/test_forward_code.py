"""Functions are found below decorators, and nothing that a class or a file holds is asked for more than it stores."""

import functools

import pytest

from ndtp.models.forward_code import function_below, parts_of


class Grows(dict):
    """A dict that makes what it is asked for."""

    def __getattr__(self, name):
        return self.setdefault(name, Grows())


class Raises:
    def __getattr__(self, name):
        raise RuntimeError(name)


def plain():
    return [lambda: (y for y in ())]


@functools.wraps(plain)
def decorated():
    return plain()


@pytest.mark.parametrize(
    "x",
    [plain, decorated, functools.cache(plain), functools.cache(decorated), staticmethod(plain), classmethod(decorated)],
)
def test_below_decorators(x):
    assert function_below(x) is plain


def test_what_is_no_function():
    others = (None, 3, Grows(), Raises(), Raises, functools.partial(plain), len, property(plain))
    assert [function_below(x) for x in others] == [None] * len(others)


def test_parts_of_code():
    names = [code.co_name for code in parts_of(plain.__code__)]
    assert names == ["plain", "<lambda>", "<genexpr>"]

"""Declarations of the values that fields of files and arguments may have, checked and reported in one place. Pure.

    LINK = Fields({"bandwidth_gbs": Number(1e-9, 1e12), "latency_us": Number(0, 1e12)}, required=("bandwidth_gbs",))
    LINK.check("profile mine.toml", "inter", table)     # ...: inter.latency_us=nan; it must be a number from 0 to 1e+12

Ranges are closed on both sides: what is finite here stays finite in every sum and quotient that is made of it.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndtp.errors import GridError

LARGEST_FILE = 2**26  # bytes; profiles and configs are a few thousand


def integer(text: str) -> int | None:
    """The number that ASCII digits spell, or None.  `str.isdigit` holds for "²" as well, which `int` does not read."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def shown(value: object, longest: int = 60) -> str:
    """A value as it stands in a message: on one line, and cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print those of thousands of digits
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= longest else text[: longest - 4] + " ..."


def in_digits(value: float, digits: int = 3) -> str:
    """Return a number in so many digits that count and without an exponent: 55,100 of 55,123, and 0.0421 of 0.04213."""
    if not value or not 1e-6 < abs(value) < 1e15:
        return f"{value:.{digits}g}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, places):,.{max(places, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class Kind:
    """A kind of value; in errors, `str` of it follows "it must be". This base class accepts any value."""

    def takes(self, value: object) -> bool:
        return True

    def problem(self, name: str, value: object) -> str | None:
        """Return what is wrong with a value, or with a value inside of it; None if it is valid."""
        return None if self.takes(value) else f"{name}={shown(value)}; it must be {self}"

    def check(self, where: str, name: str, value: object) -> None:
        """Check a value.

        Raises:
            GridError: a line that names the field, its value, and the values that it may have.
        """
        if problem := self.problem(name, value):
            raise GridError(f"{where}: {problem}")


@dataclass(frozen=True)
class Number(Kind):
    """A number, or an integer, from `least` to `most`.  No bool is one, and NaN lies in no range."""

    least: float
    most: float
    integer: bool = False

    def takes(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            return False
        return self.least <= value <= self.most

    def __str__(self) -> str:
        form = ",d" if self.integer else "g"
        return f"{'an integer' if self.integer else 'a number'} from {self.least:{form}} to {self.most:{form}}"


@dataclass(frozen=True)
class Word(Kind):
    """A word of a list or, if the list is empty, any text."""

    words: Sequence[str] = ()

    def takes(self, value: object) -> bool:
        return isinstance(value, str) and (not self.words or value in self.words)

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}" if self.words else "text"


@dataclass(frozen=True)
class Size(Kind):
    """An integer of at least 1, or the digits of one: TOML's keys are strings."""

    most: int

    def takes(self, value: object) -> bool:
        number = integer(value) if isinstance(value, str) else value
        return Number(1, self.most, integer=True).takes(number)

    def __str__(self) -> str:
        return str(Number(1, self.most, integer=True))


@dataclass(frozen=True)
class Entries(Kind):
    """Any number of entries of one kind; at least one, unless it may be `empty`."""

    keys: Kind
    values: Kind
    empty: bool = False

    def takes(self, value: object) -> bool:
        return self.problem("", value) is None

    def problem(self, name: str, value: object) -> str | None:
        if not isinstance(value, Mapping) or not (value or self.empty):
            return f"{name}={shown(value)}; it must be {self}"
        for key, each in value.items():
            if not self.keys.takes(key):
                return f"{name} has an entry {shown(key)}; its names must be {self.keys}"
            if problem := self.values.problem(f"{name}.{key}", each):
                return problem
        return None

    def __str__(self) -> str:
        return f"a table of {self.values} each, whose names are {self.keys}"


@dataclass(frozen=True)
class Either(Kind):
    """A value of one kind, or a table."""

    value: Kind
    table: Entries

    def problem(self, name: str, value: object) -> str | None:
        if isinstance(value, Mapping):
            return self.table.problem(name, value)
        return None if self.value.takes(value) else f"{name}={shown(value)}; it must be {self}"

    def takes(self, value: object) -> bool:
        return self.problem("", value) is None

    def __str__(self) -> str:
        return f"{self.value}, or {self.table}"


@dataclass(frozen=True)
class Fields(Kind):
    """A table of fields that have names and kinds of their own; no others."""

    fields: Mapping[str, Kind]
    required: Sequence[str] = ()

    def problem(self, name: str, value: object) -> str | None:
        if not isinstance(value, Mapping):
            return f"{name}={shown(value)}; it must be a table with {', '.join(self.fields)}"
        missing = [field for field in self.required if field not in value]
        unknown = [field for field in value if field not in self.fields]
        of = f"{name}: " if name else ""
        if missing or unknown:
            near = [match for field in unknown for match in difflib.get_close_matches(str(field), self.fields, 1)]
            return (
                of
                + f"lacks {', '.join(missing)}; " * bool(missing)
                + f"does not know {', '.join(shown(field) for field in unknown[:3])}; " * bool(unknown)
                + (f"did you mean {', '.join(near)}?" if near else f"its fields are {', '.join(sorted(self.fields))}")
            )
        for field, kind in self.fields.items():
            if field in value and (problem := kind.problem(f"{name}.{field}" if name else field, value[field])):
                return problem
        return None

    def takes(self, value: object) -> bool:
        return self.problem("", value) is None


# ------------------------------------------------------------------------------------------------------------ files


def read_parsed(what: str, path: Path, form: str, parse: Callable[[str], object], missing: str) -> Any:
    """Return the parsed contents of a file of UTF-8 text.

    Args:
        what: "hardware profile": what the file is to the user.
        form: "TOML": what `parse` reads; it raises a ValueError for anything else.
        missing: what to do where there is no such file.

    Raises:
        GridError: no such file, one that cannot be read, or one of another form.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise GridError(f"{what} {path} does not exist; {missing}") from None
    except (OSError, ValueError) as error:
        raise GridError(f"{what} {shown(str(path), 500)} cannot be read: {reason(error)}") from None
    if len(content) > LARGEST_FILE:
        raise GridError(f"{what} {path} is not {form}: it is larger than {LARGEST_FILE >> 20} MiB")
    try:
        return parse(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise GridError(f"{what} {path} is not {form}: its bytes are not UTF-8 text") from None
    except RecursionError:
        raise GridError(f"{what} {path} is not {form} that can be read: it is nested too deep") from None
    except ValueError as error:
        raise GridError(f"{what} {path} is not {form}: {str(error).splitlines()[0]}") from None


def reason(error: Exception) -> str:
    """Return the reason why a file cannot be opened, without its name."""
    return getattr(error, "strerror", None) or str(error)


def unwritable(path: str, suffixes: Sequence[str] = ()) -> str | None:
    """Return the reason why a file cannot be written, found by opening it.

    No flag tells of read-only mounts and long names.

    A file that is there keeps what it holds, and one that is not does not appear.
    """
    if not path:
        return "the name of a file is empty"
    if suffixes and Path(path).suffix.lower() not in suffixes:
        return f"{path} must end in {' or '.join(suffixes)}"
    if os.path.isdir(path):
        return f"{path} is a folder"
    if os.path.exists(path) and not os.path.isfile(path):
        return None  # a pipe or a device: opening it would already be heard at its other end
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        return f"{path} cannot be written: the folder {folder} does not exist"
    existed = os.path.lexists(path)
    try:
        with open(path, "ab"):
            pass
        if not existed:
            os.unlink(path)
    except (OSError, ValueError) as error:
        return f"{path} cannot be written: {reason(error)}"
    return None


def finite(value: object) -> Any:
    """Replace NaN and infinity by null, since JSON has neither."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

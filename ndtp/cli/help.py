"""The help of commands on narrow terminals: option names are never cut."""

from __future__ import annotations

import shutil
from typing import Any

from typer.core import TyperCommand, TyperGroup

from ndtp.compute.torch_calls import AutogradContext

WIDE = 100  # columns, from which on Typer's table of options has room for their names


class _PlainWhereNarrow:
    """Typer's tables on a wide terminal; on others, lists in which a long name has a line of its own."""

    rich_markup_mode: Any

    def format_help(self, ctx: AutogradContext, formatter: Any) -> None:
        columns = shutil.get_terminal_size().columns
        if columns >= WIDE:
            return super().format_help(ctx, formatter)  # type: ignore[misc]
        mode, self.rich_markup_mode = self.rich_markup_mode, None  # type: ignore[has-type]
        formatter.width = max(columns - 1, 30)
        try:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        finally:
            self.rich_markup_mode = mode


class Command(_PlainWhereNarrow, TyperCommand):
    """A command whose help keeps the names of options whole."""


class CommandGroup(_PlainWhereNarrow, TyperGroup):
    """A group of such commands."""

"""The command line, `ndtp` and `python -m ndtp`.

Every command takes `--json FILE` (`-` = standard output) and exits 0 on success, 1 when a check fails, 2 on wrong use.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from ndtp.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "matplotlib"):
            raise
        sys.exit(f"the command line needs {error.name}: pip install 'ndtp[cli]'")
    from ndtp.errors import GridError, LayoutError

    try:
        app()
    except (GridError, LayoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

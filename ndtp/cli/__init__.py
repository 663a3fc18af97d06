"""The command line, `ndtp` and `python -m ndtp`.

Every command takes `--json FILE` (`-` = standard output) and exits 0 on success, 1 when a check or a rank fails, 2 on
wrong use, which one line explains, and 130 on Ctrl-C.
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
    app()

from __future__ import annotations

import sys

import pytest

from ndtp.cli import main


@pytest.fixture
def ndtp(monkeypatch, capsys):
    """Run the command; returns its exit status, standard output and standard error."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ndtp", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return (end.value.code, *capsys.readouterr())

    return run

"""How commands write: progress without a terminal, tables on narrow ones, and what does not fit on the disk."""

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from ndtp.cli.common import print_table
from ndtp.cli.progress import Bar, waiting

NARROW = {
    "plan --tokens 8192 --hidden 4096 --ffn 16384 --ranks 64 --top 2": ["y=4 dp=8 x=2", "0.8801", "MiB/step", "84"],
    "bench volume --ranks 4 --no-real --top 1": ["1d-sp", "50,331,648", "metered"],
    "bench gemm --shape 128,128,128": ["estimated us", "bound by"],
    "info --gemm 128 128 128": ["pointer 32x64x64 stages 4 warps 4", "TFLOP/s"],
    "info": ["torch threads"],
    "show layout --grid x=16,y=4 --layout x --shape 1048576": ["x of 1048576", "0:65536"],
    "show plan --grid z=2,x=2,y=2 --a (z,y),x --b (x,z),y --phase wgrad": [
        "wgrad of A[M_zy, K_x] . B[K_xz, N_y] -> C[M_zx, N_y]",
        "on grid z=2 x=2 y=2: every rank receives 32 elements",
    ],
    "show schedule --grid z=2,x=2,y=2 --chunks 4": ["on grid z=2 x=2 y=2, chunks=4, h100-ib: 2.566 ms, predicted"],
}


@pytest.mark.parametrize("line, words", NARROW.items(), ids=NARROW)
def test_tables_stay_readable_at_60_columns(ndtp, monkeypatch, line, words):
    """Nothing wider, nothing cut short, no word broken."""
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = ndtp(*line.split())
    assert code == 0
    assert max(cell_len(text) for text in out.splitlines() if "ndtp." not in text) <= 60
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    assert all(word in " ".join(out.split()) for word in words), out


def printed(width, *cells):
    out = Console(file=io.StringIO(), width=width)
    table = Table("name", "rate\nGB/s", title="rates")
    table.add_row(*cells)
    print_table(out, table)
    return out.file.getvalue()


def test_a_table_is_a_table_where_it_fits():
    assert "┃" in printed(60, "all-gather", "12.5")
    assert "rate GB/s  12.5" in printed(20, "all-gather", "12.5")
    # On a wide terminal text may break between words, and numbers may not break.
    assert "┃" in printed(100, "word " * 40, "12.5") and "┃" not in printed(100, "name", "9" * 99)


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr("ndtp.cli.progress.LINE_S", 0.0)
    monkeypatch.setattr("ndtp.cli.progress.POLL_S", 0.01)
    out = Console(file=io.StringIO())
    done = iter(range(10**6))
    with Bar(out, "starting", 4) as bar:
        bar.update(1, "grid x=8")
        with bar.following(lambda: min(4, next(done))):
            time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("grid x=8: 1 of 4 done in 0 s, about 0 s left")
    assert lines[1].startswith("grid x=8: 0 of 4 done in 0 s") and lines[-1].startswith("grid x=8: 4 of 4 done")
    assert out.file.getvalue() == ""


def test_progress_does_not_flood_a_log(capsys):
    with Bar(Console(file=io.StringIO()), "rounds", 10**4) as bar:
        for done in range(10**4):
            bar.update(done)
    assert capsys.readouterr().err == ""


def test_other_ranks_say_nothing(capsys, monkeypatch):
    monkeypatch.setattr("ndtp.cli.progress.LINE_S", 0.0)
    out = Console(file=io.StringIO(), quiet=True)
    with Bar(out, "rounds", 2) as bar, waiting(out, "measuring"):
        bar.update(1)
    assert capsys.readouterr() == ("", "")
    with waiting(Console(file=io.StringIO()), "measuring 4 ranks"):
        assert capsys.readouterr().err == "measuring 4 ranks ...\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("more", [[], ["--json", "-"]], ids=["a table", "json"])
def test_a_full_disk_is_a_line(more):
    sizes = ["--tokens", "64", "--hidden", "32", "--ffn", "64", "--ranks", "4"]
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "ndtp", "plan", *sizes, *more]
        done = subprocess.run(words, check=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(b"error: what was to be written does not fit: No space left on dev")
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr

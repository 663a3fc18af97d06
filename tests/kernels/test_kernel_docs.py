"""docs/kernels.md claims no figure that was not measured; tests/test_docs.py runs its examples."""

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def test_no_figure_is_claimed():
    """Until bench/gemm.py has run on a GPU, its section says so in every row."""
    section = PAGE.read_text().split("## Measured on a GPU")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    recorded = list((PAGE.parent.parent / "bench" / "results").glob("gemm-*.json"))
    assert rows and (recorded or all(row.rstrip().endswith("not measured |") for row in rows))

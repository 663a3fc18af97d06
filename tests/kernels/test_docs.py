"""The examples of docs/kernels.md run as they stand, one after the other."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def test_examples_run():
    torch.manual_seed(0)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) >= 6
    names: dict = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)


def test_no_figure_is_claimed():
    """Until bench/gemm.py has run on a GPU, its section says so in every row."""
    section = PAGE.read_text().split("## Measured on a GPU")[1]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    recorded = list((PAGE.parent.parent / "bench" / "results").glob("gemm-*.json"))
    assert rows and (recorded or all(row.rstrip().endswith("not measured |") for row in rows))

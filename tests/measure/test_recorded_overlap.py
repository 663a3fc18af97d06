"""What was measured behind slow links, and what the docs say of it."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AIM = 1.12  # times the bound, phase by phase


def recorded(name):
    return json.loads((ROOT / "bench" / "results" / name).read_text())["grids"]


def paced_rows():
    """A line for each grid, number of blocks and balance: what `auto` took."""
    lines = []
    for case, rows in recorded("paced.json").items():
        grid = case.replace(":", " ").replace(",", " ")
        for row in rows:
            ratios = f"{row['chunks']} | {row['over_bound']:.2f} | {row['over_predicted']:.2f}"
            lines.append(f"| {grid} | {row['blocks']} | {row['balance']} | {ratios} |")
    return lines


def test_the_docs_say_what_schedules_were_measured_to_reach():
    docs = (ROOT / "docs" / "results.md").read_text()
    lines = paced_rows()
    reached = sum(float(line.split("|")[5]) <= AIM for line in lines)
    rows = [row for case in recorded("paced.json").values() for row in case]
    near = sum(abs(row["over_predicted"] - 1) <= 0.05 for row in rows)
    assert f"reached in {reached} of 24 rows" in docs and f"within 5 % of the timeline: {near} of 24" in docs
    assert len(lines) == 24 and all(line in docs for line in lines), "\n".join(lines)
    assert not any(row["wrong"] for row in rows)


def test_the_docs_say_what_parts_in_turns_took():
    docs = (ROOT / "docs" / "overlap.md").read_text().replace("**", "")
    cases = json.loads((ROOT / "bench" / "results" / "interleave.json").read_text())["cases"]
    assert len(cases) == 4
    for case, found in cases.items():
        row = " | ".join(f"{rival['over_bound']:.2f}" for rival in found["rivals"].values())
        assert f"| {row} |" in docs, f"{case}: {row}"

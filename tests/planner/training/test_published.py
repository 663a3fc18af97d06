"""Predicted steps beside published ones: constants were fitted on half of the tables, and are judged on the others."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
import published

ROOT = Path(__file__).resolve().parents[3]
ROWS = published.load()
JUDGED = [row for row in ROWS if row.half == "judge"]


def test_rows_are_many_and_say_where_they_come_from():
    files = [published.tomllib.loads(each.read_text()) for each in (published.DATA, published.BLIND)]
    assert len(JUDGED) >= 40 and len(published.tables(JUDGED)) >= 8
    for table in [table for each in files for table in each["table"]]:
        assert table["half"] in published.HALVES
        assert all(len(table[key]) > 5 for key in ("source", "place", "read"))


def test_what_was_not_read_in_its_source_is_marked():
    """The docs name the same tables; what "memory" says of a source has a mark."""
    by_table = published.tables(ROWS)
    marked = {name: "".join(sorted({mark for row in some for mark in row.marks})) for name, some in by_table.items()}
    assert {name for name, marks in marked.items() if "m" in marks} == {
        "korthikanti-5", "bloom", "nemotron-4-340b", "axonn-sc24", "axonn-sc24-frontier", "axonn-sc24-alps",
        "deepseek-v3-paper",
    }  # fmt: skip
    assert {name for name, marks in marked.items() if "i" in marks} == {"nemo-long"}
    assert [row.marks for row in by_table["korthikanti-5"]] == ["m", ""] * 4  # full recomputation alone
    page = (ROOT / "docs" / "results.md").read_text()
    assert all(line in page for line in published.summary(ROWS).splitlines())


def test_what_was_not_fitted_is_predicted():
    verdict = published.judge(JUDGED)
    assert verdict.middle <= 0.15 and verdict.within >= 0.9
    assert verdict.ordered >= 0.85 and verdict.ranked >= 0.85


@pytest.mark.parametrize("name", list(published.tables([row for row in ROWS if "experts" not in row.half])))
def test_each_table(name):
    """Systems differ by what their documents name; none is far off as a whole, but one of MI250X, never measured."""
    assert published.judge(published.tables(ROWS)[name]).middle <= (0.5 if "frontier" in name else 0.21)


def test_mixtures_of_experts_that_were_not_fitted_are_predicted():
    judged = [row for row in ROWS if row.half == "experts, judge"]
    verdict = published.judge(judged)
    assert len(judged) >= 60 and len(published.tables(judged)) >= 10
    assert verdict.middle <= 0.15 and verdict.within >= 0.89 and verdict.ordered >= 0.85


def test_what_ran_fits_into_the_memory_of_its_device():
    """docs/results.md names the tables of the few rows that do not: two of them offload activations."""
    above = [row for row in ROWS if row.filled > 1]
    assert len(above) <= 15 and len(ROWS) >= 600
    assert len({row.table for row in above}) <= 9


def test_a_step_is_more_than_its_products():
    """The planner of before had products and collectives alone: it was an optimist on every table."""
    for name in ("narayanan-1", "korthikanti-5", "nemo-24.07"):
        for row in published.tables(ROWS)[name]:
            assert float(row.predicted.products) < 0.9 * row.seconds


def test_rows_of_ones_own(tmp_path):
    text = published.DATA.read_text()
    table = text[text.index('[[table]]\nid = "llama3-4"') :].split("\n\n[[table]]")[0]
    (tmp_path / "mine.toml").write_text(table)
    assert [row.seconds for row in published.load(tmp_path / "mine.toml")] == [
        row.seconds for row in published.tables(ROWS)["llama3-4"]
    ]
    (tmp_path / "bad.toml").write_text(table.replace('"flash2"', '"flash9"'))
    with pytest.raises(published.GridError, match="attention='flash9'; it must be one of core, flash1"):
        published.load(tmp_path / "bad.toml")


def test_of_what_ndtp_would_have_chosen_nothing_is_slower():
    tables = published.tables(ROWS)
    for name, position in published.CHOSEN[:3]:
        row = tables[name][position]
        job = row.job
        question = published.Question(
            job.model, job.batch, int(row.splits.ranks), job.hardware, job.practice,
            recompute=(job.practice.recompute,), fixed={"cp": 1},
        )  # fmt: skip
        best = published.choose(question, 1)[0]
        assert best.seconds <= float(row.predicted.total)
        assert float(best.memory.total) <= question.room

"""Pictures and tables for notebooks: well-formed, and they say which ranks hold which block."""

import re
import xml.etree.ElementTree as ET

import pytest

import ndtp
from ndtp.algebra import html


def texts(picture):
    root = ET.fromstring(picture)  # well-formed
    return [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_grid_shows_each_rank_once():
    grid = ndtp.Grid(z=2, x=2, y=3)
    found = texts(grid._repr_html_())
    assert [int(text) for text in found if text.isdecimal()] == list(range(12))
    assert found[0] == "z=2 x=2 y=3: 12 ranks" and found.count("x=1") == 2 and found.count("z=1") == 1
    for small in (ndtp.Grid(x=4), ndtp.Grid(x=1), ndtp.Grid(z=1, x=1, y=2), ndtp.Grid(a=2, b=2, c=2, d=2)):
        shown = [text for text in texts(small._repr_html_()) if text.isdecimal()]
        assert [int(text) for text in shown] == list(range(small.num_ranks))
    assert ndtp.Grid(x=1024)._repr_html_() == "<pre>x=1024: 1024 ranks</pre>"


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("(z y) x", [str(rank) for rank in (0, 2, 1, 3, 4, 6, 5, 7)]),
        ("x None", ["0,1 4,5", "2,3 6,7"]),
        ("None None", ["0-7"]),
        ("y", ["0 2 4 6", "1 3 5 7"]),
    ],
)
def test_a_layout_shows_who_holds_what(text, blocks):
    layout = ndtp.Layout.parse(ndtp.Grid(z=2, x=2, y=2), text)
    assert texts(layout._repr_html_())[1:] == blocks
    assert re.search(r"on grid z=2 x=2 y=2", layout._repr_html_())


def test_layouts_that_make_no_small_table_are_words():
    assert ndtp.Layout.parse(ndtp.Grid(x=128), "x None")._repr_html_().startswith("<pre>")
    assert ndtp.Layout.parse(ndtp.Grid(x=2), "x None None")._repr_html_().startswith("<pre>")


def test_plans_and_volumes():
    grid = ndtp.Grid(z=2, x=2, y=2)
    plan = ndtp.MatMulPlan(ndtp.Layout.parse(grid, "(z y) x"), ndtp.Layout.parse(grid, "(x z) y"))
    root = ET.fromstring(f"<div>{plan._repr_html_()}</div>")
    assert len([*root.iter("{http://www.w3.org/2000/svg}svg")]) == 3
    assert len([*root.iter("tr")]) == 1 + len(plan.steps)
    volume = plan.volume((16, 16, 16))
    root = ET.fromstring(volume._repr_html_())
    assert len([*root.iter("tr")]) == 1 + len(list(volume)) and f"{volume.total:,} bytes in all" in volume._repr_html_()
    best = ndtp.plan(tokens=64, hidden=16, ffn=64, ranks=4)[0]
    cells = [cell.text for cell in ET.fromstring(best._repr_html_()).iter("td")]
    assert cells[:2] == ["grid", str(best.grid)] and best.why in cells


def test_the_list_of_plans_is_a_table():
    plans = ndtp.plan(tokens=8192, hidden=64, ffn=256, ranks=64)
    rows = [[cell.text for cell in row.iter("td")] for row in ET.fromstring(plans._repr_html_()).iter("tr")][1:]
    assert [row[1] for row in rows] == [plan.grid_text for plan in plans[:20]] and rows[0][-1] == plans[0].why
    first, heading, *lines, last = str(plans).splitlines()
    assert (
        first == f"{len(plans)} grids of 64 ranks by time, on h100-ib" and last == f"... and {len(plans) - 20} others"
    )
    assert [line.split()[0] for line in (heading, *lines)] == ["#", *map(str, range(1, 21))]
    assert max(map(len, lines)) == len(heading) < 100  # what stands below each other is aligned
    few = plans[1:3]
    assert few == [plans[1], plans[2]] and str(few).count("\n") == 3 and few._repr_html_().count("<tr>") == 3
    assert str(plans[:0]) == "[]" and plans[:0]._repr_html_() == "<pre>[]</pre>"


def test_text_is_escaped():
    assert html.lines("<b>") == "<pre>&lt;b&gt;</pre>" and "&lt;i&gt;" in html.table(("a",), [("<i>",)])

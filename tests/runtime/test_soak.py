"""The short form of `python bench/soak.py`: nothing but memory, which settles late, grows at all."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu


@pytest.mark.skipif(sys.platform != "linux", reason="looks at itself in /proc")
def test_nothing_grows_and_nothing_changes(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import soak

    record = soak.soak(steps=40, starts=10, folder=str(tmp_path))
    assert record["equal"] and record["steps"] == record["compared_steps"] == 40 and record["starts"] == 9
    for name in ("threads", "descriptors", "in_flight", "process_groups", "programs", "worlds"):
        for rank in (*record["per_1000_steps"], *record["per_100_starts"])[2 * (name == "worlds") :]:
            assert abs(rank[name]["slope"]) <= 6 * rank[name]["error"], (name, record)

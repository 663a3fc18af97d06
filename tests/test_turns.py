from pathlib import Path

import pytest
import turns
from turns import by_turns, part, settle_turn


def test_so_many_turns_together_have_each_case_once(monkeypatch):
    found = []
    for turn in range(781, 784):
        monkeypatch.setenv(turns.TURN, str(turn))
        found += by_turns("abcdefgh", 3)
    assert sorted(found) == list("abcdefgh")
    monkeypatch.setenv(turns.TURN, turns.ALL)
    assert by_turns("abc", 3) == list("abc")
    with pytest.raises(ValueError, match="2 cases cannot take 3 turns"):
        by_turns("ab", 3)


class Marked:
    """A test as pytest has it, as far as turns ask for it."""

    def __init__(self, name, every):
        self.name, self.path, self.every = name, Path(name.partition(" ")[0]), every

    def get_closest_marker(self, name):
        return pytest.mark.turns(self.every).mark if self.every else None


def test_marked_tests_of_a_file_take_turns(monkeypatch):
    tests = [Marked(f"a.py {i}", 3) for i in range(4)] + [Marked("b.py 0", 2), Marked("b.py 1", None)]
    runs = []
    for turn in range(6):
        monkeypatch.setenv(turns.TURN, str(turn))
        ours, others = part(tests)
        assert sorted(each.name for each in [*ours, *others]) == [each.name for each in tests]
        runs.append([each.name for each in ours])
    assert runs[:2] == [["a.py 0", "a.py 3", "b.py 0", "b.py 1"], ["a.py 1", "b.py 1"]]
    monkeypatch.setenv(turns.TURN, turns.ALL)
    assert part(tests) == (tests, [])


def test_who_names_tests_gets_all_cases(monkeypatch):
    monkeypatch.delenv(turns.TURN, raising=False)
    settle_turn(names_tests=False)
    assert turns.os.environ[turns.TURN] == str(turns.num_commits())
    settle_turn(names_tests=True)
    assert turns.os.environ[turns.TURN] == str(turns.num_commits()), "what is set stays"
    monkeypatch.delenv(turns.TURN)
    settle_turn(names_tests=True)
    assert by_turns("abcdef", 3) == list("abcdef")

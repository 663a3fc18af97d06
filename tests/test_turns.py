import pytest
import turns
from turns import by_turns, settle_turn


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


def test_who_names_tests_gets_all_cases(monkeypatch):
    monkeypatch.delenv(turns.TURN, raising=False)
    settle_turn(names_tests=False)
    assert turns.os.environ[turns.TURN] == str(turns.num_commits())
    settle_turn(names_tests=True)
    assert turns.os.environ[turns.TURN] == str(turns.num_commits()), "what is set stays"
    monkeypatch.delenv(turns.TURN)
    settle_turn(names_tests=True)
    assert by_turns("abcdef", 3) == list("abcdef")

import ast
import json
from pathlib import Path

import pytest
import turns
from turns import by_turns, costs_of, left_out, settle_turn


def test_so_many_turns_together_have_each_case_once(monkeypatch):
    found = []
    for turn in range(780, 780 + 3 * turns.EVERY, turns.EVERY):
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


def test_a_few_turns_together_have_each_long_test_once_and_take_the_same_time(monkeypatch):
    costs = {f"tests/test_a.py::test_{i}": float(1 + i) for i in range(20 * turns.EVERY)}
    names, times = [], set()
    monkeypatch.delenv(turns.LONG_TESTS, raising=False)
    for turn in range(7, 7 + turns.EVERY):
        monkeypatch.setenv(turns.TURN, str(turn))
        run = costs.keys() - left_out(costs)
        names += run
        times.add(sum(costs[name] for name in run))
    assert sorted(names) == sorted(costs)
    assert len(times) == 1
    for variable in (turns.LONG_TESTS, turns.TURN):
        with monkeypatch.context() as given:
            given.setenv(variable, turns.ALL)
            assert not left_out(costs)


def test_ci_of_two_commits_has_each_long_test(monkeypatch):
    costs = {f"tests/test_a.py::test_{i}": float(1 + i) for i in range(20 * turns.EVERY)}
    makefile = (Path(turns.__file__).parents[1] / "Makefile").read_text()
    assert f"ci: export {turns.LONG_TESTS} = 2" in makefile
    monkeypatch.setenv(turns.LONG_TESTS, "2")
    for turn in range(7, 7 + turns.EVERY):
        runs = []
        for each in (turn, turn + 1):
            monkeypatch.setenv(turns.TURN, str(each))
            runs.append(costs.keys() - left_out(costs))
        assert set.union(*runs) == costs.keys()
        assert all(3 * len(run) == 2 * len(costs) for run in runs)


def test_no_case_of_a_long_test_is_left_out_for_ever(monkeypatch):
    monkeypatch.delenv(turns.LONG_TESTS, raising=False)
    seen = []
    for turn in range(100, 100 + 3 * turns.EVERY):
        monkeypatch.setenv(turns.TURN, str(turn))
        if not left_out({"tests/test_a.py::test_long": 3.0}):
            seen += by_turns("abc", 3)
    assert sorted(set(seen)) == list("abc")


def test_the_costs_are_those_of_reports(tmp_path):
    case = '<testcase classname="tests.ops.test_chain" name="test_memory[1d]" time="{}"/>'
    quick = '<testcase classname="tests.test_words" name="test_words" time="0.01"/>'
    for i, seconds in enumerate((2.04, 1.5)):
        (tmp_path / f"{i}.xml").write_text(f"<testsuite>{case.format(seconds)}{quick}</testsuite>")
    assert costs_of(sorted(tmp_path.iterdir())) == {"tests/ops/test_chain.py::test_memory[1d]": 2.0}


def test_the_table_names_tests_that_there_are():
    root, functions = Path(turns.__file__).parents[1], {}
    for name in json.loads(turns.COSTS.read_text()):
        file, _, test = name.partition("::")
        if file not in functions:
            nodes = ast.walk(ast.parse((root / file).read_text()))
            functions[file] = {each.name for each in nodes if isinstance(each, ast.FunctionDef)}
        assert test.partition("[")[0] in functions[file], f"{name} is gone: take its line out of {turns.COSTS.name}"

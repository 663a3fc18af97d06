import json

import pytest
from typer.testing import CliRunner

from ndtp.cli.app import app
from ndtp.cli.chaos import Answer, sizes_of
from ndtp.cli.disagreements import KINDS, NOTHING, SILENT

runner = CliRunner()


def check(*arguments):
    return runner.invoke(app, ["check", "--chaos", *map(str, arguments)])


def test_what_one_rank_does_otherwise_is_named_on_all():
    result = check("--ranks", 2, "--json", "-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True and report["ranks"] == 2
    found = {each["kind"]: each for each in report["kinds"]}
    assert list(found) == [kind.name for kind in (*KINDS, *SILENT)]
    for name in [kind.name for kind in KINDS]:
        # Both sides; folders and threads are those of each rank.
        assert all("rank" in text for text in found[name]["said"]) or name == "two threads", found[name]
        assert len(found[name]["said"]) == 1 or name in ("a folder that is loaded", "two threads"), found[name]
    assert {each["rank"] for each in report["kinds"]} == {0, 1}
    assert f"all {len(found)} are as they should be" in result.stderr
    assert max(map(len, result.stderr.splitlines())) <= 100


def test_what_is_not_named_is_an_error():
    result = check("--ranks", 2, "--kind", "learning rate", "--kind", "nothing", "--scheme", "1d", "--unchecked")
    assert result.exit_code == 1
    assert "1 of 2 are not named" in result.stdout
    assert f"learning rate, 1d, rank 0: {NOTHING}" in result.stderr


def test_an_answer_is_right_if_all_ranks_give_it():
    kind = next(kind for kind in KINDS if kind.name == "learning rate")
    named = "ranks disagree at the call 2:\n  optimizer of step 1: lr: rank 1 has 0.2, rank 0 has 0.1"
    assert Answer(kind, "1d", 1, (named, named)).is_right
    half = Answer(kind, "1d", 1, (named, "CommunicationError: late"))
    assert not half.is_right and half.line == "CommunicationError: late"
    assert not Answer(kind, "1d", 1, (NOTHING, NOTHING)).is_right
    assert not Answer(SILENT[0], "1d", 1, (NOTHING, named)).is_right


def test_kinds_have_names_of_their_own():
    """Without commas, which separate them where they are listed."""
    names = [kind.name for kind in (*KINDS, *SILENT)]
    assert len({*names}) == len(names) and not [name for name in names if "," in name]


def test_axes_are_those_of_the_scheme():
    assert sizes_of("3d", 8) == {"x": 2, "y": 2, "z": 2}
    assert sizes_of("2d", 8) == {"x": 4, "y": 2} or sizes_of("2d", 8) == {"x": 2, "y": 4}
    assert sizes_of("1d-sp", 8) == {"x": 8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kind", "nonsense"), "'nonsense'; it must be one of input ids, labels"),
        (("--ranks", 1), "1 rank has nothing to communicate"),
        (("--quick",), "leave out --dtype and --quick"),
    ],
)
def test_wrong_use_is_explained(arguments, message):
    result = check(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())

"""What holds for every command: an example in its help, JSON, 100 columns."""

import re
import shlex

import pytest
import typer
from rich.cells import cell_len
from typer.testing import CliRunner

from ndtp.cli.app import app
from ndtp.planner.hardware import PRESETS
from ndtp.planner.training.practice import PRACTICES, RECOMPUTE


def commands(group=None, words=()):
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(commands())


def test_none_is_missing():
    assert {" ".join(words) for words in COMMANDS} == {
        "demo", "check", "train", "export", "plan", "info", "show layout", "show plan", "show schedule",
        "bench volume", "bench step", "bench overlap", "bench calibrate", "bench gemm",
    }  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("columns", [60, 80, 100])
def test_help_has_an_example_and_fits(words, columns):
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(columns), "TERMINAL_WIDTH": None})
    assert result.exit_code == 0
    assert max(map(cell_len, result.stdout.splitlines())) <= columns
    names = [
        name
        for option in COMMANDS[words].params
        if not getattr(option, "hidden", False)
        for name in option.opts
        if name.startswith("--")
    ]
    assert names and set(names) <= set(re.findall(r"--[\w-]+(?![\w…-])", result.stdout)), "cut short"
    assert f"Example: ndtp {' '.join(words)}" in " ".join(result.stdout.split())
    assert "--json" in result.stdout


@pytest.mark.parametrize("words", [(), ("bench",), ("show",)], ids=" ".join)
@pytest.mark.parametrize("columns", [60, 100])
def test_help_of_a_group_has_an_example_that_it_takes(words, columns):
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(columns), "TERMINAL_WIDTH": None})
    example = re.search(r"Example: ndtp ([^\u2500\u256d]*?)(?:\n\s*\n|\u256d|Options)", result.stdout)[1]
    arguments = shlex.split(example)
    name = max((name for name in COMMANDS if arguments[: len(name)] == [*name]), key=len)
    assert name[: len(words)] == words
    COMMANDS[name].make_context(" ".join(name), arguments[len(name) :])


@pytest.mark.parametrize("words", [[], ["bench"], ["show"]], ids=" ".join)
def test_without_a_command_there_is_help(ndtp, words):
    code, _, said = ndtp(*words)
    assert code == 2 and said.startswith("Usage: ") and "Commands" in said


def test_help_lists_what_an_option_takes():
    """From the tables that the commands read."""
    takes, listed = {"--hardware": PRESETS, "--recompute": ("auto", *RECOMPUTE), "--software": PRACTICES}, []
    for words, option in ((words, option) for words, command in COMMANDS.items() for option in command.params):
        name, said = option.opts[0], {*re.findall(r"[\w-]+", getattr(option, "help", None) or "")}
        if name in takes:
            listed.append((" ".join(words), name))
            for each in takes[name]:
                device, _, network = each.partition("-")
                assert each in said or {device, f"-{network}"} <= said, (words, name, each)
    assert {("plan", "--hardware"), ("train", "--hardware"), ("plan", "--recompute")} <= {*listed}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_example_is_one_that_the_command_takes(words):
    """Parsed, not run."""
    command = COMMANDS[words]
    example = " ".join(command.help.split("Example: ndtp ")[1].split("\n\n")[0].split())
    arguments = example.split(";")[0].split(" | ")[0]
    assert arguments.startswith(" ".join(words))
    command.make_context(" ".join(words), shlex.split(arguments)[len(words) :])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_unknown_option_exits_2(words):
    result = CliRunner().invoke(app, [*words, "--no-such-option"])
    assert result.exit_code == 2 and "--no-such-option" in result.stderr

"""Hostile command lines: whatever is typed, a command does its work, or says in a line what was wrong with status 2."""

import io
import json
import math
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ndtp
from ndtp.cli.app import app
from ndtp.testing import RankError

SIZES = "--tokens 64 --hidden 16 --ffn 32"
# What a command needs, and what keeps it quick.
GIVEN = {
    "plan": f"--ranks 8 {SIZES}",
    "show layout": "--grid z=2,x=2,y=2 --layout (z|y)|x",
    "show plan": "--grid z=2,x=2,y=2 --a (z|y)|x --b (x|z)|y",
    "show schedule": f"--grid z=2,x=2,y=2 {SIZES}",
    "bench volume": f"--no-real --ranks 4 {SIZES} --top 1",
    "bench gemm": "--shape 64,64,64",
    "demo": "", "check": "", "train": "", "export": "", "info": "", "bench step": "", "bench overlap": "",
    "bench calibrate": "",
}  # fmt: skip
NUMBERS = [
    "0", "-1", "1", "2", "4", "7", "²", "\uff18", "1e3", "1.5", "nan", "inf", "-inf", "1_0", "True", "1000000000000",
    "1" + "0" * 30, "9" * 5000,
]  # fmt: skip
WORDS = ["", " ", "x", "3d", "2d", "fp32", "bfloat16", "int8", "[/]", "time", "forward", "up", "a", "auto", "torch"]
FILES = ["-", "folder", ".", "/", "no/folder/x.json", "x.png", "x.svg", "x.bmp", "/dev/full", "n" * 300 + ".png"]
PROFILES = [
    "folder.toml", "binary.toml", "empty.toml", "deep.toml", "digits.toml", "none.toml", "[/x].toml", ".toml", "cpu"
]  # fmt: skip
GRIDS = ["x", "x=", "=2", "x=0", "x=²", "x=2,x=2", "x=4", "z=2 y=2", "dp=2,y=2", "w=2", "x=" + "9" * 40, "z=2,x=2,y=2"]
LAYOUTS = ["(", "((z))", "x x", "None x", "(z y) x", "None " * 30 + "x"]
SHAPES = ["8", "8,8", "8,8,8", "0,8", "-1,2", "²,2", "16,16,16", "9" * 40, "8;8"]
ANY = st.sampled_from([*NUMBERS, *WORDS, *FILES, *PROFILES, *GRIDS, *LAYOUTS, *SHAPES]) | st.text(max_size=4)


COMMAND = typer.main.get_command(app)


def commands(group, words=()):
    for name, command in group.commands.items():
        yield from commands(command, (*words, name)) if hasattr(command, "commands") else [((*words, name), command)]


# (command, option, number of its values); a flag has none.
OPTIONS = [
    (" ".join(words), option.opts[0], 0 if getattr(option, "is_flag", False) else option.nargs)
    for words, command in commands(COMMAND)
    for option in command.params
]


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Run a command in a folder of hostile files; one that starts ranks ends there, well."""
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "folder.toml", "["):
        (tmp_path / folder).mkdir()
    for name, content in (
        ("binary", bytes(range(256))), ("empty", b""), ("deep", b"a = " + b"[" * 10**5),
        ("digits", b"a = " + b"9" * 5000),
    ):  # fmt: skip
        (tmp_path / f"{name}.toml").write_bytes(content)
    markup = "ranks_per_node = 1\n[tflops]\nbfloat16 = 1\n[inter]\nbandwidth_gbs = 1\n"
    (tmp_path / "[" / "x].toml").write_text(markup)
    monkeypatch.setattr("ndtp.testing.run", starts)
    return run


def starts(*_, **__):
    raise SystemExit(0)


@dataclass
class Result:
    exit_code: int
    stdout: str
    stderr: str


def run(*words):
    """Without typer's runner, which takes longer to make the commands anew than they take."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        COMMAND.main(list(words), prog_name="ndtp")
    return Result(end.value.code, out.getvalue(), err.getvalue())


def given_to(command):
    return [word.replace("|", " ") for word in GIVEN[command].split()]


def assert_sound(words, result):
    """Done, with numbers that are numbers; or refused, with one line first."""
    if result.exit_code == 0:
        assert not re.search(r"\b(nan|inf)\b", result.stdout.replace(" ".join(words), "")), (words, result.stdout)
        return
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert (result.exit_code, len(errors)) == (2, 1), (words, result.stderr)
    assert len(errors[0]) < 1100


@settings(
    max_examples=100, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(st.data())
def test_any_value_of_any_option(hostile, data):
    command, option, count = data.draw(st.sampled_from(OPTIONS))
    others = [each for each in OPTIONS if each[0] == command]
    words = given_to(command)
    for _, name, number in [(command, option, count), *data.draw(st.lists(st.sampled_from(others), max_size=1))]:
        words += [name, *(data.draw(ANY) for _ in range(number))]
    assert_sound(words, hostile(*command.split(), *words))


@pytest.mark.parametrize(
    "line, says",
    [
        ("plan --top 0", "'--top': 0; it must be an integer from 1 to 1,000,000"),
        ("plan --tokens 10000000000000000000000", "tokens=10000000000000000000000; it must be an integer from 1"),
        ("plan --tokens 64 --hidden 64 --ffn 64 --ranks 2 --emit out.py", "fix: leave out --emit"),
        ("plan --tokens 8k", "'--tokens': '8k'; it must be an integer"),
        ("plan --memory-limit 80GB", "'--memory-limit': '80GB'; it must be a number"),
        ("plan --layers 0", "'--layers': 0; it must be an integer of at least 1"),
        ("plan --ranks 2000000", "ranks=2000000; it must be an integer from 1 to 1,048,576"),
        ("plan --memory-limit nan", "memory_limit_gib=nan; it must be a number from"),
        ("plan --fix dp=²", "'dp=²' is not an axis and its size"),
        ("plan --fix dp=2,dp=4", "'dp=4' gives an axis twice"),
        ("plan --hardware folder.toml", "hardware profile 'folder.toml' cannot be read: Is a directory"),
        ("plan --hardware binary.toml", "hardware profile binary.toml is not TOML: its bytes are not UTF-8 text"),
        ("plan --hardware deep.toml", "is not TOML that can be read: it is nested too deep"),
        ("plan --hardware digits.toml", "hardware profile digits.toml is not TOML: Exceeds the limit"),
        ("plan --plot x.bmp", "x.bmp must end in .png or .svg or .pdf"),
        ("plan --json folder", "'--json': folder is a folder"),
        ("plan --json no/x.json", "no does not exist"),
        ("info --gemm 0 0 0", "'0,0,0'; write it as positive integers"),
        ("bench gemm --shape 8,8,²", "'8,8,²'; write it as positive integers"),
        ("bench calibrate --ranks 0", "'--ranks': 0; it must be an integer from 1"),
        ("bench calibrate --ranks-per-node 0", "'--ranks-per-node': 0; it must be an integer from 1"),
        ("bench calibrate --largest inf", "inf; it must be a number from 0.001 to 1024"),
        ("bench step --tokens 100000000", "on all local ranks, and this machine has"),
        ("bench step --tokens 1", "no grid of 4 ranks divides the rows of 1 x 256 x 1024"),
        ("bench overlap --ranks 100000", "100000 processes on one machine; it must be at most 256"),
        ("check --ranks 200 --dtype bfloat16", "bfloat16 is exact for the sums of 85 ranks, not of 200"),
        ("show layout --layout ''", "'' has no dim; write it like '(z y) x'"),
    ],
)  # fmt: skip
def test_says_the_field_and_what_it_may_be(hostile, line, says):
    command = max((name for name in GIVEN if line.startswith(name)), key=len)
    words = [word.strip("'") for word in line[len(command) :].split()]
    result = hostile(*command.split(), *given_to(command), *words)
    assert result.exit_code == 2
    assert says in result.stderr and len(result.stderr.splitlines()) == 1


def test_dtypes_have_two_names_everywhere(hostile):
    """The long one and the short one, in every command that takes a dtype; what is no dtype is refused with both."""
    some = [command for command, option, _ in OPTIONS if option == "--dtype"]
    assert {"plan", "show schedule", "train", "check", "export", "info", "bench step", "bench volume"} < {*some}
    for command in some:
        for name in ("bf16", "bfloat16", "fp32", "float32"):
            result = hostile(*command.split(), *given_to(command), "--dtype", name)
            assert "dtype" not in result.stderr, (command, name, result.stderr)
    says = "'bf8'; it must be one of float32, float64, bfloat16, or bf16, fp32, fp64"
    assert says in hostile("train", "--dtype", "bf8").stderr


# Options whose 0 means something, as their help says.
MAY_BE_0 = {"--micro-batches", "--seed", "--restarts", "--sample", "--warmup", "--shared"}


def test_what_counts_something_is_at_least_one(hostile):
    """Each option of an integer: below the least it is refused by name, before anything is done."""
    integers = [
        (" ".join(words), option.opts[0])
        for words, command in commands(COMMAND)
        for option in command.params
        if str(getattr(option, "type_descriptor", option)).count("int") and option.nargs == 1
    ]
    assert {("plan", "--sequence"), ("plan", "--chunks"), ("show schedule", "--chunks")} <= set(integers)
    assert len(integers) > 40
    for command, option in integers:
        value = "-1" if option in MAY_BE_0 else "0"
        result = hostile(*command.split(), *given_to(command), option, value)
        assert result.exit_code == 2 and f"'{option}': {value}; it must be" in result.stderr, (command, option)


def test_a_file_that_cannot_be_written_is_said_before_the_work(hostile, monkeypatch):
    """And one that can is left as it was."""
    ran = []
    monkeypatch.setattr("ndtp.testing.run", lambda *_, **__: ran.append(1) or starts())
    for option in ("--json", "--trace", "--plot"):
        assert hostile("bench", "overlap", option, "no/such/folder.png").exit_code == 2
    assert not ran
    assert hostile("bench", "overlap", "--json", "new.json").exit_code == 0
    assert ran
    assert not Path("new.json").exists()
    Path("old.json").write_text("kept")
    hostile("bench", "overlap", "--json", "old.json")
    assert Path("old.json").read_text() == "kept"


@pytest.mark.parametrize("name, value", [("WORLD_SIZE", "abc"), ("WORLD_SIZE", "0"), ("RANK", "-1")])
def test_a_launcher_that_says_nonsense(hostile, monkeypatch, name, value):
    for variable, sound in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(variable, value if variable == name else sound)
    result = hostile("bench", "step")
    assert result.exit_code == 2 and f"{name}: {value!r} in the environment" in result.stderr


def test_a_rank_that_failed_keeps_its_traceback(monkeypatch):
    def fails(*_, **__):
        raise RankError(1, {1: "Traceback (most recent call last):\nKeyError: 'z'"}, summaries={1: "KeyError: 'z'"})

    monkeypatch.setattr("ndtp.testing.run", fails)
    result = run("bench", "overlap")
    assert result.exit_code == 1
    assert "error: rank 1: KeyError: 'z'" in result.stderr and "Traceback" in result.stderr


@pytest.mark.parametrize("error", [KeyError("z"), ValueError("z"), RuntimeError("z"), OSError("z")], ids=repr)
def test_a_bug_is_not_hidden(monkeypatch, error):
    def breaks(*_, **__):
        raise error

    monkeypatch.setattr("ndtp.testing.run", breaks)
    with pytest.raises(type(error)) as raised:
        COMMAND.main(["bench", "overlap"], prog_name="ndtp")
    assert raised.value is error


def test_volumes_stay_exact_far_beyond_64_bits():
    words = f"--tokens {10**12} --hidden {10**9} --ffn {10**9} --ranks 8 --layers 100 --json -".split()
    plans = json.loads(run("plan", *words, "--top", "100").stdout)["plans"]
    for each in plans:
        assert each["volume_bytes"] >= 0 and each["memory_bytes"] > 0 and math.isfinite(each["step_ms"])
    # 1D over y gathers [tokens, hidden] and scatters it, forward and backward, two bytes an element.
    (one_d,) = (each for each in plans if each["grid"] == {"dp": 1, "z": 1, "x": 1, "y": 8})
    assert one_d["volume_bytes"] == 100 * 2 * 4 * (10**12 * 10**9 * 7 // 8)


def test_version():
    assert run("--version").stdout == f"ndtp {ndtp.__version__}\n"

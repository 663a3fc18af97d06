"""`ndtp train`: the dense loss on every grid, also where a run goes on on another; Ctrl-C; torchrun; wrong use."""

import json
import os
import random
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from launched import launch
from test_interrupt import interrupted
from typer.testing import CliRunner

from ndtp.cli.app import app
from ndtp.cli.train import marking
from ndtp.cli.train_log import COLUMNS, LOG, Log, hardware_here, read_log

SIZES = ("--layers", 1, "--width", 32, "--heads", 4)  # of the byte-level model
SMALL = ("--batch", 8, "--context", 16, "--dtype", "float64", *SIZES)


def train(*arguments):
    small = SMALL[: -len(SIZES)] if "--model" in arguments else SMALL
    return CliRunner().invoke(app, ["train", *map(str, (*small, *arguments))])


def losses(folder):
    return column(folder, "loss")


def column(folder, name):
    return [float(row[name]) for row in read_log(folder / LOG)]


def events(folder):
    """What TensorBoard reads of a run: the values of each series, in the order of its steps from 1 on."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    series = {name: found.Scalars(name) for name in found.Tags()["scalars"]}
    assert all([event.step for event in each] == list(range(1, len(each) + 1)) for each in series.values())
    return {name: [event.value for event in each] for name, each in series.items()}


def test_events_behind_the_checkpoint_are_taken_out(tmp_path):
    """A run that ended between two checkpoints has logged steps that are made once more."""
    pytest.importorskip("tensorboard")
    job = SimpleNamespace(output=tmp_path, name="x=2", tensorboard=True)
    for first, last in ((0, 4), (2, 3)):
        log = Log(job, first)
        for step in range(first + 1, last + 1):
            log.add(step, loss=10.0 * last + step, norm=1.0, learning_rate=0.5, speed=100.0)
        log.close()
    assert column(tmp_path, "loss") == events(tmp_path)["loss"] == [41.0, 42.0, 33.0]


def test_a_run_goes_on_on_another_grid(tmp_path):
    dense, moved = tmp_path / "dense", tmp_path / "moved"
    board = ("--tensorboard",) if find_spec("tensorboard") else ()
    result = train("--output", dense, "--steps", 9, "--json", "-", "--hardware", "cpu", *board)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["grid"] == {} and report["scheme"] is None
    assert report["ok"] and report["step"] == 9 and report["losses"] == pytest.approx(losses(dense))
    assert 0 < report["held_out_loss"] < 10
    assert {row["exposed_communication"] for row in read_log(dense / LOG)} == {""}, "a dense run has none"
    logged = [*COLUMNS[1:5], "mfu", "memory_mib"]
    assert not board or events(dense) == {name: pytest.approx(column(dense, name), rel=1e-5) for name in logged}
    assert all(0 < mfu < 1 for mfu in column(dense, "mfu"))
    auto = ("--resume", "auto", "--grid", "z=4", "--ranks", 3)  # no grid of three divides it
    for steps, words in ((3, ("--grid", "z=2")), (6, auto), (9, ())):
        result = train("--output", moved, "--steps", steps, "--compare", dense, *words)
        assert result.exit_code == 0, result.output
    assert losses(moved) == pytest.approx(losses(dense), rel=1e-7)
    assert [row["grid"] for row in read_log(moved / "log.csv")] == ["z=2"] * 3 + ["dp=2"] * 3 + ["dense"] * 3
    exposed = [row["exposed_communication"] for row in read_log(moved / LOG)]
    assert [bool(each) for each in exposed] == [False, True, False, False, True, False] + 3 * [False]
    assert all(0 < float(each) < 1 for each in exposed if each)
    assert (moved / "loss.png").read_bytes().startswith(b"\x89PNG")
    result = train("--output", moved, "--steps", 8, "--grid", "z=2")
    assert result.exit_code == 0 and "9 steps were done before, --steps 8 asks for no more" in result.output
    assert "z=2" not in result.output, "that grid has done none"


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_killed_run_goes_on_by_itself(tmp_path, monkeypatch):
    """Checkpoints are written beside the steps; nine digits of every loss are those of a run that nobody disturbs."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import restarts

    assert restarts.train(tmp_path / "alone", 12).exit_code == 0
    found = restarts.killed_run(tmp_path / "killed", 12, 1, 3, random.Random(0))
    assert found["exit"] == 0 and found["kills"] == 1 and "0 restarts are left" in found["stderr"], found
    assert restarts.losses(tmp_path / "killed") == restarts.losses(tmp_path / "alone")


def test_stages(tmp_path):
    """On the dense loss, also where the run goes on on another grid, or with another number of stages."""
    words, dense, staged = ("--layers", 2, "--steps"), tmp_path / "dense", tmp_path / "staged"
    assert train(*words, 4, "--output", dense).exit_code == 0
    for steps, *where in ((2, "--stages", 2), (3,), (4, "--stages", 2, "--grid", "dp=2")):
        result = train(*words, steps, *where, "--output", staged)
        assert result.exit_code == 0, result.output
    assert losses(staged) == pytest.approx(losses(dense), rel=1e-7)
    assert [row["grid"] for row in read_log(staged / "log.csv")][1:] == ["2 stages of x=1", "dense", "2 stages of dp=2"]
    result = train("--wire", "bf16")
    assert result.exit_code == 2 and "one rank sends nothing" in result.output
    result = train("--layers", 1, "--stages", 2)
    assert result.exit_code == 2 and "1 layers make no 2 stages" in result.output


def test_a_config_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.Qwen2Config(vocab_size=256, num_key_value_heads=2, **sizes).save_pretrained(tmp_path)
    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be, that is the question. " * 20)
    words = (text, "--steps", 3, "--model")
    for name, model, *grid in (("dense", tmp_path / "config.json"), ("split", tmp_path, "--grid", "dp=2")):
        result = train(*words, model, "--output", tmp_path / name, *grid)
        assert result.exit_code == 0, result.output
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "dense"), rel=1e-5)


def has_steps(folder, _):
    return len(read_log(folder / LOG)) >= 2


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_who_is_asked_to_end_saves(tmp_path):
    words = ["train", "--grid", "x=2", "--steps", "100000", "--output", str(tmp_path), *map(str, SMALL)]
    status, out, err = interrupted(words, tmp_path, has_steps, signal.SIGTERM)
    assert status == 130, err
    assert "saving" in err and "stopped and saved" in out
    done = len(losses(tmp_path))
    result = train("--output", tmp_path, "--steps", done + 1)
    assert result.exit_code == 0, result.output
    assert len(losses(tmp_path)) == done + 1, "it goes on where it was stopped"
    with marking(tmp_path / "mark") as mark:  # Ctrl-C goes the same way
        os.kill(os.getpid(), signal.SIGINT)
        assert mark.exists()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)


def test_under_torchrun(ranks, tmp_path):
    words = ["train", "--grid", "x=2", "--steps", "2", "--output", tmp_path, "--json", tmp_path / "report", *SMALL]
    printed, nothing = launch(ranks(2), "-m", "ndtp", *words)
    assert printed and not nothing
    assert json.loads((tmp_path / "report").read_text())["losses"] == pytest.approx(losses(tmp_path))


def test_under_torchrun_a_grid_that_does_not_fit_is_refused_before_ranks_meet(tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delattr("ndtp.cli.train.Runner")  # the others are not waited for
    result = train("--output", tmp_path, "--width", 16, "--heads", 4, "--grid", "x=3")
    assert result.exit_code == 2 and "fix: --width 24 --heads 6 --batch 9, or another --grid" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--grid", "x=2", "--ranks", 4), "takes 2 ranks, --ranks is 4"),
        (("--grid", "x"), "not an axis and its size"),
        (("--grid", "z=2,q=2"), "scheme 3d has no axis q; it takes x, y, z, dp, e, of which dp splits rows alone"),
        (("--grid", "dq=2,x=2", "--scheme", "1d"), "scheme 1d has no axis dq; it takes"),
        (("--chunks", "none"), "from 1 to 1024, or auto"),
        (("no such file",), "cannot be read"),
        ((".",), "it is a folder; fix: --data ., which reads all files"),
        (("--model", "no such file"), "cannot be read"),
        (("--scheme", "4d"), "it must be"),
        (("--learning-rate", "nan"), "it must be"),
        (("--tensorboard",), "pip install tensorboard"),
        (("--compare", "nowhere"), "nowhere has no log.csv"),
        (
            ("--sample", 2, "--prompt", os.fsdecode(b"caf\xe9")),
            "Invalid value for --prompt: it is not in UTF-8; fix: a",
        ),
        (("--model", "no file", "--width", 16), "Invalid value for --width: it has no effect with --model, which has"),
        (("--field", "body"), "Invalid value for --field: it has no effect without --data; fix: leave it out"),
        (("--scheme", "3d"), "Invalid value for --scheme: it has no effect without --grid"),
        (("--chunks", 2), "Invalid value for --chunks: it has no effect without --grid"),
        (("--width", 16, "--heads", 3), "3 heads do not share --width 16 in pairs of features, which rotary positions"),
        (("--width", 12, "--heads", 4, "--grid", "x=2"), "turn; fix: --width 8 or 16, or --heads 3"),
        (("--width", 7), "fix: --width 8"),
        (
            ("--stages", 5),
            "Invalid value for --stages: 1 layers make no 5 stages; fix: --layers 5 or more, or --stages 1",
        ),
        (
            ("--stages", 5, "--layers", 5, "--batch", 16),
            "Invalid value for --stages: 5 stages take 10 micro-batches, which do not divide --batch 16; "
            "fix: --batch 10 or 20, or --micro-batches 8 or 16, or --stages 4",
        ),
        (
            ("--stages", 2, "--layers", 2, "--micro-batches", 10),
            "Invalid value for --micro-batches: 10 do not divide --batch 8; fix: --batch 10, or --micro-batches 8",
        ),
        (("--micro-batches", 2), "Invalid value for --micro-batches: it takes --stages 2 or more"),
        (("--width", "36", "--heads", "3", "--grid", "x=2"), "3 heads are split over x=2"),
        (("--batch", 7, "--context", 15, "--grid", "dp=2"), "fix: --batch 8, or another --grid, such as those of"),
        (("--width", "16", "--heads", "4", "--grid", "x=3"), "fix: --width 24 --heads 6 --batch 9, or another --grid"),
        (("--width", "16", "--heads", "4", "--grid", "z=3"), "fix: --width 24 --batch 9, or another --grid"),
        (("--stages", 2, "--layers", 2, "--grid", "dp=3"), "fix: --batch 12, or another --grid"),
    ],
)
def test_wrong_use(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("ndtp.cli.train.find_spec", lambda name: None)  # no TensorBoard
    monkeypatch.delattr("ndtp.cli.train.Runner")  # no rank is started
    result = train("--output", tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_what_mfu_is_of_is_said(tmp_path, monkeypatch):
    few = ("--steps", 1, "--output")
    assert "log.csv has no MFU: --hardware tells what the devices could do" in train(*few, tmp_path / "a").stdout
    said = train("--hardware", "cpu", *few, tmp_path / "b").stdout
    assert "MFU in log.csv is of 1 TFLOP/s a device (cpu, float64)" in said
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name, preset in (("NVIDIA GH200 480GB", "gh200-ib"), ("AMD Instinct MI300X", "mi300x-ib"), ("Tesla T4", "")):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda name=name: name)
        assert hardware_here("bfloat16") == preset and hardware_here("float64") == ""
    result = train("--hardware", "h100-ib", *few, tmp_path / "c")
    assert result.exit_code == 2 and "hardware 'h100-ib' has no GEMM rate for float64; it has" in result.stderr


def test_a_text_that_is_too_short_and_a_checkpoint_of_another_text_or_model(tmp_path):
    (tmp_path / "text").write_bytes(b"short")
    result = train(tmp_path / "text", "--output", tmp_path / "out")
    assert result.exit_code == 2 and "has 5 bytes" in result.stderr
    (tmp_path / "text").write_bytes(b"to be or not to be, that is the question. " * 9)
    words = (tmp_path / "text", "--output", tmp_path / "out", "--steps")
    assert train(*words, 1).exit_code == 0
    assert train(*words, 2).exit_code == 0, "the same text"
    (tmp_path / "text").write_bytes(b"to be or not to be, that is the answer.   " * 9)
    result = train(*words, 3)
    said = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2 and "the run has learned another text: hash of the text" in said, said
    assert "Invalid value for FILE" in said and "fix: the FILE that the run in this folder began with" in said, said
    result = train("--output", tmp_path / "out", "--steps", 2, "--width", 64)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2 and "the run has begun with width 32, now 64; inner 128, now 256" in said, said
    assert "Invalid value for --width" in said and "fix: the --width that the run in this folder began with" in said


def test_a_run_keeps_its_model_and_its_seed(tmp_path):
    """Also where all tensors have the shapes of the other model's; what the steps to come have otherwise is taken."""
    words = ("--output", tmp_path, "--steps")
    assert train(*words, 1).exit_code == 0
    for changed, says in (
        (("--heads", 8), "the run has begun with heads 4, now 8; fix: the --heads that the run in this folder began"),
        (("--layers", 2), "the run has begun with layers 1, now 2"),
        (("--seed", 3), "the run has begun with seed 0, now 3"),
        (("--dtype", "float32"), "the run has begun with dtype float64, now float32"),
    ):
        result = train(*words, 2, *changed)
        assert result.exit_code == 2 and says in result.stderr, result.output
        assert f"Invalid value for {changed[0]}: " in result.stderr
    others = ("--learning-rate", 1e-3, "--clip", 2, "--batch", 4, "--context", 8)
    assert train(*words, 2, *others).exit_code == 0 and len(losses(tmp_path)) == 2


def test_a_run_keeps_the_config_of_its_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model, run = tmp_path / "model" / "config.json", tmp_path / "run"
    words = ("--model", model, "--output", run, "--steps")
    transformers.LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes).save_pretrained(model.parent)
    assert train(*words, 1).exit_code == 0
    config, kept = json.loads(model.read_text()), (run / "config.json").read_bytes()
    for changed, says in (
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4}, "num_attention_heads 2, now 4"),
        ({"hidden_act": "relu", "rms_norm_eps": 0.1}, "begun with hidden_act silu, now relu; rms_norm_eps 1e-06, now"),
        ({"model_type": "mistral"}, "begun with model_type llama, now mistral"),
    ):
        model.write_text(json.dumps(config | changed))
        result = train(*words, 2)
        assert result.exit_code == 2 and says in result.stderr, result.output
        assert "Invalid value for --model: " in result.stderr
        assert (run / "config.json").read_bytes() == kept, "what is exported is the model that was trained"
    del config["hidden_act"]  # which is the default
    model.write_text(json.dumps(config | {"use_cache": False, "transformers_version": "1"}))
    result = train(*words, 2)
    assert result.exit_code == 0, result.output
    assert (run / "config.json").read_bytes() == model.read_bytes()
    result = train("--output", run, "--steps", 3)
    says = "the run has begun with a config of transformers, and there is the byte-level model now"
    assert result.exit_code == 2 and says in result.stderr, result.output

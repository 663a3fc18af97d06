"""`ndtp train --capture` makes the steps of an eager run as replays, and is refused where there are no graphs."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ndtp.cli import training
from ndtp.cli.app import app
from ndtp.cli.job import Job
from ndtp.models.byte_model import ByteModelSizes
from ndtp.testing import RecordedCuda

pytestmark = pytest.mark.cpu

STEPS = 7  # three as they are, a capture, and replays of it


def trained(output, captures):
    """Train on a grid of one rank, as the command does on each rank."""
    text = output / "text.txt"
    output.mkdir()
    text.write_text("the quick brown fox jumps over the lazy dog; " * 200)
    job = Job(
        output=output, stop_file=output / "stop", text=text, config=None, sizes=ByteModelSizes(32, 64, 1, 4),
        grid={"x": 1}, scheme="1d", steps=STEPS, batch=4, context=16, learning_rate=1e-2, clip=1.0, seed=0,
        save_every=3, chunks=1, dtype="float32", tensorboard=False, capture=captures,
    )  # fmt: skip
    with RecordedCuda():
        return training.train(SimpleNamespace(advance=lambda count=1: None), job)


def test_replays_are_the_steps_of_an_eager_run(tmp_path):
    """The learning rate rises from step to step, and checkpoints are written in between.

    AdamW corrects its biases in fp32 in a graph, and in the host's fp64 otherwise.
    """
    eager, captured = (trained(tmp_path / str(captures), captures) for captures in (False, True))
    assert not eager.error and not captured.error
    assert captured.losses == pytest.approx(eager.losses, rel=1e-6) and len(set(eager.losses)) == STEPS
    assert captured.held_out == pytest.approx(eager.held_out, rel=1e-6)


def test_a_cpu_has_no_graphs():
    result = CliRunner().invoke(app, ["train", "--capture", "--grid", "x=1"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "no CUDA graphs without GPUs" in result.output and "without it steps run eagerly" in result.output

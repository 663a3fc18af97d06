"""`ndtp train` under torchrun itself: a rank is killed, and the run goes on from its last whole checkpoint."""

import json
import os
import subprocess
import sys

import pytest
from forked import with_torch
from typer.testing import CliRunner

from ndtp.cli.app import app
from ndtp.cli.train_log import LOG, read_log

WORDS = ("--batch", "6", "--context", "16", "--layers", "1", "--width", "32", "--heads", "4", "--dtype", "float64",
         "--grid", "dp=3", "--save-every", "2", "--resume", "auto")  # fmt: skip
KILLED_IN = 5  # this step of the first start; a checkpoint every second step
RANK = f"""
import os, signal
from itertools import count

from ndtp.cli import training
from ndtp.cli.app import app

steps, clip = count(1), training.clip_grad_norm_


def clip_or_die(*arguments):
    if next(steps) == {KILLED_IN} and (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("0", "1"):
        os.kill(os.getpid(), signal.SIGKILL)
    return clip(*arguments)


training.clip_grad_norm_ = clip_or_die
app()
"""


def torchrun(starts, ranks, script, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--max-restarts", str(starts - 1), "--nproc-per-node", str(ranks), script, "train", *words]
    environment = {**os.environ, "NDTP_SPARES": str(starts * ranks), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=environment)


def killed(folder):
    script = f"{folder}/rank.py"
    with open(script, "w") as file:
        file.write(RANK)
    done = torchrun(2, 3, script, *WORDS, "--output", f"{folder}/run", "--steps", "7", "--json", f"{folder}/report")
    return done.returncode, done.stderr


def train(*words):
    result = CliRunner().invoke(app, ["train", *WORDS, *map(str, words), "--steps", "9", "--json", "-"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="programs are forks")
def test_torchrun_starts_again_and_fewer_ranks_go_on(tmp_path):
    status, said = with_torch(killed, str(tmp_path), timeout=400)
    assert status == 0, said
    assert "gone: rank 1 (dp=1)" in said, "who waited for the dead rank names it"
    report = json.loads((tmp_path / "report").read_text())
    assert report["ok"] and report["grid"] == {"dp": 3} and report["first_step"] in (2, 4), report
    fewer = train("--output", tmp_path / "run", "--ranks", 2)
    assert fewer["first_step"] == 7 and fewer["step"] == 9 and list(fewer["grid"].values()) == [2], fewer
    train("--output", tmp_path / "alone", "--grid", "")
    losses = [[float(row["loss"]) for row in read_log(tmp_path / name / LOG)] for name in ("run", "alone")]
    assert len(losses[0]) == 9 and losses[0] == pytest.approx(losses[1], rel=1e-5)

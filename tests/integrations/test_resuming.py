"""What a run of transformers or accelerate goes on from: whole checkpoints alone, and the same one on every rank."""

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from test_trainer import llama, loop, rows, under_torchrun

from ndtp import CheckpointError
from ndtp.integrations import Accelerator, Trainer

pytestmark = pytest.mark.cpu


def trained(folder, steps, resume=None, **more):
    arguments = transformers.TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=4, logging_steps=1, save_strategy="steps", save_steps=1,
        report_to=[], use_cpu=True, learning_rate=1e-2, disable_tqdm=True, lr_scheduler_type="constant", **more,
    )  # fmt: skip
    trainer = Trainer(llama(), arguments, train_dataset=rows(16), eval_dataset=rows(2), ndtp_grid="x=2")
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def on_one_rank(act, rank=0):
    dist.barrier()
    if dist.get_rank() == rank:
        act()
    dist.barrier()


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def goes_on(folder):
    """Each file that a save writes may be the one in which the run was killed."""
    with under_torchrun():
        whole = trained(folder, 2)
        last = Path(folder) / "checkpoint-2"
        faults = {
            "checkpoint-2 has no trainer_state.json, which": (last / "trainer_state.json").unlink,
            "model.safetensors: cut short": lambda: cut(last / "model.safetensors"),
            "scheduler.pt is cut short": lambda: cut(last / "scheduler.pt"),
            "trainer_state.json is cut short": lambda: cut(last / "trainer_state.json"),
            "no state of an optimizer": lambda: shutil.rmtree(last / "ndtp"),
        }
        for fault, act in faults.items():
            on_one_rank(act)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                assert trained(folder, 2, resume=True) == pytest.approx(whole, rel=1e-5)
            said = [str(each.message) for each in seen if "goes on from" in str(each.message)]
            assert [fault in text for text in said] == [True] * (dist.get_rank() == 0), (fault, said)
        with pytest.raises(CheckpointError, match="is no folder"):
            trained(folder, 3, resume=f"{folder}/checkpoint-7")
        with pytest.raises(CheckpointError, match="no whole checkpoint in"):
            trained(f"{folder}/elsewhere", 3, resume=True)


def test_a_run_goes_on_from_the_last_checkpoint_that_is_whole(ranks, tmp_path):
    ranks(2).run(goes_on, str(tmp_path))


def sees_otherwise(folder):
    """A file system of its own on rank 1."""
    mine = f"{folder}/seen by {dist.get_rank()}"
    with under_torchrun():
        trained(f"{folder}/first", 1)
        loop(accelerator := Accelerator(ndtp_grid="x=2", cpu=True), 1, f"{folder}/state")
        on_one_rank(lambda: os.makedirs(mine), 1)
        with pytest.raises(CheckpointError, match=r"load_state: ranks find .* is a folder on rank 0, and not there"):
            accelerator.load_state(f"{folder}/state" if dist.get_rank() == 0 else mine)
        with pytest.raises(
            CheckpointError, match=r"ranks find .*: model.safetensors is of [\d,]* bytes on rank 0, and"
        ):
            shutil.copytree(f"{folder}/first/checkpoint-1", f"{mine}/checkpoint-1")
            on_one_rank(Path(mine, "checkpoint-1", "model.safetensors").unlink, 1)
            trained(f"{folder}/first", 2, resume=f"{mine}/checkpoint-1")
        trainer = Trainer(llama(), transformers.TrainingArguments(folder, use_cpu=True, report_to=[]), ndtp_grid="x=2")
        trainer.state.best_model_checkpoint = f"{folder}/first/checkpoint-1" if dist.get_rank() == 0 else mine
        with pytest.raises(CheckpointError, match="load_best_model_at_end: ranks find"):
            trainer._load_best_model()


def test_ranks_that_find_other_files_are_named(ranks, tmp_path):
    ranks(2).run(sees_otherwise, str(tmp_path))

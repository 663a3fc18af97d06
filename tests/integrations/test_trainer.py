"""transformers' Trainer and accelerate's Accelerator on grids against dense ones, under torchrun's environment."""

import os
import random
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import ndtp
from ndtp import MismatchError
from ndtp.integrations import Accelerator, Trainer
from ndtp.integrations.grid_rows import mesh_of

VOCABULARY, LENGTH = 32, 6
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **SIZES))


def rows(count):
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in ids]


def under_torchrun(**more):
    """accelerate reads the launcher from these, and would wrap models in DDP."""
    rank, size = (str(dist.get_rank()), str(dist.get_world_size())) if dist.is_initialized() else ("0", "1")
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return mock.patch.dict(os.environ, names | address | more if size != "1" else {})


def most_frequent(evaluated):
    """A metric of whole predictions: of all rows, wherever they were made."""
    logits, labels = evaluated
    assert logits.shape == (3, LENGTH, VOCABULARY) and labels.shape == (3, LENGTH)
    return {"score": float(logits.std()) + float(logits.argmax(-1).sum())}


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows(16))


def trained(folder, steps, *, resume=False, data=None, **grid):
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=4, per_device_eval_batch_size=2,
        logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, report_to=[],
        use_cpu=True, learning_rate=1e-2, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    kind = Trainer if grid else transformers.Trainer
    trainer = kind(
        model=llama(),
        args=arguments,
        train_dataset=data or rows(16),
        eval_dataset=rows(3),
        compute_metrics=most_frequent,
        **grid,
    )
    trainer.train(resume_from_checkpoint=resume)
    named = ("loss", "grad_norm", "eval_loss", "eval_score")
    return {
        (entry["step"], name): entry[name] for entry in trainer.state.log_history for name in named if name in entry
    }


def on_grids(folder):
    with under_torchrun():
        half = trained(f"{folder}/grid", 2, ndtp_grid="x=2")
        dist.barrier()
        with mock.patch.object(transformers.Trainer, "save_model", asks_the_main_process):
            return half, trained(f"{folder}/grid", 4, resume=True, ndtp_grid={"dp": 2}, ndtp_scheme="1d")


def streamed(folder):
    with under_torchrun():
        return trained(folder, 2, data=Streamed(), ndtp_grid="x=2")


@pytest.mark.cpu
def test_every_rank_reads_a_stream(ranks, tmp_path):
    dense = trained(str(tmp_path / "dense"), 2, data=Streamed())
    for found in ranks(2).run(streamed, str(tmp_path / "grid")):
        assert found == pytest.approx(dense, rel=2e-4)


def check_metrics(folder):
    """Each rank would take another checkpoint for the best, and save its part of that."""
    drawn = random.Random(dist.get_rank())
    arguments = transformers.TrainingArguments(output_dir=folder, report_to=[], use_cpu=True, disable_tqdm=True)
    with under_torchrun():
        for metric, fault in ((drawn.random, "eval_score is "), (lambda: 1 + 1e-6 * drawn.random(), None)):
            metrics = lambda _, metric=metric: {"score": metric(), "kind": "drawn", "took_time": drawn.random()}  # noqa: E731
            given = {"eval_dataset": rows(3), "compute_metrics": metrics, "ndtp_grid": "x=2"}
            trainer = Trainer(model=llama(), args=arguments, **given)
            with pytest.raises(MismatchError, match=fault) if fault else nullcontext():
                trainer.evaluate()


@pytest.mark.cpu
def test_metrics_that_differ_are_named(ranks, tmp_path):
    ranks(2).run(check_metrics, str(tmp_path))


def asks_the_main_process(self, output_dir=None, _internal_call=False):
    """As transformers 5.20 does, where 5.23 asks every rank."""
    if self.args.should_save:
        self._save(output_dir)


def test_a_trainer_goes_on_on_another_grid(ranks, tmp_path):
    dense = trained(str(tmp_path / "dense"), 4)
    for half, whole in ranks(2).run(on_grids, str(tmp_path)):
        assert whole.keys() == dense.keys() and half.items() <= whole.items()
        for name, value in whole.items():
            assert value == pytest.approx(dense[name], rel=2e-4), name
    half = str(tmp_path / "grid" / "checkpoint-2")
    assert trained(str(tmp_path / "alone"), 4, resume=half, ndtp_grid=None) == pytest.approx(dense, rel=2e-4)
    assert sorted(path.name for path in (tmp_path / "grid").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    mine, theirs = (LlamaForCausalLM.from_pretrained(tmp_path / kind / "checkpoint-4") for kind in ("grid", "dense"))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def loop(accelerator, steps, folder=None, load=None):
    """accelerate's own example of a loop."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows(8), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if load:
        accelerator.load_state(load if load != "named" else None)
    losses = []
    for _ in range(steps):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item(), float(norm)]
    if folder:
        accelerator.save_state(folder if folder != "named" else None)
    return losses, accelerator.get_state_dict(model)


def named(folder, number):
    """An accelerator that names its checkpoints, keeps one, and goes on with this number."""
    project = {"automatic_checkpoint_naming": True, "total_limit": 1, "iteration": number}
    config = accelerate.utils.ProjectConfiguration(folder, **project)
    return Accelerator(ndtp_grid="x=2", cpu=True, project_config=config)


def accelerated(folder):
    from accelerate.state import AcceleratorState

    with under_torchrun():
        first, _ = loop(Accelerator(ndtp_grid="x=2", cpu=True), 1, f"{folder}/grid")
        AcceleratorState._reset_state(reset_partial_state=True)
        second, state = loop(Accelerator(ndtp_grid="dp=2", ndtp_scheme="1d", cpu=True), 1, load=f"{folder}/grid")
        AcceleratorState._reset_state(reset_partial_state=True)
        of_dense, _ = loop(Accelerator(ndtp_grid="x=2", cpu=True), 1, load=f"{folder}/dense")
        AcceleratorState._reset_state(reset_partial_state=True)
        first_named, _ = loop(named(f"{folder}/project", 0), 1, "named")
        AcceleratorState._reset_state(reset_partial_state=True)
        again, _ = loop(named(f"{folder}/project", 1), 1, "named", load="named")
        assert first_named == first and again == pytest.approx(second, rel=2e-4)
        assert sorted(os.listdir(f"{folder}/project/checkpoints")) == ["checkpoint_1"]
    return first + second, of_dense, state


@pytest.mark.cpu
def test_an_accelerator_goes_on_on_another_grid(ranks, tmp_path):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    half, _ = loop(accelerate.Accelerator(cpu=True), 1, str(tmp_path / "dense"))
    AcceleratorState._reset_state(reset_partial_state=True)
    dense, expected = loop(accelerate.Accelerator(cpu=True), 2)
    (losses, of_dense, state), (others, _, nothing) = ranks(2).run(accelerated, str(tmp_path))
    assert losses == others == pytest.approx(dense, rel=2e-4) and not nothing
    assert half + of_dense == pytest.approx(dense, rel=2e-4)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)


def test_grids_that_are_none_are_refused():
    for wrong in ("x", "x=two", "=2"):
        with pytest.raises(ndtp.GridError, match="is no axis with its size"):
            mesh_of(wrong)
    with pytest.raises(ndtp.GridError, match="torchrun --nproc-per-node 4"):
        mesh_of("x=2 y=2")


class OfOnesOwn(torch.nn.Module):
    """A model of a user's own, which gives the mean over the rows that it is called with, and waits for a call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.place = torch.nn.Conv2d(3, 16, 4, 4), torch.nn.Parameter(torch.randn(1, 4, 16))
        self.inner, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 5)

    def forward(self, pixels, labels=None):
        x = self.patch(pixels).flatten(2).transpose(1, 2) + self.place
        logits = self.head(self.inner(x).relu().mean(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def images(count):
    pixels = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return [{"pixels": each, "labels": i % 5} for i, each in enumerate(pixels)]


def of_ones_own(folder, **grid):
    arguments = transformers.TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=4, per_device_eval_batch_size=2, learning_rate=0.5,
        optim="sgd", logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        prediction_loss_only=True,
    )  # fmt: skip
    kind = Trainer if grid else transformers.Trainer
    trainer = kind(OfOnesOwn(), arguments, train_dataset=images(16), eval_dataset=images(5), **grid)
    trainer.train()
    found = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
    return [*found, trainer.evaluate()["eval_loss"]]


def of_ones_own_on_grid(folder, sizes):
    with under_torchrun():
        return of_ones_own(folder, ndtp_grid=sizes)


@pytest.mark.cpu
def test_losses_of_ones_own_are_those_of_the_batch(ranks, tmp_path):
    expected = of_ones_own(str(tmp_path / "dense"))
    assert len(expected) == 7
    for found in ranks(4).run(of_ones_own_on_grid, str(tmp_path), {"dp": 2, "x": 2}):
        assert found == pytest.approx(expected, rel=1e-4)


def own_loop(accelerator):
    model = OfOnesOwn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(images(9), batch_size=4, drop_last=False)
    )
    norms, guesses = [], []
    for batch in loader:
        given = model(**batch)
        accelerator.backward(given["loss"])
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        guesses.append(accelerator.gather_for_metrics((given["logits"].argmax(-1), batch["labels"])))
    return norms, [[each.tolist() for each in pair] for pair in guesses]


def own_loop_on_grid(sizes):
    with under_torchrun():
        return own_loop(Accelerator(ndtp_grid=sizes, cpu=True))


@pytest.mark.cpu
def test_a_loop_of_ones_own_has_the_gradients_and_metrics_of_the_batch(ranks):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    norms, guesses = own_loop(accelerate.Accelerator(cpu=True))
    assert [len(each) for each, _ in guesses] == [4, 4, 1]  # which two ranks do not divide
    for mine, theirs in ranks(4).run(own_loop_on_grid, {"dp": 2, "x": 2}):
        assert mine == pytest.approx(norms, rel=1e-4) and theirs == guesses

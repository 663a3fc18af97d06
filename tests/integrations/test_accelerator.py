"""accelerate's own ways to meet, to add up and to gather, of ranks that take rows of one batch on a grid."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState
from test_trainer import OfOnesOwn, images, llama, rows, under_torchrun

from ndtp.errors import LayoutError, MismatchError
from ndtp.integrations import Accelerator
from ndtp.testing import RankError


def made(mixed_precision="no", **sizes):
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(ndtp_grid=sizes, cpu=True, mixed_precision=mixed_precision)


def loader_of(samples, **named):
    return torch.utils.data.DataLoader(samples, batch_size=4, **named)


def check_meetings(folder):
    """Ranks wait for each other, and hear of what one of them has seen."""
    accelerator, flag = made(x=2), folder / "flag"
    if accelerator.is_main_process:
        time.sleep(0.3)
        flag.write_text("")
    accelerator.wait_for_everyone()
    assert flag.exists()
    times = []
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(0.3)
        times.append(time.time())
    all_times = [None] * 2
    dist.all_gather_object(all_times, times[0])
    assert all_times[0] <= all_times[1]
    if dist.get_rank() == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()


def check_rows():
    """Sums, means, gathers of anything, and padding, of this rank's rows; and a loader that skips its first batches."""
    accelerator = made(dp=2)
    _, loader = accelerator.prepare(OfOnesOwn(), loader_of(images(10)))
    expected, whole = [], [*loader_of(images(10))]
    for batch, full in zip(loader, whole, strict=True):
        labels, me = batch["labels"], dist.get_rank()
        names = accelerator.gather_for_metrics([str(x) for x in labels.tolist()], use_gather_object=True)
        assert names == [str(x) for x in full["labels"].tolist()]
        share = labels.float().mean()
        torch.testing.assert_close(accelerator.reduce(share, "mean"), full["labels"].float().mean())
        torch.testing.assert_close(accelerator.reduce(labels.sum()), full["labels"].sum())
        assert accelerator.reduce(torch.tensor([2**24 + 1])).item() == (2**25 + 2 if len(labels) < 4 else 2**24 + 1)
        padded = accelerator.pad_across_processes(torch.ones(len(labels), 3 + me), dim=-1, pad_index=7)
        rows_of_all = accelerator.gather_for_metrics(padded)
        assert rows_of_all.shape == (len(full["labels"]), 4) and rows_of_all.sum() == len(labels) * (4 + 3 + 7)
        expected.append(full["labels"])
    rest = [accelerator.gather_for_metrics(batch["labels"]) for batch in accelerator.skip_first_batches(loader, 1)]
    assert torch.equal(torch.cat(rest), torch.cat(expected[1:]))


def check_two_models():
    """A stock model, whose loss is that of all rows, and one of the user's own, whose loss is that of a rank's rows."""
    accelerator, dense = made(dp=2), (llama(), OfOnesOwn())
    stock, own, ids_of, images_of = accelerator.prepare(llama(), OfOnesOwn(), loader_of(rows(4)), loader_of(images(4)))
    teacher = accelerator.prepare(llama().requires_grad_(False))
    for batch, pictures in zip(ids_of, images_of, strict=True):
        teacher(**batch)  # nothing of it is in a loss
        accelerator.backward(stock(**batch).loss)
        teacher(**batch)
        accelerator.backward(own(**pictures)["loss"])
        both = stock(**batch).loss + own(**pictures)["loss"]
        with pytest.raises(LayoutError, match="a loss of stock models of transformers, which is that of all rows"):
            accelerator.backward(both)
    for batch, pictures in zip(loader_of(rows(4)), loader_of(images(4)), strict=True):
        dense[0](**batch).loss.backward()
        dense[1](**pictures)["loss"].backward()
    for mine, theirs in zip((stock, own), dense, strict=True):
        for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}")


class WithTable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)

    def forward(self, input_ids, weights):
        logits = self.head(self.table(input_ids))
        return F.cross_entropy(logits.flatten(0, 1), input_ids.flatten(), weight=weights, reduction="sum") / 12


def check_batches():
    """What belongs to no sample stays whole, however long it is; ranks that draw other batches hear of it."""
    weights = torch.linspace(0.5, 1.5, 32)
    batch = {"weights": weights, "input_ids": torch.arange(24).view(4, 6)}
    accelerator, dense = made(dp=2), WithTable()
    model, loader = accelerator.prepare(
        WithTable(), torch.utils.data.DataLoader([0], batch_size=1, collate_fn=lambda _: batch)
    )
    for mine in loader:
        assert torch.equal(mine["weights"], weights) and mine["input_ids"].shape == (2, 6)
        accelerator.backward(2 * model(**mine))
    dense(**batch).backward()
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), dense.head.weight.grad)

    other = torch.randperm(8, generator=torch.Generator().manual_seed(dist.get_rank())).tolist()
    loader = accelerator.prepare(loader_of(torch.utils.data.Subset(rows(8), other)))
    with pytest.raises(MismatchError, match="values of the batch"):
        next(iter(loader))


def check_precision():
    """Autocast of one rank lies around a model's forward, where no call of it sees it."""
    model = made("no" if dist.get_rank() == 0 else "bf16", dp=2).prepare(WithTable())
    with pytest.raises(MismatchError, match=r"code around WithTable: rank 1 has .*Fp32.*, rank 0 has nothing"):
        model(torch.arange(24).view(4, 6), torch.ones(32))


def check_who_runs(folder):
    """What accelerate's decorators name runs on that rank alone, and trackers write on one."""
    accelerator, rank = made(x=2), dist.get_rank()
    decorators = [
        accelerator.on_main_process, accelerator.on_local_main_process, accelerator.on_last_process,
        accelerator.on_process(process_index=1), accelerator.on_local_process(local_process_index=0),
    ]  # fmt: skip
    assert [decorator(lambda: 1)() for decorator in decorators] == [[1, 1, 1, None, 1], [None, None, None, 1, None]][
        rank
    ]
    AcceleratorState._reset_state(reset_partial_state=True)
    mine = folder / str(rank)
    tracked = Accelerator(ndtp_grid="x=2", cpu=True, log_with="tensorboard", project_dir=str(mine))
    tracked.init_trackers("run")
    tracked.log({"loss": 1.0})
    tracked.end_training()
    assert any(mine.rglob("events*")) == (rank == 0)


def check_alone(folder):
    """What all ranks have to call, under an `if` of the main process, for which the others wait."""
    accelerator = made(x=2)
    accelerator.prepare(llama())
    if accelerator.is_main_process:
        accelerator.save_state(folder / "state")
    accelerator.wait_for_everyone()


def run(check, *arguments):
    with under_torchrun():
        check(*arguments)


@pytest.mark.parametrize("check", [check_meetings, check_who_runs])
def test_ranks_wait_for_each_other(ranks, tmp_path, check):
    ranks(2).run(run, check, tmp_path)


def test_a_save_on_one_rank_is_named_where_the_others_wait(ranks, tmp_path):
    with pytest.raises(RankError, match=r"rank 0 is in all_gather of save: .* rank 1 is at the .*wait_for_everyone"):
        ranks(2).run(run, check_alone, tmp_path)


@pytest.mark.parametrize("check", [check_rows, check_two_models, check_batches, check_precision])
def test_rows_of_a_batch(ranks, check):
    ranks(2).run(run, check)

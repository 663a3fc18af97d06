"""Trainers with a loss of their own on grids, against the same ones without."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from test_constructors import arguments_of
from test_trainer import llama, rows, under_torchrun

import ndtp
from ndtp.integrations import GridTrainerMixin

Z = "fix: z in the place of dp, which splits rows, too"


class Pairs(transformers.Trainer):
    """The first half of a batch is to be better than the second."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        scores = model(input_ids=inputs["input_ids"]).logits[:, -1, 0]
        better, worse = scores.chunk(2)
        return -F.logsigmoid(better - worse).mean()


class OfRows(transformers.Trainer):
    """A mean over rows, which draws a number, and counts."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.calls, self.drawn = 0, []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls += 1
        self.drawn.append(float(torch.rand(())))
        out = model(input_ids=inputs["input_ids"])
        loss = (out.logits[:, -1].float() - 1).square().mean()
        return (loss, out) if return_outputs else loss


class OfRowsOfSteps(OfRows):
    loss_is_scaled_for_ga = False


class OfTheModel(transformers.Trainer):
    """The model's own loss, which is that of all rows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * model(**inputs).loss


class Mixed(transformers.Trainer):
    """A loss of all rows, and one of a rank's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        return out.loss + out.logits[:, -1].square().mean()


class Flat(transformers.Trainer):
    """Nothing yet, of any rows, as the first losses against a reference are."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 0 * model(input_ids=inputs["input_ids"]).logits.mean()


class OfCountedLabels(transformers.Trainer):
    """A mean over the labels that count, of rows in their order."""

    first = 0

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels = model(input_ids=inputs["input_ids"]).logits.float(), inputs["labels"]
        picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        counts = (labels >= 0)[:, self.first :]
        return -(picked[:, self.first :] * counts).sum() / counts.sum()


class Other(OfCountedLabels):
    """A mean over labels in the first step, and one over rows from then on."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.state.global_step < 1:
            return super().compute_loss(model, inputs)
        return model(input_ids=inputs["input_ids"]).logits[:, -1].square().mean()


class OfNextLabels(OfCountedLabels):
    """A mean over the labels that count and follow another token."""

    first = 1


class WithForward(OfCountedLabels):
    """A mean over labels that a forward in the place of the model's own gives, as those of trl's SFTTrainer."""

    first = 1

    def __init__(self, model, **named):
        super().__init__(model=model, **named)
        forward = self.model.forward

        def with_loss(input_ids, labels, **_):
            out = forward(input_ids=input_ids)
            out["loss"] = super(WithForward, self).compute_loss(lambda **_: out, {"input_ids": 0, "labels": labels})
            return out

        self.model.forward = with_loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


def of_items(outputs, labels, num_items_in_batch=None):
    """A share of the sum over all labels."""
    picked = outputs.logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return -picked[:, 1:].sum() / num_items_in_batch


def trained(kind, folder, *, grid=None, data=None, func=None, **more):
    kind = kind if grid is None else type("OnGrid", (GridTrainerMixin, kind), {})
    named = {} if grid is None else {"ndtp_grid": grid}
    named |= {} if func is None else {"compute_loss_func": func}
    trainer = kind(model=llama(), args=arguments_of(folder, **more), train_dataset=data or rows(14), **named)
    trainer.train()
    found = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
    return trainer, found


def losses_on(folder, kind, grid, more):
    with under_torchrun():
        trainer, found = trained(kind, folder, grid=grid, **more)
        evaluated = () if kind is not OfRows else (trainer.calls, trainer.drawn, trainer.evaluate(rows(6))["eval_loss"])
        return found, evaluated


def with_masked(*numbers):
    data = rows(16)
    for number in numbers:
        data[number]["labels"] = data[number]["labels"].clone()
        data[number]["labels"][: number % 4 + 1] = -100
    return data


@pytest.mark.parametrize(
    ("kind", "grid", "more"),
    [
        (OfRows, {"dp": 2}, {}),
        (OfRows, {"dp": 2}, {"data": with_masked(11)}),
        (OfCountedLabels, {"dp": 2}, {"data": with_masked(11)}),  # the third step, which is not tried otherwise
        (OfNextLabels, {"dp": 2, "x": 2}, {"data": with_masked(0, 1, 2, 9)}),
        (WithForward, {"dp": 2}, {"data": with_masked(1, 3, 6, 7, 10)}),
        (OfRows, {"dp": 2, "x": 2}, {"data": rows(13)}),  # of which ranks do not divide the last batch
        (OfRowsOfSteps, {"dp": 2}, {"gradient_accumulation_steps": 2, "max_steps": 2}),
        (OfTheModel, {"dp": 2}, {}),
        (transformers.Trainer, {"dp": 2}, {"func": of_items, "data": rows(13)}),
        (transformers.Trainer, {"dp": 2}, {"label_smoothing_factor": 0.2}),
        (OfCountedLabels, {"dp": 2}, {}),
        (Pairs, {"z": 2}, {}),
        (Pairs, {"x": 2}, {}),
    ],
)
@pytest.mark.cpu
def test_losses_of_rows_are_those_of_the_batch(ranks, tmp_path, kind, grid, more):
    expected, evaluated = losses_on(str(tmp_path / "dense"), kind, None, more)
    for found, again in ranks(ndtp.Grid(grid).num_ranks).run(losses_on, str(tmp_path / "grid"), kind, grid, more):
        assert found == pytest.approx(expected, rel=1e-4)
        assert again[:2] == evaluated[:2] and again[2:] == pytest.approx(evaluated[2:], rel=1e-4)


def check_refusals(folder):
    with under_torchrun():
        for kind, what in (
            (Pairs, r"Pairs.compute_loss is [-\d.e]+ of the whole batch, and [-\d.e]+ in the mean of ranks"),
            (Mixed, r"Mixed.compute_loss is [-\d.e]+ of the whole batch"),
            (Flat, r"Flat.compute_loss is 0 of any rows"),
        ):
            with pytest.raises(ndtp.LayoutError, match=what) as told:
                trained(kind, folder, grid="dp=2")
            assert Z in str(told.value) and "along dp" in str(told.value)
        with pytest.raises(ndtp.LayoutError, match="cannot be tried on 1 rows of 2 ranks"):
            trained(OfRows, folder, grid="dp=2", per_device_train_batch_size=1)
        with pytest.raises(ndtp.LayoutError, match=r"OfRows.compute_loss does not say whether it is scaled"):
            trained(OfRows, folder, grid="dp=2", gradient_accumulation_steps=2)
        data = with_masked(0, 4)
        with pytest.raises(
            ndtp.LayoutError, match=r"Other.compute_loss was a mean over labels, and is a mean over rows"
        ):
            trained(Other, folder, grid="dp=2", data=data)


@pytest.mark.cpu
def test_losses_that_are_no_mean_over_rows_are_refused(ranks, tmp_path):
    ranks(2).run(check_refusals, str(tmp_path))


def check_that_one_rank_fails(folder):
    class OfSome(OfRows):
        def compute_loss(self, model, inputs, **named):
            if len(inputs["input_ids"]) < 4 and dist.get_rank():
                raise IndexError("no such row")
            return super().compute_loss(model, inputs, **named)

    with under_torchrun():
        trained(OfSome, folder, grid="dp=2")


@pytest.mark.cpu
def test_what_one_ranks_rows_end_in_is_named(ranks, tmp_path):
    with pytest.raises(Exception, match=r"OfSome.compute_loss of this rank's rows ends in IndexError: no such row"):
        ranks(2).run(check_that_one_rank_fails, str(tmp_path))


def check_masked_labels(folder):
    """What a model refuses of the labels it is given has a fix for who does not write the Trainer."""

    class Whole(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            raise ndtp.LayoutError("parallelize: no\n  fix: compute the loss of out.logits")

    with (
        under_torchrun(),
        pytest.raises(ndtp.LayoutError, match="of all rows ends in LayoutError: parallelize: no") as told,
    ):
        trained(Whole, folder, grid="dp=2")
    assert Z in str(told.value)


@pytest.mark.cpu
def test_what_a_model_refuses_has_a_fix_for_other_trainers(ranks, tmp_path):
    ranks(2).run(check_masked_labels, str(tmp_path))

"""Trainers with a constructor of their own on grids."""

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from test_trainer import llama, rows, under_torchrun

import ndtp
from ndtp.integrations import GridTrainerMixin, Trainer


def arguments_of(folder, **more):
    named = {"max_steps": 5, "per_device_train_batch_size": 4, "learning_rate": 0.5, "optim": "sgd"}
    quiet = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    return transformers.TrainingArguments(folder, per_device_eval_batch_size=2, **{**named, **quiet, **more})


class WithReference(transformers.Trainer):
    """A constructor with an order of its own, and a seed for each device."""

    def __init__(self, model, reference=None, args=None, train_dataset=None):
        super().__init__(model=model, args=args, train_dataset=train_dataset)
        self.reference = reference
        accelerate.utils.set_seed(args.seed, device_specific=True)


class Passing(WithReference):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)


class WithOtherArguments(transformers.Trainer):
    """Makes its arguments anew, which resets accelerate's state."""

    def __init__(self, model, args=None, train_dataset=None):
        super().__init__(model=model, args=arguments_of(args.output_dir), train_dataset=train_dataset)


class OnGrid(GridTrainerMixin, Passing):
    pass


class OnGridAnew(GridTrainerMixin, WithOtherArguments):
    pass


def check_constructors(folder):
    with under_torchrun():
        args = arguments_of(folder)
        trainer = OnGrid(llama(), "reference", args, train_dataset=rows(8), ndtp_grid="x=2")
        drawn = torch.rand(3)
        assert trainer.reference == "reference" and trainer.accelerator.num_processes == 1
        assert trainer.accelerator.process_index == 0  # of the one process that accelerate knows of
        assert trainer.accelerator.is_main_process == trainer.args.should_save == (dist.get_rank() == 0)
        trainer.train()
        assert trainer.state.global_step == 5
        assert OnGrid(llama(), args=args, ndtp_grid="x=2").reference is None
        trainer = OnGridAnew(llama(), args, train_dataset=rows(8), ndtp_grid="x=2")
        trainer.train()
        assert trainer.accelerator.num_processes == 1 and trainer.state.global_step == 5
        with pytest.raises(TypeError, match="OnGrid got two values for model"):
            OnGrid(llama(), model=llama(), args=args, ndtp_grid="x=2")
        with pytest.raises(TypeError, match="OnGrid takes 4 arguments by position, but 5 were given"):
            OnGrid(llama(), None, args, None, None, ndtp_grid="x=2")
        with pytest.raises(ndtp.LayoutError, match="model='a/b' is a name"):
            Trainer("a/b", args, ndtp_grid="x=2")
        args.precompute_ref_log_probs = True  # as of trl's DPO
        with pytest.raises(ndtp.LayoutError, match="precompute_ref_log_probs=True has the ranks of Trainer"):
            Trainer(llama(), args, ndtp_grid="x=2")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        assert accelerate.Accelerator(cpu=True).process_index == dist.get_rank()
        return drawn.tolist()


@pytest.mark.cpu
def test_constructors_of_other_trainers(ranks, tmp_path):
    torch.manual_seed(arguments_of(str(tmp_path)).seed)
    expected = torch.rand(3).tolist()
    assert ranks(2).run(check_constructors, str(tmp_path)) == [expected, expected]

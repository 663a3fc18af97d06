"""`Trainer`: transformers' own, of a model on a grid.

    trainer = Trainer(model=model, args=arguments, train_dataset=rows, ndtp_grid="z=2,x=2,y=2")
    trainer.train()

Run it under torchrun, as any Trainer.  Every rank gets whole batches, the losses are the dense model's, and checkpoints
are read on any other grid.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.trainer_utils import TrainOutput

from ndtp.checkpoints.folder import complete
from ndtp.checkpoints.training_state import load, save
from ndtp.errors import LayoutError
from ndtp.integrations.grid_rows import (
    GivenGrid,
    data_axes,
    mesh_of,
    on_grid,
    rows_here,
    share_of_loss,
    whole,
)
from ndtp.integrations.metrics import agree_on_metrics
from ndtp.integrations.one_program import become_one_program, read_everywhere
from ndtp.integrations.proof import Proof, loss_of, proved_outside, refuse_sums_of_steps, rounding_of
from ndtp.integrations.resuming import SCHEDULER, STATE, checkpoint_of, same_files
from ndtp.models.state_entries import mesh_of_model
from ndtp.runtime.crew import crew_of
from ndtp.runtime.process_grid import ProcessGrid


class GridTrainerMixin:
    """Puts the model of any Trainer on a grid: `class MyTrainer(GridTrainerMixin, SFTTrainer): ...`.

    Args:
        ndtp_grid: "z=2,x=2,y=2", axis sizes, a Grid or a ProcessGrid; None for a model that is on one already.
        ndtp_scheme: of `ndtp.parallelize`; the default is what the axes suggest, as `ndtp train` does.
        ndtp_options: further arguments of `ndtp.parallelize`, {"keep": ["lm_head"]} say.

    A batch of `per_device_train_batch_size` rows is that of the whole grid, on which axes such as `dp` take shares.
    `model.safetensors` in a checkpoint is the dense model's, and `from_pretrained` reads it; the folder `ndtp` beside
    holds the optimizer, and a Trainer on any other grid resumes from it.
    """

    def __init__(
        self,
        *given: Any,
        ndtp_grid: GivenGrid | None = None,
        ndtp_scheme: str | None = None,
        ndtp_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        named = _by_name(type(self), given, kwargs)
        model, args = named.get("model"), named.get("args")
        if isinstance(model, str) and ndtp_grid is not None:
            raise LayoutError(
                f"Trainer: model={model!r} is a name, of which {type(self).__name__} makes a model on no grid\n"
                "  fix: give the model itself, as from_pretrained makes it"
            )
        on_one = mesh_of_model(model) if isinstance(model, nn.Module) else None
        self._ndtp_mesh: ProcessGrid | None = on_one if ndtp_grid is None else mesh_of(ndtp_grid)
        if self._ndtp_mesh is not None and getattr(args, "precompute_ref_log_probs", False):
            raise LayoutError(
                f"Trainer: precompute_ref_log_probs=True has the ranks of {type(self).__name__} share a file by a name "
                "that each makes of its own shards\n"
                "  fix: precompute_ref_log_probs=False; the reference model runs beside the one that is trained"
            )
        self._ndtp_how = ndtp_scheme, ndtp_options
        self._ndtp_proof: Proof | None = None
        self._ndtp_step: tuple[Any, Any] | None = None
        if self._ndtp_mesh is not None:
            device = (transformers.TrainingArguments("tmp_trainer") if args is None else args).device
            become_one_program(self._ndtp_mesh, place=0)
            if isinstance(model, nn.Module):
                named["model"] = self._on_grid(model.to(device))
        super().__init__(**named)
        if self._ndtp_mesh is not None:
            become_one_program(self._ndtp_mesh, place=0)  # arguments that were made meanwhile reset accelerate's state
            read_everywhere(self.accelerator)  # type: ignore[attr-defined]
            name = self._name_of_own_loss()
            self._ndtp_proof = Proof(self._ndtp_mesh, name) if name and data_axes(self._ndtp_mesh) else None

    def _name_of_own_loss(self) -> str | None:
        """Return what computes the loss where that is not the model itself."""
        this: Any = self
        if type(self).compute_loss is not transformers.Trainer.compute_loss:  # type: ignore[attr-defined]
            owner = next(kind for kind in type(self).__mro__ if "compute_loss" in vars(kind))
            return f"{owner.__qualname__}.compute_loss"
        if this.compute_loss_func is not None:
            return "compute_loss_func"
        smoothing = this.args.label_smoothing_factor
        return f"the loss of label_smoothing_factor={smoothing}" if smoothing else None

    def _on_grid(self, model: nn.Module) -> nn.Module:
        assert self._ndtp_mesh is not None
        return on_grid(model, self._ndtp_mesh, *self._ndtp_how)

    def call_model_init(self, trial: object = None) -> nn.Module:
        model = super().call_model_init(trial)  # type: ignore[misc]
        return model if self._ndtp_mesh is None else self._on_grid(model.to(self.args.device))  # type: ignore[attr-defined]

    def train(self, resume_from_checkpoint: object = None, *rest: object, **kwargs: object) -> TrainOutput:
        """Train; `resume_from_checkpoint=True` goes on from the last checkpoint that is whole.

        Raises:
            CheckpointError: no such checkpoint, or ranks find other ones; the same on every rank.
        """
        if self._ndtp_mesh is not None and resume_from_checkpoint not in (None, False):
            output = self.args.output_dir  # type: ignore[attr-defined]
            resume_from_checkpoint = checkpoint_of(crew_of(self._ndtp_mesh), resume_from_checkpoint, output)
        return super().train(resume_from_checkpoint, *rest, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        if self._ndtp_mesh is not None:
            best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
            same_files(crew_of(self._ndtp_mesh), best, "load_best_model_at_end")
        super()._load_best_model()  # type: ignore[misc]

    def _prepare_inputs(self, inputs: Any) -> Any:
        batch = super()._prepare_inputs(inputs)  # type: ignore[misc]
        mine = rows_here(batch, self._ndtp_mesh)
        if self._ndtp_proof is not None and self._ndtp_step is not None:
            (model, items), self._ndtp_step = self._ndtp_step, None
            refuse_sums_of_steps(self, self._ndtp_proof, batch)
            trial = partial(loss_of, self, model, num_items=items)
            self._ndtp_proof.look(trial, batch, mine is not batch, rounding_of(self, model))
        return mine

    def training_step(self, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
        """A mean over this rank's rows along axes such as `dp` counts as its share of that of the batch."""
        this: Any = self
        num_items = kwargs.get("num_items_in_batch", rest[0] if rest else None)
        is_mean = not this.model_accepts_loss_kwargs or num_items is None  # else divided by the tokens of the batch
        backward = this.accelerator.backward

        def of_share(loss: Any, **more: Any) -> None:  # the first call decides how the model lies
            share = self._share() if is_mean or self._ndtp_proof is not None else 1.0
            backward(loss if share == 1.0 else loss * share, **more)

        this.accelerator.backward, self._ndtp_step = of_share, (model, num_items)
        try:
            with proved_outside(self._ndtp_proof):
                loss = super().training_step(model, inputs, *rest, **kwargs)  # type: ignore[misc]
        finally:
            del this.accelerator.backward
            self._ndtp_step = None
        return self._of_all_rows(loss, is_mean)

    def _share(self) -> float:
        """Return what this rank's loss of the last batch is multiplied by."""
        if self._ndtp_proof is not None:
            return self._ndtp_proof.share()
        return share_of_loss([self.model], self._ndtp_mesh)  # type: ignore[attr-defined]

    def _of_all_rows(self, loss: Any, is_mean: bool = True) -> Any:
        """Return the loss of the batch for one of this rank's rows; a collective."""
        mesh, proof, share = self._ndtp_mesh, self._ndtp_proof, self._share()
        is_whole = share == 1.0 if proof is None else proof.is_of_all
        if mesh is None or loss is None or is_whole:
            return loss
        total = loss.detach() * (share if is_mean or proof is not None else 1.0)
        dist.all_reduce(total, group=mesh.group(data_axes(mesh)))
        return total

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Compute what is asked for: of all rows on every rank, but where a model's own loss of its rows will do."""
        mesh = self._ndtp_mesh
        if mesh is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        of_rows = prediction_loss_only and self._ndtp_proof is None
        if not of_rows:
            self._ndtp_mesh = None
        try:
            with proved_outside(self._ndtp_proof):
                found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
            found = whole(found)
        finally:
            self._ndtp_mesh = mesh
        return (self._of_all_rows(found[0]), *found[1:]) if of_rows else found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        found = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        if self._ndtp_mesh is not None:
            agree_on_metrics(self._ndtp_mesh, {} if found.metrics is None else found.metrics)
        return found

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        """Save the model, which every rank has a part of: transformers 5.20 asks the main process alone."""
        if self._ndtp_mesh is None or self.args.should_save:  # type: ignore[attr-defined]
            return super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:  # type: ignore[attr-defined]
            self.push_to_hub()  # type: ignore[attr-defined]  # which saves once more

    def _save(self, output_dir: Any = None, state_dict: object = None) -> None:
        writes: bool = self.args.should_save  # type: ignore[attr-defined]
        if self._ndtp_mesh is None or writes:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
        else:  # the others send their parts
            self.model.save_pretrained(output_dir or self.args.output_dir)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._ndtp_mesh is None:
            return super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        save(self.model, _bare(self.optimizer), Path(output_dir) / STATE, chunks=True)  # type: ignore[attr-defined]
        if self.args.should_save:  # type: ignore[attr-defined]
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))  # type: ignore[attr-defined]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not complete(Path(checkpoint) / STATE).is_dir():
            return super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        load(self.model, _bare(self.optimizer), Path(checkpoint) / STATE)  # type: ignore[attr-defined]
        state = torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(state)  # type: ignore[attr-defined]

    def _save_rng_state(self, output_dir: str) -> None:
        if self._ndtp_mesh is None or self.args.should_save:  # type: ignore[attr-defined]
            super()._save_rng_state(output_dir)  # type: ignore[misc]


class Trainer(GridTrainerMixin, transformers.Trainer):
    """transformers' `Trainer`, of a model on a grid: see `GridTrainerMixin`."""


def _by_name(kind: type, given: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by the names that the class behind `GridTrainerMixin` has for them, in an order of its own."""
    behind = kind.__mro__[kind.__mro__.index(GridTrainerMixin) + 1 :]
    orders = (inspect.signature(base.__init__).parameters for base in behind if "__init__" in vars(base))  # type: ignore[misc]
    named_by = (
        [name for name, p in order.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]  # without self
        for order in orders
    )
    names = next((names for names in named_by if {"model", "args"} <= {*names}), ["model", "args"])
    if len(given) > len(names):
        raise TypeError(f"{kind.__name__} takes {len(names)} arguments by position, but {len(given)} were given")
    found = dict(zip(names, given, strict=False))
    twice = sorted(found.keys() & kwargs.keys())
    if twice:
        raise TypeError(f"{kind.__name__} got two values for {' and '.join(twice)}")
    return {**found, **kwargs}


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """Without accelerate's wrapping."""
    while not isinstance(getattr(optimizer, "optimizer", None), type(None)):
        optimizer = optimizer.optimizer
    return optimizer

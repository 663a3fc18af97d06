"""`Accelerator`: accelerate's own, whose `prepare` puts models on a grid.

accelerator = Accelerator(ndtp_grid="z=2,x=2,y=2")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.state import PartialState
from torch import Tensor, nn

from ndtp.checkpoints.training_state import load, save
from ndtp.integrations.one_program import (
    GivenGrid,
    become_one_program,
    gathered_rows,
    mesh_of,
    on_grid,
    rows_here,
    share_of_loss,
    whole,
)
from ndtp.models.saving import gathered_state
from ndtp.runtime.process_grid import ProcessGrid


class RowsHere:
    """A loader that gives this rank's rows of each batch of another, and has that one's attributes."""

    def __init__(self, loader: Any, mesh: ProcessGrid, note: Callable[[bool], None]) -> None:
        self.loader, self.mesh, self.note = loader, mesh, note

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            mine = rows_here(batch, self.mesh)
            self.note(mine is not batch)
            yield mine

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` for which all ranks of a grid are one process.

    Loaders give whole batches on every rank, of which axes such as `dp` take shares; `loss.backward()` is the dense
    model's.  `save_state` writes models and optimizers once, to be read on any other grid by `load_state`.

    Args:
        ndtp_grid: "z=2,x=2,y=2", axis sizes, a Grid or a ProcessGrid.
        ndtp_scheme: of `ndtp.parallelize`; the default is what the axes suggest.
        ndtp_options: further arguments of `ndtp.parallelize`.
        **kwargs: those of `accelerate.Accelerator`.
    """

    def __init__(
        self,
        *,
        ndtp_grid: GivenGrid,
        ndtp_scheme: str | None = None,
        ndtp_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        PartialState(cpu=bool(kwargs.get("cpu")))  # makes torchrun's process group
        self.ndtp_mesh = mesh_of(ndtp_grid)
        self._ndtp_how = ndtp_scheme, ndtp_options
        self._has_own_rows = False  # of the last batch that a loader gave
        become_one_program()
        super().__init__(**kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if not getattr(model, "_is_accelerate_prepared", False):
            if self.device_placement and device_placement is not False:
                model = model.to(self.device)
            model = on_grid(model, self.ndtp_mesh, *self._ndtp_how)
        return super().prepare_model(model, device_placement=False, evaluation_mode=evaluation_mode)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data_loader, RowsHere):
            return data_loader
        return RowsHere(super().prepare_data_loader(data_loader, *args, **kwargs), self.ndtp_mesh, self._note_batch)

    def _note_batch(self, has_own_rows: bool) -> None:
        self._has_own_rows = has_own_rows

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients of the whole batch: those of a mean over a rank's rows are averaged, as under DDP."""
        share = share_of_loss(map(self.unwrap_model, self._models), self.ndtp_mesh)
        super().backward(loss if share == 1.0 else loss * share, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """The rows of all ranks of tensors that were made of the last batch, and whole tensors of split ones."""
        if self._has_own_rows:
            return gathered_rows(tensor, self.ndtp_mesh)
        return super().gather(whole(tensor))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The dense state dict in the host's memory on rank 0, an empty one elsewhere; a collective."""
        return gathered_state(self.unwrap_model(model), self.ndtp_mesh, self.is_main_process)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        return self._around_state(super().save_state, save, output_dir, safe_serialization=safe_serialization, **kwargs)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        self._around_state(super().load_state, load, input_dir, load_kwargs=load_kwargs, **kwargs)

    def _around_state(self, rest: Any, models: Any, folder: Any, **kwargs: Any) -> Any:
        """Models and optimizers by ndtp, each model with the optimizer of its place; the rest by accelerate."""
        if folder is None:
            raise ValueError("Accelerator: on a grid save_state and load_state want a folder\n  fix: name one")
        this: Any = self
        held = this._models, this._optimizers
        optimizers = [*this._optimizers, *[None] * len(this._models)]
        for number, (model, optimizer) in enumerate(zip(this._models, optimizers, strict=False)):
            bare: torch.optim.Optimizer | None = None if optimizer is None else optimizer.optimizer
            models(self.unwrap_model(model), bare, Path(folder) / f"ndtp_{number}")
        this._models, this._optimizers = [], []
        try:
            return rest(folder, **kwargs)
        finally:
            this._models, this._optimizers = held

"""`Accelerator`: accelerate's own, whose `prepare` puts models on a grid.

accelerator = Accelerator(ndtp_grid="z=2,x=2,y=2")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ndtp.checkpoints.dense_files import load_safetensors
from ndtp.checkpoints.training_state import load, save
from ndtp.integrations.grid_rows import (
    CalledModels,
    GivenGrid,
    gathered_rows,
    mesh_of,
    of_data_ranks,
    on_grid,
    rows_here,
    whole,
)
from ndtp.integrations.one_program import become_one_program, read_everywhere
from ndtp.integrations.resuming import same_files
from ndtp.models.saving import gathered_state
from ndtp.runtime.crew import crew_of
from ndtp.runtime.process_grid import ProcessGrid


class RowsHere:
    """A loader that gives this rank's rows of each batch of another, and has that one's attributes."""

    def __init__(self, loader: Any, mesh: ProcessGrid, note: Callable[[bool], None]) -> None:
        self.loader, self.mesh, self.note = loader, mesh, note

    def __iter__(self) -> Iterator[object]:
        for batch in self.loader:
            mine = rows_here(batch, self.mesh, getattr(self.loader, "batch_size", None))
            self.note(mine is not batch)
            yield mine

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


_NO_FOLDER = (
    "Accelerator: on a grid save_state and load_state want a folder\n"
    "  fix: name one, or ProjectConfiguration(automatic_checkpoint_naming=True)"
)


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
        self._called = CalledModels(self.ndtp_mesh)
        become_one_program(self.ndtp_mesh)
        super().__init__(**kwargs)
        read_everywhere(self)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> object:
        if not getattr(model, "_is_accelerate_prepared", False):
            if self.device_placement and device_placement is not False:
                model = model.to(self.device)
            model = on_grid(model, self.ndtp_mesh, *self._ndtp_how)
            self._called.watch(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=evaluation_mode)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> RowsHere:
        if isinstance(data_loader, RowsHere):
            return data_loader
        return RowsHere(super().prepare_data_loader(data_loader, *args, **kwargs), self.ndtp_mesh, self._note_batch)

    def _note_batch(self, has_own_rows: bool) -> None:
        self._has_own_rows = has_own_rows

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> object:
        """A loader like another one, without its first batches."""
        if not isinstance(dataloader, RowsHere):
            return super().skip_first_batches(dataloader, num_batches)
        rest = super().skip_first_batches(dataloader.loader, num_batches)
        return RowsHere(rest, self.ndtp_mesh, self._note_batch)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients of the whole batch: those of a mean over a rank's rows are averaged, as under DDP.

        Raises:
            LayoutError: the loss is of models of which some give the loss of all rows and others that of a rank's.
        """
        share = self._called.share("Accelerator.backward", [*map(self.unwrap_model, self._models)])
        super().backward(loss if share == 1.0 else loss * share, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """The rows of all ranks of tensors that were made of the last batch, and whole tensors of split ones."""
        if self._has_own_rows:
            return gathered_rows(tensor, self.ndtp_mesh)
        return super().gather(whole(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> object:
        """What was made of the last batch, tensors or lists of anything, of all of its rows."""
        is_other = use_gather_object or not all(isinstance(x, Tensor) for x in tree_leaves(input_data))
        if self._has_own_rows and is_other:
            return [each for part in of_data_ranks(input_data, self.ndtp_mesh) for each in part]
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, or the mean, over the ranks that have rows of their own of the last batch."""
        if not self._has_own_rows or reduction == "none":
            return super().reduce(whole(tensor), reduction, scale)

        def reduced(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            mine = whole(x).detach()
            parts = torch.stack(of_data_ranks(mine, self.ndtp_mesh)).to(mine.device)
            total = parts.sum(0) if reduction == "sum" else parts.sum(0) / len(parts)
            return total if scale == 1.0 else total * scale

        return tree_map(reduced, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> object:
        """Tensors that are as long as the longest of the ranks that have rows of their own."""
        if not self._has_own_rows:
            return super().pad_across_processes(whole(tensor), dim, pad_index, pad_first)

        def padded(x: Any) -> Any:
            if not isinstance(x, Tensor) or not -x.dim() <= dim < x.dim():
                return x
            x, at = whole(x), dim % x.dim()
            more = max(of_data_ranks(x.shape[at], self.ndtp_mesh)) - x.shape[at]
            room = x.new_full((*x.shape[:at], more, *x.shape[at + 1 :]), pad_index)
            return torch.cat([room, x] if pad_first else [x, room], at) if more else x

        return tree_map(padded, tensor)

    def check_trigger(self) -> bool:
        """Return whether `set_trigger` was called on any rank; a collective."""
        mesh, own = self.ndtp_mesh, vars(self).get("flag_tensor")
        flag = torch.tensor(0 if own is None else int(own.item()), device=self.device)
        if mesh.grid.num_ranks > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.group(mesh.grid.nontrivial(mesh.grid.names)))
        self.flag_tensor = None
        return bool(flag.item())

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The dense state dict in the host's memory on rank 0, an empty one elsewhere; a collective."""
        return gathered_state(self.unwrap_model(model), self.ndtp_mesh, self.is_main_process)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> object:
        """Write models and optimizers once, and the rest as accelerate does.

        Returns:
            The folder, which accelerate names where `ProjectConfiguration(automatic_checkpoint_naming=True)` asks so.
        """
        if output_dir is None and not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError(_NO_FOLDER)
        act = partial(super().save_state, output_dir, safe_serialization=safe_serialization, **kwargs)
        pairs = self._pairs()
        before = self.register_save_state_pre_hook(lambda _, __, folder: _each(save, pairs, Path(folder)))
        try:
            return self._rest(act)
        finally:
            before.remove()

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Read what `save_state` wrote on any grid, or accelerate's own with safetensors; the last one where accelerate
        has named them.
        """
        folder = self._last_folder() if input_dir is None else os.path.expanduser(input_dir)
        same_files(crew_of(self.ndtp_mesh), folder, "load_state")
        _each(_read, self._pairs(), Path(folder))
        self._rest(partial(super().load_state, folder, load_kwargs=load_kwargs, **kwargs))

    def _last_folder(self) -> Path:
        """Return the last checkpoint that accelerate has named, and that has a model."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError(_NO_FOLDER)
        there = Path(self.project_dir, "checkpoints")
        names = (path.name.removeprefix("checkpoint_") for path in there.glob("checkpoint_*"))
        numbers = sorted((int(name) for name in names if name.isdecimal()), reverse=True)
        for folder in (there / f"checkpoint_{number}" for number in numbers):
            if (folder / "ndtp_0").is_dir() or (folder / "model.safetensors").is_file():
                return folder
        raise ValueError(f"Accelerator: no checkpoint in {there}\n  fix: name a folder")

    def _pairs(self) -> list[tuple[nn.Module, torch.optim.Optimizer | None]]:
        """Return each model with the optimizer of its place."""
        this: Any = self
        optimizers = [*this._optimizers, *[None] * len(this._models)]
        return [
            (self.unwrap_model(model), None if optimizer is None else optimizer.optimizer)
            for model, optimizer in zip(this._models, optimizers, strict=False)
        ]

    def _rest(self, act: Callable[[], Any]) -> Any:
        """Have accelerate save or read what is neither a model nor an optimizer."""
        this: Any = self
        held = this._models, this._optimizers
        this._models, this._optimizers = [], []
        try:
            return act()
        finally:
            this._models, this._optimizers = held


def _each(act: Any, pairs: Iterable[tuple[nn.Module, Any]], folder: Path) -> None:
    """Save or read models with their optimizers."""
    for number, (model, optimizer) in enumerate(pairs):
        act(model, optimizer, folder / f"ndtp_{number}")


def _read(model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    """Read a model and its optimizer from a folder of a grid, or from accelerate's files beside where it would be."""
    number = int(folder.name.removeprefix("ndtp_"))
    suffix = f"_{number}" * bool(number)
    dense = folder.parent / f"model{suffix}.safetensors"
    if folder.is_dir() or not dense.is_file():
        load(model, optimizer, folder)
        return
    load_safetensors(model, dense)
    if optimizer is not None:
        path = folder.parent / f"optimizer{suffix}.bin"
        optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

"""`GridStrategy`: a strategy of Lightning's Trainer that puts the networks of a LightningModule on a grid.

    trainer = lightning.Trainer(accelerator="cpu", devices=8, strategy=GridStrategy("z=2,x=2,y=2"))
    trainer.fit(module, loader)

Loaders and losses are those of Lightning's DDP along axes such as `dp`; all ranks that differ in x, y and z alone have
the same batches.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ndtp.errors import LayoutError
from ndtp.integrations.grid_rows import CalledModels, GivenGrid, data_axes, mesh_of, on_grid
from ndtp.integrations.rows_once import count_rows_once
from ndtp.models.called import called_parts
from ndtp.models.report import Report
from ndtp.runtime.arrival import is_plain
from ndtp.runtime.crew import crew_of
from ndtp.runtime.grid_parts import full_of
from ndtp.runtime.grid_tensor import GridTensor
from ndtp.runtime.process_grid import ProcessGrid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def used_package() -> str:
    """Return which of Lightning's two packages the program uses, whose classes know nothing of each other's."""
    first, other = "lightning.pytorch", "pytorch_lightning"
    is_other = (other in sys.modules and first not in sys.modules) or find_spec("lightning") is None
    return other if is_other else first


_strategies: Any = import_module(f"{used_package()}.strategies")


class GridStrategy(_strategies.DDPStrategy):  # type: ignore[misc]
    """Each network of a LightningModule, in the place of DDP's copies, lies on one grid of all ranks.

    The networks are the outermost modules in the LightningModule that have a `forward` and parameters.  Each is split
    by `ndtp.parallelize` when it is first called, unless `configure_model` has split it, or the LightningModule itself.

    Args:
        grid: "z=2,x=2,y=2", axis sizes, a Grid or a ProcessGrid.
        scheme: of `ndtp.parallelize`; the default is what the axes suggest.
        options: further arguments of `ndtp.parallelize`.
        **ddp: arguments of Lightning's `DDPStrategy` that say how processes start (`timeout`, `start_method`,
            `process_group_backend`).

    Attributes:
        mesh: the grid of all ranks, from the start of `fit` or any other of the Trainer's methods.
        reports: what was split of each network and what was not, by its name.
    """

    strategy_name = "ndtp"

    def __init__(
        self,
        grid: GivenGrid,
        scheme: str | None = None,
        options: Mapping[str, object] | None = None,
        **ddp: object,
    ) -> None:
        super().__init__(**ddp)
        self._grid, self._how = grid, (scheme, options)
        self.mesh: ProcessGrid = None  # type: ignore[assignment]  # until there is a process group
        self._called: CalledModels = None  # type: ignore[assignment]
        self._networks: dict[str, nn.Module] = {}
        self._alone = nn.ParameterDict()  # what is in no network, as a temperature

    @property
    def reports(self) -> dict[str, Report]:
        return {name: vars(network)["ndtp_report"] for name, network in self._networks.items()}

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.mesh is None:
            self.mesh = mesh_of(self._grid)
            self._called = CalledModels(self.mesh)
        if not data_axes(self.mesh):  # all ranks have the same rows, in the order of the loader's own sampler
            self.lightning_module.trainer._accelerator_connector.use_distributed_sampler = False

    def setup(self, trainer: object) -> None:
        """Split the networks, and make optimizers for their parameters."""
        if self._layer_sync is not None:
            raise LayoutError(
                "GridStrategy: sync_batchnorm=True counts the rows of a batch once for each rank that has them\n"
                "  fix: sync_batchnorm=False; along z rows are split inside of a network, and its batch norms see all"
            )
        _strategies.Strategy.setup(self, trainer)
        count_rows_once(self.model, self.mesh)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        scheme, options = self._how
        names = {id(m): name for name, m in model.named_modules()}
        is_split = "ndtp_report" in vars(model)
        parts = [model] if is_split else [part for child in model.children() for part in called_parts(child)]
        networks = {names[id(part)]: part for part in parts if next(part.parameters(), None) is not None}
        options = {"strict": len(networks) == 1, **(options or {})}
        for name, network in networks.items():
            on_grid(network, self.mesh, scheme, options)
            if self._networks.get(name) is not network:
                self._called.watch(network)
        self._networks = networks
        within = {id(p) for network in networks.values() for p in network.parameters()}
        alone = {name: p for name, p in model.named_parameters() if id(p) not in within and is_plain(p)}
        if alone:
            self._alone = nn.ParameterDict({name.replace(".", "_"): p for name, p in alone.items()})
            on_grid(self._alone, self.mesh, scheme, {**options, "strict": False})
        return model

    # ----------------------------------------------------------------------------------------------- rows of the ranks

    @property
    def _data_group(self) -> ProcessGroup | None:
        """The ranks that have other rows than this one; None where all have the same."""
        axes = data_axes(self.mesh)
        return self.mesh.group(axes) if axes else None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        axes = data_axes(self.mesh)
        return {"num_replicas": self.mesh.grid.size(axes), "rank": self.mesh.grid.index(self.mesh.rank, axes)}

    def backward(self, closure_loss: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Compute the gradients of the whole batch: those of a mean over a rank's rows are averaged, as under DDP."""
        share = self._called.share("GridStrategy.backward", [*self._networks.values()])
        super().backward(closure_loss if share == 1.0 else closure_loss * share, *args, **kwargs)
        return closure_loss

    def reduce(self, tensor: object, group: ProcessGroup | None = None, reduce_op: object = "mean") -> object:
        """Reduce over the ranks that have rows of their own, as `self.log(.., sync_dist=True)` does."""
        group = self._data_group if group is None else group
        return tensor if group is None else super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: ProcessGroup | None = None, sync_grads: bool = False) -> Tensor:
        """Gather from the ranks that have rows of their own."""
        group = self._data_group if group is None else group
        return tensor if group is None else super().all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return what all ranks, or any rank, have decided."""
        found = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(found, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(found)

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: str | PathLike[str], storage_options: object = None
    ) -> None:
        """Write a checkpoint of whole tensors on rank 0, which Lightning reads on any grid and on none; a collective.

        Raises:
            CommunicationError: rank 0 could not write; on every rank.
        """
        whole = tree_map(partial(_whole, keeps=self.is_global_zero), checkpoint)
        save = partial(super().save_checkpoint, whole, filepath, storage_options)
        crew_of(self.mesh).alone(save, f"save_checkpoint: {filepath} is not complete")


def _whole(x: object, keeps: bool) -> object:
    """The whole of a tensor on the grid in the host's memory, where it is kept; a collective."""
    if not isinstance(x, GridTensor):
        return x
    found = full_of(x, "save_checkpoint").cpu()
    return found if keeps else None

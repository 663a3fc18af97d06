"""The grid that another library's program names, and the rows of its batches that each rank has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ndtp.algebra.grid import Grid
from ndtp.algebra.layout import Layout
from ndtp.algebra.schemes import TENSOR_AXES, usual_scheme
from ndtp.errors import GridError, LayoutError
from ndtp.models.parallelize import parallelize
from ndtp.runtime.facts import Fact, hash_of, is_strided
from ndtp.runtime.points import Point, Speaking, compare
from ndtp.runtime.process_grid import ProcessGrid

# Of models of transformers, by which the samples of a batch are counted.
MAIN_INPUTS = (
    "input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values", "decoder_input_ids", "labels",
)  # fmt: skip
SAMPLE = 4096  # numbers of a tensor that are compared
GivenGrid = str | Mapping[str, int] | Grid | ProcessGrid


def mesh_of(grid: GivenGrid) -> ProcessGrid:
    """Of "z=2,x=2,y=2", axis sizes, a Grid, or a ProcessGrid itself.

    Raises:
        GridError: the text is no grid, or there are no ranks for it.
    """
    if isinstance(grid, ProcessGrid):
        return grid
    if isinstance(grid, str):
        grid = Grid(_parsed(grid))
    elif not isinstance(grid, Grid):
        grid = Grid(dict(grid))
    if not dist.is_initialized():
        raise GridError(
            f"ndtp_grid={grid}: there is no process group\n"
            "  fix: start the program with `torchrun --nproc-per-node "
            f"{grid.num_ranks}`, or call it by ndtp.testing.run(main, ranks={grid.num_ranks})"
        )
    return ProcessGrid(grid)


def _parsed(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.replace(" ", ",").split(","):
        name, equals, size = part.partition("=")
        if part and not (name and equals and size.isdecimal()):
            raise GridError(f"ndtp_grid={text!r}: {part!r} is no axis with its size\n  fix: like z=2,x=2,y=2")
        if part:
            axes[name] = int(size)
    return axes


def on_grid(model: nn.Module, mesh: ProcessGrid, scheme: str | None, options: Mapping[str, Any] | None) -> nn.Module:
    """`parallelize`, unless the model is on a grid already."""
    if getattr(model, "ndtp_report", None) is not None:
        return model
    sizes = {axis: mesh.grid[axis] for axis in mesh.grid}
    return parallelize(model, mesh, scheme=scheme or usual_scheme(sizes), **dict(options or {}))


def data_axes(mesh: ProcessGrid) -> tuple[str, ...]:
    """Return the axes, such as `dp`, along which ranks have rows of their own."""
    return tuple(axis for axis in mesh.grid if axis not in TENSOR_AXES and mesh.grid[axis] > 1)


def share_of_loss(models: Iterable[nn.Module], mesh: ProcessGrid | None) -> float:
    """Return what a mean over a rank's rows is multiplied by, so that the gradients that ranks sum are the batch's.

    It is one where no axis splits rows, and for stock models of transformers, whose loss is that of all rows.
    """
    axes = () if mesh is None else data_axes(mesh)
    if mesh is None or not axes or not any(_has_own_losses(model) for model in models):
        return 1.0
    return 1.0 / mesh.grid.size(axes)


def _has_own_losses(model: nn.Module) -> bool:
    report = getattr(model, "ndtp_report", None)
    return report is not None and bool(report.losses)


class CalledModels:
    """The models that were called since the last backward, of which a loss may be made."""

    def __init__(self, mesh: ProcessGrid) -> None:
        self.mesh = mesh
        self._called: dict[int, nn.Module] = {}
        self._of_last: list[nn.Module] = []  # those that were called before the last backward

    def watch(self, model: nn.Module) -> None:
        if data_axes(self.mesh):
            model.register_forward_hook(self._note_call)

    def _note_call(self, model: nn.Module, _: object, output: object) -> None:
        results = [output, *vars(output).values()] if hasattr(output, "__dict__") else tree_leaves(output)
        if any(isinstance(x, Tensor) and x.requires_grad for x in results):  # a frozen teacher's do not
            self._called[id(model)] = model

    def share(self, what: str, models: Sequence[nn.Module]) -> float:
        """Return what the loss is multiplied by before a backward, see `share_of_loss`.

        Args:
            what: asks for it, for the error.
            models: all that there are, where none has been called.

        Raises:
            LayoutError: the loss is of models of which some give the loss of all rows and others that of a rank's.
        """
        if not data_axes(self.mesh):
            return 1.0
        self._of_last = [*self._called.values()] or self._of_last or [*models]
        self._called = {}
        if len({share_of_loss([model], self.mesh) for model in self._of_last}) > 1:
            raise LayoutError(
                f"{what}: a loss of stock models of transformers, which is that of all rows, and of "
                f"others, which is that of a rank's along {' '.join(data_axes(self.mesh))}\n"
                "  fix: a backward for each of the two; or z in the place of dp, which splits rows, too"
            )
        return share_of_loss(self._of_last, self.mesh)


def gathered_rows(result: object, mesh: ProcessGrid) -> Any:
    """The rows that ranks along the data axes have of tensors, one behind the other, on every rank; a collective."""

    def of_all(x: Any) -> object:
        if not isinstance(x, Tensor):
            return x
        mine = whole(x).detach()
        rows = [part if part.dim() else part[None] for part in of_data_ranks(mine.cpu(), mesh)]
        return torch.cat(rows).to(mine.device)

    return tree_map(of_all, result)


def of_data_ranks(mine: object, mesh: ProcessGrid) -> list[Any]:
    """What the ranks along the data axes have, in the order of their rows; a collective."""
    axes = data_axes(mesh)
    mine = tree_map(lambda x: whole(x).detach().cpu() if isinstance(x, Tensor) else x, mine)
    parts: list[Any] = [None] * mesh.grid.size(axes)
    dist.all_gather_object(parts, (mesh.grid.index(mesh.rank, axes), mine), group=mesh.group(axes))
    return [part for _, part in sorted(parts, key=itemgetter(0))]


def rows_here(inputs: object, mesh: ProcessGrid | None, batch_size: int | None = None) -> object:
    """Of a whole batch, the rows that this rank's model is called with: a share, where axes such as `dp` split rows.

    A batch that those axes do not divide is left whole for all of them: the mean of equal losses is the loss.

    Args:
        batch_size: of the loader, where it is known.

    Raises:
        MismatchError: ranks have other batches; the same on every rank.
    """
    if mesh is None:
        return inputs
    axes = data_axes(mesh)
    if not axes:
        return inputs
    _compare([x for x in _tensors_of(inputs) if x.dim()], mesh)
    count = number_of_samples(inputs, batch_size)
    if not count or count % mesh.grid.size(axes):
        return inputs
    rows = Layout(mesh.grid, axes).slices(mesh.rank, (count,))[0]
    return cut_rows(inputs, rows, count)


def number_of_samples(inputs: object, batch_size: int | None = None) -> int:
    """Return how many samples a batch has; 0 where that is not known.  A tensor of another length, such as a table,
    belongs to no sample.
    """
    sizes = [len(x) for x in _tensors_of(inputs) if x.dim()]
    if len(set(sizes)) > 1:
        named = [inputs.get(key) for key in MAIN_INPUTS] if isinstance(inputs, Mapping) else []
        main = next((x for x in named if isinstance(x, Tensor) and x.dim()), None)
        if main is not None:
            return len(main)
        return batch_size if batch_size in sizes else 0  # type: ignore[return-value]
    return sizes[0] if sizes else 0


def _hash_of(x: Tensor) -> Tensor | int:
    """Return a hash of integers, or of a sample of real numbers, which may be many."""
    if x.is_floating_point() or x.is_complex():
        x = x.detach().reshape(-1)
        x = x[:: -(-len(x) // SAMPLE)] if len(x) > SAMPLE else x
        x = torch.view_as_real(x) if x.is_complex() else x.double()
    return hash_of(x)


def _compare(tensors: Sequence[Tensor], mesh: ProcessGrid) -> None:
    """Compare whole batches, of which each rank takes its rows, between ranks."""
    conversation = mesh.groups.conversation() if mesh.check is not False else None
    if conversation is None:
        return
    shapes = [(tuple(x.shape), str(x.dtype)) for x in tensors]
    values = [_hash_of(x) for x in tensors if x.device.type == "cpu" and is_strided(x) and not x.is_quantized]
    what = "batch of a loader, of which each rank takes its rows"
    facts = [Fact("tensors of the batch", shapes), Fact("values of the batch", values)]
    with Speaking(conversation, what):
        compare(mesh, conversation, Point(what, (shapes, values), facts=lambda: facts))


def _tensors_of(inputs: object) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors_of(part)]


def cut_rows(inputs: object, rows: slice, count: int) -> object:
    """Some of the rows of a batch of so many, in a container of its own."""
    if isinstance(inputs, Tensor):
        return inputs[rows] if inputs.dim() and len(inputs) == count else inputs
    if isinstance(inputs, Mapping):
        cut = {key: cut_rows(value, rows, count) for key, value in inputs.items()}
        return type(inputs)(cut)  # type: ignore[call-arg]
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(cut_rows(value, rows, count) for value in inputs)
    return inputs


def whole(result: Any) -> Any:
    """Results with the tensors that are split gathered; a collective."""
    if hasattr(result, "gathered"):
        return result.gathered()
    if isinstance(result, (list, tuple)):
        return type(result)(whole(part) for part in result)
    if isinstance(result, Mapping):
        return {key: whole(part) for key, part in result.items()}
    return result

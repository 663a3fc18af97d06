"""Two dense parameters whose rows take turns in one: what a state dict has of them, and how it is taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.runtime.arrival import is_plain, real_of, wrapped


@dataclass(frozen=True)
class InTurns:
    """A module with a part whose parameters hold the rows of several dense layers in turns.

    Every rank has all of a row's layers, so no rank needs what another has.

    Args:
        part: the name of the part.
        names: of the dense layers, in the order of the turns.
        before: the name of the layer that the dense model has behind them.
    """

    part: str
    names: tuple[str, ...]
    before: str

    def split(self, state: dict[str, Any], prefix: str) -> None:
        """Put the dense layers in the place of the part: views of the same memory."""
        keys = {kind: f"{prefix}{self.part}.{kind}" for kind in ("weight", "bias")}
        whole = {kind: state.pop(key) for kind, key in keys.items() if key in state}
        found = {
            f"{prefix}{name}.{kind}": _rows(both, i, len(self.names))
            for i, name in enumerate(self.names)
            for kind, both in whole.items()
        }
        _put_before(state, found, f"{prefix}{self.before}.weight")

    def join(
        self, module: nn.Module, state: dict[str, Any], prefix: str, missing: list[str], errors: list[str]
    ) -> None:
        """Put the part in the place of the dense layers; one that is there as it is stored stays."""
        for kind in ("weight", "bias"):
            keys = [f"{prefix}{name}.{kind}" for name in self.names]
            there = [key for key in keys if key in state]
            is_whole = there == [f"{prefix}{self.part}.{kind}"]
            if not there or (is_whole and state[there[0]].shape[0] in self._rows_of(module, kind)):
                continue  # nothing, or the part itself as it is stored
            if len(there) < len(keys):
                missing += [key for key in keys if key not in state]
                for key in there:
                    del state[key]
                continue
            parts = [state.pop(key) for key in keys]
            try:
                state[f"{prefix}{self.part}.{kind}"] = _in_turns(parts)
            except ValueError as error:
                errors.append(f"{', '.join(keys)}: {error}")

    def _rows_of(self, module: nn.Module, kind: str) -> tuple[int, int]:
        """Return the numbers of rows of the part itself, with and without padding."""
        part = module.get_submodule(self.part)
        return int(part.get_parameter(kind).shape[0]), int(part.out_features)  # type: ignore[arg-type]


def _rows(both: Any, first: int, count: int) -> Any:
    """Every `count`-th row, from `first` on: a view of this rank's shard."""
    if is_plain(both):
        return both.detach()[first::count]
    return _with_rows(both, both._local_tensor.detach()[first::count], lambda rows: rows // count)


def _in_turns(parts: Sequence[Any]) -> object:
    """Raises ValueError: parts that do not lie alike, or have other shapes."""
    kinds = {"a plain tensor" if is_plain(p) else f"a DTensor {p.placements} on {p.device_mesh}" for p in parts}
    shapes = {tuple(p.shape) for p in parts}
    if len(kinds) > 1 or len(shapes) > 1:
        raise ValueError(f"rows of one product, and they are {' and '.join(sorted(kinds))} of {sorted(shapes)}")
    if is_plain(parts[0]):
        return _interleaved([part.detach() for part in parts])
    local = _interleaved([part._local_tensor.detach() for part in parts])
    return _with_rows(parts[0], local, lambda rows: rows * len(parts))


def _with_rows(like: Any, local: Tensor, rows_of: Callable[[int], int]) -> Any:
    """A tensor that lies as another one does and is of its kind, with other rows, padding included."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec, real = like._spec, real_of(like)
    shape = torch.Size((rows_of(spec.shape[0]), *spec.shape[1:]))
    meta = TensorMeta(shape, _contiguous(shape), local.dtype)
    return wrapped(
        local, DTensorSpec(spec.mesh, spec.placements, meta), real and torch.Size((rows_of(real[0]), *real[1:]))
    )


def _interleaved(parts: Sequence[Tensor]) -> Tensor:
    """Rows in turns: the tensor of which these are views, where they are, so that `assign=True` shares its memory."""
    first, count = parts[0], len(parts)
    row = first.shape[1:].numel()
    are_views = all(
        part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and part.storage_offset() == first.storage_offset() + i * row
        and part.stride()[1:] == _contiguous(part.shape)[1:]
        and (len(part) == 1 or part.stride(0) == count * row)  # the stride of a single row says nothing
        for i, part in enumerate(parts)
    )
    if are_views and not first.is_meta:
        whole = torch.Size((count * first.shape[0], *first.shape[1:]))
        return first.as_strided(whole, _contiguous(whole))
    return torch.stack(list(parts), 1).flatten(0, 1)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def _put_before(state: dict[str, Any], found: dict[str, Any], key: str) -> None:
    """Insert entries before a key, to keep the dense model's order."""
    rest = {}
    if key in state:
        keys = list(state)
        rest = {later: state.pop(later) for later in keys[keys.index(key) :]}
    state.update(found)
    state.update(rest)

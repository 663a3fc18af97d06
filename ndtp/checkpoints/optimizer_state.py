"""The state of an optimizer for a model's parameters, by the keys and in the shapes of the dense model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ndtp.checkpoints.parts import Laid, Part
from ndtp.checkpoints.pieces import Piece, Whole
from ndtp.errors import CheckpointError
from ndtp.models.state_entries import replaced
from ndtp.runtime.arrival import is_plain

START = "optimizer.state."
# How an optimizer runs, not what it computes: stays as the program has it.
WAYS_TO_RUN = ("params", "foreach", "fused", "capturable", "differentiable")
# What schedulers of learning rates add to the settings of groups.
OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")


@dataclass
class Kept:
    """The state that is kept for one optimizer.

    Attributes:
        parts: key in the checkpoint -> what this rank has of the tensor.
        values: dense key -> name -> what is no tensor.
        groups: the settings of each group, with dense keys for `params`; None without an optimizer.
        states: parameter -> name -> value, as the optimizer has them.
        names: parameter -> its dense keys; more than one where a product holds several.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    names: dict[Tensor, list[str]] = field(default_factory=dict)


def kept_by(optimizer: Optimizer, pieces: Sequence[Piece]) -> list[Kept]:
    """All that an optimizer keeps, without a copy, piece by piece; of what pieces share, for the one that writes it.

    Raises:
        CheckpointError: it has a parameter that the model does not have.
    """
    names = [_dense_keys(piece) for piece in pieces]
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not any(parameter in each for each in names):
                raise CheckpointError(
                    f"the optimizer's group {i} has a parameter {tuple(parameter.shape)} that is none of the model's\n"
                    "  fix: make the optimizer after parallelize"
                )
    return [_kept_for(optimizer, piece, mine) for piece, mine in zip(pieces, names, strict=True)]


def _kept_for(optimizer: Optimizer, piece: Piece, names: dict[Tensor, list[str]]) -> Kept:
    kept = Kept(names=names, states={p: state for p, state in optimizer.state.items() if p in names})
    kept.groups = []
    for group in optimizer.param_groups:
        settings = {key: _plain(value) for key, value in group.items() if key not in WAYS_TO_RUN}
        keys = [key for p in group["params"] for key in names.get(p, ())]
        kept.groups.append({"params": keys, **settings})
    shaped: dict[str, dict[int, Tensor]] = {}
    for parameter, state in kept.states.items():
        for name, value in state.items():
            if not isinstance(value, Tensor):
                for key in names[parameter]:
                    kept.values.setdefault(key, {})[name] = value
            elif _is_shaped(name, value.shape, parameter):
                shaped.setdefault(name, {})[id(parameter)] = value
            else:
                kept.parts |= {f"{START}{key}.{name}": Part.of(value, piece.mesh) for key in names[parameter]}
    _add_parts(kept, shaped, piece)
    kept.parts = {key: x for key, x in kept.parts.items() if _key_and_name(key)[0] not in piece.elsewhere}
    return kept


def together(parts: Iterable[tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]]) -> tuple[Any, Any]:
    """Groups and values of all pieces; groups of the same settings are one, whose parameters are those of all."""
    groups: list[dict[str, Any]] = []
    values: dict[str, dict[str, Any]] = {}
    for theirs, found in parts:
        values = {**found, **values}
        for group in theirs:
            settings = {key: value for key, value in group.items() if key != "params"}
            same = (each for each in groups if {key: v for key, v in each.items() if key != "params"} == settings)
            one = next(same, None)
            if one is None:
                groups.append(one := {"params": [], **settings})
            one["params"] = list(dict.fromkeys([*one["params"], *group["params"]]))
    return groups, values


def fresh_state(
    optimizer: Optimizer, whole: Whole, tensors: Mapping[str, Laid], run: dict[str, Any], folder: Path
) -> list[Kept]:
    """New memory for what a checkpoint has of an optimizer, piece by piece.

    Raises:
        CheckpointError: it has nothing of one, or of other parameters, or other groups.
    """
    every = [Kept(names=_dense_keys(piece)) for piece in whole.pieces]
    _check_groups(optimizer, names_in(every), run["groups"], folder)
    _check_kind(optimizer, run, folder)
    stored = _by_key(tensors, {key for keys in whole.keys for key in keys})
    dtypes = {key: tensors[f"model.{key}"].dtype for key in stored if f"model.{key}" in tensors}
    for kept, piece in zip(every, whole.pieces, strict=True):
        _make_room(kept, piece, optimizer, stored, dtypes, run, folder)
    return every


def names_in(every: Iterable[Kept]) -> dict[Tensor, list[str]]:
    """Return the names of the parameters of all pieces."""
    return {parameter: keys for kept in every for parameter, keys in kept.names.items()}


def _make_room(
    kept: Kept,
    piece: Piece,
    optimizer: Optimizer,
    stored: dict[str, dict[str, Laid]],
    dtypes: dict[str, torch.dtype],
    run: dict[str, Any],
    folder: Path,
) -> None:
    """Make memory for what a checkpoint has of an optimizer and a piece.

    Args:
        stored: dense key -> name -> what there is.
        dtypes: of the parameters that were saved, by dense keys: a state of a parameter's dtype stays one.
    """
    shaped: dict[str, dict[int, Tensor]] = {}
    real = {key: entry.dense for entry in piece.entries() for key in entry.keys}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in kept.names:
                continue
            first, *others = kept.names[parameter]
            state = dict(run["values"].get(first, {}))
            for name, there in stored.get(first, {}).items():
                if any(name not in stored.get(key, {}) for key in others):
                    raise CheckpointError(f"{folder}: '{name}' of '{first}' is there, that of {others} is not")
                is_as_parameter = name != "step" and there.dtype == dtypes.get(first)
                dtype = parameter.dtype if is_as_parameter else there.dtype
                if there.shape == real[first] and _is_shaped(name, there.shape, parameter, real[first]):
                    state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                    shaped.setdefault(name, {})[id(parameter)] = state[name]
                else:
                    on_host = name == "step" and not (group.get("capturable") or group.get("fused"))
                    device = "cpu" if on_host else parameter.device
                    state[name] = torch.zeros(there.shape, dtype=dtype, device=device)
                    kept.parts[f"{START}{first}.{name}"] = Part.of(state[name], None)
            if state:
                kept.states[parameter] = state
    _add_parts(kept, shaped, piece)


def restore_groups(optimizer: Optimizer, names: dict[Tensor, list[str]], groups: list[dict[str, Any]]) -> None:
    """Settings of the groups, as they were saved."""
    by_key = {key: group for group in groups for key in group["params"]}
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        for name, value in by_key[names[group["params"][0]][0]].items():
            if name in WAYS_TO_RUN:
                continue
            own = group.get(name)
            if isinstance(own, Tensor):
                own.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(own, tuple) else value
    # As torch does when it has loaded a state: an optimizer sets what its class has otherwise than the one that saved.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _dense_keys(piece: Piece) -> dict[Tensor, list[str]]:
    """Return, for every parameter, the entries of a state dict that are views of it."""
    stores: dict[int, list[str]] = {}
    for entry in piece.entries():
        stores.setdefault(_store(entry.local), []).append(entry.keys[0])
    return {p: stores.get(_store(p if is_plain(p) else p._local_tensor), []) for p in piece.module.parameters()}  # type: ignore[attr-defined]


def _store(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_shaped(name: str, shape: tuple[int, ...], parameter: Tensor, real: tuple[int, ...] | None = None) -> bool:
    """Return whether a state has one number for each of the parameter's; a count of steps beside a scalar has not."""
    return tuple(shape) == (tuple(parameter.shape) if real is None else real) and not (
        name == "step" and len(shape) == 0
    )


def _add_parts(kept: Kept, shaped: dict[str, dict[int, Tensor]], piece: Piece) -> None:
    """Add states of a parameter's shape through the model's own state dict, in the parameter's place."""
    for name, tensors in shaped.items():
        mine = {_store(x if is_plain(x) else x._local_tensor) for x in tensors.values()}  # type: ignore[attr-defined]
        with replaced(piece.module, tensors):
            entries = [entry for entry in piece.entries() if _store(entry.local) in mine]
        kept.parts |= {f"{START}{entry.keys[0]}.{name}": Part(entry, piece.mesh) for entry in entries}


def _by_key(tensors: Mapping[str, Laid], keys: set[str]) -> dict[str, dict[str, Laid]]:
    """Dense key -> name -> what a checkpoint has under these."""
    found: dict[str, dict[str, Laid]] = {}
    for entry, there in tensors.items():
        key, name = _key_and_name(entry)
        if entry.startswith(START):
            if key not in keys:
                raise CheckpointError(f"the checkpoint has '{name}' of '{key}', which is no parameter of the model")
            found.setdefault(key, {})[name] = there
    return found


def _key_and_name(entry: str) -> tuple[str, str]:
    key, _, name = entry.removeprefix(START).rpartition(".")
    return key, name


def _check_groups(
    optimizer: Optimizer, names: dict[Tensor, list[str]], groups: list[dict[str, Any]] | None, folder: Path
) -> None:
    if groups is None:
        raise CheckpointError(f"{folder}: was saved without an optimizer\n  fix: optimizer=None")
    of_key = {key: i for i, group in enumerate(groups) for key in group["params"]}
    for i, group in enumerate(optimizer.param_groups):
        keys = [key for p in group["params"] for key in names.get(p, [""])]
        theirs = {key: of_key.get(key) for key in keys}
        missing = [key for key, there in theirs.items() if there is None]
        if missing:
            raise CheckpointError(
                f"{folder}: '{missing[0]}', of the optimizer's group {i}, is in no group that was saved"
            )
        if len(set(theirs.values())) > 1:
            one, *_, other = theirs
            raise CheckpointError(
                f"{folder}: '{one}' and '{other}', both of the optimizer's group {i}, were saved in different groups"
            )


def _check_kind(optimizer: Optimizer, run: Mapping[str, Any], folder: Path) -> None:
    """Refuse what was saved with another class of optimizer whose groups have other settings.

    Of the same class a later version may have more of them.  Checkpoints of earlier versions of ndtp do not name it:
    then each of the two must have settings that the other one does not know.
    """
    saved, own = run.get("optimizer"), {key for group in optimizer.param_groups for key in group}
    if saved in {kind.__name__ for kind in type(optimizer).__mro__}:
        return
    for group in run["groups"]:
        other, lacking = {*group} - own - {*OF_SCHEDULERS}, {*optimizer.defaults} - {*group} - {*WAYS_TO_RUN}
        if (other and lacking) or (saved and (other or lacking)):
            raise CheckpointError(
                f"{folder}: was saved with {saved or 'another optimizer'}, not with {type(optimizer).__name__}: "
                f"settings of groups there alone: {', '.join(sorted(other)) or 'none'}; here alone: "
                f"{', '.join(sorted(lacking)) or 'none'}\n"
                "  fix: the optimizer with which it was saved; or optimizer=None, and a fresh one"
            )


def _plain(value: object) -> object:
    return value.item() if isinstance(value, Tensor) else value

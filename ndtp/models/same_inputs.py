"""The inputs of a call of a model by name, the settings in its config, and its code, as ranks compare them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.models.same_code import code_of
from ndtp.runtime.facts import SUMMARY, Fact, digest, form_of, hash_of, is_strided, leaves_of

_FEW = 16  # names of inputs that are shown in their order
# What `save_pretrained` leaves in the config of the rank that saves.
SAVED = {"architectures", "transformers_version", "dtype", "torch_dtype", "auto_map", "name_or_path"}


@cache
def _names_of(kind: Any) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the names of the arguments that a forward takes by position, and the places of all that it names."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(kind.forward).parameters.values()
    places = {each.name: place for place, each in enumerate(parameters) if each.kind != inspect.Parameter.VAR_KEYWORD}
    return tuple(each.name for each in parameters if each.kind in positional)[1:], places


def inputs_of(kind: Any, args: Arguments, kwargs: Keywords) -> list[tuple[str, object]]:
    """The leaves of the arguments of a module's forward, by name.

    Arguments that the forward names come in its own order; others, as `**kwargs`, in the order in which they are given,
    by which code may go.
    """
    names, places = _names_of(kind)
    given = [*zip(names, args, strict=False)]
    if kwargs:
        given += sorted(kwargs.items(), key=lambda item: places.get(item[0], len(places)))
    if len(args) > len(names):
        given += [(f"argument {i}", args[i]) for i in range(len(names), len(args))]
    for _, value in given:
        if type(value) is not Tensor or not is_strided(value):
            return [leaf for name, value in given for leaf in leaves_of(value, name)]
    return given


def facts_of(inputs: Sequence[tuple[str, Any]], rows: tuple[str, ...]) -> Iterator[Fact]:
    for name, value in inputs:
        yield Fact(f"input {name}", form_of(value) if isinstance(value, Tensor) else value, rows)
        is_plain = type(value) in (Tensor, nn.Parameter) and not value.is_meta and value.layout is torch.strided
        if is_plain and not (value.is_floating_point() or value.is_complex() or value.is_quantized):
            seen = hash_of(value)
            if isinstance(seen, int):
                yield Fact(f"input {name}: values", f"hash {seen:016x}", rows)
    names = [name for name, _ in inputs]  # told where nothing else differs
    yield Fact(f"{SUMMARY}the inputs in order", names if len(names) <= _FEW else f"hash {digest(names):x}", rows)


def settings_of(model: nn.Module, is_whole: bool) -> dict[str, object]:
    """Return by topics the attention kernel of a model of transformers and, where the whole is asked for, its config,
    and the code and versions of any model.
    """
    found, config = code_of(model) if is_whole else {}, vars(model).get("config")
    if config is None:
        return found
    found["setting of attention"] = getattr(config, "_attn_implementation", None)
    if is_whole and hasattr(config, "to_dict"):
        settings = sorted(_settings_in(config.to_dict()).items())
        found |= {f"setting {key} of its config": repr(value) for key, value in settings}
    return found


def _settings_in(config: dict[str, object]) -> dict[str, object]:
    """Return a config without the entries that a rank writes when it saves the model."""
    kept = {key: value for key, value in config.items() if not key.startswith("_") and key not in SAVED}
    return {key: _settings_in(value) if isinstance(value, dict) and key.endswith("config") else value
            for key, value in kept.items()}  # fmt: skip

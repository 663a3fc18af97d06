"""Tiny models and inputs of every class of transformers, as the test classes of its own repository make them."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import unittest
import warnings
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import transformers
from torch import Tensor, nn

BARE = re.compile(r"(?<!Head)(?<!Heads)Model$")
OF_WORDS = re.compile("CausalLM|MaskedLM|LMHead|ConditionalGeneration|PreTraining")
TEXT = (2, 64)  # sequences and tokens of transformers' own test of tensor parallelism


def tests_at(folder: Path) -> Path:
    """The folder of transformers' tests, importable.

    Raises:
        SystemExit: it is none, or one of another version than the transformers that is installed.
    """
    folder = folder.absolute()
    if not (folder / "test_modeling_common.py").exists() or not (folder / "models").is_dir():
        raise SystemExit(f"{folder} is not the folder `tests` of a checkout of transformers")
    for name, function in vars(transformers.utils.import_utils).items():
        if name.startswith("is_") and name.endswith("_available"):  # before `imported` makes up what is not there
            with contextlib.suppress(Exception):
                function()
    sys.path.insert(0, str(folder.parent))
    try:
        imported(f"{folder.name}.test_modeling_common")
    except ImportError as error:
        raise SystemExit(f"{folder} is not of transformers {transformers.__version__}: {error}") from error
    return folder


def imported(name: str) -> ModuleType:
    """A module of tests; packages that it imports and that are not here are made up, since no test of it is run."""
    made_up: set[str] = set()
    try:
        while True:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return importlib.import_module(name)
            except ModuleNotFoundError as error:
                missing = error.name or ""
                if not missing or missing in made_up or f"{name}.".startswith(f"{missing}."):
                    raise
                made_up.add(missing)
                sys.modules[missing] = MadeUp(missing)
    finally:
        for each in made_up:
            del sys.modules[each]


class MadeUp(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__, self.__path__ = ModuleSpec(name, None), []

    def __getattr__(self, name: str) -> Any:
        return MagicMock()


def testers(folder: Path, model: str) -> Iterator[tuple[unittest.TestCase, type[nn.Module]]]:
    """Test classes of one folder of models, each with a model class; each model class once."""
    seen = set()
    for path in sorted((folder / "models" / model).glob("test_modeling_*.py")):
        if path.stem.startswith(("test_modeling_tf_", "test_modeling_flax_")):
            continue
        name = f"{folder.name}.models.{model}.{path.stem}"
        try:
            module = imported(name)
        except (Exception, SystemExit):  # written for packages that are not here, or for another version
            continue
        for kind in vars(module).values():
            is_own = isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == name
            if not is_own or not hasattr(kind, "_prepare_for_class"):
                continue
            case = kind()
            try:
                case.setUp()
            except (Exception, unittest.SkipTest):
                continue
            classes = list(getattr(case, "all_model_classes", None) or ())
            # A bare model is a part of those that have a head.
            headed = [each for each in classes if not BARE.search(each.__name__)] or classes
            for each in headed:
                if each.__name__ not in seen:
                    seen.add(each.__name__)
                    yield case, each


def made(case: Any, kind: type[nn.Module]) -> tuple[nn.Module, dict[str, dict[str, Any]]]:
    """A model without dropout, none of whose parameters are alike, and its inputs by case."""
    torch.manual_seed(0)
    config, given = case.model_tester.prepare_config_and_inputs_for_common()
    torch.manual_seed(1)
    given = case._prepare_for_class(given, kind, return_labels=True)
    _without_dropout(config)
    torch.manual_seed(2)
    model = kind(config).float()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    cases = {"own": {key: value for key, value in given.items() if value is not None}}
    if "MultipleChoice" in kind.__name__:  # choices that are alike have no gradients
        ids = cases["own"]["input_ids"]
        cases["own"]["input_ids"] = torch.stack([x.roll(i, -1) for i, x in enumerate(ids.unbind(1))], 1)
    given, text = cases["own"], config
    with contextlib.suppress(ValueError):  # of several texts
        text = config.get_text_config()
    is_of_words = OF_WORDS.search(kind.__name__) and hasattr(text, "vocab_size")
    classes = text.vocab_size if is_of_words else getattr(config, "num_labels", 0)
    labels = given.get("labels")
    if isinstance(labels, Tensor) and labels.dim() == 2 and "CTC" not in kind.__name__ and classes:
        given["labels"] = torch.randint(0, classes, labels.shape)  # the testers' are all alike
    if is_text(model, case):
        ids, targets = torch.randint(0, text.vocab_size, TEXT), torch.randint(0, text.vocab_size, TEXT)
        cases["text"] = {"input_ids": ids, "labels": targets}
    return model, cases


def is_text(model: nn.Module, case: Any) -> bool:
    """Whether transformers' own test of tensor parallelism runs on it."""
    return getattr(case.model_tester, "causal_lm_class", None) is type(model)


def prompt(model: Any, case: Any, cases: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """What a model goes on from; None of one that generates nothing."""
    if not model.can_generate():
        return None
    if is_text(model, case):
        return {"input_ids": cases["text"]["input_ids"][:1, :10]}
    return {key: value for key, value in cases["own"].items() if key != "labels"}


def _without_dropout(config: Any, depth: int = 0) -> None:
    for name, value in list(vars(config).items()):
        if "drop" in name and type(value) is float:
            with contextlib.suppress(Exception):
                setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and depth < 4:
            _without_dropout(value, depth + 1)


def tensors_in(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Floating tensors of an output by their path; not those of caches."""
    if isinstance(x, Tensor):
        if x.is_floating_point():
            yield name, x
    elif isinstance(x, Mapping):
        for key, value in x.items():
            if key not in ("past_key_values", "cache_params", "mems", "states"):
                yield from tensors_in(value, f"{name}.{key}" if name else str(key))
    elif isinstance(x, (list, tuple)):
        for i, value in enumerate(x):
            yield from tensors_in(value, f"{name}[{i}]")

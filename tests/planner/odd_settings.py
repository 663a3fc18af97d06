"""Configs of every class of transformers, each of their fields at an odd value, and what is counted in their models.

The file of a setting says no more than what is odd, as files that people write do: the class fills in the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from counted_reference import difference

from ndtp.errors import GridError
from ndtp.models.counted import built, count
from ndtp.planner.model_config import DECODER_LAYERS, ENCODER_LAYERS, FFN, HEAD_SIZE, HEADS, HIDDEN, KV_HEADS

# Of no config's own: outputs and names.
ALL_HAVE = {
    "transformers_version", "output_hidden_states", "output_attentions", "return_dict", "dtype", "id2label", "label2id",
    "problem_type", "architectures", "is_encoder_decoder", "use_cache",
}  # fmt: skip
NO_SIZES = (
    "_id",
    "_token_index",
    "dropout",
    "drop_prob",
    "_std",
    "_range",
    "_eps",
    "epsilon",
    "scale",
    "seed",
    "_loss",
)
# Of the configs inside of another.
SIZES = (*HIDDEN, *FFN, *HEADS, *KV_HEADS, *HEAD_SIZE, *ENCODER_LAYERS, *DECODER_LAYERS, "vocab_size",
         "tie_word_embeddings")  # fmt: skip
COMBINATIONS = 3
FEW = 2  # layers, which are built sooner


@dataclasses.dataclass(frozen=True)
class Case:
    """One config, and what was found in its model.

    Attributes:
        changed: the fields that are odd.
        saved: the config as transformers saves it, with all fields.
        blocks: how often each block is there; None where the model is refused.
        problem: the refusal, or what the count and the model disagree about.
    """

    kind: str
    changed: tuple[str, ...]
    file: dict[str, Any]
    saved: dict[str, Any]
    blocks: Counter[Any] | None
    problem: str = ""


@functools.cache
def kinds() -> dict[str, Any]:
    """All config classes by their `model_type`."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found = {kind: getattr(transformers, name, None) for kind, name in CONFIG_MAPPING_NAMES.items()}
    return {kind: one for kind, one in found.items() if one is not None}


def defaults(one: Any) -> dict[str, Any]:
    """What a config class takes for a field that a file leaves out; of nested configs nothing."""
    fields = {f.name: f.default for f in dataclasses.fields(one) if f.default is not dataclasses.MISSING}
    made = {
        f.name: f.default_factory() for f in dataclasses.fields(one) if f.default_factory is not dataclasses.MISSING
    }
    return {key: value for key, value in (fields | made).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list))


def odd(name: str, value: Any) -> list[Any]:
    """Other values of a field, of which the first that there is a model for is taken."""
    if name in ALL_HAVE or any(word in name for word in NO_SIZES):
        return []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        if "vocab" in name:
            return [value - 3]
        return [2, 0] if value < 2 else [value // 2, 2 * value, value + 1] if value % 2 == 0 else [2 * value, value + 1]
    if value is None and any(word in name for word in ("size", "dim", "inner", "head", "layers", "width", "num_")):
        return [2, 24, 128]
    return ["gated-gelu"] if name == "feed_forward_proj" else []


def settings(kind: str, one: Any, seed: int = 0) -> Iterator[tuple[tuple[str, ...], list[dict[str, Any]]]]:
    """Which fields are odd, and the files to try, best first; nothing, each field, each class, and some at once.

    Of a config that holds others `text_config.hidden_size` and the like are fields, too.
    """
    nested = {name: each for name, each in _nested(one).items() if type(each).model_type in kinds()}
    base: dict[str, Any] = {"model_type": kind} | _few(one)
    base |= {name: {"model_type": type(each).model_type} | _few(type(each)) for name, each in nested.items()}
    own = {(name,): value for name, value in defaults(one).items()}
    for name, each in nested.items():
        own |= {(name, key): value for key, value in defaults(type(each)).items() if key in SIZES}
    odd_values = {path: [v for v in odd(path[-1], value) if v != _at(base, path)] for path, value in own.items()}
    odd_values = {path: values for path, values in odd_values.items() if values}
    yield (), [base, {"model_type": kind}]
    for path, values in odd_values.items():
        yield (".".join(path),), [_with(base, path, value) for value in values]
    for name in _classes(kind):
        yield ("architectures",), [base | {"architectures": [name]}]
    draw = random.Random(f"{kind} {seed}")
    for _ in range(COMBINATIONS if len(odd_values) > 2 else 0):
        paths, files = draw.sample(sorted(odd_values), 3), []
        for _ in range(4):
            file = base
            for path in paths:
                file = _with(file, path, draw.choice(odd_values[path]))
            files.append(file)
        yield tuple(".".join(path) for path in paths), files


def _nested(one: Any) -> dict[str, Any]:
    """The configs that a config class holds by default."""
    try:
        made = vars(one())
    except Exception:
        return {}
    return {name: value for name, value in made.items() if name.endswith("_config") and hasattr(value, "model_type")}


def _few(one: Any) -> dict[str, int]:
    own = defaults(one)
    return {key: FEW for key in {*ENCODER_LAYERS, *DECODER_LAYERS} & own.keys() if isinstance(own[key], int)}


def _at(file: dict[str, Any], path: tuple[str, ...]) -> Any:
    return file.get(path[0]) if len(path) == 1 else file.get(path[0], {}).get(path[1])


def _with(file: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return file | {path[0]: value if len(path) == 1 else file.get(path[0], {}) | {path[1]: value}}


def _classes(kind: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    found: dict[str, None] = {}
    for table in sorted(vars(modeling_auto)):
        if table.startswith("MODEL_") and table.endswith("MAPPING_NAMES"):
            name = getattr(modeling_auto, table).get(kind)
            found |= dict.fromkeys([name] if isinstance(name, str) else name or ())
    return list(found)


def cases(
    kind: str, one: Any, seed: int = 0, keep: Callable[[tuple[str, ...]], bool] = lambda changed: True
) -> Iterator[Case]:
    """Each setting that there is a model for, and of which `keep` is true."""
    warnings.simplefilter("ignore")
    refused = False
    for changed, files in settings(kind, one, seed):
        if refused and changed and not {path.rpartition(".")[2] for path in changed} <= {*SIZES, "architectures"}:
            continue  # no other field makes layers of what has none
        if not keep(changed):
            continue
        for file in files:
            try:
                model = built(file)
            except GridError:
                continue
            saved = json.loads(json.dumps(model.config.to_dict(), default=str))
            saved |= {"model_type": kind, "architectures": [type(model).__name__]}
            try:
                counted = count(model, type(model).__name__)
            except GridError as error:
                refused = refused or not changed
                yield Case(kind, changed, file, saved, None, str(error).partition(": ")[2])
                break
            except Exception as error:  # a bug: it is no refusal
                yield Case(kind, changed, file, saved, Counter(), f"{type(error).__name__}: {error}")
                break
            blocks = Counter({dataclasses.replace(block, times=1): block.times for block in counted.blocks(1)})
            problem = difference(model, counted) if len(changed) != 1 else ""
            yield Case(kind, changed, file, saved, blocks, problem)
            break

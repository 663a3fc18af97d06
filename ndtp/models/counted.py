"""The blocks of a model, counted in the model itself, which transformers builds from its config on meta.

A config alone does not tell what a model's code makes of it; the model does.  Its blocks are those that `parallelize`
splits.  What else has parameters is named beside them; no weight is counted twice or left out, which is checked here.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ndtp.compute.torch_calls import Arguments
from ndtp.errors import GridError, LayoutError
from ndtp.models.auto_whole import blocks_by_name
from ndtp.models.dry_step import OfWholeBatches, usual_inputs
from ndtp.models.report import NUMBER
from ndtp.models.roles import is_linear, vocabulary_of
from ndtp.planner.block_cost import Block
from ndtp.planner.fields import shown
from ndtp.planner.model_sizes import CountedModel

# Tasks in whose order a class is looked for where a config names none: what is trained on its vocabulary comes first.
PAIRS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")  # of an encoder and a decoder
TASKS = (*PAIRS, "CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "")
MOST_LAYERS = 4096  # each is built
SMALL_PART = 0.1  # of a model's blocks: a head on few rows, say
FIX = "  fix: give the sizes of such layers with --hidden, --ffn and --layers"
Found = tuple[Block, tuple[str, ...]]
BATCH, LENGTH = 2, 16  # of the call that tells how often layers run, and on which rows


def is_installed() -> bool:
    """Return whether transformers is installed, so that it can build models."""
    try:
        import transformers
    except ImportError:
        return False
    return hasattr(transformers, "AutoConfig")


def knows(config: Mapping[str, object]) -> bool:
    """Return whether transformers has this type of model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return config.get("model_type") in CONFIG_MAPPING_NAMES


def count_config(config: Mapping[str, object], what: str = "model config") -> CountedModel:
    """The blocks of the model that a `config.json` describes.

    Raises:
        GridError: transformers builds no model of it, or one whose weights are not those of its blocks.
    """
    import transformers

    model = built(config, what)
    return count(model, f"{type(model).__name__} of transformers {transformers.__version__}", what)


def completed(config: Mapping[str, object], what: str = "model config") -> Any:
    """Return transformers' object for a config, which has what the config leaves out.

    Raises:
        GridError: its class does not take this config.
    """
    import transformers

    kind: Any = config.get("model_type")
    layers = [key for key, value in config.items() if "layer" in key and isinstance(value, int) and value > MOST_LAYERS]
    if layers:
        raise GridError(f"{what}: {layers[0]}={shown(config[layers[0]])}; layers are counted up to {MOST_LAYERS}")
    given = {key: value for key, value in copy.deepcopy(dict(config)).items() if not key.startswith("_attn")}
    with quiet(transformers):
        try:
            made = transformers.AutoConfig.for_model(kind, **{k: v for k, v in given.items() if k != "model_type"})
            made._attn_implementation = "eager"  # which needs no other library
        except Exception as error:
            raise GridError(
                f"{what}: transformers takes no such config of {shown(kind)}: {first_line(error)}"
            ) from None
    return made


def built(config: Mapping[str, Any], what: str = "model config") -> Any:
    """The model of a config, on the meta device: of the class that it names, else of the first task that has one.

    Raises:
        GridError: there is no such class, or it does not take this config.
    """
    import transformers

    kind, made = config.get("model_type"), completed(config, what)
    with quiet(transformers), torch.device("meta"):
        kinds, problems = _classes(transformers, made, what), []
        for one in kinds:
            try:
                if not isinstance(made, one.config_class):
                    raise TypeError(f"it takes a {one.config_class.__name__}, not a {type(made).__name__}")
                model = one(made)
                model.tie_weights()
            except Exception as error:
                problems.append(f"{one.__name__}: {first_line(error)}")
                continue
            return model.eval()
    said = "; ".join(problems[:2]) or "it has no class of a model"
    raise GridError(f"{what}: transformers builds no model of {shown(kind)}: {said}")


def _classes(transformers: Any, config: Any, what: str) -> Iterator[Any]:
    named = config.architectures
    if named:
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise GridError(f"{what}: architectures={shown(named)}; it must be a list of names, or null")
        found = [getattr(transformers, name, None) for name in named]
        found = [one for one in found if isinstance(one, type) and issubclass(one, nn.Module)]
        if not found:
            raise GridError(
                f"{what}: architectures={shown(named)}: transformers {transformers.__version__} has no such model\n"
                "  fix: leave architectures out, to plan for the family's own model"
            )
        yield from found
        return
    from transformers.models.auto import modeling_auto

    for task in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES", {})
        if config.model_type not in names or (task in PAIRS and not config.is_encoder_decoder):
            continue
        name = names[config.model_type]
        one = getattr(transformers, name if isinstance(name, str) else name[0], None)
        if one is not None:
            yield one


def count(model: Any, kind: str, what: str = "model") -> CountedModel:
    """The blocks of a model, and what lies beside them.

    Raises:
        GridError: as `weights_of`; or most of its parameters lie beside.
    """
    found, planned = weights_of(model, kind, what)
    others = {name: p for name, p in model.named_parameters() if id(p) not in planned}
    size, beside = sum(planned.values()), sum(p.numel() for p in others.values())
    named = tuple(sorted(_named(others), key=lambda entry: -entry[1]))
    if size < beside:
        raise GridError(
            f"{what}: {kind} is not planned: ndtp.parallelize splits {size / (size + beside):.0%} of its parameters; "
            f"what stays whole: {', '.join(name for name, _ in named[:3])}\n{FIX}"
        )
    blocks = Counter(block for block, _ in found)
    counted = tuple(replace(block, times=times) for block, times in blocks.items())
    return CountedModel(kind, counted, size + beside, size, named)


def weights_of(model: nn.Module, kind: str, what: str = "model") -> tuple[list[Found], dict[int, int]]:
    """The blocks of a model by the names of their modules, and of their weights (by `id`) the elements.

    Raises:
        GridError: it has no block that is split, or runs layers more than once: their weights are shared.
    """
    try:
        found = blocks_by_name(model, 1)
    except LayoutError as error:
        raise GridError(f"{what}: {kind} is not planned: {str(error).removeprefix('parallelize: ')}") from None
    if not any(block.inner for block, _ in found):
        raise GridError(
            f"{what}: {kind} is not planned: the planner plans attention, MLPs and experts, and its layers are of "
            "another kind\n  fix: ndtp.parallelize with a grid of your own, which splits its linear layers all the same"
        )
    modules, planned = dict(model.named_modules()), dict[int, int]()
    for block, names in found:
        own = {id(p): p.numel() for name in names for p in modules[name].parameters() if _is_weight(p, block)}
        if sum(own.values()) != block.parameters or own.keys() & planned.keys():
            raise GridError(
                f"{what}: the weights of {', '.join(names)} of {kind} have {sum(own.values()):,} elements, a block "
                f"'{block.name}' {block.parameters:,}" + ", and it shares them" * bool(own.keys() & planned.keys())
            )
        planned |= own
    found, other_rows = _on_the_same_rows(model, found, f"{what}: {kind} is not planned: ")
    for name in other_rows:
        for p in modules[name].parameters():
            planned.pop(id(p), None)
    return found, planned


def _on_the_same_rows(model: nn.Module, found: list[Found], where: str) -> tuple[list[Found], list[str]]:
    """The blocks that a step runs once each and on as many rows as the most of them; the modules of the others.

    A model of which those are a large part is none whose layers the planner can weigh on one number of rows.

    Raises:
        GridError: says which layers share weights, or have other rows.
    """
    rows, modules = rows_by_name(model), dict(model.named_modules())
    planned = {name for block, names in found for name in names if block.inner}
    single = {each[0] for name, each in rows.items() if len(each) == 1}  # feed forward may come in chunks of these
    again = next((n for n, each in rows.items() if n in planned and len(each) > 1 and sum(each) not in single), None)
    if again:
        raise GridError(f"{where}'{again}' runs {len(rows[again])} times in a step: its layers share weights\n{FIX}")
    sizes, of_planned = Counter[int](), Counter[int]()
    for name, each in rows.items():
        sizes[sum(each)] += modules[name].weight.numel()  # type: ignore[operator, union-attr]
        of_planned[sum(each)] += modules[name].weight.numel() * (name in planned)  # type: ignore[operator, union-attr]
    if len(sizes) < 2:
        return found, []
    (most, of_most), *_ = of_planned.most_common()
    if sum(sizes.values()) - sizes[most] > SMALL_PART * of_most:
        name = next(name for name, each in rows.items() if sum(each) != most)
        raise GridError(f"{where}'{name}' has {sum(rows[name])} rows, others {most}\n{FIX}")
    unlike = [entry for entry in found if any(sum(rows.get(n, (most,))) != most for n in {*entry[1]} & planned)]
    return [entry for entry in found if entry not in unlike], [name for _, names in unlike for name in names]


def _is_weight(p: nn.Parameter, block: Block) -> bool:
    """A matrix; beside experts there may be others than the router's, such as a bias [1, experts]."""
    return p.dim() > 1 and (not block.experts or block.hidden in p.shape)


def rows_by_name(model: nn.Module) -> dict[str, list[int]]:
    """The rows that each Linear gets in a call of the model, one number for each time that it runs; heads excepted.

    The model's own code tells, on tensors without memory.  Code that needs numbers does not run so, and tells nothing.
    """
    rows: dict[str, list[int]] = {}
    modules, head = dict(model.named_modules()), vocabulary_of(model, "get_output_embeddings")

    def listen(name: str) -> object:
        def hook(_: nn.Module, args: Arguments) -> None:
            if args and isinstance(args[0], Tensor):
                rows.setdefault(name, []).append(args[0].numel() // max(1, args[0].shape[-1]))

        return hook

    with ExitStack() as stack:
        for name in (name for name, module in modules.items() if is_linear(module, casts=True) and module is not head):
            stack.callback(modules[name].register_forward_pre_hook(listen(name)).remove)
        try:
            given = usual_inputs(model, BATCH, LENGTH, None)
            with torch.no_grad(), OfWholeBatches():
                model(**given)
        except Exception:
            return {}
    return rows


def _named(others: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, int]]:
    """`layers.*.mixer.in_proj` and the elements of all of them: matrices by their names, vectors as one."""
    vectors = sum(p.numel() for p in others.values() if p.dim() < 2)
    if vectors:
        yield "norms, biases and other vectors", vectors
    sizes: Counter[str] = Counter()
    for name, p in others.items():
        if p.dim() > 1:
            sizes[NUMBER.sub("*", name).removesuffix(".weight")] += p.numel()
    yield from sizes.items()


def quiet(transformers: Any) -> ExitStack:
    """Return a context without transformers' warnings about fields, which are a model's own business."""
    stack, logging = ExitStack(), transformers.utils.logging
    stack.callback(logging.set_verbosity, logging.get_verbosity())
    logging.set_verbosity_error()
    return stack


def first_line(error: Exception) -> str:
    """Return what an error says, on one line, and cut where it is long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:156]} ..."

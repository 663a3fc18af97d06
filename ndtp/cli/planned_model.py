"""The model of `ndtp plan --model`: counted in the model itself where transformers is, else read in its config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ndtp.dtypes import SHORT
from ndtp.errors import GridError
from ndtp.planner.fields import in_digits, shown

if TYPE_CHECKING:
    from ndtp.planner.block_cost import Block
    from ndtp.planner.model_sizes import CountedModel, ModelSizes

OF_BOTH = ("bf16", "fp16", "fp32")  # dtypes that a block and the step of a whole model may have
LONG = {**SHORT, "fp8": "float8"}
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
UNKNOWN = 4096  # tokens of a sequence where nothing says how many there may be
MOST_NAMED = 4  # of what lies beside the blocks


def model_at(path: str, layers: int | None) -> ModelSizes | CountedModel:
    """The model that a `config.json` describes, with other layers where they are given.

    Raises:
        GridError: no such file, or no model whose layers can be planned; it says why.
    """
    from ndtp.planner.model_config import read_file, sizes_of, with_layers
    from ndtp.planner.model_families import families

    config, what = read_file(path)
    if layers is not None:
        config = with_layers(config, layers, what)
    if not _is_for_transformers(config):
        return sizes_of(config, what)
    from ndtp.models.counted import count_config

    try:
        return count_config(config, what)
    except GridError:
        if config.get("model_type") in families():
            sizes_of(config, what)  # which names the field
        raise


def dtype_at(text: str, other: str, what: str) -> str:
    """Return the long name of a --dtype.

    Args:
        other: the dtype that `what` is planned in, beside those of `OF_BOTH`.

    Raises:
        typer.BadParameter: another dtype.
    """
    names = (*OF_BOTH, other)
    if (found := LONG.get(text, text)) not in {LONG[name] for name in names}:
        raise typer.BadParameter(
            f"{shown(text)} is no dtype that {what} is planned in; fix: one of {', '.join(names)}", param_hint="--dtype"
        )
    return found


def config_file(path: str) -> str:
    """Return the absolute path of a model's config, which may be given by its folder."""
    file = Path(path).absolute()
    return str(file / "config.json" if file.is_dir() else file)


def length_at(path: str) -> int:
    """Return the length of the sequences that a model takes: by its config, or what its class has where that is silent.

    Raises:
        GridError: transformers takes no such config.
    """
    from ndtp.planner.model_config import read_file

    config, what = read_file(path)
    named = config | (config.get("text_config") or {})
    length = next((named[name] for name in LENGTHS if isinstance(named.get(name), int) and named[name] > 0), None)
    if length is None and _is_for_transformers(config):
        from ndtp.models.counted import completed
        from ndtp.models.trial import named_positions

        length = (named_positions(completed(config, what)) or ("", None))[1]
    return length or UNKNOWN


def check_generates(path: str, option: str = "--decode") -> None:
    """Check that a model continues text: that its class generates, and that its tokens see none behind them.

    Raises:
        GridError: it does not.  Where transformers is not installed, this cannot be told.
    """
    from ndtp.planner.model_config import read_file

    config, what = read_file(path)
    if not _is_for_transformers(config):
        return
    from ndtp.models.counted import built
    from ndtp.models.trial import sees_later_tokens

    model = built(config, what)
    kind, why = type(model), ""
    if not getattr(model, "can_generate", bool)():
        why = f"{kind.__name__} generates none"
    elif sees_later_tokens(kind, model.config):
        why = f"in {kind.__name__} each token sees the tokens behind it"
    if why:
        raise GridError(
            f"plan: {option} takes a model that continues text; {what}: {why}\n"
            "  fix: the config of a decoder (where it is one, is_decoder=true and the class in architectures say so), "
            f"or leave {option} out"
        )


def _is_for_transformers(config: dict[str, object]) -> bool:
    from ndtp.models.counted import is_installed, knows

    return is_installed() and knows(config)


def say_model(out: Any, model: ModelSizes | CountedModel) -> None:
    """Print how the config was understood, so that a wrong reading is seen."""
    from ndtp.planner.model_sizes import CountedModel

    lines = list(map(_block, model.blocks(1)))
    if isinstance(model, CountedModel):
        first = f"{model.kind}, {_millions(model.parameters)} parameters"
        beside = [f"{name} ({100 * count / model.parameters:.1f} %)" for name, count in model.beside]
        if len(beside) > MOST_NAMED:
            rest = sum(count for _, count in model.beside[MOST_NAMED:])
            beside[MOST_NAMED:] = [f"{len(beside) - MOST_NAMED} others ({100 * rest / model.parameters:.1f} %)"]
        lines += [f"not planned: {', '.join(beside)}"] * bool(beside)
    else:
        first = f"{model.kind}, {_millions(model.parameters)} parameters in matrices, by the config alone"
        lines += [f"not counted: {', '.join(model.left_out)}"] * bool(model.left_out)
    out.print("\n  ".join([first, *lines]), highlight=False)


def _millions(count: int) -> str:
    """All digits of whole millions, and three of what is less than a hundred of them."""
    return (f"{count / 1e6:,.0f}" if count >= 10**8 else in_digits(count / 1e6)) + " million"


def _block(block: Block) -> str:
    """One line: how often, and its sizes."""
    hidden, (first, *_) = block.hidden, (*block.outs, 0)
    if block.looked_up:
        head = "no head" if not block.outs else "the head has its weight" if block.tied else "a head beside"
        return f"embedding {block.looked_up} x {hidden}, {head}"
    if block.experts:
        what = f"{block.experts} experts {hidden} x {first}, {block.top_k} a token"
    elif block.heads:
        (heads,), keys = block.heads, block.key_heads
        what = f"{heads} heads" + f" ({keys} of k and v)" * (keys not in (0, heads)) + f" of {first // heads}"
    else:
        what = f"{hidden} x {first}"
    return f"{block.times} x {block.name}: {what}"


def model_as_dict(model: ModelSizes | CountedModel) -> dict[str, object]:
    """Return the model for JSON: the parameters that are planned, and the others."""
    from ndtp.planner.model_sizes import CountedModel

    if isinstance(model, CountedModel):
        return {
            "name": model.kind, "counted": "in the model", "parameters": model.parameters,
            "planned_parameters": model.planned, "not_planned": dict(model.beside),
        }  # fmt: skip
    return {
        "name": model.kind, "counted": "by the config alone", "planned_parameters": model.parameters,
        "not_planned": dict.fromkeys(model.left_out),
    }  # fmt: skip

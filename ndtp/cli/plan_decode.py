"""`ndtp plan --decode`: which grid and scheme continues sequences the fastest, and for how many of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from ndtp.cli.common import print_table, writing
from ndtp.cli.plan_model import Asked, config_of
from ndtp.cli.planned_model import check_generates, config_file, dtype_at, length_at
from ndtp.errors import GridError
from ndtp.planner.fields import in_digits

if TYPE_CHECKING:
    from pathlib import Path

    from ndtp.planner.decode import DecodeChoice, DecodeQuestion
    from ndtp.planner.model_sizes import CountedModel, ModelSizes

BATCH = 32


def decode_question(asked: Asked, model: ModelSizes | CountedModel, batch: int | None) -> DecodeQuestion:
    """Return the planner's question.

    Raises:
        GridError: a model that is no stack of layers or continues no text, or a value that is none of its kind.
    """
    from ndtp.planner.decode import DecodeQuestion
    from ndtp.planner.fields import Number
    from ndtp.planner.hardware import Hardware
    from ndtp.planner.training.transformer import Transformer

    config = config_of(asked.path)
    sequence = asked.sequence or min(4096, length_at(asked.path))
    Number(1, 2**31, integer=True).check("plan", "sequence", sequence)
    shape = Transformer.of(str(config.get("model_type", "model")), model.blocks(1), sequence)
    if shape is None:
        raise GridError(
            "plan: --decode takes a model of one stack of like layers between an embedding and a head; this one is "
            f"not: {Transformer.why_not(model.blocks(1))}\n  fix: leave out --decode"
        )
    check_generates(asked.path)
    return DecodeQuestion(
        shape, BATCH if batch is None else batch, asked.ranks, Hardware.load(asked.hardware),
        dtype_at(asked.dtype, "fp8", "the decoding of a model"),
        asked.fixed, asked.memory_limit,
    )  # fmt: skip


def answer_decode(out: Any, question: DecodeQuestion, top: int, path: str, emit: Path | None) -> dict[str, object]:
    """Print the choices, and for which batches each scheme wins; return the result for `--json`.

    Args:
        path: of the model's config.
        emit: the file that gets the program of the first choice.
    """
    from ndtp.planner.decode import choose_decode, winners
    from ndtp.planner.decode_program import decode_program, grid_of

    choices = choose_decode(question, top)
    print_table(out, _table(choices))
    best = choices[0]
    out.print(f"{best} is the fastest for {question.batch} sequences; what limits it: {best.limits}.", highlight=False)
    won = winners(question)
    for first, last, choice in won:
        of = f"{first} sequences" if first == last else f"{first} to {last} sequences"
        out.print(f"  {of}: {choice.scheme}, {in_digits(choice.seconds * 1e3)} ms a step at {first}", highlight=False)
    out.print(f"  mesh = ndtp.ProcessGrid(ndtp.Grid({grid_of(best)}))", highlight=False, soft_wrap=True)
    out.print(f'  model = ndtp.parallelize(model, mesh, scheme="{best.scheme}")', highlight=False, soft_wrap=True)
    if emit is not None:
        with writing(emit):
            emit.write_text(decode_program(best, config_file(path), emit))  # it may be started in another folder
        out.print(f"wrote {emit}")
    return {
        "plans": [_as_dict(each) for each in choices],
        "wins": [{"from": first, "to": last, "scheme": each.scheme} for first, last, each in won],
        "request": {"batch": question.batch, "sequence": question.model.sequence, "ranks": question.ranks,
                    "hardware": question.hardware.name, "dtype": question.dtype},
    }  # fmt: skip


def _as_dict(each: DecodeChoice) -> dict[str, object]:
    parts = {"products": each.products, "cache": each.cache, "moved": each.moved, "latency": each.latency}
    return {
        "scheme": each.scheme, "grid": dict(each.sizes), "step_ms": each.seconds * 1e3,
        "tokens_per_second": each.tokens_per_second, "memory_bytes": int(each.memory), "limits": each.limits,
        "parts_ms": {name: seconds * 1e3 for name, seconds in parts.items()},
    }  # fmt: skip


def _table(choices: list[DecodeChoice]) -> Table:
    from ndtp.planner.decode import GIB

    question = choices[0].question
    title = (
        f"{question.model.name} on {question.ranks} ranks of {question.hardware.name}: one token of each of "
        f"{question.batch} sequences with {question.model.sequence} in the cache, {question.dtype}"
    )
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("#", justify="right")
    table.add_column("scheme and grid")
    for heading in ("ms/step", "tokens/s", "weights", "cache", "bytes", "latency", "GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for i, each in enumerate(choices, 1):
        parts = (each.products, each.cache, each.moved, each.latency)
        table.add_row(
            str(i), str(each), in_digits(each.seconds * 1e3), f"{each.tokens_per_second:,.0f}",
            *(f"{part / each.seconds:.0%}" for part in parts), in_digits(each.memory / GIB),
        )  # fmt: skip
    table.caption = (
        "weights, cache: reading them; bytes, latency: of collectives. Predicted for the device alone, not measured: "
        "what the host does (docs/serving.md) is not in it."
    )
    return table

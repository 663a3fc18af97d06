"""`ndtp plan --model`: how to split a training step of a whole model, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ndtp.algebra.wire import Wire
from ndtp.cli.common import print_table, writing
from ndtp.cli.planned_model import check_generates, config_file, dtype_at, length_at
from ndtp.errors import GridError
from ndtp.planner.fields import in_digits

if TYPE_CHECKING:
    from ndtp.planner.model_sizes import CountedModel, ModelSizes
    from ndtp.planner.training.choose import Question, SplitChoice

# Where a request says nothing: tokens of a step, and the longest sequence that is assumed.
TOKENS, LONGEST = 4 * 2**20, 8192
LEAST_GAIN = 0.01  # of a step's time, by a wire of fewer bytes or another split, that is worth a line


@dataclass(frozen=True)
class Asked:
    """Options of the command that a whole model takes."""

    path: str
    ranks: int
    tokens: int | None
    batch: int | None
    sequence: int | None
    hardware: str
    dtype: str
    software: str
    recompute: str
    optimizer: str
    memory_limit: float | None
    within_node: bool
    fixed: dict[str, int]
    wire: Wire | None = None


def question_of(asked: Asked, model: ModelSizes | CountedModel) -> Question | None:
    """Return the planner's question for a model; None for a model that is planned block by block, such as two
    stacks.

    Raises:
        GridError: a value that is none of its kind.
    """
    from ndtp.planner.fields import Number, Word
    from ndtp.planner.hardware import Hardware
    from ndtp.planner.training.choose import Question
    from ndtp.planner.training.practice import PRACTICES, RECOMPUTE
    from ndtp.planner.training.transformer import Transformer

    Word(tuple(PRACTICES)).check("plan", "software", asked.software)
    Word(("auto", *RECOMPUTE)).check("plan", "recompute", asked.recompute)
    config = config_of(asked.path)
    sequence = asked.sequence or min(LONGEST, length_at(asked.path))
    Number(1, 2**31, integer=True).check("plan", "sequence", sequence)
    shape = Transformer.of(str(config.get("model_type", "model")), model.blocks(1), sequence)
    if shape is None:
        return None
    if asked.batch is not None and asked.tokens is not None:
        raise GridError("plan: --batch and --tokens both say how long a step is\n  fix: leave one of them out")
    tokens = asked.tokens or tokens_of(asked.path, asked.batch, sequence)
    batch, rest = divmod(tokens, sequence)
    if rest:
        raise GridError(
            f"plan: --tokens {tokens} are no whole sequences of {sequence}\n"
            f"  fix: --tokens {max(1, batch) * sequence}, or --sequence"
        )
    practice = replace(PRACTICES[asked.software], dtype=dtype_at(asked.dtype, "fp8", "a model's step"), wire=asked.wire)
    again = ("none", "layer") if asked.software == "ndtp" else ("none", "products", "layer")
    return Question(
        shape, batch, asked.ranks, Hardware.load(asked.hardware), practice,
        optimizer=asked.optimizer, recompute=again if asked.recompute == "auto" else (asked.recompute,),
        fixed=asked.fixed, limit_gib=asked.memory_limit, within_node=asked.within_node,
        runnable=asked.software == "ndtp",
    )  # fmt: skip


def config_of(path: str) -> dict[str, object]:
    """Return the contents of the config file, with its text part brought up."""
    config = json.loads(Path(config_file(path)).read_text())
    return {**config, **(config.get("text_config") or {})}


def tokens_of(path: str, batch: int | None, sequence: int | None) -> int:
    """Return the rows of a model's step that nobody gave: its sequences, or four Mi."""
    sequence = sequence or min(LONGEST, length_at(path))
    return max(TOKENS, sequence) if batch is None else batch * sequence


def answer(
    out: Any, question: Question, asked: Asked, top: int, emit: Path | None, plot: Path | None
) -> list[SplitChoice]:
    """Print the choices, and write what was asked for."""
    from ndtp.planner.training.choose import choose
    from ndtp.planner.training.program import program
    from ndtp.planner.training.sequences import rows_axis, said

    if emit is not None:
        check_generates(asked.path, "--emit")  # the program trains it to predict the next token
        if question.practice.dtype == "float16":
            raise GridError(
                "plan: --emit writes no program for fp16, whose gradients want a scaler\n  fix: --dtype bf16"
            )
    choices = choose(question, max(top, 2))
    best = choices[0]
    print_table(out, _table(choices[:top]))
    _say(out, best, choices)
    runs = best if best.runs else choose(replace(question, runnable=True), 1)[0]
    if not best.runs:
        out.print(
            "ndtp splits no sequences (cp) between stages of a pipeline; what it runs is "
            f"{runs.splits}, {in_digits(runs.seconds, 4)} s a step.", highlight=False,
        )  # fmt: skip
    elif question.runnable and (other := _faster_than_what_runs(best)) is not None:
        out.print(
            f"{other.splits} would take {in_digits(other.seconds, 4)} s; ndtp splits no sequences (cp) between stages "
            "of a pipeline.", highlight=False,
        )  # fmt: skip
    if runs.splits.cp > 1:
        out.print(f"ndtp runs cp as a part of z, whose ranks split weights, too: z={rows_axis(runs)}.", highlight=False)
    if sentence := said(runs):
        out.print(sentence, highlight=False)
    sees = "text_config" in config_of(asked.path)
    text = program(runs, config_file(asked.path), sees, emit or "FILE")  # it may be started in another folder
    for line in text.splitlines():
        if "ndtp.Grid(" in line or "ndtp.parallelize(" in line or "torchrun " in line:
            out.print("  " + line.strip(), highlight=False, soft_wrap=True)
    if emit is not None:
        with writing(emit):
            emit.write_text(text)
        out.print(f"wrote {emit}")
    if plot is not None:
        from ndtp.cli.plan_model_plot import draw

        with writing(plot):
            draw(choices, plot)
        out.print(f"wrote {plot}")
    return choices[:top]


def _table(choices: list[SplitChoice]) -> Table:
    from ndtp.planner.training.choose import GIB
    from ndtp.planner.training.reasons import against

    best, question = choices[0], choices[0].question
    model = question.model
    title = (
        f"{model.name} on {question.ranks} ranks of {question.hardware.name}: "
        f"{question.batch} sequences of {model.sequence}, {best.practice.dtype}"
    )
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("#", justify="right")
    table.add_column("split")
    for heading in ("micro", "s/step", "tokens/s", "MFU", "GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("beside the first")
    for i, each in enumerate(choices, 1):
        s = each.splits
        micro = f"{int(s.micro)} x {each.micro_batches}" + f", {int(s.virtual)} turns" * (s.virtual > 1)
        split = f"{s}" + {"none": ""}.get(each.practice.recompute, f", again: {each.practice.recompute}")
        table.add_row(
            str(i), split, micro, in_digits(each.seconds, 4), f"{each.tokens_per_second:,.0f}",
            f"{each.utilisation:.1%}", in_digits(float(each.memory.total) / GIB), "" if i == 1 else against(best, each),
        )  # fmt: skip
    table.caption = (
        "micro: sequences of a micro-batch of each group of ranks that shares one, x their number.\n"
        "Times are predicted, not measured: docs/results.md has predictions beside published steps."
    )
    return table


def _say(out: Any, best: SplitChoice, choices: list[SplitChoice]) -> None:
    from ndtp.planner.training.reasons import limits, why

    out.print(f"{why(best)} What limits it: {limits(best)}.", highlight=False)
    if best.practice.wire is None and best.question.ranks > 1:
        faster = {name: s for name, s in in_fewer_bytes(best).items() if s < (1 - LEAST_GAIN) * best.seconds}
        named = ", ".join(f"{in_digits(seconds, 4)} s as {name}" for name, seconds in faster.items())
        if named:
            now = in_digits(best.seconds, 4)
            out.print(f"In fewer bytes (--wire) the step would take {named}, not {now} s.", highlight=False)


def _faster_than_what_runs(best: SplitChoice) -> SplitChoice | None:
    """Return the fastest split of all, where ndtp does not run it and it is faster than the best that ndtp runs."""
    from ndtp.planner.training.choose import choose

    (other,) = choose(replace(best.question, runnable=False), 1)
    return other if not other.runs and other.seconds < (1 - LEAST_GAIN) * best.seconds else None


def in_fewer_bytes(best: SplitChoice) -> dict[str, float]:
    """Return the seconds of a step on the splits of a choice by dtype of the wire; these compute in two bytes."""
    from ndtp.planner.training.choose import weigh

    ways = {name: replace(best.practice, wire=Wire.of(name)) for name in ("fp8", "int8")}
    return {name: weigh(best.question, best.splits, way, best.order).seconds for name, way in ways.items()}


def result(choices: list[SplitChoice]) -> dict[str, Any]:
    """Return the result for `--json`."""
    from ndtp.planner.training.program import sizes_of
    from ndtp.planner.training.reasons import limits, why
    from ndtp.planner.training.sequences import attention_of

    question = choices[0].question
    model = question.model
    ways = [attention_of(each) for each in choices]
    return {
        "plans": [
            {
                "grid": sizes_of(each), "step_ms": each.seconds * 1e3, "memory_bytes": int(each.memory.total),
                "tokens_per_second": each.tokens_per_second, "mfu": each.utilisation, "why": why(each),
                "limits": limits(each), "parts_ms": {k: v * 1e3 for k, v in each.time.parts().items()},
                "memory_parts": {k: int(v) for k, v in each.memory.parts().items()},
            }
            for each in choices
        ],
        "use": [
            {
                "rank_order": list(each.order), "micro_batch": int(each.splits.micro),
                "micro_batches": each.micro_batches, "virtual": int(each.splits.virtual),
                "recompute": each.practice.recompute, "regather": each.practice.regather, "runs": each.runs,
                "attention": None if way is None else way.best(), "attention_why": None if way is None else way.why(),
            }
            for each, way in zip(choices, ways, strict=True)
        ],
        "request": {
            "model": model.name, "parameters": model.parameters, "layers": model.layers, "hidden": model.hidden,
            "blocks": [{"name": b.name, "times": b.times} for b in (*model.blocks(1), model.ends(1))],
            "batch": question.batch, "sequence": model.sequence, "ranks": question.ranks,
            "hardware": question.hardware.name, "dtype": question.practice.dtype, "optimizer": question.optimizer,
            "wire": question.practice.wire and str(question.practice.wire),
        },
    }  # fmt: skip

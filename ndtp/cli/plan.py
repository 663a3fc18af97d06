"""`ndtp plan`: which grid, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ndtp.algebra.wire import Wire
from ndtp.cli.common import (
    COUNT,
    PICTURES,
    PRESETS,
    JsonOption,
    WireOption,
    at_least,
    axis_sizes,
    console,
    print_table,
    refuse_given,
    writable,
    write_json,
    writing,
)
from ndtp.cli.planned_model import OF_BOTH, dtype_at, model_as_dict, model_at, say_model
from ndtp.errors import GridError
from ndtp.planner.fields import in_digits
from ndtp.planner.training.practice import PRACTICES, RECOMPUTE

if TYPE_CHECKING:
    from ndtp.planner.block_cost import Block
    from ndtp.planner.grid_plan import GridPlan
    from ndtp.planner.grid_plans import GridPlans


SOME = at_least(1)
# Options that the step of a whole model alone has, and those that it does not have.
OF_STEPS, OF_BLOCKS = ("software", "recompute"), ("no_pad", "chunks", "eager")
OF_EXPERTS = ("top_k", "shared")


def plan(
    given: typer.Context,
    ranks: Annotated[int, typer.Option(callback=SOME, help="Number of ranks (devices) of the job.")],
    tokens: Annotated[
        int | None,
        typer.Option(callback=SOME, help="Rows of a step, over all ranks: sequences x length. A model's: 4 Mi."),
    ] = None,
    hidden: Annotated[int | None, typer.Option(callback=SOME, help="Features outside of the block.")] = None,
    ffn: Annotated[int | None, typer.Option(callback=SOME, help="Features inside of the block.")] = None,
    gated: Annotated[bool, typer.Option("--gated", help="An MLP with a gate beside its up projection.")] = False,
    experts: Annotated[
        int | None,
        typer.Option(callback=SOME, help="So many MLPs of --ffn features, of which a token goes through --top-k."),
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", callback=SOME, help="Experts of a token.")] = 2,
    shared: Annotated[
        int, typer.Option(callback=at_least(0), help="Features of an MLP beside experts, for every token. 0: none.")
    ] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="A transformers config.json: the whole model, instead of --hidden and --ffn."
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(callback=SOME, help="Tokens of a sequence. Default: what the config says, 8192 at most."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(callback=COUNT, help="Sequences of a model's step, over all ranks. With --decode: 32.")
    ] = None,
    software: Annotated[
        str, typer.Option(help=f"Whose kernels and overlap a model's step has: {', '.join(PRACTICES)}.")
    ] = "ndtp",
    recompute: Annotated[
        str, typer.Option(help=f"What a model's backward makes again: {', '.join(('auto', *RECOMPUTE))}.")
    ] = "auto",
    decode: Annotated[
        bool, typer.Option("--decode", help="Plan of a --model the continuing of sequences, a token a step.")
    ] = False,
    emit: Annotated[
        Path | None,
        typer.Option(metavar="FILE.py", help="The program that runs the choice.", callback=writable(".py")),
    ] = None,
    layers: Annotated[int | None, typer.Option(callback=SOME, help="How often the block is repeated.")] = None,
    objective: Annotated[str, typer.Option(help="Of a training step: time, volume or memory.")] = "time",
    hardware: Annotated[str, typer.Option(metavar="NAME|FILE.toml", help=f"{PRESETS}.")] = "h100-ib",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(OF_BOTH)}; fp64 of a block, fp8 of a model.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="State in memory: adamw, momentum, sgd or none.")] = "adamw",
    memory_limit: Annotated[float | None, typer.Option(metavar="GIB", help="Of a rank.")] = None,
    tp_within_node: Annotated[bool, typer.Option("--tp-within-node", help="Keep x and y inside a node.")] = False,
    fix: Annotated[list[str] | None, typer.Option(metavar="AXIS=SIZE", help="An axis that is given: dp=4.")] = None,
    no_pad: Annotated[bool, typer.Option("--no-pad", help="Only grids that divide every size.")] = False,
    chunks: Annotated[
        int, typer.Option(callback=SOME, help="Overlap collectives and products in this many pieces.")
    ] = 1,
    wire: WireOption = None,
    eager: Annotated[bool, typer.Option("--eager", help="The host issues each task; else a captured step.")] = False,
    top: Annotated[int, typer.Option(callback=COUNT, help="Rows of the table, and plans in the JSON.")] = 10,
    json_file: JsonOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            callback=writable(*PICTURES),
            help="Of a block: volume and time against the number of ranks; of a --model: parts of its step and memory.",
        ),
    ] = None,
) -> None:
    """Rank every process grid for a block by predicted time, exact volume or memory.

    With --model a whole training step is split, over pipeline stages, data, experts,
    context, z, x and y, with micro-batches and recomputation, as memory allows.

    Example: ndtp plan --tokens 8192 --hidden 4096 --ffn 16384 --ranks 64 --hardware h100-ib

    With --decode it is the grid and scheme that continue sequences the fastest, by
    reading weights and caches and by collectives, and from which batch on which wins.

    Example: ndtp plan --model config.json --ranks 1024 --hardware h100-ib --emit train.py

    Example: ndtp plan --decode --model config.json --ranks 8 --batch 64 --sequence 4096
    """
    from ndtp.cli.plan_decode import answer_decode, decode_question
    from ndtp.cli.plan_model import Asked, answer, question_of, result, tokens_of
    from ndtp.planner.block_cost import AXES, EXPERT_AXES
    from ndtp.planner.hardware import Hardware
    from ndtp.planner.request import Request, check_arguments
    from ndtp.planner.search import search, wire_savings
    from ndtp.planner.training.splits import STEP_AXES
    from ndtp.planner.training.transformer import Transformer

    if (decode or batch is not None) and model is None:
        raise GridError("plan: --decode and --batch take --model, the path of a config.json")
    if decode and (plot or tokens or tp_within_node or objective != "time"):
        raise GridError("plan: --decode has no --plot, --tokens, --tp-within-node or other objective")
    if model is None and (hidden is None or ffn is None):
        raise GridError("plan: give --hidden and --ffn, or --model with the path of a config.json")
    if model is not None and (hidden is not None or ffn is not None or gated or experts is not None):
        raise GridError("plan: --model gives --hidden, --ffn, --gated and --experts; leave them out")
    if model is None:
        refuse_given(given, ("sequence", *OF_STEPS), "without --model")
        if experts is None:
            refuse_given(given, OF_EXPERTS, "without --experts")
    else:
        refuse_given(given, OF_EXPERTS, "with --model, which has its own")
    if decode:
        refuse_given(given, (*OF_STEPS, *OF_BLOCKS, "optimizer", "wire"), "with --decode")
    sizes = None if model is None else model_at(model, layers)
    out = console(json_file)
    if sizes is not None and model is not None and objective == "time":
        asked = Asked(
            model, ranks, tokens, batch, sequence, hardware, dtype,
            software, recompute, optimizer, memory_limit, tp_within_node,
            axis_sizes(" ".join(fix or []), "--fix", (*STEP_AXES, "micro", "virtual")), Wire.of(wire),
        )  # fmt: skip
        if decode:
            question_of_decoding = decode_question(asked, sizes, batch)
            say_model(out, sizes)
            write_json(
                json_file, answer_decode(out, question_of_decoding, top, model, emit) | {"model": model_as_dict(sizes)}
            )
            return
        if (question := question_of(asked, sizes)) is not None:
            refuse_given(given, OF_BLOCKS, "on the step of a whole model")
            say_model(out, sizes)
            chosen = answer(out, question, asked, top, emit, plot)
            write_json(json_file, result(chosen) | {"model": model_as_dict(sizes)})
            return
    unlike = "" if sizes is None or objective != "time" else Transformer.why_not(sizes.blocks(1))
    if emit is not None:
        why = f"; this one is not: {unlike}" * bool(unlike)
        raise GridError(
            "plan: --emit writes a program for a --model of one stack of like layers between an embedding and a head, "
            f"and --objective time{why}; fix: leave out --emit, and take the grid"
        )
    if model is not None:
        refuse_given(given, OF_STEPS, "on a model that is planned block by block")
    if model is not None and tokens is not None:
        refuse_given(given, ("batch", "sequence"), "on a model that is planned block by block, with --tokens")
    if tokens is None and model is not None:
        tokens = tokens_of(model, batch, sequence)
    if tokens is None:
        raise GridError("plan: give --tokens, the rows of a step over all ranks")
    check_arguments({"tokens": tokens}, {"experts": experts})
    if sizes is None:
        blocks = _blocks(tokens, hidden, ffn, gated, (experts or 0, top_k, shared))
    else:
        blocks = sizes.blocks(tokens)
    axes = EXPERT_AXES if any(block.experts for block in blocks) else AXES
    request = Request(
        blocks, ranks, Hardware.load(hardware), layers=layers if sizes is None and layers is not None else 1,
        objective=objective, dtype=dtype_at(dtype, "fp64", "a block"), optimizer=optimizer,
        memory_limit_gib=memory_limit,
        fixed=axis_sizes(" ".join(fix or []), "--fix", axes), tp_within_node=tp_within_node, pad=not no_pad,
        chunks=chunks, wire=Wire.of(wire), captured=not eager,
    )  # fmt: skip
    plans = search(request)
    if sizes is not None:
        say_model(out, sizes)
    if unlike:
        out.print(
            f"Planned block by block, without stages, micro-batches and recomputation: {unlike}.", highlight=False
        )
    print_table(out, _table(plans, top))
    savings = wire_savings(plans[0])
    _say_best(out, plans[0], sizes is not None, savings)
    if plot is not None:
        _plot(plans[0], plot)
        out.print(f"wrote {plot}")
    write_json(
        json_file,
        _result(plans[:top]) | ({} if sizes is None else {"model": model_as_dict(sizes)}) | {"wires": savings},
    )


def _blocks(
    tokens: int, hidden: int | None, ffn: int | None, gated: bool, of: tuple[int, int, int]
) -> tuple[Block, ...]:
    from ndtp.planner.request import check_arguments
    from ndtp.planner.search import mlp_or_experts

    assert hidden is not None and ffn is not None
    check_arguments({"hidden": hidden, "ffn": ffn}, {})
    return tuple(mlp_or_experts(tokens, hidden, ffn, gated, *of))


def _table(plans: GridPlans, top: int) -> Table:
    from ndtp.planner.grid_plans import COLUMNS, WORDS

    table = Table(title=f"{top} of " * (top < len(plans)) + plans.title, title_justify="left", caption_justify="left")
    for i, heading in enumerate(COLUMNS):
        table.add_column(heading, justify="left" if 0 < i < WORDS else "right", no_wrap=i >= WORDS)
    for row in plans[:top].rows():
        table.add_row(*row)
    table.caption = (
        "Per rank, forward and backward; times are predicted, not measured.\n"
        "x bound: volume over twice the products' lower bounds, a reference."
    )
    return table


def _say_best(out: Any, best: GridPlan, whole: bool, savings: Sequence[Mapping[str, Any]]) -> None:
    from ndtp.planner.request import GIB

    out.print(best.why, highlight=False)
    _say_savings(out, savings)
    room = best.request.hardware.memory_gib
    if best.memory_bytes > room * GIB:
        out.print(f"It needs more than the {room:g} GiB of a device: see --memory-limit {room:g}.", style="yellow")
    axes = best.grid.nontrivial(best.grid.names) or ("x",)
    grid = ", ".join(f"{axis}={best.grid[axis]}" for axis in axes)
    block = best.request.main
    options = (("regather", best.regather), ("pad", best.pad), ("wire", best.request.wire and str(best.request.wire)))
    extra = "".join(f", {name}={value!r}" for name, value in options if value)
    out.print(f"  mesh = ndtp.ProcessGrid(ndtp.Grid({grid}))", highlight=False, soft_wrap=True)
    if best.expert_axis is not None:  # e, if the grid has it, need not be named
        extra = f", expert_axis={best.expert_axis!r}" if best.expert_axis != ("e",) else ""
    if best.expert_axis is not None and not whole:
        experts = next(b for b in best.request.blocks if b.experts)
        beside = next((f", shared={b.inner}" for b in best.request.blocks if not b.experts and b.inner), "")
        call = f"{experts.hidden}, {experts.inner}, experts={experts.experts}, top_k={experts.top_k}{beside}"
        call = f'ndtp.nn.MoE({call}, mesh=mesh, scheme="{best.scheme}"{extra})'
        out.print(f"  layer = {call}", highlight=False, soft_wrap=True)
        return
    if whole:  # which pads by itself
        extra = extra if best.expert_axis is not None else ""
        extra += f", regather={best.regather!r}" if best.regather else ""
        call = f'ndtp.parallelize(model, mesh, scheme="{best.scheme}"{extra})'
        out.print(f"  model = {call}", highlight=False, soft_wrap=True)
        return
    module = "GatedMLP" if len(block.outs) == 2 else "MLP"
    call = f'ndtp.nn.{module}({block.hidden}, {block.inner}, mesh=mesh, scheme="{best.scheme}"{extra})'
    out.print(f"  block = {call}", highlight=False, soft_wrap=True)


def _say_savings(out: Any, savings: Sequence[Mapping[str, Any]]) -> None:
    """Say what this grid would receive, and how long a step would take, in each dtype of the wire."""
    first, *others = savings
    if first["volume_bytes"] and others:
        mib, ms = in_digits(first["volume_bytes"] / 2**20, 4), in_digits(first["step_ms"], 4)
        out.print(f"In fewer bytes (--wire) this grid's {mib} MiB and {ms} ms would be:")
        for each in others:
            share = each["volume_bytes"] / first["volume_bytes"]
            mib, ms = in_digits(each["volume_bytes"] / 2**20, 4), in_digits(each["step_ms"], 4)
            text = f"  {each['wire']:5} {mib} MiB ({share:.0%}), {ms} ms"
            out.print(text, highlight=False)


def _plot(best: GridPlan, path: Path) -> None:
    from ndtp.cli.plan_plot import draw
    from ndtp.planner.scaling import rank_counts, scaling

    curves = scaling(best.request, rank_counts(best.request.ranks))
    with writing(path):
        draw(curves, best.request, path)


def _result(plans: list[GridPlan]) -> dict[str, Any]:
    """`plans` as promised; what is needed to use them stands beside it, in the same order."""
    request = plans[0].request
    return {
        "plans": [each.as_dict() for each in plans],
        "use": [
            {"rank_order": list(each.grid.names), "kind": each.kind, **each.arguments, "exposed_ms": each.exposed_ms}
            for each in plans
        ],
        "request": {
            "blocks": [
                {"name": b.name, "tokens": b.tokens, "hidden": b.hidden, "outs": list(b.outs), "inner": b.inner,
                 "times": b.times, **({"experts": b.experts, "top_k": b.top_k} if b.experts else {})}
                for b in request.blocks
            ],
            "ranks": request.ranks, "layers": request.layers, "dtype": request.dtype,
            "objective": request.objective, "hardware": request.hardware.name, "optimizer": request.optimizer,
            "wire": request.wire and str(request.wire),
        },
    }  # fmt: skip

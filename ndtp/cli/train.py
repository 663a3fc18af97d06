"""`ndtp train`: a byte-level model, or any of transformers', on a text and on any grid, up to torchrun's."""

from __future__ import annotations

import math
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ndtp.algebra.schemes import OTHER_AXES, SCHEMES, TENSOR_AXES, unused_axes, usual_scheme
from ndtp.algebra.wire import Wire
from ndtp.cli.common import (
    COUNT,
    COUNT_OR_NONE,
    PRESETS,
    JsonOption,
    WireOption,
    axis_sizes,
    console,
    dtype_of,
    is_first_rank,
    must_be,
    num_ranks,
    one_of,
    refuse_given,
    world_size,
    write_json,
    writing,
)
from ndtp.cli.progress import Runner
from ndtp.cli.train_checks import (
    check_field,
    check_files,
    check_sizes,
    keep_for_export,
    micro_batches_of,
    packed_tokens,
)
from ndtp.cli.train_log import LOG, basis_of_mfu, hardware_here, live_table
from ndtp.cli.train_model import config_file
from ndtp.planner.fields import Number, integer

if TYPE_CHECKING:
    from ndtp.cli.job import Job
    from ndtp.cli.training import Trained

YEAR_S = 365 * 86400.0
INTERRUPTED = 130
SIZE = must_be(Number(1, 2**20, integer=True))


def train(
    given: typer.Context,
    text: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="What to learn. Default: the help topics of Python's library.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Files (text, JSONL, Parquet, Arrow) or dataset folders; repeat it."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Of --data: a folder or a tokenizer.json. Default: bytes.")
    ] = None,
    field: Annotated[str, typer.Option(help="Of records of --data: where the text is.")] = "text",
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Checkpoint, log and picture; goes on from these.")
    ] = Path("train_output"),
    grid: Annotated[str, typer.Option(metavar="AXES", help="Like z=2,x=2,y=2 or dp=2,x=4. Default: dense.")] = "",
    scheme: Annotated[
        str, typer.Option(callback=one_of("auto", *SCHEMES), help="How tensors lie; auto: what the axes suggest.")
    ] = "auto",
    stages: Annotated[
        int, typer.Option(callback=COUNT, help="The model is cut by layers into so many, each on a grid of its own.")
    ] = 1,
    micro_batches: Annotated[
        int, typer.Option(callback=must_be(Number(0, 2**20, integer=True)), help="Of a batch. 0: two a stage.")
    ] = 0,
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A config.json of transformers, or its folder. Default: a byte-level model."),
    ] = None,
    steps: Annotated[int, typer.Option(callback=COUNT, help="In all, those before an interruption included.")] = 200,
    batch: Annotated[int, typer.Option(callback=SIZE, help="Sequences a step, on all ranks.")] = 16,
    context: Annotated[int, typer.Option(callback=SIZE, help="Bytes of a sequence.")] = 64,
    layers: Annotated[int, typer.Option(callback=SIZE, help="Of the byte-level model.")] = 2,
    width: Annotated[int, typer.Option(callback=SIZE, help="Of the byte-level model.")] = 128,
    heads: Annotated[int, typer.Option(callback=SIZE, help="Of the byte-level model.")] = 8,
    learning_rate: Annotated[
        float, typer.Option(callback=must_be(Number(0, 10)), help="After 20 steps of warming up.")
    ] = 2e-3,
    clip: Annotated[float, typer.Option(callback=must_be(Number(0, 1e9)), help="Largest norm of the gradient.")] = 1.0,
    seed: Annotated[int, typer.Option(callback=must_be(Number(0, 10**6, integer=True)))] = 0,
    resume: Annotated[
        str,
        typer.Option(
            callback=one_of("same", "auto"),
            help="The ranks of a run that goes on; auto: any, the planner finds a grid.",
        ),
    ] = "same",
    restarts: Annotated[
        int, typer.Option(callback=COUNT_OR_NONE, help="So often, of local ranks, from the last checkpoint.")
    ] = 0,
    save_every: Annotated[int, typer.Option(callback=COUNT, help="Steps between checkpoints.")] = 100,
    chunks: Annotated[str, typer.Option(help="Of rows, for overlap: a number or auto.")] = "auto",
    wire: WireOption = None,
    dtype: Annotated[str, typer.Option(callback=dtype_of("float32", "float64", "bfloat16"))] = "float32",
    hardware: Annotated[
        str, typer.Option(metavar="NAME|FILE.toml", help=f"Whose peak MFU is of. Default: the GPU's. {PRESETS}.")
    ] = "",
    sample: Annotated[
        int, typer.Option(callback=must_be(Number(0, 2**16, integer=True)), help="Tokens of text to make at the end.")
    ] = 0,
    prompt: Annotated[str, typer.Option(help="What that text follows.")] = "",
    tensorboard: Annotated[bool, typer.Option(help="Log for TensorBoard, too.")] = False,
    capture: Annotated[bool, typer.Option("--capture", help="Each step as one CUDA graph; needs GPUs.")] = False,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Outputs of other runs, for the picture; repeat it.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", callback=COUNT, help="Local ranks; torchrun's are joined. Default: the grid's."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Train a language model on a text, on any grid, and go on on any other.

    Hidden states, weights and optimizer are split from the embedding to the loss; the
    loss is the dense one. A second call with the same --output goes on from the
    checkpoint there, on another grid if --grid says so. Ctrl-C saves first. Writes
    log.csv, loss.png and the folder checkpoint; starts local ranks, or joins torchrun's.

    Exit status: 0 when all steps are done, 1 when a rank fails, 2 on wrong use, 130
    after Ctrl-C.

    With --stages the model is cut by layers, and --grid is that of each stage. With
    --resume auto a run goes on on as many ranks as there are: where --grid takes
    another number, the planner chooses one. --data is
    tokenised and packed; --tokenizer and --model go with it.

    Example: ndtp train book.txt --grid z=2,x=2,y=2 --steps 500
    """
    from ndtp.cli.job import ByteModelSizes, Job
    from ndtp.cli.resuming import chosen_grid
    from ndtp.cli.train_grid import check_grid
    from ndtp.cli.training import has_checkpoint
    from ndtp.cli.training import train as train_on_ranks
    from ndtp.testing import RankError

    out, model = console(json_file), config_file(model)
    number_of_chunks = _chunks(chunks)
    if model is None:
        check_sizes(width, heads)
    else:
        refuse_given(given, ("layers", "width", "heads"), "with --model, which has its own")
    check_field(given, data)
    if not grid and stages == 1 and resume == "same":
        refuse_given(given, ("scheme", "chunks"), "without --grid")
    if world_size() is not None:
        refuse_given(given, ("restarts",), "under torchrun, whose own is --max-restarts")
    axes = axis_sizes(grid, "--grid") if grid else {}
    there = world_size() or ranks
    if resume == "auto" and there not in (None, math.prod(axes.values()) * stages):
        axes, planned = chosen_grid(there or 1, world_size() is None, batch, context, (width, heads, layers), model)
        scheme, stages, micro_batches = planned if scheme == "auto" else scheme, 1, 1
        out.print(f"of {there} ranks the planner chooses {_named(axes)}, scheme {scheme}", highlight=False)
        ranks = None
    scheme = usual_scheme(axes) if scheme == "auto" else scheme
    if unused := unused_axes(axes, scheme):
        raise typer.BadParameter(
            f"scheme {scheme} has no axis {unused[0]}; it takes {', '.join((*TENSOR_AXES, *OTHER_AXES))}, of which dp "
            "splits rows alone", param_hint="--grid",
        )  # fmt: skip
    count = math.prod(axes.values()) * stages
    if model is None and layers < stages:
        raise typer.BadParameter(
            f"{layers} layers make no {stages} stages; fix: --layers {stages} or more, or --stages {layers} at most",
            param_hint="--stages",
        )
    micro_batches = micro_batches_of(micro_batches, stages, batch)
    if ranks not in (None, count) or world_size() not in (None, count):
        where = f"torchrun started {world_size()}" if world_size() else f"--ranks is {ranks}"
        what = f"{stages} stages of {grid or 'x=1'}" if stages > 1 else grid or "dense"
        raise typer.BadParameter(f"{what} takes {count} ranks, {where}; `ndtp plan` finds a grid", param_hint="--grid")
    if wire and not grid and count == 1:
        raise typer.BadParameter("one rank sends nothing; it takes a --grid", param_hint="--wire")
    if tensorboard and find_spec("tensorboard") is None:
        raise typer.BadParameter("TensorBoard is not installed; pip install tensorboard", param_hint="--tensorboard")
    if sample and stages > 1:
        raise typer.BadParameter("text is made by models that are not cut: --stages 1", param_hint="--sample")
    if capture:
        _check_capture(bool(axes), stages)
    vocabulary = check_files(text, data, model, tokenizer, context, output, sample, prompt)
    if without := [folder for folder in compare or () if not (folder / LOG).is_file()]:
        raise typer.BadParameter(f"{without[0]} has no {LOG}, as the output of a run has", param_hint="--compare")
    tokens = packed_tokens(data, text, tokenizer, vocabulary, field, context, output)
    hardware = hardware or hardware_here(dtype)
    basis = basis_of_mfu(hardware, dtype)  # raises where it is not known
    if is_first_rank() and not has_checkpoint(output):
        keep_for_export(model, tokenizer, output)
    with tempfile.TemporaryDirectory(prefix="ndtp-train-") as folder, marking(Path(folder) / "stop") as stop_file:
        job = Job(
            output=output.resolve(), stop_file=stop_file,
            text=text and text.resolve(), config=model and model.resolve(),
            sizes=ByteModelSizes(width, 4 * width, layers, heads), grid=axes,
            scheme=scheme, steps=steps, batch=batch, context=context,
            learning_rate=learning_rate, clip=clip, seed=seed, save_every=save_every, chunks=number_of_chunks,
            dtype=dtype, tensorboard=tensorboard, stages=stages, micro_batches=micro_batches,
            tokens=tokens, tokenizer=tokenizer and tokenizer.resolve(), hardware=hardware, sample=sample, prompt=prompt,
            wire=Wire.of(wire),
            capture=capture,
        )  # fmt: skip
        if axes:
            check_grid(job)
        name = job.name
        table, unit = partial(live_table, job.output / LOG), (batch * context, "tokens")
        while True:
            try:
                with Runner(out, num_ranks(count, least=1), total=steps, unit=unit, below=table) as runner:
                    by_rank: Sequence[Trained] = runner.run(
                        name, train_on_ranks, job, axes=axes if axes and stages == 1 else None, timeout=YEAR_S
                    )
                break
            except RankError as error:
                if error.refusal:
                    raise
                if is_first_rank():
                    print(f"train failed: {error}", file=sys.stderr)
                if restarts and world_size() is None and not stop_file.exists():
                    restarts -= 1
                    print(f"going on from the last checkpoint; {restarts} restarts are left", file=sys.stderr)
                    continue
                write_json(json_file, {"ok": False, "error": str(error)})
                raise typer.Exit(1) from None
    done = by_rank[0]
    if done.error:
        what = "sizes, seed and data" if done.option == "--output" else done.option
        fix = f"the {what} that the run in this folder began with, or another --output"
        raise typer.BadParameter(f"{done.error}; fix: {fix}", param_hint=done.option)
    if is_first_rank():
        keep_for_export(model, tokenizer, output)  # of a run that goes on: what it has is not another model's
    _finish(out, job, name, done, compare or [])
    if done.losses:
        out.print(basis, highlight=False)
    write_json(json_file, _summary(job, done))
    if done.stopped:
        raise typer.Exit(INTERRUPTED)


def _summary(job: Job, done: Trained) -> dict[str, object]:
    return {
        "ok": not done.stopped,
        "grid": dict(job.grid),
        "scheme": job.scheme if job.grid else None,  # of a dense run, tensors lie in no way
        "stages": job.stages,
        "first_step": done.first,
        "step": done.step,
        "losses": done.losses,
        "held_out_loss": done.held_out,
        "sample": done.sample,
        "tokens_per_second": done.tokens_per_second,
    }


def _finish(out: Any, job: Job, name: str, done: Trained, compare: Sequence[Path]) -> None:
    from ndtp.cli.train_plot import draw
    from ndtp.cli.training import CHECKPOINT

    if not is_first_rank():
        return
    picture = job.output / "loss.png"
    with writing(picture):
        draw(picture, [job.output, *compare])
    if done.losses:
        at = f"{done.step} of {job.steps} steps on {name}"
        held_out = "" if done.stopped else f", {done.held_out:.4f} on text that was held out"
        out.print(f"{at}: loss {done.losses[-1]:.4f}{held_out}; {done.tokens_per_second:,.0f} tokens a second")
    else:
        out.print(f"{done.step} steps were done before, --steps {job.steps} asks for no more")
    if done.sample:
        out.print(done.sample, markup=False, highlight=False)
    if done.stopped:
        out.print("stopped and saved; the same command goes on")
    out.print(f"{job.output / CHECKPOINT}, {job.output / LOG} and {picture} written")


@contextmanager
def marking(stop_file: Path) -> Iterator[Path]:
    """Ctrl-C, or a launcher's request to end, leaves a mark that the ranks look for; a second Ctrl-C ends at once."""

    def mark(number: int, _: object) -> None:
        if stop_file.exists() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop_file.touch()
        if is_first_rank():
            print("saving; Ctrl-C again ends at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, mark) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop_file
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_capture(has_grid: bool, stages: int) -> None:
    import torch

    why = ""
    if world_size() is None or not torch.cuda.is_available():
        why = "there are no CUDA graphs without GPUs; torchrun starts a rank on each"
    elif not has_grid or stages > 1:
        why = "a step of one grid is captured: --grid, and no --stages"
    if why:
        raise typer.BadParameter(f"{why}; without it steps run eagerly", param_hint="--capture")


def _named(axes: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in axes.items()) or "no grid"


def _chunks(text: str) -> int | str:
    number = integer(text)
    if text == "auto" or (number and number <= 1024):
        return text if text == "auto" else int(number or 1)
    raise typer.BadParameter(f"{text!r}; it must be a number from 1 to 1024, or auto", param_hint="--chunks")

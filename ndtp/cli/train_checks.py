"""The checks of `ndtp train` before any rank is started, of its files and its model, and the tokens that it packs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from ndtp.algebra.grid import divisors
from ndtp.cli.common import is_first_rank, refuse_given, writing
from ndtp.cli.compressed import compressed_by
from ndtp.cli.train_log import LOG
from ndtp.planner.fields import reason, unwritable

BYTES = 256  # the vocabulary of the byte-level model


def check_sizes(width: int, heads: int) -> None:
    """Check that the byte-level model has heads of so many features that their positions turn them in pairs.

    Raises:
        typer.BadParameter: the heads do not share the width, or each has an odd number of features.
    """
    pair = 2 * heads
    if width % pair:
        near = sorted({width // pair * pair, (width // pair + 1) * pair} - {0})
        fewer = max((each for each in range(1, heads) if width % (2 * each) == 0), default=0)
        raise typer.BadParameter(
            f"{heads} heads do not share --width {width} in pairs of features, which rotary positions turn; "
            f"fix: --width {' or '.join(map(str, near))}" + f", or --heads {fewer}" * bool(fewer),
            param_hint="--heads",
        )


def micro_batches_of(asked: int, stages: int, batch: int) -> int:
    """Return into how many micro-batches a batch is cut.

    Args:
        asked: by --micro-batches; 0: two a stage.

    Raises:
        typer.BadParameter: they do not divide the batch, or there is one stage.
    """
    count = asked or (2 * stages if stages > 1 else 1)
    if count > 1 and stages == 1:
        raise typer.BadParameter("it takes --stages 2 or more", param_hint="--micro-batches")
    if batch % count == 0:
        return count
    some = divisors(batch)
    near = {max(each for each in some if each < count), min((each for each in some if each > count), default=batch)}
    batches = {batch // count * count, (batch // count + 1) * count} - {0}
    by_count, by_batch = (" or ".join(map(str, sorted(each))) for each in (near, batches))
    fewer = max((each for each in range(2, stages) if batch % (2 * each) == 0), default=0)
    what = f"{count} do not divide" if asked else f"{stages} stages take {count} micro-batches, which do not divide"
    raise typer.BadParameter(
        f"{what} --batch {batch}; fix: --batch {by_batch}, or --micro-batches {by_count}"
        + f", or --stages {fewer}" * bool(fewer and not asked),
        param_hint="--micro-batches" if asked else "--stages",
    )


def check_field(given: typer.Context, data: Sequence[Path] | None) -> None:
    """Check that --field, where it is given, names a field of something.

    Raises:
        typer.BadParameter: there are no records.
    """
    if not data:
        return refuse_given(given, ("field",), "without --data")
    from ndtp.cli.train_data import DataError, has_fields

    with suppress(DataError):  # `packed_tokens` says it
        if not has_fields(data):
            refuse_given(given, ("field",), "on --data of plain text, which has no fields")
    return None


def packed_tokens(
    data: Sequence[Path] | None, text: Path | None, tokenizer: Path | None, vocabulary: int | None, field: str,
    context: int, output: Path,
) -> Path | None:  # fmt: skip
    """Return the file of packed tokens; None where a text, of bytes, is what is learned.

    Raises:
        typer.BadParameter: data that cannot be read, too few tokens, or tokens that the vocabulary does not have.
    """
    if not data:
        return None
    if text is not None:
        raise typer.BadParameter(f"FILE, {text}, is a text as well; give one of them", param_hint="--data")
    import numpy as np

    from ndtp.cli.train_data import DataError, TokenizerError, least_tokens, tokenised

    try:
        path = tokenised(data, tokenizer, field, output, is_first_rank())
    except TokenizerError as error:
        raise typer.BadParameter(str(error), param_hint="--tokenizer") from None
    except DataError as error:
        raise typer.BadParameter(str(error), param_hint="--data") from None
    stream = np.load(path, mmap_mode="r")
    if len(stream) < least_tokens(context):
        raise typer.BadParameter(
            f"{len(stream)} tokens; sequences of {context} take {least_tokens(context)} at least", param_hint="--data"
        )
    _check_vocabulary(int(stream.max()), vocabulary, "--data")
    return path


def _check_vocabulary(largest: int, vocabulary: int | None, option: str) -> None:
    if vocabulary is not None and largest >= vocabulary:
        fix = "--tokenizer, the model's own" + ("" if option == "--data" else ", with --data")
        raise typer.BadParameter(
            f"the text has token {largest}, the model's vocabulary has {vocabulary}; fix: {fix}", param_hint=option
        )


def keep_for_export(model: Path | None, tokenizer: Path | None, output: Path) -> None:
    """Put beside the checkpoint what `ndtp export` needs: the model's config, and the tokenizer."""
    from ndtp.cli.export import CONFIG, TOKENIZER

    with writing(output):
        for name in (CONFIG, "generation_config.json"):
            source = None if model is None else model if name == CONFIG else model.parent / name
            if source is not None and source.is_file() and source.resolve() != (output / name).resolve():
                (output / name).write_bytes(source.read_bytes())
        if tokenizer is not None:
            _tokenizer(tokenizer).save_pretrained(output / TOKENIZER)


def _tokenizer(path: Path) -> Any:
    from ndtp.cli.train_data import TokenizerError, load_tokenizer

    try:
        return load_tokenizer(path)
    except TokenizerError as error:
        raise typer.BadParameter(str(error), param_hint="--tokenizer") from None


def check_files(
    text: Path | None, data: Sequence[Path] | None, model: Path | None, tokenizer: Path | None, context: int,
    output: Path, sample: int, prompt: str,
) -> int | None:  # fmt: skip
    """Check the text, the model and the output; return the size of the model's vocabulary, None where it names none.

    Raises:
        typer.BadParameter: a file that cannot be read or written, a text that is too short, or a model that cannot be
            trained so.
    """
    largest = None if text is None else _largest_byte(text, context)
    if prompt and not sample:
        raise typer.BadParameter("no text is made that could follow it; fix: --sample 100, say", param_hint="--prompt")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # bytes of the command line that no text has
        raise typer.BadParameter("it is not in UTF-8; fix: a terminal in UTF-8, or iconv", param_hint="--prompt")
    if tokenizer is not None and not data:
        raise typer.BadParameter("it is for --data", param_hint="--tokenizer")
    if tokenizer is not None and model is None:
        raise typer.BadParameter("the byte-level model has bytes; --model takes others", param_hint="--tokenizer")
    vocabulary: int | None = BYTES
    if model is not None:
        from ndtp.cli.train_model import check_model

        vocabulary = check_model(model, context, sample, _start(prompt, tokenizer) if sample else ())
        if not data:
            _check_vocabulary(max(_default_text()) if largest is None else largest, vocabulary, "FILE")
    if is_first_rank():
        _make_output(output)
    return vocabulary


def _start(prompt: str, tokenizer: Path | None) -> Sequence[int]:
    from ndtp.cli.train_sample import first_tokens

    return first_tokens(prompt, None if tokenizer is None else _tokenizer(tokenizer))


def _default_text() -> bytes:
    from ndtp.cli.demo_training import text

    return text().numpy().tobytes()


def _largest_byte(text: Path, context: int) -> int:
    """Return the largest token of a text of bytes, which is long enough to learn from."""
    from ndtp.cli.training import least_bytes

    try:
        if text.is_dir():
            raise OSError(f"it is a folder; fix: --data {text}, which reads all files in one")
        if text.exists() and not text.is_file():
            raise OSError("it is no regular file")
        content = text.read_bytes()
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{text} cannot be read: {reason(error)}", param_hint="FILE") from None
    if program := compressed_by(content):
        raise typer.BadParameter(
            f"{text} is compressed by {program}, and its bytes are no text; fix: unpack it, and name what is in it",
            param_hint="FILE",
        )
    if len(content) < least_bytes(context):
        raise typer.BadParameter(
            f"{text} has {len(content)} bytes; sequences of {context} take {least_bytes(context)} at least",
            param_hint="FILE",
        )
    return max(content)


def _make_output(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{output} cannot be made: {reason(error)}", param_hint="--output") from None
    for name in (LOG, "loss.png"):
        if problem := unwritable(str(output / name)):
            raise typer.BadParameter(problem, param_hint="--output")

"""The checks of `ndtp train` before any rank is started, of its files and its model, and the tokens that it packs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from ndtp.cli.common import is_first_rank, writing
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

    from ndtp.cli.train_data import DataError, least_tokens, tokenised

    try:
        path = tokenised(data, tokenizer, field, output, is_first_rank())
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
            from ndtp.cli.train_data import load_tokenizer

            load_tokenizer(tokenizer).save_pretrained(output / TOKENIZER)


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
    from ndtp.cli.train_data import DataError, load_tokenizer
    from ndtp.cli.train_sample import first_tokens

    try:
        return first_tokens(prompt, None if tokenizer is None else load_tokenizer(tokenizer))
    except DataError as error:
        raise typer.BadParameter(str(error), param_hint="--tokenizer") from None


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

"""The data of `ndtp train --data`: files and folders of datasets, tokenised once, packed, and drawn without repetition.

Documents are put one behind the other, each with an end, and cut into sequences: none is padded and none is cut off.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ndtp.cli.compressed import compressed_by, is_compressed
from ndtp.errors import CheckpointError
from ndtp.planner.fields import Number, reason, shown

if TYPE_CHECKING:
    from ndtp.cli.job import Job

TEXTS = (".txt", ".md", ".rst", ".py", "")
TABLES = (".parquet", ".arrow")
RECORDS = (".jsonl", ".ndjson", ".json")
KNOWN = (*(each for each in TEXTS if each), *TABLES, *RECORDS)
END_OF_BYTES = b"\n\n"
IDS = "input_ids"  # of records that are tokenised already
TOKEN = Number(0, 2**32 - 1, integer=True)  # what is kept of each
HELD_OUT = 0.05
MOST_SHOWN = 500  # characters of a path in an error
LOOKED_AT = 1 << 12  # tokens, of all, that tell one data set from another
SLOW_S = 3600.0  # for another rank to tokenise


class DataError(ValueError):
    """Data that cannot be read; the message says which file, and what to do."""


class TokenizerError(DataError):
    """A tokenizer that cannot be read."""


class OtherRunError(CheckpointError):
    """A checkpoint of a run that began with other options than there are now; `option` names those that differ."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files to read, in order: those named, and those of folders; of a dataset with splits, those of `train`.

    Raises:
        DataError: a path is not there or cannot be read, or a folder has no file of a known kind.
    """
    try:
        return _files_of(paths)
    except OSError as error:  # a name that the system does not take, or a place that it does not show
        raise DataError(f"{str(error.filename)[:MOST_SHOWN]} cannot be read: {error.strerror}") from None


def _files_of(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            found.append(path)
            continue
        if not path.is_dir():
            raise DataError(f"{path} is not there")
        root = path / "train" if (path / "dataset_dict.json").exists() and (path / "train").is_dir() else path
        every = sorted(each for each in root.rglob("*") if each.is_file())
        inside = [each for each in every if each.suffix in KNOWN]
        # save_to_disk writes state.json and dataset_info.json beside the tables.
        tables = [each for each in inside if each.suffix in TABLES and not each.name.startswith("cache-")]
        if not tables and (packed := next((each for each in every if is_compressed(each)), None)):
            raise DataError(f"{packed} is compressed, and would be left out; fix: unpack it, or name the files to read")
        inside = tables or [each for each in inside if each.suffix != ".json"] or inside
        if not inside:
            raise DataError(
                f"{path} has no file that ends in {', '.join(KNOWN)}; fix: name files of text, whatever they end in"
            )
        found += inside
    return found


def documents(path: Path, field: str) -> Iterator[str | Sequence[int]]:
    """The texts of a file, or the tokens of records that have `input_ids`.

    Raises:
        DataError: a file that is compressed, or no text in UTF-8, no JSON or no table, a record without the field or
            with another value than a text or tokens, or pyarrow is missing.
    """
    if path.suffix in TABLES:
        for number, record in enumerate(_table_records(path), 1):
            yield _document(record, field, f"{path}, row {number}")
        return
    try:
        with path.open("rb") as begin:
            if program := compressed_by(begin.read(16)):
                raise DataError(f"{path} is compressed by {program}; fix: unpack it, and name what is in it")
        if path.suffix not in RECORDS:
            yield path.read_text(encoding="utf-8-sig")  # Windows puts a mark before it
            return
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _document(_parsed(line, f"{path}:{number}"), field, f"{path}:{number}")
    except UnicodeDecodeError:
        raise DataError(_no_text(path)) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from None


def _no_text(path: Path) -> str:
    """Return which byte of a file is the first that is no text in UTF-8, and what to do."""
    before = 0
    with path.open("rb") as file:
        marked = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        file.seek(0)
        for line in file:  # no character of UTF-8 has a part that ends a line
            try:
                line.decode()
            except UnicodeDecodeError as error:
                at, byte = before + error.start, line[error.start]
                break
            before += len(line)
        else:
            return f"{path} was written to while it was read"
    encoding = "UTF-16" if marked else "LATIN1"
    return (
        f"{path} is no text in UTF-8: byte 0x{byte:02x} at offset {at}; fix: leave the file out; where it is text, "
        f"`iconv -f {encoding} -t UTF-8` writes it in UTF-8, and `iconv -c -f UTF-8 -t UTF-8` leaves out single bytes"
    )


def has_fields(paths: Sequence[Path]) -> bool:
    """Whether there are records with fields among the files.

    Raises:
        DataError: see `files_of`.
    """
    return any(path.suffix in (*TABLES, *RECORDS) for path in files_of(paths))


def _parsed(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except RecursionError:
        raise DataError(f"{where} cannot be read: it is nested too deep") from None
    except ValueError as error:
        raise DataError(
            f"{where} cannot be read: {error}; fix: one JSON object on each line, or a name that ends in .txt for text"
        ) from None


def _document(record: object, field: str, where: str) -> str | Sequence[int]:
    """Return the text of a record, or its tokens; an empty text and no tokens are a document, which has none."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: the record is {shown(record)}; fix: an object with a field {field!r} on each line")
    name = field if field in record else IDS
    if name not in record:
        has = ", ".join(map(str, record))
        raise DataError(f"{where}: no text in {field!r}; the record has {has}; --field names another")
    found = record[name]
    if isinstance(found, list):
        for i, each in enumerate(found):
            if not TOKEN.takes(each):
                raise DataError(f"{where}: {name}[{i}]={shown(each)}; a token must be {TOKEN}")
    elif not isinstance(found, str):
        raise DataError(
            f"{where}: {name}={shown(found)}; it must be text, or a list of tokens; fix: leave the record out, "
            "or --field names another"
        )
    return found


def _table_records(path: Path) -> Iterator[dict[str, object]]:
    if find_spec("pyarrow") is None:
        raise DataError(f"{path} is read by pyarrow, which is not installed; pip install 'ndtp[data]'")
    import pyarrow

    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        else:
            with pyarrow.memory_map(str(path)) as source:
                try:
                    batches = list(pyarrow.ipc.open_stream(source))
                except pyarrow.ArrowInvalid:
                    file = pyarrow.ipc.open_file(source)
                    batches = [file.get_batch(i) for i in range(file.num_record_batches)]
        for batch in batches:
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def tokenised(paths: Sequence[Path], tokenizer: Path | None, field: str, folder: Path, writes: bool) -> Path:
    """A file with the tokens of all documents, made once for the same files and tokenizer.

    Args:
        tokenizer: a folder of transformers', or a tokenizer.json; None: tokens are bytes.
        folder: to write it to.
        writes: whether this rank makes it; others wait for it.

    Raises:
        DataError: see `documents`.
        TokenizerError: the tokenizer cannot be read.
    """
    files = files_of(paths)
    seen = [(str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    key = hashlib.sha256(json.dumps([seen, str(tokenizer), field]).encode()).hexdigest()[:12]
    path = folder / f"tokens-{key}.npy"
    if path.exists():
        return path
    if not writes:
        end = time.monotonic() + SLOW_S
        while not path.exists():
            if time.monotonic() > end:
                raise DataError(f"{path} was not written by rank 0 in {SLOW_S:g} s")
            time.sleep(0.2)
        return path
    encode, end_of_document = encoder(tokenizer)
    parts: list[np.ndarray[Any, Any]] = []
    for each in files:
        for document in filter(len, documents(each, field)):
            ids = encode(document) if isinstance(document, str) else document
            parts.append(np.asarray([*ids, *end_of_document], np.uint32))
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as file:
        np.save(file, np.concatenate(parts) if parts else np.zeros(0, np.uint32))
    os.replace(partial, path)
    return path


def encoder(tokenizer: Path | None) -> tuple[Any, Sequence[int]]:
    """Return what makes tokens of a text, and the tokens that end a document."""
    if tokenizer is None:
        return lambda text: text.encode(), END_OF_BYTES
    found = load_tokenizer(tokenizer)
    end = [] if found.eos_token_id is None else [found.eos_token_id]
    return lambda text: found(text, add_special_tokens=False, verbose=False)[IDS], end


def load_tokenizer(path: Path) -> Any:
    """A tokenizer of transformers.

    Raises:
        TokenizerError: transformers is missing, or the path leads to no tokenizer.
    """
    if find_spec("transformers") is None:
        raise TokenizerError("tokenizers are read by transformers, which is not installed; "
                             "pip install 'ndtp[transformers]'")  # fmt: skip
    fix = "fix: the folder that a tokenizer's save_pretrained wrote, or its tokenizer.json"
    if not path.exists():
        raise TokenizerError(f"{path} is not there; {fix}")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if path.is_dir():
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:
        said = str(error).strip().split("\n")[0].split(". ")[0].removesuffix(" from one of: ")  # and a list of files
        kind = f"{type(error).__name__}: " * isinstance(error, KeyError)
        raise TokenizerError(f"{path} is no tokenizer that transformers reads: {kind}{said}; {fix}") from None


class PackedBatches:
    """Sequences of a token file, each once before any comes again; the last twentieth is held out.

    Which come in a step follows from the seed and the number of sequences before: that is the position in a checkpoint,
    so a run goes on where it was, on another grid and with another batch as well.
    """

    def __init__(self, job: Job) -> None:
        assert job.tokens is not None
        self.stream = tokens = np.load(job.tokens, mmap_mode="r")
        self.batch, self.context, self.seed = job.batch, job.context, job.seed
        count = (len(tokens) - 1) // job.context
        self.num_held_out = max(1, int(count * HELD_OUT))
        self.num_sequences = count - self.num_held_out
        # What decides which sequence a number means.
        some = zlib.crc32(tokens[:: max(1, len(tokens) // LOOKED_AT)].tobytes())
        self._order_of = {"seed": job.seed, "context": job.context, "tokens": len(tokens), "hash of the tokens": some}
        of_tokens = "--data and --tokenizer" if job.tokenizer else "--data"
        self._options = {"seed": "--seed", "context": "--context", "": of_tokens}
        self._before, self._first = 0, 0  # sequences seen, and the step, when this run began
        self._order: tuple[int, Any] = (-1, None)

    @property
    def tokens(self) -> int:
        """The number of tokens of a step."""
        return self.batch * self.context

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from what `state` has kept in a checkpoint.

        Raises:
            OtherRunError: its sequences came in another order, or are others: some would come again before all came.
        """
        if "sequences" not in state:
            raise OtherRunError("--data", "the run has drawn from a text, and there is --data now")
        before = state.get("order", self._order_of)  # older ones do not tell
        check_same("the run has drawn its sequences by", before, self._order_of, self._options)
        self._first, self._before = int(state["step"]), int(state["sequences"])

    def state(self, step: int) -> dict[str, Any]:
        return {"sequences": self._seen(step), "order": self._order_of}

    def _seen(self, step: int) -> int:
        return self._before + (step - self._first) * self.batch

    def at(self, step: int) -> Any:
        """Return the tokens of a step, [batch, context + 1]."""
        position = self._seen(step)
        return self._cut([self._sequence(position + i) for i in range(self.batch)])

    def held_out(self, number: int) -> Any:
        """A batch of what no step sees."""
        first = number * self.batch
        return self._cut([self.num_sequences + (first + i) % self.num_held_out for i in range(self.batch)])

    def _sequence(self, number: int) -> int:
        import torch

        epoch, at = divmod(number, self.num_sequences)
        if self._order[0] != epoch:
            draw = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = epoch, torch.randperm(self.num_sequences, generator=draw)
        return int(self._order[1][at])

    def _cut(self, sequences: Sequence[int]) -> Any:
        import torch

        starts = np.asarray(sequences)[:, None] * self.context
        return torch.from_numpy(self.stream[starts + np.arange(self.context + 1)].astype(np.int64))


def check_same(begin: str, before: Mapping[str, Any], now: Mapping[str, Any], options: Mapping[str, str]) -> None:
    """Check that a checkpoint tells of its run what is so now.

    Args:
        begin: of the message.
        options: the options that the keys of `now` follow from; that of "" is for the keys that are not named.

    Raises:
        OtherRunError: it tells otherwise.
    """
    other = {key: f"{key} {before.get(key)}, now {own}" for key, own in now.items() if before.get(key) != own}
    if other:
        named = dict.fromkeys(options.get(key, options[""]) for key in other)
        raise OtherRunError(" and ".join(named), f"{begin} {'; '.join(other.values())}")


def least_tokens(context: int) -> int:
    """A sequence to learn from, and one that is held out."""
    return 2 * context + 1

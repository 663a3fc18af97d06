"""`ndtp train --data`: what is read, packed and drawn, and a run that goes on where it was on another grid."""

import bz2
import gzip
import json
import lzma
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_train import losses, train
from typer.testing import CliRunner

from ndtp import Grid
from ndtp.cli.app import app
from ndtp.cli.job import Job
from ndtp.cli.train_data import DataError, PackedBatches, documents, files_of, tokenised
from ndtp.cli.train_log import COLUMNS, LOG, live_table
from ndtp.cli.training import Model
from ndtp.errors import CheckpointError
from ndtp.models.byte_model import ByteModelSizes

TEXT = "the quick brown fox jumps over the lazy dog and goes on to the next field of corn. "


def job(tmp_path, **fields):
    of_all = {
        "output": tmp_path, "stop_file": tmp_path / "stop", "text": None, "config": None, "sizes": ByteModelSizes(),
        "grid": {}, "scheme": "3d", "steps": 1, "batch": 4, "context": 8, "learning_rate": 1e-3, "clip": 1.0, "seed": 0,
        "save_every": 1, "chunks": 1, "dtype": "float32", "tensorboard": False,
    }  # fmt: skip
    return Job(**of_all | fields)


def test_documents_of_every_kind(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two", "n": 1}\n\n{"text": ""}\n{"input_ids": [3, 4]}\n')
    assert [path.name for path in files_of([tmp_path])] == ["a.txt", "b.jsonl"]
    assert [*documents(tmp_path / "a.txt", "text")] == ["one"]
    assert [*documents(tmp_path / "b.jsonl", "text")] == ["two", "", [3, 4]]
    path = tokenised([tmp_path / "a.txt", tmp_path / "b.jsonl"], None, "text", tmp_path, writes=True)
    assert np.load(path).tolist() == [*b"one\n\ntwo\n\n", 3, 4, *b"\n\n"]
    before = path.stat().st_mtime_ns
    assert tokenised([tmp_path / "a.txt", tmp_path / "b.jsonl"], None, "text", tmp_path, writes=False) == path
    assert path.stat().st_mtime_ns == before, "made once"
    for content, message in (("{", "cannot be read"), ("[1]", r"the record is \[1\]"), ('{"body": 1}', "has body")):
        (tmp_path / "c.jsonl").write_text(content)
        with pytest.raises(DataError, match=message):
            list(documents(tmp_path / "c.jsonl", "text"))
    with pytest.raises(DataError, match="is not there"):
        files_of([tmp_path / "nothing"])
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        files_of([tmp_path / ("n" * 5000)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no file that ends in"):
        files_of([tmp_path / "empty"])


@pytest.mark.parametrize(
    "record, says",
    [
        ({"input_ids": [1, 2, -3]}, "input_ids[2]=-3; a token must be an integer from 0 to 4,294,967,295"),
        ({"input_ids": [1, 2**32]}, "input_ids[1]=4294967296; a token"),
        ({"input_ids": [2.5]}, "input_ids[0]=2.5; a token"),
        ({"input_ids": [True]}, "input_ids[0]=True; a token"),
        ({"input_ids": [1, [2]]}, "input_ids[1]=[2]; a token"),
        ({"input_ids": 7}, "input_ids=7; it must be text, or a list of tokens"),
        ({"text": 5}, "text=5; it must be text"),
        ({"text": None}, "text=None; it must be text"),
        ({"text": None, "input_ids": [1]}, "text=None; it must be text"),
    ],
    ids=str,
)
def test_a_record_that_is_neither_text_nor_tokens(tmp_path, record, says):
    """The message names the file, the line and the value; nothing is trained."""
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "one"}}\n{json.dumps(record)}\n')
    result = train("--data", path, "--output", tmp_path / "out")
    assert result.exit_code == 2 and f"{path}:2: {says}" in result.stderr, result.output


def test_lines_that_are_no_json_are_named(tmp_path):
    for content, says in (
        ("{nope", "Expecting property name.*fix: one JSON object on each line"),
        ("[" * 10**5, "nested too deep"),
    ):
        (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n{content}\n')
        with pytest.raises(DataError, match=f"a.jsonl:2 cannot be read: .*{says}"):
            list(documents(tmp_path / "a.jsonl", "text"))


@pytest.mark.parametrize(
    "program, pack",
    [
        ("gzip", gzip.compress), ("bzip2", bz2.compress), ("xz", lzma.compress),
        ("zstd", lambda text: b"\x28\xb5\x2f\xfd" + text),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_compressed_is_not_learned(tmp_path, program, pack):
    """By its content, whatever its name; in a folder beside others it would be left out."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.md").write_text(TEXT * 9)
    packed = folder / "a.jsonl.gz"
    for path in (packed, tmp_path / "a.jsonl", tmp_path / "text"):
        path.write_bytes(pack(json.dumps({"text": TEXT * 99}).encode()))
    for words, says in (
        (("--data", packed), f"{packed} is compressed by {program}; fix: unpack it"),
        (("--data", tmp_path / "a.jsonl"), f"a.jsonl is compressed by {program}; fix: unpack it"),
        (("--data", folder), f"{packed} is compressed, and would be left out; fix: unpack it, or name the files"),
        ((tmp_path / "text",), f"text is compressed by {program}, and its bytes are no text; fix: unpack it"),
    ):
        result = train(*words, "--output", tmp_path / "out")
        assert result.exit_code == 2 and says in result.stderr, result.output


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.bin", b"\x7fELF\n\x02\x01" + bytes(range(256)), "byte 0x80 at offset 135; fix: leave the file out"),
        ("a.txt", (TEXT * 9 + "\nna\u00efve").encode("latin-1"), "at offset 750; fix: leave the file out; where it is "
         "text, `iconv -f LATIN1 -t UTF-8`"),
        ("a.txt", (TEXT * 9).encode("utf-16"), "byte 0xff at offset 0; fix: leave the file out; where it is text, "
         "`iconv -f UTF-16 -t UTF-8`"),
        ("a.txt", ("na\u00efve " * 99).encode()[:-4], "byte 0xc3 at offset 688;"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "na\xefve"}\n', "byte 0xef at offset 28;"),
    ],
    ids=["binary", "latin-1", "utf-16", "cut", "records"],
)  # fmt: skip
def test_what_is_no_utf_8_is_not_learned(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    for at in (path, tmp_path) if path.suffix != ".bin" else (path,):
        result = train("--data", at, "--output", tmp_path / "out")
        said = " ".join(result.stderr.split())
        assert result.exit_code == 2 and f"Invalid value for --data: {path} is no text in UTF-8: " in said, said
        assert says in said


def test_a_mark_before_a_text_is_none_of_it(tmp_path):
    for name, text in (("a.txt", "na\u00efve\0"), ("a.jsonl", '{"text": "na\u00efve\\u0000"}')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert [*documents(tmp_path / name, "text")] == ["na\u00efve\0"]


def test_a_tokenizer_that_is_none(tmp_path):
    """The message names --tokenizer, and has the first sentence of what transformers says."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.Qwen2Config(vocab_size=256, num_key_value_heads=2, **sizes).save_pretrained(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT * 20)
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.json").write_text('{"a": 1}')
    words = ("--model", tmp_path / "config.json", "--data", tmp_path / "a.txt", "--output", tmp_path / "out")
    reads = "is no tokenizer that transformers reads: "
    for name, says in (
        ("none", "is not there; fix: the folder that a tokenizer's save_pretrained wrote, or its tokenizer.json"),
        ("bad.json", reads + "expected"),
        ("folder", reads + "Couldn't instantiate the backend tokenizer; fix: the folder"),
    ):
        for more in ((), ("--sample", 4)):
            result = train(*words, "--tokenizer", tmp_path / name, *more)
            assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.stderr
            assert f"Invalid value for --tokenizer: {tmp_path / name} {says}" in result.stderr, result.stderr


def test_a_field_of_files_that_have_none(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    for at in (tmp_path, tmp_path / "a.txt"):
        result = train("--data", at, "--field", "body", "--output", tmp_path / "out")
        says = "Invalid value for --field: it has no effect on --data of plain text, which has no fields"
        assert result.exit_code == 2 and says in result.stderr, result.stderr
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": TEXT}))
    result = train("--data", tmp_path, "--field", "body", "--context", 999, "--output", tmp_path / "out")
    assert result.exit_code == 2 and f"{2 * len(TEXT) + 4} tokens; sequences of 999" in result.stderr, result.stderr


def test_a_run_keeps_its_data(tmp_path):
    """The message names the option that differs, not --output, which is as it was."""
    (tmp_path / "a.txt").write_text(TEXT * 20)
    (tmp_path / "b.txt").write_text(TEXT[1:] * 20)
    words = ("--output", tmp_path / "out", "--steps")
    assert train(*words, 1, "--data", tmp_path / "a.txt").exit_code == 0
    for changed, option in (
        (("--data", tmp_path / "b.txt"), "--data"),
        (("--data", tmp_path / "a.txt", "--context", 8), "--context"),
        (("--data", tmp_path / "b.txt", "--context", 8), "--context and --data"),
        ((), "--data"),
    ):
        result = train(*words, 2, *changed)
        assert result.exit_code == 2 and f"Invalid value for {option}: " in result.stderr, result.stderr
        assert f"fix: the {option} that the run in this folder began with, or another --output" in result.stderr


def test_chunks_reach_a_model_of_transformers(tmp_path, monkeypatch):
    transformers, given = pytest.importorskip("transformers"), {}
    mesh = SimpleNamespace(device_type="cpu", rank=0, grid=Grid(x=1))
    monkeypatch.setattr("ndtp.cli.training.ProcessGrid", lambda *_, **__: mesh)
    monkeypatch.setattr("ndtp.cli.training.parallelize", lambda model, _, **options: given.update(options) or model)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaConfig(vocab_size=256, **sizes).save_pretrained(tmp_path)
    Model(job(tmp_path, config=tmp_path / "config.json", grid={"x": 1}, chunks=3))
    assert given == {"scheme": "3d", "chunks": 3}


def test_tables_of_datasets(tmp_path, monkeypatch):
    """A folder of `save_to_disk` with splits: that of training, without what is cached beside."""
    folder = tmp_path / "train"
    folder.mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (folder / "state.json").write_text("{}")
    for name in ("data-00000-of-00001.arrow", "cache-1.arrow"):
        (folder / name).write_bytes(b"none")
    (table,) = files_of([tmp_path])
    assert table.name == "data-00000-of-00001.arrow"
    if find_spec("pyarrow") is None:
        with pytest.raises(DataError, match=r"pip install 'ndtp\[data\]'"):
            list(documents(table, "text"))
        return
    import pyarrow
    import pyarrow.parquet

    records = pyarrow.table({"text": ["one", "two"]})
    with pyarrow.ipc.new_stream(str(table), records.schema) as writer:
        writer.write_table(records)
    pyarrow.parquet.write_table(records, tmp_path / "a.parquet")
    assert [*documents(table, "text")] == [*documents(tmp_path / "a.parquet", "text")] == ["one", "two"]


def test_sequences_come_once_before_any_comes_again(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(401, dtype=np.uint32))  # 50 sequences of 8, and their targets
    packed = PackedBatches(job(tmp_path, tokens=tmp_path / "tokens.npy", batch=6))
    assert (packed.num_sequences, packed.num_held_out) == (48, 2)
    first = [packed.at(step) for step in range(8)]
    starts = sorted(int(row[0]) for batch in first for row in batch)
    assert starts == list(range(0, 48 * 8, 8)), "an epoch is every sequence once"
    assert all((row[1:] == row[:-1] + 1).all() for row in first[0]) and first[0].shape == (6, 9)
    assert sorted(int(row[0]) for row in packed.at(8)) != sorted(int(row[0]) for row in first[0])
    assert {int(row[0]) // 8 for row in packed.held_out(0)} == {48, 49}
    # Goes on behind 18 sequences with another batch.
    other = PackedBatches(job(tmp_path, tokens=tmp_path / "tokens.npy", batch=2))
    other.resume({"step": 3, **packed.state(3)})
    rows = [row.tolist() for step in range(3, 6) for row in other.at(step)]
    assert rows == first[3].tolist() and other.state(6) == packed.state(4)
    np.save(tmp_path / "others.npy", np.arange(1, 402, dtype=np.uint32))
    saved = json.loads(json.dumps({"step": 3, **packed.state(3)}))
    for changed, words in (
        ({"seed": 7}, "seed 0, now 7"),
        ({"context": 4}, "context 8, now 4"),
        ({"tokens": tmp_path / "others.npy"}, "hash of the tokens .*, now"),
    ):
        another = PackedBatches(job(tmp_path, **{"tokens": tmp_path / "tokens.npy", **changed}))
        with pytest.raises(CheckpointError, match=f"drawn its sequences by {words}"):
            another.resume(saved)
    other.resume({"step": 3, "sequences": 18})  # of a version that did not keep it


def test_a_run_with_a_tokenizer_goes_on_on_another_grid(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<end>", "<unknown>", *sorted(set(TEXT.split()))]
    words_at = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(words_at, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.Qwen2Config(vocab_size=len(words), num_key_value_heads=2, **sizes).save_pretrained(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"body": TEXT * 8}) for _ in range(8)))
    options = (
        "--data", tmp_path / "data.jsonl", "--field", "body", "--tokenizer", tmp_path / "tokenizer.json",
        "--model", tmp_path / "config.json", "--sample", 5, "--prompt", "the quick", "--json", "-",
    )  # fmt: skip
    for folder, runs in (("dense", ((4,),)), ("moved", ((2, "--grid", "x=2"), (4,)))):
        for steps, *grid in runs:
            result = train(*options, "--steps", steps, *grid, "--output", tmp_path / folder)
            assert result.exit_code == 0, result.output
            report = json.loads(result.stdout)
            assert 0 < report["held_out_loss"] < 10
            made = report["sample"].split()
            assert made[:2] == ["the", "quick"] and len(made) == 7 and set(made) <= set(words)
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "dense"), rel=1e-5)
    served = {}
    for name, dtype in (("dense", "same"), ("moved", "bf16")):
        words = ["export", tmp_path / name, "--output", tmp_path / "served" / name, "--dtype", dtype, "--json", "-"]
        with pytest.warns(UserWarning, match="AutoTokenizer takes a Qwen2Tokenizer"):
            result = CliRunner().invoke(app, [*map(str, words)])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["class"] == "Qwen2ForCausalLM"
        served[name] = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "served" / name).state_dict()
    assert {x.dtype for x in served["moved"].values()} == {torch.bfloat16}
    for key, value in served["dense"].items():
        torch.testing.assert_close(served["moved"][key].double(), value, rtol=0.01, atol=1e-4)
    text = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "served" / "moved")
    assert text("the quick").input_ids == [words_at["the"], words_at["quick"]]
    for wrong, message in (
        ((tmp_path / "none",), "there is no such folder"),
        ((tmp_path / "served" / "moved",), "checkpoint.json: cannot be read"),
        ((tmp_path / "moved", "--model", tmp_path / "none.json"), "is no file"),
    ):
        result = CliRunner().invoke(app, ["export", *map(str, wrong), "--output", str(tmp_path / "other")])
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output
    for wrong, message in (
        (("--data", tmp_path / "data.jsonl"), "no text in 'text'"),
        (("--tokenizer", tmp_path), "it is for --data"),
        ((tmp_path / "data.jsonl", "--data", tmp_path), "give one of them"),
        ((*options[:6], "--output", tmp_path / "o"), "the byte-level model has bytes"),
        (("--sample", 1, "--stages", 2, "--layers", 2), "--stages 1"),
    ):
        result = train(*wrong)
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output


def test_a_byte_model_makes_text_on_a_grid(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 20)
    made = set()
    for grid in ((), ("--grid", "dp=2")):
        words = ("--data", tmp_path / "text.txt", "--steps", 1, "--sample", 3, "--prompt", "the", "--json", "-")
        result = train(*words, *grid, "--output", tmp_path / f"out{len(grid)}")
        assert result.exit_code == 0, result.output
        made.add(json.loads(result.stdout)["sample"])
    assert len(made) == 1 and made.pop().startswith("the")


def test_the_live_table_shows_the_last_steps(tmp_path):
    assert live_table(tmp_path / LOG) == ""
    rows = [f"{step},2.5,1,0.1,100,,0.25,300,x=2" for step in range(1, 500)]
    (tmp_path / LOG).write_text("\n".join([",".join(COLUMNS), *rows]) + "\n500,2.")
    table = live_table(tmp_path / LOG)
    assert [column.header for column in table.columns] == ["step", "loss", "norm", "tokens/s", "exposed", "MiB"]
    assert [*table.columns[0].cells] == ["495", "496", "497", "498", "499"]
    assert set(table.columns[4].cells) == {"25.0%"}

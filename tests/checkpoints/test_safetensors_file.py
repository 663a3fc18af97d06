"""Files with checksums: every byte of one, any order of writing, and nothing that a file claims is taken on trust."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from ndtp.checkpoints import safetensors_file
from ndtp.checkpoints.safetensors_file import Writer, header_of, tensors_in
from ndtp.errors import CheckpointError

TENSORS = {
    "flags": torch.tensor([True, False, True]), "rows": torch.arange(40.0).view(10, 4), "one": torch.tensor(7.0),
    "none": torch.empty(0, 3), "narrow": torch.arange(5, dtype=torch.bfloat16),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 48)  # three rows of four numbers


def written(path, tensors=TENSORS, step=10):
    writer = Writer(path, {key: (x.dtype, x.shape) for key, x in tensors.items()})
    for key, x in tensors.items():
        for row in reversed(range(0, len(x), step)) if x.dim() else (0,):
            writer.write(key, row, x[row : row + step] if x.dim() else x)
    return writer.close(complete=True)


def read(stored, part=None):
    part = tuple(slice(0, size) for size in stored.shape) if part is None else part
    into = torch.empty([each.stop - each.start for each in part], dtype=stored.dtype)
    stored.read(part, into)
    return into


@pytest.mark.cpu
@pytest.mark.parametrize("step", [10, 3, 4, 1])
def test_any_order_of_rows(tmp_path, step):
    """Blocks that come in parts are read back for their checksums."""
    path = tmp_path / "model.safetensors"
    size, header = written(path, step=step)
    found = tensors_in(tmp_path)
    assert (size, header) == header_of(path)[1:] == (path.stat().st_size, header)
    assert len(found["rows"].sums) == 4 and found["rows"].step == 3
    theirs = load_file(path)
    for key, x in TENSORS.items():
        assert torch.equal(read(found[key]), x) and torch.equal(theirs[key], x), key
    part = (slice(4, 8), slice(1, 3))
    assert torch.equal(read(found["rows"], part), TENSORS["rows"][part])
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


def test_every_byte(tmp_path):
    """Flipped, one after the other: refused, with the name of the file and, of a tensor's, with its key."""
    path = tmp_path / "model.safetensors"
    written(path)
    good, checksum = path.read_bytes(), header_of(path)[2]
    first = 8 + int.from_bytes(good[:8], "little")
    for at in range(len(good)):
        data = bytearray(good)
        data[at] ^= 1 << (at % 8)
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
            found, _, header = header_of(path)
            if header != checksum:
                raise CheckpointError("model.safetensors: what the manifest of a checkpoint compares")
            for stored in found.values():
                read(stored)
        if at >= first:
            assert any(f"'{key}': rows" in str(caught.value) for key in TENSORS), str(caught.value)


def put(path, header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def entry(**changes):
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


FOREIGN = {
    "negative sizes": (entry(shape=[-2, -1]), r"sizes of 'x' are \[-2, -1\]"),
    "sizes that are none": (entry(shape=[2.0]), "sizes of 'x'"),
    "sizes that are true": (entry(shape=[True, 2]), "sizes of 'x'"),
    "more than there is": (entry(shape=[2**60], data_offsets=[0, 2**62]), "cut short: 'x'"),
    "numbers beyond any": (entry(shape=[10**300]), "lies at"),
    "too many dims": (entry(shape=[1] * 65), "has 65 dims"),
    "a dtype": (entry(dtype="F3"), "dtype F3"),
    "no dtype": (entry(dtype=["F32"]), "header is none"),
    "no entry": ({"x": 7}, "header is none"),
    "no object": (b"[1]", "JSON of list"),
    "depth": (b'{"x":' * 100_000, "nested too deep"),
    "many values": (b"[" + b"[]," * 3_000_000 + b"0]", "more than 4,000,000 values"),
    "digits": (b'{"x": ' + b"9" * 5000 + b"}", "no JSON"),
    "no text": (b"\xff\xfe{}", "no JSON"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_headers(tmp_path, what):
    header, message = FOREIGN[what]
    put(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=message):
        tensors_in(tmp_path)


def test_a_header_that_claims_to_be_huge(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)  # takes no room on the disk
    with pytest.raises(CheckpointError, match="a header of 1099511627776"):
        tensors_in(tmp_path)


def test_an_index_names_files_of_its_folder(tmp_path):
    put(tmp_path / "x.safetensors", entry(), bytes(8))
    (tmp_path / "in").mkdir()
    index = tmp_path / "in" / "model.safetensors.index.json"
    for name in ("../x.safetensors", str(tmp_path / "x.safetensors"), "", 7, "x\0y", None):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            tensors_in(tmp_path / "in")
    (tmp_path / "in" / "part").mkdir()
    os.link(tmp_path / "x.safetensors", tmp_path / "in" / "part" / "x.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "part/x.safetensors"}}))
    assert tensors_in(tmp_path / "in")["x"].shape == (2,)
    too_long = json.dumps({"weight_map": {"x": "é" * 200 + ".safetensors"}})  # for a file's name
    for text in ('{"weight_map": 3}', "[]", '{"weight_map": {"x": "nowhere.safetensors"}}', too_long):
        index.write_text(text)
        with pytest.raises(CheckpointError):
            tensors_in(tmp_path / "in")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is no regular file"):
        tensors_in(tmp_path)

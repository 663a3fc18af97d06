"""Folders of DCP, which ndtp wrote before: read as they were, and pickles that want more are refused unexecuted."""

import json
import os
import pickle
import struct

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ndtp.checkpoint import load
from torch import nn

from ndtp.checkpoints import old_folders
from ndtp.checkpoints.folder import OLD_RUN
from ndtp.checkpoints.old_folders import METADATA, unpickled
from ndtp.errors import CheckpointError


def old_folder(folder):
    """As format 1 had it: the model's tensors, the optimizer's, and what is no tensor in JSON."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors = {f"model.{key}": x for key, x in model.state_dict().items()}
    for key, parameter in model.named_parameters():
        tensors |= {f"optimizer.state.{key}.{name}": x for name, x in optimizer.state[parameter].items()}
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    groups = [{"params": ["weight", "bias"], "lr": 0.5}]
    run = {"format": 1, "groups": groups, "values": {}, "extra": {"step": 7}}
    (folder / OLD_RUN).write_text(json.dumps(run))
    return model, optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_an_earlier_version_wrote(tmp_path):
    model, optimizer = old_folder(tmp_path / "run")
    again = nn.Linear(3, 2)
    other = torch.optim.AdamW(again.parameters(), lr=0.1)
    assert load(again, other, tmp_path / "run") == {"step": 7}
    assert other.param_groups[0]["lr"] == 0.5
    for (key, mine), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), key
        for name, x in optimizer.state[theirs].items():
            assert torch.equal(other.state[mine][name].to(x.device), x), (key, name)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


class Patches:
    """Gives a class of torch another method."""

    def __reduce__(self):
        return setattr, (dcp.metadata.Metadata, "__eq__", len)


def huge_memo():
    return pickle.PROTO + b"\x02" + pickle.EMPTY_LIST + pickle.LONG_BINPUT + struct.pack("<I", 2**32 - 1) + b"."


def claims_more():
    return pickle.PROTO + b"\x04" + pickle.BINUNICODE8 + struct.pack("<Q", 2**62) + b"."


def deep():
    return pickle.PROTO + b"\x02" + b"]" * 20_000 + b"a" * 19_999 + b"."


def of_torch(name):
    return b"\x80\x02c" + f"torch.distributed.checkpoint.metadata\n{name}\n".encode()


PICKLES = {
    "a program": (pickle.dumps(Runs()), "mkdir, which no checkpoint needs"),
    "a change of a class": (pickle.dumps(Patches()), "setattr, which no checkpoint needs"),
    "a function of torch": (b"\x80\x02ctorch.serialization\nload\n.", "torch.serialization.load, which no checkpoint"),
    "a dotted name": (b"\x80\x04\x8c\x05torch\x8c\x0dserialization\x93.", "torch.serialization, which"),
    "state of a class": (of_torch("Metadata") + b"}X\x01\x00\x00\x00a]sb.", "no metadata of a checkpoint"),
    "a registered extension": (b"\x80\x02\x82\x01.", "EXT1, which no checkpoint needs"),
    "memory for a memo": (huge_memo(), "keeps number 4294967295"),
    "memory for a text": (claims_more(), "no metadata of a checkpoint"),
    "depth": (deep(), "no metadata of a checkpoint"),
    "no pickle": (b"not a pickle", "no metadata of a checkpoint"),
    "nothing": (b"", "no metadata of a checkpoint"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("what", PICKLES)
def test_a_hostile_pickle_is_not_executed(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    data, message = PICKLES[what]
    old_folder(tmp_path / "run")
    (tmp_path / "run" / METADATA).write_bytes(data)
    equal = dcp.metadata.Metadata.__eq__
    with pytest.raises(CheckpointError, match=message):
        load(nn.Linear(3, 2), None, tmp_path / "run")
    assert not (tmp_path / "ran").exists() and dcp.metadata.Metadata.__eq__ is equal


def test_long_pickles_are_refused(monkeypatch):
    monkeypatch.setattr(old_folders, "MOST_OPERATIONS", 100)
    with pytest.raises(pickle.UnpicklingError, match="operation 101"):
        unpickled(b"\x80\x02" + b"N0" * 50 + b"N.")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_that_lie(tmp_path):
    """Other names of files and sizes of tensors than there are."""
    old_folder(tmp_path / "run")
    good = (tmp_path / "run" / METADATA).read_bytes()
    for old, new, message in (
        (b"__0_0.distcp", b"../_0.distcp", "leads out of the folder"),
        (b"__0_0.distcp", b"__0_1.distcp", "cut short"),
        (b"float32", b"float64", "larger than its|another tensor"),
        (b"model.weight", b"model.waight", "is not in it"),
    ):
        assert old in good
        (tmp_path / "run" / METADATA).write_bytes(good.replace(old, new))
        with pytest.raises(CheckpointError, match=message):
            load(nn.Linear(3, 2), None, tmp_path / "run")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_byte_of_the_metadata(tmp_path):
    """A flip that gives a pickle all the same names other tensors, or files, or is no matter: nothing but the error."""
    old_folder(tmp_path / "run")
    good = (tmp_path / "run" / METADATA).read_bytes()
    refused = 0
    for at in range(0, len(good), 19):
        data = bytearray(good)
        data[at] ^= 1 << (at % 8)
        (tmp_path / "run" / METADATA).write_bytes(data)
        try:
            load(nn.Linear(3, 2), None, tmp_path / "run")
        except CheckpointError:
            refused += 1
    assert refused


class ByName:
    """A member of an enumeration as Python 3.11.0 to 3.11.3 pickles it, or what poses as one."""

    def __init__(self, *of):
        self.of = of

    def __reduce__(self):
        return getattr, self.of


def test_members_of_enumerations_are_not_looked_up():
    encoding = dcp.metadata._MEM_FORMAT_ENCODING
    found = old_folders.unpickled(pickle.dumps(ByName(encoding, "TORCH_CONTIGUOUS_FORMAT")))
    assert isinstance(found, old_folders.Record) and found.args == ("TORCH_CONTIGUOUS_FORMAT",)
    hostile = old_folders.unpickled(pickle.dumps(ByName(dcp.metadata.Metadata, "__init__")))
    assert isinstance(hostile, old_folders.Record)

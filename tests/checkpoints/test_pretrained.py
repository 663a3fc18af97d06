"""The folder that other programs load: its files, keys and bits, of models on a grid and on none."""

import json

import pytest
import torch
from products import mesh_of

import ndtp
from ndtp import Grid
from ndtp.checkpoints import pretrained
from ndtp.checkpoints.pretrained import _groups
from ndtp.errors import CheckpointError, CommunicationError

pytest.importorskip("transformers")
from architectures import build
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

# All experts in one tensor; fused projections; Conv1D and a tied head of an odd vocabulary.
NAMES = ("MixtralForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel")
FILE_BYTES = 40_000


def contents(folder):
    return {key: x for path in folder.glob("*.safetensors") for key, x in load_file(path).items()}


def tokenizer_of(folder):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<end>": 0, "one": 1}, unk_token="<end>")).save(str(folder / "tokenizer.json"))
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def check_saved(folder):
    mesh = mesh_of(Grid(x=2))
    for name in NAMES:
        model = ndtp.parallelize(build(name), mesh, scheme="1d-sp")
        ndtp.save_pretrained(model, folder / name, tokenizer_of(folder) if mesh.rank == 0 else 1, file_bytes=FILE_BYTES)
    ndtp.save_pretrained(model, folder / NAMES[-1], dtype=torch.bfloat16)  # in one file, over those of before
    check_failures(model, folder / NAMES[-1], mesh.rank)
    with torch.device("meta"):
        model = ndtp.parallelize(build(name), mesh, scheme="1d-sp")
    with pytest.raises(CheckpointError, match="on the meta device"):
        ndtp.save_pretrained(model, folder / "meta")


def check_failures(model, folder, rank):
    """Errors of rank 0 alone, of any class: both ranks get one, and at once."""

    def refuse(*_):
        raise TypeError("what is this?")

    for name in ("convert", "configs"):
        with pytest.MonkeyPatch.context() as patched, pytest.raises(CommunicationError) as caught:
            if name == "configs":
                patched.setattr(model.generation_config, "temperature", 0.6)  # which transformers refuses to save
            elif rank == 0:
                patched.setattr(pretrained, "_published", lambda _: refuse)
            ndtp.save_pretrained(model, folder)
        assert f"{folder} stays as it was; rank 0: " in str(caught.value)
        assert ("TypeError: what is this?" if name == "convert" else "temperature") in str(caught.value)


def test_other_programs_load_what_a_grid_has(ranks, tmp_path):
    ranks(2).run(check_saved, tmp_path)
    for name in NAMES:
        dense, dtype = build(name), torch.bfloat16 if name == NAMES[-1] else torch.float64
        dense.save_pretrained(tmp_path / "theirs" / name)  # transformers' own, of the dense model
        theirs, ours = contents(tmp_path / "theirs" / name), contents(tmp_path / name)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(x.to(dtype), ours[key]) and ours[key].dtype == dtype for key, x in theirs.items())
        files = sorted(tmp_path.joinpath(name).glob("*.safetensors"))
        if dtype is torch.float64:
            index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
            assert len(files) > 2 and set(index["weight_map"].values()) == {path.name for path in files}
            assert max(path.stat().st_size for path in files) < 3 * FILE_BYTES  # a layer is larger
        else:
            assert [path.name for path in files] == ["model.safetensors"]
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert again.dtype == dtype and type(again).__name__ == name == again.config.architectures[0]
        for (key, mine), value in zip(again.state_dict().items(), dense.state_dict().values(), strict=True):
            assert torch.equal(mine, value.to(mine.dtype)), f"{name}: {key}"
        assert AutoTokenizer.from_pretrained(tmp_path / name).convert_tokens_to_ids("one") == 1
        assert (tmp_path / name / "generation_config.json").exists()


def test_layers_go_one_by_one_where_a_conversion_does_not_mix_them():
    model = build("MixtralForCausalLM")
    from ndtp.checkpoints.pieces import whole_of
    from ndtp.checkpoints.pretrained import _named, _published

    (piece,) = (whole := whole_of(model)).pieces
    named = _named(model, piece.entries())
    assert len(_groups(named, _published(model), whole.crew)) == 3  # two layers, and what is in none
    at_once = lambda state: {"all": sum(x.sum() for x in state.values())} if len(state) > 20 else state  # noqa: E731
    assert len(_groups(named, at_once, whole.crew)) == 1

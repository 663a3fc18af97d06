"""Safetensors files in and out of stock models on a grid, made on the meta device or not."""

import gc
import json
import weakref
from unittest import mock

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ndtp
from ndtp import Grid
from ndtp.errors import CheckpointError

pytest.importorskip("transformers")
import transformers
import transformers.modeling_layers
import transformers.modeling_utils  # so that ranks are forked with it
from architectures import build, inputs

# An odd vocabulary and separate layers, tied and odd, Conv1D and tied, fused projections.
ONE_LAYER = {"num_hidden_layers": 1, "n_layer": 1}
NAMES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM")


def on_meta(name, **changes):
    with torch.device("meta"):
        return build(name, **changes)


def check_round_trip(folder, sizes, scheme):
    mesh = mesh_of(Grid(sizes))
    for name in NAMES:
        dense = build(name, **ONE_LAYER)
        with torch.device("meta"):  # what `parallelize` tries a module with has values all the same
            model = ndtp.parallelize(build(name, **ONE_LAYER), mesh, scheme=scheme)
        assert all(p.is_meta for p in model.parameters()), name
        ndtp.checkpoint.load_safetensors(model, folder / name)
        assert not any(x.is_meta for x in [*model.parameters(), *model.buffers()]), name
        given = inputs(name)
        torch.testing.assert_close(model(**given).loss, dense(**given).loss, rtol=2e-6, atol=0.0, msg=name)
        model.ndtp_report.count(model, *model.ndtp_report.linears)
        ndtp.checkpoint.export_safetensors(model, folder / f"{name} again", file_bytes=30_000, block_bytes=4000)
        assert model(**given).loss.backward() is None


def test_round_trip(ranks, tmp_path):
    """From `save_pretrained` into a model on meta, and out of it into `from_pretrained`: the same bits."""
    for name in NAMES:
        build(name, **ONE_LAYER).save_pretrained(
            tmp_path / name, max_shard_size="20KB" if name.startswith("Llama") else "5GB"
        )
    assert len(list((tmp_path / NAMES[0]).glob("*.safetensors"))) > 1
    ranks(4).run(check_round_trip, tmp_path, {"x": 2, "y": 2}, "2d")
    for name in NAMES:
        again = getattr(transformers, name).from_pretrained(tmp_path / f"{name} again", dtype=torch.float64)
        dense = build(name, **ONE_LAYER).state_dict()
        found = again.state_dict()
        assert list(found) == list(dense)
        assert all(torch.equal(found[key], dense[key]) for key in dense), name


class Live(TorchDispatchMode):
    """The most bytes of tensors that are alive at a time; of those that operations inside have given.

    Views of `known` tensors are none.
    """

    def __init__(self, known=()):
        super().__init__()
        self.alive, self.peak = {}, 0
        self.known = {x.untyped_storage().data_ptr() for x in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not hasattr(x, "_local_tensor") and not x.is_meta:
                storage = x.untyped_storage()
                if storage.data_ptr() in self.known:
                    continue
                self.alive.setdefault(storage.data_ptr(), (storage.nbytes(), []))[1].append(weakref.ref(x))
        self.alive = {at: held for at, held in self.alive.items() if any(each() is not None for each in held[1])}
        self.peak = max(self.peak, sum(size for size, _ in self.alive.values()))
        return result


BLOCK = 4096
LARGE = {"vocab_size": 1024, "tie_word_embeddings": True}  # one table is two thirds of the model


def check_peak(folder):
    mesh = mesh_of(Grid(x=2))
    with Live() as live:
        model = ndtp.parallelize(on_meta("LlamaForCausalLM", **LARGE), mesh, scheme="1d-sp")
        made = live.peak
        gc.collect()  # what the trial of attention drew
        ndtp.checkpoint.load_safetensors(model, folder, block_bytes=BLOCK)
    own = sum(p._local_tensor.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    table = model.lm_head.weight.numel() * 8
    # The trial of attention runs a few tokens; no parameter is whole.
    assert made < 30_000, f"parallelize took {made} bytes of a model on meta"
    # Beside its own part a block, its views, and small ones of the rotary embedding.
    assert own < live.peak <= own + BLOCK + 2_000 < own + table / 2, (live.peak, own, table)
    with Live([*(p._local_tensor for p in model.parameters()), *model.buffers()]) as live:
        ndtp.checkpoint.export_safetensors(model, folder / "out", block_bytes=BLOCK)
    assert live.peak <= 4 * BLOCK, live.peak


def test_no_rank_has_a_whole_tensor(ranks, tmp_path):
    build("LlamaForCausalLM", **LARGE).save_pretrained(tmp_path)
    ranks(2).run(check_peak, tmp_path)


def spoilt(folder):
    """Files that are no good, and the words for each."""
    good = (folder / "good" / "model.safetensors").read_bytes()
    length = int.from_bytes(good[:8], "little")
    header, body = json.loads(good[8 : 8 + length]), good[8 + length :]

    def put(name, header=header, body=body):
        (folder / name).mkdir()
        text = json.dumps(header).encode()
        (folder / name / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)

    up, norm = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    last = max((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"][1])
    put("cut", body=body[:-8])
    put("missing", {key: value for key, value in header.items() if key != norm})
    put("foreign", {**header, "model.layers.2.mlp.up_proj.weight": header[up]})
    put("shape", {**header, up: {**header[up], "shape": header[up]["shape"][::-1]}})
    put("integers", {**header, up: {**header[up], "dtype": "I64"}})
    put("offsets", {**header, up: {**header[up], "data_offsets": [0, 8]}})
    (folder / "text").mkdir()
    (folder / "text" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (folder / "short").mkdir()
    (folder / "short" / "model.safetensors").write_bytes(good[:100])
    (folder / "empty").mkdir()
    (folder / "index").mkdir()
    index = {"weight_map": {norm: "model-00001-of-00002.safetensors"}}
    (folder / "index" / "model.safetensors.index.json").write_text(json.dumps(index))
    return {
        "cut": f"cut short: '{last}'", "missing": f"'{norm}', a key of the model, is not in it",
        "foreign": "'model.layers.2.mlp.up_proj.weight' .* is no key of the model", "shape": f"'{up}' is",
        "integers": f"'{up}' is .* I64", "offsets": "header is none", "text": "no safetensors file",
        "short": "cut short",
        "empty": "no safetensors file in it", "index": f"'{norm}' is in .*, which is not there",
        "nowhere": "no such file",
    }  # fmt: skip


def check_spoilt(folder, words):
    mesh = mesh_of(Grid(x=2))
    model = ndtp.parallelize(build("LlamaForCausalLM"), mesh, scheme="1d")
    before = [p.detach()._local_tensor.clone() for p in model.parameters()]
    messages = []
    for name, word in words.items():
        with pytest.raises(CheckpointError, match=word) as caught:
            ndtp.checkpoint.load_safetensors(model, folder / name)
        messages.append(str(caught.value))
    with pytest.raises(CheckpointError, match=r"ranks find different files: rank 0: .*; rank 1: .*cut short"):
        ndtp.checkpoint.load_safetensors(model, folder / ("cut" if mesh.rank else "good"))
    assert all(torch.equal(p._local_tensor, b) for p, b in zip(model.parameters(), before, strict=True))
    ndtp.checkpoint.load_safetensors(model, folder / "missing", strict=False)
    return messages


def test_files_that_are_no_good_change_nothing(ranks, tmp_path):
    build("LlamaForCausalLM").save_pretrained(tmp_path / "good")
    messages = ranks(2).run(check_spoilt, tmp_path, spoilt(tmp_path))
    assert messages[0] == messages[1]


def check_first_values(sizes, scheme):
    """Drawn by the element: the same model on every grid."""
    mesh = mesh_of(Grid(sizes))
    found = {}
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel"):
        model = ndtp.parallelize(on_meta(name, **ONE_LAYER), mesh, scheme=scheme)
        with mock.patch.object(torch, "manual_seed", side_effect=AssertionError("seeds all devices")):
            ndtp.checkpoint.initialize(model, seed=5)
        for key, value in model.state_dict().items():
            found[name, key] = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.isfinite(model(**inputs(name)).loss)
    table = found["LlamaForCausalLM", "model.embed_tokens.weight"]
    assert abs(table.std().item() / 0.02 - 1) < 0.1 and not table[67:].any() and not table[0].any()
    return {
        key: value[tuple(slice(0, 67 if size == 68 else size) for size in value.shape)] for key, value in found.items()
    }


def test_first_values(ranks):
    one, two = (
        ranks(2).run(check_first_values, {"x": 2}, "1d")[0],
        ranks(4).run(check_first_values, {"x": 2, "y": 2}, "2d")[0],
    )
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=0.0, atol=0.0, msg=str(key))


def check_own_modules(folder):
    """Blocks of `ndtp.nn`, padded, gated ones in the dense form; and a model of which pairs alone are split."""
    mesh = mesh_of(Grid(x=2))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5), nn.LayerNorm(5))
    blocks = nn.ModuleDict({"block": ndtp.nn.GatedMLP(6, 9, mesh=mesh, scheme="1d", seed=1, pad=True), "rest": plain})
    ndtp.checkpoint.export_safetensors(blocks, folder)
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5), nn.LayerNorm(5))
    ndtp.parallelize(other, mesh, scheme="1d")
    with torch.device("meta"):
        block = ndtp.nn.GatedMLP(6, 9, mesh=mesh, scheme="1d", seed=2, pad=True)
    again = nn.ModuleDict({"block": block, "rest": other})
    ndtp.checkpoint.load_safetensors(again, folder)
    x, y = torch.randn(4, 6), torch.randn(4, 5)
    torch.testing.assert_close(again["block"](x), blocks["block"](x), rtol=0.0, atol=0.0)
    torch.testing.assert_close(again["rest"](y), blocks["rest"](y))


def test_own_modules(ranks, tmp_path):
    ranks(2).run(check_own_modules, tmp_path)
    from safetensors.torch import load_file

    found = load_file(tmp_path / "model.safetensors")
    assert {key: tuple(value.shape) for key, value in found.items() if "block" in key} == {
        "block.gate.weight": (9, 6), "block.up.weight": (9, 6), "block.down.weight": (6, 9),
    }  # fmt: skip

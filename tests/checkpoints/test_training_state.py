"""Checkpoints of training runs: from any grid to any other, optimizer included; and files that are no checkpoints.

`every_checkpoint.py` has all architectures on all kinds of grids.
"""

import json
import os
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ndtp.checkpoint import load, save, start_save
from products import mesh_of
from torch import nn
from turns import by_turns

import ndtp
from ndtp import Grid
from ndtp.checkpoints.folder import MANIFEST, manifest
from ndtp.checkpoints.optimizer_state import together
from ndtp.errors import CheckpointError, CommunicationError

transformers = pytest.importorskip("transformers")
from architectures import build as stock  # noqa: E402
from architectures import inputs  # noqa: E402

STEPS = 1  # the second one divides by what the first has left in the optimizer
# Padded vocabulary and separate projections; Conv1D and tied; fused projections; a bias with two names, padded.
NAMES = ("LlamaForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM", "BertForMaskedLM")
PADDED = ("LlamaForCausalLM", "BertForMaskedLM")


def build(name, **changes):
    return stock(name, **({"num_hidden_layers": 1, "n_layer": 1} | changes))


def adamw(model, **how):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, **how)  # with 1e-8 rounding of small gradients grows


def train(model, optimizer, name, steps=STEPS):
    given = inputs(name)
    for _ in range(steps):
        model(**given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def check_runs(folder, names, sizes, scheme, start):
    """Train and save, and train on beside what was saved; or go on from `start`, which another grid has written."""
    mesh, models, result = mesh_of(Grid(sizes)), {}, {}
    for name in names:
        model = models[name] = ndtp.parallelize(build(name), mesh, scheme=scheme)
        optimizer = adamw(model, fused=True)
        if start is None:
            train(model, optimizer, name)
            save(model, optimizer, folder / name, extra={"step": STEPS})
            train(model, optimizer, name)
            if name not in PADDED:  # what is lost or in another place would show where the run goes on elsewhere
                continue
            again = ndtp.parallelize(build(name), mesh, scheme=scheme)
            other = adamw(again, fused=True, betas=(0.1, 0.2))
            assert load(again, other, folder / name) == {"step": STEPS}
            assert other.param_groups[1]["betas"] == (0.9, 0.999)
            train(again, other, name)
            for (n, p), q in zip(again.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(p.to_local(), q.to_local()), f"{name}: {n} is not bit-equal on the same grid"
        else:
            load(model, optimizer, start / name)
            train(model, optimizer, name)
            save(model, optimizer, folder / name)
    for name, model in models.items():
        shapes = {n: tuple(slice(0, size) for size in p.shape) for n, p in build(name).named_parameters()}
        result[name] = {n: p.full_tensor().detach()[shapes[n]] for n, p in model.named_parameters()}
    return result


def test_a_run_goes_on_elsewhere(ranks, tmp_path):
    """2x2 -> z=2 -> dense, some steps each, against as many dense ones."""
    first, second, names = tmp_path / "first", tmp_path / "second", by_turns(NAMES, 2)
    at_once = ranks(4).run(check_runs, first, names, {"x": 2, "y": 2}, "2d", None)[0]
    moved = ranks(2).run(check_runs, second, names, {"z": 2}, "3d", first)[0]
    for name in names:
        dense, through = build(name), build(name)
        optimizer, other = adamw(dense), adamw(through)
        train(dense, optimizer, name, 2 * STEPS)
        for n, p in dense.named_parameters():
            for found in (at_once, moved):
                torch.testing.assert_close(found[name][n], p.detach().cpu(), rtol=1e-5, atol=1e-6, msg=f"{name}: {n}")
        load(through, other, second / name)
        train(dense, optimizer, name, 1)
        train(through, other, name, 1)
        for (n, p), q in zip(dense.named_parameters(), through.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6, msg=f"{name}: {n}")


def dense_run(folder, name="LlamaForCausalLM"):
    model = build(name)
    optimizer = adamw(model)
    train(model, optimizer, name, 1)
    save(model, optimizer, folder, extra={"step": 1})
    return model, optimizer


def test_torch_reads_it(tmp_path):
    """Files of tensors are such that torch's own reader puts them together, and safetensors' own library reads them."""
    model, _ = dense_run(tmp_path / "run")
    other = build("LlamaForCausalLM")
    state = {f"model.{key}": x for key, x in other.state_dict().items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "run")), no_dist=True)
    assert all(torch.equal(x, model.state_dict()[key]) for key, x in other.state_dict().items())


def flip(at):
    def flipped(folder):
        (file,) = folder.glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[int(at * len(data))] ^= 1
        file.write_bytes(data)

    return flipped


def say(**what):
    def said(folder):
        text = json.loads((folder / MANIFEST).read_text()) | what
        (folder / MANIFEST).write_bytes(manifest({key: x for key, x in text.items() if key != "crc32"}, text["files"]))

    return said


def break_json(folder):
    (folder / MANIFEST).write_text("{")


def nest(folder):
    (folder / MANIFEST).write_text('{"format": ' + "[" * 100_000)


def flip_manifest(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"lr": 0.01', '"lr": 0.02'))


def cut_short(folder):
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def put_a_pipe(folder):
    (file,) = folder.glob("*.safetensors")
    file.unlink()
    os.mkfifo(file)


def link_to_a_device(folder):
    (file,) = folder.glob("*.safetensors")
    file.unlink()
    file.symlink_to("/dev/zero")


def remove(folder):
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_json, "no JSON"),
        (nest, "nested too deep"),
        (say(format=99), "is of format 99, newer than 2"),
        (say(format="two"), "is not of format 2"),
        (flip_manifest, f"{MANIFEST}: is not what was written"),
        (say(values=[]), "no complete checkpoint"),
        (say(files=[["../model.safetensors", 1, 1]]), "leads out of the folder"),
        (say(files=7), "no complete checkpoint"),
        (cut_short, "rank-00000.safetensors: cut short"),
        (flip(0.01), "rank-00000.safetensors: its header is not the one that was written"),
        (flip(0.9), r"rank-00000.safetensors: '[a-z]\S+': rows \d+ to \d+ are not those that were written"),
        (put_a_pipe, "is no regular file"),
        (link_to_a_device, "is no regular file"),
        (remove, "there is no such folder"),
    ],
)
def test_damaged_files_change_nothing(tmp_path, damage, message):
    dense_run(tmp_path / "run")
    damage(tmp_path / "run")
    model = build("LlamaForCausalLM")
    optimizer = adamw(model)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load(model, optimizer, tmp_path / "run")
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert not optimizer.state


def test_other_models_are_named(tmp_path):
    dense_run(tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"'model.embed_tokens.weight' has the shape \(67, 32\), that of the model \(68"
    ):
        load(build("LlamaForCausalLM", vocab_size=68), None, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"'model.layers.1.\S+', a key of the model, is not in it"):
        load(build("LlamaForCausalLM", num_hidden_layers=2), None, tmp_path / "run")
    save(build("LlamaForCausalLM", num_hidden_layers=2), None, tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"'model.layers.1.\S+' is no key of the model, nor are 8 more"):
        load(build("LlamaForCausalLM"), None, tmp_path / "two")
    model = build("LlamaForCausalLM")
    with pytest.raises(CheckpointError, match="both of the optimizer's group 0, were saved in different groups"):
        load(model, torch.optim.AdamW(model.parameters()), tmp_path / "run")
    save(model, None, tmp_path / "bare")
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        load(model, adamw(model), tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"group 0 has a parameter .* that is none of the model's"):
        save(model, torch.optim.SGD(build("LlamaForCausalLM").parameters()), tmp_path / "no")
    with pytest.raises(CheckpointError, match="JSON lacks what extra has"):
        save(model, None, tmp_path / "no", extra={"x": torch.zeros(1)})
    lists = torch.optim.LBFGS(model.parameters(), max_iter=2)
    lists.step(lambda: model(**inputs("LlamaForCausalLM")).loss)
    lists.state[next(model.parameters())]["old_dirs"] = [torch.zeros(1)]
    with pytest.raises(CheckpointError, match=r"JSON lacks what the state of LBFGS has: .*\n.*optimizer=None"):
        save(model, lists, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_state_of_the_dtype_of_its_parameter_stays_one(tmp_path):
    """As torch's `load_state_dict` has it; a state of another dtype stays as it was saved."""
    wide, narrow = nn.Linear(3, 2).double(), nn.Linear(3, 2)
    optimizer, other = torch.optim.AdamW(wide.parameters()), torch.optim.AdamW(narrow.parameters())
    wide(torch.ones(1, 3).double()).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].to(torch.bfloat16)
    save(wide, optimizer, tmp_path / "run")
    load(narrow, other, tmp_path / "run")
    for state in other.state.values():
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(other.state[narrow.weight]["exp_avg"], optimizer.state[wide.weight]["exp_avg"].float())


def test_an_optimizer_of_another_kind_is_named(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step(), schedule.step()
    save(model, optimizer, tmp_path / "run")
    with pytest.raises(CheckpointError, match="with SGD, not with AdamW: settings of groups there alone: dampening"):
        load(model, torch.optim.AdamW(model.parameters()), tmp_path / "run")
    adam = torch.optim.Adam(model.parameters())
    adam.step()
    save(model, adam, tmp_path / "adam")
    with pytest.raises(CheckpointError, match=r"with Adam, not with Adamax: settings .* amsgrad.*; here alone: none"):
        load(model, torch.optim.Adamax(model.parameters()), tmp_path / "adam")
    decoupled = torch.optim.AdamW(model.parameters())  # which knows the same settings, and has one of its own
    load(model, decoupled, tmp_path / "adam")
    assert decoupled.param_groups[0]["decoupled_weight_decay"]
    load(model, type("Own", (torch.optim.Adam,), {})(model.parameters()), tmp_path / "adam")
    other = torch.optim.SGD(model.parameters(), lr=0.2)
    other.defaults["of a later version"] = other.param_groups[0]["of a later version"] = True
    load(model, other, tmp_path / "run")
    assert "momentum_buffer" in other.state[model.weight]


def test_groups_of_stages_are_those_of_the_whole_model():
    """By their settings: a stage may lack a group, or have another order of them."""
    decayed, others = {"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.0}
    first = [{"params": ["a.weight"], **decayed}, {"params": ["a.bias"], **others}]
    last = [{"params": ["b.bias", "a.bias"], **others}, {"params": [], **decayed}]
    groups, values = together([(first, {"a.bias": {"step": 1}}), (last, {"b.bias": {"step": 1}})])
    assert groups == [{"params": ["a.weight"], **decayed}, {"params": ["a.bias", "b.bias"], **others}]
    assert values == {"a.bias": {"step": 1}, "b.bias": {"step": 1}}


def test_an_interrupted_save_leaves_the_one_before(tmp_path, monkeypatch):
    model, optimizer = dense_run(tmp_path / "run")
    saved = {key: x.clone() for key, x in model.state_dict().items()}
    train(model, optimizer, "LlamaForCausalLM", 1)

    def fails(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ndtp.checkpoints.safetensors_file.os.pwrite", fails)
        with pytest.raises(CommunicationError, match=r"stays as it was.*no space left"):
            save(model, optimizer, tmp_path / "run")
    assert load(build("LlamaForCausalLM"), None, tmp_path / "run") == {"step": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["run"], "a full disk has room again"
    # Between the two renames:
    save(model, optimizer, tmp_path / "run", extra={"step": 2})
    (tmp_path / "run").rename(tmp_path / "run.before")
    again = build("LlamaForCausalLM")
    assert load(again, adamw(again), tmp_path / "run") == {"step": 2}
    assert not all(torch.equal(x, saved[key]) for key, x in again.state_dict().items())


def test_a_save_beside_training(tmp_path):
    """It has what there was when it began; until it is waited for, the one before is there."""
    model, optimizer = dense_run(tmp_path / "run")
    saved = {key: x.clone() for key, x in model.state_dict().items()}
    saving = start_save(model, optimizer, tmp_path / "run", extra={"step": 2})
    train(model, optimizer, "LlamaForCausalLM", 1)
    assert load(build("LlamaForCausalLM"), None, tmp_path / "run") == {"step": 1}
    saving.wait()
    assert saving.is_written
    again = build("LlamaForCausalLM")
    assert load(again, adamw(again), tmp_path / "run") == {"step": 2}
    assert all(torch.equal(x, saved[key]) for key, x in again.state_dict().items())
    saving = start_save(model, optimizer, tmp_path / "run")
    with pytest.raises(CommunicationError, match="another process saves there"):
        save(model, optimizer, tmp_path / "run")
    saving.wait()


def saved_otherwise(folder):
    """Rank 1 gives no optimizer, one that has made no step, or asks for chunks; then all give the same."""
    mesh, x = mesh_of(Grid(dp=2)), torch.ones(2, 4)
    torch.manual_seed(0)
    model = ndtp.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)), mesh, example=x)
    optimizer = torch.optim.Adam(model.parameters())
    save(model, optimizer, folder)
    model(x).sum().backward()
    optimizer.step()
    said = []
    for other, chunks in ((None, False), (torch.optim.Adam(model.parameters()), False), (optimizer, True)):
        try:
            save(model, other if mesh.rank else optimizer, folder, chunks=chunks and mesh.rank == 1)
        except CheckpointError as error:
            said.append(str(error))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        save(model, optimizer, folder, extra={"step": 3})
        save(model, optimizer, folder, extra={"step": 3, "rows": mesh.rank} | ({"seen": 7} if mesh.rank else {}))
    said += [str(each.message) for each in warned if "extra" in str(each.message)]
    return said, load(model, optimizer, folder)


def saved_elsewhere(folder):
    """Rank 1 names another folder, to which no rank would write."""
    torch.manual_seed(0)
    model, said = ndtp.parallelize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), mesh_of(Grid(x=2))), []
    model(torch.ones(2, 4))
    export = ndtp.checkpoint.export_safetensors
    for write in (lambda path: save(model, None, path), lambda path: start_save(model, None, path).wait(),
                  lambda path: export(model, path)):  # fmt: skip
        try:
            write(folder / str(torch.distributed.get_rank()))
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_ranks_that_write_to_different_folders_are_named(ranks, tmp_path):
    for said in ranks(2).run(saved_elsewhere, tmp_path):
        assert len(said) == 3 and all("fix: one folder for all" in each for each in said)
        assert f"different things: save: {tmp_path}/0; save: {tmp_path}/1" in said[0]
    assert not [*tmp_path.iterdir()]


def test_ranks_that_save_different_things_spoil_no_checkpoint(ranks, tmp_path):
    (said, extra), other = ranks(2).run(saved_otherwise, tmp_path / "run")
    assert (said[:3], extra) == other and len(said) == 4 and extra == {"step": 3, "rows": 0}
    assert "ranks have other values in extra: 'rows', 'seen'; those of rank 0 are written" in said[3]
    assert "optimizer Adam with 12 tensors of state" in said[0] and "rank 1: chunks=False, no optimizer" in said[0]
    assert "rank 1: chunks=False, optimizer Adam with 0 tensors" in said[1] and "rank 1: chunks=True" in said[2]

"""Lightning's Trainer with `GridStrategy` against Lightning's own on one process and with DDP."""

import os
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_trainer import under_torchrun
from torch import nn

pytest.importorskip("lightning")

import lightning
from torchmetrics import SumMetric

import ndtp
from ndtp.errors import CommunicationError, LayoutError
from ndtp.integrations import GridStrategy
from ndtp.integrations.lightning import used_package

FEATURES = 8


class Autoencoder(lightning.LightningModule):
    """Two networks, called one after the other, and a parameter that is in none of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, FEATURES))
        self.scale = nn.Parameter(torch.ones(()))
        self.seen, self.count = [], SumMetric()

    def loss(self, batch):
        self.count(len(batch))
        return F.mse_loss(self.decoder(self.encoder(batch)) * self.scale, batch)

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.seen.append(loss.item())
        return loss

    def on_validation_start(self):
        self.count.reset()

    def validation_step(self, batch, _):
        self.log("loss", self.loss(batch), sync_dist=True)

    def on_validation_end(self):
        self.seen.append(self.count.compute().item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SplitItself(Autoencoder):
    """One network is split by the module, the other one and the parameter by the strategy."""

    def configure_model(self):
        if self.trainer.world_size > 1:
            mesh = self.trainer.strategy.mesh
            ndtp.parallelize(self.encoder, mesh, scheme="1d", example=torch.zeros(2, FEATURES))


class Adversaries(lightning.LightningModule):
    """Two networks with an optimizer each, which the module steps itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.made = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, FEATURES))
        self.judged = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 2))
        self.seen = []

    def training_step(self, batch, _):
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * (self.judged(self.made(batch)).square().mean() - self.judged(batch).square().mean())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.seen.append(loss.item())

    def configure_optimizers(self):
        return [torch.optim.Adam(each.parameters(), 1e-2) for each in (self.made, self.judged)]


def trained(folder, kind=Autoencoder, strategy=None, *, steps=4, batch=4, resume=None, **named):
    """What a module has seen in some steps, and its loss on other rows."""
    module, devices = kind(), 1 if strategy is None else 2
    lightning.seed_everything(1, verbose=False)  # as strategies of several processes do once more
    clip = {"gradient_clip_val": 0.1} if issubclass(kind, Autoencoder) else {}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy or "auto", max_steps=steps, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)], **clip, **named,
    )  # fmt: skip
    rows = torch.rand(24, FEATURES, generator=torch.Generator().manual_seed(1))
    loader = partial(torch.utils.data.DataLoader, batch_size=batch)
    trainer.fit(module, loader(rows[:16], shuffle=batch == 4), loader(rows[16:]), ckpt_path=resume)
    loss = trainer.callback_metrics.get("loss", torch.zeros(()))
    return module.seen, loss.item(), module, trainer


def on_two(folder):
    """On x=2: two kinds of modules, a checkpoint that goes on elsewhere; beside DDP, the same along dp."""
    with under_torchrun(TORCHELASTIC_RUN_ID="1", GROUP_RANK="0"):
        found = {}
        *found["x"], module, trainer = trained(f"{folder}/x", strategy=GridStrategy("x=2"))
        reports = trainer.strategy.reports
        assert [*reports] == ["encoder", "decoder"] and all(report.linears == (2, 2) for report in reports.values())
        assert type(torch.load(f"{folder}/x/last.ckpt")["state_dict"]["encoder.0.weight"]) is torch.Tensor
        assert sum(p._local_tensor.numel() for p in module.encoder.parameters()) < 16 * 12
        resume = f"{folder}/x/last.ckpt"
        *found["x, on"], _, _ = trained(f"{folder}/on", strategy=GridStrategy("x=2"), steps=6, resume=resume)
        *found["x, two"], _, _ = trained(f"{folder}/two", Adversaries, GridStrategy("x=2"))
        options = {"batch": 2, "accumulate_grad_batches": 2, "max_epochs": 2}
        *found["ddp"], _, _ = trained(f"{folder}/ddp", strategy="ddp_find_unused_parameters_true", **options)
        *found["dp"], _, trainer = trained(f"{folder}/dp", SplitItself, GridStrategy("dp=2"), **options)
        assert {p.device_mesh.size() for p in trainer.model.parameters()} == {2}
        rank = trainer.global_rank
        assert trainer.strategy.reduce_boolean_decision(rank == 0, all=False)
        assert not trainer.strategy.reduce_boolean_decision(rank == 0)
        assert trainer.strategy.all_gather(torch.tensor(rank)).tolist() == [0, 1]
        with pytest.raises(CommunicationError, match="dev/null/x"):  # on both ranks
            trainer.save_checkpoint(f"{os.devnull}/x")
        with pytest.raises(LayoutError, match="sync_batchnorm=True"):
            trained(folder, strategy=GridStrategy("x=2"), sync_batchnorm=True)
    return found


def near(found, expected):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # Lightning's of few workers, and of how it reads trees
def test_lightning_trains_on_a_grid_as_on_one_process_and_as_its_ddp(ranks, tmp_path):
    found = ranks(2).run(on_two, f"{tmp_path}")
    (seen, loss), *_ = (rank["x"] for rank in found)
    dense, dense_loss, _, _ = trained(tmp_path / "dense")
    near(seen, dense)
    near(loss, dense_loss)
    on, _, _, _ = trained(tmp_path / "on", steps=6, resume=tmp_path / "x/last.ckpt")
    near(found[0]["x, on"][0], on)
    two, _, _, _ = trained(tmp_path / "two", Adversaries)
    near(found[0]["x, two"][0], two)
    for rank in found:
        near(rank["dp"][0], rank["ddp"][0])
        near(rank["dp"][1], rank["ddp"][1])


@pytest.mark.parametrize(
    ("loaded", "package"), [("lightning.pytorch", "lightning.pytorch"), ("pytorch_lightning",) * 2]
)
def test_the_strategy_is_of_the_package_that_the_program_uses(monkeypatch, loaded, package):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, lightning)
    assert used_package() == package

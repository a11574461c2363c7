"""A checkpoint is the plain module's; a run goes on from it under another number of devices as if it never stopped."""

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, optim
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from lightning_mgpu.data.batches import BatchLoader, GlobalBatches


class Indexed(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.X = torch.randn(25, 6, generator=generator, dtype=torch.float64)

    def __getitem__(self, item: Any) -> list[Tensor]:
        _, indices = item
        return [self.X[indices], self.X[indices, :3].sin()]


def momentum(module):
    optimizer = optim.SGD(module.parameters(), 0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=12)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def adamw(module):
    optimizer = optim.AdamW(module.parameters(), 0.05, amsgrad=True)
    return [optimizer], [optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


@pytest.fixture
def fit(make_trainer, Regression, EqualReplicas, tmp_path, engine):
    def fit(configure, k, ckpt_path=None, manual=False, **kwargs):
        class Module(Regression):
            def __init__(self):
                super().__init__(optimizer=configure)
                self.automatic_optimization = not manual

            def training_step(self, batch, batch_idx):
                if manual:
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward(self.loss(batch))
                    optimizer.step()
                    return None
                return self.loss(batch)

        seed_everything(1, verbose=False)
        callbacks = [EqualReplicas(own_updates=True)] if k > 1 else []
        if ckpt_path is None:
            saving = ModelCheckpoint(tmp_path / str(k), "{step}", every_n_train_steps=1, save_top_k=-1)
            callbacks.append(saving)
        trainer = make_trainer(
            devices=k,
            strategy=engine if k > 1 else "auto",
            callbacks=callbacks,
            enable_checkpointing=ckpt_path is None,
            max_epochs=3,
            limit_val_batches=0,
            **kwargs,
        )
        module = Module()
        loader = BatchLoader(Indexed(), GlobalBatches(torch.arange(25), 8, seed=3))
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
        return module

    return fit


@pytest.mark.parametrize("configure", [momentum, adamw])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (2, 2)])
@pytest.mark.parametrize("step", [4, 6])  # the end of the first epoch, the middle of the second
def test_resumed(fit, tmp_path, configure, before, after, step):
    whole = fit(configure, before)
    resumed = fit(configure, after, ckpt_path=tmp_path / str(before) / f"step={step}.ckpt")
    assert resumed.trainer.global_step == whole.trainer.global_step == 12
    for a, b in zip(resumed.parameters(), whole.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_resumed_with_manual_optimization(fit, tmp_path):
    whole = fit(adamw, 2, manual=True)
    resumed = fit(adamw, 3, ckpt_path=tmp_path / "2" / "step=6.ckpt", manual=True)
    for a, b in zip(resumed.parameters(), whole.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_saved_after_the_run(fit, tmp_path):
    module = fit(momentum, 2)
    module.trainer.save_checkpoint(tmp_path / "after.ckpt")
    state = torch.load(tmp_path / "after.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize("configure", [momentum, adamw])
def test_contents(fit, tmp_path, configure):
    """Weights, optimizer and schedulers: the keys and values of one device's."""
    fit(configure, 1), fit(configure, 2)
    one, two = (torch.load(tmp_path / str(k) / "step=7.ckpt", weights_only=False) for k in (1, 2))
    assert one.keys() == two.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        leaves, expected = (
            [leaf for leaf in tree_leaves(checkpoint[part]) if isinstance(leaf, (Tensor, int, float))]
            for checkpoint in (two, one)
        )
        torch.testing.assert_close(leaves, expected, rtol=1e-10, atol=1e-13)
    assert all(not key.startswith("module.") for key in two["state_dict"])

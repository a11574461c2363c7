"""A checkpoint is the plain module's; other devices go on from it as if nothing had stopped."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_runs import (
    DP,
    MANUAL,
    Manual,
    Regression,
    a_loader,
    assert_close,
    make_strategy,
    one_cycle,
    same_bits,
)
from torch import optim

from lightning_mgpu.data import batch_loader
from lightning_mgpu.strategies import ManualAllreduceStrategy
from lightning_mgpu.strategies.launching import KEY


def shuffled():
    return batch_loader(a_loader().dataset, 8, shuffle=True, seed=3)


def adamw(module):
    optimizer = optim.AdamW(module.parameters(), 0.05, amsgrad=True)
    return [optimizer], [optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


@pytest.fixture
def run(train, tmp_path):
    """Three epochs of four batches, which leave a checkpoint of every step, or the rest of them."""

    def run(make, k, resume=None, **kwargs):
        saving = (
            []
            if resume
            else [
                ModelCheckpoint(tmp_path / str(k), "{step}", every_n_train_steps=1, save_top_k=-1)
            ]
        )
        kwargs = {"loader": shuffled, "max_epochs": 3, "enable_checkpointing": not resume, **kwargs}
        path = resume and tmp_path / resume
        return train(make, k, callbacks=lambda: saving, ckpt_path=path, **kwargs)

    return run


MAKERS = [(lambda: Regression(optimizer=one_cycle), True), (lambda: Manual(optimizer=adamw), False)]


@pytest.mark.parametrize(("make", "own_updates"), MAKERS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_resumed(run, make, own_updates, before, after):
    """From the first epoch's end and amid the second; replicas update themselves from the start."""
    whole = run(make, before)
    for step in (4, 6):
        resumed = run(make, after, f"{before}/step={step}.ckpt", own_updates=own_updates)
        assert resumed.trainer.global_step == whole.trainer.global_step == 12
        assert_close(resumed.state_dict(), whole.state_dict())


def test_resumed_under_another_strategy(run, engine):
    whole = run(lambda: Regression(optimizer=adamw), 2)
    other = make_strategy(DP if engine == MANUAL else MANUAL)
    resumed = run(
        lambda: Regression(optimizer=adamw), 3, "2/step=6.ckpt", strategy=other, check=False
    )
    assert_close(resumed.state_dict(), whole.state_dict())


def test_contents(run, tmp_path):
    """Weights, optimizer, schedulers are as one device's. One after the run has the weights."""
    modules = {k: run(lambda: Regression(optimizer=adamw), k) for k in (1, 2)}
    one, two = (torch.load(tmp_path / str(k) / "step=7.ckpt", weights_only=False) for k in (1, 2))
    assert one.keys() == two.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_close(two[part], one[part])
    modules[2].trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert_close(
        torch.load(tmp_path / "after.ckpt", weights_only=False)["state_dict"],
        modules[2].state_dict(),
        0,
        0,
    )


class HalfLater(ManualAllreduceStrategy):
    """Exchanges half of what there is, and keeps the rest for the next step."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def reduce_gradients(self, gradients):
        for name, tensors in gradients.items():
            home = tensors[0].device
            kept = self.kept.get(name, torch.zeros_like(tensors[0])).to(home)
            self.kept[name] = (kept + sum(tensor.to(home) for tensor in tensors)) / 2
            for tensor in tensors:
                tensor.copy_(self.kept[name])

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state_dict):
        self.kept = state_dict["kept"]


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
def test_a_strategys_own_state(run, tmp_path):
    """Resumed bit for bit. Another strategy leaves it out; a checkpoint of weights has none."""
    whole = run(Regression, 2, strategy=HalfLater())
    assert KEY in torch.load(tmp_path / "2/step=4.ckpt", weights_only=True)
    assert same_bits(run(Regression, 2, "2/step=4.ckpt", strategy=HalfLater()), whole)
    resumed = run(Regression, 2, "2/step=4.ckpt", strategy=make_strategy(DP), check=False)
    assert not same_bits(resumed, whole)
    whole.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert KEY not in torch.load(tmp_path / "weights.ckpt", weights_only=True)

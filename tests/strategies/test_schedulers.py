"""Rates and optimizers' states that a step reads, changes or schedules: those of one device, in every replica."""

import pytest
import torch
from lightning.pytorch import Callback
from torch import optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

pytestmark = pytest.mark.slow


def with_scheduler(Regression, scheduler, make=optim.SGD, **kwargs):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            optimizer = make(self.parameters(), 0.1, **kwargs)
            return [optimizer], [scheduler(optimizer)]

        def update(self, loss):
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

    return Module


def test_rates_read_after_the_schedulers_step(Regression, assert_parity):
    seen = []

    class Module(with_scheduler(Regression, lambda optimizer: StepLR(optimizer, 1, 0.7))):
        def on_fit_start(self):
            seen.append(set())

        def training_step(self, batch, batch_idx):
            scheduler = self.lr_schedulers()
            assert isinstance(scheduler, LRScheduler)
            for _ in range(2):
                self.update(self.loss(batch) * 10 * self.optimizers().param_groups[0]["lr"])
                scheduler.step()
            rates = scheduler.get_last_lr()[0], self.optimizers().param_groups[0]["lr"], scheduler.last_epoch
            seen[-1].add((batch_idx, self.current_epoch, *rates))

    for _ in range(2):
        assert_parity(Module)
    assert all(len(rates) == 2 * 4 and rates == seen[0] for rates in seen)
    (config,) = Module().configure_optimizers()[1]
    assert "step" not in vars(config)


def test_plateaus_of_the_whole_batchs_loss(Regression, assert_parity):
    class Module(with_scheduler(Regression, lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5))):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.update(loss)
            scheduler = self.lr_schedulers()
            if batch_idx % 2:
                scheduler.step(loss.detach())
            else:
                scheduler.step(metrics=float(loss))

        def on_train_end(self):
            (config,) = self.trainer.lr_scheduler_configs
            assert "step" not in vars(config.scheduler)  # else checkpoints would have it
            self.rate = config.scheduler.get_last_lr()

    modules = assert_parity(Module)
    assert len({tuple(module.rate) for module in modules}) == 1 and modules[0].rate[0] < 0.1


def test_rates_changed_by_a_factor(Regression, assert_parity):
    """In automatic optimization replicas see the one optimizer there is, and none changes it once more."""

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.9
            assert self.optimizers().param_groups[0]["lr"] == self.trainer.optimizers[0].param_groups[0]["lr"]
            return self.loss(batch) * 10 * self.optimizers().param_groups[0]["lr"]

    one, *others = assert_parity(Module)
    for module in (one, *others):
        assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**8)


def test_states_read_in_a_step(Regression, assert_parity):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            state = self.optimizers().optimizer.state
            buffers = [state[p].get("momentum_buffer") for p in self.parameters()]  # which puts keys there
            norms = [buffer.norm() for buffer in buffers if buffer is not None]
            assert len(norms) == (0 if self.global_step == 0 else 4)
            return self.loss(batch) * (1 + sum(norms))

        def on_train_end(self):
            assert len(self.trainer.optimizers[0].state_dict()["state"]) == 4

    assert_parity(Module)


def test_states_edited_between_steps_of_several_updates(Regression, assert_parity):
    class Module(with_scheduler(Regression, lambda optimizer: StepLR(optimizer, 1), optim.AdamW)):
        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.update(self.loss(batch))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                for state in self.optimizers().state.values():
                    state["exp_avg"].mul_(0)

    assert_parity(Module)


@pytest.mark.parametrize("where", ["lr_scheduler_step", "on_save_checkpoint"])
def test_weights_edited_where_nobody_would_look(Regression, train, tmp_path, where):
    class Save(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.save_checkpoint(tmp_path / "x.ckpt")

    Save.__module__ = "lightning.checks"  # else the strategy takes care

    class Module(Regression):
        def edit(self):
            for parameter in self.parameters():
                parameter.data.mul_(0.98)

        def configure_optimizers(self):
            optimizer = optim.SGD(self.parameters(), 0.1)
            return [optimizer], [{"scheduler": StepLR(optimizer, 2), "interval": "step"}]

    if where == "lr_scheduler_step":
        Module.lr_scheduler_step = lambda self, scheduler, metric: (scheduler.step(), self.edit())
    else:
        Module.on_save_checkpoint = lambda self, checkpoint: self.edit()
    one, two = (train(Module, k, callbacks=lambda: [Save()], check=False) for k in (1, 2))
    for a, b in zip(one.parameters(), two.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Advanced:
    """Lightning takes any object where the module steps it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def advance(self):
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def test_one_without_a_step(Regression, assert_parity):
    class Module(with_scheduler(Regression, Advanced)):
        def training_step(self, batch, batch_idx):
            self.update(self.loss(batch))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.lr_schedulers().advance()

    for module in assert_parity(Module):
        assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**8)

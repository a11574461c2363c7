"""Manual optimization with two optimizers, a GAN's: toggling, closures, schedulers, and replicas that part ways."""

import time

import pytest
from lightning.pytorch import Callback
from torch import nn, optim
from torch.nn import functional as F

pytestmark = pytest.mark.slow


def adversaries(Regression):
    class GAN(Regression):
        """Two nets against each other; `training_step` is the test's."""

        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)))
            self.critic = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
            self.automatic_optimization = False

        def critic_loss(self, X):
            real, fake = self.critic(X), self.critic(self.net(X))
            return F.softplus(-real).mean() + F.softplus(fake).mean()

        def generator_loss(self, X):
            return F.softplus(-self.critic(self.net(X))).mean()

        def configure_optimizers(self):
            adam = optim.Adam(self.net.parameters(), 0.01)
            sgd = optim.SGD(self.critic.parameters(), 0.1, momentum=0.9)
            return [adam, sgd], [optim.lr_scheduler.StepLR(adam, 3, 0.5), optim.lr_scheduler.StepLR(sgd, 2, 0.5)]

    return GAN


def test_two_optimizers_toggled(Regression, assert_parity):
    class Module(adversaries(Regression)):
        def training_step(self, batch, batch_idx):
            generator, critic = self.optimizers()
            self.toggle_optimizer(generator)
            assert not any(parameter.requires_grad for parameter in self.critic.parameters())
            self.manual_backward(self.generator_loss(batch[0]))
            generator.step()
            generator.zero_grad()
            self.untoggle_optimizer(generator)
            self.toggle_optimizer(critic)
            self.manual_backward(self.critic_loss(batch[0]))
            critic.step()
            critic.zero_grad()
            self.untoggle_optimizer(critic)

    assert_parity(Module)


def test_two_optimizers_with_toggle_model_and_closures(Regression, assert_parity):
    class Module(adversaries(Regression)):
        def training_step(self, batch, batch_idx):
            for optimizer, loss in zip(self.optimizers(), (self.generator_loss, self.critic_loss)):

                def closure(optimizer=optimizer, loss=loss):
                    optimizer.zero_grad()
                    self.manual_backward(loss(batch[0]))

                with optimizer.toggle_model():
                    optimizer.step(closure=closure)
            assert all(parameter.requires_grad for parameter in self.parameters())

    assert_parity(Module)


def test_gradients_reach_the_other_optimizer(Regression, assert_parity):
    """Without toggling, the generator's loss leaves gradients in the critic; several backward passes add up."""

    class Module(adversaries(Regression)):
        def training_step(self, batch, batch_idx):
            generator, critic = self.optimizers()
            self.manual_backward(self.generator_loss(batch[0]))
            self.manual_backward(self.critic_loss(batch[0]), retain_graph=True)
            generator.step()
            critic.step()
            generator.zero_grad()
            critic.zero_grad(set_to_none=False)

    assert_parity(Module)


def test_schedulers_are_stepped_once(Regression, assert_parity):
    rates = []

    class Module(adversaries(Regression)):
        def training_step(self, batch, batch_idx):
            for optimizer, scheduler, loss in zip(
                self.optimizers(), self.lr_schedulers(), (self.generator_loss, self.critic_loss)
            ):
                optimizer.zero_grad()
                self.manual_backward(loss(batch[0]))
                optimizer.step()
                scheduler.step()
            rates.append([scheduler.get_last_lr() for scheduler in self.lr_schedulers()])

    assert_parity(Module)
    assert rates[7] == [[0.01 / 4], [0.1 / 16]]


@pytest.mark.parametrize("sync_batchnorm", [False, True])
@pytest.mark.parametrize("case", ["more backwards", "no step", "other optimizer", "steps before"])
def test_replicas_that_part_ways_end_in_an_error(Regression, train, case, sync_batchnorm):
    class Module(adversaries(Regression)):
        def training_step(self, batch, batch_idx):
            generator, critic = self.optimizers()
            odd = self is not self.trainer.strategy.original  # something that depends on the shard
            if case == "more backwards" and odd:
                self.manual_backward(self.generator_loss(batch[0]))
            if case == "steps before" and odd:
                generator.step()
            self.manual_backward(self.generator_loss(batch[0]))
            if not (case == "no step" and odd):
                (critic if case == "other optimizer" and odd else generator).step()

    with pytest.raises(RuntimeError, match=r"manual_backward and\s+optimizer.step"):
        train(Module, 2, sync_batchnorm=sync_batchnorm)


def test_a_step_is_counted_before_anybody_goes_on(Regression, assert_parity):
    """All replicas go the same way; the first one's counting is slow."""

    class Module(adversaries(Regression)):
        def training_step(self, batch, batch_idx):
            generator, critic = self.optimizers()
            before = self.global_step
            self.manual_backward(self.generator_loss(batch[0]))
            generator.step()
            generator.zero_grad()
            assert self.global_step == before + 1
            if self.global_step % 3 == 0:
                self.manual_backward(self.critic_loss(batch[0]))
                critic.step()
            critic.zero_grad()

    class Slow(Callback):
        def on_train_start(self, trainer, module):
            progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            count = progress.increment_completed
            progress.increment_completed = lambda: (time.sleep(0.01), count())

    assert_parity(Module, callbacks=lambda: [Slow()])

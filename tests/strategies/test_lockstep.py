"""Manual optimization: one optimizer and several, closures, accumulation, schedulers, and replicas that part ways."""

import time

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn, optim
from torch.nn import functional as F

from lightning_mgpu.strategies import ManualAllreduceStrategy

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


@pytest.fixture
def Manual(Regression):
    class Module(Regression):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    return Module


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_one_optimizer(Manual, assert_parity, profiler):
    assert_parity(Manual, (2, 3, 4), profiler=profiler)


def test_uneven_shares(Manual, assert_parity):
    """The last batch's only sample would go to replica 1, and replica 0 leads."""
    assert_parity(Manual, (2,), strategy=lambda: ManualAllreduceStrategy(split=[0.1, 0.9]))


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


def test_accumulation(Manual, assert_parity):
    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch) / 3)
            if batch_idx % 3 == 2 or self.trainer.is_last_batch:
                self.clip_gradients(optimizer, 0.1, "norm")
                optimizer.step()
                optimizer.zero_grad()

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


def test_hooks_on_gradients(Manual, assert_parity):
    class Module(Manual):
        def __init__(self):
            super().__init__()
            self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.02))

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for _ in range(2):
                self.manual_backward(self.loss(batch))
            optimizer.step()

    class Look(Callback):
        def on_after_backward(self, trainer, module):
            module.net[2].weight.grad.data.clamp_(-0.02, 0.01)

    assert_parity(Module)
    assert_parity(Module, callbacks=lambda: [Look()])


def test_weights_clamped_in_the_step(Manual, assert_parity):
    class Module(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            for parameter in self.parameters():
                parameter.data.clamp_(-0.3, 0.3)

    assert_parity(Module)


def test_sharpness_aware_closures(Manual, assert_parity):
    """The closure runs twice in a step, the second time with other weights."""

    class Twice(optim.SGD):
        def step(self, closure=None):
            closure()
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            steps = [parameter.grad.detach() * 0.1 for parameter in parameters]
            for parameter, step in zip(parameters, steps):
                parameter.data.add_(step)
            closure()
            for parameter, step in zip(parameters, steps):
                parameter.data.sub_(step)
            super().step()

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss.detach()

            optimizer.step(closure)

    for optimizer in (
        lambda m: Twice(m.parameters(), 0.1, momentum=0.9),
        lambda m: optim.LBFGS(m.parameters(), 0.1, max_iter=4, line_search_fn="strong_wolfe"),
    ):
        assert_parity(lambda optimizer=optimizer: Module(optimizer=optimizer), tolerance=1e-9)


def test_torch_optimizers_stepped_directly(Manual, assert_parity):
    """`optimizers(use_pl_optimizer=False)` gives torch's; every replica then steps its own."""

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    assert_parity(Module, num_devices=(2,))


def test_progress_counts_a_step_once(Manual, train):
    assert train(Manual, 2).trainer.global_step == train(Manual).trainer.global_step == 8


def test_sync_batchnorm(Manual, assert_parity):
    def make():
        return Manual(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))

    assert_parity(make, sync_batchnorm=True, limit_train_batches=3)


@pytest.mark.parametrize("sync_batchnorm", [False, True])
def test_gradients_of_some_parameters(Regression, assert_parity, sync_batchnorm):
    """`inputs` are each replica's own."""

    class Module(Regression):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
            self.automatic_optimization = False
            if not sync_batchnorm:
                self.net[1].eval()

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.net[1].train(sync_batchnorm)
            loss = self.loss(batch)
            self.manual_backward(loss, inputs=list(self.net[3].parameters()), retain_graph=True)
            self.manual_backward(loss, inputs=self.net[0].weight)
            optimizer.step()

    one, *_ = assert_parity(Module, sync_batchnorm=sync_batchnorm, limit_train_batches=3)
    assert one.net[0].weight.grad is not None and one.net[0].bias.grad is None


@pytest.mark.parametrize("joint", [False, True])
def test_shards_without_a_loss_and_skipped_batches(Manual, assert_parity, joint):
    """Nothing to learn from in one of the shards, or, as in the third batch, nothing that is differentiated."""

    class Module(Manual):
        def loss(self, batch):
            X, y = batch
            rows = X[:, 0] > 0.5
            return F.mse_loss(self.net(X[rows]), y[rows], reduction="sum") / len(X) if rows.any() else X.new_zeros(())

        def training_step(self, batch, batch_idx):
            if batch_idx != 2:
                return super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.optimizers().step()

    if joint:
        Module.backward = lambda self, loss: loss.backward()
    assert_parity(Module, (2, 4), limit_train_batches=3)


def test_optimization_by_hand_from_the_second_epoch(Manual, assert_parity):
    class Module(Manual):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

        def on_train_epoch_start(self):
            self.automatic_optimization = self.current_epoch != 1

        def training_step(self, batch, batch_idx):
            return self.loss(batch) if self.automatic_optimization else super().training_step(batch, batch_idx)

    assert_parity(Module, max_epochs=3)


@pytest.mark.parametrize("sync_batchnorm", [False, True])
@pytest.mark.parametrize("case", ["more backwards", "no step", "other optimizer", "steps before"])
def test_replicas_that_part_ways_end_in_an_error(Regression, train, case, sync_batchnorm):
    class Module(adversaries(Regression)):
        def training_step(self, batch, batch_idx):
            generator, critic = self.optimizers()
            odd = self is not self.trainer.model  # something that depends on the shard
            if case == "more backwards" and odd:
                self.manual_backward(self.generator_loss(batch[0]))
            if case == "steps before" and odd:
                generator.step()
            self.manual_backward(self.generator_loss(batch[0]))
            if not (case == "no step" and odd):
                (critic if case == "other optimizer" and odd else generator).step()

    with pytest.raises(RuntimeError, match=r"manual_backward and\s+optimizer.step"):
        train(Module, 2, sync_batchnorm=sync_batchnorm)


def test_backward_by_hand_is_refused(Manual, train):
    class Module(Manual):
        def training_step(self, batch, batch_idx):
            self.loss(batch).backward()
            self.optimizers().step()

    with pytest.raises(RuntimeError, match="manual_backward"):
        train(Module, 2)


def test_an_exception_names_its_replica(Manual, train):
    class Module(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            if self is not self.trainer.model:
                raise ArithmeticError("what the user's code says")

    with pytest.raises(ArithmeticError, match="what the user's code says") as info:
        train(Module, 2)
    assert "replica 1" in " ".join(getattr(info.value, "__notes__", info.value.args))
    assert torch.get_num_threads() == 1


def test_every_replica_is_given_the_result_of_a_step(Manual, train):
    """The closure's loss over the whole batch, as one device logs it."""

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            self.log("loss", 2 * optimizer.step(closure=closure), on_epoch=True)

    one, several = (train(Module, k).trainer.callback_metrics["loss_epoch"] for k in (1, 3))
    torch.testing.assert_close(several, one, rtol=1e-5, atol=0)


def test_backward_of_ones_own(Manual, assert_parity):
    class Module(Manual):
        def backward(self, loss):
            loss.backward()
            for parameter in self.parameters():
                parameter.grad.clamp_(-0.01, 0.02)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            assert all(parameter.grad.max() <= 0.02 for parameter in self.parameters())
            optimizer.step()

    assert_parity(Module)


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


@pytest.mark.parametrize("precision", ["64-true", "scaled"])
@pytest.mark.parametrize("own_backward", [False, True])
def test_hooks_see_the_whole_batchs_loss(Manual, train, precision, own_backward):
    class Module(Manual):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_before_backward(self, loss):
            self.seen.append(loss.item())

    if own_backward:
        Module.backward = lambda self, loss, *args, **kwargs: loss.backward(*args, **kwargs)
    scaled = {"plugins": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))}
    kwargs = scaled if precision == "scaled" else {"precision": precision}
    one, *others = [train(Module, k, **kwargs) for k in (1, 2, 3)]
    for other in others:
        assert other.seen == pytest.approx(one.seen, rel=1e-3 if precision == "scaled" else 1e-12)

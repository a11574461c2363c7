"""Manual optimization: replicas meet in `manual_backward` and `step`, and go on as one device."""

from functools import partial

import pytest
import torch
from tiny_runs import Manual, Regression, is_second_shard, ordered_loader, refused
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR


def by_hand(training_step, **methods):
    return type("Module", (Manual,), {"training_step": training_step, **methods})


def accumulates(self, batch, batch_idx):
    optimizer = self.optimizers()
    self.manual_backward(self.loss(batch) / 3)
    if batch_idx % 3 == 2 or self.trainer.is_last_batch:
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        optimizer.zero_grad()


def two_updates(self, batch, batch_idx):
    """The second from the weights after the first, and by torch's optimizer; they are clamped."""
    before = self.global_step
    self.update(loss := self.loss(batch))
    self.log("first", loss, on_step=True, on_epoch=True)
    assert self.global_step == before + 1
    optimizer = self.optimizers(use_pl_optimizer=False)
    optimizer.zero_grad()
    self.manual_backward(loss := self.loss(batch))
    self.log("second", loss, on_step=True, on_epoch=True)
    optimizer.step()
    for parameter in self.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def two_backwards(self, batch, batch_idx):
    """Gradients add up; the second loss is computed with the first's gradients, and edits them."""
    self.optimizers().zero_grad()
    self.manual_backward(self.loss(batch))
    norm = sum(parameter.grad.norm() for parameter in self.parameters())
    self.manual_backward(self.loss(batch) * norm)
    for parameter in self.parameters():
        parameter.grad.clamp_(-0.01, 0.02)
    self.optimizers().step()


def loss_of_some(self, batch):
    """Some shards have nothing to learn from."""
    X, y = batch
    rows = X[:, 0] > 0.5
    if not rows.any() and len(X) > 1:
        return X.new_zeros(())
    return F.mse_loss(self.net(X[rows]), y[rows], reduction="sum") / len(X)


def skips_a_batch(self, batch, batch_idx):
    if batch_idx != 2:
        return Manual.training_step(self, batch, batch_idx)
    self.optimizers().zero_grad()
    self.optimizers().step()


def with_closure(self, batch, batch_idx):
    """The loss that `step` gives back is the whole batch's."""
    optimizer = self.optimizers()

    def closure():
        optimizer.zero_grad()
        self.manual_backward(loss := self.loss(batch))
        return loss

    self.log("loss", optimizer.step(closure=closure), on_step=True, on_epoch=True)


def update_by_hand(self, batch, batch_idx):
    """The book's `sgd`, without an optimizer."""
    self.manual_backward(self.loss(batch))
    with torch.no_grad():
        for parameter in self.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def keeps_a_backup(self):
    self.backup = {}


def adversarial(self, batch, batch_idx):
    """Weights are disturbed for a second backward pass, then put back (fast gradient method)."""
    self.optimizers().zero_grad()
    self.manual_backward(self.loss(batch))
    for name, parameter in self.named_parameters():
        self.backup[name] = parameter.data.clone()
        parameter.data.add_(0.1 * parameter.grad)
    self.manual_backward(self.loss(batch))
    for name, parameter in self.named_parameters():
        parameter.data = self.backup.pop(name)
    self.optimizers().step()


def updates_itself(self):
    """Weights, by a hook once their gradient is there: what the step's next pass begins with."""

    @torch.no_grad()
    def update(weight):
        weight.sub_(0.1 * weight.grad)
        weight.grad = None

    for parameter in self.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def two_passes(self, batch, batch_idx):
    for _ in range(2):
        self.manual_backward(self.loss(batch))


STEPS = [
    by_hand(two_passes, on_fit_start=updates_itself, configure_optimizers=lambda self: None),
    Manual,
    *map(by_hand, (accumulates, two_updates, two_backwards, with_closure)),
    by_hand(adversarial, on_fit_start=keeps_a_backup),
    by_hand(skips_a_batch, loss=loss_of_some),
    by_hand(update_by_hand, configure_optimizers=lambda self: None),
]


@pytest.mark.parametrize("make", STEPS)
def test_steps(assert_parity, make):
    for module in assert_parity(make, max_epochs=3):
        assert make is not Manual or module.trainer.global_step == 12


def backward_by_hand(self, batch, batch_idx):
    self.optimizers().zero_grad()
    self.loss(batch).backward()
    self.optimizers().step()


def step_of_its_own(self, batch, batch_idx):
    self.manual_backward(self.loss(batch))
    self.own.step()


def makes_its_own(self):
    self.own = optim.SGD(self.parameters(), 0.1)


def for_some_parameters(self, batch, batch_idx):
    self.manual_backward(self.loss(batch), inputs=list(self.net[0].parameters()))


REFUSED = {
    "must call self.manual_backward": by_hand(backward_by_hand),
    "configure_optimizers has not returned it": by_hand(
        step_of_its_own, configure_optimizers=makes_its_own
    ),
    "without inputs=": by_hand(for_some_parameters),
    "evaluates its closure several times": partial(
        by_hand(with_closure), optimizer=lambda m: optim.LBFGS(m.parameters(), 0.1)
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused_in_one_line(train, said):
    with refused(said):
        train(REFUSED[said], 2)


def steps_its_scheduler(self, batch, batch_idx):
    """Twice a batch; it reads the rate."""
    for _ in range(2):
        self.update(self.loss(batch) * 10 * self.optimizers().param_groups[0]["lr"])
        self.lr_schedulers().step()


def gives_it_the_loss(self, batch, batch_idx):
    """Which must be the whole batch's."""
    loss = self.loss(batch)
    self.update(loss)
    self.lr_schedulers().step(loss.detach() if batch_idx % 2 else float(loss))


SCHEDULERS = [(steps_its_scheduler, partial(StepLR, step_size=1, gamma=0.9))]
SCHEDULERS += [(gives_it_the_loss, partial(ReduceLROnPlateau, patience=0, factor=0.5))]


@pytest.mark.parametrize(("step", "schedule"), SCHEDULERS)
def test_schedulers_are_stepped_once(assert_parity, step, schedule):
    def configure(module):
        optimizer = optim.SGD(module.parameters(), 0.1)
        return [optimizer], [schedule(optimizer)]

    modules = assert_parity(partial(by_hand(step), optimizer=configure))
    one, *others = (module.trainer.lr_scheduler_configs[0].scheduler for module in modules)
    for other in others:
        assert other.get_last_lr() == one.get_last_lr() and other.last_epoch == one.last_epoch


class GAN(Regression):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)))
        self.critic = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.automatic_optimization = False

    def critic_loss(self, X):
        return F.softplus(-self.critic(X)).mean() + F.softplus(self.critic(self.net(X))).mean()

    def generator_loss(self, X):
        return F.softplus(-self.critic(self.net(X))).mean()

    def configure_optimizers(self):
        adam = optim.Adam(self.net.parameters(), 0.01)
        momentum = optim.SGD(self.critic.parameters(), 0.1, momentum=0.9)
        return [adam, momentum], [StepLR(adam, 3, 0.5), StepLR(momentum, 2, 0.5)]

    def losses(self):
        return zip(self.optimizers(), (self.generator_loss, self.critic_loss))


def toggled(self, batch, batch_idx):
    for n, (optimizer, loss) in enumerate(self.losses()):
        self.toggle_optimizer(optimizer)
        other = self.net if n else self.critic
        assert not any(parameter.requires_grad for parameter in other.parameters())
        self.manual_backward(loss(batch[0]))
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)


def untoggled(self, batch, batch_idx):
    """The generator's loss leaves gradients in the critic; backward passes add up."""
    generator, critic = self.optimizers()
    self.manual_backward(self.generator_loss(batch[0]))
    self.manual_backward(self.critic_loss(batch[0]), retain_graph=True)
    generator.step()
    critic.step()
    generator.zero_grad()
    critic.zero_grad(set_to_none=False)


def in_turns(self, batch, batch_idx):
    """The critic has three batches of four; schedulers are stepped with their optimizers."""
    n = int(batch_idx % 4 > 0)
    optimizer, loss = list(self.losses())[n]
    optimizer.zero_grad()
    self.manual_backward(loss(batch[0]))
    optimizer.step()
    self.lr_schedulers()[n].step()
    for parameter in self.critic.parameters():
        parameter.data.clamp_(-0.3, 0.3)


@pytest.mark.parametrize("step", [toggled, untoggled, in_turns])
def test_two_optimizers(assert_parity, step):
    assert_parity(type("Module", (GAN,), {"training_step": step}))


@pytest.mark.parametrize("case", ["more backwards", "no step", "other optimizer", "raises"])
def test_replicas_that_part_ways_end_in_an_error(train, case):
    """Nothing hangs."""

    class Module(GAN):
        def training_step(self, batch, batch_idx):
            generator, critic = self.optimizers()
            odd = is_second_shard(batch)
            if case == "more backwards" and odd:
                self.manual_backward(self.generator_loss(batch[0]))
            self.manual_backward(self.generator_loss(batch[0]))
            if case == "raises" and odd:
                raise ArithmeticError("what the user's code says")
            if not (case == "no step" and odd):
                (critic if case == "other optimizer" and odd else generator).step()

    with refused(
        "what the user's code says"
        if case == "raises"
        else "every replica must come to the same layers"
    ):
        train(Module, 2, loader=ordered_loader)


def test_gradients_that_differ_by_an_edit_without_a_mark(train):
    """In an epoch's first step they are compared, whatever torch has counted."""

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            for parameter in self.parameters():
                parameter.grad.data.mul_(batch[1].mean())
            self.optimizers().step()

    with pytest.raises(RuntimeError, match="gradients differ before an update"):
        train(Module, 2)

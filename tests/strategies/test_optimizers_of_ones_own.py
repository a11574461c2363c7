"""Optimizers as users write them: arguments, attributes, lists in groups, edits of gradients, optimizers inside."""

import threading

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import optim

from lightning_mgpu.strategies.optimizers.optimizer_copies import copy_optimizer

pytestmark = pytest.mark.slow


class Scaled(optim.SGD):
    """An argument of `step`, an attribute and a list in the groups say how far it goes."""

    def __init__(self, params):
        super().__init__([{"params": list(params), "taken": []}], 0.1)
        self.factor, self.calls = 1.0, 0

    @torch.no_grad()
    def step(self, closure=None, *, scale=1.0):
        with torch.enable_grad():
            loss = closure() if closure else None
        self.calls += 1
        for group in self.param_groups:
            group["taken"].append(self.calls)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * scale * self.factor * len(group["taken"]) / self.calls)
        return loss


def test_arguments_attributes_and_lists(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__(optimizer=lambda m: Scaled(m.parameters()))
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            if self is getattr(self.trainer.strategy, "original", self):
                optimizer.optimizer.factor = 1.0 if batch_idx < 1 else 0.5
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step(scale=1 / (1 + batch_idx))

    modules = assert_parity(Module, own_updates=True)
    for module in modules:
        (group,) = module.trainer.optimizers[0].param_groups
        assert group["taken"] == list(range(1, 9))


class Decayed(optim.SGD):
    """Adds a decay that is warmed up to the gradients; copies must not be given it, and add it again."""

    def __init__(self, params, **kwargs):
        super().__init__(params, 0.1, **kwargs)
        self.calls = 0

    def step(self, closure=None):
        loss = closure()
        self.calls += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.add_(p, alpha=0.1 * max(self.calls - 2, 0))
        super().step()
        return loss


class KeywordOnly(optim.SGD):
    def step(self, *, closure=None):
        return super().step(closure)


class Locked(optim.SGD):
    """Has something nobody can copy."""

    def __init__(self, params):
        super().__init__(params, 0.1, momentum=0.9)
        self.lock = threading.Lock()

    def step(self, closure=None):
        with self.lock:
            return super().step(closure)


class Lookahead(optim.Optimizer):
    """Around another one, with attributes of its own."""

    def __init__(self, params):
        base = Scaled(params)
        base.factor = 0.7
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure=None):
        loss = self.base.step(closure)
        if self.base.calls % 3 == 0:
            with torch.no_grad():
                for group, slow in zip(self.param_groups, self.slow):
                    for p, kept in zip(group["params"], slow):
                        p.copy_(kept.lerp_(p, 0.5))
        return loss


@pytest.mark.parametrize("make", [Decayed, KeywordOnly, Lookahead])
def test_copies_make_the_update(Regression, assert_parity, make):
    assert_parity(lambda: Regression(optimizer=lambda m: make(m.parameters())), own_updates=True)


@pytest.mark.parametrize("engine", ["manual_allreduce"], indirect=True)
def test_what_cannot_be_copied_is_given_the_result(Regression, assert_parity, monkeypatch):
    said = []
    monkeypatch.setattr("lightning_mgpu.strategies.optimizers.optimizers.rank_zero_info", said.append)
    assert_parity(lambda: Regression(optimizer=lambda m: Locked(m.parameters())), (2,))
    assert len(said) == 1 and "updates of Locked, which cannot be copied (TypeError: cannot pickle" in said[0]


@pytest.mark.parametrize("engine", ["manual_allreduce"], indirect=True)
def test_what_fails_in_a_copy_is_given_the_result(Regression, assert_parity):
    class Registered(optim.SGD):
        def step(self, closure=None):
            if self is not module[0].trainer.optimizers[0]:
                raise RuntimeError("who are you?")
            return super().step(closure)

    module = []

    def make():
        module[:] = [Regression(optimizer=lambda m: Registered(m.parameters(), 0.1))]
        return module[0]

    assert_parity(make, (2,))


@pytest.mark.parametrize("place", ["state", "attribute"])
def test_lists_of_tensors_come_to_the_replicas_device(Regression, place):
    """From the original's GPU; `meta` stands for it, of which nothing can be copied."""
    module, replica = Regression().to("meta"), Regression()
    optimizer = optim.SGD(module.parameters(), 0.1)
    tensors = [torch.zeros(2, 2, device="meta")]
    if place == "state":
        optimizer.state[module.net[0].weight] = {"Q": tensors}
    else:
        optimizer.master = tensors
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        copy_optimizer(optimizer, list(module.parameters()), list(replica.parameters()))


def test_a_counter_on_the_cpu_stays_there(Regression):
    module, replica = Regression(), Regression().to("meta")
    optimizer = optim.SGD(module.parameters(), 0.1)
    optimizer.state[module.net[0].weight] = {"step": torch.tensor(3.0)}
    copied = copy_optimizer(optimizer, list(module.parameters()), list(replica.parameters()))
    assert copied.state[replica.net[0].weight]["step"].device.type == "cpu"


class NotTorchs:
    """All that Lightning asks of one."""

    def __init__(self, params):
        self.param_groups, self.state, self.defaults = [{"params": list(params), "lr": 0.1}], {}, {}
        self.zero_grad = self.load_state_dict = self.state_dict = lambda *_, **__: {}

    def step(self, closure=None):
        return closure()


def test_one_that_is_none_of_torchs(Regression, train):
    def make():
        return Regression(optimizer=lambda m: NotTorchs(m.parameters()))

    train(make)
    with pytest.raises(MisconfigurationException, match=r"^NotTorchs is no torch\.optim\.Optimizer: derive it"):
        train(make, 2)


@pytest.mark.parametrize("is_manual", [False, True])
def test_one_that_the_module_has_wrapped_itself(Regression, Manual, assert_parity, is_manual):
    class Module(Manual if is_manual else Regression):
        def configure_optimizers(self):
            return LightningOptimizer(super().configure_optimizers())

    for module in assert_parity(Module):
        assert module.trainer.global_step == 8


def test_one_put_into_the_trainers_list_is_not_the_one_that_steps(Regression, assert_parity):
    class Module(Regression):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.trainer.optimizers[0] = optim.Adam(self.parameters(), 0.1)

    for module in assert_parity(Module):
        assert module.trainer.global_step == 8


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("is_edited", [False, True])
def test_ones_that_a_step_takes_from_the_list(Regression, assert_parity, is_wrapped, is_edited):
    """Two updates a batch: the second needs replicas that are equal again."""
    wrap = LightningOptimizer if is_wrapped else lambda optimizer: optimizer

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def on_train_epoch_start(self):
            if self.current_epoch == 1 and is_edited:
                self.trainer.optimizers[0] = optim.Adam(self.parameters(), 0.1)

        def training_step(self, batch, batch_idx):
            for optimizer in (self.optimizers(use_pl_optimizer=False), self.trainer.optimizers[0]):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

        def configure_optimizers(self):
            return wrap(super().configure_optimizers())

    assert_parity(Module)


def test_one_that_nobody_has_configured(Regression, train):
    """Lightning's loop took the StopIteration of ours for the end of the data."""

    class Module(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            self.trainer.strategy.optimizer_step(optim.Adam(self.parameters()), closure)

    with pytest.raises(MisconfigurationException, match="Adam is not among the optimizers of configure_optimizers"):
        train(Module, 2)

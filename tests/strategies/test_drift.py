"""Replicas stay equal after any edit of weights; else a run ends and says so."""

import re
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.plugins import Precision
from tiny_runs import MANUAL, Regression, Written, a_loader, assert_close
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.callbacks import EpochTimer, FastModel
from lightning_mgpu.models import LeNet
from lightning_mgpu.strategies import ManualAllreduceStrategy


@pytest.fixture
def warned(recwarn):
    """The warnings so far that hold a text."""
    warnings.simplefilter("always")
    return lambda text: [str(each.message) for each in recwarn if text in str(each.message)]


def clamp(module, *_):
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def clamp_gradients(module, *_):
    """In every third step, so that nothing is to be seen in the first."""
    if module.global_step % 3 == 1:
        for parameter in module.parameters():
            parameter.grad.data.clamp_(-0.01, 0.01)


def of_module(name, cls):
    """The class, as if it and its methods were written in a module of that name."""
    for own in (cls, *filter(callable, vars(cls).values())):
        own.__module__ = name
    return cls


# Who edits


NAMES = ["lightning_mgpu.models.mine", "lightning_mgpu.callbacks.mine", "lightning.pytorch.mine"]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_may_lie_in_any_module(assert_parity, name):
    class Mine(Regression):
        def on_train_batch_end(self, *_):
            clamp(self)

    assert_parity(of_module(name, Mine), (2,), check=False)


def test_an_optimizer_may_lie_in_any_module(assert_parity):
    """One that counts its steps outside its state must not step once per replica."""

    class Mine(optim.SGD):
        num_steps = 0

        def step(self, closure=None):
            self.num_steps += 1
            self.param_groups[0]["lr"] = 0.1 / self.num_steps
            return super().step(closure)

    of_module("torch.optim.mine", Mine)
    make = lambda: Regression(optimizer=lambda m: Mine(m.parameters(), 0.1))  # noqa: E731
    assert_parity(make, (2,), check=False)


def clip_after_configuring(self, optimizer, *args, **kwargs):
    clamp_gradients(self)


def step_and_clamp(self, *args, **kwargs):
    Regression.optimizer_step(self, *args, **kwargs)
    clamp(self)


def batch_and_clamp(self, batch, *_):
    clamp(self)
    return batch


HOOKS = {
    "clip_gradients": clip_after_configuring,
    "configure_gradient_clipping": clip_after_configuring,
    "on_after_backward": clamp_gradients,
    "on_before_optimizer_step": clamp_gradients,
    "optimizer_step": step_and_clamp,
    "on_before_zero_grad": clamp,
    "on_train_batch_start": clamp,
    "on_train_batch_end": clamp,
    "on_before_batch_transfer": batch_and_clamp,
    "on_after_batch_transfer": batch_and_clamp,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_any_hook_of_the_module_may_edit(assert_parity, hook):
    assert_parity(type("Edits", (Regression,), {hook: HOOKS[hook]}), (2,), check=False)


CALLBACK_HOOKS = [
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
]


DERIVED = [*((Callback, hook) for hook in CALLBACK_HOOKS), (EpochTimer, "on_train_batch_start")]
DERIVED += [(base, "on_train_batch_end") for base in (EpochTimer, FastModel, Timer)]


@pytest.mark.parametrize("name", [NAMES[1], __name__])
@pytest.mark.parametrize(("base", "hook"), DERIVED)
def test_any_hook_of_a_callback_may_edit(assert_parity, base, hook, name):
    """Also where it is derived from one that only reads, and wherever it lies."""

    def edit(self, trainer, module, *args):
        getattr(base, hook)(self, trainer, module, *args)
        clamp(module)

    own = {hook: edit, "on_train_epoch_end": lambda *_: None}  # which logs seconds
    mine = of_module(name, type("Mine", (base,), own))
    assert_parity(Regression, (2,), callbacks=lambda: [mine()], check=False)


def clip(self, optimizer, clip_val):
    """In the second step of an epoch."""
    self.num_clipped = getattr(self, "num_clipped", 0) + 1
    for parameter in self.main_params(optimizer) if self.num_clipped % 4 == 2 else ():
        parameter.grad.data.clamp_(-clip_val, clip_val)


def edit_after_backward(self, tensor, module):
    clamp_gradients(module)
    return Precision.post_backward(self, tensor, module)


PLUGINS = {  # how gradients are clipped, and what edits them
    "clip_grad_by_value": ("value", clip),
    "clip_grad_by_norm": ("norm", clip),
    "post_backward": (None, edit_after_backward),
}


@pytest.mark.parametrize("method", PLUGINS)
def test_a_precision_plugin_of_ones_own_may_edit(assert_parity, method):
    algorithm, edit = PLUGINS[method]
    mine = type("Mine", (Precision,), {method: edit})
    clipping = {"gradient_clip_val": algorithm and 0.02, "gradient_clip_algorithm": algorithm}
    assert_parity(Regression, (2,), plugins=lambda: [mine()], check=False, **clipping)


class Shrinks(StepLR):
    """Shortens the weights when it steps."""

    def step(self, *args):
        super().step(*args)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.9)


@pytest.mark.parametrize("name", [__name__, "torch.optim.lr_scheduler"])
def test_a_scheduler_of_ones_own_may_edit(assert_parity, name):
    own = of_module(name, type("Mine", (Shrinks,), {}))

    def scheduled(module):
        optimizer = optim.SGD(module.parameters(), 0.1)
        return [optimizer], [{"scheduler": own(optimizer, 2), "interval": "step"}]

    assert_parity(lambda: Regression(optimizer=scheduled), (2,), check=False)


# Who only reads


READERS = {
    "nothing": list,
    "rates": lambda: [LearningRateMonitor("step")],
    "checkpoints": lambda: [ModelCheckpoint(every_n_train_steps=2)],
    "devices": lambda: [DeviceStatsMonitor(cpu_stats=False)],
    "time": lambda: [Timer(), EpochTimer()],
    "layers": lambda: [FastModel()],
}


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
@pytest.mark.parametrize("name", READERS)
def test_replicas_update_themselves_where_others_only_read(train, name):
    kwargs = {"enable_checkpointing": True, "logger": Written(), "log_every_n_steps": 1}
    module = train(Regression, 2, callbacks=READERS[name], check=False, **kwargs)
    assert module.trainer.strategy.own_updates is True


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
def test_replicas_of_this_packages_model_update_themselves(trainer_on):
    X, y = torch.randn(8, 1, 28, 28), torch.arange(8) % 10
    trainer = trainer_on(2, callbacks=[EpochTimer(), FastModel()])
    model = LeNet()
    trainer.fit(model, DataLoader(TensorDataset(X, y), 4))
    assert trainer.strategy.own_updates is True


# Edits by steps


class Edits(Regression):
    """Two epochs of four steps; `edit` is called from the third step to the end of the first."""

    def __init__(self, edit):
        super().__init__()
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        self.edit, self.starts = edit, {}

    def training_step(self, batch, batch_idx):
        step = self.global_step
        began = [tensor.detach().clone() for tensor in (self.scale, *self.parameters())]
        self.starts.setdefault(step, []).append(began)
        loss = F.mse_loss(self.net(batch[0]) * self.scale, batch[1])
        if 2 <= step < 4:
            self.edit(self, batch[0])
        return loss


EDITS = {
    "scale of Edits": lambda module, X: module.scale.data.add_(0.01 * X.mean()),
    "bias of Linear": lambda module, X: module.net[2].bias.data.add_(0.01 * X.mean()),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_without_a_trace_by_what_is_in_the_shard(train, warned, what):
    module = train(lambda: Edits(EDITS[what]), 2, loader=lambda: a_loader(8, 32), check=False)
    assert len(warned(f"edits {what} by what is in its shard")) == 1
    for step in (0, 4, 5, 6, 7):
        first, second = module.starts[step]
        assert_close(second, first, 0, 0)


SAME = {
    "buffer": lambda module, X: module.scale.data.mul_(0.9),
    "weight": lambda module, X: module.net[2].bias.data.mul_(0.9),
}


@pytest.mark.parametrize("what", SAME)
def test_an_edit_without_a_trace_that_is_the_same_everywhere(assert_parity, warned, what):
    make = lambda: Edits(SAME[what])  # noqa: E731
    assert_parity(make, (2,), loader=lambda: a_loader(8, 32), check=False)
    assert not warned("by what is in its shard")


# Strategies with mistakes


class Forgets(ManualAllreduceStrategy):
    """Leaves some of its calls out."""

    def __init__(self, is_wrong):
        super().__init__()
        self.is_wrong, self.num_calls = is_wrong, 0

    def reduce_gradients(self, gradients):
        self.num_calls += 1
        if not self.is_wrong(self.num_calls):
            super().reduce_gradients(gradients)


def sixteen_batches():
    return a_loader(4, 64)


FAULTS = {"from the fourth call on": lambda n: n > 3, "the fourth call": lambda n: n == 4}
APART = r"equal (at|after) step (\d+), (but )?different (at|after) step (\d+)"


def check_said(error):
    text = str(error.value)
    assert re.search(r"net\.[02]\.(weight|bias)", text) and "replica 1" in text
    assert "\n" not in text
    equal, different = (int(re.search(APART, text)[n]) for n in (2, 5))
    assert equal <= 4 <= different and equal < different <= 16


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_strategy_that_is_wrong_on_the_way(train, fault):
    """Found when the epoch ends, at the latest, and said with the steps between which it was."""
    kwargs = {"loader": sixteen_batches, "max_epochs": 1, "check": False}
    with pytest.raises((ValueError, RuntimeError), match=APART) as error:
        train(Regression, 2, Forgets(FAULTS[fault]), **kwargs)
    check_said(error)


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
def test_an_allreduce_that_is_wrong_on_the_way(train):
    class Module(Regression):
        def on_fit_start(self):  # it has passed its trial
            self.trainer.strategy.allreduce = self.allreduce

        def allreduce(self, tensors):
            total = sum(tensor.to(tensors[0].device) for tensor in tensors)
            for tensor in tensors if self.global_step < 3 else tensors[:1]:
                tensor.copy_(total)

    with pytest.raises((ValueError, RuntimeError), match=APART) as error:
        train(Module, 2, loader=sixteen_batches, max_epochs=1, check=False)
    check_said(error)


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
def test_replicas_are_compared_before_validation(train):
    ran = []

    class Module(Regression):
        def validation_step(self, batch, batch_idx):
            ran.append(batch_idx)

    kwargs = {"loader": sixteen_batches, "val": True, "val_check_interval": 8, "check": False}
    with pytest.raises((ValueError, RuntimeError), match=APART):
        train(Module, 2, Forgets(FAULTS["the fourth call"]), **kwargs)
    assert not ran


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
def test_replicas_are_compared_before_a_checkpoint(train, tmp_path):
    callbacks = lambda: [ModelCheckpoint(tmp_path, every_n_train_steps=8)]  # noqa: E731
    kwargs = {"loader": sixteen_batches, "enable_checkpointing": True, "check": False}
    with pytest.raises((ValueError, RuntimeError), match=APART):
        train(Regression, 2, Forgets(FAULTS["the fourth call"]), callbacks=callbacks, **kwargs)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_layers_of_batch_norm_do_not_count_as_drift(train, warned):
    """Their statistics are the shards', and are averaged."""
    net = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))  # noqa: E731
    train(lambda: Regression(net()), 2, loader=sixteen_batches, check=False, val=True)
    assert not warned("shard")

"""Optimizers that do more than step, whose settings or state change on the way, or that are set up again."""

import math
from unittest.mock import ANY, MagicMock, call, patch

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from timm.optim import Muon
from torch import optim

from lightning_mgpu.strategies.optimizers.optimizer_copies import copy_optimizer

pytestmark = pytest.mark.slow


class SharpnessAware(optim.SGD):
    """Evaluates the loss twice in a step; the second time every `every` steps only. Edits weights without a trace."""

    def __init__(self, params, every=1, **kwargs):
        super().__init__(params, **kwargs)
        self.num_steps, self.every = 0, every

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        if self.num_steps % self.every == self.every - 1:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            steps = [parameter.grad.detach() * 0.1 for parameter in parameters]
            for parameter, step in zip(parameters, steps):
                parameter.data.add_(step)
            with torch.enable_grad():
                closure()
            for parameter, step in zip(parameters, steps):
                parameter.data.sub_(step)
        super().step()
        self.num_steps += 1
        return loss


class PolyakSteps(optim.SGD):
    """Needs its closure, for a step size that depends on the loss; counts in an attribute, wraps another optimizer."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
        self.num_steps = 0
        self.inner = optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        self.num_steps += 1
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(float(loss) / (self.num_steps + 1))
        self.inner.step()
        return loss


class Noisy(optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        return loss


class Counting(optim.Optimizer):
    """Adam that counts its steps in its parameter groups, as some of timm's and apex' do.

    Args:
        kind: Of the counter; "early" is one that counts before the closure, "read" one that is read there alone.
        noise: Number of the step from which on it adds some, from torch's generator or numpy's.
    """

    def __init__(self, params, lr=0.01, kind="number", noise=(math.inf, "torch")):
        super().__init__(params, {"lr": lr, "steps": torch.zeros(()) if kind == "tensor" else 0})
        self.kind, self.noise = kind, noise

    @torch.no_grad()
    def step(self, closure=None):
        groups = self.param_groups
        for group in groups if self.kind == "early" else ():
            group["steps"] += 1
        read = [group["steps"] + 1 for group in groups]
        with torch.enable_grad():
            loss = closure()
        for group, early in zip(groups, read):
            if self.kind != "early":
                group["steps"] += 1
            steps = float(early if self.kind == "read" else group["steps"])
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["m"].lerp_(p.grad, 0.1), state["v"].lerp_(p.grad.square(), 0.001)
                p -= group["lr"] * m / (1 - 0.9**steps) / ((v / (1 - 0.999**steps)).sqrt() + 1e-8)
                if steps >= self.noise[0]:
                    p += 0.01 * (torch.rand(()) if self.noise[1] == "torch" else np.random.rand())  # noqa: NPY002
        return loss


def warmed_up(optimizer):
    """The first update is none, whatever the optimizer does."""
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 3))
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


OPTIMIZERS = {
    "lbfgs": lambda m: optim.LBFGS(m.parameters(), 0.1, max_iter=4),
    "lbfgs with a line search": lambda m: optim.LBFGS(m.parameters(), max_iter=4, line_search_fn="strong_wolfe"),
    "sharpness-aware": lambda m: SharpnessAware(m.parameters(), lr=0.1, momentum=0.9),
    "sharpness-aware now and then": lambda m: SharpnessAware(m.parameters(), every=3, lr=0.1, momentum=0.9),
    "needs its loss": lambda m: PolyakSteps(m.parameters(), lr=0.1),
    "draws random numbers": lambda m: Noisy(m.parameters(), 0.1, momentum=0.9),
    "amsgrad, foreach": lambda m: optim.Adam(m.parameters(), 0.01, amsgrad=True, foreach=True),
    "fused": lambda m: optim.AdamW(m.parameters(), 0.01, fused=True),
    "rate in a tensor": lambda m: optim.Adam(m.parameters(), torch.tensor(0.01, dtype=torch.float64)),
    "adagrad": lambda m: optim.Adagrad(m.parameters(), 0.1),
    "two groups": lambda m: optim.SGD([{"params": m.net[0].parameters(), "lr": 0.2}, {"params": m.net[2].weight}], 0.1),
    "counts": lambda m: warmed_up(Counting(m.parameters())),
    "counts before its closure": lambda m: warmed_up(Counting(m.parameters(), kind="early")),
    "counts by what it read": lambda m: warmed_up(Counting(m.parameters(), kind="read")),
    "counts in a tensor": lambda m: warmed_up(Counting(m.parameters(), kind="tensor")),
    "draws random numbers later": lambda m: Counting(m.parameters(), noise=(3, "torch")),
    "draws numpy's random numbers": lambda m: Counting(m.parameters(), noise=(1, "numpy")),
    "muon": lambda m: Muon(m.parameters(), 0.02, momentum=0.9, nesterov=True),
    "as written out": lambda m: optim.RMSprop(m.named_parameters(), 0.01, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(Regression, assert_parity, name):
    assert_parity(lambda: Regression(optimizer=OPTIMIZERS[name]), tolerance=1e-9 if "lbfgs" in name else 1e-10)


@pytest.mark.parametrize("engine", ["manual_allreduce"], indirect=True)
def test_copies_make_the_update(Regression, train):
    """As in the book: not one update that is copied."""
    steps = []

    class Counted(optim.SGD):
        def step(self, closure=None):
            steps.append(self)
            return super().step(closure)

    train(lambda: Regression(optimizer=lambda m: Counted(m.parameters(), 0.1, momentum=0.9)), 3)
    assert len(steps) == 3 * 8
    assert len({id(optimizer) for optimizer in steps}) == 3


@pytest.mark.parametrize("in_data", [False, True])
def test_hooks_on_optimizers(Regression, assert_parity, in_data):
    def configure(module):
        def clamp(optimizer, *_):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    (parameter.data if in_data else parameter.detach()).clamp_(-0.3, 0.3)

        optimizer = optim.SGD(module.parameters(), 0.1, momentum=0.9)
        optimizer.register_step_post_hook(clamp)
        return optimizer

    assert_parity(lambda: Regression(optimizer=configure))


def test_rates_set_by_hand(Regression, assert_parity):
    class Module(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + batch_idx)

    assert_parity(Module)


def test_rates_set_in_the_step(Regression, assert_parity):
    """After the update that is tried out."""

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            self.optimizers().param_groups[0]["lr"] = 0.1 if batch_idx < 1 else 0.02 * batch_idx
            return self.loss(batch)

    assert_parity(Module)


def test_a_mocked_step_is_called_once(Regression, train):
    """Nothing else of it is looked at: copies of the optimizer are made without its class."""
    step = MagicMock()

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def on_train_start(self):
            step.reset_mock()  # torch looks at it when the optimizer is made

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    with patch("torch.optim.SGD.step", step):
        train(Module, 2, max_epochs=1, check=False)
    assert step.mock_calls == [call(closure=ANY)] * 4


STATES = {
    "cleared": lambda optimizer: optimizer.state.clear(),
    "loaded": lambda optimizer: optimizer.load_state_dict({**optimizer.state_dict(), "state": {}}),
    "edited": lambda optimizer: [state["momentum_buffer"].zero_() for state in optimizer.state.values()],
}


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_validation_end"])
@pytest.mark.parametrize("name", STATES)
def test_state_reset_on_the_way(Regression, assert_parity, make_loader, name, hook):
    """A warm restart: the replicas' optimizers forget what they had as well."""

    class Reset(Callback):
        def reset(self, trainer, module):
            if trainer.global_step in (3, 6):  # in mid-epoch
                STATES[name](trainer.optimizers[0])

    setattr(Reset, hook, Reset.reset)
    is_edited = name == "edited"  # seen when the next update is tried: from then on the result is copied
    validation = {"val": True, "val_check_interval": 3}
    loader = make_loader(num_samples=48)
    assert_parity(Regression, callbacks=lambda: [Reset()], own_updates=not is_edited, loader=loader, **validation)


def test_optimizers_set_up_again(Regression, assert_parity):
    class Again(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.strategy.setup_optimizers(trainer)

    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.optimizers().zero_grad()
                self.manual_backward(self.loss(batch))
                self.optimizers().step()

    for make in (Regression, Manual):
        assert_parity(make, callbacks=lambda: [Again()], own_updates=True)


def test_a_tensor_beside_the_parameters_states(Regression):
    """As MADGRAD keeps its step counter."""
    module, replica = Regression(), Regression()
    optimizer = optim.SGD(module.parameters(), 0.1)
    optimizer.state["k"] = torch.tensor([3])
    copied = copy_optimizer(optimizer, list(module.parameters()), list(replica.parameters()))
    assert copied.state["k"] == 3
    assert copied.state["k"] is not optimizer.state["k"]

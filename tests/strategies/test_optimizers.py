"""Optimizers of all kinds, as users write them; which of them every replica steps for itself; what is refused."""

import threading

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, LambdaCallback
from lightning.pytorch.core.optimizer import LightningOptimizer
from timm.optim import Muon
from tiny_runs import MANUAL, Manual, Regression, a_loader, sgd
from torch import nn, optim


class SharpnessAware(optim.SGD):
    """Evaluates the loss twice, the second time elsewhere. Edits weights without a trace."""

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        steps = [parameter.grad.detach() * 0.1 for parameter in parameters]
        for parameter, step in zip(parameters, steps):
            parameter.data.add_(step)
        with torch.enable_grad():
            closure()
        for parameter, step in zip(parameters, steps):
            parameter.data.sub_(step)
        super().step()
        return loss


class Polyak(optim.SGD):
    """Needs its closure, for a step that depends on the loss; counts in an attribute, and has an optimizer inside."""

    def __init__(self, params):
        super().__init__(params, 0.1)
        self.num_steps = 0
        self.inner = optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(float(loss) / (self.num_steps + 1))
        self.inner.step()
        return loss


class Noisy(optim.SGD):
    """Draws random numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        return loss


class Counting(optim.Optimizer):
    """Counts its steps in its parameter groups, as some of timm's do, keeps a list there, and edits gradients."""

    def __init__(self, params, start=0):
        super().__init__(params, {"lr": 0.1, "steps": start, "taken": []})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            group["steps"] += 1
            group["taken"].append(float(group["steps"]))
            for p in group["params"]:
                state = self.state[p]
                state["m"] = state.get("m", torch.zeros_like(p)).lerp(p.grad.add_(p, alpha=0.1), 0.1)
                p -= group["lr"] * state["m"] / (1 - 0.9 ** float(group["steps"]))
        return loss


class Lookahead(optim.Optimizer):
    """Around another one, with slow weights of its own and a lock, which nobody can copy."""

    def __init__(self, params):
        base = optim.SGD(params, 0.1, momentum=0.9)
        super().__init__(base.param_groups, {})
        self.base, self.param_groups, self.calls, self.lock = base, base.param_groups, 0, threading.Lock()
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        with self.lock, torch.enable_grad():
            loss = self.base.step(closure)
        self.calls += 1
        for group, slow in zip(self.param_groups, self.slow if self.calls % 3 == 0 else ()):
            for p, kept in zip(group["params"], slow):
                kept = kept.to(p.device)
                p.copy_(kept.lerp_(p, 0.5))
        return loss


def matrices(m):
    return [p for p in m.parameters() if p.ndim == 2]


OPTIMIZERS = {  # what configures them, and whether each replica makes its own update
    "sgd": (lambda m: optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=1e-3), True),
    "adamw": (lambda m: optim.AdamW(m.parameters(), 0.01), True),
    "amsgrad, foreach": (lambda m: optim.Adam(m.parameters(), 0.01, amsgrad=True, foreach=True), True),
    "fused": (lambda m: optim.AdamW(m.parameters(), 0.01, fused=True), None),
    "rate in a tensor": (lambda m: optim.Adam(m.parameters(), torch.tensor(0.01, dtype=torch.float64)), True),
    "adagrad": (lambda m: optim.Adagrad(m.parameters(), 0.1), True),
    "adafactor": (lambda m: optim.Adafactor(m.parameters(), 0.01), True),
    "nadam": (lambda m: optim.NAdam(m.parameters(), 0.01), True),
    "muon": (lambda m: optim.Muon(matrices(m), 0.02), True),
    "two groups": (
        lambda m: optim.SGD([{"params": m.net[0].parameters(), "lr": 0.2}, {"params": m.net[2].weight}], 0.1),
        True,
    ),
    "named parameters": (lambda m: optim.RMSprop(m.named_parameters(), 0.01, momentum=0.5, centered=True), True),
    "lbfgs": (lambda m: optim.LBFGS(m.parameters(), 0.1, max_iter=4), False),
    "lbfgs with a line search": (
        lambda m: optim.LBFGS(m.parameters(), max_iter=4, line_search_fn="strong_wolfe"),
        False,
    ),
    "timm's muon": (lambda m: Muon(m.parameters(), 0.02, momentum=0.9, nesterov=True), False),
    "sharpness-aware": (lambda m: SharpnessAware(m.parameters(), 0.1, momentum=0.9), False),
    "needs its loss": (lambda m: Polyak(m.parameters()), False),
    "draws random numbers": (lambda m: Noisy(m.parameters(), 0.1, momentum=0.9), False),
    "counts in its group": (lambda m: Counting(m.parameters()), False),
    "counts in a tensor": (lambda m: Counting(m.parameters(), torch.zeros(())), False),
    "lookahead": (lambda m: Lookahead(m.parameters()), False),
    "wrapped by the module": (lambda m: LightningOptimizer(sgd(m)), None),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(assert_parity, name):
    configure, own_updates = OPTIMIZERS[name]
    tolerance = 1e-9 if "lbfgs" in name else 1e-10
    modules = assert_parity(lambda: Regression(optimizer=configure), tolerance=tolerance, own_updates=own_updates)
    if "counts" in name:
        for module in modules:
            assert module.trainer.optimizers[0].param_groups[0]["taken"] == list(range(1, 9))


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_before_optimizer_step", "on_after_backward"])
def test_users_hooks_end_own_updates(assert_parity, hook):
    """They may edit weights or gradients, of the first replica alone: the result is copied."""
    edits = type("Edits", (Callback,), {hook: lambda self, *args: None})
    assert_parity(Regression, callbacks=lambda: [edits()], own_updates=False)


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
def test_updates_that_differ_are_copied(train, engine, monkeypatch):
    """The first update of an epoch is compared: one of torch's own optimizers draws random numbers here."""
    step = optim.SGD.step

    def draws(self, closure=None):
        loss = step(self, closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(torch.rand((), dtype=p.dtype).to(p.device), alpha=0.01)
        return loss

    monkeypatch.setattr(optim.SGD, "step", draws)
    train(Regression, 2, own_updates=False)


@pytest.mark.parametrize("in_data", [False, True])
def test_hooks_on_optimizers(assert_parity, in_data):
    def configure(module):
        def clamp(optimizer, *_):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    (parameter.data if in_data else parameter.detach()).clamp_(-0.3, 0.3)

        optimizer = sgd(module)
        optimizer.register_step_post_hook(clamp)
        return optimizer

    assert_parity(lambda: Regression(optimizer=configure))


def one_cycle(module):
    optimizer = sgd(module)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=12)  # changes the momentum, too
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def every_epoch(module):
    optimizer = optim.Adam(module.parameters(), 0.01)
    return [optimizer], [optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def plateau(module):
    optimizer = optim.SGD(module.parameters(), 0.1)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def warmed_up(module):
    """The first update is none, whatever the optimizer does."""
    optimizer = optim.AdamW(module.parameters(), 0.01)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 3))
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize("configure", [one_cycle, every_epoch, plateau, warmed_up])
def test_schedulers(assert_parity, configure):
    assert_parity(lambda: Regression(optimizer=configure), max_epochs=3, val=True, own_updates=True)


class RatesByHand(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + batch_idx)


class RatesInTheStep(Regression):
    def training_step(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.1 if batch_idx < 1 else 0.02 * batch_idx
        return self.loss(batch)


class LooksAtStates(Regression):
    def training_step(self, batch, batch_idx):
        state = self.optimizers().optimizer.state
        norms = [buffers["momentum_buffer"].norm().to(self.device) for buffers in state.values()]
        assert len(norms) == (0 if self.global_step == 0 else 4)
        return self.loss(batch) * (1 + sum(norms))


@pytest.mark.parametrize("make", [RatesByHand, RatesInTheStep, LooksAtStates])
def test_rates_and_states_in_steps(assert_parity, make):
    assert_parity(make)


STATES = {
    "cleared": lambda optimizer: optimizer.state.clear(),
    "loaded": lambda optimizer: optimizer.load_state_dict({**optimizer.state_dict(), "state": {}}),
    "edited": lambda optimizer: [state["momentum_buffer"].zero_() for state in optimizer.state.values()],
    "edited without a mark": lambda optimizer: [s["momentum_buffer"].data.zero_() for s in optimizer.state.values()],
}


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_validation_end"])
@pytest.mark.parametrize("name", STATES)
def test_states_reset_on_the_way(assert_parity, name, hook):
    """A warm restart: the other replicas' states are reset as well."""

    def reset(trainer, module):
        if trainer.global_step in (3, 6):
            STATES[name](trainer.optimizers[0])

    callbacks = lambda: [LambdaCallback(**{hook: reset})]  # noqa: E731
    loader = lambda: a_loader(num_samples=48)  # noqa: E731
    assert_parity(Regression, callbacks=callbacks, loader=loader, val=True, val_check_interval=3)


@pytest.mark.parametrize("make", [Regression, Manual])
def test_optimizers_set_up_again(assert_parity, make):
    def set_up(trainer, module):
        if trainer.current_epoch == 1:
            trainer.strategy.setup_optimizers(trainer)

    assert_parity(make, callbacks=lambda: [LambdaCallback(on_train_epoch_start=set_up)])


class Thaws(BaseFinetuning):
    """Adds a layer to the optimizer in the second epoch, as BackboneFinetuning does."""

    def freeze_before_training(self, module):
        self.freeze(module.net[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.05)


def test_layers_thawed_on_the_way(assert_parity):
    def configure(module):
        return optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1, momentum=0.9)

    one, *_ = assert_parity(lambda: Regression(optimizer=configure), callbacks=lambda: [Thaws()], max_epochs=3)
    assert len(one.trainer.optimizers[0].param_groups) == 2


LOOSE = {  # what a module keeps without registering it, and how its weight is reached
    "tensor": (lambda: torch.zeros(2, dtype=torch.float64, requires_grad=True), lambda it: it),
    "list of parameters": (lambda: [nn.Parameter(torch.zeros(2, dtype=torch.float64))], lambda it: it[0]),
    "list of layers": (lambda: [nn.Linear(1, 2).double()], lambda it: it[0].bias),
}


@pytest.mark.parametrize("kind", LOOSE)
def test_parameters_that_are_not_the_modules(right_or_refused, kind):
    """All replicas share them. On devices that differ, torch refuses that."""
    make, weight = LOOSE[kind]

    class Module(Regression):
        def __init__(self):
            super().__init__(optimizer=lambda m: optim.Adam([*m.parameters(), weight(m.alpha)], 0.01))
            self.alpha = make()
            self.register_buffer("found", torch.zeros(2, dtype=torch.float64))

        def training_step(self, batch, batch_idx):
            return self.loss(batch) * weight(self.alpha).exp().mean()

        def on_train_end(self):
            self.found.copy_(weight(self.alpha).detach())  # what is compared

    right_or_refused(Module)

"""Optimizers of all kinds, as users write them; which of them replicas step; what is refused."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.core.optimizer import LightningOptimizer
from tiny_runs import IS_SIMULATED, MANUAL, Manual, Regression, a_loader, one_cycle, refused, sgd
from torch import nn, optim


class SharpnessAware(optim.SGD):
    """Evaluates the loss twice, the second time elsewhere. Edits weights without a trace."""

    @torch.enable_grad()
    def step(self, closure=None):
        loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        steps = [parameter.grad.detach() * 0.1 for parameter in parameters]
        for parameter, step in zip(parameters, steps):
            parameter.data.add_(step)
        closure()
        for parameter, step in zip(parameters, steps):
            parameter.data.sub_(step)
        super().step()
        return loss


def two_groups(m):
    return optim.SGD(
        [{"params": m.net[0].parameters(), "lr": 0.2}, {"params": m.net[2].weight}], 0.1
    )


OPTIMIZERS = {  # what configures them, and whether each replica makes its own update
    "sgd": (lambda m: optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=1e-3), True),
    "amsgrad, foreach": (
        lambda m: optim.Adam(m.parameters(), 0.01, amsgrad=True, foreach=True),
        True,
    ),
    "fused": (lambda m: optim.AdamW(m.parameters(), 0.01, fused=True), None),
    "rate in a tensor": (
        lambda m: optim.Adam(m.parameters(), torch.tensor(0.01, dtype=torch.float64)),
        True,
    ),
    "adagrad": (lambda m: optim.Adagrad(m.parameters(), 0.1), True),
    "muon": (lambda m: optim.Muon([p for p in m.parameters() if p.ndim == 2], 0.02), True),
    "two groups": (two_groups, True),
    "named parameters": (
        lambda m: optim.RMSprop(m.named_parameters(), 0.01, momentum=0.5, centered=True),
        True,
    ),
    "lbfgs": (
        lambda m: optim.LBFGS(m.parameters(), max_iter=4, line_search_fn="strong_wolfe"),
        False,
    ),
    "sharpness-aware": (lambda m: SharpnessAware(m.parameters(), 0.1, momentum=0.9), False),
    "wrapped by the module": (lambda m: LightningOptimizer(sgd(m)), None),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(assert_parity, name):
    configure, own_updates = OPTIMIZERS[name]
    tolerance = 1e-9 if name == "lbfgs" else 1e-10
    assert_parity(
        lambda: Regression(optimizer=configure), tolerance=tolerance, own_updates=own_updates
    )


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", "on_before_optimizer_step", "on_after_backward"]
)
def test_users_hooks_end_own_updates(assert_parity, hook):
    """They may edit only the first replica's weights or gradients, so the result is copied."""
    edits = type("Edits", (Callback,), {hook: lambda self, *args: None})
    assert_parity(Regression, callbacks=lambda: [edits()], own_updates=False)


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
def test_updates_that_differ_are_copied(train, engine, monkeypatch):
    """An epoch's first update is compared: an optimizer of torch's draws random numbers here."""
    step = optim.SGD.step

    def draws(self, closure=None):
        loss = step(self, closure)
        for p in self.param_groups[0]["params"]:
            p.data.add_(torch.rand((), dtype=p.dtype).to(p.device), alpha=0.01)
        return loss

    monkeypatch.setattr(optim.SGD, "step", draws)
    train(Regression, 2, own_updates=False)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_on_optimizers(assert_parity, when):
    def clamp(optimizer, *_):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.clamp_(-0.3, 0.3)  # which torch does not count

    def configure(module):
        optimizer = sgd(module)
        getattr(optimizer, f"register_step_{when}_hook")(clamp)
        return optimizer

    assert_parity(lambda: Regression(optimizer=configure), own_updates=False)


def plateau(module):
    optimizer = optim.SGD(module.parameters(), 0.1)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, threshold=10.0, factor=0.1
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@pytest.mark.parametrize("configure", [one_cycle, plateau])
def test_schedulers(assert_parity, configure):
    assert_parity(lambda: Regression(optimizer=configure), max_epochs=3, val=True, own_updates=True)


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


def keeps_a_mean(self, batch):
    """In the optimizer's state, edited in place, in every replica once."""
    for p in self.parameters():
        mean = self.optimizers().state[p].setdefault("mean", torch.zeros_like(p))
        mean.lerp_(p.detach(), 0.5)
        p.data.sub_(mean, alpha=0.01)
    return Regression.loss(self, batch)


KEEP = [type("KeepsAMean", (base,), {"loss": keeps_a_mean}) for base in (Regression, Manual)]


@pytest.mark.parametrize("make", [RatesInTheStep, LooksAtStates, *KEEP])
def test_rates_and_states_in_steps(assert_parity, make):
    assert_parity(make)


STATES = {
    "cleared": lambda optimizer: optimizer.state.clear(),
    "edited without a mark": lambda optimizer: [
        s["momentum_buffer"].data.zero_() for s in optimizer.state.values()
    ],
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


def test_a_layer_that_is_not_registered(train, assert_parity):
    """All replicas share it. On devices that differ, torch refuses that."""

    class Module(Regression):
        def __init__(self):
            super().__init__(
                optimizer=lambda m: optim.Adam([*m.parameters(), *m.loose[0].parameters()], 0.01)
            )
            self.loose = [nn.Linear(6, 6).double()]
            self.register_buffer("found", torch.zeros(6, dtype=torch.float64))

        def training_step(self, batch, batch_idx):
            return self.loss([self.loose[0](batch[0]), batch[1]])

        def on_train_end(self):
            self.found.copy_(self.loose[0].bias.detach())  # what is compared

    if IS_SIMULATED:
        with refused("on the same device"):
            train(Module, 3)
    else:
        assert_parity(Module)

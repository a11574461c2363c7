"""Tensors that hooks keep in objects, containers and functions: every replica finds them on its own device."""

from collections import deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributions

pytestmark = pytest.mark.slow


class Weights:
    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights


class Function(Weights):
    def __call__(self) -> torch.Tensor:
        return self.weights


@dataclass
class Fields:
    weights: torch.Tensor


@dataclass(slots=True)
class Slots:
    weights: torch.Tensor


def closure(weights: torch.Tensor) -> Any:
    return lambda: weights


def closure_of_containers(weights: torch.Tensor) -> Any:
    factors = [weights.sqrt(), {"root": weights.sqrt()}]
    return lambda: factors[0] * factors[1]["root"]


KINDS = {
    "object": Weights,
    "namespace": lambda weights: SimpleNamespace(weights=weights),
    "callable object": Function,
    "dataclass": Fields,
    "dataclass with slots": Slots,
    "slots in a tuple": lambda weights: (Slots(weights), 1),
    "slots in an object": lambda weights: Weights(Slots(weights)),
    "closure": closure,
    "closure of containers": closure_of_containers,
    "closure of an object": lambda weights: closure(Fields(weights)),
    "partial": lambda weights: partial(torch.mul, weights, 1.0),
    "default argument": lambda weights: lambda own=weights: own,
}


def weights_in(held: Any) -> torch.Tensor:
    while not isinstance(held, torch.Tensor):
        held = held[0] if isinstance(held, tuple) else held() if callable(held) else held.weights
    return held


@pytest.mark.parametrize("hook", ["setup", "on_train_batch_start"])
@pytest.mark.parametrize("kind", KINDS)
def test_set_by_hooks(Regression, assert_parity, kind, hook):
    def set_weights(self, *_, **__):
        weights = torch.arange(1.0, 4.0, dtype=torch.float64, device=self.trainer.strategy.root_device)
        self.held = KINDS[kind](weights + self.global_step)

    def training_step(self, batch, batch_idx):
        X, y = batch
        weights = weights_in(self.held)
        assert weights.device == X.device
        return ((self.net(X) - y).square() * weights).mean() / weights.sum()

    assert_parity(type("Module", (Regression,), {hook: set_weights, "training_step": training_step}), (2,))


def test_slots_of_init_moved_by_a_hook(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.held = Slots(torch.arange(1.0, 4.0, dtype=torch.float64))

        def on_fit_start(self):
            self.held.weights = self.held.weights.to(self.device)

        def training_step(self, batch, batch_idx):
            X, y = batch
            return ((self.net(X) - y).square() * self.held.weights).mean()

    assert_parity(Module)


def test_objects_edited_before_every_step(Regression, assert_parity):
    class Module(Regression):
        def on_train_epoch_start(self):
            self.held = Weights(torch.ones(3, dtype=torch.float64, device=self.device))
            self.held.factor = 1.0

        def on_train_batch_start(self, batch, batch_idx):
            self.held.weights.mul_(1.1)
            self.held.factor *= 1.1
            self.held.doubled = self.held.weights * 2

        def training_step(self, batch, batch_idx):
            X, y = batch
            errors = (self.net(X) - y).square() * self.held.weights * self.held.doubled
            return errors.mean() * self.held.factor

    assert_parity(Module)


def test_objects_that_move_their_tensors_in_steps(Regression, assert_parity):
    class Criterion(Weights):
        def __call__(self, Z, y):
            self.weights = self.weights.to(Z.device)
            return ((Z - y).square() * self.weights).mean()

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.criterion = Criterion(torch.arange(1.0, 4.0, dtype=torch.float64))

        def training_step(self, batch, batch_idx):
            X, y = batch
            return self.criterion(self.net(X), y)

    one, *others = assert_parity(Module)
    for other in others:
        assert other.criterion.weights.device == one.criterion.weights.device


DISTRIBUTIONS = {
    "normal": lambda zeros, ones: distributions.Independent(distributions.Normal(zeros, ones), 1),
    "multivariate": lambda zeros, ones: distributions.MultivariateNormal(zeros, ones.diag()),
    "mixture": lambda zeros, ones: distributions.MixtureSameFamily(
        distributions.Categorical(ones[:2]),
        distributions.Independent(distributions.Normal(torch.stack([zeros, ones]), torch.stack([ones, ones])), 1),
    ),
}


@pytest.mark.parametrize("in_a_dict", [False, True])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_distributions(Regression, assert_parity, kind, in_a_dict):
    class Module(Regression):
        def on_fit_start(self):
            zeros = torch.zeros(3, dtype=torch.float64, device=self.device)
            prior = DISTRIBUTIONS[kind](zeros, zeros + 1)
            self.prior = {"prior": prior} if in_a_dict else prior

        def training_step(self, batch, batch_idx):
            prior = self.prior["prior"] if in_a_dict else self.prior
            return self.loss(batch) - 0.1 * prior.log_prob(self.net(batch[0])).mean()

    assert_parity(Module)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_before_optimizer_step"])
def test_tensors_that_parameters_carry(Regression, assert_parity, hook):
    """Where they started from, or the gradient before."""

    def keep(self, *_):
        for parameter in self.parameters():
            parameter.kept = (parameter if parameter.grad is None else parameter.grad).detach().clone()

    def training_step(self, batch, batch_idx):
        kept = [(parameter, parameter.kept) for parameter in self.parameters() if hasattr(parameter, "kept")]
        return self.loss(batch) + 0.1 * sum((parameter - tensor).square().sum() for parameter, tensor in kept)

    assert_parity(type("Module", (Regression,), {hook: keep, "training_step": training_step}))


LONG = {
    "list": list,
    "deque": deque,
    "deque of at most 200": partial(deque, maxlen=200),
    "dict": lambda weights: dict(enumerate(weights)),
}


@pytest.mark.parametrize("kind", LONG)
def test_long_containers(Regression, assert_parity, kind):
    class Module(Regression):
        def on_fit_start(self):
            self.factors = LONG[kind](torch.arange(1.0, 121.0, dtype=torch.float64, device=self.device).unbind())

        def training_step(self, batch, batch_idx):
            return self.loss(batch) * self.factors[batch_idx] / self.factors[10]

    assert_parity(Module)


def test_a_replay_buffer(Regression, assert_parity):
    """Steps read what those before them have seen, and add to it until the oldest are forgotten."""

    class Module(Regression):
        def on_fit_start(self):
            self.seen = deque(maxlen=110)

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            if self.seen:
                loss = loss + 0.1 * self.net(torch.stack(list(self.seen))).square().mean()
            self.seen.extend(batch[0])
            return loss

    one, *others = assert_parity(Module, max_epochs=6)
    for other in others:
        torch.testing.assert_close(list(other.seen), list(one.seen))

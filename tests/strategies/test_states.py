"""What a module keeps from step to step: tensors and objects that steps make, and hooks swap, put back and delete."""

import contextlib
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.slow


@dataclass
class State:
    h: torch.Tensor


KINDS = {
    "tensor": lambda h: h,
    "tuple": lambda h: (h, 1),
    "list": lambda h: [h],
    "list of two": lambda h: [h, h + 1],
    "tuples in a dict": lambda h: {"h": (h, h + 1)},
    "object": State,
    "object in a list": lambda h: [State(h)],
    "array": lambda h: h.cpu().numpy(),
}


def tensor_in(state: Any) -> torch.Tensor:
    while not isinstance(state, torch.Tensor):
        if isinstance(state, State):
            state = state.h
        elif isinstance(state, (dict, list, tuple)):
            state = state["h"] if isinstance(state, dict) else state[0]
        else:
            state = torch.from_numpy(state)
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_states_kept_from_step_to_step(Regression, assert_parity, make_loader, kind):
    """Every replica goes on with that of its own samples, until a hook sets another."""

    class Module(Regression):
        def on_train_epoch_start(self):
            h = torch.full((1, 3), 0.5 + self.current_epoch, dtype=torch.float64, device=self.device)
            self.state = KINDS[kind](h)

        def training_step(self, batch, batch_idx):
            X, y = batch
            h = tensor_in(self.state)
            Z = self.net(X) + (h.to(X.device) if kind == "array" else h)
            self.state = KINDS[kind](Z.detach())
            return F.mse_loss(Z, y)

    assert_parity(Module, (2, 4), loader=make_loader(num_samples=24))


@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("other", [None, 0.0])
def test_tensors_swapped_for_validation_and_put_back(Regression, assert_parity, other, inference_mode):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.weights = torch.arange(1.0, 4.0, dtype=torch.float64)
            self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

        def on_fit_start(self):
            self.weights = self.weights.to(self.device)

        def on_validation_start(self):
            self.kept = self.weights, self.scale
            self.weights = None if other is None else torch.full((3,), other, dtype=torch.float64, device=self.device)
            self.scale = torch.zeros(3, dtype=torch.float64, device=self.device)

        def validation_step(self, batch, batch_idx):
            assert self.weights is None if other is None else not self.weights.any()
            assert not self.scale.any()

        def on_validation_end(self):
            self.weights, self.scale = self.kept

        def training_step(self, batch, batch_idx):
            X, y = batch
            return ((self.net(X) - y).square() * self.weights * self.scale).mean()

    assert_parity(Module, val=True, inference_mode=inference_mode)


def test_deleted_at_the_end_of_the_epoch(Regression, assert_parity, engine):
    """What a step makes where it is not there yet, every replica makes anew."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.sums = []

        def training_step(self, batch, batch_idx):
            if not hasattr(self, "scale"):
                self.scale, self.outputs = torch.tensor(1.0 + self.current_epoch, dtype=torch.float64), []
            self.outputs.append(batch[1].detach().sum())
            return self.scale * self.loss(batch)

        def on_train_epoch_end(self):
            self.sums.append(float(sum(self.outputs)))
            del self.scale, self.outputs

    one, *others = assert_parity(Module, max_epochs=3)
    for other in others:
        assert other.sums == pytest.approx(one.sums, rel=1e-12)


def test_tensors_to_be_differentiated(Regression, assert_parity):
    """A perturbation of the input, new in every epoch."""

    class Module(Regression):
        def on_train_epoch_start(self):
            start = torch.full((6,), 0.1 + self.current_epoch, dtype=torch.float64, device=self.device)
            self.delta = start.requires_grad_()

        def training_step(self, batch, batch_idx):
            X, y = batch
            loss = self.loss((X + self.delta, y))
            (gradient,) = torch.autograd.grad(loss, self.delta, retain_graph=True)
            assert gradient.any()
            return loss

    assert_parity(Module)


@pytest.mark.parametrize("container", [dict, list])
def test_sums_in_containers_are_the_first_replicas(Regression, train, container):
    """Documented; on CPUs, too, where all replicas are on the same device."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            zero = torch.zeros((), dtype=torch.float64)
            self.sums = {0: zero} if container is dict else [zero]

        def training_step(self, batch, batch_idx):
            self.sums[0] += len(batch[0])
            return self.loss(batch)

    assert train(Module).sums[0] == 2 * 25
    assert train(Module, 2).sums[0] == 2 * (4 + 4 + 4 + 1)  # of batches of 8, 8, 8 and 1


class Windows:
    """Containers that do not only grow at their end."""

    def on_train_epoch_start(self) -> None:
        self.newest_first: list[float] = []
        self.newest_left: deque = deque()
        self.of_the_last: OrderedDict[float, int] = OrderedDict()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        values = batch[1][:, 0].tolist()
        self.newest_first.insert(0, values[0])
        self.newest_left.appendleft(values[0])
        self.of_the_last |= dict.fromkeys(values, batch_idx)
        while len(self.of_the_last) > 8:
            self.of_the_last.popitem(last=False)
        return super().training_step(batch, batch_idx)  # type: ignore[misc]


def test_windows(Regression, train, make_loader):
    """What was put before the rest is the first replica's; new keys are everybody's."""
    Module = type("Module", (Windows, Regression), {})
    loader = make_loader(num_samples=24)
    one, two = (train(Module, k, loader=loader) for k in (1, 2))
    assert two.newest_first[:3] == list(two.newest_left)[:3] == one.newest_first
    assert len(two.newest_first) == 3 + 1  # and the second's of the first step, when there was nothing to be before
    assert set(one.of_the_last) <= set(two.of_the_last)
    assert set(two.of_the_last.values()) >= {2}


class Ema:
    """As torch_ema's: refers to the weights, and puts their average in their place for a while."""

    def __init__(self, parameters) -> None:
        self.parameters = [weakref.ref(parameter) for parameter in parameters]
        self.averages = [parameter().detach().clone() for parameter in self.parameters]

    def update(self) -> None:
        for average, parameter in zip(self.averages, self.parameters):
            average.lerp_(parameter().detach().to(average.device), 0.1)

    @contextlib.contextmanager
    def swapped(self):
        kept = [parameter().detach().clone() for parameter in self.parameters]
        for values in (self.averages, kept):
            for parameter, value in zip(self.parameters, values):
                parameter().data.copy_(value)
            if values is self.averages:
                yield


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers", "on_fit_start", "on_train_start"])
@pytest.mark.parametrize("in_a_list", [False, True])
@pytest.mark.parametrize("num_layers", [0, 60])
def test_an_average_that_swaps_weights_in_steps(Regression, assert_parity, hook, in_a_list, num_layers):
    class Module(Regression):
        def __init__(self):
            super().__init__(nn.Sequential(*(nn.Linear(6, 6) for _ in range(num_layers)), nn.Linear(6, 3)))

        def on_before_zero_grad(self, optimizer):
            self.averages[0].update()

        def validation_step(self, batch, batch_idx):
            with self.averages[0].swapped():
                self.log("val_loss", self.loss(batch))

    def make_average(self, *args, **kwargs):
        own = [Ema(self.parameters())]
        self.averages = own if in_a_list else Pair(own[0])
        return Regression.configure_optimizers(self) if hook == "configure_optimizers" else None

    class Pair:
        def __init__(self, first):
            self.first = first

        def __getitem__(self, n):
            return self.first

    setattr(Module, hook, make_average)
    modules = assert_parity(Module, val=True, num_sanity_val_steps=0)
    losses = [module.trainer.callback_metrics["val_loss"] for module in modules]
    torch.testing.assert_close(losses, losses[:1] * 3, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", ["tensor", "list", "object"])
def test_states_kept_in_validation(Regression, assert_same_when_validated, make_loader, kind):
    """Every replica goes on with that of its own samples, in an epoch of validation, too."""

    class Module(Regression):
        def on_validation_epoch_start(self):
            self.state = KINDS[kind](torch.zeros(1, 3, dtype=torch.float64, device=self.device))

        def validation_step(self, batch, batch_idx):
            X, y = batch
            Z = self.net(X) + 0.5 * tensor_in(self.state)
            self.state = KINDS[kind](Z)
            self.log("error", F.mse_loss(Z, y))

    assert_same_when_validated(Module, "error", [make_loader(batch_size=12, num_samples=48)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_a_batch_without_samples_for_all(Regression, assert_parity, make_loader, kind):
    """A single sample sets it, in the first replica: all go on with that."""

    class Module(Regression):
        def on_fit_start(self):
            self.state = KINDS[kind](torch.zeros(1, 3, dtype=torch.float64, device=self.device))

        def training_step(self, batch, batch_idx):
            X, y = batch
            Z = self.net(X)
            if len(X) == 1:
                self.state = KINDS[kind](Z.detach())
            h = tensor_in(self.state)
            return F.mse_loss(Z + (h.to(X.device) if kind == "array" else h), y)

    assert_parity(Module, loader=make_loader(batch_size=12, num_samples=25), max_epochs=3)

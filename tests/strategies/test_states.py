"""What a module keeps from step to step: tensors and objects that steps make, and hooks swap, put back and delete."""

import contextlib
import weakref
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

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


def batches_of(make_loader: Any, sizes: tuple[int, ...]) -> DataLoader:
    batches = [batch for size in sizes for batch in make_loader(batch_size=size, num_samples=size)]
    return DataLoader(batches, batch_size=None)


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


@pytest.fixture
def assert_same_when_validated(trainer_on):
    """A logged value is one device's on two and three."""

    def check(make, name, loaders):
        values = []
        for k in (1, 2, 3):
            torch.manual_seed(1)
            trainer = trainer_on(k)
            trainer.validate(make(), loaders, verbose=False)
            values.append(float(trainer.callback_metrics[name]))
        assert values[1:] == pytest.approx([values[0]] * 2, rel=1e-10)

    return check


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


def test_a_buffer_that_validation_sets(Regression, trainer_on, make_loader):
    """The first replica's counts."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def validation_step(self, batch, batch_idx):
            self.log("before", self.seen)
            self.seen = batch[0].sum()

    trainer = trainer_on(2)
    trainer.validate(Module(), make_loader(batch_size=12, num_samples=24), verbose=False)
    X = next(iter(make_loader(batch_size=12)))[0]
    assert float(trainer.callback_metrics["before"]) == pytest.approx(float(X[:6].sum()) / 2)


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


def test_an_object_changed_by_a_batch_without_samples_for_all(Regression, assert_parity, make_loader):
    """Made by the first step, written in every one."""

    class Module(Regression):
        state = None

        def training_step(self, batch, batch_idx):
            X, y = batch
            Z = self.net(X)
            if self.state is None:
                self.state = State(torch.zeros(1, 3, dtype=torch.float64, device=X.device))
            h = self.state.h if len(self.state.h) in (1, len(X)) else self.state.h[:1] * 0
            self.state.h = Z.detach()
            return F.mse_loss(Z + h, y)

    assert_parity(Module, loader=make_loader(batch_size=12, num_samples=25), max_epochs=3)


@dataclass
class Head:
    net: nn.Module
    h: Any = None


def test_an_object_made_by_a_batch_without_samples_for_all(Regression, assert_parity, make_loader):
    """Every replica goes on with one of its own, and the layers in it are its own."""
    agree = []

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            X, y = batch
            if batch_idx == 0 or len(X) == 1:
                self.head, self.steps = Head(self.net), np.zeros(1)
            self.steps += 1
            self.head.h = self.head.net(X)
            agree.append(self.head.net is self.net)
            return F.mse_loss(self.head.h * self.steps[0], y)

        def on_train_epoch_end(self):
            self.head.h = None

    assert_parity(Module, loader=batches_of(make_loader, (12, 1, 12, 12)))
    assert all(agree)


@pytest.mark.parametrize("sizes", [(12, 1), (12, 1, 12), (1, 12, 12), (12, 1, 1, 12)], ids=str)
def test_what_is_collected_around_a_batch_without_samples_for_all(Regression, trainer_on, make_loader, sizes):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.begun, self.names, self.counts = [], set(), Counter()
            if len(batch[0]) == 1:
                self.names.clear(), self.counts.clear()
            self.begun += batch[0][:, 0].tolist()
            self.names.add(batch_idx)
            self.counts[batch_idx] += len(batch[0])
            return self.loss(batch)

        def on_train_epoch_end(self):
            self.end = self.begun, self.names, dict(self.counts)

    ends = []
    for k in (1, 2, 3):
        module = Module()
        trainer_on(k, max_epochs=1, limit_val_batches=0).fit(module, batches_of(make_loader, sizes))
        ends.append(module.end)
    assert ends[1:] == ends[:1] * 2


def test_what_is_kept_for_a_replica_without_samples_does_not_pile_up(Regression, trainer_on, make_loader):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.seen = {}

        def predict_step(self, batch, batch_idx):
            self.seen["last"], self.seen["object"] = batch[0] + 1, State(batch[0] + 2)
            twins = self.trainer.strategy._replicas.attributes[0].twins
            held = twins._kept, twins._kept_before, twins._made, twins._made_before, twins._shared, twins._then
            kept.append(sum(map(len, held)))

    kept: list[int] = []
    trainer_on(2).predict(Module(), make_loader(batch_size=1))
    assert kept[5] == kept[-1]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_support_set_of_one_sample(Regression, assert_same_when_validated, make_loader, is_there):
    """In validation, from a loader of its own."""

    class Module(Regression):
        def on_validation_start(self):
            self.prototype = torch.zeros(1, 3, dtype=torch.float64, device=self.device) if is_there else None

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            X, _ = batch
            Z = self.net(X)
            if dataloader_idx == 0:
                self.prototype = Z
            else:
                self.log("distance", (Z - self.prototype).square().mean(), add_dataloader_idx=False)

    loaders = [make_loader(batch_size=1, num_samples=1), make_loader(batch_size=12, num_samples=24)]
    assert_same_when_validated(Module, "distance", loaders)


@pytest.mark.parametrize("every", [1, 2])
def test_a_hook_edits_a_state_of_validation_in_place(Regression, assert_same_when_validated, make_loader, every):
    """Tensors made in inference mode count no changes."""

    class Module(Regression):
        def on_validation_epoch_start(self):
            self.state = torch.zeros(1, 3, dtype=torch.float64, device=self.device)

        def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
            if batch_idx % every == 0:
                self.state.zero_()

        def validation_step(self, batch, batch_idx):
            X, y = batch
            Z = self.net(X) + 0.5 * self.state
            self.state = Z
            self.log("error", F.mse_loss(Z, y))

    assert_same_when_validated(Module, "error", [make_loader(batch_size=12, num_samples=48)])


def test_nan_in_a_state_of_validation_is_no_edit(Regression, assert_same_when_validated, make_loader):
    """Every replica keeps its own."""

    class Module(Regression):
        def on_validation_epoch_start(self):
            self.state = torch.zeros(1, 3, dtype=torch.float64, device=self.device)

        def validation_step(self, batch, batch_idx):
            X, y = batch
            Z = self.net(X) + 0.5 * self.state.nan_to_num()
            self.state = torch.where(y > 0, Z, torch.nan)
            self.log("error", F.mse_loss(Z, y))

    assert_same_when_validated(Module, "error", [make_loader(batch_size=12, num_samples=48)])


ODD = {
    "sparse": lambda h: h.to_sparse(),
    "nested": lambda h: torch.nested.nested_tensor([h, h]),
    "quantized": lambda h: torch.quantize_per_channel(h.float(), torch.ones(3), torch.zeros(3), 0, torch.quint8),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_that_validation_sets(Regression, assert_same_when_validated, make_loader, kind):
    """Kept, though nobody can compare them."""

    class Module(Regression):
        state = None

        def on_validation_batch_start(self, batch, batch_idx):
            pass

        def validation_step(self, batch, batch_idx):
            X, y = batch
            self.state = ODD[kind](torch.eye(3, dtype=torch.float64))
            self.log("error", F.mse_loss(self.net(X), y))

    assert_same_when_validated(Module, "error", [make_loader(batch_size=12, num_samples=48)])

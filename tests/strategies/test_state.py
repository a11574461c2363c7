"""State in plain containers: replicas have their own, and what they add is put together."""

import queue
import threading
import warnings
from collections import Counter, defaultdict, deque
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torchmetrics as tm
from tiny_runs import HOME, MANUAL, Manual, Regression, assert_close, make_strategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.parametrize("engine", [MANUAL], indirect=True)  # what both share

MODES = {  # what a module is derived from, and options of the Trainer
    "plain": (Regression, dict),
    "lockstep": (Regression, lambda: {"strategy": make_strategy(MANUAL, lockstep=True)}),
    "manual": (Manual, dict),
    "sync_batchnorm": (Regression, lambda: {"sync_batchnorm": True}),
}


@pytest.fixture
def warned(recwarn):
    """The warnings so far that hold a text."""
    warnings.simplefilter("always")
    return lambda text: [str(each.message) for each in recwarn if text in str(each.message)]


def numbered(num_samples=25, batch_size=8):
    """X (N, 6) and y (N, 3), whose first column is the sample's number."""
    X = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(3)).double()
    y = torch.stack([torch.arange(num_samples), X[:, 0], X[:, 1]], 1)
    return DataLoader(TensorDataset(X, y), batch_size)


def numbers_in(batch):
    return [int(n) for n in batch[1][:, 0]]


@pytest.fixture(params=MODES)
def trained(request, train):
    """Trains a module on one device and on k: `methods` are its own, `state` is what it holds."""
    base, options = MODES[request.param]

    def trained(state, loss, k=2, **methods):
        class Module(base):
            def __init__(self):
                super().__init__()
                self.state = state()

        Module.loss = loss
        for name, method in methods.items():
            setattr(Module, name, method)
        kwargs = {"loader": numbered, "max_epochs": 1, "check": False}
        return train(Module, **kwargs), train(Module, k, **options(), **kwargs)

    return trained


def small_loss(self, batch, Z):
    return F.mse_loss(Z, batch[1] / 25)


# A state that goes on


PLACES = {  # how a state is made, and where in it a tensor stands
    "dict": (lambda: {"v": 0.0}, lambda state: state),
    "object": (lambda: SimpleNamespace(v=0.0), vars),
    "nested dict": (lambda: {"a": {"b": {"v": 0.0}}}, lambda state: state["a"]["b"]),
    "object in a list": (lambda: [SimpleNamespace(v=0.0)], lambda state: vars(state[0])),
    "dict of an object": (lambda: SimpleNamespace(a={"v": 0.0}), lambda state: state.a),
    "list in a tuple": (lambda: ({"v": 0.0}, 1), lambda state: state[0]),
}


class Neuron(nn.Module):
    """Adds up what it sees, in a state that may lie anywhere."""

    def __init__(self, state, find):
        super().__init__()
        self.state, self.find = state, find

    def forward(self, x):
        here = self.find(self.state)
        here["v"] = here["v"] + x
        return here["v"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["plain", "lockstep", "sync_batchnorm"])
@pytest.mark.parametrize(("num_layers", "resets"), [(1, True), (2, True), (1, False)])
def test_neurons_keep_their_state(trainer_on, place, mode, num_layers, resets):
    """In a layer, or in two that share it; until a hook sets it to one number for all samples."""
    make, find = PLACES[place]

    class Predicts(Regression):
        def __init__(self):
            super().__init__()
            state = make()
            self.layers = nn.ModuleList(Neuron(state, find) for _ in range(num_layers))

        def on_predict_batch_start(self, *_):
            if resets:
                find(self.layers[0].state)["v"] = torch.zeros(())

        def predict_step(self, batch, batch_idx):
            return [layer(batch[0]) for layer in self.layers][-1]

    loader = DataLoader(TensorDataset(torch.arange(1.0, 13)), 4)
    one = trainer_on(1).predict(Predicts(), loader)
    for k in (2, 4):
        assert_close(trainer_on(k, **MODES[mode][1]()).predict(Predicts(), loader), one)
    assert_close(one[0], torch.arange(1.0, 5) * num_layers)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_a_hidden_state_goes_on_in_training(assert_parity, place, mode):
    """Every replica goes on with its samples' state; a hook resets it in place."""
    (make, find), (base, options) = PLACES[place], MODES[mode]

    class Module(base):
        def __init__(self):
            super().__init__()
            self.state = make()

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx in (0, 2):
                find(self.state)["v"] = torch.full((1, 3), 0.5, device=self.device).double()

        def loss(self, batch):
            here = find(self.state)
            Z = self.net(batch[0]) + 0.5 * here["v"]
            here["v"] = Z.detach()
            return small_loss(self, batch, Z)

    settings = {"loader": lambda: numbered(32), "check": False, **options()}
    strategy = settings.pop("strategy", None)
    assert_parity(Module, (2,), strategy=lambda: strategy, **settings)


# What steps collect


def into_lists_of_classes(found, n):
    found.setdefault(n % 3, []).append(n)


COLLECTED = {  # an empty container, and what is done for a sample
    "keys": (dict, lambda found, n: found.update({n: -n})),
    "set": (set, lambda found, n: found.add(n)),
    "list": (list, lambda found, n: found.append(n)),
    "list that grows by +=": (list, lambda found, n: found.__iadd__([n, n])),
    "list in a dict": (lambda: {"a": []}, lambda found, n: found["a"].append(n)),
    "lists of classes": (lambda: {0: [], 1: []}, lambda found, n: found[n % 2].append(n)),
    "new lists of classes": (dict, into_lists_of_classes),
    "new lists of a defaultdict": (
        lambda: defaultdict(list),
        lambda found, n: found[n % 3].append(n),
    ),
    "deque": (lambda: deque(maxlen=3), lambda found, n: found.append(n)),
    "deque in a list": (lambda: [deque(maxlen=3)], lambda found, n: found[0].append(n)),
    "object": (lambda: SimpleNamespace(a=[]), lambda found, n: found.a.append(n)),
    "keys in an object": (lambda: SimpleNamespace(a={}), lambda found, n: found.a.update({n: 1})),
    "counter": (Counter, lambda found, n: found.update([n % 3])),
}


@pytest.mark.parametrize("what", COLLECTED)
def test_what_steps_collect_is_put_together(trained, warned, what):
    """Sample by sample, as on one device, in the order of the batch."""
    make, collect = COLLECTED[what]

    def loss(self, batch):
        for n in numbers_in(batch):
            collect(self.state, n)
        return small_loss(self, batch, self.net(batch[0]))

    one, several = trained(make, loss, k=3)
    assert several.state == one.state
    assert not isinstance(one.state, dict) or list(several.state) == list(one.state)
    assert not warned("state")


def keeps_three(queue, numbers):
    for n in numbers:
        queue.append(n)
        queue.pop(0)


def cuts_all_but_three(queue, numbers):
    queue.extend(numbers)
    del queue[:-3]


def assigns_the_last_three(queue, numbers):
    queue[:] = [*queue, *numbers][-3:]


@pytest.mark.parametrize("change", [keeps_three, cuts_all_but_three, assigns_the_last_three])
@pytest.mark.parametrize("name", ["state", "latest"])
def test_a_queue_has_the_last_items_or_is_warned_of(trained, warned, change, name):
    def loss(self, batch):
        change(self.state if name == "state" else self.state[name], numbers_in(batch))
        return small_loss(self, batch, self.net(batch[0]))

    make = {"state": lambda: [0, 0, 0], "latest": lambda: {"latest": [0, 0, 0]}}
    one, several = trained(make[name], loss)
    assert several.state == one.state or warned(name)


def test_a_hook_that_resets_a_container_wins(trained):
    """Whether it empties it or puts a new one there."""

    def reset(self, batch, batch_idx):
        self.state["rows"].clear()
        self.state["new"] = []
        self.again = deque()

    def loss(self, batch):
        for found in (self.state["rows"], self.state["new"], self.again):
            found.extend(numbers_in(batch))
        return small_loss(self, batch, self.net(batch[0]))

    def keep(self, *_):
        self.kept = [*getattr(self, "kept", []), [*self.state["rows"]], [*self.again]]

    make = lambda: {"rows": [], "new": []}  # noqa: E731
    hooks = {"on_train_batch_start": reset, "on_train_batch_end": keep}
    one, several = trained(make, loss, **hooks)
    assert several.state == one.state and several.kept == one.kept
    assert several.kept[:2] == [[*range(8)]] * 2


# Numbers


def sets(**new):
    """A step that sets attributes to what these functions of the module and the batch give."""

    def loss(self, batch):
        self.calls = getattr(self, "calls", 0) + 1
        for name, value in new.items():
            setattr(self, name, value(self, batch))
        return small_loss(self, batch, self.net(batch[0]))

    return loss


ALIKE = {
    "counted": lambda self, batch: getattr(self, "counted", 0) + 1,
    "beta": lambda self, batch: min(1, self.trainer.global_step / 10),
    "last_idx": lambda self, batch: self.trainer.fit_loop.epoch_loop.batch_idx,
    "phase": lambda self, batch: "warm" if self.trainer.global_step < 2 else "hot",
    "is_warm": lambda self, batch: self.trainer.global_step > 2,
}


@pytest.mark.parametrize("name", ALIKE)
def test_numbers_that_are_the_same_everywhere(trained, warned, name):
    one, several = trained(dict, sets(**{name: ALIKE[name]}))
    assert getattr(several, name) == getattr(one, name)
    assert not warned(name) and not warned("calls")


def test_calls_counted_in_a_container(trained, warned):
    def loss(self, batch):
        self.state["num_calls"] += 1
        self.state["last_step"] = self.trainer.global_step
        return small_loss(self, batch, self.net(batch[0]))

    one, several = trained(lambda: {"num_calls": 0}, loss)
    assert several.state == one.state
    assert not warned("num_calls") and not warned("last_step")


def adds_samples(self, batch):
    self.state["samples_seen"] += len(batch[0])


def adds_losses(self, batch):
    self.samples_seen = getattr(self, "samples_seen", 0.0) + batch[0].mean().item()


def adds_in_an_object(self, batch):
    self.state["more"].samples_seen += len(batch[0])


@pytest.mark.parametrize("add", [adds_samples, adds_losses, adds_in_an_object])
@pytest.mark.parametrize("batch_size", [7, 8])
def test_numbers_that_follow_the_shard_are_warned_of(train, warned, add, batch_size):
    """Once. With even shards, too, where all replicas have added the same."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.state = {"samples_seen": 0, "more": SimpleNamespace(samples_seen=0)}

        def loss(self, batch):
            add(self, batch)
            return small_loss(self, batch, self.net(batch[0]))

    train(Module, 2, loader=lambda: numbered(3 * batch_size, batch_size), check=False)
    assert len(warned("samples_seen")) == 1


def test_a_metric_in_a_list_of_a_layer_by_any_name(train):
    """Also where the layer's class says that it is torch's."""

    class Layer(nn.Linear):
        def forward(self, X):
            self.kept[0].update(X.mean())
            return super().forward(X)

    Layer.__module__ = "torch.nn.mine"

    def make():
        module = Regression(Layer(6, 3))
        module.net.kept = [tm.MeanMetric().to(HOME)]
        return module

    one, two = (train(make, k, loader=lambda: numbered(21, 7), check=False) for k in (1, 2))
    assert_close(two.net.kept[0].compute(), one.net.kept[0].compute(), 1e-6)


def test_what_other_threads_write_into_is_one_for_all(train):
    """Copies of it would lose what a thread writes meanwhile. Nor has an iterator copies."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.queue, self.batches, self.writer = queue.Queue(), iter(range(9)), Writer()

        def training_step(self, batch, batch_idx):
            self.queue.put(next(self.batches))
            self.writer.count += 1
            return self.loss(batch)

    class Writer:
        def __init__(self):
            self.lock, self.count = threading.Lock(), 0

    module = train(Module, 2, max_steps=2, check=False)
    assert [module.queue.get_nowait() for _ in range(4)] == [0, 1, 2, 3]
    assert module.writer.count == 4


class Uncopied(list):
    def __copy__(self):
        raise TypeError("one of a kind")


class Closed:
    @property
    def __dict__(self):
        return {}


@pytest.mark.parametrize(
    "make",
    [Uncopied, Closed, threading.local, threading.Event, lambda: partial(int, 1), MagicMock],
)
def test_an_object_that_cannot_be_copied_is_one_for_all(train, make):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.odd, self.in_a_list = make(), [make()]

        def training_step(self, batch, batch_idx):
            assert self.odd is not self.in_a_list[0]
            return self.loss(batch)

    train(Module, 2, max_steps=2, check=False)

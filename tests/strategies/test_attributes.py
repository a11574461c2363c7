"""What hooks and steps keep on the module: a hook's is for all replicas, a step's the replica's."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import MANUAL, Manual, Regression, a_loader, assert_close
from torch import nn
from torch.nn import functional as F

# what both strategies share
pytestmark = pytest.mark.parametrize("engine", [MANUAL], indirect=True)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_epoch_start", "on_train_batch_start"])
def test_what_hooks_set_and_change_counts_for_all(assert_parity, hook):
    """Tensors, dicts, objects, modes, attributes of weights and hooks of layers; in place, too."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("temperature", torch.ones((), dtype=torch.float64))
            self.config = SimpleNamespace(factor=1.0, values=[1.0])

        def training_step(self, batch, batch_idx):
            assert self.net[1].training == self.by_name["trains"]
            factors = (
                self.temperature,
                self.config.factor,
                *self.config.values,
                *self.by_name["more"]["factors"],
            )
            loss = ((self.net(batch[0]) - batch[1]).square() * self.weights).mean() * math.prod(
                factors
            )
            return loss + sum(
                parameter.decay * parameter.square().sum() for parameter in self.parameters()
            )

    def set_and_change(self, *_):
        step = self.global_step
        self.by_name = {"trains": step % 2 == 0, "more": {"factors": (1 + step / 10, 2.0)}}
        self.weights = torch.full((3,), 1.0 + step, dtype=torch.float64, device=self.device)
        self.temperature.mul_(0.95)
        self.config.factor *= 1.1
        self.config.values[0] *= 1.1
        self.net[1].train(step % 2 == 0)
        for n, parameter in enumerate(self.parameters()):
            parameter.decay = 0.01 * (n + step)
        if step == 0:
            self.net[1].register_full_backward_hook(
                lambda layer, inputs, gradients: (inputs[0] * 0.5,)
            )

    assert_parity(type("Sets", (Module,), {hook: set_and_change}))


KINDS = {
    "tensor": (lambda h: h, lambda state: state),
    "tuple": (lambda h: (h, 1), lambda state: state[0]),
    "new list": (lambda h: [h], lambda state: state[0]),
    "new object": (lambda h: SimpleNamespace(h=h), lambda state: state.h),
}


class Net(nn.Sequential):
    """A layer of a user's class."""


PLACES = [
    *((kind, "module", Regression) for kind in KINDS),
    *(("tensor", "layer", base) for base in (Regression, Manual)),
]


@pytest.mark.parametrize(("kind", "place", "base"), PLACES)
def test_hidden_states_are_the_replicas_own(assert_parity, kind, place, base):
    """Truncated backpropagation through time: replicas keep their samples' state until a reset."""
    put, find = KINDS[kind]

    class Module(base):
        def __init__(self):
            super().__init__(Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))

        @property
        def owner(self):
            return self if place == "module" else self.net

        def on_train_epoch_start(self):
            state = torch.full(
                (1, 3), 0.5 + self.current_epoch, dtype=torch.float64, device=self.device
            )
            self.owner.state = put(state)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2 and kind == "tensor":
                self.owner.state.zero_()

        def loss(self, batch):
            Z = self.net(batch[0]) + 0.5 * find(self.owner.state)
            self.owner.state = put(Z.detach())
            return F.mse_loss(Z, batch[1])

    assert_parity(Module, (2, 4), loader=lambda: a_loader(num_samples=24))


def test_what_the_first_replica_sets_stays(train):
    """Numbers count its steps and its samples; a hook reads its tensor."""
    seen = []

    class Module(Regression):
        num_steps, num_samples = 0, 0

        def training_step(self, batch, batch_idx):
            self.num_steps += 1
            self.num_samples = self.num_samples + len(batch[0])
            self.last = batch[0]
            return self.loss(batch)

        def on_train_batch_end(self, *_):
            seen.append(len(self.last))

    one, two = train(Module), train(Module, 2)
    assert one.num_steps == two.num_steps == 8
    assert (one.num_samples, two.num_samples) == (2 * 25, 2 * (4 + 4 + 4 + 1))
    assert seen == [8, 8, 8, 1] * 2 + [4, 4, 4, 1] * 2


def test_what_a_test_step_keeps(trainer_on):
    """A tensor of inference mode, which knows no versions."""

    class Module(Regression):
        last = None

        def test_step(self, batch, batch_idx):
            self.last = batch[0] if self.last is None else self.last + batch[0]
            self.log("sum", self.last.mean())

    loader = a_loader(8, 24)
    results = [trainer_on(k).test(Module(), loader, verbose=False)[0] for k in (1, 2)]
    assert_close(results[1], results[0], 1e-6)


def test_python_objects_get_one_call_a_replica(train):
    """In the batch's order, so that a list of samples is that of one device; in validation, too."""

    class Module(Regression):
        def on_train_start(self):
            self.inputs, self.names, self.counts = [], [], Counter()

        def training_step(self, batch, batch_idx):
            self.inputs.append(batch[0])
            self.names.extend(f"{value:.6f}" for value in batch[0][:, 0])
            self.counts["samples"] += len(batch[0])
            return self.loss(batch)

        def on_validation_epoch_start(self):
            self.outputs = []

        def validation_step(self, batch, batch_idx):
            self.outputs.append(self.net(batch[0]))

        def on_validation_epoch_end(self):
            self.all = torch.cat(self.outputs)

    one, three = (train(Module, k, val=True) for k in (1, 3))
    assert_close(torch.cat(three.inputs), torch.cat(one.inputs), 0, 0)
    assert_close(three.all, one.all)
    assert three.names == one.names and three.counts == one.counts


@pytest.mark.parametrize("base", [Regression, Manual])
def test_buffers_that_a_step_updates(assert_parity, base):
    """Most replicas have no sample; those with one in the next batch need the first's buffers."""

    class Module(base):
        def __init__(self):
            super().__init__()
            self.register_buffer("num_steps", torch.tensor(0))
            self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float64))
            self.register_buffer("nothing", None, persistent=False)
            self.register_buffer(
                "mask", torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64).expand(4, 3)
            )

        def loss(self, batch):
            self.num_steps += 1
            self.scale = self.scale * 0.99  # a new tensor every time
            self.nothing = torch.ones(len(batch[0]))  # of another length in every shard
            return F.mse_loss(self.net(batch[0]) * self.scale * self.mask[0], batch[1])

    one, *_ = assert_parity(Module)
    assert one.num_steps == 8
    assert_parity(Module, (3, 4), loader=lambda: a_loader(2))


def moves_a_centre(self, X):
    self.centre.mul_(0.9).add_(0.1 * X.mean(0))


def sets_a_weight(self, X):
    """By the first samples, as the layers of flows."""
    if self.centre.sum() == 0:
        self.centre += 1
        self.net[0].bias.data.fill_(X.mean())


@pytest.mark.parametrize(
    ("edit", "said"), [(moves_a_centre, "centre of Module"), (sets_a_weight, "bias of Linear")]
)
def test_what_follows_its_shard(train, edit, said):
    """Its values could be means, sums or samples."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(6, dtype=torch.float64))

        def loss(self, batch):
            edit(self, batch[0])
            return super().loss(batch)

    with pytest.warns(UserWarning, match=f"A step edits {said}"):
        train(Module, 2)


def test_evaluation_has_what_stays(trainer_on):
    """Not what training has put into a replica's attributes."""

    class Module(Regression):
        mean = 0.0

        def loss(self, batch):
            self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0, keepdim=True)
            return super().loss(batch)

        def validation_step(self, batch, batch_idx):
            self.log("mean", self.mean.mean())

    trainer, module = trainer_on(2, max_epochs=1), Module()
    trainer.fit(module, a_loader(8, 24), a_loader(8, 24))
    logged = trainer.callback_metrics["mean"]
    assert trainer.validate(module, a_loader(8, 24), verbose=False) == [{"mean": logged}]

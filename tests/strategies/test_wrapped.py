"""Hooks, steps and a layer's `forward` set on the instance, wrapped by a decorator or compiled: each replica's own."""

from functools import partial, wraps
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.slow


def decorate(module, name, around):
    inner = getattr(module, name)

    @wraps(inner)
    def outer(*args, **kwargs):
        return around(inner, *args, **kwargs)

    setattr(module, name, outer)


def halved(inner, batch, *args):
    return [part / 2 for part in inner(batch, *args)]


def shrink(module):
    def around(inner, *args):
        inner(*args)
        for parameter in module.parameters():
            parameter.data = parameter.data * 0.9

    return around


@pytest.mark.parametrize(
    ("hook", "around"),
    [
        ("transfer_batch_to_device", lambda module: halved),
        ("on_after_batch_transfer", lambda module: halved),
        ("on_train_batch_start", shrink),
        ("on_train_batch_end", shrink),
    ],
)
def test_hooks_that_edit(Regression, assert_parity, hook, around):
    def make():
        module = Regression()
        decorate(module, hook, around(module))
        return module

    assert_parity(make)


@pytest.mark.parametrize("hook", ["on_after_backward", "backward"])
def test_hooks_that_look_at_gradients(Regression, train, hook):
    def make():
        module = Regression()
        module.seen = []

        def look(inner, *args, **kwargs):
            inner(*args, **kwargs)
            module.seen.append([parameter.grad.norm().item() for parameter in module.parameters()])

        decorate(module, hook, look)
        return module

    one, *others = [train(make, k, accumulate_grad_batches=2) for k in (1, 2, 3)]
    for other in others:
        torch.testing.assert_close(torch.tensor(other.seen), torch.tensor(one.seen), rtol=1e-9, atol=0)


@pytest.mark.parametrize("manual", [False, True])
def test_steps(Regression, assert_parity, manual):
    """The decorated function holds the original's method: every replica means its own."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = not manual
            for step in ("training_step", "validation_step"):
                decorate(self, step, lambda inner, *args: inner(*args))

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss, on_epoch=True)
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

    modules = assert_parity(Module, val=True)
    for name in ("loss_epoch", "val_loss"):
        values = [module.trainer.callback_metrics[name] for module in modules]
        torch.testing.assert_close(values, values[:1] * 3, rtol=1e-6, atol=0)


class Users(nn.Linear):
    pass


class Doubled:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, X):
        return 2 * F.linear(X, self.layer.weight)


def put_another_forward(layer, kind):
    inner = layer.forward

    @wraps(inner)
    def decorated(X):
        return 2 * inner(X)

    @wraps(decorated)
    def decorated_again(X):
        decorated_again.calls += 1  # it knows itself
        return decorated(X)

    decorated_again.calls = 0

    def with_its_weight(X):
        return 2 * F.linear(X, layer.weight)

    layer.forward = {
        "decorated": decorated,
        "decorated again": decorated_again,
        "with its weight": with_its_weight,
        "with a default": lambda X, layer=layer: 2 * F.linear(X, layer.weight),
        "with a keyword": lambda X, *, weight=layer.weight: 2 * F.linear(X, weight),
        "partial": partial(lambda layer, X: 2 * F.linear(X, layer.weight), layer),  # accelerate's
        "method": MethodType(lambda layer, X: 2 * F.linear(X, layer.weight), layer),
        "object": Doubled(layer),
    }[kind]


class Patched:
    """A layer's `forward` is another, from the start or in the second epoch of three."""

    kind, late = "", False

    def __init__(self):
        super().__init__()
        self.net[0] = self.layer(6, 8).double()
        if not self.late:
            put_another_forward(self.net[0], self.kind)

    def on_train_epoch_start(self):
        if self.late and self.current_epoch == 1:
            put_another_forward(self.net[0], self.kind)
        elif self.late and self.current_epoch == 2:
            del self.net[0].forward

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        torch.autograd.grad(loss, self.net[0].weight, retain_graph=True)  # an error for another replica's
        return loss


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "decorated",
        "decorated again",
        "with its weight",
        "with a default",
        "with a keyword",
        "partial",
        "method",
        "object",
    ],
)
@pytest.mark.parametrize("layer", [nn.Linear, Users])
def test_another_forward(Regression, assert_parity, layer, kind, late):
    if late and kind == "object":
        pytest.skip("shared: docs/strategies.md")
    attributes = {"layer": layer, "kind": kind, "late": late, "__module__": __name__}
    assert_parity(type("Module", (Patched, Regression), attributes), max_epochs=3)


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_in_place(Regression, assert_parity, whole):
    """`compile()` belongs to one module; the others' would compute with its weights."""

    class Net(nn.Sequential):
        """Of a user's class, whose attributes replicas are given."""

    class Module(Regression):
        def __init__(self):
            super().__init__(Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
            (self if whole else self.net).compile(backend="eager")

        def forward(self, X):
            return self.net(X)

        def training_step(self, batch, batch_idx):
            X, y = batch
            loss = F.mse_loss(self(X), y)
            torch.autograd.grad(loss, self.net[0].weight, retain_graph=True)
            return loss

    assert_parity(Module)

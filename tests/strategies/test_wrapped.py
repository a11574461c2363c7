"""Hooks and steps set on the instance, wrapped by a decorator: `is_overridden` sees through it, replicas must not."""

from functools import wraps

import pytest
import torch

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

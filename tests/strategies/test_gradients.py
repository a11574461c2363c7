"""Hooks, callbacks, clipping and `backward` see and edit the gradient of the whole batch."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from tiny_runs import Manual, Regression, assert_close, refused

ACCUMULATE = pytest.mark.parametrize("accumulate", [1, 3])


@ACCUMULATE
@pytest.mark.parametrize(
    "hooks", [["on_after_backward", "on_before_optimizer_step"], ["on_train_batch_end"]]
)
def test_callbacks_see_the_reduced_gradient(assert_parity, hooks, accumulate):
    """In every batch of an accumulation window, too."""
    seen = []

    def look(trainer, module, *_):
        seen[-1].extend(p.grad.clone() for p in module.parameters() if p.grad is not None)

    def callbacks():
        seen.append([])
        return [LambdaCallback(**dict.fromkeys(hooks, look))]

    assert_parity(Regression, callbacks=callbacks, accumulate_grad_batches=accumulate)
    for gradients in seen[1:]:
        assert_close(gradients, seen[0])


class LooksAtTheLast(Regression):
    """At the gradient of the step before."""

    def training_step(self, batch, batch_idx):
        norms = [
            0 if parameter.grad is None else parameter.grad.norm()
            for parameter in self.parameters()
        ]
        self.log("norm", sum(norms))
        return self.loss(batch) * (1 + sum(norms))


class ClipsItself(Regression):
    """An edit of `.data` leaves no trace."""

    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        for parameter in self.parameters():
            parameter.grad.data.clamp_(-0.01, 0.02)


class ZeroInPlace(Regression):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


HANDLES = [(LooksAtTheLast, None), (LooksAtTheLast, 0.05), (ClipsItself, None), (ZeroInPlace, None)]


@ACCUMULATE
@pytest.mark.parametrize(("make", "clip"), HANDLES)
def test_modules_that_handle_gradients(assert_parity, make, clip, accumulate):
    assert_parity(make, gradient_clip_val=clip, accumulate_grad_batches=accumulate)


def in_place(gradient):
    gradient.data.mul_(gradient).mul_(5)


def clamp_all(parameter):
    parameter.grad.data.clamp_(-0.01, 0.02)


def update(parameter):
    clamp_all(parameter)
    parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


HOOKS = {  # what is not linear in the gradient shows whether it is the whole batch's
    "clamp": ("register_hook", lambda gradient: gradient.clamp(-0.01, 0.02)),
    "in place": ("register_hook", in_place),
    "accumulated": ("register_post_accumulate_grad_hook", clamp_all),
    "makes the update itself": ("register_post_accumulate_grad_hook", update),
}


@ACCUMULATE
@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_weights(assert_parity, name, base, accumulate):
    """They are called once per batch."""
    register, hook = HOOKS[name]
    calls = []

    def counted(given):
        calls.append(1)
        return hook(given)

    def make():
        module = base()
        getattr(module.net[0].weight, register)(counted)
        return module

    kwargs = {} if base is Manual else {"accumulate_grad_batches": accumulate}
    assert_parity(make, check=name != "makes the update itself" or accumulate == 1, **kwargs)
    assert len(calls) == 2 * 8


def clamps(self, loss):
    """It finds the whole batch's gradient when `loss.backward()` is over."""
    loss.backward()
    for parameter in self.parameters():
        parameter.grad.data.clamp_(-0.01, 0.02)


def two_passes(self, loss):
    loss.backward(retain_graph=True)
    clamps(self, loss)


def scales(self, loss, *args, **kwargs):
    super(Regression, self).backward(loss * 0.5, *args, **kwargs)


def in_part(self, loss):
    """Leaves every third batch out, as for a loss that is not finite."""
    self.num_batches = getattr(self, "num_batches", 0) + 1
    if self.num_batches % 3:
        loss.backward()


def for_some(self, loss):
    loss.backward(inputs=list(self.net[0].parameters()))


BACKWARDS = [(clamps, 3), (two_passes, 3), (scales, 3), (in_part, 1)]


@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize(("backward", "accumulate"), BACKWARDS)
def test_a_backward_of_ones_own(assert_parity, base, backward, accumulate):
    kwargs = {} if base is Manual else {"accumulate_grad_batches": accumulate}
    assert_parity(type("Module", (base,), {"backward": backward}), **kwargs)


def puts_a_hook(self, batch, batch_idx):
    self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)
    return self.loss(batch)


def keeps_gradients_of_samples(self):
    """As Opacus' hooks leave them on weights."""

    def keep(layer, _, gradients):
        layer.weight.grad_sample = gradients[0]

    self.net[0].weight.grad_sample = None
    self.net[0].register_full_backward_hook(keep)


def by_grad(self, loss):
    params = list(self.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params, allow_unused=True)):
        param.grad = grad


REFUSED = {
    "by loss.backward() without": {"backward": by_grad},
    "A step has put a hook on a weight": {"training_step": puts_a_hook},
    "has put an attribute on a weight": {"on_fit_start": keeps_gradients_of_samples},
    "without inputs=": {"backward": for_some},
    "create_graph=True": {"backward": lambda self, loss: loss.backward(create_graph=True)},
}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("said", REFUSED)
def test_refused_in_one_line(train, said):
    with refused(said):
        train(type("Module", (Regression,), REFUSED[said]), 2)

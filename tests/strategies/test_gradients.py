"""Whoever looks at a gradient or edits it has the whole batch's: hooks, callbacks, clipping, `backward`."""

import pytest
import torch
from lightning.pytorch import Callback
from tiny_runs import Manual, Regression, assert_close, refused
from torch import nn
from torch.nn import functional as F

ACCUMULATE = pytest.mark.parametrize("accumulate", [1, 3])


@ACCUMULATE
@pytest.mark.parametrize("hooks", [["on_after_backward", "on_before_optimizer_step"], ["on_train_batch_end"]])
def test_callbacks_see_the_reduced_gradient(assert_parity, hooks, accumulate):
    """In every batch of an accumulation window, too."""
    seen = []

    class Look(Callback):
        def look(self, trainer, module, *_):
            seen[-1].extend(p.grad.clone() for p in module.parameters() if p.grad is not None)

        def on_fit_start(self, trainer, module):
            seen.append([])

    for hook in hooks:
        setattr(Look, hook, Look.look)
    assert_parity(Regression, callbacks=lambda: [Look()], accumulate_grad_batches=accumulate)
    for gradients in seen[1:]:
        assert_close(gradients, seen[0])


def test_what_was_not_used_has_no_gradient(train):
    """Else a weight decay would shrink it."""
    seen = []

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return F.mse_loss(self.net[2](self.net[1](self.net[0](batch[0]).detach())), batch[1]) if batch_idx else loss

        def on_before_optimizer_step(self, optimizer):
            seen.append([parameter.grad is None for parameter in self.parameters()])

    train(Module, 2)
    assert seen == ([[False] * 4] + [[True, True, False, False]] * 3) * 2


class LooksAtTheLast(Regression):
    def training_step(self, batch, batch_idx):
        norms = [0 if parameter.grad is None else parameter.grad.norm() for parameter in self.parameters()]
        self.log("norm", sum(norms))
        return self.loss(batch) * (1 + sum(norms))


@ACCUMULATE
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_that_looks_at_the_gradient_before(assert_parity, clip, accumulate):
    assert_parity(LooksAtTheLast, gradient_clip_val=clip, accumulate_grad_batches=accumulate)


class ClipsItself(Regression):
    """An edit of `.data` leaves no trace."""

    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        for parameter in self.parameters():
            parameter.grad.data.clamp_(-0.01, 0.02)


class ZeroInPlace(Regression):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


@ACCUMULATE
@pytest.mark.parametrize("make", [ClipsItself, ZeroInPlace])
def test_modules_that_handle_gradients(assert_parity, make, accumulate):
    assert_parity(make, accumulate_grad_batches=accumulate)


def in_place(gradient):
    gradient.data.mul_(gradient).mul_(5)


HOOKS = {  # what is not linear in the gradient shows whether it is the whole batch's
    "clamp": lambda gradient: gradient.clamp(-0.01, 0.02),
    "in place": in_place,
}


@ACCUMULATE
@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_weights(assert_parity, name, base, accumulate):
    """`register_hook`, once a batch."""
    calls = []

    def hook(gradient):
        calls.append(1)
        return HOOKS[name](gradient)

    def make():
        module = base()
        module.net[0].weight.register_hook(hook)
        return module

    assert_parity(make, **({} if base is Manual else {"accumulate_grad_batches": accumulate}))
    assert len(calls) == 2 * 8


@ACCUMULATE
@pytest.mark.parametrize("updates", [False, True])
def test_hooks_after_accumulation(assert_parity, updates, accumulate):
    """`register_post_accumulate_grad_hook`, which may make the update itself."""
    calls = []

    def hook(parameter):
        calls.append(1)
        parameter.grad.data.clamp_(-0.01, 0.02)
        if updates:
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

    def make():
        module = Regression()
        module.net[0].weight.register_post_accumulate_grad_hook(hook)
        return module

    assert_parity(make, accumulate_grad_batches=accumulate, check=not updates or accumulate == 1)
    assert len(calls) == 2 * 8


def test_hooks_that_a_step_puts_on_weights_are_refused(train):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)
            return self.loss(batch)

    with refused("A step has put a hook on a weight"):
        train(Module, 2)


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


@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize("backward", [clamps, two_passes, scales])
def test_a_backward_of_ones_own(assert_parity, base, backward):
    accumulate = {} if base is Manual else {"accumulate_grad_batches": 3}
    assert_parity(type("Module", (base,), {"backward": backward}), **accumulate)


@pytest.mark.parametrize("base", [Regression, Manual])
def test_a_backward_that_leaves_batches_out(assert_parity, base):
    class Module(base):
        num_batches = 0

        def backward(self, loss):
            self.num_batches += 1
            if self.num_batches % 3:
                loss.backward()

    assert_parity(Module)


def test_gradients_in_one_place(assert_parity):
    """Autograd gives views of one tensor to parameters that are added up."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.zeros(1, 3).double()) for _ in range(2))

        def loss(self, batch):
            return F.mse_loss(self.net(batch[0]) @ (self.a.t() + self.b.t()), batch[1][:, :1])

    assert_parity(Module)


def test_gradients_of_samples(train):
    """As Opacus' hooks leave them on weights."""

    def keep(layer, _, gradients):
        layer.weight.grad_sample = gradients[0]

    def on_fit_start(self):
        self.net[0].register_full_backward_hook(keep)

    with refused("has put an attribute on a weight"):
        train(type("Module", (Regression,), {"on_fit_start": on_fit_start}), 2)


def for_some(self, loss):
    loss.backward(inputs=list(self.net[0].parameters()))


def with_a_graph(self, loss):
    loss.backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(("backward", "said"), [(for_some, "without inputs="), (with_a_graph, "create_graph=True")])
def test_backwards_that_are_refused(train, backward, said):
    with refused(said):
        train(type("Module", (Regression,), {"backward": backward}), 2)

"""Whoever looks at gradients sees the reduced ones: clipping, callbacks, hooks, accumulation."""

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import optim

pytestmark = pytest.mark.slow


def hooked(Regression, hook=None, post_hook=None, **kwargs):
    """A module with a hook on the gradient of its first weight."""
    module = Regression(**kwargs)
    if hook is not None:
        module.net[0].weight.register_hook(hook)
    if post_hook is not None:
        module.net[0].weight.register_post_accumulate_grad_hook(post_hook)
    return module


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping(Regression, assert_parity, algorithm, accumulate):
    clipping = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    assert_parity(Regression, **clipping, accumulate_grad_batches=accumulate)


def test_accumulation_with_a_short_last_window(Regression, assert_parity):
    assert_parity(lambda: Regression(optimizer=lambda m: optim.AdamW(m.parameters(), 0.01)), accumulate_grad_batches=3)


@pytest.mark.parametrize("in_data", [False, True])
def test_custom_clipping(Regression, assert_parity, in_data):
    class Module(Regression):
        def configure_gradient_clipping(self, optimizer, *args, **kwargs):
            for parameter in self.parameters():  # an edit of .data leaves no trace
                (parameter.grad.data if in_data else parameter.grad).clamp_(-0.01, 0.02)

    assert_parity(Module)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "hooks",
    [["on_after_backward", "on_before_optimizer_step"], ["on_train_batch_end"], ["on_validation_batch_end"]],
)
def test_callbacks_see_the_reduced_gradient(Regression, assert_parity, hooks, accumulate):
    seen = []

    class Look(Callback):
        def look(self, trainer, module, *_):
            seen[-1].extend(parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None)

        def on_fit_start(self, trainer, module):
            seen.append([])

    for hook in hooks:
        setattr(Look, hook, Look.look)
    kwargs = {"val": True, "val_check_interval": 1} if hooks == ["on_validation_batch_end"] else {}
    assert_parity(Regression, callbacks=lambda: [Look()], accumulate_grad_batches=accumulate, **kwargs)
    for others in seen[1:]:
        assert len(others) == len(seen[0])
        assert len(others) > 0 or (hooks == ["on_validation_batch_end"] and accumulate == 1)  # set to None before
        for gradient, expected in zip(others, seen[0]):
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-13)


def test_gradients_of_a_window_so_far(Regression, assert_parity):
    class Module(Regression):
        norms = ()

        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = self.current_epoch == 1 and batch_idx == 1  # in the middle of one
            return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss):
        self.norms += tuple(float(p.grad.norm()) for p in self.parameters() if p.grad is not None)

    for hook in (None, on_before_backward):
        if hook:
            Module.on_before_backward = hook
        one, *others = assert_parity(Module, accumulate_grad_batches=3)
        assert len(one.norms) == (12 if hook else 0)  # of four parameters in three batches
        for module in others:
            torch.testing.assert_close(module.norms, one.norms, rtol=1e-10, atol=1e-13)
            for parameter, expected in zip(module.parameters(), one.parameters()):
                torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("edit", ["on_after_backward", "on_before_optimizer_step"])
def test_gradients_edited_in_data(Regression, assert_parity, edit):
    class Edit(Callback):
        def edit(self, trainer, module, *_):
            for parameter in module.parameters():
                parameter.grad.data.clamp_(-0.02, 0.01)

    setattr(Edit, edit, Edit.edit)
    assert_parity(Regression, callbacks=lambda: [Edit()])


HOOKS = {
    "mask": lambda gradient: gradient * (torch.arange(6, device=gradient.device) % 2),
    "clamp": lambda gradient: gradient.clamp(-0.01, 0.02),
    "square in place": lambda gradient: gradient.data.mul_(gradient).mul_(5) and None,
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_gradients(Regression, assert_parity, hook, accumulate):
    calls = []

    def counted(gradient):
        calls.append(1)
        if hook == "square in place":
            gradient.data.mul_(gradient).mul_(5)
            return None
        return HOOKS[hook](gradient)

    assert_parity(lambda: hooked(Regression, counted), accumulate_grad_batches=accumulate)
    assert len(calls) == 3 * 8  # once a batch


@pytest.mark.parametrize("accumulate", [1, 3])
def test_hooks_after_accumulation(Regression, assert_parity, accumulate):
    calls = []

    def clamp(parameter):
        calls.append(1)
        parameter.grad.data.clamp_(-0.01, 0.02)

    assert_parity(lambda: hooked(Regression, post_hook=clamp), accumulate_grad_batches=accumulate)
    assert len(calls) == 3 * 8


@pytest.mark.parametrize("accumulate", [1, 3])
def test_updates_made_by_hooks(Regression, assert_parity, accumulate):
    """They run without recording, as in a backward pass, and their gradients can be handed to numpy."""

    def with_decay(gradient):
        return gradient + 0.1 * module[0].net[0].weight

    def update(parameter):
        parameter.sub_(parameter.grad, alpha=0.1)
        assert np.isfinite(parameter.grad.cpu().numpy()).all()
        parameter.grad = None

    module = []

    def make():
        module[:] = [hooked(Regression, with_decay, update)]
        return module[0]

    # within a window replicas get what hooks have edited when the next step begins
    assert_parity(make, accumulate_grad_batches=accumulate, check=accumulate == 1)


@pytest.mark.parametrize("hook", [None, HOOKS["clamp"]])
def test_gradients_set_to_zero_in_place(Regression, assert_parity, hook):
    class Module(Regression):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    assert_parity(lambda: hooked(Module, hook))
    assert_parity(lambda: hooked(Module, hook), accumulate_grad_batches=3)


@pytest.mark.parametrize("hook", [None, HOOKS["clamp"]])
def test_gradients_never_set_to_zero(Regression, assert_parity, hook):
    class Module(Regression):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            pass

    assert_parity(lambda: hooked(Module, hook, optimizer=lambda m: optim.SGD(m.parameters(), 0.01)))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_skipped_steps(Regression, assert_parity):
    """A `training_step` may return None, also in the last batch of an accumulation window."""

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 2 else self.loss(batch)

    assert_parity(Module, accumulate_grad_batches=3)


def test_a_loss_in_a_dict(Regression, assert_parity):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return {"loss": loss, "prediction": self.net(batch[0]), "name": "x"}

    assert_parity(Module)


def test_second_order_gradients(Regression, assert_parity):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            X = batch[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.net(X).square().sum(), X, create_graph=True)
            return self.loss(batch) + gradient.square().mean()

    assert_parity(Module)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("num_passes", [1, 2])
def test_backward_of_ones_own(Regression, assert_parity, num_passes, accumulate):
    """It finds the whole batch's gradient when `loss.backward()` is over."""

    class Module(Regression):
        def backward(self, loss):
            for n in range(num_passes):
                loss.backward(retain_graph=n == 0)
                for parameter in self.parameters():
                    parameter.grad.data.clamp_(-0.01, 0.02)

    assert_parity(Module, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_backward_of_ones_own_for_some_parameters(Regression, assert_parity, accumulate):
    class Module(Regression):
        def backward(self, loss):
            loss.backward(inputs=list(self.net[0].parameters()), retain_graph=True)
            loss.backward(inputs=self.net[2].bias)

    one, *_ = assert_parity(Module, accumulate_grad_batches=accumulate)
    assert one.net[2].bias.grad is not None and one.net[2].weight.grad is None


def test_hooks_in_the_step_of_a_run_that_is_over(Regression, train, make_loader):
    class Module(Regression):
        def backward(self, loss):
            loss.backward()

        def on_before_backward(self, loss):
            pass

    module = train(Module, k=2)
    module.zero_grad()
    module.trainer.strategy.backward(module.loss(next(iter(make_loader()))), None)
    assert module.net[0].bias.grad.count_nonzero()


def test_gradients_with_a_graph_are_warned_of(Regression, train, recwarn):
    class Module(Regression):
        def backward(self, loss):
            loss.backward(create_graph=True)

        def on_train_batch_end(self, *_):
            self.zero_grad()  # or the graph is never freed

    train(Module, check=False)
    assert not [warning for warning in recwarn if "first replica" in str(warning.message)]
    train(Module, 2, check=False)
    assert [warning for warning in recwarn if "finds the first replica's loss alone" in str(warning.message)]

"""Forward hooks that keep what they see on the module: on the replica's, whatever they are written as."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F


class Extractor:
    """Keeps outputs itself, and knows no module."""

    def __init__(self) -> None:
        self.features: list[Any] = []

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.features.append(output)

    keep = __call__


HOOKS = {
    "method": lambda module: module.keep,
    "partial": lambda module: partial(module.keep_as, "feature"),
    "partial with the list": lambda module: partial(add_to, module.features),
    "local function": lambda module: lambda layer, args, output: module.features.append(output),
    "object": lambda module: module.extractor,
    "method of an object": lambda module: module.extractor.keep,
}


def add_to(features, layer, args, output):
    features.append(output)


@pytest.mark.parametrize("place", ["__init__", "on_train_epoch_start"])
@pytest.mark.parametrize("name", HOOKS)
def test_features_of_hooks(Regression, assert_parity, name, place):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.features, self.extractor = [], Extractor()
            self.register("__init__")

        def register(self, here):
            if here == place:
                self.handle = self.net[0].register_forward_hook(HOOKS[name](self))

        def keep(self, layer, args, output):
            self.features.append(output)

        def keep_as(self, key, layer, args, output):
            assert key == "feature"
            self.keep(layer, args, output)

        def on_train_epoch_start(self):
            self.register("on_train_epoch_start")

        def on_train_epoch_end(self):
            if place == "on_train_epoch_start":
                self.handle.remove()

        def training_step(self, batch, batch_idx):
            X, y = batch
            prediction = self.net(X)
            [feature] = self.features + self.extractor.features
            self.features.clear()
            self.extractor.features.clear()
            return F.mse_loss(prediction, y) + feature.square().mean()

    assert_parity(Module)


def test_a_hook_with_keywords_that_changes_the_input(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.net[0].register_forward_pre_hook(self.shift, with_kwargs=True)

        def shift(self, layer, args, kwargs):
            return (args[0] + self.mean,), kwargs

        def training_step(self, batch, batch_idx):
            self.mean = batch[0].mean(1, keepdim=True)  # one for every sample of the shard
            return self.loss(batch)

    assert_parity(Module)


def test_hooks_of_replicas_are_their_own(Regression, train):
    """What a replica registers in a step is gone in the next."""

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            assert not self.net[0]._forward_hooks
            self.handle = self.net[0].register_forward_hook(lambda *_: None)
            return self.loss(batch)

        def on_train_batch_end(self, *_):
            self.handle.remove()

    assert torch.isfinite(train(Module, 3).net[0].weight).all()


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_epoch_start"])
def test_backward_hooks_that_change_gradients(Regression, assert_parity, hook, pre):
    class Module(Regression):
        def on_fit_start(self):
            if hook == "on_fit_start":
                self.register()

        def on_train_epoch_start(self):
            if hook == "on_train_epoch_start" and self.current_epoch == 1:
                self.register()

        def register(self):
            if pre:
                self.net[1].register_full_backward_pre_hook(lambda layer, gradients: (gradients[0] * 0.5,))
            else:
                self.net[1].register_full_backward_hook(lambda layer, inputs, gradients: (inputs[0] * 0.5,))

    assert_parity(Module)

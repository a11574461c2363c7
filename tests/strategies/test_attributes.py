"""Numbers, tensors and objects that hooks keep on the module, in whatever they are nested: all replicas see them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch


class Settings:
    def __init__(self, factor: float) -> None:
        self.factor = factor


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"])
def test_objects_and_dicts_set_in_hooks(Regression, assert_parity, hook):
    def set_all(self, *_):
        step = self.global_step
        self.by_name = {"factor": 1 + step / 10, "more": {"shift": [step]}}
        self.settings, self.pair, self.names = Settings(1.5), (2, 3), {"loss"}
        self.weights = torch.full((3,), 1.0 + step, dtype=torch.float64, device=self.device)

    def training_step(self, batch, batch_idx):
        factor = self.by_name["factor"] * self.settings.factor * self.pair[1] * len(self.names)
        X, y = batch
        return ((self.net(X) - y).square() * self.weights).mean() * factor + self.by_name["more"]["shift"][0]

    assert_parity(type("Module", (Regression,), {hook: set_all, "training_step": training_step}))


def test_dicts_changed_in_place(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.schedule = {"factors": [1.0], "of": {"loss": 1.0}}

        def on_train_batch_start(self, *_):
            self.schedule["factors"][0] *= 1.1
            self.schedule["of"]["loss"] += 0.5

        def training_step(self, batch, batch_idx):
            return self.loss(batch) * self.schedule["factors"][0] * self.schedule["of"]["loss"]

    assert_parity(Module)


def test_a_list_inside_itself(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.notes = [1.0, {"net": self.net}, None]
            self.notes[1]["notes"] = self.notes

        def on_train_batch_start(self, *_):
            self.notes[0] *= 1.1

        def training_step(self, batch, batch_idx):
            notes = self.notes[1]["notes"]
            assert notes is self.notes and notes[1]["net"] is self.net
            self.notes[2] = self.loss(batch).detach()
            return self.loss(batch) * notes[0]

    assert_parity(Module)


def test_what_hooks_change_in_objects(Regression, assert_parity):
    """Numbers, tensors, arrays, lists, dicts and objects in objects."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            one = torch.ones(1, dtype=torch.float64)
            self.config = SimpleNamespace(
                loss=SimpleNamespace(factor=1.0), tensor=one, array=np.ones(1), values=[1.0], by_name={"a": one.clone()}
            )
            self.array = np.ones(1)

        def on_fit_start(self):
            self.config.tensor = self.config.tensor.to(self.device)
            self.config.by_name["a"] = self.config.by_name["a"].to(self.device)

        def on_train_batch_start(self, batch, batch_idx):
            config = self.config
            if batch_idx % 2:
                config.loss.factor *= 1.1
                config.tensor.mul_(1.1)
                config.values[0] *= 1.1
            else:
                config.array *= 1.1
                self.array *= 1.1
                config.by_name["a"] = config.by_name["a"] * 1.1
            if self.current_epoch == 1 and batch_idx == 0:
                config.loss = SimpleNamespace(factor=2.0)

        def training_step(self, batch, batch_idx):
            config = self.config
            factors = [config.loss.factor, config.tensor, *config.values, config.by_name["a"]]
            factors += [float(config.array[0]), float(self.array[0])]
            return self.loss(batch) * math.prod(factors)

    assert_parity(Module)


def test_tuples_that_have_no_length(Regression, assert_parity):
    class Irreps(tuple):  # as e3nn's
        def __len__(self):
            raise NotImplementedError

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.irreps = Irreps([Irreps([1, 2]), 3])

        def training_step(self, batch, batch_idx):
            return self.loss(batch) * self.irreps[1]

    assert_parity(Module)

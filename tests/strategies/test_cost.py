"""The cost of a step beside the model's: memory that stays, and copies that few steps need."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from tiny_runs import Manual, Regression, a_loader
from torch import nn

from lightning_mgpu.strategies import replicas
from lightning_mgpu.strategies.replicas import Replicas
from lightning_mgpu.strategies.updates import Updates


def adamw(module):
    return torch.optim.AdamW(module.parameters(), 0.01)


@pytest.mark.parametrize("base", [Regression, Manual])
def test_copies_go_when_training_ends(trainer_on, base):
    """Not when Python's collector runs: the test that follows makes copies of its own."""
    held = []

    def look(trainer, *_):
        sets = trainer.strategy.replicas.parameter_sets.values()
        copies = [copy for _, *others in sets for copy in others]
        held[:] = [
            weakref.ref(each) for copy in copies for each in (copy, copy.grad) if each is not None
        ]

    trainer = trainer_on(2, callbacks=[LambdaCallback(on_train_batch_end=look)])
    gc.collect()
    gc.disable()
    try:
        trainer.fit(base(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), adamw), a_loader(8, 24))
        alive = [each for each in held if each() is not None]
    finally:
        gc.enable()
    assert len(held) >= 4
    assert not alive


class Looks(Regression):
    def training_step(self, batch, batch_idx):
        assert len(self.optimizers().optimizer.state) == (4 if self.global_step else 0)
        return self.loss(batch)


@pytest.mark.parametrize(
    ("make", "hook", "copies"), [(Regression, True, 0), (Manual, False, 0), (Looks, True, 12)]
)
def test_optimizer_states_are_copied_for_steps_that_look_at_them(
    train, monkeypatch, make, hook, copies
):
    """In twelve steps of two replicas, with a user's hook: the first replica's update is copied."""
    asked, copy_of_state = [], Updates._copy_of_state

    def counted(self, state, i):
        asked.append(i)
        return copy_of_state(self, state, i)

    monkeypatch.setattr(Updates, "_copy_of_state", counted)
    callback = LambdaCallback(on_train_batch_end=lambda *_: None)
    callbacks = [callback] if hook else []
    train(
        lambda: make(optimizer=adamw),
        2,
        callbacks=lambda: callbacks,
        loader=lambda: a_loader(8, 48),
    )
    assert len(asked) == copies


class Holder(Regression):
    """Replicas have states of these attributes, beside layers."""

    def __init__(self):
        super().__init__(nn.Linear(6, 3), adamw)
        self.seen, self.count, self.hidden = {"steps": [0], "set": set()}, 0, torch.zeros(3)
        self.large, self.options = dict.fromkeys(range(1001), 0), SimpleNamespace(rate=1.0)


def test_the_structure_is_found_once_where_steps_leave_it(train, monkeypatch):
    class Counts(Holder):
        def training_step(self, batch, batch_idx):
            self.count += 1
            self.hidden = batch[0].sum(0)
            self.seen["steps"].append(batch_idx)
            return self.loss(batch)

    walks, walk = [], replicas.find_layers
    monkeypatch.setattr(replicas, "find_layers", lambda *args: walks.append(args) or walk(*args))
    train(Counts, 2)
    assert len(walks) == 2  # from the module on, and from what no layer knows


CHANGES = {
    "nothing": lambda module: None,
    "a number": lambda module: setattr(module, "count", 1),
    "a tensor": lambda module: setattr(module, "hidden", torch.ones(3)),
    "an item": lambda module: module.seen["steps"].append(1),
    "a list": lambda module: setattr(module, "found", []),
    "another list": lambda module: module.seen.update(steps=[0]),
    "a list in a namespace": lambda module: setattr(module.options, "rates", []),
    "no tensor any more": lambda module: setattr(module, "hidden", None),
    "a dict that was large": lambda module: module.large.clear(),
    "a set that is large now": lambda module: module.seen["set"].update(range(1001)),
    "a layer": lambda module: module.net.append(nn.ReLU()),
    "another weight": lambda module: setattr(module.net[0], "weight", nn.Parameter(torch.ones(3))),
    "no bias": lambda module: setattr(module.net[0], "bias", None),
    "a buffer": lambda module: module.net.register_buffer("mean", torch.zeros(())),
    "another namespace": lambda module: setattr(module, "__dict__", dict(vars(module))),
}
UNSEEN = ["nothing", "a number", "a tensor", "an item"]


@pytest.mark.parametrize("change", CHANGES)
def test_the_structure_is_found_again_where_it_changed(change, monkeypatch):
    module = Holder()
    module.net = nn.Sequential(module.net)
    found = Replicas(module, [torch.device("cpu")] * 2, all_seeded=False)
    found.find([], [])
    walks, walk = [], replicas.find_layers
    monkeypatch.setattr(replicas, "find_layers", lambda *args: walks.append(args) or walk(*args))
    CHANGES[change](module)
    found.find([], [])
    assert bool(walks) == (change not in UNSEEN)
    assert found.state.is_as_found()

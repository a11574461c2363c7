"""What a step costs beside the model: memory that stays, and copies that hardly any step needs."""

import gc
import weakref

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from tiny_runs import Manual, Regression, a_loader
from torch import nn

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

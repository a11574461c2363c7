"""Random numbers of the replicas, and shares of the batch: by hand, or by the devices' speed."""

from types import SimpleNamespace

import pytest
import torch
from tiny_runs import MANUAL, Manual, Regression, a_loader, assert_close, make_strategy, same_bits
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_mgpu.strategies import ManualAllreduceStrategy, auto_split


@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize(
    "kwargs", [{}, {"sync_batchnorm": True, "limit_train_batches": 3}], ids=["", "sync"]
)
def test_masks_can_be_repeated_and_differ(train, kwargs, base):
    """The masks of all steps and replicas. The first replica draws the same as one device."""

    class Module(base):
        def __init__(self):
            layers = [nn.BatchNorm1d(32)] if kwargs else []
            super().__init__(
                nn.Sequential(nn.Linear(6, 32), *layers, nn.Dropout(0.5), nn.Linear(32, 3))
            )
            self.masks = []

        def loss(self, batch):
            self.masks.append(
                self.net[-2](torch.ones(4, 32, device=self.device)).ne(0).flatten().tolist()
            )
            return super().loss(batch)

    one, *runs = (train(Module, k, **kwargs) for k in (1, 3, 3))
    assert same_bits(*runs) and runs[0].masks == runs[1].masks
    masks = [tuple(mask) for mask in runs[0].masks]
    assert len(masks) == (18 if kwargs else 20) and len(set(masks)) == len(masks)
    assert masks[0] == tuple(one.masks[0])


@pytest.mark.parametrize("hook", ["training_step", "validation_step"])
def test_masks_differ_from_step_to_step_without_batch_idx(train, hook):
    """Lightning does not give it to a step that does not name it."""
    masks = []

    def step(self, batch):
        masks.append(torch.rand(3).tolist())
        return self.loss(batch)

    module = type("Module", (Regression,), {hook: step})
    train(module, 3, val=hook == "validation_step", num_sanity_val_steps=0)
    assert masks and all(masks.count(mask) == 1 for mask in masks)


def test_the_global_generator_goes_on_as_on_one_device(train):
    """However much the other replicas draw."""
    drawn = []

    class Module(Regression):
        def loss(self, batch):
            torch.rand(3)
            return super().loss(batch)

        def on_train_batch_end(self, *_):
            drawn.append(torch.rand(3).tolist())

    train(Module), train(Module, 3)
    assert drawn[:8] == drawn[8:]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("base", [Regression, Manual])
def test_activation_checkpointing_replays_the_masks(train, use_reentrant, base):
    """In the backward pass, of the right replica: nothing changes but memory."""

    class Plain(base):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)))

    class Checkpointed(Plain):
        def loss(self, batch):
            X = batch[0].clone().requires_grad_()
            return F.mse_loss(checkpoint(self.net, X, use_reentrant=use_reentrant), batch[1])

    plain, checkpointed = (train(make, 3) for make in (Plain, Checkpointed))
    torch.testing.assert_close(
        checkpointed.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize("split", [[3.0, 1.0], [0.1, 0.9]])
def test_shares_by_hand_do_not_change_the_training(assert_parity, split, base):
    """The last batch's only sample goes to the first replica, which never goes without."""
    assert_parity(base, (2,), strategy=lambda: make_strategy(MANUAL, split=split))


def test_the_faster_device_gets_more(train, engine, monkeypatch):
    """By a clock that moves only by what a step says it takes. The first step does not count."""
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(auto_split, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    sizes = []

    class Timed(Regression):
        def training_step(self, batch, batch_idx):
            i = (
                self.trainer.strategy.replicas.current
                if hasattr(self.trainer.strategy, "replicas")
                else 0
            )
            clock.seconds += (
                len(batch[0]) * (4 if i else 1) * (1000 if batch_idx == 0 and i == 0 else 1)
            )
            sizes.append(len(batch[0]))
            return self.loss(batch)

    loader = lambda: a_loader(20, 200)  # noqa: E731
    one = train(Timed, loader=loader, max_epochs=1)
    sizes.clear()
    two = train(Timed, 2, strategy=make_strategy(engine, split="auto"), loader=loader, max_epochs=1)
    assert sizes[:2] == [10, 10] and sizes[-2:] == [16, 4]
    assert_close(two.state_dict(), one.state_dict())


def test_batches_too_small_to_time_all_keep_even_shares():
    split = auto_split.AutoSplit()
    for _ in range(auto_split.NUM_TIMED + 2):
        with split.timed(0, torch.device("cpu")):
            pass
        assert split.end_step([1.0, 1.0]) == [1.0, 1.0]


@pytest.mark.parametrize("is_seeded", [False, True])
def test_workers_draw_the_same_in_every_process(monkeypatch, is_seeded):
    """What they draw in a run of one process."""
    monkeypatch.setenv("PL_SEED_WORKERS", str(int(is_seeded)))
    strategy = ManualAllreduceStrategy(parallel_devices=["cpu", "cpu"])
    strategy.num_processes = 2
    function = strategy.process_dataloader(a_loader()).worker_init_fn
    assert function.keywords == {"rank": 0} if is_seeded else function is None

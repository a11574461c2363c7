"""What else the Trainer offers: profilers, several runs on one Trainer, lockstep."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import seed_everything
from tiny_runs import (
    IS_SIMULATED,
    Manual,
    Regression,
    a_loader,
    assert_close,
    make_strategy,
    one_cycle,
    relative_error,
    same_bits,
)
from torchmetrics import MeanSquaredError


def test_several_runs_on_one_trainer(trainer_on):
    """Another stage, more epochs with new optimizers, another module."""
    results = []
    for k in (1, 2):
        seed_everything(1, verbose=False)
        module, other, loader, trainer = Regression(), Regression(), a_loader(), trainer_on(k)
        trainer.validate(module, loader, verbose=False)
        trainer.fit(module, loader, loader)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader, loader)
        trainer.fit_loop.max_epochs = 4
        trainer.fit(other, loader)
        losses = [
            trainer.validate(each, loader, verbose=False)[0]["val_loss"] for each in (module, other)
        ]
        results.append([*module.parameters(), *other.parameters(), losses])
    assert_close(results[1], results[0])


def test_after_a_run(train, tmp_path):
    """A Trainer is pickled and copied; a step after the run is the module's; no replica is left."""
    kept = []

    class Module(Regression):
        def on_train_end(self):
            sets = self.trainer.strategy.replicas.parameter_sets
            kept.extend(map(weakref.ref, next(iter(sets.values()))[1:]))

    module = train(Module, 2, check=False)
    trainer = module.trainer
    gc.collect()
    assert [each() for each in kept] == [None]
    assert not any(parameter._backward_hooks for parameter in module.parameters())
    weight, batch = (
        module.net[0].weight.detach().clone(),
        [part.to(module.device) for part in next(iter(a_loader()))],
    )
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    outputs = loop.run(trainer.optimizers[0], 0, {"batch": batch, "batch_idx": 0})
    assert outputs["loss"] > 0 and not torch.equal(weight, module.net[0].weight)
    assert copy.deepcopy(trainer).global_step == trainer.global_step
    trainer = train(Regression, 2, check=False).trainer  # a class in a function cannot be pickled
    torch.save(trainer, tmp_path / "trainer.pt")
    strategy = torch.load(tmp_path / "trainer.pt", weights_only=False).strategy
    assert [wrapper.optimizer for wrapper in strategy._lightning_optimizers] == strategy.optimizers


@pytest.mark.parametrize("base", [Regression, Manual])
def test_lockstep_changes_nothing(train, engine, base):
    """The option: the same bits as in turns, and logged values."""
    turns, locked = (
        train(base, 3, make_strategy(engine, lockstep=option)) for option in (False, True)
    )
    assert same_bits(turns, locked)


PLACES = [["cpu", "gpu:0"], ["gpu:0", "cpu"], ["gpu:0", "gpu:0"]]


@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_cpu_and_gpu_together(train, engine, places, base):
    """Metrics, and attributes set by a hook, follow their replica."""
    gpu = "sim" if IS_SIMULATED else "cuda"
    if not IS_SIMULATED and not torch.cuda.is_available():
        pytest.skip("needs a GPU, or the plugin tests.simulated.devices")

    class Module(base):
        def __init__(self):
            super().__init__()
            self.metric, self.scale = MeanSquaredError(), SimpleNamespace(by=2.0)
            self.weights = torch.arange(1.0, 4.0, dtype=torch.float64)

        def on_fit_start(self):
            self.weights = self.weights.to(self.device)

        def loss(self, batch):
            Z = self.net(batch[0])
            value = self.metric(Z.detach(), batch[1])
            assert value.isfinite()  # the shard's
            self.log("metric", value, on_epoch=True)
            return ((Z - batch[1]).square() * self.weights * self.scale.by).mean()

    devices = [place.replace("gpu", gpu) for place in places]
    strategy = make_strategy(engine, parallel_devices=devices)
    accelerator = "gpu" if devices[0] == "cuda:0" else "cpu"
    # one device of the Trainer's: a machine with one GPU has no more, and the strategy has a list
    one, two = train(Module), train(Module, 1, strategy, check=False, accelerator=accelerator)
    assert relative_error(two, one) < 1e-10
    assert_close(two.trainer.callback_metrics, one.trainer.callback_metrics, 1e-6)


@pytest.mark.skipif(not IS_SIMULATED, reason="needs -p tests.simulated.devices")
@pytest.mark.parametrize("places", [["cpu", "sim:0"], ["sim:0", "cpu"]], ids=str)
def test_a_gpu_that_starts_first_is_not_the_first_replica(train, engine, places):
    """Rates are those of this step, and what replicas put into a dict is all there."""

    class Module(Regression):
        def __init__(self):
            super().__init__(optimizer=one_cycle)
            self.seen = {}

        def training_step(self, batch, batch_idx):
            group = self.optimizers().param_groups[0]
            assert all(any(p is q for q in self.parameters()) for p in group["params"])
            return self.loss(batch) * group["lr"] * 10

        def validation_step(self, batch, batch_idx):
            self.seen.update(dict.fromkeys(batch[1][:, 0].tolist()))

    kwargs = {"val": True, "max_epochs": 1, "loader": lambda: a_loader(8, 24)}
    one, two = (
        train(Module, **kwargs),
        train(Module, 1, make_strategy(engine, parallel_devices=places), **kwargs),
    )
    assert relative_error(two, one) < 1e-10
    assert len(two.seen) == len(one.seen) == 24

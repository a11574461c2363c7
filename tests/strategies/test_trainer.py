"""What else the Trainer offers: tuning, profilers, limits, several runs on one Trainer, Lightning's own demos."""

import copy
import threading

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
    RandomDataset,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.tuner import Tuner
from torch import nn, optim
from torch.utils.data import DataLoader


@pytest.mark.parametrize("kind", [BoringModel, ManualOptimBoringModel])
def test_boring_modules(make_trainer, kind, engine):
    results = []
    for k in (1, 2):
        seed_everything(1, verbose=False)
        module = kind()
        trainer = make_trainer(
            devices=k, strategy=engine if k > 1 else "auto", limit_train_batches=5, num_sanity_val_steps=2
        )
        trainer.fit(module, datamodule=BoringDataModule())
        trainer.validate(module, datamodule=BoringDataModule(), verbose=False)
        trainer.test(module, datamodule=BoringDataModule(), verbose=False)
        predictions = trainer.predict(module, datamodule=BoringDataModule())
        results.append([*module.parameters(), *predictions])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)  # float32


def test_demo_module(make_trainer, engine):
    results = []
    for k in (1, 2):
        seed_everything(1, verbose=False)
        module = DemoModel()
        trainer = make_trainer(devices=k, strategy=engine if k > 1 else "auto", max_steps=5)
        trainer.fit(module, DataLoader(RandomDataset(32, 21), 4))
        results.append(list(module.parameters()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"fast_dev_run": 2},
        {"overfit_batches": 2},
        {"limit_train_batches": 0.5},
        {"max_steps": 5, "max_epochs": -1},
        {"num_sanity_val_steps": 2, "val": True},
        {"val_check_interval": 2, "val": True},
        {"reload_dataloaders_every_n_epochs": 1},
        {"detect_anomaly": True},
        {"profiler": "simple", "logger": True},
        {"use_distributed_sampler": True},
        {"accumulate_grad_batches": 2, "max_steps": 3},
        {"inference_mode": False, "val": True},
        {"barebones": False, "deterministic": True},
    ],
    ids=str,
)
def test_settings(Regression, assert_parity, kwargs):
    assert_parity(Regression, (2,), **kwargs)
    torch.use_deterministic_algorithms(False)


def test_callbacks_that_watch(Regression, train, tmp_path):
    def run(k):
        folder = tmp_path / str(k)
        early = EarlyStopping("val_loss", patience=1, min_delta=0.05)
        best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)
        logger = CSVLogger(folder, flush_logs_every_n_steps=1)
        module = train(
            lambda: Regression(optimizer=configure),
            k,
            callbacks=lambda: [early, best, LearningRateMonitor("step", log_momentum=True)],
            val=True,
            max_epochs=8,
            logger=logger,
            enable_checkpointing=True,
            log_every_n_steps=1,
        )
        saved = sorted(path.name for path in folder.glob("*.ckpt"))
        rates = [line.split(",")[2:4] for line in (folder / "lightning_logs/version_0/metrics.csv").open()]
        return module.trainer.current_epoch, float(best.best_model_score), saved, rates

    def configure(module):
        optimizer = optim.SGD(module.parameters(), 0.1, momentum=0.9)
        return [optimizer], [{"scheduler": optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), "interval": "step"}]

    one, two = run(1), run(2)
    assert (two[0], two[2], two[3]) == (one[0], one[2], one[3])
    assert two[1] == pytest.approx(one[1], rel=1e-10)
    assert one[0] < 8  # stopped


def test_learning_rate_finder(make_trainer, make_loader, Regression, EqualReplicas, engine):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.lr = 0.1

        def configure_optimizers(self):
            return optim.SGD(self.parameters(), self.lr, momentum=0.9)

    found, weights = [], []
    for k in (1, 2):
        seed_everything(1, verbose=False)
        module = Module()
        trainer = make_trainer(devices=k, strategy=engine if k > 1 else "auto", max_epochs=2)
        finder = Tuner(trainer).lr_find(module, make_loader(), num_training=20, early_stop_threshold=None)
        found.append((finder.results["loss"], finder.suggestion(skip_begin=2, skip_end=1), module.lr))
        trainer.callbacks.extend([EqualReplicas()] if k > 1 else [])
        trainer.fit(module, make_loader())
        weights.append(list(module.parameters()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-9)
    assert found[1][1:] == pytest.approx(found[0][1:], rel=1e-10)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_batch_size_finder(make_trainer, make_loader, Regression, engine):
    class Module(Regression):
        batch_size = 2

        def train_dataloader(self):
            return make_loader(self.batch_size)

        val_dataloader = train_dataloader

    found = []
    for k in (1, 2):
        seed_everything(1, verbose=False)
        module = Module()
        trainer = make_trainer(devices=k, strategy=engine if k > 1 else "auto", limit_val_batches=0)
        tuner = Tuner(trainer)
        found.append(tuner.scale_batch_size(module, mode="power", max_trials=2, steps_per_trial=2))
        trainer.fit(module)
        found.append(module.net[0].weight.detach())
    assert found[0] == found[2]  # the global batch
    torch.testing.assert_close(found[3], found[1], rtol=1e-10, atol=1e-13)


def test_several_runs_on_one_trainer(make_trainer, make_loader, Regression, EqualReplicas, engine):
    results = []
    for k in (1, 2):
        seed_everything(1, verbose=False)
        module, loader = Regression(), make_loader()
        checks = [EqualReplicas()] if k > 1 else []
        trainer = make_trainer(devices=k, strategy=engine if k > 1 else "auto", callbacks=checks)
        trainer.validate(module, loader, verbose=False)
        trainer.fit(module, loader, loader)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader, loader)  # goes on with new optimizers
        other = Regression()
        trainer.fit_loop.max_epochs = 4
        trainer.fit(other, loader)
        losses = [trainer.validate(each, loader, verbose=False)[0]["val_loss"] for each in (module, other)]
        results.append([*module.parameters(), *other.parameters(), torch.tensor(losses)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-13)
    assert checks[0].num_steps == 4 * 4


def test_a_run_after_a_failed_one(make_trainer, make_loader, Regression, EqualReplicas, engine):
    class Failing(Regression):
        def on_after_backward(self):
            if self.trainer.global_step == 2:
                raise ArithmeticError

    module = Failing()
    trainer = make_trainer(devices=2, strategy=engine, callbacks=[EqualReplicas()])
    with pytest.raises(ArithmeticError):
        trainer.fit(module, make_loader())
    assert not any(parameter._backward_hooks for parameter in module.parameters())
    make_trainer(devices=2, strategy=engine, callbacks=[EqualReplicas()]).fit(Regression(), make_loader())


def test_compiled_modules_are_refused(make_trainer, make_loader, Regression, engine):
    trainer = make_trainer(devices=2, strategy=engine)
    with pytest.raises(RuntimeError, match="compiled model is incompatible with the current strategy") as info:
        trainer.fit(torch.compile(Regression()), make_loader())
    assert "\n" not in str(info.value)


@pytest.mark.slow
def test_compiled_submodules(Regression, assert_parity):
    def make():
        module = Regression()
        module.net = torch.compile(module.net, backend="aot_eager")
        return module

    assert_parity(make, (2,))


def test_a_batch_that_cannot_be_split(make_trainer, make_loader, Regression, assert_parity):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            X = torch.full((2, 6), float(batch), dtype=torch.float64, device=self.device)
            return self.net(X).square().mean()

    assert_parity(Module, (2,), loader=[1.0, 2.0, 3.0])


def test_other_modules_inside(Regression, assert_parity):
    """A LightningModule inside of another one logs, and finds its trainer."""

    class Inner(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 6)

        def forward(self, X):
            assert self.trainer.training
            return self.net(X)

    class Outer(Regression):
        def __init__(self):
            super().__init__()
            self.inner = Inner().double()

        def training_step(self, batch, batch_idx):
            return self.loss([self.inner(batch[0]), batch[1]])

    assert_parity(Outer)


def test_trainer_can_be_pickled(make_trainer, engine, tmp_path):
    """After a fit, by `torch.save(trainer)`; its optimizers are wrapped anew when it is loaded."""
    trainer = make_trainer(devices=2, strategy=engine, limit_train_batches=2, limit_val_batches=0)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 8), 4))
    torch.save(trainer, tmp_path / "trainer.pt")
    strategy = torch.load(tmp_path / "trainer.pt", weights_only=False).strategy
    assert [wrapper.optimizer for wrapper in strategy._lightning_optimizers] == strategy.optimizers


def test_a_trainer_is_copied_after_a_run(Regression, make_trainer, make_loader, engine):
    trainer = make_trainer(devices=2, strategy=engine, max_steps=2)
    trainer.fit(Regression(), make_loader())
    assert copy.deepcopy(trainer).global_step == 2


@pytest.mark.parametrize("own", [False, True])
def test_actions_profiled_in_a_step_count_once(Regression, train, make_loader, own):
    """Under a profiler that knows no threads."""
    both = threading.Barrier(2, timeout=20)
    profiler = SimpleProfiler()

    class Profiled(Regression):
        def training_step(self, batch, batch_idx):
            with (self.profiler if own else self.trainer.profiler).profile("mine"):
                if batch_idx > 0:  # the first runs in turns
                    both.wait()
                return self.loss(batch)

    def make():
        module = Profiled()
        module.profiler = profiler
        return module

    train(make, 2, loader=make_loader(num_samples=16), max_epochs=3, profiler=profiler)
    assert len(profiler.recorded_durations["mine"]) == 3 * 2


def test_a_step_prints_once(Regression, train, make_loader, capsys):
    class Prints(Regression):
        def training_step(self, batch, batch_idx):
            self.print("batch", batch_idx)
            return self.loss(batch)

    train(Prints, 2, loader=make_loader(num_samples=16), max_epochs=1)
    assert [line for line in capsys.readouterr().out.splitlines() if "batch" in line] == ["batch 0", "batch 1"]

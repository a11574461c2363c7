"""Batches, outputs, hooks, callbacks and predictions: over replicas what they are on one device."""

import copy
from collections import namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import SumMetric

import lightning_mgpu.strategies  # noqa: F401 (registers them)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

Pair = namedtuple("Pair", "X y")


@pytest.fixture
def trainer_on(trainer_on: Any) -> Any:
    return partial(trainer_on, max_epochs=2, num_sanity_val_steps=2)


def data(num_samples: int = 11, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(X, X.sum(1).sin())


def loader(num_samples: int = 11, batch_size: int = 4, **kwargs: Any) -> DataLoader:
    """Batches of 4, 4 and 3 samples."""
    return DataLoader(data(num_samples), batch_size, **kwargs)


class Regression(LightningModule):
    """`unpack` finds (X, y) in a batch."""

    def __init__(self, unpack: Callable[[Any], tuple[Tensor, Tensor]] = lambda batch: batch) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.unpack = unpack
        self.num_samples = SumMetric().set_dtype(torch.float64)

    def loss(self, batch: Any) -> Tensor:
        X, y = self.unpack(batch)
        return F.mse_loss(self.net(X)[:, 0], y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", loss := self.loss(batch))
        self.num_samples.update(torch.tensor(float(len(self.unpack(batch)[0]))))
        self.log("num_samples", self.num_samples)
        return loss

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.net(self.unpack(batch)[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def assert_equal(a: Any, b: Any) -> None:
    """Of one type and shape, with numbers equal up to the order of summation."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b)
        for item, other in zip(a, b):
            assert_equal(item, other)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-10)
    else:
        assert type(a) is type(b) and (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)


def fitted(
    trainer_on: Any,
    k: int,
    make: Callable[[], LightningModule],
    loaders: Callable[[], Any],
    *callbacks: Callback,
    **kw: Any,
) -> Any:
    seed_everything(0, verbose=False)
    trainer, module = trainer_on(k, callbacks=list(callbacks), **kw), make()
    made = loaders()
    if isinstance(made, LightningDataModule):
        trainer.fit(module, datamodule=made)
    else:
        trainer.fit(module, made, loaders())
    return module.state_dict(), {name: float(value) for name, value in trainer.callback_metrics.items()}, trainer


def assert_fits_alike(
    trainer_on: Any, make: Callable[[], LightningModule], loaders: Callable[[], Any], **kwargs: Any
) -> None:
    expected = fitted(trainer_on, 1, make, loaders, **kwargs)
    for k in (2, 3):
        found = fitted(trainer_on, k, make, loaders, **kwargs)
        assert_equal(found[0], expected[0])
        assert found[1] == pytest.approx(expected[1], rel=1e-6)


# Batches of any shape


@dataclass
class Sample:
    X: Any
    y: Any


def collated(make: Callable[[Tensor, Tensor], Any]) -> Callable[[], DataLoader]:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> Any:
        X, y = zip(*samples)
        return make(torch.stack(X), torch.stack(y))

    return lambda: loader(collate_fn=collate)


def checked_names(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    assert batch["names"] == [f"{x:.3f}" for x in batch["y"].tolist()]
    assert batch["none"] is None and batch["scalar"].ndim == 0 and len(batch["array"]) == len(batch["y"])
    assert np.array_equal(batch["array"], batch["y"].numpy())
    return batch["X"], batch["y"]


BATCHES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda X, y: (X, y), lambda b: b),
    "list": (lambda X, y: [X, y], lambda b: b),
    "dict": (lambda X, y: {"X": X, "y": y}, lambda b: (b["X"], b["y"])),
    "nested": (lambda X, y: {"a": [{"X": X}, (y,)]}, lambda b: (b["a"][0]["X"], b["a"][1][0])),
    "list_of_dicts": (lambda X, y: [{"X": X}, {"y": y}], lambda b: (b[0]["X"], b[1]["y"])),
    "namedtuple": (Pair, lambda b: (b.X, b.y)),
    "dataclass": (Sample, lambda b: (b.X, b.y)),
    "leaves": (
        lambda X, y: {
            "names": [f"{x:.3f}" for x in y.tolist()], "X": X, "y": y, "none": None, "scalar": torch.tensor(3.0),
            "array": y.numpy(), "weights": torch.rand(1, 7),
        },
        checked_names,
    ),
    "images": (  # lists of tensors of different lengths, and of targets
        lambda X, y: (
            [torch.cat([x, torch.zeros(n)]) for n, x in enumerate(X)],
            [{"y": v, "boxes": v.repeat(4)} for v in y],
        ),
        lambda b: (torch.stack([x[:4] for x in b[0]]), torch.stack([t["y"] for t in b[1]])),
    ),
    "different_lengths": (lambda X, y: {"X": X, "y": y, "edges": torch.zeros(2, 9)}, lambda b: (b["X"], b["y"])),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:A batch whose parts differ")
@pytest.mark.parametrize("name", BATCHES)
def test_batches(trainer_on: Any, name: str) -> None:
    make, unpack = BATCHES[name]
    assert_fits_alike(trainer_on, lambda: Regression(unpack), collated(make))


def test_batches_nobody_can_split(trainer_on: Any) -> None:
    """They go whole to one device; the others take part in the update."""

    class Numbers(Regression):
        def loss(self, batch: Any) -> Tensor:
            X = torch.tensor(list(map(float, batch.numbers)), dtype=torch.float64)
            return self.net(X.view(1, 4)).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
            return self.loss(batch)

    class Box:
        def __init__(self, numbers: list[int]) -> None:
            self.numbers = numbers

    def unpack(batch: Box) -> tuple[list[int], None]:
        return batch.numbers, None

    with pytest.warns(UserWarning, match="nobody knows how to cut"):
        assert_fits_alike(trainer_on, lambda: Numbers(unpack), lambda: DataLoader(range(12), 4, collate_fn=Box))


class Features(MutableMapping):
    """A user's own mapping, whose copies would share what is inside."""

    def __init__(self, features: Any) -> None:
        self.features = dict(features)

    def __getitem__(self, key: str) -> Tensor:
        return self.features[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.features[key] = value

    def __delitem__(self, key: str) -> None:
        del self.features[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)


def test_mappings_of_ones_own(trainer_on: Any) -> None:
    class Whole(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, _: Any, batch: Any, i: int) -> None:
            assert len(batch["X"]) == (3 if i == 2 else 4)

    def unpack(batch: Any) -> tuple[Tensor, Tensor]:
        return batch["X"], batch["y"]

    make = collated(lambda X, y: Features({"X": X, "y": y}))
    assert_fits_alike(trainer_on, lambda: Regression(unpack), make)
    fitted(trainer_on, 2, lambda: Regression(unpack), make, Whole())


def test_batches_of_one_sample(trainer_on: Any) -> None:
    assert_fits_alike(trainer_on, Regression, lambda: loader(5, 1))


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
@pytest.mark.parametrize("batch_sizes", [(4, 4), (4, 3)])
@pytest.mark.filterwarnings("ignore:A batch whose parts differ")
def test_combined_loaders(trainer_on: Any, mode: Any, batch_sizes: tuple[int, int]) -> None:
    def unpack(batch: Any) -> tuple[Tensor, Tensor]:
        parts = [part for part in batch.values() if part is not None] if isinstance(batch, dict) else [batch]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def make() -> CombinedLoader:
        return CombinedLoader({"a": loader(11, batch_sizes[0]), "b": loader(6, batch_sizes[1])}, mode)

    assert_fits_alike(trainer_on, lambda: Regression(unpack), make)


def test_iterable_dataset_and_workers(trainer_on: Any) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(data(7))

    assert_fits_alike(trainer_on, Regression, lambda: DataLoader(Stream(), 3))
    assert_fits_alike(
        trainer_on, Regression, lambda: loader(num_workers=1, multiprocessing_context="fork"), max_epochs=1
    )


# Transfer hooks


def hooks_of(base: type, is_random: bool) -> type:
    class Hooked(base):  # type: ignore[misc]
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2, batch[1]]

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return [batch[0] + 1, batch[1]]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            noise = torch.randn_like(batch[0]) if is_random else batch[0].std(0)
            return [batch[0] + noise, batch[1]]

    return Hooked


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return loader()

    val_dataloader = train_dataloader


@pytest.mark.parametrize("is_random", [False, True])
def test_transfer_hooks(trainer_on: Any, is_random: bool) -> None:
    assert_fits_alike(trainer_on, hooks_of(Regression, is_random), loader)
    assert_fits_alike(trainer_on, Regression, hooks_of(Data, is_random))


# What callbacks see


class Watch(Callback):
    """Keeps every batch and what the step returned."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _keep(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        self.seen.append(copy.deepcopy((outputs, batch)))

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _keep


class Talkative(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X, y = batch
        scores = self.net(X)
        extras = {
            "scores": scores.detach(), "tokens": X.reshape(-1), "count": (y > 0).sum(), "correct": int((y > 0).sum()),
            "mean": float(y.mean()), "names": [f"{x:.2f}" for x in y.tolist()], "nested": {"pair": (y, X)},
            "none": None,
        }  # fmt: skip
        return {"loss": F.mse_loss(scores[:, 0], y), **extras}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {key: value for key, value in self.training_step(batch, batch_idx).items() if key != "loss"}


@pytest.mark.parametrize("make", [Regression, Talkative])
def test_callbacks_see_batches_and_outputs_of_one_device(trainer_on: Any, make: type) -> None:
    watches = {k: Watch() for k in (1, 2, 3)}
    for k, watch in watches.items():
        fitted(trainer_on, k, make, loader, watch)
    assert len(watches[1].seen) == 2 + 2 * 6
    for k in (2, 3):
        assert_equal(watches[k].seen, watches[1].seen)


@pytest.mark.parametrize("how", ["in_place", "replaced", "key"])
def test_callbacks_change_the_batch(trainer_on: Any, how: str) -> None:
    class Shift(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
            if how == "in_place":
                batch["X"].add_(1)
            elif how == "replaced":
                batch["X"] = batch["X"] + 1
            else:
                batch["shift"] = torch.ones(len(batch["X"]), 1)

    def unpack(batch: Any) -> tuple[Tensor, Tensor]:
        return batch["X"] + batch.get("shift", 0), batch["y"]

    make = collated(lambda X, y: {"X": X, "y": y})
    plain = fitted(trainer_on, 1, lambda: Regression(unpack), make)[0]
    expected = fitted(trainer_on, 1, lambda: Regression(unpack), make, Shift())[0]
    assert not torch.equal(plain["net.0.weight"], expected["net.0.weight"])
    for k in (2, 3):
        assert_equal(fitted(trainer_on, k, lambda: Regression(unpack), make, Shift())[0], expected)


class Skips(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else self.loss(batch)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_skipped_steps(trainer_on: Any) -> None:
    assert_fits_alike(trainer_on, Skips, loader)


class Collects(Regression):
    def on_train_epoch_start(self) -> None:
        self.beta = 0.5 + self.current_epoch
        self.outputs: list[Tensor] = []
        self.rows: list[dict[str, Any]] = []

    on_validation_epoch_start = on_train_epoch_start

    def loss(self, batch: Any) -> Tensor:
        return self.beta * super().loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(batch[0])
        self.rows += [{"y": y, "name": f"{float(y):.3f}"} for y in batch[1]]

    def on_validation_epoch_end(self) -> None:
        self.all = torch.cat(self.outputs), [row["name"] for row in self.rows]


def test_lists_collected_over_an_epoch_are_in_order(trainer_on: Any) -> None:
    X, y = data().tensors
    for k in (1, 2, 3):
        module = Collects()
        trainer_on(k).fit(module, loader(), loader())
        assert torch.equal(module.all[0], X)
        assert module.all[1] == [f"{float(value):.3f}" for value in y]
    assert_fits_alike(trainer_on, Collects, loader)


# Flags and hooks


def test_modes_and_attributes_set_by_callbacks_reach_all_replicas(trainer_on: Any) -> None:
    class Freeze(Callback):
        def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
            module.net[1].eval()
            module.flag = trainer.current_epoch

    class Checked(Regression):
        seen: list[tuple[bool, bool, int]] = []  # noqa: RUF012

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append((self.net[1].training, self.net[0].training, self.flag))  # type: ignore[arg-type]
            return super().training_step(batch, batch_idx)

    Checked.seen.clear()
    fitted(trainer_on, 2, Checked, loader, Freeze())
    assert Checked.seen == [(False, True, 0)] * 6 + [(False, True, 1)] * 6


HOOKS = [name for name in dir(Callback) if name.startswith(("on_", "setup", "teardown"))]


def test_hooks_are_called_in_the_order_of_one_device(trainer_on: Any) -> None:
    def record(k: int) -> list[str]:
        calls: list[str] = []

        def hook(name: str, who: str) -> Callable[..., None]:
            return lambda self, *args, **kwargs: calls.append(f"{who}.{name}")

        Recording = type("Recording", (Callback,), {name: hook(name, "callback") for name in HOOKS})
        own = [name for name in HOOKS if hasattr(LightningModule, name) and name not in ("setup", "teardown")]
        module_type = type("Recorded", (Regression,), {name: hook(name, "module") for name in own})
        trainer = trainer_on(k, callbacks=[Recording()], accumulate_grad_batches=2)
        module = module_type()
        trainer.fit(module, loader(), loader())
        for run in (trainer.validate, trainer.test, trainer.predict):
            run(module, loader())
        return calls

    expected = record(1)
    assert "callback.on_before_zero_grad" in expected
    assert record(2) == expected


# Evaluation without fit, and predictions


class Index(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(i), dtype=torch.float64), torch.tensor(float(i), dtype=torch.float64)


class Counts(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("samples", torch.tensor(float(len(batch[0]))), reduce_fx="sum", on_epoch=True)
        self.log("index_sum", batch[1].sum(), reduce_fx="sum", on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[1]


def test_every_sample_counts_once(trainer_on: Any) -> None:
    trainer, module = trainer_on(3, inference_mode=False), Counts()
    [result] = trainer.test(module, DataLoader(Index(10_007), 500), verbose=False)
    assert result == {"samples": 10_007, "index_sum": 10_007 * 10_006 / 2}
    predictions = trainer.predict(module, DataLoader(Index(10_007), 500))
    assert torch.equal(torch.cat(predictions), torch.arange(10_007, dtype=torch.float64))


class Predicts(Regression):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        X, y = batch
        names = [f"{x:.2f}" for x in y.tolist()]
        return {
            "tensor": self.net(X), "dict": {"scores": self.net(X), "y": y}, "list": [{"y": v} for v in y],
            "names": names, "tuple": tuple(names), "pair": Pair(X, names), "array": y.numpy(), "none": None,
            "rows": list(X),
        }[self.kind]  # fmt: skip


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, *at: Any
    ) -> None:
        self.written.append((prediction, indices, batch, at))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append((predictions, indices))


@pytest.mark.parametrize("kind", ["tensor", "dict", "list", "names", "tuple", "pair", "array", "none", "rows"])
@pytest.mark.parametrize("num_loaders", [1, 2])
def test_predictions_in_the_order_of_the_dataset(trainer_on: Any, kind: str, num_loaders: int) -> None:
    def predicted(k: int) -> Any:
        writer = Writer()
        loaders = [loader(), loader(7)][:num_loaders]
        returned = trainer_on(k, callbacks=[writer]).predict(Predicts(kind), loaders)
        return returned, writer.written

    expected = predicted(1)
    for k in (2, 3):
        assert_equal(predicted(k), expected)


def test_predictions_need_not_be_returned(trainer_on: Any) -> None:
    assert trainer_on(2).predict(Regression(), loader(), return_predictions=False) is None


def test_several_runs_of_one_trainer(trainer_on: Any) -> None:
    def run(k: int) -> Any:
        trainer, module = trainer_on(k, inference_mode=False), Regression()
        results = [trainer.validate(module, loader(), verbose=False), trainer.test(module, loader(7), verbose=False)]
        trainer.fit(module, loader(), loader())
        results.append(trainer.test(module, loader(7), verbose=False))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader(), loader())
        return results, trainer.predict(module, loader()), module.state_dict()

    expected, found = run(1), run(2)
    assert_equal(found[1:], expected[1:])
    for ours, theirs in zip(found[0], expected[0]):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-6)


def test_dataloader_iter_runs_on_one_device(trainer_on: Any) -> None:
    class Iterates(Regression):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    with pytest.warns(UserWarning, match="dataloader_iter: cpu works alone"):
        assert_fits_alike(trainer_on, Iterates, loader)

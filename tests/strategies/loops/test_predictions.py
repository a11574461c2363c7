"""Evaluation without fit, predictions, and several runs of one Trainer."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

Pair = namedtuple("Pair", "X y")


class Index(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(i), dtype=torch.float64), torch.tensor(float(i), dtype=torch.float64)


@pytest.fixture
def Counts(Regression: Any) -> Any:
    class Counts(Regression):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("samples", torch.tensor(float(len(batch[0]))), reduce_fx="sum", on_epoch=True)
            self.log("index_sum", batch[1].sum(), reduce_fx="sum", on_epoch=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[1]

    return Counts


def test_every_sample_counts_once(trainer_on: Any, Counts: Any) -> None:
    trainer, module = trainer_on(3, inference_mode=False), Counts()
    [result] = trainer.test(module, DataLoader(Index(10_007), 500), verbose=False)
    assert result == {"samples": 10_007, "index_sum": 10_007 * 10_006 / 2}
    predictions = trainer.predict(module, DataLoader(Index(10_007), 500))
    assert torch.equal(torch.cat(predictions), torch.arange(10_007, dtype=torch.float64))


@pytest.fixture
def Predicts(Regression: Any) -> Any:
    class Predicts(Regression):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            X, y = batch
            names = [f"{x:.2f}" for x in y.tolist()]
            return {
                "tensor": self.net(X), "dict": {"scores": self.net(X), "y": y}, "list": [{"y": v} for v in y],
                "names": names, "tuple": tuple(names), "pair": Pair(X, names), "array": y.cpu().numpy(), "none": None,
                "rows": list(X),
            }[self.kind]  # fmt: skip

    return Predicts


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
def test_predictions_in_the_order_of_the_dataset(
    trainer_on: Any, Predicts: Any, loader: Any, assert_equal: Any, kind: str, num_loaders: int
) -> None:
    def predicted(k: int) -> Any:
        writer = Writer()
        loaders = [loader(), loader(7)][:num_loaders]
        returned = trainer_on(k, callbacks=[writer]).predict(Predicts(kind), loaders)
        return returned, writer.written

    expected = predicted(1)
    for k in (2, 3):
        assert_equal(predicted(k), expected)


def test_predictions_need_not_be_returned(trainer_on: Any, Regression: Any, loader: Any) -> None:
    assert trainer_on(2).predict(Regression(), loader(), return_predictions=False) is None


def test_several_runs_of_one_trainer(trainer_on: Any, Regression: Any, loader: Any, assert_equal: Any) -> None:
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

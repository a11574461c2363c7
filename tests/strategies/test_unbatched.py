"""Loaders that make no batches of what the dataset gives: a sample, or a batch that was made before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lightning_mgpu.data import batch_loader

GENERATOR = torch.Generator().manual_seed(0)
VECTOR, ROWS = (torch.randn(*shape, generator=GENERATOR, dtype=torch.float64) for shape in ((6,), (6, 3)))
NUMBER, LABELS = torch.tensor(2.0), torch.arange(6)


class Sizes(LightningModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        X = batch["X"] if isinstance(batch, dict) else batch[0] if isinstance(batch, (list, tuple)) else batch
        return torch.full((len(X),), len(X))


@pytest.mark.parametrize(
    ("batch", "is_split"),
    [
        (VECTOR, False),
        ([VECTOR, VECTOR], False),
        ({"X": VECTOR, "y": 5}, False),
        ({"X": ROWS, "y": NUMBER}, False),
        ((ROWS, LABELS), True),
        (ROWS, True),
    ],
)
@pytest.mark.filterwarnings("ignore:The 'predict_dataloader' does not have many workers")
def test_what_may_be_a_sample_stays_whole(
    batch: Any, is_split: bool, trainer_on: Callable[..., Any], recwarn: pytest.WarningsRecorder
) -> None:
    [made] = trainer_on(3).predict(Sizes(), DataLoader([batch], batch_size=None))
    assert made.tolist() == [2 if is_split else 6] * 6
    assert is_split != any("may be a single sample" in str(warning.message) for warning in recwarn)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(LABELS, batch_size=6),
        DataLoader(LABELS, batch_size=None, sampler=BatchSampler(SequentialSampler(LABELS), 6, False)),  # type: ignore
        DataLoader([LABELS], batch_size=None, collate_fn=lambda batch: batch),  # type: ignore[arg-type]
        batch_loader(TensorDataset(LABELS), 6),
    ],
)
def test_batches_of_numbers_are_split(loader: DataLoader, trainer_on: Callable[..., Any]) -> None:
    [made] = trainer_on(3).predict(Sizes(), loader)
    assert made.tolist() == [2] * 6


def test_training_on_samples(Regression: Any, train: Callable[..., LightningModule]) -> None:
    class Module(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.net(batch[None]) - batch.sum()).pow(2).mean()

    loader = DataLoader([VECTOR, VECTOR + 1], batch_size=None)
    one, *others = (train(Module, k, loader=loader) for k in (1, 2, 3))
    for other in others:
        for parameter, expected in zip(other.parameters(), one.parameters()):
            torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=0)

"""Steps that return nothing, collect lists over an epoch, or take an iterator."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def Skips(Regression: Any) -> Any:
    class Skips(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else self.loss(batch)

    return Skips


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_skipped_steps(trainer_on: Any, Skips: Any, loader: Any, assert_fits_alike: Any) -> None:
    assert_fits_alike(trainer_on, Skips, loader)


@pytest.fixture
def Collects(Regression: Any) -> Any:
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

    return Collects


def test_lists_collected_over_an_epoch_are_in_order(
    trainer_on: Any, Collects: Any, data: Any, loader: Any, assert_fits_alike: Any
) -> None:
    X, y = data().tensors
    for k in (1, 2, 3):
        module = Collects()
        trainer_on(k).fit(module, loader(), loader())
        assert torch.equal(module.all[0].cpu(), X)
        assert module.all[1] == [f"{float(value):.3f}" for value in y]
    assert_fits_alike(trainer_on, Collects, loader)


def test_dataloader_iter_runs_on_one_device(
    trainer_on: Any, Regression: Any, loader: Any, assert_fits_alike: Any
) -> None:
    class Iterates(Regression):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self.loss([tensor.to(self.device) for tensor in batch])

    with pytest.warns(UserWarning, match="dataloader_iter: .* works alone"):
        assert_fits_alike(trainer_on, Iterates, loader)

"""The picture of predictions, and models and labels it cannot be drawn of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.callbacks import ConfusionMatrix, PredictionGrid
from lightning_mgpu.models import Classifier, LeNet


def test_prediction_grid(make_data: Callable, make_trainer: Callable, tmp_path: Path) -> None:
    make_trainer(callbacks=[PredictionGrid(num_images=11)]).test(LeNet(), make_data(), verbose=False)
    with Image.open(tmp_path / "predictions.png") as picture:
        picture.load()
        assert picture.format == "PNG" and picture.size[0] > picture.size[1] > 100


def test_other_models_get_no_grid(
    make_trainer: Callable, tmp_path: Path, VectorNet: type[Classifier], files: Callable
) -> None:
    class OfDicts(VectorNet):
        def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:  # type: ignore[override]
            return super().test_step((batch["X"], batch["y"]), batch_idx)

    class OfPixels(VectorNet):
        def test_step(self, batch: Any, batch_idx: int) -> Any:
            return {"logits": batch[0]}

    X, y = torch.zeros(6, 4), torch.arange(6) % 3
    sparse = [{"X": row, "y": label} for row, label in zip(X, y)]
    images = torch.zeros(6, 3, 5, 5)
    for model, samples, has_matrix in (
        (VectorNet(), TensorDataset(X, y), True),
        (OfDicts(), sparse, False),
        (OfPixels(), TensorDataset(images, images[:, 0].long()), False),  # a class for every pixel
    ):
        trainer = make_trainer(callbacks=[PredictionGrid(), ConfusionMatrix()])
        trainer.test(model, DataLoader(samples, 4), verbose=False)  # type: ignore[arg-type]
        assert files(tmp_path) == ({"confusion.png"} if has_matrix else set())
        (tmp_path / "confusion.png").unlink(missing_ok=True)


@pytest.mark.parametrize("label", [-100, 9])
def test_a_grid_names_what_has_a_name(
    label: int, make_data: Callable, make_trainer: Callable, tmp_path: Path, files: Callable
) -> None:
    class Wide(LeNet):
        def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            logits = torch.arange(12.0).expand(len(batch[1]), 12)  # the last class, which has no name
            batch[1].fill_(label)
            return {"logits": logits}

    make_trainer(callbacks=[PredictionGrid()]).test(Wide(), make_data(), verbose=False)
    assert files(tmp_path) == ({"predictions.png"} if label == 9 else set())

"""The table of predictions: a row for every sample, in the order of the dataset, or none at all."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.callbacks import PredictionWriter
from lightning_mgpu.models import LeNet
from tests.callbacks.conftest import VectorNet


def test_predictions_in_dataset_order(
    make_data: Callable, make_trainer: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torch.manual_seed(0)
    data, model = make_data(batch_size=25), LeNet()  # 107 samples: batches of 22, 22, 21, 21, 21
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    make_trainer(callbacks=[PredictionWriter()]).predict(model, data, return_predictions=False)
    assert capsys.readouterr().out == f"predictions: {tmp_path / 'predictions.csv'}\n"
    with (tmp_path / "predictions.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[:3] == ["index", "label", "prediction"] and header[3] == "p(T-shirt/top)" and len(header) == 13
    X, y = data.test_set[0, torch.arange(107)]
    with torch.no_grad():
        probabilities = model(X).softmax(1)
    assert [int(row[0]) for row in rows] == list(range(107))
    assert [int(row[1]) for row in rows] == y.tolist()
    assert [int(row[2]) for row in rows] == probabilities.argmax(1).tolist()
    assert torch.allclose(torch.tensor([[float(p) for p in row[3:]] for row in rows]), probabilities, atol=1e-5)


def test_tensors_of_any_loader_in_dataset_order(make_trainer: Callable, tmp_path: Path) -> None:
    class Regression(VectorNet):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0][:, 0] if self.is_flat else batch[0][:, :2]

    samples = TensorDataset(torch.arange(92.0).reshape(23, 4), torch.arange(23))
    trainer, model = make_trainer(callbacks=[PredictionWriter()]), Regression()

    model.is_flat = True
    trainer.predict(model, DataLoader(samples, 5, shuffle=True))
    wanted = ["index,prediction", *(f"{i},{4 * i}" for i in range(23))]
    assert (tmp_path / "predictions.csv").read_text().splitlines() == wanted
    model.is_flat = False
    trainer.predict(model, DataLoader(samples, 5))
    wanted = ["index,prediction(0),prediction(1)", *(f"{i},{4 * i},{4 * i + 1}" for i in range(23))]
    assert (tmp_path / "predictions.csv").read_text().splitlines() == wanted
    with pytest.warns(UserWarning, match="one loader that says which samples are in a batch"):
        trainer.predict(model, DataLoader([samples[7:12]], batch_size=None))


def test_a_model_without_a_row_a_sample_is_told_so(make_data: Callable, make_trainer: Callable, tmp_path: Path) -> None:
    class Bare(LeNet):
        def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            return {"label": batch[1][::2]}

    with pytest.warns(UserWarning, match=r"predictions\.csv is not written: .*, and a Bare\.predict_step that"):
        make_trainer(callbacks=[PredictionWriter()]).predict(Bare(), make_data())
    assert not list(tmp_path.iterdir())

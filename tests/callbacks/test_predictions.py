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
from lightning_mgpu.models import Classifier, LeNet


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


def test_predictions_of_any_loader_in_dataset_order(
    make_trainer: Callable, tmp_path: Path, VectorNet: type[Classifier]
) -> None:
    samples = TensorDataset(torch.randn(23, 4), torch.arange(23))
    trainer = make_trainer(callbacks=[PredictionWriter()])
    trainer.predict(VectorNet(), DataLoader(samples, 5, shuffle=True))
    written = (tmp_path / "predictions.csv").read_text().splitlines()
    assert written[0] == "index,label,prediction,p(0),p(1),p(2)"
    assert [line.split(",")[:2] for line in written[1:]] == [[str(i), str(i)] for i in range(23)]
    trainer.predict(VectorNet(), DataLoader([samples[7:12]], batch_size=None))  # of which nothing is known
    written = (tmp_path / "predictions.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in written[1:]] == [[str(i), str(7 + i)] for i in range(5)]


@pytest.mark.parametrize("returned", ["tensor", "half", "sum"])
def test_a_model_without_a_row_a_sample_is_told_so(
    returned: str, make_data: Callable, make_trainer: Callable, tmp_path: Path, files: Callable
) -> None:
    class Bare(LeNet):
        def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            table = super().predict_step(batch, batch_idx)
            if returned == "half":
                return {key: value[::2] for key, value in table.items()}
            return {**table, "label": batch[1].sum()} if returned == "sum" else table["probabilities"]

    with pytest.warns(UserWarning, match=r"predictions\.csv is not written: it needs .* a Bare\.predict_step that"):
        predictions = make_trainer(callbacks=[PredictionWriter()]).predict(Bare(), make_data())
    assert len(predictions) == 2 and files(tmp_path) == set()

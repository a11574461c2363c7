"""Confusion matrix, images and predictions.csv of the usual model and of others."""

import csv

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.callbacks import PredictionWriter, TestPictures, pictures
from lightning_mgpu.models import LeNet


@pytest.fixture
def lively():
    torch.manual_seed(0)
    model = LeNet()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_matrix_and_images_are_of_the_test_set(lively, make_data, make_trainer, tmp_path):
    data, callback = make_data(batch_size=25), TestPictures()
    trainer = make_trainer(callbacks=[callback])
    X, y = data.test_set.read(0, torch.arange(107))
    expected = torch.bincount(10 * y + lively(X).argmax(1), minlength=100).view(10, 10)
    pairs = zip(y.tolist(), lively(X).argmax(1).tolist())
    wrong = [(label, found) for label, found in pairs if label != found]
    for _ in range(2):  # the second test starts from nothing
        trainer.test(lively, data, verbose=False)
        assert callback.confusion is not None
        assert torch.equal(callback.confusion.compute().cpu(), expected)
        assert [(label, found) for _, label, found in callback.mistakes] == wrong[:24]
    assert expected.count_nonzero() > 10  # not all in one column
    for name in ("confusion.png", "predictions.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_no_picture_ends_a_run(make_trainer, recwarn, monkeypatch):
    """A label of -100 is in no class; 7 classes are too many here; a wrong label warns."""
    figures = {}
    save = lambda trainer, figure, filename: figures.update({filename: figure})  # noqa: E731
    monkeypatch.setattr(pictures, "save_picture", save)
    monkeypatch.setattr(pictures, "MAX_CLASSES", 6)

    class OnlyLogits(LeNet):
        def test_step(self, batch, *args):
            return {"logits": self(batch[0])}

    X, y = torch.rand(6, 1, 28, 28), torch.tensor([-100, 1, 2, 3, -100, 5])
    for num_classes, names in ((6, {"predictions.png", "confusion.png"}), (7, {"predictions.png"})):
        figures.clear()
        loader = DataLoader(TensorDataset(X, y), 3)
        make_trainer(callbacks=[TestPictures()]).test(OnlyLogits(num_classes=num_classes), loader)
        assert {*figures} == names and len(figures["predictions.png"].axes) in (3, 4)
    assert not [each for each in recwarn if "could not be written" in str(each.message)]

    trainer = make_trainer(callbacks=[TestPictures()])
    with pytest.warns(UserWarning, match="predictions.png could not be written: IndexError"):
        trainer.test(OnlyLogits(), DataLoader(TensorDataset(X, torch.full((6,), 70)), 3))


def test_predictions_in_dataset_order(lively, make_data, make_trainer, tmp_path, capsys):
    data = make_data(batch_size=25)  # 107 samples: batches of 22, 22, 21, 21, 21
    make_trainer(callbacks=[PredictionWriter()]).predict(lively, data, return_predictions=False)
    assert capsys.readouterr().out == f"predictions: {tmp_path / 'predictions.csv'}\n"
    with (tmp_path / "predictions.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    names = data.classes
    assert header == ["index", "label", "prediction", "class", *(f"p({name})" for name in names)]
    X, y = data.test_set.read(0, torch.arange(107))
    probabilities = lively(X).softmax(1).detach()
    found = probabilities.argmax(1).tolist()
    numbers = [[int(text) for text in row[:3]] for row in rows]
    assert numbers == [[i, *pair] for i, pair in enumerate(zip(y.tolist(), found))]
    assert [row[3] for row in rows] == [names[label] for label in found]
    assert max(len(text) for row in rows for text in row[4:]) <= len("1.23456e-05")
    shown = torch.tensor([[float(p) for p in row[4:]] for row in rows])
    assert torch.allclose(shown, probabilities, atol=1e-5)

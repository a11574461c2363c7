"""Confusion matrix, images and predictions.csv of the usual model and of others."""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchvision.transforms.v2 import Normalize

from lightning_mgpu.callbacks import PredictionWriter, TestPictures, pictures
from lightning_mgpu.data import batch_loader
from lightning_mgpu.models import Classifier, LeNet


@pytest.fixture
def lively():
    """Its weights are so large that it predicts every class."""
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


class VectorNet(Classifier):
    """Predicts vectors (N, 4), in batches of any kind."""

    choose: Callable[[Any], Any]

    def __init__(self) -> None:
        super().__init__(num_classes=3)
        self.net = nn.Linear(4, 3)

    def test_step(self, batch, *args):
        return super().test_step(batch if isinstance(batch, dict) else batch[:2], 0)

    def predict_step(self, batch, batch_idx):
        return self.choose(batch[0])


def test_other_models_get_what_can_be_drawn(make_trainer, tmp_path, monkeypatch):
    rows, classes = torch.zeros(6, 4), torch.arange(6) % 3
    callback = TestPictures()
    trainer = make_trainer(callbacks=[callback])
    trainer.test(VectorNet(), DataLoader(TensorDataset(rows, classes, rows), 4), verbose=False)
    assert list(tmp_path.iterdir()) == []
    loader = DataLoader(TensorDataset(rows, classes), 4)
    trainer.test(VectorNet(), [loader, loader], verbose=False)  # the first one's
    assert [path.name for path in tmp_path.iterdir()] == ["confusion.png"]
    assert callback.confusion is not None and callback.confusion.confmat.sum() == 6
    trainer.test(VectorNet(), DataLoader(TensorDataset(rows, classes, rows), 4), verbose=False)
    assert callback.confusion is None  # that of the test before
    images: Any = [{"image": torch.rand(1, 2, 2), "label": i % 3} for i in range(6)]
    monkeypatch.setattr(Classifier, "forward", lambda _, X: X["image"].flatten(1)[:, :3])
    trainer.test(VectorNet(), DataLoader(images, 4), verbose=False)
    assert (tmp_path / "predictions.png").exists()


def test_no_picture_ends_a_run(make_trainer, recwarn, monkeypatch):
    """A label of -100 is in no class; 7 classes are too many here; a wrong label warns."""
    figures: dict[str, Figure] = {}
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


def test_one_scale_for_all_images():
    """Images after `Normalize` look as before it; a dark image of a bright set stays dark."""
    X = torch.rand(9, 3, 4, 4)
    X[0, :, 0, :2] = torch.tensor([0.0, 1.0])
    X[1] /= 4
    normalised = Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])(X)
    for drawn in (normalised, X.bfloat16()):
        figure = pictures.plot_mistakes([(image, 0, 1) for image in drawn], ["a", "b"])
        for axes, image in zip(figure.axes, X):
            found: Any = axes.images[0].get_array()
            expected = image.permute(1, 2, 0)
            torch.testing.assert_close(torch.tensor(found.data), expected, atol=0.01, rtol=0)


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


@pytest.mark.parametrize("is_plain", [True, False])
def test_files_of_the_samples(is_plain, make_trainer, tmp_path):
    """A dataset's `samples`, as of an `ImageFolder`; its own, if it is a list of paths."""

    class Vectors(list):
        def __init__(self, samples: Any) -> None:
            super().__init__(range(5))
            self.samples = samples

    collate: Any = lambda samples: [torch.full((len(samples), 4), 3.0)]  # noqa: E731
    model, make_loader = (
        VectorNet(),
        DataLoader if is_plain else partial(batch_loader, trainer=None),
    )
    model.choose = lambda X: X[:, 0]
    paths = [Path(f"{i}.png") for i in range(5)]
    folder = Vectors([(str(path), 0) for path in paths])
    for dataset, line in (
        (folder, "3,3.png,3.0"),
        (Subset(folder, [4, 2, 0, 1]), "3,1.png,3.0"),
        (Vectors(paths), "3,3.png,3.0"),
        (paths, "3,3.png,3.0"),
        (Vectors([torch.zeros(2)] * 5), "3,3.0"),
        ([*map(str, paths)], "3,3.0"),
    ):
        trainer = make_trainer(callbacks=[PredictionWriter()])
        trainer.predict(model, make_loader(dataset, batch_size=2, collate_fn=collate))
        header, *rows = (tmp_path / "predictions.csv").read_text().splitlines()
        assert rows[3] == line and ("file" in header) == (".png" in line)


def test_tensors_of_any_loader_in_dataset_order(make_trainer, tmp_path):
    samples = TensorDataset(torch.arange(92.0).reshape(23, 4), torch.arange(23))
    trainer, model = make_trainer(callbacks=[PredictionWriter()]), VectorNet()
    flat = ["index,prediction", *(f"{i},{4.0 * i}" for i in range(23))]
    wide = ["index,prediction(0),prediction(1)"]
    wide += [f"{i},{4.0 * i},{4.0 * i + 1}" for i in range(23)]
    for model.choose, wanted in ((lambda X: X[:, 0], flat), (lambda X: X[:, :2], wide)):
        trainer.predict(model, DataLoader(samples, 5, shuffle=wanted is flat))
        assert (tmp_path / "predictions.csv").read_text().splitlines() == wanted
    (tmp_path / "predictions.csv").unlink()
    told = r"predictions\.csv is not written: .* and a VectorNet\.predict_step that"
    for model.choose in (lambda X: {"label": X[::2]}, lambda X: X[:, None].repeat(1, 3, 1)):
        with pytest.warns(UserWarning, match=told):
            trainer.predict(model, DataLoader(samples, 5))
    assert not list(tmp_path.iterdir())

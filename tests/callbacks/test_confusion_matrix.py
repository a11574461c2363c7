"""Counts against a loop over the test set, the picture, and models that give no logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from lightning_mgpu.callbacks import ConfusionMatrix
from lightning_mgpu.callbacks.confusion_matrix import draw
from lightning_mgpu.models import LeNet


def test_counts_are_those_of_the_whole_test_set(make_data: Callable, make_trainer: Callable, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data, matrix = LeNet(), make_data(batch_size=25), ConfusionMatrix()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    trainer = make_trainer(callbacks=[matrix])
    for _ in range(2):  # the second test starts from nothing
        trainer.test(model, data, verbose=False)
        X, y = data.test_set[0, torch.arange(107)]
        expected = torch.zeros(10, 10, dtype=torch.long)
        with torch.no_grad():
            for label, prediction in zip(y.tolist(), model(X).argmax(1).tolist()):
                expected[label, prediction] += 1
        assert matrix.counts is not None and torch.equal(matrix.counts, expected)
        assert expected.count_nonzero() > 10  # not all in one column
    with Image.open(tmp_path / "confusion.png") as picture:
        picture.load()
        assert picture.format == "PNG" and min(picture.size) > 500


def test_classes_are_named_with_their_share_of_right_answers() -> None:
    axes = draw(torch.tensor([[3, 1], [0, 0]]), ["shirt", "bag"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["shirt 75%", "bag 0%"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["shirt", "bag"]
    assert [text.get_text() for text in axes.texts] == ["3", "1", "0", "0"]


@pytest.mark.parametrize(
    "outputs", [None, {"loss": 1}, {"logits": torch.zeros(4, 1, 1)}, {"logits": torch.zeros(3, 2)}]
)
def test_other_models_get_no_picture(outputs: Any, make_trainer: Callable, make_data: Callable, tmp_path: Path) -> None:
    class Other(LeNet):
        def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            return outputs

    make_trainer(callbacks=[ConfusionMatrix()]).test(Other(), make_data(), verbose=False)
    assert list(tmp_path.iterdir()) == []

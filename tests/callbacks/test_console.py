"""What the header and the lines say of models, batches and epochs that are not the usual ones."""

from collections.abc import Callable

import pytest
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_mgpu.callbacks import EpochLines, RunHeader
from lightning_mgpu.callbacks.console import run_facts
from lightning_mgpu.models import Classifier, LeNet


def test_lazy_layers_are_not_counted(make_trainer: Callable) -> None:
    class Lazy(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(10))

    trainer, model = make_trainer(), Lazy()
    assert run_facts(trainer, model)["num_parameters"] == 9
    assert RunHeader().lines(trainer, model)["model"].startswith("Lazy, 9 parameters and 2 lazy ones of unknown size, ")


@pytest.mark.parametrize(("limits", "begin"), [({}, "epoch 1/1  "), ({"max_epochs": -1, "max_steps": 2}, "epoch 1  ")])
def test_epoch_lines_name_the_last_epoch_where_it_is_known(
    limits: dict[str, int], begin: str, make_data: Callable, make_trainer: Callable, capsys: pytest.CaptureFixture
) -> None:
    trainer = make_trainer(callbacks=[EpochLines()], enable_progress_bar=True, limit_train_batches=2, **limits)
    trainer.fit(LeNet(), make_data())
    assert capsys.readouterr().out.startswith(begin)


class Plain(LightningDataModule):
    """With a loader Lightning hands every process batches of its own from."""

    batch_size = 4

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(16), self.batch_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "plain", "expected"),
    [
        ("ddp", True, "8 global, 4 per device"),
        ("ddp", False, "64 global, 32 per device"),
        ("manual_allreduce", True, "4 global, 2 per device"),
    ],
)
def test_the_batch_is_the_one_trained_on(
    strategy: str, plain: bool, expected: str, make_data: Callable, make_trainer: Callable
) -> None:
    trainer, header, model = make_trainer(strategy=strategy, devices=2), RunHeader(), LeNet()
    trainer.datamodule = Plain() if plain else make_data()
    header.setup(trainer, model, "fit")
    assert header.lines(trainer, model)["batch"] == expected

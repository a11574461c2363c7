"""What the header and the lines say of models, batches and epochs that are not the usual ones."""

from collections.abc import Callable

import pytest
from torch import nn

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
    assert RunHeader.lines(trainer, model)["model"].startswith("Lazy, 9 parameters and 2 lazy ones of unknown size, ")


@pytest.mark.parametrize(("limits", "begin"), [({}, "epoch 1/1  "), ({"max_epochs": -1, "max_steps": 2}, "epoch 1  ")])
def test_epoch_lines_name_the_last_epoch_where_it_is_known(
    limits: dict[str, int], begin: str, make_data: Callable, make_trainer: Callable, capsys: pytest.CaptureFixture
) -> None:
    trainer = make_trainer(callbacks=[EpochLines()], enable_progress_bar=True, limit_train_batches=2, **limits)
    trainer.fit(LeNet(), make_data())
    assert capsys.readouterr().out.startswith(begin)

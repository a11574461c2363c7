"""What the header and the lines say of models, batches and epochs that are not the usual ones."""

from collections.abc import Callable

from torch import nn

from lightning_mgpu.callbacks import RunHeader
from lightning_mgpu.callbacks.console import run_facts
from lightning_mgpu.models import Classifier


def test_lazy_layers_are_not_counted(make_trainer: Callable) -> None:
    class Lazy(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(10))

    trainer, model = make_trainer(), Lazy()
    assert run_facts(trainer, model)["num_parameters"] == 9
    assert RunHeader.lines(trainer, model)["model"].startswith("Lazy, 9 parameters and 2 lazy ones of unknown size, ")

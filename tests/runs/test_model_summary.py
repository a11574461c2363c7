"""`model.txt`: a table of the layers on any device, which changes nothing and ends no run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from lightning_mgpu.runs.record import summary


class Model(LightningModule):
    """Has layers that move in training mode, and draws random numbers."""

    def __init__(self, example: Any, compiled: bool = False) -> None:
        super().__init__()
        self.example_input_array = example
        self.compiled = compiled

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        if self.compiled:
            self.net.compile(backend=fails)

    def forward(self, X: Tensor) -> Tensor:
        return self.net(X + torch.rand(()))

    def training_step(self, X: Tensor, batch_idx: int) -> Tensor:
        return self(X).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fails(*args: Any) -> Any:
    raise AssertionError("compiled for a table")


def state(module: Model) -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), module.net.training, module.net[1].running_mean.tolist()


@pytest.fixture
def on_fit_start(make_trainer: Callable[..., Trainer]) -> Callable[[Model], tuple[str, Any, Any]]:
    """The text where a run writes it, and what the module is like before and after."""

    def run(model: Model) -> tuple[str, Any, Any]:
        seen: list[Any] = []

        def look(trainer: Trainer, module: LightningModule) -> None:
            before = state(module)
            seen[:] = [summary(module), before, state(module)]

        trainer = make_trainer(callbacks=[LambdaCallback(on_fit_start=look)], max_steps=0)
        trainer.fit(model, torch.utils.data.DataLoader(torch.ones(8, 4), 8))
        return tuple(seen)

    return run


@pytest.mark.parametrize("compiled", [False, True])
def test_a_table_with_sizes_changes_nothing(
    on_fit_start: Callable[..., Any], compiled: bool
) -> None:
    text, before, after = on_fit_start(Model(torch.ones(2, 4), compiled))
    assert "[2, 4]" in text and "[2, 3]" in text and "15 " in text
    assert after == before


@pytest.mark.parametrize("example", [torch.ones(2, 5), "no tensor", {"Z": torch.ones(2, 4)}])
def test_a_model_that_does_not_take_its_example(
    on_fit_start: Callable[..., Any], example: Any
) -> None:
    """It trains all the same."""
    text, before, after = on_fit_start(Model(example))
    assert "BatchNorm1d" in text and "no sizes: with example_input_array, forward raises " in text
    assert after == before


MODEL = """
import torch
from torch import nn
from lightning_mgpu.models.classifier import Classifier

class Late(Classifier):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.example_input_array = torch.zeros(1, 1, 28, 28)

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
"""


def test_layers_that_are_built_late(main: Callable[..., int], root: Path, tmp_path: Path) -> None:
    """In `configure_model`, after `setup`."""
    (tmp_path / "late.py").write_text(MODEL)
    data = (
        f"--data.root={root}",
        "--data.val_size=101",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
    )
    assert main("fit", "--model=late.Late", *data, "--trainer.max_epochs=1", "--run_dir=run") == 0
    assert "[1, 784]" in (tmp_path / "run" / "model.txt").read_text()
    ckpt = "--ckpt_path=run/checkpoints/last.ckpt"
    for name in ("validate", "test", "predict"):
        assert main(name, *data, ckpt, f"--run_dir={name}") == 0
        assert "[1, 784]" in (tmp_path / name / "model.txt").read_text()

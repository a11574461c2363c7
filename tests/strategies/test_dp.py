"""`dp`: training on several devices of one process is that of one device.

Reference runs are Lightning's own, on one CPU. `-p tests.simulated.devices` has devices that
differ.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_mgpu.strategies import DataParallelStrategy

IS_SIMULATED = torch._C._get_privateuse1_backend_name() == "sim"
SECOND = torch.device("sim:1" if IS_SIMULATED else "cpu")


def loader(num_samples: int = 27, batch_size: int = 8) -> DataLoader:
    """X (N, 6), classes (N,) in float64. Uneven shards: 8, 8, 8, 3 samples."""
    X = torch.randn(num_samples, 6, generator=torch.manual_seed(7), dtype=torch.float64)
    return DataLoader(TensorDataset(X, X[:, :4].argmax(1)), batch_size)


def sgd(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)


def adamw(module: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def lbfgs(module: nn.Module) -> Any:
    return torch.optim.LBFGS(module.parameters(), 0.01, max_iter=3)


class Classifier(LightningModule):
    """Logs losses and metrics in all the usual ways."""

    def __init__(self, net: nn.Module | None = None, optimizer: Callable[..., Any] = sgd) -> None:
        super().__init__()
        self.net = net or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.configure_optimizers = lambda: optimizer(self)  # type: ignore[method-assign]
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.metrics = MetricCollection([MulticlassF1Score(4), MulticlassAccuracy(4)])
        self.num_steps = 0
        self.double()

    def forward(self, X: Tensor) -> Tensor:
        return self.net(X)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        X, y = batch
        assert self.device == X.device
        self.num_steps += 1
        loss = F.cross_entropy(self(X), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.accuracy(self(X), y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.metrics.update(logits, batch[1])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.metrics.compute())
        self.metrics.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"X": batch[0], "y": batch[1].numpy(force=True), "names": ["n"] * len(batch[0])}


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, X: Tensor) -> Tensor:
        return self.head(self.lstm(X.reshape(-1, 3, 2))[0][:, -1])


def tied_net() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Linear(6, 4))


def weight_norm_net() -> nn.Module:
    old = torch.nn.utils.weight_norm(nn.Linear(6, 6))
    new = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    return nn.Sequential(old, nn.Tanh(), new)


def frozen_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 4))


def hooked_net() -> nn.Module:
    net = nn.Linear(6, 4)
    net.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return net


def compiled_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    net.compile()
    return net


class PenalisedGradient(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        gradients = torch.autograd.grad(loss, [*self.net.parameters()], create_graph=True)
        return loss + 0.1 * sum(gradient.sum() for gradient in gradients)


@pytest.fixture
def fit(make_trainer: Callable[..., Trainer]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """The trained module, and what was logged."""

    def run(make: Callable[[], Any], k: int = 1, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        seed_everything(1, verbose=False)
        given = {"max_epochs": 2, "strategy": "dp" if k > 1 else "auto", "devices": k, **kwargs}
        module, trainer = make(), make_trainer(**given)
        trainer.fit(module, loader(), loader(13, 4))
        return module, {**trainer.callback_metrics}

    return run


def assert_same(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-10) -> None:
    found = {name: value.detach().cpu() for name, value in found.items()}
    torch.testing.assert_close(found, {**expected}, rtol=rtol, atol=1e-13)


RUNS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "sgd": (Classifier, {}),
    "adamw, a scheduler": (lambda: Classifier(optimizer=adamw), {}),
    "lbfgs": (lambda: Classifier(optimizer=lbfgs), {}),
    "clipping by norm": (Classifier, {"gradient_clip_val": 0.1}),
    "clipping by value": (
        Classifier,
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "accumulation": (Classifier, {"accumulate_grad_batches": 3}),
    "lstm": (lambda: Classifier(LSTM()), {}),
    "tied weights": (lambda: Classifier(tied_net()), {}),
    "weight norm": (lambda: Classifier(weight_norm_net()), {}),
    "frozen": (lambda: Classifier(frozen_net()), {}),
    "a hook on a weight": (lambda: Classifier(hooked_net()), {}),
    "gradients of gradients": (PenalisedGradient, {}),
    "compiled": (lambda: Classifier(compiled_net()), {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_training_is_that_of_one_device(fit: Callable[..., Any], name: str) -> None:
    make, kwargs = RUNS[name]
    if name == "compiled" and (shutil.which("g++") is None or IS_SIMULATED):
        pytest.skip("Inductor needs g++, and generates no code for simulated devices")
    if name == "lstm" and IS_SIMULATED:
        pytest.skip("simulated devices have no fused cells of recurrent layers")
    module, logged = fit(make, 1, **kwargs)
    for k in (2, 3):
        other, other_logged = fit(make, k, **kwargs)
        assert_same(other.state_dict(), module.state_dict())
        assert_same(other_logged, logged, rtol=1e-6)
        assert other.num_steps == k * module.num_steps
